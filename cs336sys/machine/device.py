"""The device of a measurement, its peak memory, and torch's dtypes by the names that commands and results give them."""

import gc
import re
from pathlib import Path

import torch

from cs336sys.accounting.memory import GIB
from cs336sys.errors import CapabilityError


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
