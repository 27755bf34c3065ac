"""FlashAttention backward for Hopper in Gluon, head dimension 256: two programs of a cluster exchange dS^T.

An experiment that is no part of the package: docs/kernels.md says why, and what it gains. ``cluster_backward_plan`` is
called like the package's plans; time_cluster_backward.py checks and times it. It lives on what the package has:
backward_wide.py and its like are files of cs336sys/kernels/attention/hopper.

As in backward_wide.py the warpgroups of a program share 64 keys. Two such programs, of 128 keys of one sequence, form a
thread-block cluster. Each copies dS^T into the other's shared memory, and computes 128 of the 256 columns of dQ for the
keys of both: so each query gets half as many additions. A warpgroup computes 64 columns, 32 registers of a thread
instead of 64, which makes room for S^T of the next tile. Tile by tile, with products in the order of their issue:

    dP^T of tile i                                             while P^T of tile i is computed from S^T
    dV                                                         when both warpgroups have written P^T
    dQ of tile i - 1 = dS K + the other's dS and K             a tile later: the exchange has all that time
    dK of tile i, S^T of tile i + 1                            when both have written dS^T
    three quarters of dQ of tile i - 1 leave the registers     while these run; the last quarter behind dV of tile i + 1

Barriers work as in backward_wide.py. ``peer_ready``: the neighbour's dS^T has arrived in one of two buffers;
``peer_free``: it has read what was sent to it two tiles ago, and so the copy from the own buffer has ended, too. dO has
one buffer: with two, nothing else would fit into shared memory.

Gluon of triton 3.6 has no instructions for clusters, so they are inline assembly, which needs addresses in shared
memory. The compiler lays out allocations by size, the largest first; ``ClusterLaunch`` compares what follows from that
(``PEER_READY_AT``) with the addresses in what was compiled, and refuses to launch what has others.

Source: the exchange is that of FlashAttention 4 on Blackwell; https://github.com/Dao-AILab/flash-attention/pull/2889.
"""

import re
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.kernels.attention.hopper import backward_tiles as tiles
from cs336sys.kernels.attention.hopper import plans
from cs336sys.kernels.attention.hopper.backward_tiles import FIRST, ROWS, SECOND, Item, Shape, Shared, Tensors
from cs336sys.kernels.attention.hopper.gluon import (
    change_kernels,
    new_barriers,
    store_wait,
    thread_barrier,
    tma_load,
    tma_store,
)
from cs336sys.kernels.attention.hopper.settings import HopperBackwardSettings
from cs336sys.kernels.attention.plan import Descriptors, Launch
from cs336sys.kernels.attention.problem import AttentionOptions, Operand, make_problem

