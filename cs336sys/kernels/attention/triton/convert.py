"""The kernel behind the fused pass of backward: gradients from their float32 sums."""

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton.backward_rows import is_key_sequence, sum_pointers
from cs336sys.kernels.attention.triton.tiles import store_rows


@triton.jit
def _convert_sums(
    sums,
    grad,
    grad_strides,
    sequence,
    first_row,
    num_heads,
    num_rows,
    padded_rows,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows of a gradient from first_row on: scale * sums, in the dtype of the gradient."""
    rows = first_row + tl.arange(0, ROWS)
    pointers = sum_pointers(sums, sequence, rows, padded_rows, BLOCK_DIM)
    tile = tl.load(pointers, mask=(rows < num_rows)[:, None]) * scale
    batch = sequence // num_heads
    head = sequence % num_heads
    store_rows(grad, grad_strides, tile, batch, head, first_row, num_rows, ROWS, HEAD_DIM, BLOCK_DIM)


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "group_size", "num_queries", "num_keys"])
def convert_grad_query_kernel(
    grad_query_sum,
    grad_key_sum,
    grad_value_sum,
    grad_query,
    grad_key,
    grad_value,
    grad_query_strides,
    grad_key_strides,
    grad_value_strides,
    num_tiles,
    num_heads,
    group_size,
    num_queries,
    num_keys,
    padded_queries,
    padded_keys,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_SUMS: tl.constexpr,
):
    """dQ = scale * grad_query_sum; with KEY_SUMS also dK = scale * grad_key_sum and dV = grad_value_sum."""
    sequence = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * ROWS
    _convert_sums(
        grad_query_sum,
        grad_query,
        grad_query_strides,
        sequence,
        first_row,
        num_heads,
        num_queries,
        padded_queries,
        scale,
        HEAD_DIM,
        BLOCK_DIM,
        ROWS,
    )
    if KEY_SUMS and is_key_sequence(sequence, num_tiles, group_size):
        key_heads = num_heads // group_size
        _convert_sums(
            grad_key_sum,
            grad_key,
            grad_key_strides,
            sequence,
            first_row,
            key_heads,
            num_keys,
            padded_keys,
            scale,
            HEAD_DIM,
            BLOCK_DIM,
            ROWS,
        )
        _convert_sums(
            grad_value_sum,
            grad_value,
            grad_value_strides,
            sequence,
            first_row,
            key_heads,
            num_keys,
            padded_keys,
            1.0,
            HEAD_DIM,
            BLOCK_DIM,
            ROWS,
        )
