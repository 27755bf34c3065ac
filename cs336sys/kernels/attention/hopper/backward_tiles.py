"""What both backward kernels for Hopper do: find their tiles, load them by TMA, and begin masked scores.

The kernels, ``backward`` and ``backward_reducer``, differ in who computes dQ.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from cs336sys.kernels.attention.hopper.gluon import tma_load
from cs336sys.kernels.attention.hopper.schedule import query_tiles

# The keys of one warpgroup, which are the rows of its matrix instructions, and the queries of a tile.
ROWS = gl.constexpr(64)
# Stands for a key behind the last one.
NOBODY_SEES = gl.constexpr(2**31 - 1)
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)

_query_tiles = gluon.jit(query_tiles)


@gluon.jit
def item(schedule, num_queries, CAUSAL: gl.constexpr):
    """(first key, sequence, first tile of queries, end of the tiles) of this program."""
    entry = schedule + gl.load(schedule + gl.program_id(0) * 2 + 1) * 2
    first_key = gl.load(entry) * (2 * ROWS)
    first, end = _query_tiles(first_key, num_queries, ROWS, CAUSAL)
    return first_key, gl.load(entry + 1), first, end


@gluon.jit
def load_tiles(tensors, buffers, barriers, schedule, shape, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """The producer: keys and values once, then every tile of queries that sees them; returns (batch, head, first key).

    ``buffers`` and ``barriers`` begin with those that the names below say.
    """
    query, key, value, grad_out, statistics, _, _, _ = tensors
    key_tiles, value_tiles, query_ring, grad_out_ring = buffers[0], buffers[1], buffers[2], buffers[3]
    logsumexp_ring, delta_ring = buffers[4], buffers[5]
    key_ready, value_ready, query_ready = barriers[0], barriers[1], barriers[2]
    grad_out_ready, tile_free = barriers[3], barriers[4]
    num_heads, num_queries, _, _ = shape
    first_key, sequence, first, end = item(schedule, num_queries, CAUSAL)
    batch = sequence // num_heads
    head = sequence % num_heads
    mbarrier.expect(key_ready.index(0), 2 * key.block_type.nbytes)
    mbarrier.expect(value_ready.index(0), 2 * value.block_type.nbytes)
    for consumer in gl.static_range(2):
        tma_load(key, [batch, head, first_key + consumer * ROWS, 0], key_ready.index(0), key_tiles.index(consumer))
    for consumer in gl.static_range(2):
        row = first_key + consumer * ROWS
        tma_load(value, [batch, head, row, 0], value_ready.index(0), value_tiles.index(consumer))
    for tile in range(first, end):
        use = tile - first
        slot = use % STAGES
        first_query = tile * ROWS
        mbarrier.wait(tile_free.index(slot), ((use // STAGES) & 1) ^ 1)
        mbarrier.expect(query_ready.index(slot), query.block_type.nbytes + 2 * statistics.block_type.nbytes)
        tma_load(query, [batch, head, first_query, 0], query_ready.index(slot), query_ring.index(slot))
        tma_load(statistics, [2 * sequence, first_query], query_ready.index(slot), logsumexp_ring.index(slot))
        tma_load(statistics, [2 * sequence + 1, first_query], query_ready.index(slot), delta_ring.index(slot))
        mbarrier.expect(grad_out_ready.index(slot), grad_out.block_type.nbytes)
        tma_load(grad_out, [batch, head, first_query, 0], grad_out_ready.index(slot), grad_out_ring.index(slot))
    return batch, head, first_key


@gluon.jit
def issue_scores(
    tile,
    use,
    there_is_one,
    key_operand,
    query_ring,
    query_ready,
    first_key,
    num_keys,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Begins S^T of a tile of queries, with -inf where a query does not see a key.

    The mask is what the sums start from: registers are scarcer once they are complete. ``key_operand``: the 64 keys in
    shared memory or, as left operand, in registers.
    """
    slot = use % STAGES
    mbarrier.wait(query_ready.index(slot), (use // STAGES) & 1, pred=there_is_one)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    last_key = first_key + ROWS - 1
    # Keys behind the last one end up in no dK or dV, but exp2 of their score 0 may be inf and would reach dQ.
    masked = last_key >= num_keys
    if CAUSAL:
        masked = masked or tile * ROWS < last_key
    start = gl.zeros([ROWS, ROWS], gl.float32, layout)
    if masked:
        keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        keys = gl.where(keys < num_keys, keys, NOBODY_SEES)
        if CAUSAL:
            queries = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
            visible = keys[:, None] <= queries[None, :]
        else:
            visible = (keys < NOBODY_SEES)[:, None]
        start = gl.where(visible, start, float("-inf"))
    return warpgroup_mma(key_operand, query_ring.index(slot).permute([1, 0]), start, use_acc=masked, is_async=True)
