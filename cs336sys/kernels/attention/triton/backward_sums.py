"""The kernels before and behind the passes of backward: D = rowsum(dO * O), and gradients from float32 sums."""

from collections import namedtuple
from dataclasses import dataclass

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton.backward import base2_logsumexps, is_key_sequence, output_products, sum_pointers
from cs336sys.kernels.attention.triton.tiles import Dims, Rows, load_rows, store_rows


@dataclass(frozen=True)
class PrepareConfig(Dims):
    rows: int
    fused: bool
    key_sums: bool
    has_delta: bool
    turns: bool


@dataclass(frozen=True)
class ConvertConfig(Dims):
    rows: int
    key_sums: bool


# The kernel in front of the passes of backward: D = rowsum(dO * O), and the sums that they add to cleared.


@triton.jit
def _clear_sums(sums, sequence, rows, padded_rows, DIMS: tl.constexpr):
    pointers = sum_pointers(sums, sequence, rows, padded_rows, DIMS)
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
    CONFIG: tl.constexpr,
):
    """Write two rows a sequence for the passes: logsumexp * log2(e) and D of each query.

    Given: ``out`` is D itself (sequences, num_queries), and ``grad_out`` is not touched. Fused: also clears the sum of
    dQ; with key_sums those of dK and dV; with turns (sequences, padded_queries) counters of who has added to dQ. A
    sequence has num_tiles programs, enough for its queries and for the keys to be cleared.
    """
    sequence = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * CONFIG.rows
    batch = sequence // num_heads
    head = sequence % num_heads
    rows = first_row + tl.arange(0, CONFIG.rows)
    if CONFIG.has_delta:
        delta = tl.load(out + sequence.to(tl.int64) * num_queries + rows, mask=rows < num_queries, other=0.0)
    else:
        grad_out_rows = Rows(grad_out, grad_out_strides, batch, head, num_queries)
        grad_out_tile = load_rows(grad_out_rows, first_row, CONFIG.rows, CONFIG, False)
        out_rows = Rows(out, out_strides, batch, head, num_queries)
        delta = output_products(out_rows, grad_out_tile, first_row, CONFIG.rows, CONFIG)
    logsumexps = base2_logsumexps(logsumexp, sequence, rows, num_queries)
    statistics = row_statistics + sequence.to(tl.int64) * 2 * padded_queries + rows
    tl.store(statistics, logsumexps, mask=rows < padded_queries)
    tl.store(statistics + padded_queries, delta, mask=rows < padded_queries)
    if CONFIG.fused:
        _clear_sums(grad_query_sum, sequence, rows, padded_queries, CONFIG)
    if CONFIG.turns:
        counters = turns + sequence.to(tl.int64) * padded_queries + rows
        tl.store(counters, tl.zeros(rows.shape, tl.float32), mask=rows < padded_queries)
    if CONFIG.key_sums and is_key_sequence(sequence, num_tiles, group_size):
        _clear_sums(grad_key_sum, sequence, rows, padded_keys, CONFIG)
        _clear_sums(grad_value_sum, sequence, rows, padded_keys, CONFIG)


# The kernel behind the fused pass of backward: gradients from their float32 sums.


# A gradient, in rows of some length and heads, and scale times which sums it is.
Gradient = namedtuple("Gradient", "tensor strides sums num_heads num_rows padded_rows scale")


@triton.jit
def _convert_sums(grad, sequence, first_row, CONFIG: tl.constexpr):
    """Rows of a gradient from first_row on: scale * sums, in the dtype of the gradient."""
    rows = first_row + tl.arange(0, CONFIG.rows)
    pointers = sum_pointers(grad.sums, sequence, rows, grad.padded_rows, CONFIG)
    tile = tl.load(pointers, mask=(rows < grad.num_rows)[:, None]) * grad.scale
    grad_rows = Rows(grad.tensor, grad.strides, sequence // grad.num_heads, sequence % grad.num_heads, grad.num_rows)
    store_rows(grad_rows, tile, first_row, CONFIG.rows, CONFIG)


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
    CONFIG: tl.constexpr,
):
    """dQ = scale * grad_query_sum; with key_sums also dK = scale * grad_key_sum and dV = grad_value_sum."""
    sequence = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * CONFIG.rows
    grad = Gradient(grad_query, grad_query_strides, grad_query_sum, num_heads, num_queries, padded_queries, scale)
    _convert_sums(grad, sequence, first_row, CONFIG)
    if CONFIG.key_sums and is_key_sequence(sequence, num_tiles, group_size):
        key_heads = num_heads // group_size
        grad = Gradient(grad_key, grad_key_strides, grad_key_sum, key_heads, num_keys, padded_keys, scale)
        _convert_sums(grad, sequence, first_row, CONFIG)
        grad = Gradient(grad_value, grad_value_strides, grad_value_sum, key_heads, num_keys, padded_keys, 1.0)
        _convert_sums(grad, sequence, first_row, CONFIG)
