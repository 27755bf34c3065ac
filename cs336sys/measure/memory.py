"""Peak device memory of a stretch of work."""

import torch

from cs336sys.accounting.memory import GIB


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float | None:
    """Most memory that tensors held at once since the last reset, in GiB; None where torch does not count it (CPU)."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / GIB


def held_memory_gib(device: torch.device) -> float:
    """What tensors hold now, in GiB; 0 where torch does not count it (CPU)."""
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0.0
