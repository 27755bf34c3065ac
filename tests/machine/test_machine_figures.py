"""What is found on machines made of canned tool output, written down in ``figures.txt`` (tests/written_figures.py)."""

# Further names are used in figures.txt.
# ruff: noqa: F401

import contextlib
import importlib.metadata
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from fake_tools import GPU_0, GPU_1, IDLE, THROTTLED, only_on_path, pretend_gpus, put_nvidia_smi, put_tool
from written_figures import figures_test

from cs336sys.machine import system
from cs336sys.machine.device import GpuReadings, Reading
from cs336sys.machine.diagnosis import gpu, software
from cs336sys.machine.system import read_gpus

TWO = (f"{GPU_0}, {IDLE}", f"{GPU_1}, {IDLE}")
BUSY = GPU_0.replace("143156", "102196")
GPU_2 = GPU_0.replace("0, GPU", "2, GPU", 1).replace("555555555550", "555555555552")
UUIDS = [f"GPU-11111111-2222-3333-4444-55555555555{number}" for number in range(3)]
WHEEL = ["sm_80", "sm_86", "sm_90", "sm_100", "compute_100"]


@contextlib.contextmanager
def machine(*rows, variables=None, tools=(), **answers):
    """Within this, nvidia-smi prints these rows and answers, and only it and empty tools are there."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        only_on_path(monkeypatch, Path(folder))
        if rows:
            put_nvidia_smi(Path(folder), *rows, **answers)
        for tool in tools:
            put_tool(Path(folder), tool, {})
        for name in (*gpu.MULTICAST_VARIABLES, "CUDA_VISIBLE_DEVICES", "CC", "CXX"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)
        yield monkeypatch


def devices(*rows, only=None, gpus=2, cuda="13.0", nccl="2.28.9", packages=None, pretended=None, **settings):
    """Return the checks of GPUs that torch pretends to see; ``only`` those of some names."""
    with machine(*rows, **settings) as monkeypatch:
        pretend_gpus(monkeypatch, gpus, **pretended or {})
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(gpu, "nccl_version", lambda: nccl)
        monkeypatch.setattr(gpu, "installed_version", (packages or {}).get)
        checks = gpu.check_devices(read_gpus())
    return [check for check in checks if only is None or check.name in only]


def verdict(capability, built):
    """Return whether torch has code for GPUs, of NVIDIA's capability or AMD's architecture."""
    architecture = SimpleNamespace(gcnArchName=capability)
    with machine(*TWO) as monkeypatch:
        pretend_gpus(monkeypatch, 1, capability=capability, built=built)
        if isinstance(capability, str):
            monkeypatch.setattr(torch.version, "hip", "6.4")
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: architecture)
        check = gpu.check_architecture()
    return check.found.partition(",")[0], check.verdict


def links(uuids, *rows, **answers):
    gpu.describe_links.cache_clear()
    with machine(*rows, **answers):
        return gpu.describe_links(tuple(uuids))


def triton(installed, pinned=None):
    """Return the check of an installed version, and the one that torch names."""
    requirements = {
        "cs336sys": ["torch<2.14,>=2.11", 'triton>=3.6; platform_system == "Linux"'],
        "torch": [
            'triton==1.0; platform_system == "Windows"',
            *([f'triton{pinned}; platform_system == "Linux"'] if pinned else []),
            'optree>=0.13; extra == "optree"',
        ],
    }
    with (
        patch.object(importlib.metadata, "requires", requirements.__getitem__),
        patch.object(software, "installed_version", lambda package: installed),
    ):
        return software.check_triton()


def compiler(*tools, has_headers=True, **variables):
    with machine(tools=tools, variables=variables) as monkeypatch, TemporaryDirectory() as headers:
        if has_headers:
            (Path(headers) / "Python.h").touch()
        monkeypatch.setattr(software.sysconfig, "get_path", lambda name: headers)
        return software.check_compiler()


def memory(limit, used="0", available=f"MemAvailable:   {24 * 2**20} kB"):
    """Return the memory of a machine of 32 GiB, in a container with this limit."""
    files = {
        "/proc/meminfo": f"MemTotal:       {32 * 2**20} kB\nMemFree:  1 kB\n{available}",
        "/sys/fs/cgroup/memory.max": str(limit),
        "/sys/fs/cgroup/memory.current": used,
    }
    with patch.object(system, "_read_text", files.__getitem__):
        return system.memory_gib()


def seen(visible, device=None):
    """Return the numbers of the GPUs that CUDA_VISIBLE_DEVICES leaves, or the capacity of a device."""
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with machine(*TWO, variables=variables) as monkeypatch:
        monkeypatch.setattr(system, "memory_gib", lambda: (16.0, 1.0))
        monkeypatch.setattr(system, "cpu_model", lambda: "a CPU")
        if device is not None:
            return system.capacity(device)
        return [state.index for state in system.visible_gpus(read_gpus())]


def drawn_j(seconds, *energies_j):
    """Return the energy of the last seconds, where the counter was read every half a second."""
    readings = GpuReadings(None)
    readings._readings = [(number / 2, Reading(1500, 60, 400.0, one)) for number, one in enumerate(energies_j)]
    return readings.drawn_j(seconds)


def gpus(*rows, **answers):
    with machine(*rows, **answers):
        return read_gpus()


test_figures_are_those_written_down = pytest.mark.skipif(
    sys.platform != "linux", reason="Triton and what the system tells are Linux's"
)(figures_test(globals()))