CLUSTER = gl.constexpr(2)  # The programs of a cluster.
HALF_ROWS = gl.constexpr(ROWS.value // 2)  # The queries of a tile for which one warpgroup computes scores.
HALF, QUARTER = gl.constexpr(128), gl.constexpr(64)  # Columns: a program's of dQ, and a warpgroup's of them.
TILE_BYTES = gl.constexpr(2 * ROWS.value * ROWS.value)
# Three times 64 keys x 128 columns lie in one allocation with two tiles each of dS^T and the neighbour's, 64 x 64, each
# half as large: this is the largest allocation, and so the first.
GRAD_SCORES, PEER_SCORES, NUM_TILES = gl.constexpr(6), gl.constexpr(8), gl.constexpr(10)
# Behind all tiles: those, queries, values, dO and P^T. Four barriers are used, of as many as are larger than all else.
NUM_BARRIERS = gl.constexpr(128)
PEER_READY_AT = gl.constexpr((NUM_TILES.value + 8 + 4 + 4 + 2) * TILE_BYTES.value)
PEER_FREE_AT = gl.constexpr(PEER_READY_AT.value + 16)

Buffers = namedtuple(
    "Buffers",
    "key_tiles value_tiles query_ring grad_out_ring logsumexp_ring delta_ring weights_tiles grad_scores_tiles",
)
Barriers = namedtuple(
    "Barriers",
    "key_ready value_ready query_ready grad_out_ready query_free grad_out_free weights_ready grad_scores_ready "
    "results_ready exchange",
)


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Return the same shared memory as tiles of another shape."""
    method = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def cluster_barrier():
    """Wait for all warps of both programs of a cluster, and see what each has done: also barriers initialised."""
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; "
        "mov.u32 $0, $1;",
        "=r,r",
        [0],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def peer_copy(source, target, num_bytes, barrier, peer):
    """Copy shared memory to another program of the cluster, whose barrier counts the bytes; one thread of a warpgroup.

    Memory and barrier are offsets in shared memory.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread, from, to, bar;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 first, thread, 0;
        mov.u32 from, global_smem;
        add.u32 to, from, $2;
        add.u32 bar, from, $4;
        add.u32 from, from, $1;
        mapa.shared::cluster.u32 to, to, $5;
        mapa.shared::cluster.u32 bar, bar, $5;
        @first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [from], $3, [bar];
        mov.u32 $0, 0;
        }""",
        "=r,r,r,r,r,r",
        [source, target, num_bytes, barrier, peer],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def peer_arrive(barrier, peer):
    """Arrive at a barrier of another program of the cluster, an offset in shared memory; one thread of a warpgroup.

    Only reads may come before: with ``release.cluster`` a thread would wait until all that it added is in memory
    (1x16x16384x256: 27.1 ms instead of 25.6).
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread, bar;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 first, thread, 0;
        mov.u32 bar, global_smem;
        add.u32 bar, bar, $1;
        mapa.shared::cluster.u32 bar, bar, $2;
        @first mbarrier.arrive.shared::cluster.b64 _, [bar];
        mov.u32 $0, 0;
        }""",
        "=r,r,r",
        [barrier, peer],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _read_item(schedule, shape, CONFIG: gl.constexpr):
    """Return this program's half of an item of 128 keys, which the two of a cluster share.

    Both halves have the same visits: under a causal mask the second's first is to queries that see none of its keys.
    """
    first_key, key_sequence, first_tile, first, end = tiles.read_item(
        schedule, gl.program_id(0) // CLUSTER, shape, CLUSTER * ROWS, CONFIG
    )
    return Item(first_key + gl.program_id(0) % CLUSTER * ROWS, key_sequence, first_tile, first, end)


@gluon.jit
def _load_queries(shared, item, CONFIG: gl.constexpr):
    """Do what ``tiles.load_queries`` does without turns, for a ring of queries and one buffer of dO."""
    tensors, buffers, barriers, _, shape = shared
    query, _, _, grad_out, statistics, _, _, _ = tensors
    query_ready, grad_out_ready = barriers.query_ready, barriers.grad_out_ready
    logsumexp_ring, delta_ring, grad_out_ring = buffers.logsumexp_ring, buffers.delta_ring, buffers.grad_out_ring
    STAGES: gl.constexpr = CONFIG.stages
    _, key_sequence, first_tile, first, end = item
    batch = key_sequence // shape.num_key_heads
    key_head = key_sequence % shape.num_key_heads
    first_of_group = tiles.first_sequence(key_sequence, shape, CONFIG)
    first_head = tiles.first_sequence(key_head, shape, CONFIG)  # Of the group: heads are numbered as sequences are.
    for visit in range(first, end):
        use = visit - first
        slot = use % STAGES
        first_query = tiles.tile_of(visit, first_tile, shape, CONFIG) * ROWS
        head = first_head + tiles.member_of(visit, first_tile, shape, CONFIG)
        sequence = first_of_group + tiles.member_of(visit, first_tile, shape, CONFIG)
        mbarrier.wait(barriers.query_free.index(slot), ((use // STAGES) & 1) ^ 1)
        mbarrier.expect(query_ready.index(slot), query.block_type.nbytes + 2 * statistics.block_type.nbytes)
        tma_load(query, [batch, head, first_query, 0], query_ready.index(slot), buffers.query_ring.index(slot))
        tma_load(statistics, [2 * sequence, first_query], query_ready.index(slot), logsumexp_ring.index(slot))
        tma_load(statistics, [2 * sequence + 1, first_query], query_ready.index(slot), delta_ring.index(slot))
        mbarrier.wait(barriers.grad_out_free.index(0), (use & 1) ^ 1)
        mbarrier.expect(grad_out_ready.index(0), grad_out.block_type.nbytes)
        tma_load(grad_out, [batch, head, first_query, 0], grad_out_ready.index(0), grad_out_ring.index(0))


@gluon.jit
def _producer(shared, CONFIG: gl.constexpr):
    tensors, buffers, barriers, schedule, shape = shared
    cluster_barrier()
    item = _read_item(schedule, shape, CONFIG)
    rank = gl.program_id(0) % CLUSTER
    batch = item.key_sequence // shape.num_key_heads
    key_head = item.key_sequence % shape.num_key_heads
    key_ready, value_ready = barriers.key_ready.index(0), barriers.value_ready.index(0)
    mbarrier.expect(key_ready, 3 * tensors.key.block_type.nbytes)
    mbarrier.expect(value_ready, tensors.value.block_type.nbytes)
    for half in gl.static_range(2):
        tma_load(tensors.key, [batch, key_head, item.first_key, half * HALF], key_ready, buffers.key_tiles.index(half))
    peer_key = item.first_key + ROWS - 2 * rank * ROWS
    tma_load(tensors.key, [batch, key_head, peer_key, rank * HALF], key_ready, buffers.key_tiles.index(2))
    tma_load(tensors.value, [batch, key_head, item.first_key, 0], value_ready, buffers.value_tiles.index(0))
    change_kernels()  # What follows was written by the kernel before.
    _load_queries(shared, item, CONFIG)
    if not tiles.is_piece(schedule, gl.program_id(0) // CLUSTER, CONFIG):
        mbarrier.wait(barriers.results_ready.index(0), 0)
        row = item.first_key
        for half in gl.static_range(2):
            tma_store(tensors.grad_key, [batch, key_head, row, half * HALF], buffers.key_tiles.index(half))
        tma_store(tensors.grad_value, [batch, key_head, row, 0], buffers.value_tiles.index(0))
        store_wait(0)
    cluster_barrier()


@gluon.jit
def _idle(_):
    """Come to the barriers of the cluster, where all warps of a launch must: Gluon launches a multiple of four."""
    cluster_barrier()
    cluster_barrier()


@gluon.jit
def _rows_of(ring, slot, FIRST_ROW: gl.constexpr, layout: gl.constexpr):
    """Load a warpgroup's L or D."""
    return ring.index(slot).reshape([ROWS]).slice(FIRST_ROW, HALF_ROWS, 0).load(layout)


