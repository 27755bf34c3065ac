"""Checks of the operating system, memory, disk, Python, torch and Triton, and of NVIDIA's profilers."""

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cs336sys.errors import CapabilityError
from cs336sys.findings import sentence
from cs336sys.machine.late_imports import why_no_triton
from cs336sys.machine.system import installed_version, memory_gib, run_tool
from cs336sys.processes.parent import python_module

Verdict = Literal["ok", "warn", "missing"]


@dataclass(frozen=True)
class Check:
    """One check: what was looked for and what was found."""

    name: str
    found: str
    # ``warn``: a command is slower, disturbed or unavailable; ``missing``: cs336sys cannot work like this.
    verdict: Verdict = "ok"
    # What to do about it, one sentence with the command to type; None when there is nothing to do.
    fix: str | None = None


def faulty(
    name: str, state: str, fix: str, verdict: Verdict = "warn", *, package: str = __package__, **facts: Any
) -> Check:
    """Return a check that is not ``ok``; its fix is a block of the package's ``sentences.jinja``, filled by facts."""
    return Check(name, state, verdict, sentence(package, fix, **facts))


def faulty_if(is_met: bool, name: str, state: str, fix: str, **facts: Any) -> Check:
    """Return a check that warns where a condition is met, and else is ``ok``."""
    return faulty(name, state, fix, **facts) if is_met else Check(name, state)


# The probe takes 1.6 s in the interpreter, on two cores; on a GPU Triton first compiles its C launcher and the kernel.
PROBE_TIMEOUT_S = 60.0


def check_python() -> Check:
    version, supported = platform.python_version(), SpecifierSet()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        supported = SpecifierSet(importlib.metadata.metadata("cs336sys")["Requires-Python"] or "")
    if supported.contains(version, prereleases=True):
        return Check("Python", version)
    return faulty("Python", f"{version}, supported is {supported}", fix="python", verdict="missing")


def check_torch() -> Check:
    """Check that torch is installed, can be imported, and has a supported version."""
    supported = required("torch", by="cs336sys")
    missing = partial(faulty, "torch", verdict="missing", library="torch", versions=supported)
    version = installed_version("torch")
    if version is None:
        return missing("not installed", fix="install")
    try:
        import torch  # noqa: F401
    except Exception as error:
        # A broken installation fails in many ways: a missing library, a clash of versions.
        return missing(f"{version}, import fails: {error}", fix="reinstall")
    if not supported.contains(version, prereleases=True):  # Versions of nightly builds are prereleases.
        return missing(f"{version}, supported is {supported}", fix="install")
    return Check("torch", version)


def check_triton() -> Check:
    """Check Triton's version against cs336sys's requirement and against the version that this torch was built with."""
    version = installed_version("triton")
    supported, pinned = required("triton", by="cs336sys"), required("triton", by="torch")
    if platform.system() != "Linux" and version is None:
        return faulty("Triton", f"not on {platform.system()}", fix="not linux")
    missing = partial(faulty, "Triton", verdict="missing", library="triton", versions=pinned or supported)
    if version is None:
        return missing("not installed", fix="install")
    if (reason := why_no_triton()) is not None:
        return missing(f"{version}, needed is {reason}", fix="reinstall")
    if not supported.contains(version, prereleases=True):  # Versions of nightly builds are prereleases.
        return missing(f"{version}, supported is {supported}", fix="install")
    if not pinned.contains(version, prereleases=True):
        return missing(f"{version}, this torch wants {pinned}", fix="install", verdict="warn")
    return Check("Triton", f"{version}, {'as this torch wants' if pinned else 'this torch names none that it needs'}")


def check_triton_interpreter() -> Check:
    """Check Triton's interpreter, in which kernels are tested without a GPU."""
    numpy = installed_version("numpy")
    outcome = probe_triton("cpu")
    if outcome == "ok":
        return Check("Triton interpreter", f"works, numpy {numpy}")
    return faulty("Triton interpreter", f"{outcome}; numpy {numpy}", fix="triton probe", device="cpu")


def probe_triton(device: str) -> str:
    """Run a kernel in a process of its own, on ``cuda`` or in the interpreter (``cpu``): "ok" or what went wrong."""
    output = run_tool(
        python_module("cs336sys.machine.diagnosis.triton_probe", device),
        timeout_s=PROBE_TIMEOUT_S,
        variables={"TRITON_INTERPRET": "1" if device == "cpu" else "0"},
        starts_others=True,
    )
    if output is None:
        return f"the process died or was not done after {PROBE_TIMEOUT_S:g} s"
    return output.splitlines()[-1] if output else "no answer"  # warnings may come before the answer


