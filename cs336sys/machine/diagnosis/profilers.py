"""Checks of NVIDIA's profilers."""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336sys.errors import CapabilityError
from cs336sys.machine.diagnosis.software import Check, faulty
from cs336sys.machine.system import library_loads, run_tool

# Where profilers are installed that are not on PATH: by NVIDIA's packages, the CUDA toolkit, Ubuntu's packages, conda.
INSTALL_ROOTS = ("/opt/nvidia", "/usr/local", "/usr/lib", sys.prefix)

# Nsight Compute brings a whole Nsight Systems in its host folder.
_NSYS_PATTERNS = (
    "cuda*/bin/nsys",
    "nsight-systems/bin/nsys",
    "nsight-systems/*/bin/nsys",
    "cuda*/nsight-systems-*/bin/nsys",
    "nsight-compute/*/host/target-linux-*/nsys",
    "cuda*/nsight-compute-*/host/target-linux-*/nsys",
    "nsight-compute-*/host/target-linux-*/nsys",
)
_NCU_PATTERNS = ("cuda*/bin/ncu", "nsight-compute/ncu", "nsight-compute/*/ncu", "cuda*/nsight-compute-*/ncu")

# The variable that names the nsys to use, whatever else is installed.
NSYS_VARIABLE = "CS336SYS_NSYS"

DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")


@dataclass(frozen=True)
class Profiler:
    """An installed profiler that runs."""

    path: Path
    version: str


def find_nsys() -> Profiler | None:
    """Find ``nsys``: the one that CS336SYS_NSYS names, the one on PATH, or the newest in the usual install folders.

    None where none of them runs; a CapabilityError where CS336SYS_NSYS names one that does not.
    """
    program = os.environ.get(NSYS_VARIABLE)
    if not program:
        return _find("nsys", _NSYS_PATTERNS)
    if (profiler := _running_profiler(Path(program))) is None:
        raise CapabilityError(f"{NSYS_VARIABLE}={program}: this does not run as nsys; name the program, or unset it")
    return profiler


def _find(name: str, patterns: Sequence[str]) -> Profiler | None:
    """Return the first installed profiler that runs."""
    # The CUDA toolkit has a wrapper, which fails where the profiler that it would start is not installed.
    return next(filter(None, map(_running_profiler, _installed_profilers(name, patterns))), None)


def _running_profiler(program: Path) -> Profiler | None:
    match = re.search(r"[Vv]ersion (\d[\d.]*\d)", run_tool([str(program), "--version"]) or "")
    return Profiler(program, match[1]) if match else None


def _installed_profilers(name: str, patterns: Sequence[str]) -> list[Path]:
    """Find the program on PATH, and after it those in install folders, by the version in their path, newest first."""
    on_path = shutil.which(name)
    paths = {path for root in INSTALL_ROOTS for pattern in patterns for path in Path(root).glob(pattern)}

    def version(path: Path) -> list[int]:
        """Return the numbers of a version such as 2025.3.1; none where the path has no version, which comes last."""
        match = re.search(r"20\d\d\.[\d.]+", str(path))
        return list(map(int, re.findall(r"\d+", match[0]))) if match else []

    newest_first = sorted(paths, key=version, reverse=True)
    return [Path(on_path), *newest_first] if on_path else newest_first


def check_nsys() -> list[Check]:
    """Check Nsight Systems and, where it is installed, the importer without which it leaves no report."""
    try:
        nsys = find_nsys()
    except CapabilityError as error:
        return [faulty("nsys", str(error), fix="named nsys", variable=NSYS_VARIABLE)]
    if nsys is None:
        return [faulty("nsys", _absence("nsys", _NSYS_PATTERNS), fix="nsys")]
    importer = Check("nsys importer", "finds libdw.so.1")
    if not makes_reports(nsys.path):
        state = "lacks libdw.so.1: nsys would leave a .qdstrm file and no report"
        importer = faulty("nsys importer", state, fix="nsys importer")
    return [Check("nsys", f"{nsys.version} at {nsys.path}"), importer]


def _absence(name: str, patterns: Sequence[str]) -> str:
    paths = _installed_profilers(name, patterns)
    return f"{paths[0]} does not run" if paths else "not found"


def makes_reports(nsys: Path) -> bool:
    """Return whether nsys can write a report: its importer, in a folder next to its own, needs elfutils' libdw."""
    installation = nsys.resolve().parent.parent
    return library_loads("libdw.so.1") or any(installation.glob("*/libdw.so.1"))


def check_ncu() -> Check:
    """Check Nsight Compute, and that the driver lets this user read performance counters."""
    ncu = _find("ncu", _NCU_PATTERNS)
    if ncu is None:
        return faulty("ncu", _absence("ncu", _NCU_PATTERNS), fix="ncu")
    state, needs_root = f"{ncu.version} at {ncu.path}", False
    with contextlib.suppress(OSError):
        needs_root = "RmProfilingAdminOnly: 1" in DRIVER_PARAMETERS.read_text()
    if needs_root and os.geteuid() != 0:
        return faulty("ncu", f"{state}; the driver keeps performance counters from users", fix="counters")
    return Check("ncu", state)
