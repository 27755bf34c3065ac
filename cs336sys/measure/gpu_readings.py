"""Clock, temperature, power and what limits the clock of a GPU, read by a thread while something else is measured.

Read through NVML, the library of the driver that nvidia-smi prints from: a reading takes some microseconds, a start of
nvidia-smi half a second.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from cs336sys.measure.system import clock_limits_of

# Several in the shortest cells, of half a second.
_INTERVAL_S = 0.05

# A long cell keeps every second, fourth, ... of its readings, so that its record stays smaller than its samples.
_MOST_READINGS = 400

# NVML's numbers for the clock of the multiprocessors, and for the sensor of the chip (nvml.h).
_CLOCK_SM, _TEMPERATURE_GPU = 1, 0


@dataclass(frozen=True)
class Reading:
    """A GPU at one moment; what it does not tell is None."""

    sm_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    clock_limits: tuple[str, ...] = ()


ReadGpu = Callable[[], Reading]


def nvml_reader(uuid: str, load: Callable[[str], Any] = ctypes.CDLL) -> ReadGpu | None:
    """Return a reader of the GPU with this UUID (``GPU-...``); None without NVML, or if it does not know the GPU."""
    try:
        library = load("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    # Never shut down: the library counts, and the process ends soon.
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None

    def ask(function: Callable[..., int], number: Any, *which: int) -> Any:
        failed = function(handle, *which, ctypes.byref(number))
        return None if failed else number.value

    def read() -> Reading:
        power_mw = ask(library.nvmlDeviceGetPowerUsage, ctypes.c_uint())
        # Drivers from 535 on call them event reasons, and keep this name.
        limits = ask(library.nvmlDeviceGetCurrentClocksThrottleReasons, ctypes.c_ulonglong())
        return Reading(
            ask(library.nvmlDeviceGetClockInfo, ctypes.c_uint(), _CLOCK_SM),
            ask(library.nvmlDeviceGetTemperature, ctypes.c_uint(), _TEMPERATURE_GPU),
            None if power_mw is None else power_mw / 1e3,
            clock_limits_of(limits or 0),
        )

    return read


class GpuReadings:
    """Reads a GPU again and again while its context lasts, and once at its end.

    Args:
        read: None reads nothing.
    """

    def __init__(self, read: ReadGpu | None, interval_s: float = _INTERVAL_S):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
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
                del self._readings[::2]
                self._interval_s *= 2

    def columns(self) -> dict[str, list[Any]] | None:
        """The readings as lists, for a results file; ``time_s`` since the start. None without any."""
        if not self._readings:
            return None
        readings = [reading for _, reading in self._readings]
        return {
            "time_s": [round(time_s, 3) for time_s, _ in self._readings],
            "sm_clock_mhz": [reading.sm_clock_mhz for reading in readings],
            "temperature_c": [reading.temperature_c for reading in readings],
            "power_w": [reading.power_w for reading in readings],
            "clock_limits": [", ".join(reading.clock_limits) for reading in readings],
        }


def reading_gpu(device: torch.device) -> GpuReadings:
    """Readings of the GPU that is measured on; of none on a CPU."""
    if device.type != "cuda":
        return GpuReadings(None)
    return GpuReadings(nvml_reader(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
