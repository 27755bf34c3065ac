"""Ask the operating system and the NVIDIA driver's tools about this machine; no torch.

Nothing here raises because a tool is missing, fails or hangs: the answer is then None or empty.
"""

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336sys.processes.parent import run_guarded_program


def run_tool(
    command: Sequence[str],
    *,
    timeout_s: float = 5.0,
    variables: Mapping[str, str] | None = None,
    starts_others: bool = False,
) -> str | None:
    """Return a command's standard output; None when it is missing, fails or is not done after ``timeout_s``.

    Args:
        variables: environment variables set for the command besides the inherited ones.
        starts_others: the command starts programs, none of which must outlive it or this process.
    """
    try:
        if starts_others:
            done = run_guarded_program(command, timeout_s=timeout_s, variables=variables)
        else:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                env=os.environ | (variables or {}),
            )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def installed_version(package: str) -> str | None:
    """Return the version of an installed Python package without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str | None:
    if platform.system() == "Darwin":
        return run_tool(["sysctl", "-n", "machdep.cpu.brand_string"])
    # lscpu, because /proc/cpuinfo has no model name on ARM.
    model = re.search("^Model name:(.*)", run_tool(["lscpu"], variables={"LC_ALL": "C"}) or "", re.M)
    return model[1].strip() if model else platform.processor() or None


def cpu_cores() -> int | None:
    """Return the number of logical cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def memory_gib() -> tuple[float | None, float | None]:
    """Return the (total, available) main memory in GiB of this machine, or of the container that confines us."""
    sizes_kib = re.findall(r"(?m)^(\w+):\s*(\d+)", _read_text("/proc/meminfo"))
    sizes_gib = {name: int(size) / 2**20 for name, size in sizes_kib}
    total, available = sizes_gib.get("MemTotal"), sizes_gib.get("MemAvailable")
    limit, used = container_memory_limit_bytes(), _read_text("/sys/fs/cgroup/memory.current")
    if total is not None and limit is not None and limit / 2**30 < total:
        total = limit / 2**30
        if available is not None:  # What the container may still take can be more than the machine has left.
            available = min(available, total - int(used or 0) / 2**30)
    return total, available


def container_memory_limit_bytes() -> int | None:
    """Return the limit of main memory of this process's container, if there is one."""
    limit = _read_text("/sys/fs/cgroup/memory.max")
    return int(limit) if limit.isdigit() else None


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class GpuState:
    """One NVIDIA GPU as ``nvidia-smi`` sees it at this moment; what it does not tell is None."""

    index: int  # Its number for nvidia-smi, which ignores CUDA_VISIBLE_DEVICES.
    uuid: str
    name: str
    driver: str | None
    memory_total_gib: float | None
    memory_free_gib: float | None
    sm_clock_mhz: float | None
    max_sm_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    # What holds the clocks down, names of :data:`CLOCK_LIMITS`; an idle GPU's low clocks are no limit.
    clock_limits: tuple[str, ...]


# Bits of NVML's clocks event reasons (NVML API reference, NvmlClocksEventReasons).
CLOCK_LIMITS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}

# Application clocks are somebody's choice and steady; these come and go while a timing runs.
SLOWDOWNS = {"power cap", "hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake"}


def clock_limits_of(bits: int) -> tuple[str, ...]:
    """Return the names of NVML's clocks event reasons that are in effect."""
    return tuple(name for bit, name in CLOCK_LIMITS.items() if bits & bit)


_GPU_FIELDS = (
    "index,uuid,name,driver_version,memory.total,memory.free,"
    "clocks.sm,clocks.max.sm,temperature.gpu,power.draw,power.limit"
)


def read_gpus() -> list[GpuState]:
    """Ask nvidia-smi for all GPUs of this machine; without it there are none."""
    # Drivers before 535 know the field by its older name only, and refuse the whole query for an unknown name.
    for field in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        text = run_tool(["nvidia-smi", f"--query-gpu={_GPU_FIELDS},{field}", "--format=csv,noheader,nounits"])
        if text is not None:
            rows = [line.split(", ") for line in text.splitlines()]
            # A GPU that was lost, or the lack of any, is a sentence among the rows.
            return [_gpu_state(row) for row in rows if len(row) == len(_GPU_FIELDS.split(",")) + 1]
    return []


def _gpu_state(values: list[str]) -> GpuState:
    """Read a row of :data:`_GPU_FIELDS` and the clock limits."""
    index, uuid, name, driver, *numbers, limits = values
    total_mib, free_mib, clock, max_clock, temperature, power, power_limit = map(_parse_number, numbers)
    total, free = (None if mib is None else mib / 1024 for mib in (total_mib, free_mib))
    version = None if driver.startswith("[") else driver  # What the driver does not tell is "[N/A]" or the like.
    limit_names = clock_limits_of(int(limits, 16) if limits.startswith("0x") else 0)
    sensors = (clock, max_clock, temperature, power, power_limit)
    return GpuState(int(index), uuid, name, version, total, free, *sensors, limit_names)


@dataclass(frozen=True)
class Capacity:
    """A device by name, and all the memory that a process can hold on it."""

    device: str
    memory_gib: float
    is_gpu: bool = False


def capacity(device: str) -> Capacity | None:
    """Return the memory of ``--device`` (``auto``: the first visible GPU, or else this machine); None if unknown."""
    if device == "cuda" or gpu_name(device) is not None:
        return gpu_capacity(device)
    total, _ = memory_gib()
    return None if total is None else Capacity(cpu_model() or "this CPU", total)


def gpu_capacity(device: str) -> Capacity | None:
    """Return :func:`capacity`, but None where there is no visible GPU, or ``device`` is the CPU."""
    gpus = [] if device == "cpu" else visible_gpus(read_gpus())
    if not gpus or gpus[0].memory_total_gib is None:
        return None
    return Capacity(gpus[0].name, gpus[0].memory_total_gib, is_gpu=True)


def gpu_name(device: str) -> str | None:
    """Return the name of the first visible GPU, whether or not it tells its memory; None without one, or on the CPU."""
    gpus = [] if device == "cpu" else read_gpus()
    if gpus and os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return f"{gpus[0].name} MIG"  # So begins torch's name of a slice; the whole GPU's figures are not its.
    return next((gpu.name for gpu in visible_gpus(gpus)), None)


def visible_gpus(gpus: Sequence[GpuState]) -> list[GpuState]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by number or the beginning of their UUID; without it, all."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(gpus)
    named: list[GpuState] = []
    for name in map(str.strip, visible.split(",")):
        # CUDA numbers the fastest GPU first, nvidia-smi by bus: of GPUs of several kinds this may be another one.
        gpu = next((gpu for gpu in gpus if name and (name == str(gpu.index) or gpu.uuid.startswith(name))), None)
        if gpu is None:
            break  # CUDA, too, passes over all that come after a name that no GPU has.
        named.append(gpu)
    return named


def _parse_number(text: str) -> float | None:
    """Read a CSV value; None for ``[N/A]``, ``[Not Supported]`` and the like."""
    try:
        return float(text)
    except ValueError:
        return None
