"""Make a file by a command, once for however many processes ask: ``python native_build.py FILE COMMAND [ARGUMENTS]``.

It runs alongside a process that may end before the file is there, and imports nothing but Python's own library. The
command is given ``-o`` and a path next to FILE; its errors go to FILE.log.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path


def build(file: Path, command: list[str]) -> int:
    """Make the file unless it exists, and return the command's exit code; other processes wait meanwhile."""
    # The system opens the lock again however this process ends.
    with Path(f"{file}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            return 0
        for unfinished in file.parent.glob(f"{file.name}.*.part"):  # Of processes that were killed: the lock is ours.
            unfinished.unlink()
        part = Path(f"{file}.{os.getpid()}.part")
        result = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, check=False)
        if result.returncode == 0:
            part.replace(file)  # whole or not at all
        else:
            message = (result.stderr + result.stdout).strip() or f"it ended with {result.returncode} and said nothing"
            Path(f"{file}.log").write_text(message)
        return result.returncode


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]), sys.argv[2:]))
