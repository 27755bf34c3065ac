"""What is asked of the kernels: shapes, dtype, strides and GPU, on which every choice of settings depends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Problem:
    """What the choice depends on.

    ``num_sequences`` are heads of queries, of which ``group_size`` side by side share a head of keys and values.
    ``window``: a query sees the keys up to its own, and of these so many; None for all. ``capability`` is the GPU's
    compute capability, None in the interpreter. ``tma_allowed``: the GPU has TMA and the shared memory for its tiles,
    and strides and alignment let TMA descriptors address the tensors.
    """

    head_dim: int
    dtype: torch.dtype
    float32_precision: str
    is_causal: bool
    num_sequences: int
    num_queries: int
    num_keys: int
    capability: tuple[int, int] | None
    num_multiprocessors: int
    tma_allowed: bool
    group_size: int = 1
    window: int | None = None

    @property
    def num_key_sequences(self) -> int:
        return self.num_sequences // self.group_size

    def keys_of_tile(self, query_rows: int) -> int:
        """The most keys that a tile of ``query_rows`` queries sees."""
        return self.num_keys if self.window is None else min(self.num_keys, self.window + query_rows - 1)


def group_size(query: torch.Tensor, key: torch.Tensor) -> int:
    """How many heads of queries share one of keys and values: all tensors without (batch, heads) have one each."""
    return query.shape[-3] // key.shape[-3] if len(query.shape) >= 4 and key.shape[-3] else 1


class Operand:
    """How the kernels address a tensor of two to four dimensions: as (batch, head, row, element)."""

    def __init__(self, tensor: torch.Tensor):
        leading = (1,) * (4 - tensor.dim())
        self.shape = (*leading, *tensor.shape)
        strides = [*leading, *tensor.stride()]
        for dim in (2, 1, 0):
            if self.shape[dim] == 1:  # any stride will do; a descriptor wants this one
                strides[dim] = self.shape[dim + 1] * strides[dim + 1]
        self.strides = tuple(strides)
        self.row_strides = self.strides[:3]
        element_bytes = tensor.element_size()
        self.fits_tma = all(stride > 0 and stride * element_bytes % 16 == 0 for stride in self.row_strides)


def make_problem(
    query: torch.Tensor,
    key: torch.Tensor,
    operands: Sequence[Operand],
    is_causal: bool,
    float32_precision: str,
    window: int | None = None,
) -> Problem:
    """The problem of these tensors; ``operands``: what the kernels would read or write by TMA if it is allowed."""
    num_sequences = math.prod(query.shape[:-2])
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    capability, num_multiprocessors = None, 1
    if query.is_cuda:
        properties = torch.cuda.get_device_properties(query.device)
        capability, num_multiprocessors = (properties.major, properties.minor), properties.multi_processor_count
    # TMA coordinates have 32 bits, and the sum of dQ is addressed as one tall matrix.
    fits_tma = all(operand.fits_tma for operand in operands) and num_sequences * (num_queries + 256) < 2**31
    return Problem(
        head_dim=query.shape[-1],
        dtype=query.dtype,
        float32_precision=float32_precision,
        is_causal=is_causal,
        num_sequences=num_sequences,
        num_queries=num_queries,
        num_keys=num_keys,
        capability=capability,
        num_multiprocessors=num_multiprocessors,
        # 12.x has TMA, but not the shared memory.
        tma_allowed=fits_tma and has_hopper_shared_memory(capability),
        group_size=group_size(query, key),
        # A window of all keys masks nothing.
        window=window if window is not None and window < num_queries else None,
    )


def has_hopper_shared_memory(capability: tuple[int, int] | None) -> bool:
    """Whether one program may use as much shared memory as on an H200, by which most tiles were chosen.

    The CUDA programming guide's table of compute capabilities: 227 KiB for 9.0, 10.x and 11.0; 163 KiB for 8.0 and 8.7;
    99 KiB for 8.6, 8.9 and 12.x, which all other tiles fit. What comes after 12.x is taken to have the least.
    """
    return capability is not None and 9 <= capability[0] <= 11
