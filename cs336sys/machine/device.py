"""The device of a measurement, its peak memory, and torch's dtypes by the names that commands and results give them."""

import gc
from pathlib import Path

import torch

from cs336sys.accounting.memory import GIB
from cs336sys.errors import CapabilityError


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises:
        CapabilityError: ``cuda`` was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise CapabilityError("device 'cuda': torch sees no CUDA GPU here; choose cpu or auto")
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if name == "auto" else name)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was launched; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# In the order of workload.COLLECTIVE_DTYPES: first those of sizes.PRECISIONS.
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
    """Most memory that tensors held at once since the last reset, in GiB; None where torch does not count it (CPU)."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def reset_peak_resident() -> float | None:
    """Begin a new peak of the process's main memory; what it holds now in GiB, None where Linux does not tell."""
    try:
        # Sets the high-water mark back to what is held now (man 5 proc_pid_clear_refs).
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_gib("VmRSS")


def peak_resident_gib() -> float | None:
    """The most main memory that the process held at once since :func:`reset_peak_resident`, in GiB."""
    return _status_gib("VmHWM")


def _status_gib(name: str) -> float | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024 / GIB
    return None


def free_gpu_memory() -> None:
    """Give back what nobody holds any more, cuBLAS's workspaces among it. No graph captured before may be replayed.

    It keeps one, 32 MiB on an H200, for each thread and stream that has multiplied, and every step in CUDA graphs has
    streams of its own: peaks were 0.125 GiB larger for each such cell that the process had measured before (2.7b first
    of five sizes 51.72 GiB, last 52.34).
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def held_memory_gib(device: torch.device) -> float:
    """Return what tensors hold now, in GiB; 0 where torch does not count it (CPU)."""
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0.0
