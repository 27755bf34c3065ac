"""The kernels before and behind the passes of backward: D = rowsum(dO * O), and gradients from float32 sums."""

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton.backward import base2_logsumexps, is_key_sequence, output_products, sum_pointers
from cs336sys.kernels.attention.triton.tiles import load_rows, store_rows

# The kernel in front of the passes of backward: D = rowsum(dO * O), and the sums that they add to cleared.


@triton.jit
def _clear_sums(sums, sequence, rows, padded_rows, BLOCK_DIM: tl.constexpr):
    pointers = sum_pointers(sums, sequence, rows, padded_rows, BLOCK_DIM)
    tl.store(pointers, tl.zeros(pointers.shape, tl.float32), mask=(rows < padded_rows)[:, None])


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "group_size", "num_queries"])
def prepare_kernel(
    out,
    grad_out,
    logsumexp,
    row_statistics,
    grad_query_sum,
    grad_key_sum,
    grad_value_sum,
    turns,
    out_strides,
    grad_out_strides,
    num_tiles,
    num_heads,
    group_size,
    num_queries,
    padded_queries,
    padded_keys,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    FUSED: tl.constexpr,
    KEY_SUMS: tl.constexpr,
    GIVEN: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Write two rows a sequence for the passes: logsumexp * log2(e) and D of each query.

    GIVEN: ``out`` is D itself (sequences, num_queries), and ``grad_out`` is not touched. Fused: also clears the sum of
    dQ; with KEY_SUMS those of dK and dV; with TURNS (sequences, padded_queries) counters of who has added to dQ. A
    sequence has num_tiles programs, enough for its queries and for the keys to be cleared.
    """
    sequence = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * ROWS
    batch = sequence // num_heads
    head = sequence % num_heads
    rows = first_row + tl.arange(0, ROWS)
    if GIVEN:
        delta = tl.load(out + sequence.to(tl.int64) * num_queries + rows, mask=rows < num_queries, other=0.0)
    else:
        grad_out_tile = load_rows(
            grad_out, grad_out_strides, batch, head, first_row, num_queries, ROWS, HEAD_DIM, BLOCK_DIM, False
        )
        delta = output_products(
            out, out_strides, grad_out_tile, batch, head, first_row, num_queries, ROWS, HEAD_DIM, BLOCK_DIM
        )
    logsumexps = base2_logsumexps(logsumexp, sequence, rows, num_queries)
    statistics = row_statistics + sequence.to(tl.int64) * 2 * padded_queries + rows
    tl.store(statistics, logsumexps, mask=rows < padded_queries)
    tl.store(statistics + padded_queries, delta, mask=rows < padded_queries)
    if FUSED:
        _clear_sums(grad_query_sum, sequence, rows, padded_queries, BLOCK_DIM)
    if TURNS:
        counters = turns + sequence.to(tl.int64) * padded_queries + rows
        tl.store(counters, tl.zeros(rows.shape, tl.float32), mask=rows < padded_queries)
    if KEY_SUMS and is_key_sequence(sequence, num_tiles, group_size):
        _clear_sums(grad_key_sum, sequence, rows, padded_keys, BLOCK_DIM)
        _clear_sums(grad_value_sum, sequence, rows, padded_keys, BLOCK_DIM)


# The kernel behind the fused pass of backward: gradients from their float32 sums.


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
