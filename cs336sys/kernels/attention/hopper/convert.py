"""dQ from its float32 sum, which lies in memory as the threads of the backward kernels hold it: plain Triton.

A warpgroup's tile of 64 queries and N columns of dQ is the result of a matrix product. For every 8 columns lane l of
warp w holds four numbers, in registers in a row: two neighbours in row 16 w + l // 4, and the two 8 rows below. They
lie in memory as they come, the four of each lane, lane after lane, warp after warp, 8 columns after 8 columns: so a
thread adds or stores them by one instruction. The order is put right here.

Source: PTX ISA, register fragments of wgmma.mma_async.m64nNk16, accumulator D.
"""

import triton
import triton.language as tl

# The queries of a tile.
ROWS = tl.constexpr(64)


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "num_queries"])
def convert_register_order_kernel(
    grad_query_sum,
    grad_query,
    grad_query_strides,
    num_tiles,
    num_heads,
    num_queries,
    scale,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dQ = scale * its sum, for 64 queries of one sequence; a warpgroup's tile has COLUMNS of the head dimension."""
    sequence = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    batch = sequence // num_heads
    head = sequence % num_heads
    elements = tl.arange(0, ROWS * HEAD_DIM)
    sums = tl.load(grad_query_sum + tl.program_id(0).to(tl.int64) * (ROWS * HEAD_DIM) + elements)
    # Tile, 8 columns, warp, lane // 4, lane % 4, row + 0 or 8, column + 0 or 1.
    sums = sums.reshape([HEAD_DIM // COLUMNS, COLUMNS // 8, 4, 8, 4, 2, 2])
    rows = sums.permute([2, 5, 3, 0, 1, 4, 6]).reshape([ROWS, HEAD_DIM]) * scale
    queries = tile * ROWS + tl.arange(0, ROWS)
    pointers = grad_query + batch.to(tl.int64) * grad_query_strides[0] + head.to(tl.int64) * grad_query_strides[1]
    pointers += queries.to(tl.int64)[:, None] * grad_query_strides[2] + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(pointers, rows.to(grad_query.dtype.element_ty), mask=(queries < num_queries)[:, None])
