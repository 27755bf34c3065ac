"""Readings of a GPU during a measurement, from a library and a reader that are stand-ins."""

import statistics
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from running import wait_until

from cs336sys.measure.gpu_readings import GpuReadings, Reading, nvml_reader, reading_gpu
from cs336sys.measure.system import read_gpus


class FakeLibrary:
    """NVML's functions, which return 0 and write through the last argument; ``refused`` names return an error."""

    VALUES = (
        ("nvmlDeviceGetPowerUsage", 412_345),
        ("nvmlDeviceGetClockInfo", 1755),
        ("nvmlDeviceGetTemperature", 61),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x004 | 0x020 | 0x001),
    )

    def __init__(self, *refused, uuids=(b"GPU-1",)):
        self.calls = []
        for name, value in self.VALUES:
            setattr(self, name, self.function(name, value, failed=name in refused))
        self.nvmlInit_v2 = lambda: int("nvmlInit_v2" in refused)
        self.nvmlDeviceGetHandleByUUID = lambda uuid, handle: int(uuid not in uuids)

    def function(self, name, value, failed):
        def call(handle, *arguments):
            *which, reference = arguments
            self.calls.append((name, *which))
            reference._obj.value = value
            return int(failed)

        return call


def test_a_reading_is_what_the_driver_tells_in_the_units_of_the_names():
    library = FakeLibrary()
    read = nvml_reader("GPU-1", lambda name: library)
    assert read() == Reading(1755, 61, 412.345, ("power cap", "software thermal slowdown"))
    # nvml.h: NVML_CLOCK_SM is 1 (0 is the graphics clock), NVML_TEMPERATURE_GPU is 0.
    assert {("nvmlDeviceGetClockInfo", 1), ("nvmlDeviceGetTemperature", 0)} <= set(library.calls)


def test_what_the_driver_refuses_is_none():
    refused = FakeLibrary("nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksThrottleReasons")
    assert nvml_reader("GPU-1", lambda name: refused)() == Reading(None, 61, 412.345, ())


def test_without_the_library_or_the_gpu_nothing_is_read():
    def missing(name):
        raise OSError(name)

    assert nvml_reader("GPU-1", missing) is None
    assert nvml_reader("GPU-1", lambda name: FakeLibrary("nvmlInit_v2")) is None
    assert nvml_reader("GPU-2", lambda name: FakeLibrary()) is None
    with reading_gpu(torch.device("cpu")) as readings:
        pass
    assert readings.columns() is None


def test_a_gpu_is_read_while_the_context_lasts_and_at_its_end():
    main, threads = threading.get_ident(), []
    clocks = iter(range(1000, 2000))

    def read():
        threads.append(threading.get_ident())
        return Reading(next(clocks), 50, 300.0, ("power cap", "sync boost"))

    with GpuReadings(read, interval_s=0.01) as readings:
        wait_until(lambda: len(threads) >= 3, 60)
    count = len(threads)
    assert main not in threads
    assert not any(thread.name == "cs336sys-gpu-readings" for thread in threading.enumerate())
    columns = readings.columns()
    assert columns["sm_clock_mhz"] == list(range(1000, 1000 + count))
    assert columns["time_s"] == sorted(columns["time_s"])
    assert columns["clock_limits"][0] == "power cap, sync boost"
    with GpuReadings(read, interval_s=60) as short:
        pass
    assert len(short.columns()["time_s"]) == 1


def test_the_thread_ends_where_the_measurement_fails():
    with pytest.raises(MemoryError), GpuReadings(lambda: Reading(1, 1, 1.0), interval_s=0.01):
        raise MemoryError
    assert not any(thread.name == "cs336sys-gpu-readings" for thread in threading.enumerate())


def test_long_cells_keep_fewer_readings_from_their_whole_length(monkeypatch):
    monkeypatch.setattr("cs336sys.measure.gpu_readings._MOST_READINGS", 8)
    now_s = 0.0

    class End:
        def wait(self, interval_s):
            nonlocal now_s
            now_s += interval_s
            return now_s >= 0.2

        def set(self):
            pass

    monkeypatch.setattr("cs336sys.measure.gpu_readings.time", SimpleNamespace(perf_counter=lambda: now_s))
    readings = GpuReadings(lambda: Reading(1, 1, 1.0), interval_s=0.001)
    readings._has_ended = End()
    with readings:
        pass
    times = readings.columns()["time_s"]
    assert 3 < len(times) <= 8
    assert times[0] < 0.1 < 0.19 < times[-1]


@pytest.mark.gpu
def test_a_real_gpu_tells_what_nvidia_smi_tells_and_computes_while_it_is_read():
    device = torch.device("cuda")
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    factor = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    with reading_gpu(device) as readings:
        for _ in range(300):
            factor @ factor
        torch.cuda.synchronize()
        (told,) = (gpu for gpu in read_gpus() if gpu.uuid == uuid)
    columns = readings.columns()
    assert abs(columns["temperature_c"][-1] - told.temperature_c) <= 5
    assert max(columns["sm_clock_mhz"]) <= told.max_sm_clock_mhz
    assert max(columns["sm_clock_mhz"]) >= 0.5 * told.max_sm_clock_mhz
    assert 0 < max(columns["power_w"]) <= 1.2 * told.power_limit_w


@pytest.mark.gpu
def test_readings_cost_launches_nothing_that_can_be_measured():
    """Launches of small kernels with and without readings, in turn, so that a busy machine slows both alike."""
    device = torch.device("cuda")
    value = torch.zeros(16, device=device)

    def launch_ms(reading):
        with reading:
            started = time.perf_counter()
            for _ in range(20_000):
                value.add_(1)
            torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - started)

    launch_ms(GpuReadings(None))
    ratios = [launch_ms(reading_gpu(device)) / launch_ms(GpuReadings(None)) for _ in range(15)]
    assert statistics.median(ratios) < 1.02
