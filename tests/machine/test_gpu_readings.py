"""Readings of a GPU during a measurement, from a driver and a reader that are stand-ins."""

import functools
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from running import wait_until

from cs336sys.machine.device import GpuReadings, Reading, nvml_reader, reading_gpu
from cs336sys.machine.system import read_gpus

pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py: pip install 'cs336sys[gpu]'")


@pytest.fixture
def driver(monkeypatch):
    """NVML's functions as of one GPU, ``GPU-1``; names added to ``refused`` raise NVML's error."""
    driver = SimpleNamespace(refused=set(), asked=[])
    values = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "the handle",
        "nvmlDeviceGetPowerUsage": 412_345,
        "nvmlDeviceGetTotalEnergyConsumption": 7_000_250,
        "nvmlDeviceGetClockInfo": 1755,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x004 | 0x020 | 0x001,
    }

    def answer(name, *arguments):
        driver.asked.append((name, *arguments))
        if name in driver.refused or arguments == ("GPU-2",):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return values[name]

    for name in values:
        monkeypatch.setattr(pynvml, name, functools.partial(answer, name))
    return driver


def test_reading_has_the_units_of_its_names(driver):
    read = nvml_reader("GPU-1")
    assert read() == Reading(1755, 61, 412.345, 7000.25, ("power cap", "software thermal slowdown"))
    # nvml.h: NVML_CLOCK_SM is 1 (0 is the graphics clock), NVML_TEMPERATURE_GPU is 0.
    clock, temperature = ("nvmlDeviceGetClockInfo", "the handle", 1), ("nvmlDeviceGetTemperature", "the handle", 0)
    assert {clock, temperature} <= set(driver.asked)


def test_reading_that_the_driver_refuses_is_none(driver):
    driver.refused |= {"nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksThrottleReasons"}
    assert nvml_reader("GPU-1")() == Reading(None, 61, 412.345, 7000.25, ())


def test_nothing_is_read_without_driver_gpu_or_package(driver, monkeypatch):
    assert nvml_reader("GPU-2") is None
    # As without a driver, where every function fails.
    driver.refused |= {"nvmlInit", "nvmlDeviceGetHandleByUUID"}
    assert nvml_reader("GPU-1") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_reader("GPU-1") is None
    with reading_gpu(torch.device("cpu")) as readings:
        pass
    assert readings.columns() is None


def test_a_gpu_is_read_while_the_context_lasts_and_at_its_end():
    main, threads = threading.get_ident(), []
    clocks = iter(range(1000, 2000))

    def read():
        threads.append(threading.get_ident())
        return Reading(next(clocks), 50, 300.0, 20.0, ("power cap", "sync boost"))

    with GpuReadings(read, interval_s=0.01) as readings:
        wait_until(lambda: len(threads) >= 3, 60)
    count = len(threads)
    assert main not in threads
    assert not any(thread.name == "cs336sys-gpu-readings" for thread in threading.enumerate())
    columns = readings.columns()
    assert columns["sm_clock_mhz"] == list(range(1000, 1000 + count))
    assert columns["time_s"] == sorted(columns["time_s"])
    assert columns["energy_j"] == [20.0] * count
    assert columns["clock_limits"][0] == "power cap, sync boost"
    with GpuReadings(read, interval_s=60) as short:
        pass
    assert len(short.columns()["time_s"]) == 1


def test_long_cells_keep_fewer_readings_from_their_whole_length(monkeypatch):
    monkeypatch.setattr("cs336sys.machine.device._MOST_READINGS", 8)
    now_s = 0.0

    def wait(interval_s):
        nonlocal now_s
        now_s += interval_s
        return now_s >= 0.2

    monkeypatch.setattr("cs336sys.machine.device.time", SimpleNamespace(perf_counter=lambda: now_s))
    readings = GpuReadings(lambda: Reading(1, 1, 1.0), interval_s=0.001)
    readings._has_ended = SimpleNamespace(wait=wait, set=lambda: None)
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
        # For a second or two: the driver adds to its energy counter every 20 to 100 ms.
        for _ in range(10_000):
            factor @ factor
        torch.cuda.synchronize()
        (told,) = (gpu for gpu in read_gpus() if gpu.uuid == uuid)
    columns = readings.columns()
    # Read once meanwhile; what else the GPU computes warms it within a second.
    assert min(columns["temperature_c"]) - 2 <= told.temperature_c <= max(columns["temperature_c"]) + 2
    assert 0.5 <= max(columns["sm_clock_mhz"]) / told.max_sm_clock_mhz <= 1
    assert 0 < max(columns["power_w"]) <= 1.2 * told.power_limit_w
    assert columns["energy_j"][0] < columns["energy_j"][-1]
