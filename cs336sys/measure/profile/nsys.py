"""Runs Nsight Systems: ``nsys profile`` around a program, ``nsys export`` to a database. Standard library only."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.measure.diagnosis.profilers import Profiler, makes_reports
from cs336sys.processes.parent import run_guarded_program

NAME = "Nsight Systems"

# CUDA and NVTX only: with nsys's defaults a program of three matrix products made a report of 2 GB, with these one of
# 88 KB. Kernels of CUDA graphs are traced one by one, which is not the default.
PROFILE_OPTIONS = (
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--cuda-graph-trace=node",
    "--force-overwrite=true",
)

REPORT_SUFFIXES = (".nsys-rep", ".qdrep")


def is_profiled() -> bool:
    """Whether this process was started by ``nsys profile``, which sets these variables for what it starts."""
    injections = (os.environ.get(name, "") for name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD"))
    return "NSYS_PROFILING_SESSION_ID" in os.environ or any("ToolsInjection" in path for path in injections)


def unusable(nsys: Profiler | None) -> str | None:
    """Why this nsys cannot make reports; None if it can."""
    if nsys is None:
        return "nsys is not installed"
    if not makes_reports(nsys.path):
        return f"nsys {nsys.version} lacks libdw.so.1"
    return None


def profile(nsys: Profiler, command: Sequence[str], folder: Path) -> Path:
    """Run ``command`` under nsys, which captures from cudaProfilerStart to cudaProfilerStop.

    Returns:
        The report, in ``folder``.

    Raises:
        CapabilityError: nsys left no report.
    """
    done = _run(nsys, ["profile", *PROFILE_OPTIONS, f"--output={folder / 'report'}", *command])
    for suffix in REPORT_SUFFIXES:
        if (report := folder / f"report{suffix}").exists():
            return report
    raise CapabilityError(f"nsys {nsys.version} left no report: {_last_line(done)}; `cs336sys doctor` may know more")


def export(nsys: Profiler, report: Path, database: Path) -> None:
    """Export a report as SQLite.

    Raises:
        UsageError: this nsys cannot read the report: it is none, is damaged, or comes from a newer version.
    """
    done = _run(
        nsys, ["export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report.absolute())]
    )
    if done.returncode != 0 or not database.exists():
        raise UsageError(
            f"nsys {nsys.version} cannot export {report}, which must be a report of this version or an older one: "
            f"{_last_line(done)}"
        )


def _run(nsys: Profiler, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # nsys starts the program in a session of its own, and daemons besides.
    return run_guarded_program([str(nsys.path), *arguments])


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else f"it ended with exit code {done.returncode}"
