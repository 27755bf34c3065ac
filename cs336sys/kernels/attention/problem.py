"""A call of attention, on which every choice depends (shapes, dtypes, strides, GPU), and the checks of its inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cs336sys.errors import UsageError

FLOAT32_PRECISIONS = ("tf32x3", "ieee", "tf32")


class AttentionOptions(NamedTuple):
    """Options of the kernels besides the tensors, as ``flash_attention`` explains.

    Operators and autograd's functions take the options one by one, in this order. A call hands them on as a plain
    tuple, :data:`Options`, and names them only where a plan is made: a plain tuple is made six times as fast.
    """

    is_causal: bool = False
    float32_precision: str = FLOAT32_PRECISIONS[0]
    deterministic: bool = False
    kernels: str = "triton"
    window: int | None = None
    scale: float | None = None
    aligned_at_end: bool = False


Options = tuple[bool, str, bool, str, int | None, float | None, bool]

CAUSAL_ALIGNMENTS = START, END = "start", "end"


@dataclass(frozen=True)
class AttentionProblem:
    """Properties of a call that choices of settings depend on: shapes, dtype, strides and GPU.

    ``num_sequences`` are heads of queries, of which ``group_size`` side by side share a head of keys and values.
    ``window``: a query sees the keys up to its own, and of these so many; None for all. ``capability`` is what
    :func:`gpu_capability` returns, None in the interpreter. ``tma_allowed``: the GPU has TMA and the shared memory for
    its tiles, and strides and alignment let TMA descriptors address the tensors. ``diagonal``: under a causal mask
    query i sees no key behind i + diagonal. ``scale`` multiplies the scores, and decides nothing.
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
    diagonal: int = 0
    scale: float = field(default=1.0, compare=False)

    @property
    def num_key_sequences(self) -> int:
        return self.num_sequences // self.group_size


def group_size(query: Tensor, key: Tensor) -> int:
    """Return how many query heads share one of keys and values: all tensors without (batch, heads) have one each."""
    return query.shape[-3] // key.shape[-3] if len(query.shape) >= 4 and key.shape[-3] else 1


class Operand:
    """Strides by which kernels address a tensor of two to four dimensions: as (batch, head, row, element)."""

    def __init__(self, tensor: Tensor):
        leading = (1,) * (4 - tensor.dim())  # Kernels take four dimensions.
        self.shape = (*leading, *tensor.shape)
        self.num_heads = self.shape[1]
        strides = [*leading, *tensor.stride()]
        for dim in (2, 1, 0):
            if self.shape[dim] == 1:  # any stride addresses the same; a descriptor needs this one
                strides[dim] = self.shape[dim + 1] * strides[dim + 1]
        self.strides = tuple(strides)
        self.row_strides = self.strides[:3]
        element_bytes = tensor.element_size()  # TMA takes strides of whole 16 bytes.
        self.fits_tma = all(stride > 0 and stride * element_bytes % 16 == 0 for stride in self.row_strides)


def make_problem(
    query: Tensor, key: Tensor, operands: Sequence[Operand], options: AttentionOptions
) -> AttentionProblem:
    """Return the problem of these tensors; ``operands``: what kernels read or write by TMA where that is allowed."""
    num_sequences = math.prod(query.shape[:-2])
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    diagonal = num_keys - num_queries if options.aligned_at_end else 0
    capability, num_multiprocessors = None, 1  # On a CPU, in the interpreter.
    if query.is_cuda:
        capability = gpu_capability(query.device)
        num_multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
    # TMA coordinates have 32 bits; the sum of dQ is one tall matrix, of sequences padded by less than 256 rows each.
    fits_tma = all(operand.fits_tma for operand in operands) and num_sequences * (num_queries + 256) < 2**31
    return AttentionProblem(
        head_dim=query.shape[-1],
        dtype=query.dtype,
        # Triton multiplies by parts of tf32 on NVIDIA's GPUs alone; AMD's tensor cores multiply fp32 itself.
        float32_precision="ieee" if capability == AMD else options.float32_precision,
        is_causal=options.is_causal,
        num_sequences=num_sequences,
        num_queries=num_queries,
        num_keys=num_keys,
        capability=capability,
        num_multiprocessors=num_multiprocessors,
        # 12.x has TMA, but tiles by descriptors spill more registers there than by pointers (docs/gpus.md).
        tma_allowed=fits_tma and has_hopper_resources(capability),
        group_size=group_size(query, key),
        # A window of all keys masks nothing.
        window=options.window if options.window is not None and options.window < num_queries + diagonal else None,
        diagonal=diagonal,
        scale=score_scale(query, options.scale),
    )


def score_scale(query: Tensor, scale: float | None) -> float:
    """Return what scores are multiplied by: 1 / sqrt(D) by default."""
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


# In the place of a compute capability.
AMD = (0, 0)


def gpu_capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability, or :data:`AMD`: torch numbers AMD's by architecture, gfx90a as 9.0."""
    return AMD if torch.version.hip else torch.cuda.get_device_capability(device)


def has_hopper_resources(capability: tuple[int, int] | None) -> bool:
    """Return whether a GPU has what the tiles that were measured on an H200 need.

    They take up to 227 KiB of shared memory, which 9.0, 10.x and 11.0 have by the CUDA programming guide's table of
    compute capabilities (8.0 and 8.7: 163; 8.6, 8.9 and 12.x: 99), and operands of products straight from there. Other
    GPUs hold operands in registers, which then spill. What comes after 12.x is taken to be like it.
    """
    return capability is not None and 9 <= capability[0] <= 11


KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNEL_MAX_HEAD_DIM = 256