def check_compiler() -> Check:
    """Check for the C compiler and Python's headers that Triton needs, and for a C++ compiler.

    C++ serves torch.compile on a CPU and the attention kernels, whose calls on a GPU go through Python without it.
    """
    for variable in ("CC", "CXX"):
        tool = os.environ.get(variable)
        if tool and shutil.which(tool) is None:
            return faulty("C compiler", f"{variable}={tool}: no such program", fix="named compiler", variable=variable)
    c, cpp = _compiler("CC", "gcc", "clang"), _compiler("CXX", "g++", "clang++")
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    state = f"C {c or 'none'}, C++ {cpp or 'none'}, Python.h {'there' if has_headers else 'not there'}"
    # The first that lacks: without C and the headers Triton compiles nothing.
    fix = "no c" if c is None else "no headers" if not has_headers else "no cpp"
    return faulty_if(c is None or not has_headers or cpp is None, "C compiler", state, fix=fix)


def _compiler(variable: str, *names: str) -> str | None:
    """Return the compiler that the variable names, or else the first of these, that is installed."""
    return next((name for name in (os.environ.get(variable), *names) if name and shutil.which(name)), None)


def check_attention() -> list[Check]:
    """Check whether attention calls run in C++, which costs the CPU less, and whether measured settings are kept."""
    import torch

    if not torch.cuda.is_available():
        return [Check("attention calls", "no CUDA GPU to launch kernels on")]
    module = "cs336sys.kernels.attention.native_probe"  # In a process of its own: machine/ must not import kernels/.
    output = run_tool(python_module(module), timeout_s=PROBE_TIMEOUT_S, starts_others=True)
    if not output:
        return [faulty("attention calls", "no answer", fix="attention probe", module=module)]
    # [state, fix or None] by the name of the check, in the probe's last line: what it imports may print, too.
    answers = json.loads(output.splitlines()[-1])
    return [Check(name, state, "ok" if fix is None else "warn", fix) for name, (state, fix) in answers.items()]


def required(package: str, *, by: str) -> SpecifierSet:
    """Return the versions of ``package`` that the package ``by`` requires on this platform; any if it names none."""
    try:
        requirements = map(Requirement, importlib.metadata.requires(by) or ())
    except importlib.metadata.PackageNotFoundError:
        return SpecifierSet()
    for requirement in requirements:
        # Requirements of extras do not count.
        if requirement.name == package and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
            return requirement.specifier
    return SpecifierSet()


# A process with torch and one small layer takes 0.4 GiB (torch 2.13, CPU); a command has two, plus compilers.
ENOUGH_RAM_GIB = 4.0
# One Nsight Systems trace with default options took 2 GB (H200, three matrix products); compiler caches come on top.
ENOUGH_DISK_GIB = 5.0
# NCCL and data loaders share memory through it; a container's default of 64 MiB stops NCCL with "No space left".
ENOUGH_SHARED_MEMORY_GIB = 1.0

SHARED_MEMORY = Path("/dev/shm")


def check_host() -> list[Check]:
    """Check memory and disks; this folder and the temporary one are one check if one file system holds both."""
    checks = [check_ram()]
    if SHARED_MEMORY.exists():
        checks.append(check_shared_memory())
    folders = {Path(folder).stat().st_dev: folder for folder in (tempfile.gettempdir(), ".")}  # The last one stays.
    checks += [check_disk(folder) for folder in reversed(folders.values())]  # This folder first.
    if "microsoft" in platform.release().lower():  # The Windows Subsystem for Linux.
        checks.append(faulty("WSL2", "this is WSL2", fix="wsl"))
    return checks


def check_ram() -> Check:
    total, available = memory_gib()
    if total is None or available is None:
        return Check("RAM", "unknown")
    state = f"{available:.1f} of {total:.1f} GiB available"
    return faulty_if(available < ENOUGH_RAM_GIB, "RAM", state, fix="ram")


def check_shared_memory() -> Check:
    usage = shutil.disk_usage(SHARED_MEMORY)
    state = f"{usage.free / 2**30:.2f} of {usage.total / 2**30:.2f} GiB free"
    return faulty_if(usage.free / 2**30 < ENOUGH_SHARED_MEMORY_GIB, "/dev/shm", state, fix="shared memory")


def check_disk(folder: str) -> Check:
    name = "disk, this folder" if folder == "." else "disk, temporary files"
    free_gib = shutil.disk_usage(folder).free / 2**30
    return faulty_if(free_gib < ENOUGH_DISK_GIB, name, f"{free_gib:.1f} GiB free", fix="disk", folder=folder)


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


def library_loads(name: str) -> bool:
    """Return whether the dynamic loader finds a shared library and all that it depends on."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


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
