"""The mean of two tensors, in place."""

import triton
import triton.language as tl
from torch import Tensor

# Elements a program, of 8 warps of 32 threads: 16 a thread, enough loads under way for the memory's bandwidth.
_TILE = 4096


@triton.jit
def mean_kernel(result_ptr, other_ptr, num_elements, TILE: tl.constexpr):
    # In int64, because a bucket may have more than 2**31 elements.
    offset = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = offset < num_elements
    value = tl.load(result_ptr + offset, mask=mask).to(tl.float32)
    other_value = tl.load(other_ptr + offset, mask=mask).to(tl.float32)
    # a + b has the bits of b + a: both ranks, each of which adds its own first, get the same mean.
    tl.store(result_ptr + offset, ((value + other_value) * 0.5).to(result_ptr.dtype.element_ty), mask=mask)


def average_(tensor: Tensor, other: Tensor) -> None:
    """Replace ``tensor`` (n,) by its mean with ``other`` (n,) of the same dtype, computed in float32."""
    size = tensor.numel()
    mean_kernel[(triton.cdiv(size, _TILE),)](tensor, other, size, TILE=_TILE, num_warps=8)
