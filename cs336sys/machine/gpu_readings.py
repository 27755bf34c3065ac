"""Clock, temperature, power, energy and what limits the clock of a GPU, read by a thread during a measurement.

Read through NVML, the driver's library behind nvidia-smi, by the optional package nvidia-ml-py: a reading takes some
microseconds, starting nvidia-smi half a second.
"""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from cs336sys.machine.system import clock_limits_of

# Of a longer cell, every second, fourth, ... reading is kept, so that its record stays smaller than its samples.
_MOST_READINGS = 400


@dataclass(frozen=True)
class Reading:
    """A GPU at one moment; what it does not tell is None.

    Attributes:
        energy_j: the whole board's energy since the driver was loaded; the difference of two readings is what it drew.
    """

    sm_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
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
    """Reads a GPU again and again while its context lasts, and once at its end.

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
