"""What the system's tools say, also when they say nothing."""

import sys

import pytest
from fake_tools import GPU_0, GPU_1, IDLE, THROTTLED, only_on_path, put_nvidia_smi, put_tool

from cs336sys.machine import system


@pytest.mark.usefixtures("time_limit")
def test_a_tool_that_is_missing_fails_or_hangs_has_no_answer(tmp_path):
    assert system.run_tool([str(tmp_path / "nothing")]) is None
    assert system.run_tool([sys.executable, "-c", "print('half'); raise SystemExit(3)"]) is None
    assert system.run_tool(["sleep", "3600"], timeout_s=0.2) is None


def test_a_tool_gets_the_variables_besides_its_own():
    script = "import os; print(os.environ['TRITON_INTERPRET'], 'PATH' in os.environ)"
    assert system.run_tool([sys.executable, "-c", script], variables={"TRITON_INTERPRET": "7"}) == "7 True"


@pytest.mark.parametrize("old", [False, True])
def test_gpus_are_read_from_new_and_old_drivers(tmp_path, monkeypatch, old):
    put_nvidia_smi(tmp_path, f"{GPU_0}, {IDLE}", f"{GPU_1}, {THROTTLED}", old=old)
    only_on_path(monkeypatch, tmp_path)
    first, second = system.read_gpus()
    assert first == system.GpuState(
        index=0,
        uuid="GPU-11111111-2222-3333-4444-555555555550",
        name="NVIDIA H200",
        driver="580.95.05",
        memory_total_gib=143771 / 1024,
        memory_free_gib=143156 / 1024,
        sm_clock_mhz=345,
        max_sm_clock_mhz=1980,
        temperature_c=31,
        power_w=76.45,
        power_limit_w=700,
        clock_limits=(),
    )
    assert (second.index, second.sm_clock_mhz, second.temperature_c) == (1, 1155, 88)
    assert second.clock_limits == ("power cap", "software thermal slowdown")


def test_reading_that_a_gpu_does_not_give_is_none(tmp_path, monkeypatch):
    refusals = ", ".join(["[N/A]", "[Not Supported]", "[Unknown Error]", *["[N/A]"] * 6])
    lost = "Unable to determine the device handle for GPU1: 0000:3B:00.0: Unknown Error"
    put_nvidia_smi(tmp_path, f"0, GPU-1, NVIDIA Thor, {refusals}", lost)
    only_on_path(monkeypatch, tmp_path)
    (gpu,) = system.read_gpus()
    told = {name: value for name, value in vars(gpu).items() if value is not None}
    assert told == {"index": 0, "uuid": "GPU-1", "name": "NVIDIA Thor", "clock_limits": ()}


@pytest.mark.skipif(sys.platform != "linux", reason="lscpu is a Linux tool")
def test_cpu_model_comes_from_lscpu(tmp_path, monkeypatch):
    put_tool(tmp_path, "lscpu", {"": "Architecture:    aarch64\nModel name:      Neoverse-V2\n  Model:   0"})
    only_on_path(monkeypatch, tmp_path)
    assert system.cpu_model() == "Neoverse-V2"


@pytest.mark.parametrize(
    ("limit", "available", "expected"),
    [
        ("", f"MemAvailable:   {24 * 2**20} kB", (32.0, 24.0)),
        ("max", f"MemAvailable:   {24 * 2**20} kB", (32.0, 24.0)),
        (str(8 * 2**30), f"MemAvailable:   {24 * 2**20} kB", (8.0, 5.0)),
        (str(64 * 2**30), f"MemAvailable:   {24 * 2**20} kB", (32.0, 24.0)),
        # As from old kernels.
        (str(8 * 2**30), "", (8.0, None)),
    ],
)
def test_memory_is_what_the_container_may_use(monkeypatch, limit, available, expected):
    files = {
        "/proc/meminfo": f"MemTotal:       {32 * 2**20} kB\nMemFree:  1 kB\n{available}",
        "/sys/fs/cgroup/memory.max": limit,
        "/sys/fs/cgroup/memory.current": str(3 * 2**30),
    }
    monkeypatch.setattr(system, "_read_text", files.__getitem__)
    assert system.memory_gib() == expected


def test_a_library_loads_or_not():
    assert system.library_loads(None if sys.platform == "darwin" else "libc.so.6")
    assert not system.library_loads("libnothing.so.1")


H200 = system.Capacity("NVIDIA H200", 143771 / 1024, is_gpu=True)


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("auto", None, H200),
        ("cuda", "7", None),
        ("auto", "", system.Capacity("a CPU", 16.0)),
        ("cpu", None, system.Capacity("a CPU", 16.0)),
    ],
)
def test_capacity_is_that_of_the_visible_gpu_or_of_main_memory(tmp_path, monkeypatch, device, visible, expected):
    put_nvidia_smi(tmp_path, f"{GPU_0}, {IDLE}", f"{GPU_1}, {THROTTLED}")
    only_on_path(monkeypatch, tmp_path)
    monkeypatch.setattr(system, "memory_gib", lambda: (16.0, 1.0))
    monkeypatch.setattr(system, "cpu_model", lambda: "a CPU")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert system.capacity(device) == expected


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1]),
        ("1,0", [1, 0]),
        ("-1", []),
        ("0,-1,1", [0]),
        ("GPU-11111111-2222-3333-4444-555555555551, 0", [1, 0]),
        ("GPU-1111", [0]),
    ],
)
def test_gpus_after_a_name_that_none_has_are_hidden(tmp_path, monkeypatch, visible, indices):
    put_nvidia_smi(tmp_path, f"{GPU_0}, {IDLE}", f"{GPU_1}, {THROTTLED}")
    only_on_path(monkeypatch, tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in system.visible_gpus(system.read_gpus())] == indices