@gluon.jit
def _issue_scores(key_tiles, zero, query_rows, start):
    scores = warpgroup_mma(key_tiles.index(zero), query_rows.slice(0, HALF, 1).permute([1, 0]), start, is_async=True)
    return warpgroup_mma(
        key_tiles.index(zero + 1), query_rows.slice(HALF, HALF, 1).permute([1, 0]), scores, is_async=True
    )


@gluon.jit
def _issue_grad_query(buffers, buffer, zero, rank, CONSUMER: gl.constexpr):
    """Begin 64 columns of dQ: of the own keys, and of the neighbour's."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    grad_query = warpgroup_mma(
        buffers.grad_scores_tiles.index(GRAD_SCORES + buffer).permute([1, 0]),
        buffers.key_tiles.index(zero + rank).slice(CONSUMER * QUARTER, QUARTER, 1),
        gl.zeros([ROWS, QUARTER], gl.float32, layout),
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        buffers.grad_scores_tiles.index(PEER_SCORES + buffer).permute([1, 0]),
        buffers.key_tiles.index(zero + 2).slice(CONSUMER * QUARTER, QUARTER, 1),
        grad_query,
        is_async=True,
    )


@gluon.jit
def _announce(tile, values, ready, FIRST_ROW: gl.constexpr):
    """Write this warpgroup's half of a tile."""
    tile.slice(FIRST_ROW, HALF_ROWS, 1).store(values)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ready.index(0), count=1)


