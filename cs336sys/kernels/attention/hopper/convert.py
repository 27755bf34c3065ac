"""dQ from its float32 sum, which lies in memory as the threads of the backward kernels hold it: plain Triton.

A warpgroup's tile of 64 queries and N columns of dQ is the result of a matrix product. For every 8 columns lane l of
warp w holds four numbers, in registers in a row: two neighbours in row 16 w + l // 4, and the two 8 rows below. They
lie in memory as they come, the four of each lane, lane after lane, warp after warp, 8 columns after 8 columns: so a
thread adds or stores them by one instruction. The order is put right here.

Source: PTX ISA, register fragments of wgmma.mma_async.m64nNk16, accumulator D.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

ROWS = tl.constexpr(64)  # The queries of a tile.


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "num_queries"])
def convert_register_order_kernel(
    grad_query_sum, grad_query, grad_query_strides, num_tiles, num_heads, num_queries, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write dQ = scale * its sum, for 64 queries of one sequence; a warpgroup's tile has COLUMNS of the head dimension.

    EARLY: launched while the kernel that makes the sum may still run.
    """
    if EARLY:
        gdc_wait()
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


@triton.jit(do_not_specialize=["first_item", "num_pieces", "num_key_heads", "num_keys"])
def sum_pieces_kernel(
    pieces, grad_key, grad_value, schedule, grad_key_strides, grad_value_strides, first_item, num_pieces, num_key_heads,
    num_keys, HEAD_DIM: tl.constexpr, NUM_TILES: tl.constexpr, COLUMNS: tl.constexpr, AT_A_TIME: tl.constexpr,
):  # fmt: skip
    """Write COLUMNS of dK and dV of 64 keys: sums over the pieces that an item was cut into, AT_A_TIME of them at once.

    An item has NUM_TILES times 64 keys, whose shares lie as the backward kernels wrote them; ``first_item``: where in
    the schedule the first such item stands.
    """
    PARTS: tl.constexpr = HEAD_DIM // COLUMNS
    item = tl.program_id(0) // (NUM_TILES * PARTS)
    tile = tl.program_id(0) // PARTS % NUM_TILES
    first_column = tl.program_id(0) % PARTS * COLUMNS
    entry = schedule + (first_item + item) * 2
    keys = (tl.load(entry) * NUM_TILES + tile) * ROWS + tl.arange(0, ROWS)
    sequence = tl.load(entry + 1)
    batch = (sequence // num_key_heads).to(tl.int64)
    head = (sequence % num_key_heads).to(tl.int64)
    columns = first_column + tl.arange(0, COLUMNS)
    for gradient in tl.static_range(2):  # dK, then dV
        sums = tl.zeros([ROWS * COLUMNS], tl.float32)
        for first_piece in range(0, num_pieces, AT_A_TIME):
            # All of them on their way at the same time: the latency of L2 is what a program waits for.
            piece = first_piece + tl.arange(0, AT_A_TIME)
            shares = (2 * (item * num_pieces + piece) + gradient) * NUM_TILES + tile  # In the order of ``pieces``.
            offsets = shares.to(tl.int64) * (ROWS * HEAD_DIM) + first_column * ROWS
            elements = pieces + offsets[:, None] + tl.arange(0, ROWS * COLUMNS)[None, :]
            sums += tl.sum(tl.load(elements, mask=(piece < num_pieces)[:, None], other=0.0), 0)
        # 8 columns, warp, lane // 4, lane % 4, row + 0 or 8, column + 0 or 1.
        rows = sums.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([ROWS, COLUMNS])
        grad = grad_key if gradient == 0 else grad_value
        strides = grad_key_strides if gradient == 0 else grad_value_strides
        pointers = grad + batch * strides[0] + head * strides[1] + keys.to(tl.int64)[:, None] * strides[2]
        tl.store(pointers + columns[None, :], rows.to(grad.dtype.element_ty), mask=(keys < num_keys)[:, None])