def check_attention_inputs(query: Tensor, key: Tensor, value: Tensor, *, for_kernel: bool = True) -> None:
    """Refuse, in one sentence, tensors that are not query (..., S_q, D) and key and value (..., S_k, D).

    With (batch, heads) in front, keys and values may have fewer heads, a number that divides the query's. No queries
    (S_q = 0), no keys and empty leading dimensions are accepted. Kernels take float32, float16 and bfloat16 and
    D <= 256; with ``for_kernel=False`` any floating dtype and any D >= 1 pass.
    """
    query_shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if min(len(query_shape), len(key_shape), len(value_shape)) < 2:
        raise ValueError(
            "query, key and value need at least 2 dimensions (..., sequence, head_dim), got shapes "
            f"{tuple(query_shape)}, {tuple(key_shape)} and {tuple(value_shape)}"
        )
    head_dim = query_shape[-1]
    if not head_dim == key_shape[-1] == value_shape[-1]:
        raise ValueError(
            "query, key and value must have the same head dimension, "
            f"got {head_dim}, {key_shape[-1]} and {value_shape[-1]}"
        )
    if not query_shape[:-2] == key_shape[:-2] == value_shape[:-2] and not _are_grouped(
        query_shape, key_shape, value_shape
    ):
        raise ValueError(
            "query, key and value must have the same leading dimensions, got "
            f"{tuple(query_shape[:-2])}, {tuple(key_shape[:-2])} and {tuple(value_shape[:-2])}"
        )
    if key_shape != value_shape:
        raise ValueError(f"key and value must have the same sequence length, got {key_shape[-2]} and {value_shape[-2]}")
    if head_dim == 0:
        raise ValueError("the head dimension is 0: it must be at least 1")
    if for_kernel and head_dim > KERNEL_MAX_HEAD_DIM:
        raise ValueError(f"head dimension {head_dim} is too large: the kernels take at most {KERNEL_MAX_HEAD_DIM}")

    dtype = query.dtype
    if not dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value must have the same dtype, got {dtype}, {key.dtype} and {value.dtype}")
    if for_kernel and dtype not in KERNEL_DTYPES:
        raise TypeError(f"dtype {dtype} is not supported: the kernels take {', '.join(map(str, KERNEL_DTYPES))}")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype {dtype} is not supported: attention takes floating-point tensors")
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value must be on the same device, got {query.device}, {key.device} and {value.device}"
        )


def _are_grouped(query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size) -> bool:
    """Return whether the leading dimensions differ in the number of heads alone, which must then divide the query's."""
    same_batch = len(query_shape) >= 4 and query_shape[:-3] == key_shape[:-3]  # (batch, S, D) has no heads.
    if not same_batch or key_shape[:-2] != value_shape[:-2]:
        return False
    heads, key_heads = query_shape[-3], key_shape[-3]
    if key_heads == 0 or heads % key_heads:
        choices = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ValueError(
            f"{key_heads} heads of key and value do not divide the query's {heads}: choose one of {choices}"
        )
    return True


def check_mask(window: int | None, is_causal: bool, aligned_at_end: bool = False) -> None:
    """Refuse, in one sentence, what is no width of a sliding window, and options of a causal mask without one."""
    if aligned_at_end and not is_causal:
        raise UsageError("causal_alignment 'end' needs is_causal=True: it shifts the causal mask")
    if window is None:
        return
    if not isinstance(window, int) or isinstance(window, bool):
        raise TypeError(f"window {window!r} is no whole number: choose how many keys a query sees, or None for all")
    if window < 1:
        raise UsageError(f"window {window} is too small: choose at least 1, the query's own key, or None for all keys")
    if not is_causal:
        raise UsageError(f"window {window} needs is_causal=True: it counts the keys back from the query's own")


def is_aligned_at_end(causal_alignment: str, is_causal: bool, query: Tensor, key: Tensor) -> bool:
    """Check the alignment; return whether it is "end" and matters: of equal lengths both give the same causal mask."""
    if causal_alignment not in CAUSAL_ALIGNMENTS:
        raise UsageError(
            f"causal_alignment {causal_alignment!r} does not exist: choose one of {', '.join(CAUSAL_ALIGNMENTS)}"
        )
    aligned_at_end = causal_alignment == END
    check_mask(window=None, is_causal=is_causal, aligned_at_end=aligned_at_end)  # Refuses "end" without the mask.
    # Tensors of fewer than two dimensions are refused later, by check_attention_inputs().
    return aligned_at_end and min(query.dim(), key.dim()) > 1 and query.shape[-2] != key.shape[-2]


def check_scale(scale: float | None) -> None:
    """Refuse, in one sentence, what scores cannot be multiplied by."""
    if scale is None:
        return
    choices = "choose what the scores are multiplied by, or None for 1/sqrt(D)"
    if not isinstance(scale, (int, float, torch.SymFloat)) or isinstance(scale, bool):
        raise TypeError(f"scale {scale!r} is no number: {choices}")
    if not math.isfinite(scale):
        raise UsageError(f"scale {scale} is not finite: {choices}")


def check_row_statistics(query: Tensor, grad_out: Tensor, logsumexp: Tensor, delta: Tensor) -> None:
    """Refuse, in one sentence, what is not the gradient of the query's output, or one number for each query."""
    for name, tensor in (("grad_out", grad_out), ("logsumexp", logsumexp), ("delta", delta)):
        shape = query.shape if name == "grad_out" else query.shape[:-1]
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)} for this query, got {tuple(tensor.shape)}")
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on the query's device, {query.device}, got {tensor.device}")
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} of dtype {tensor.dtype} is not supported: choose float32")
    if grad_out.dtype != query.dtype:
        raise TypeError(f"grad_out must have the query's dtype, {query.dtype}, got {grad_out.dtype}")