@gluon.jit
def _halves(values):
    """Split (64, N) into its first and its last N / 2 columns, which lie one behind the other in the sum of dQ, too."""
    return gl.split(values.reshape([ROWS, 2, values.shape[1] // 2]).permute([0, 2, 1]))


@gluon.jit
def _in_parts(grad_query):
    """Split columns of dQ into the first half, the third quarter and the last."""
    left, right = _halves(grad_query)
    third, last = _halves(right)
    return left, third, last


@gluon.jit
def _consumer(shared, pieces, scale, scale_log2, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Compute one warpgroup's half of the columns of dK and dV of the program's keys, and 64 columns of dQ."""
    tensors, buffers, barriers, schedule, shape = shared
    query_ready, grad_out_ready, exchange = barriers.query_ready, barriers.grad_out_ready, barriers.exchange
    weights_ready, grad_scores_ready = barriers.weights_ready, barriers.grad_scores_ready
    query_ring, grad_out_ring = buffers.query_ring, buffers.grad_out_ring
    STAGES: gl.constexpr = CONFIG.stages
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    dtype: gl.constexpr = tensors.key.dtype
    FIRST_ROW: gl.constexpr = CONSUMER * HALF_ROWS
    FIRST_COLUMN: gl.constexpr = CONSUMER * HALF
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_ROWS, 16])
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])  # wgmma, 4 warps x 16 rows
    quarter_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    query_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)

    cluster_barrier()
    first_key, key_sequence, first_tile, first, end = _read_item(schedule, shape, CONFIG)
    work, rank = gl.program_id(0) // CLUSTER, gl.program_id(0) % CLUSTER
    peer = 1 - rank
    grad_key_sum = gl.zeros([ROWS, HALF], gl.float32, grad_layout)
    grad_value_sum = gl.zeros([ROWS, HALF], gl.float32, grad_layout)
    # The sum of dQ has, for each tile of queries, that of each warpgroup of the cluster, one behind the other.
    sequence = tiles.first_sequence(key_sequence, shape, CONFIG)
    sums = tensors.grad_query_sum + sequence.to(gl.int64) * shape.padded_queries * HEAD_DIM
    sums += (2 * rank + CONSUMER) * ROWS * QUARTER
    mbarrier.wait(barriers.key_ready.index(0), 0)
    mbarrier.wait(barriers.value_ready.index(0), 0)
    mbarrier.wait(query_ready.index(0), 0, pred=first < end)
    logsumexps = _rows_of(buffers.logsumexp_ring, 0, FIRST_ROW, query_layout)
    first_query = tiles.tile_of(first, first_tile, shape, CONFIG) * ROWS + FIRST_ROW
    start = tiles.scores_start(logsumexps, scale_log2, first_query, first_key, shape, CONFIG)
    scores = _issue_scores(buffers.key_tiles, 0, query_ring.index(0).slice(FIRST_ROW, HALF_ROWS, 0), start)
    scores = warpgroup_mma_wait(0, [scores])
    _, _, last_quarter = _in_parts(gl.zeros([ROWS, QUARTER], gl.float32, quarter_layout))
    for visit in range(first, end):
        use = visit - first
        slot = use % STAGES
        # Always 0, as in backward_wide.py: so that the compiler computes no descriptors and masks before the loop.
        zero = use >> 30
        buffer = use % 2
        if CONSUMER == 0:
            mbarrier.expect(exchange.index(buffer), TILE_BYTES)
        deltas = _rows_of(buffers.delta_ring, slot, FIRST_ROW, query_layout)
        mbarrier.wait(grad_out_ready.index(0), use & 1)
        grad_weights = warpgroup_mma(
            buffers.value_tiles.index(zero),
            grad_out_ring.index(zero).slice(FIRST_ROW, HALF_ROWS, 0).permute([1, 0]),
            tiles.grad_weights_start(deltas),
            is_async=True,
        )
        weights = gl.exp2(scores * scale_log2)
        weights_tile = buffers.weights_tiles.index(buffer)
        _announce(weights_tile, weights.to(dtype), weights_ready, FIRST_ROW)
        mbarrier.wait(weights_ready.index(0), use & 1)
        grad_out_columns = grad_out_ring.index(zero).slice(FIRST_COLUMN, HALF, 1)
        grad_value_sum = warpgroup_mma(weights_tile, grad_out_columns, grad_value_sum, is_async=True)
        if use > 1:
            target = sums + tiles.grad_query_offset(visit - 2, first_tile, shape, CONFIG)
            tiles.add_grad_query(target + 3 * ROWS * QUARTER // 4, last_quarter)
        # dQ of the last tile. The first time it comes from whatever lies there, and nobody adds it.
        mbarrier.wait(exchange.index(buffer ^ 1), ((use - 1) // 2) & 1, pred=use > 0)
        grad_query = _issue_grad_query(buffers, buffer ^ 1, zero, rank, CONSUMER)
        # Products finish in the order of their issue: dP^T before dV, and the two of dQ.
        grad_weights = warpgroup_mma_wait(3, [grad_weights])
        grad_scores = (weights * grad_weights).to(dtype)
        grad_scores_tile = buffers.grad_scores_tiles.index(GRAD_SCORES + buffer)
        mbarrier.wait(exchange.index(2 + buffer), ((use // 2) & 1) ^ 1)
        _announce(grad_scores_tile, grad_scores, grad_scores_ready, FIRST_ROW)
        grad_value_sum = warpgroup_mma_wait(2, [grad_value_sum])
        mbarrier.arrive(barriers.grad_out_free.index(0), count=1)
        mbarrier.wait(grad_scores_ready.index(0), use & 1)
        if CONSUMER == 0:
            sent, received = (GRAD_SCORES + buffer) * TILE_BYTES, (PEER_SCORES + buffer) * TILE_BYTES
            peer_copy(sent, received, TILE_BYTES, PEER_READY_AT + 8 * buffer, peer)
        query_columns = query_ring.index(slot).slice(FIRST_COLUMN, HALF, 1)
        grad_key_sum = warpgroup_mma(grad_scores_tile, query_columns, grad_key_sum, is_async=True)
        # After the last tile the next S^T is computed from whatever lies in the ring, and nobody reads it.
        next_slot = (use + 1) % STAGES
        mbarrier.wait(query_ready.index(next_slot), ((use + 1) // STAGES) & 1, pred=visit + 1 < end)
        logsumexps = _rows_of(buffers.logsumexp_ring, next_slot, FIRST_ROW, query_layout)
        first_query = tiles.tile_of(visit + 1, first_tile, shape, CONFIG) * ROWS + FIRST_ROW
        start = tiles.scores_start(logsumexps, scale_log2, first_query, first_key + zero, shape, CONFIG)
        query_rows = query_ring.index(next_slot).slice(FIRST_ROW, HALF_ROWS, 0)
        scores = _issue_scores(buffers.key_tiles, zero, query_rows, start)
        grad_query = warpgroup_mma_wait(3, [grad_query])
        left, third_quarter, last_quarter = _in_parts(grad_query)
        if use > 0:
            peer_arrive(PEER_FREE_AT + 8 * (buffer ^ 1), peer)
            target = sums + tiles.grad_query_offset(visit - 1, first_tile, shape, CONFIG)
            tiles.add_grad_query(target, left)
            tiles.add_grad_query(target + ROWS * QUARTER // 2, third_quarter)
        grad_key_sum, scores = warpgroup_mma_wait(0, [grad_key_sum, scores])
        mbarrier.arrive(barriers.query_free.index(slot), count=1)

    if first + 1 < end:
        target = sums + tiles.grad_query_offset(end - 2, first_tile, shape, CONFIG)
        tiles.add_grad_query(target + 3 * ROWS * QUARTER // 4, last_quarter)
    if first < end:
        use = end - 1 - first
        mbarrier.wait(exchange.index(use % 2), (use // 2) & 1)
        grad_query = warpgroup_mma_wait(0, [_issue_grad_query(buffers, use % 2, 0, rank, CONSUMER)])
        tiles.add_grad_query(sums + tiles.grad_query_offset(end - 1, first_tile, shape, CONFIG), grad_query)
    # Both warpgroups have read the keys for dQ, before dK takes the place of all of them.
    mbarrier.arrive(grad_scores_ready.index(0), count=1)
    mbarrier.wait(grad_scores_ready.index(0), (end - first) & 1)
    if tiles.is_piece(schedule, work, CONFIG):
        share = tiles.pieces_of(pieces, schedule, work, NUM_TILES=CLUSTER, CONFIG=CONFIG)
        share += rank * ROWS * HEAD_DIM + CONSUMER * ROWS * HALF
        tiles.store_piece(share, grad_key_sum * scale)
        tiles.store_piece(share + CLUSTER * ROWS * HEAD_DIM, grad_value_sum)  # Behind dK of the item's 128 keys.
    else:
        buffers.value_tiles.index(0).slice(FIRST_COLUMN, HALF, 1).store(grad_value_sum.to(dtype))
        buffers.key_tiles.index(CONSUMER).store((grad_key_sum * scale).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(barriers.results_ready.index(0), count=1)
    cluster_barrier()  # The neighbour may still write to this program's shared memory.


@gluon.jit(do_not_specialize=Shape._fields)
def cluster_backward_kernel(
    query, key, value, grad_out, statistics, grad_key, grad_value, grad_query_sum, turns, pieces, schedule,
    num_key_heads, num_queries, num_keys, padded_queries, scale, scale_log2, group_size, window, window_tiles,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute what ``backward.backward_kernel`` does, which explains the arguments, in clusters of two programs.

    Num_ctas is 1, as if there were no cluster: it is launched in clusters (``ClusterLaunch``). Nobody takes ``turns``.
    """
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    STAGES: gl.constexpr = CONFIG.stages
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # Swizzled by 128 bytes; 16 bits, two dimensions.
    statistics_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)  # Not swizzled; 32 bits.
    key_tiles = gl.allocate_shared_memory(dtype, [NUM_TILES // 2, ROWS, HALF], layout)
    buffers = Buffers(
        key_tiles=key_tiles,
        grad_scores_tiles=reinterpret(key_tiles, dtype, [NUM_TILES, ROWS, ROWS], layout),
        value_tiles=gl.allocate_shared_memory(dtype, [1, ROWS, HEAD_DIM], layout),
        query_ring=gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], layout),
        grad_out_ring=gl.allocate_shared_memory(dtype, [1, ROWS, HEAD_DIM], layout),
        weights_tiles=gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], layout),
        logsumexp_ring=gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], statistics_layout),
        delta_ring=gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], statistics_layout),
    )
    # The neighbour's dS^T has arrived: one expects its bytes. It has read this program's: its two warpgroups say so.
    exchange = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(exchange.index(buffer), count=1)
        mbarrier.init(exchange.index(2 + buffer), count=2)
    barriers = Barriers(  # Of each kind how many there are, and how many arrivals end a phase.
        key_ready=new_barriers(1, 1),
        value_ready=new_barriers(1, 1),
        query_ready=new_barriers(STAGES, 1),
        grad_out_ready=new_barriers(1, 1),
        query_free=new_barriers(STAGES, 2),
        grad_out_free=new_barriers(1, 2),
        weights_ready=new_barriers(1, 2),
        grad_scores_ready=new_barriers(1, 2),
        results_ready=new_barriers(1, 2),
        exchange=exchange,
    )
    fence_async_shared()

    tensors = Tensors(query, key, value, grad_out, statistics, grad_key, grad_value, grad_query_sum)
    shape = Shape(num_key_heads, num_queries, num_keys, padded_queries, group_size, window, window_tiles)
    shared = Shared(tensors, buffers, barriers, schedule, shape)
    # The last two arguments: warps, and registers of a thread, of all functions but the first.
    gl.warp_specialize(
        [
            (_consumer, (shared, pieces, scale, scale_log2, FIRST, CONFIG)),
            (_consumer, (shared, pieces, scale, scale_log2, SECOND, CONFIG)),
            (_producer, (shared, CONFIG)),
            (_idle, (num_keys,)),
            (_idle, (num_keys,)),
        ],
        [4, 1, 2, 1],
        [CONFIG.consumer_registers, 24, 24, 24],  # 24: the fewest that a thread can have.
    )


