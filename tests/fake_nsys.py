"""A program that answers as nsys does, and makes reports out of a database that is given to it."""

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import json, os, shutil, subprocess, sys
HERE = {here!r}
arguments = sys.argv[1:]
def option(name):
    return next(a.split("=", 1)[1] for a in arguments if a.startswith("--" + name + "="))
if arguments == ["--version"]:
    print("NVIDIA Nsight Systems version 2025.3.1.0-253135822126v0")
elif arguments[0] == "profile":
    with open(HERE + "/options.json", "w") as stream:
        json.dump(arguments, stream)
    command = arguments[next(i for i, a in enumerate(arguments) if i and not a.startswith("--")):]
    if {outcome!r}:
        with open(command[-1], "w") as stream:
            stream.write({outcome!r})
    if {leaves_report!r}:
        shutil.copyfile(HERE + "/database", option("output") + ".nsys-rep")
    else:
        print("Importer error status: libdw.so.1 cannot be loaded.", file=sys.stderr)
        sys.exit(1)
elif arguments[0] == "export":
    shutil.copyfile(arguments[-1], option("output"))
"""


def put_nsys(
    folder: Path,
    database: Path,
    *,
    outcome: str = '{"status": "ok", "reason": null}',
    leaves_report: bool = True,
) -> Path:
    """An executable ``nsys``.

    Args:
        database: what its reports hold.
        outcome: what the profiled process says; empty if it dies first.
        leaves_report: False for an nsys without its importer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "database").write_bytes(database.read_bytes())
    program = folder / "nsys"
    program.write_text(
        _PROGRAM.format(python=sys.executable, here=str(folder), outcome=outcome, leaves_report=leaves_report)
    )
    program.chmod(0o755)
    return program
