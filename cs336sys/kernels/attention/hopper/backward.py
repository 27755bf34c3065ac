"""FlashAttention backward for Hopper in Gluon, head dimension 128: dK, dV in registers, dQ added up in memory.

A program takes 128 keys of one sequence, 64 for each of two warpgroups, and streams the queries that see them in tiles
of 64, loaded by one more warp. Tiles of scores are transposed, S^T = K Q^T, because P^T and dS^T are then the left
operands of dV and dK, which the tensor cores take from registers. Each warpgroup computes, for one tile of queries,

    dP^T = V dO^T - D    P^T = exp2(S^T - L)    dV += P^T dO    dS^T = P^T dP^T to shared memory
    dQ = dS K    dK += dS^T Q    S^T = K Q^T - L of the next tile

of dQ, when both have written dS^T, for all 128 keys and its half of the head dimension: dQ leaves the multiprocessor
once for 128 keys, not once for 64, and while dK and the next S^T are computed. L and D are what the sums of S^T and
dP^T start from. Up to head dimension 64 there are registers for another division of labour: backward_reducer; 256 has
backward_wide.

A program works through the items that the host's schedule gives it; where programs take turns, each has one. Keys have
two slots, so that the next item's are there when an item ends; values have one, which is loaded again when the last
visit has ended. dK is stored from the slot of the keys, dV from where dS^T was. More than 195 KiB of shared memory
would leave less of the cache through which dQ is added: with 32 KiB that nobody used the pass took 2 % longer.

Barriers work as in forward.py. ``keys_free``: both warpgroups have begun an item, and the results of the one before
have left; the slot that it had is free. ``grad_scores_ready`` counts both warpgroups. The two buffers of dS^T need no
barrier of the other direction: a warpgroup announces tile i - 1 only after its dQ of tile i - 2 is complete, and nobody
writes tile i before seeing tile i - 1 announced by both.

Sources: equations 13 to 19 of the handout; Shah et al., "FlashAttention-3" (2024), appendix B.1.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336sys.kernels.attention.hopper import backward_tiles as tiles
from cs336sys.kernels.attention.hopper.backward_tiles import FIRST, ROWS, SECOND, TURNS, Shape, Shared, Tensors
from cs336sys.kernels.attention.hopper.gluon import (
    change_kernels,
    new_barriers,
    reinterpret,
    store_wait,
    thread_barrier,
    tma_store,
)

Buffers = namedtuple(
    "Buffers", "key_tiles value_tiles query_ring grad_out_ring logsumexp_ring delta_ring grad_scores_tiles"
)
Barriers = namedtuple(
    "Barriers",
    "key_ready value_ready keys_free query_ready grad_out_ready tile_free grad_scores_ready turn",
)


@gluon.jit
def _producer(shared, turns, CONFIG: gl.constexpr):
    """Load the keys and first queries of an item while the one before ends, then its values and other queries."""
    tensors, buffers, barriers, schedule, shape = shared
    STAGES: gl.constexpr = CONFIG.stages
    first_work, end_work = tiles.rows_of_program(schedule, CONFIG)
    first_use = 0
    for work in range(first_work, end_work):
        round = work - first_work
        slot = round % 2
        item = tiles.read_item(schedule, work, shape, 2 * ROWS, CONFIG)
        mbarrier.wait(barriers.keys_free.index(slot), ((round - 1) // 2) & 1, pred=round > 0)
        tiles.load_operand(tensors.key, buffers.key_tiles, barriers.key_ready, slot, item, shape, TILES=2)
        if round == 0:  # The kernel before wrote the statistics that come next.
            change_kernels()
        _, _, _, first, end = item
        second = min(first + 1, end)
        tiles.load_queries(shared, turns, item, first_use, (first, second), TILES=2, ENDS_TURNS=True, CONFIG=CONFIG)
        last_use = max(first_use, 1) - 1  # Of the item before.
        mbarrier.wait(barriers.tile_free.index(last_use % STAGES), (last_use // STAGES) & 1, pred=first_use > 0)
        tiles.load_operand(tensors.value, buffers.value_tiles, barriers.value_ready, 0, item, shape, TILES=2)
        end_load = end + (STAGES if CONFIG.ordered else 0)
        tiles.load_queries(shared, turns, item, first_use, (second, end_load), TILES=2, ENDS_TURNS=True, CONFIG=CONFIG)
        first_use += end - first


@gluon.jit
def _consumer(shared, pieces, scale, scale_log2, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    tiles.consume(shared, pieces, scale, scale_log2, _item_gradients, CONSUMER, CONFIG)


@gluon.jit
def _item_gradients(shared, pieces, numbers, item, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Compute dK and dV of a warpgroup's 64 keys of an item, and half of the columns of dQ for all of its 128 keys.

    ``numbers``: scale, scale_log2, the item's row of the schedule, how many items the program has had before, and how
    often it has used the rings of query tiles.
    """
    tensors, buffers, barriers, schedule, shape = shared
    key_tiles, value_tiles, query_ring, grad_out_ring, logsumexp_ring, delta_ring, grad_scores_tiles = buffers
    _, _, _, query_ready, grad_out_ready, tile_free, grad_scores_ready, _ = barriers
    scale, scale_log2, work, round, first_use = numbers
    STAGES: gl.constexpr = CONFIG.stages
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    dtype: gl.constexpr = tensors.key.dtype
    HALF: gl.constexpr = HEAD_DIM // 2
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])  # wgmma, 4 warps x 16 rows
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, grad_layout, 2)
    query_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    half_zeros = gl.zeros([ROWS, HALF], gl.float32, half_layout)

    first_key, key_sequence, first_tile, first, end = item
    first_key += CONSUMER * ROWS
    query_at_key = tiles.query_at_key(first_key, shape, CONFIG)
    grad_key_sum = gl.zeros([ROWS, HEAD_DIM], gl.float32, grad_layout)
    grad_value_sum = gl.zeros([ROWS, HEAD_DIM], gl.float32, grad_layout)
    # The sum of dQ has, for each tile of queries, the half tile of the first warpgroup, and behind it the second's.
    sequence = tiles.first_sequence(key_sequence, shape, CONFIG)
    sums = tensors.grad_query_sum + sequence.to(gl.int64) * shape.padded_queries * HEAD_DIM + CONSUMER * ROWS * HALF
    keys_slot = round % 2
    first_slot = first_use % STAGES
    mbarrier.wait(barriers.key_ready.index(keys_slot), (round // 2) & 1)
    mbarrier.wait(query_ready.index(first_slot), (first_use // STAGES) & 1, pred=first < end)
    next_query = tiles.tile_of(first, first_tile, shape, CONFIG) * ROWS
    logsumexps = logsumexp_ring.index(first_slot).reshape([ROWS]).load(query_layout)
    scores = warpgroup_mma(
        key_tiles.index(2 * keys_slot + CONSUMER),
        query_ring.index(first_slot).permute([1, 0]),
        tiles.scores_start(logsumexps, scale_log2, next_query, query_at_key, shape, CONFIG),
        is_async=True,
    )
    mbarrier.wait(barriers.value_ready.index(0), round & 1)
    # The results of the item before lie where its keys were and where dS^T comes next.
    store_wait(0)
    thread_barrier()
    mbarrier.arrive(barriers.keys_free.index((round + 1) % 2), count=1)
    scores = warpgroup_mma_wait(0, [scores])
    for visit in range(first, end):
        use = first_use + visit - first
        gl.assume(use >= 0)
        slot = use % STAGES
        # Always 0, but the compiler does not know: it would compute descriptors of all keys and values before the loop
        # and keep them in registers, of which there are none to spare.
        zero = use >> 30
        first_keys = 2 * keys_slot + zero
        grad_weights = tiles.grad_weights_start(delta_ring.index(slot).reshape([ROWS]).load(query_layout))
        mbarrier.wait(grad_out_ready.index(slot), (use // STAGES) & 1)
        grad_weights = warpgroup_mma(
            value_tiles.index(zero + CONSUMER),
            grad_out_ring.index(slot).permute([1, 0]),
            grad_weights,
            is_async=True,
        )
        weights = gl.exp2(scores * scale_log2)
        left = gl.convert_layout(weights.to(dtype), left_layout)
        grad_value_sum = warpgroup_mma(left, grad_out_ring.index(slot), grad_value_sum, is_async=True)
        grad_weights = warpgroup_mma_wait(1, [grad_weights])
        grad_scores = (weights * grad_weights).to(dtype)

        buffer = use % 2
        grad_scores_tiles.index(2 * CONSUMER + buffer).store(grad_scores)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(grad_scores_ready.index(buffer), count=1)
        left = gl.convert_layout(grad_scores, left_layout)
        # After the last tile the next S^T is computed from whatever lies in the ring, and nobody reads it.
        next_slot = (use + 1) % STAGES
        mbarrier.wait(query_ready.index(next_slot), ((use + 1) // STAGES) & 1, pred=visit + 1 < end)
        logsumexps = logsumexp_ring.index(next_slot).reshape([ROWS]).load(query_layout)
        mbarrier.wait(grad_scores_ready.index(buffer), (use // 2) & 1)
        grad_query = warpgroup_mma(
            grad_scores_tiles.index(buffer).permute([1, 0]),
            key_tiles.index(first_keys).slice(CONSUMER * HALF, HALF, 1),
            half_zeros,
            use_acc=False,
            is_async=True,
        )
        grad_query = warpgroup_mma(
            grad_scores_tiles.index(2 + buffer).permute([1, 0]),
            key_tiles.index(first_keys + 1).slice(CONSUMER * HALF, HALF, 1),
            grad_query,
            is_async=True,
        )
        grad_key_sum = warpgroup_mma(left, query_ring.index(slot), grad_key_sum, is_async=True)
        # Products finish in the order of their issue: one outstanding means that dQ is there.
        grad_value_sum, grad_query = warpgroup_mma_wait(1, [grad_value_sum, grad_query])
        if CONFIG.ordered:
            tiles.wait_for_turn(barriers.turn, use)
        tiles.store_sums(sums + tiles.grad_query_offset(visit, first_tile, shape, CONFIG), grad_query, tiles.ADD)
        # Not before dQ has left: S^T takes its registers.
        next_query = tiles.tile_of(visit + 1, first_tile, shape, CONFIG) * ROWS
        scores = warpgroup_mma(
            key_tiles.index(first_keys + CONSUMER),
            query_ring.index(next_slot).permute([1, 0]),
            tiles.scores_start(logsumexps, scale_log2, next_query, query_at_key, shape, CONFIG),
            is_async=True,
        )
        grad_key_sum, scores = warpgroup_mma_wait(0, [grad_key_sum, scores])
        mbarrier.arrive(tile_free.index(slot), count=1)

    if tiles.is_piece(schedule, work, CONFIG):
        share = tiles.pieces_of(pieces, schedule, work, NUM_TILES=2, CONFIG=CONFIG) + CONSUMER * ROWS * HEAD_DIM
        tiles.store_sums(share, grad_key_sum * scale, tiles.WRITE)
        tiles.store_sums(share + 2 * ROWS * HEAD_DIM, grad_value_sum, tiles.WRITE)  # Behind dK of the item's 128 keys.
    else:
        # dK takes the place of the keys, dV of two tiles of dS^T, when the other warpgroup has read them, too.
        grad_key_tile = key_tiles.index(2 * keys_slot + CONSUMER)
        grad_value_tiles = reinterpret(grad_scores_tiles, dtype, [2, ROWS, HEAD_DIM], key_tiles.layout)
        grad_value_tile = grad_value_tiles.index(CONSUMER)
        last_use = first_use + end - first - 1
        mbarrier.wait(tile_free.index(last_use % STAGES), (last_use // STAGES) & 1, pred=last_use >= 0)
        grad_key_tile.store((grad_key_sum * scale).to(dtype))
        grad_value_tile.store(grad_value_sum.to(dtype))
        fence_async_shared()
        thread_barrier()
        # Read once more, not kept: for want of registers.
        item = tiles.read_item(schedule, work, shape, 2 * ROWS, CONFIG)
        batch = item.key_sequence // shape.num_key_heads
        key_head = item.key_sequence % shape.num_key_heads
        tma_store(tensors.grad_key, [batch, key_head, item.first_key + CONSUMER * ROWS, 0], grad_key_tile)
        tma_store(tensors.grad_value, [batch, key_head, item.first_key + CONSUMER * ROWS, 0], grad_value_tile)


@gluon.jit(do_not_specialize=Shape._fields)
def backward_kernel(
    query, key, value, grad_out, statistics, grad_key, grad_value, grad_query_sum, turns, pieces, schedule,
    num_key_heads, num_queries, num_keys, padded_queries, scale, scale_log2, group_size, window, window_tiles,
    diagonal, CONFIG: gl.constexpr,
):  # fmt: skip
    """Write dK and dV of 128 keys of one sequence; add their share of dQ / scale to grad_query_sum.

    All tensors but the last four are TMA descriptors: statistics (2 * sequences, padded_queries) as ``prepare_kernel``
    writes them, the others (batch, head, row, element). grad_query_sum is in the order that ``convert.py`` describes.
    ``turns`` and ``pieces``: as ``HopperBackwardConfig`` says.
    """
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    STAGES: gl.constexpr = CONFIG.stages
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # Swizzled by 128 bytes; 16 bits, two dimensions.
    statistics_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)  # Not swizzled; 32 bits.
    buffers = Buffers(
        key_tiles=gl.allocate_shared_memory(dtype, [4, ROWS, HEAD_DIM], layout),  # Two slots of 128 keys.
        value_tiles=gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], layout),
        query_ring=gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout),
        grad_out_ring=gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout),
        # Two tiles of each warpgroup.
        grad_scores_tiles=gl.allocate_shared_memory(dtype, [4, ROWS, ROWS], layout),
        logsumexp_ring=gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], statistics_layout),
        delta_ring=gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], statistics_layout),
    )
    barriers = Barriers(  # Of each kind how many there are, and how many arrivals end a phase.
        key_ready=new_barriers(2, 1),
        value_ready=new_barriers(1, 1),
        keys_free=new_barriers(2, 2),
        query_ready=new_barriers(STAGES, 1),
        grad_out_ready=new_barriers(STAGES, 1),
        tile_free=new_barriers(STAGES, 2),
        grad_scores_ready=new_barriers(2, 2),
        turn=new_barriers(TURNS, 1),
    )
    fence_async_shared()

    tensors = Tensors(query, key, value, grad_out, statistics, grad_key, grad_value, grad_query_sum)
    shape = Shape(num_key_heads, num_queries, num_keys, padded_queries, group_size, window, window_tiles, diagonal)
    shared = Shared(tensors, buffers, barriers, schedule, shape)
    # Last: warps, and registers of a thread, of the consumers. The producer has the launch's 4 warps, and 24 are left.
    gl.warp_specialize(
        [
            (_producer, (shared, turns, CONFIG)),
            (_consumer, (shared, pieces, scale, scale_log2, FIRST, CONFIG)),
            (_consumer, (shared, pieces, scale, scale_log2, SECOND, CONFIG)),
        ],
        [4, 4],
        [CONFIG.consumer_registers, CONFIG.consumer_registers],
    )
