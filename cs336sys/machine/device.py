"""The device of a measurement, its peak memory, torch's dtypes by their names in commands, and readings of a GPU.

During a measurement a thread reads clock, what limits it, temperature, power and energy through NVML, the driver's
library behind nvidia-smi, by the optional package nvidia-ml-py: a reading takes some microseconds, starting nvidia-smi
half a second.
"""

import gc
import re
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from cs336sys.accounting.memory import GIB
from cs336sys.errors import CapabilityError
from cs336sys.machine.system import clock_limits_of


def choose_device(name: str) -> torch.device:
    """Return the device ``cpu`` or ``cuda`` (a CapabilityError without one); ``auto`` is CUDA where there is a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise CapabilityError("device 'cuda': torch sees no CUDA GPU here; choose cpu or auto")
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if name == "auto" else name)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was launched; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int32": torch.int32,
}


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float | None:
    """Return the most memory in GiB that tensors held at once since the last reset; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def reset_peak_resident() -> float | None:
    """Reset the peak of the process's main memory to what it holds now, and return that in GiB; None without Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets the peak, VmHWM: man 5 proc_pid_clear_refs.
    except OSError:
        return None
    return _status_gib("VmRSS")


def peak_resident_gib() -> float | None:
    """Return the most main memory that the process held at once since :func:`reset_peak_resident`, GiB."""
    return _status_gib("VmHWM")


def _status_gib(name: str) -> float | None:
    """Return a size of /proc/self/status, where it is in KiB, in GiB."""
    size_kib = re.search(rf"^{name}:\s*(\d+)", Path("/proc/self/status").read_text(), re.M)
    return None if size_kib is None else int(size_kib[1]) * 1024 / GIB


def free_gpu_memory() -> None:
    """Free unused GPU memory, and cuBLAS's workspaces: no CUDA graph captured before may be replayed afterwards.

    cuBLAS keeps a workspace, 32 MiB on an H200, for each thread and stream that has multiplied, and every step in CUDA
    graphs has streams of its own: each such cell that a process had measured before raised peaks by 0.125 GiB (2.7b
    first of five sizes 51.72 GiB, last 52.34).
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def held_memory_gib(device: torch.device) -> float:
    """Return the memory that tensors hold now, GiB; 0 on a CPU, where torch does not count it."""
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0.0


# Of a longer cell, every second, fourth, ... reading is kept, so that its record stays smaller than its samples.
_MOST_READINGS = 400


@dataclass(frozen=True)
class Reading:
    """A GPU at one moment; what it does not tell is None."""

    sm_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    # The whole board's energy since the driver was loaded; the difference of two readings is what it drew.
    energy_j: float | None = None
    clock_limits: tuple[str, ...] = ()


ReadGpu = Callable[[], Reading]


def nvml_reader(uuid: str) -> ReadGpu | None:
    """Return a reader of the GPU with this UUID (``GPU-...``); None without NVML or its package, or without the GPU."""
    try:
        import pynvml
    except ImportError:
        return None

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        """Call NVML; None where the GPU does not tell."""
        try:
            return function(*arguments)
        except pynvml.NVMLError:
            return None

    ask(pynvml.nvmlInit)  # Never shut down: NVML counts its users, and this process ends soon.
    gpu = ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)
    if gpu is None:
        return None

    def read() -> Reading:
        power_mw = ask(pynvml.nvmlDeviceGetPowerUsage, gpu)
        energy_mj = ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, gpu)
        return Reading(
            sm_clock_mhz=ask(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
            temperature_c=ask(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw / 1e3,
            energy_j=None if energy_mj is None else energy_mj / 1e3,
            # Drivers from 535 on call them event reasons, and keep this name.
            clock_limits=clock_limits_of(ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu) or 0),
        )

    return read


class GpuReadings:
    """Readings of a GPU, again and again while their context lasts, and once at its end.

    Args:
        read: returns a reading; None: nothing is read.
        interval_s: time between readings; the shortest cells, of half a second, get several.
    """

    def __init__(self, read: ReadGpu | None, interval_s: float = 0.05):
        self._read = read
        self._interval_s = interval_s
        self._readings: list[tuple[float, Reading]] = []
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._read_until_the_end, name="cs336sys-gpu-readings", daemon=True)

    def __enter__(self) -> "GpuReadings":
        self._started_s = time.perf_counter()
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._has_ended.set()
        if self._read is not None:
            self._thread.join()

    def _read_until_the_end(self) -> None:
        assert self._read is not None
        while True:
            is_last = self._has_ended.wait(self._interval_s)
            self._readings.append((time.perf_counter() - self._started_s, self._read()))
            if is_last:
                return
            if len(self._readings) >= _MOST_READINGS:
                del self._readings[::2]  # The rest are as far apart as the next will be.
                self._interval_s *= 2

    def drawn_j(self, last_s: float) -> float | None:
        """Return the joules that the whole board drew in the last ``last_s`` seconds before the context ended.

        None where its counter cannot be read, or was read for less than a second of that time.
        """
        readings = [(time_s, reading.energy_j) for time_s, reading in self._readings if reading.energy_j is not None]
        if not readings:
            return None
        end_s, end_j = readings[-1]
        first_s, first_j = next(reading for reading in readings if reading[0] >= end_s - last_s)
        if end_s - first_s < 1.0:  # The driver's counter may be 0.1 s old: a tenth.
            return None
        # The first reading comes a little later than that time begins: the same power is assumed before it.
        return (end_j - first_j) / (end_s - first_s) * last_s

    def median_clock_mhz(self) -> float | None:
        """Return the median clock of the multiprocessors; None where it was not read."""
        clocks = [reading.sm_clock_mhz for _, reading in self._readings if reading.sm_clock_mhz is not None]
        return statistics.median(clocks) if clocks else None

    def columns(self) -> dict[str, list[Any]] | None:
        """Return the readings as a list for each field, with ``time_s`` since the start; None without readings."""
        if not self._readings:
            return None
        columns: dict[str, list[Any]] = {"time_s": [round(time_s, 3) for time_s, _ in self._readings]}
        for field in fields(Reading):
            columns[field.name] = [getattr(reading, field.name) for _, reading in self._readings]
        return columns | {"clock_limits": list(map(", ".join, columns["clock_limits"]))}


def reading_gpu(device: torch.device) -> GpuReadings:
    """Return a context that reads the GPU that is measured on; on a CPU it reads nothing."""
    if device.type != "cuda":
        return GpuReadings(read=None)
    return GpuReadings(nvml_reader(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
