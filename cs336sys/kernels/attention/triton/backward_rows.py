"""What the kernels of the backward pass share: a query's logsumexp and D, and float32 sums of gradients in memory."""

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton.tiles import load_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_statistic(row_statistics, row, first_query, padded_queries, QUERY_ROWS: tl.constexpr, TMA: tl.constexpr):
    """QUERY_ROWS numbers of one row of row_statistics (rows, padded_queries)."""
    if TMA:
        statistic = row_statistics.load([row, first_query]).reshape(QUERY_ROWS)
    else:
        base = row_statistics + row.to(tl.int64) * padded_queries
        statistic = tl.load(base + first_query + tl.arange(0, QUERY_ROWS))
    return statistic


@triton.jit
def base2_logsumexps(logsumexp, sequence, rows, num_queries):
    """logsumexp * log2(e) of some queries, from logsumexp (sequences, num_queries).

    Rows behind the last query, and those whose scores were all -inf, get +inf, so their weights exp2(score - inf) are 0
    and no pass needs a mask for them.
    """
    pointers = logsumexp + sequence.to(tl.int64) * num_queries + rows
    logsumexps = tl.load(pointers, mask=rows < num_queries, other=float("-inf"))
    return tl.where(logsumexps == float("-inf"), float("inf"), logsumexps * LOG2_E)


@triton.jit
def output_products(
    out,
    out_strides,
    grad_out_tile,
    batch,
    head,
    first_row,
    num_queries,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """D = rowsum(dO * O) of ROWS queries."""
    out_tile = load_rows(out, out_strides, batch, head, first_row, num_queries, ROWS, HEAD_DIM, BLOCK_DIM, False)
    return tl.sum(out_tile.to(tl.float32) * grad_out_tile.to(tl.float32), 1)


@triton.jit
def sum_pointers(sums, sequence, rows, padded_rows, BLOCK_DIM: tl.constexpr):
    """Pointers [ROWS, BLOCK_DIM] into sums (sequences * padded_rows, BLOCK_DIM)."""
    offsets = (sequence.to(tl.int64) * padded_rows + rows) * BLOCK_DIM
    return sums + offsets[:, None] + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def is_key_sequence(sequence, num_tiles, group_size):
    """Of the sequences that programs are numbered by, queries' sequences, the first stand for the keys' as well."""
    return sequence < tl.num_programs(0) // num_tiles // group_size