def barrier_addresses(ptx: str) -> list[int]:
    """Return where barriers lie in shared memory, in the order in which they are initialised.

    0 where the address is no sum of a register and a number.
    """
    sums = dict(re.findall(r"add\.s32 \t(%r\d+), %r\d+, (\d+);", ptx))
    return [int(sums.get(register, 0)) for register in re.findall(r"mbarrier\.init\.\S+ \[(%r\d+)\]", ptx)]


class ClusterLaunch(Launch):
    """A kernel whose neighbouring programs form thread-block clusters, though each is compiled as if it were alone.

    ``num_programs`` are clusters: Triton multiplies the grid by what it is told to be the programs of one. The kernel
    finds the other's memory by itself: Gluon of triton 3.6 has no way to name it.
    """

    def _compile(self, tensors: Sequence[Tensor]) -> None:
        """Compile without a launch, and launch that in clusters: Triton does so only of what it compiles for them."""
        operands = list(tensors)
        for index, descriptors in enumerate(self.descriptors):
            operands[index] = descriptors.describe(tensors[index])
        grid = self.num_programs, 1, 1
        compiled = self._kernel.warmup(*operands, *self.arguments, grid=grid, **self._options)
        addresses = barrier_addresses(compiled.asm["ptx"])[:4]
        expected = [at + 8 * buffer for buffer in range(2) for at in (PEER_READY_AT.value, PEER_FREE_AT.value)]
        if addresses != expected:
            # A copy to the wrong place would overwrite the neighbour's tiles, or never arrive.
            raise CapabilityError(
                f"triton {triton.__version__} lays out barriers of clusters at {addresses} of shared memory, and the "
                f"kernel needs them at {expected}: triton 3.6 and 3.9 were seen to do so"
            )
        self.compiled = compiled
        driver = triton.runtime.driver.active
        self._device, self._current_stream = driver.get_current_device(), driver.get_current_stream
        _ = compiled.run  # Loads the kernel, and so finds its function.
        num_warps, _, shared_bytes = compiled.packed_metadata
        no_hooks = None, None, None  # As in Launch.
        self._handle = compiled.function, (num_warps, CLUSTER.value, shared_bytes), *no_hooks
        self(*tensors)


