"""Checks of memory, disk and operating system."""

import shutil
import tempfile
from pathlib import Path

from cs336sys.measure.diagnosis.check import Check
from cs336sys.measure.system import is_wsl, memory_gib

# A process with torch and one small layer takes 0.4 GiB (torch 2.13, CPU); a command has two, and compilers beside.
ENOUGH_RAM_GIB = 4.0
# One Nsight Systems trace with default options took 2 GB (H200, three matrix products); compiler caches come on top.
ENOUGH_DISK_GIB = 5.0
# NCCL and data loaders share memory through it; a container's default of 64 MiB stops NCCL with "No space left".
ENOUGH_SHARED_MEMORY_GIB = 1.0

SHARED_MEMORY = Path("/dev/shm")


def check_host() -> list[Check]:
    checks = [check_ram()]
    if SHARED_MEMORY.exists():
        checks.append(check_shared_memory())
    # One row when both are on one file system.
    folders = {Path(folder).stat().st_dev: folder for folder in (tempfile.gettempdir(), ".")}
    checks += [check_disk(folder) for folder in reversed(folders.values())]
    if is_wsl():
        checks.append(
            Check(
                "WSL2",
                "this is WSL2",
                "warn",
                "Open Nsight Systems reports from a Windows folder: `cp report.nsys-rep /mnt/c/Users/Public/`.",
            )
        )
    return checks


def check_ram() -> Check:
    total, available = memory_gib()
    if total is None or available is None:
        return Check("RAM", "unknown")
    found = f"{available:.1f} of {total:.1f} GiB available"
    if available < ENOUGH_RAM_GIB:
        return Check("RAM", found, "warn", "End other programs: `ps aux --sort -rss | head` shows the largest.")
    return Check("RAM", found)


def check_shared_memory() -> Check:
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{usage.free / 2**30:.2f} of {usage.total / 2**30:.2f} GiB free"
    if usage.free / 2**30 < ENOUGH_SHARED_MEMORY_GIB:
        return Check("/dev/shm", found, "warn", "Several ranks need more: start the container with `--shm-size=8g`.")
    return Check("/dev/shm", found)


def check_disk(folder: str) -> Check:
    name = "disk, this folder" if folder == "." else "disk, temporary files"
    free_gib = shutil.disk_usage(folder).free / 2**30
    found = f"{free_gib:.1f} GiB free"
    if free_gib < ENOUGH_DISK_GIB:
        fix = "Free some; this shows what is large: `du -xh --max-depth 2 . | sort -h | tail`."
        if folder != ".":
            fix = "Free some, or use another folder: `export TMPDIR=/path/with/space`."
        return Check(name, found, "warn", fix)
    return Check(name, found)