@dataclass(frozen=True)
class ClusterSettings(HopperBackwardSettings):
    """Those of the package's kernel for the head dimension, but items of as many keys as two programs have."""

    num_stages: int = 2
    kernel: str = "wide"

    @property
    def key_rows(self) -> int:
        return CLUSTER.value * ROWS.value


class ClusterBackwardPlan(plans.HopperBackwardPlan):
    """The launches of the package's plan, whose kernel is exchanged for that of clusters."""

    def _add_launches(self, deterministic: bool) -> None:
        if deterministic or self._problem.head_dim != 256:
            raise UsageError(
                f"clusters compute attention of head dimension 256 and take no turns to add to dQ, got head dimension "
                f"{self._problem.head_dim} and deterministic={deterministic}"
            )
        with mock.patch.object(plans, "hopper_backward_settings", return_value=ClusterSettings()):
            super()._add_launches(deterministic)

    def _only_pass(self) -> Launch:
        launch = super()._only_pass()  # With a program for each item or piece of one, which is a cluster here.
        return ClusterLaunch(
            cluster_backward_kernel,
            launch.num_programs,
            numbers=launch.arguments,
            constants=(),
            descriptors=launch.descriptors,
            **launch._options,
        )

    def _only_pass_descriptors(self) -> list[Descriptors]:
        """Return those of the package's kernel, but of half the columns for keys and dK.

        A program of a cluster loads keys in parts: for dQ it needs but one of the other program's.
        """
        query, _, *others, _, grad_value = super()._only_pass_descriptors()
        key, grad_key = (
            plans.GluonDescriptors(operand.shape, operand.strides, [1, 1, ROWS.value, HALF.value], self._problem.dtype)
            for operand in (self._operands[1], self._grad_operands[1])
        )
        return [query, key, *others, grad_key, grad_value]


def cluster_backward_plan(tensors: Sequence[Tensor], grads: Sequence[Tensor], is_causal: bool) -> ClusterBackwardPlan:
    """Plan the backward pass of these tensors, as ``choice.backward_plan`` does: query, key, value, output and dO."""
    query, key, value, out, grad_out = tensors
    operands = [Operand(tensor) for tensor in (query, key, value, grad_out)]
    problem = make_problem(query, key, operands, AttentionOptions(is_causal))
    results = [Operand(grad) for grad in grads]
    return ClusterBackwardPlan(problem, operands, Operand(out), results, query.device, deterministic=False)
