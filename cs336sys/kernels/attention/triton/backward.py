"""FlashAttention-2 backward in Triton: Algorithm 2 and equations 13 to 19 of the handout, in two forms.

*Fused*: a pass over tiles of keys computes dK and dV and adds its share of dQ to a float32 buffer: five matrix products
for a pair of tiles, but the additions come in any order. *Separate*: a second pass, over tiles of queries, computes dQ:
seven matrix products, deterministic. The two passes may share a launch. A kernel for D = rowsum(dO * O) comes before
either (``prepare``); after the fused pass another one converts dQ (``convert``).

With few tiles of keys the fused pass gives each of them to several programs, each of which takes a split of the
queries; they add up dK and dV as well in float32 buffers.
"""

from collections import namedtuple
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cs336sys.kernels.attention.triton.tiles import (
    LOG2_E,
    Dims,
    Rows,
    TileConfig,
    is_visible,
    keys_of_stretch,
    load_rows,
    query_of_key,
    store_rows,
    tile_of_program,
    visible_keys,
)

# ``statistics``: what prepare_kernel wrote. Sums are in float32.
Tensors = namedtuple("Tensors", "query key value grad_out statistics grad_query_sum grad_query grad_key grad_value")
BackwardStrides = namedtuple("BackwardStrides", "query key value grad_out grad_query grad_key grad_value")
Numbers = namedtuple(
    "Numbers",
    "num_heads group_size num_sequences num_queries padded_queries num_keys window diagonal sequences_per_group "
    "key_programs num_splits scale scale_log2",
)


@dataclass(frozen=True)
class BackwardConfig(TileConfig):
    """Constants of a backward pass: the kinds of program it has, and what they share.

    ``grouped``: heads of queries share one of keys. ``key_sums``: num_splits programs share a tile of keys. ``early``:
    the pass is launched before the kernel in front of it is done, and waits for what that wrote.
    """

    grouped: bool
    key_pass: bool
    query_pass: bool
    fused: bool
    key_sums: bool
    early: bool


@dataclass(frozen=True)
class PrepareConfig(Dims):
    """``early``: the pass behind may be launched when all programs end, or with ``at_once`` when all have begun."""

    rows: int
    fused: bool
    key_sums: bool
    has_delta: bool
    turns: bool
    early: bool
    at_once: bool


@dataclass(frozen=True)
class ConvertConfig(Dims):
    rows: int
    key_sums: bool


@triton.jit
def load_statistic(statistics, row, first_query, padded_queries, CONFIG: tl.constexpr):
    """Load a number for each query of a tile, from one row of statistics (rows, padded_queries)."""
    if CONFIG.tma:
        statistic = statistics.load([row, first_query]).reshape(CONFIG.query_rows)
    else:
        base = statistics + row.to(tl.int64) * padded_queries
        statistic = tl.load(base + first_query + tl.arange(0, CONFIG.query_rows))
    return statistic


@triton.jit
def base2_logsumexps(logsumexp, sequence, rows, num_queries):
    """Load logsumexp * log2(e) of some queries, from logsumexp (sequences, num_queries).

    Rows behind the last query, and those whose scores were all -inf, get +inf, so their weights exp2(score - inf) are 0
    and no pass needs a mask for them.
    """
    pointers = logsumexp + sequence.to(tl.int64) * num_queries + rows
    logsumexps = tl.load(pointers, mask=rows < num_queries, other=float("-inf"))
    return tl.where(logsumexps == float("-inf"), float("inf"), logsumexps * LOG2_E)


@triton.jit
def output_products(rows, grad_out_tile, first_row, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Compute D = rowsum(dO * O) of ROWS queries; ``rows``: of the output."""
    out_tile = load_rows(rows, first_row, ROWS, DIMS, TMA=False)
    return tl.sum(out_tile.to(tl.float32) * grad_out_tile.to(tl.float32), 1)


@triton.jit
def sum_pointers(sums, sequence, rows, padded_rows, DIMS: tl.constexpr):
    """Return pointers [ROWS, BLOCK_DIM] into sums (sequences * padded_rows, BLOCK_DIM)."""
    offsets = (sequence.to(tl.int64) * padded_rows + rows) * DIMS.block_dim
    return sums + offsets[:, None] + tl.arange(0, DIMS.block_dim)[None, :]


@triton.jit
def is_key_sequence(sequence, num_tiles, group_size):
    """Return whether the keys, too, have a sequence of this number: programs are numbered by sequences of queries."""
    return sequence < tl.num_programs(0) // num_tiles // group_size


# The pass of backward over tiles of keys, for dK and dV; fused, it adds its share of dQ as well.
#
# It works on transposed tiles, S^T = K Q^T, because P^T and dS^T are then the left operands of dV and dK, which the
# tensor cores take from registers.


@triton.jit
def _add_queries(grads, tiles, split, query_step, tensors, strides, sequence, numbers, CONFIG: tl.constexpr):
    """Return ``grads``, dK / scale and dV of a tile of keys, with what the queries of one sequence add to them.

    ``tiles``: of keys and values, and the first key.
    """
    grad_key_tile, grad_value_tile = grads
    key_tile, value_tile, first_key = tiles
    num_queries, num_keys, padded_queries = numbers.num_queries, numbers.num_keys, numbers.padded_queries
    QUERY_ROWS: tl.constexpr = CONFIG.query_rows
    PRECISION: tl.constexpr = CONFIG.precision
    batch = sequence // numbers.num_heads
    head = sequence % numbers.num_heads
    query_rows = Rows(tensors.query, strides.query, batch, head, num_queries)
    grad_out_rows = Rows(tensors.grad_out, strides.grad_out, batch, head, num_queries)
    # Query tiles in front of the keys see none of them; those on the diagonal need a mask; all later ones see all, up
    # to those that a window ends in, behind which none sees any.
    first_query = 0
    unmasked_query = 0
    if CONFIG.causal:
        first_query = query_of_key(first_key, numbers.diagonal, CONFIG) // QUERY_ROWS * QUERY_ROWS
        last_query = query_of_key(first_key + CONFIG.key_rows - 1, numbers.diagonal, CONFIG)
        unmasked_query = tl.cdiv(last_query, QUERY_ROWS) * QUERY_ROWS
    end_query = num_queries
    if CONFIG.windowed:
        end_query = tl.minimum(
            num_queries, query_of_key(first_key + CONFIG.key_rows - 1 + numbers.window, numbers.diagonal, CONFIG)
        )
    if CONFIG.fused and first_key + CONFIG.key_rows > num_keys:
        # Rows behind the last key end up in no dK or dV, but exp2 of their score 0 may be inf and would reach dQ.
        unmasked_query = end_query
    last_whole = end_query
    if CONFIG.windowed:
        # Of tiles that end here every query sees the first key.
        end_of_first = query_of_key(first_key + numbers.window, numbers.diagonal, CONFIG)
        last_whole = tl.maximum(unmasked_query, end_of_first // QUERY_ROWS * QUERY_ROWS)
    # Stretch 0: tiles on the diagonal, 1: tiles that see all keys, 2: tiles that a window ends in.
    for STRETCH in tl.static_range(3 if CONFIG.windowed else 2):
        begin = first_query
        end = tl.minimum(unmasked_query, end_query)
        if STRETCH == 1:
            begin = unmasked_query
            end = tl.minimum(last_whole, end_query)
        if STRETCH == 2:
            begin = last_whole
            end = end_query
        for start in tl.range(begin + split * QUERY_ROWS, end, query_step):
            query_tile = load_rows(query_rows, start, QUERY_ROWS, CONFIG, CONFIG.tma)
            scores = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)  # S^T [KEY_ROWS, QUERY_ROWS]
            logsumexps = load_statistic(tensors.statistics, 2 * sequence, start, padded_queries, CONFIG)
            weights = tl.math.exp2(scores * numbers.scale_log2 - logsumexps[None, :])  # P^T
            if STRETCH != 1:
                keys = first_key + tl.arange(0, CONFIG.key_rows)
                queries = start + tl.arange(0, QUERY_ROWS)
                visible = is_visible(
                    keys[:, None], queries[None, :], num_keys, numbers.window, numbers.diagonal, CONFIG
                )
                weights = tl.where(visible, weights, 0.0)
            grad_out_tile = load_rows(grad_out_rows, start, QUERY_ROWS, CONFIG, CONFIG.tma)
            grad_value_tile = tl.dot(
                weights.to(grad_out_tile.dtype), grad_out_tile, grad_value_tile, input_precision=PRECISION
            )
            grad_weights = tl.dot(value_tile, tl.trans(grad_out_tile), input_precision=PRECISION)  # dP^T
            delta = load_statistic(tensors.statistics, 2 * sequence + 1, start, padded_queries, CONFIG)
            grad_scores = (weights * (grad_weights - delta[None, :])).to(query_tile.dtype)  # dS^T
            grad_key_tile = tl.dot(grad_scores, query_tile, grad_key_tile, input_precision=PRECISION)
            if CONFIG.fused:
                grad_query_tile = tl.dot(tl.trans(grad_scores), key_tile, input_precision=PRECISION)
                if CONFIG.tma:
                    tensors.grad_query_sum.atomic_add([sequence * padded_queries + start, 0], grad_query_tile)
                else:
                    queries = start + tl.arange(0, QUERY_ROWS)
                    sums = sum_pointers(tensors.grad_query_sum, sequence, queries, padded_queries, CONFIG)
                    tl.atomic_add(sums, grad_query_tile, sem="relaxed")
    return grad_key_tile, grad_value_tile


@triton.jit
def key_pass(program, tensors, strides, numbers, CONFIG: tl.constexpr):
    """Compute dK and dV of key_rows keys of one sequence; fused: also add their share of dQ / scale to grad_query_sum.

    ``key_sums``: num_splits programs share a tile of keys; each takes every num_splits-th tile of the queries, and adds
    its shares of dK / scale and dV to grad_key and grad_value, which are then float32 sums like that of dQ.
    ``grouped``: the group_size sequences of queries that share the keys add to dK and dV one after the other.
    """
    num_keys = numbers.num_keys
    KEY_ROWS: tl.constexpr = CONFIG.key_rows
    BLOCK_DIM: tl.constexpr = CONFIG.block_dim
    split = 0
    query_step = CONFIG.query_rows
    if CONFIG.key_sums:
        split = program % numbers.num_splits
        program //= numbers.num_splits
        query_step = numbers.num_splits * CONFIG.query_rows
    key_sequences = numbers.num_sequences
    key_heads = numbers.num_heads
    if CONFIG.grouped:
        key_sequences = numbers.num_sequences // numbers.group_size
        key_heads = numbers.num_heads // numbers.group_size
    num_tiles = tl.cdiv(num_keys, KEY_ROWS)  # Under a causal mask the first keys have the most queries.
    tile, sequence = tile_of_program(
        program, num_tiles, key_sequences, numbers.sequences_per_group, LAST_TILE_FIRST=False
    )
    batch = sequence // key_heads
    head = sequence % key_heads
    first_key = tile * KEY_ROWS
    key_tile = load_rows(Rows(tensors.key, strides.key, batch, head, num_keys), first_key, KEY_ROWS, CONFIG, CONFIG.tma)
    value_rows = Rows(tensors.value, strides.value, batch, head, num_keys)
    value_tile = load_rows(value_rows, first_key, KEY_ROWS, CONFIG, CONFIG.tma)
    tiles = key_tile, value_tile, first_key
    grads = tl.zeros([KEY_ROWS, BLOCK_DIM], tl.float32), tl.zeros([KEY_ROWS, BLOCK_DIM], tl.float32)
    if CONFIG.grouped:
        for member in tl.range(numbers.group_size):
            query_sequence = sequence * numbers.group_size + member
            grads = _add_queries(grads, tiles, split, query_step, tensors, strides, query_sequence, numbers, CONFIG)
    else:
        # No loop of one turn: the loop over the queries is pipelined best by itself.
        grads = _add_queries(grads, tiles, split, query_step, tensors, strides, sequence, numbers, CONFIG)
    grad_key_tile, grad_value_tile = grads

    if CONFIG.key_sums:
        rows = first_key + tl.arange(0, KEY_ROWS)
        padded_keys = tl.cdiv(num_keys, KEY_ROWS) * KEY_ROWS
        sums = sum_pointers(tensors.grad_key, sequence, rows, padded_keys, CONFIG)
        tl.atomic_add(sums, grad_key_tile, sem="relaxed")
        sums = sum_pointers(tensors.grad_value, sequence, rows, padded_keys, CONFIG)
        tl.atomic_add(sums, grad_value_tile, sem="relaxed")
    else:
        grad_key_tile *= numbers.scale
        grad_key_rows = Rows(tensors.grad_key, strides.grad_key, batch, head, num_keys)
        store_rows(grad_key_rows, grad_key_tile, first_key, KEY_ROWS, CONFIG)
        grad_value_rows = Rows(tensors.grad_value, strides.grad_value, batch, head, num_keys)
        store_rows(grad_value_rows, grad_value_tile, first_key, KEY_ROWS, CONFIG)


@triton.jit
def query_pass(program, tensors, strides, numbers, CONFIG: tl.constexpr):
    """Compute dQ of query_rows queries of one sequence: in the separate form a pass of its own."""
    num_queries, num_keys, padded_queries = numbers.num_queries, numbers.num_keys, numbers.padded_queries
    QUERY_ROWS: tl.constexpr = CONFIG.query_rows
    BLOCK_DIM: tl.constexpr = CONFIG.block_dim
    PRECISION: tl.constexpr = CONFIG.precision
    num_tiles = tl.cdiv(num_queries, QUERY_ROWS)  # If causal, the last first: they see the most keys.
    tile, sequence = tile_of_program(
        program, num_tiles, numbers.num_sequences, numbers.sequences_per_group, CONFIG.causal
    )
    batch = sequence // numbers.num_heads
    head = sequence % numbers.num_heads
    key_head = head // numbers.group_size
    first_query = tile * QUERY_ROWS
    query_rows = Rows(tensors.query, strides.query, batch, head, num_queries)
    query_tile = load_rows(query_rows, first_query, QUERY_ROWS, CONFIG, CONFIG.tma)
    grad_out_rows = Rows(tensors.grad_out, strides.grad_out, batch, head, num_queries)
    grad_out_tile = load_rows(grad_out_rows, first_query, QUERY_ROWS, CONFIG, CONFIG.tma)
    logsumexps = load_statistic(tensors.statistics, 2 * sequence, first_query, padded_queries, CONFIG)
    delta = load_statistic(tensors.statistics, 2 * sequence + 1, first_query, padded_queries, CONFIG)
    grad_query_tile = tl.zeros([QUERY_ROWS, BLOCK_DIM], tl.float32)

    key_rows = Rows(tensors.key, strides.key, batch, key_head, num_keys)
    value_rows = Rows(tensors.value, strides.value, batch, key_head, num_keys)
    first_key, first_whole, whole_keys, end_key = visible_keys(
        first_query, num_keys, numbers.window, numbers.diagonal, CONFIG
    )
    for STRETCH in tl.static_range(3 if CONFIG.windowed else 2):
        begin, end = keys_of_stretch(STRETCH, first_key, first_whole, whole_keys, end_key)
        for start in tl.range(begin, end, CONFIG.key_rows):
            key_tile = load_rows(key_rows, start, CONFIG.key_rows, CONFIG, CONFIG.tma)
            value_tile = load_rows(value_rows, start, CONFIG.key_rows, CONFIG, CONFIG.tma)
            scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)  # [QUERY_ROWS, KEY_ROWS]
            weights = tl.math.exp2(scores * numbers.scale_log2 - logsumexps[:, None])
            if STRETCH > 0:
                keys = start + tl.arange(0, CONFIG.key_rows)
                queries = first_query + tl.arange(0, QUERY_ROWS)
                visible = is_visible(
                    keys[None, :], queries[:, None], num_keys, numbers.window, numbers.diagonal, CONFIG
                )
                weights = tl.where(visible, weights, 0.0)
            grad_weights = tl.dot(grad_out_tile, tl.trans(value_tile), input_precision=PRECISION)
            grad_scores = (weights * (grad_weights - delta[:, None])).to(key_tile.dtype)
            grad_query_tile = tl.dot(grad_scores, key_tile, grad_query_tile, input_precision=PRECISION)

    grad_query_tile *= numbers.scale
    grad_query_rows = Rows(tensors.grad_query, strides.grad_query, batch, head, num_queries)
    store_rows(grad_query_rows, grad_query_tile, first_query, QUERY_ROWS, CONFIG)


# All but padded_queries, a stride, of which the compiler is to know whether 16 divides it.
@triton.jit(do_not_specialize=[name for name in Numbers._fields if name != "padded_queries"])  # It is a multiple of 16.
def backward_kernel(
    query, key, value, grad_out, statistics, grad_query_sum, grad_query, grad_key, grad_value, strides,
    num_heads, group_size, num_sequences, num_queries, padded_queries, num_keys, window, diagonal,
    sequences_per_group, key_programs, num_splits, scale, scale_log2, CONFIG: tl.constexpr,
):  # fmt: skip
    """Run one pass or both: the first key_programs programs take tiles of keys, the others tiles of queries."""
    tensors = Tensors(query, key, value, grad_out, statistics, grad_query_sum, grad_query, grad_key, grad_value)
    numbers = Numbers(
        num_heads, group_size, num_sequences, num_queries, padded_queries, num_keys, window, diagonal,
        sequences_per_group, key_programs, num_splits, scale, scale_log2,
    )  # fmt: skip
    program = tl.program_id(0)
    if CONFIG.early:
        gdc_wait()
    if CONFIG.key_pass and program < key_programs:
        key_pass(program, tensors, strides, numbers, CONFIG)
    if CONFIG.query_pass and program >= key_programs:
        query_pass(program - key_programs, tensors, strides, numbers, CONFIG)


@triton.jit
def _clear_sums(sums, sequence, rows, padded_rows, DIMS: tl.constexpr):
    pointers = sum_pointers(sums, sequence, rows, padded_rows, DIMS)
    tl.store(pointers, tl.zeros(pointers.shape, tl.float32), mask=(rows < padded_rows)[:, None])


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "group_size", "num_queries"])
def prepare_kernel(
    out, grad_out, logsumexp, row_statistics, grad_query_sum, grad_key_sum, grad_value_sum, turns, out_strides,
    grad_out_strides, num_tiles, num_heads, group_size, num_queries, padded_queries, padded_keys, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write two rows a sequence for the passes behind it: logsumexp * log2(e) and D of each query.

    has_delta: ``out`` is D itself (sequences, num_queries), and ``grad_out`` is not touched. Fused: also clear the sum
    of dQ; with key_sums those of dK and dV; with turns (sequences, padded_queries) counters of who has added to dQ. A
    sequence has num_tiles programs, enough for its queries and for the keys to be cleared.
    """
    if CONFIG.at_once:  # Each pass waits itself until this kernel has ended.
        gdc_launch_dependents()
    sequence = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * CONFIG.rows
    batch = sequence // num_heads
    head = sequence % num_heads
    rows = first_row + tl.arange(0, CONFIG.rows)
    if CONFIG.has_delta:
        delta = tl.load(out + sequence.to(tl.int64) * num_queries + rows, mask=rows < num_queries, other=0.0)
    else:
        grad_out_rows = Rows(grad_out, grad_out_strides, batch, head, num_queries)
        grad_out_tile = load_rows(grad_out_rows, first_row, CONFIG.rows, CONFIG, TMA=False)
        out_rows = Rows(out, out_strides, batch, head, num_queries)
        delta = output_products(out_rows, grad_out_tile, first_row, CONFIG.rows, CONFIG)
    logsumexps = base2_logsumexps(logsumexp, sequence, rows, num_queries)
    statistics = row_statistics + sequence.to(tl.int64) * 2 * padded_queries + rows
    tl.store(statistics, logsumexps, mask=rows < padded_queries)
    tl.store(statistics + padded_queries, delta, mask=rows < padded_queries)
    if CONFIG.fused:
        _clear_sums(grad_query_sum, sequence, rows, padded_queries, CONFIG)
    if CONFIG.turns:
        counters = turns + sequence.to(tl.int64) * padded_queries + rows  # Of 32 bits: 0.0 is 0 in these, too.
        tl.store(counters, tl.zeros(rows.shape, tl.float32), mask=rows < padded_queries)
    if CONFIG.key_sums and is_key_sequence(sequence, num_tiles, group_size):
        _clear_sums(grad_key_sum, sequence, rows, padded_keys, CONFIG)
        _clear_sums(grad_value_sum, sequence, rows, padded_keys, CONFIG)
    if CONFIG.early:
        gdc_launch_dependents()


# A gradient of num_heads heads and num_rows rows of each: scale times ``sums``, which have padded_rows rows of each.
Gradient = namedtuple("Gradient", "tensor strides sums num_heads num_rows padded_rows scale")


@triton.jit
def _convert_sums(grad, sequence, first_row, CONFIG: tl.constexpr):
    """Write rows of a gradient from first_row on: scale * sums, in the dtype of the gradient."""
    rows = first_row + tl.arange(0, CONFIG.rows)
    pointers = sum_pointers(grad.sums, sequence, rows, grad.padded_rows, CONFIG)
    tile = tl.load(pointers, mask=(rows < grad.num_rows)[:, None]) * grad.scale
    grad_rows = Rows(grad.tensor, grad.strides, sequence // grad.num_heads, sequence % grad.num_heads, grad.num_rows)
    store_rows(grad_rows, tile, first_row, CONFIG.rows, CONFIG)


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "group_size", "num_queries", "num_keys"])
def convert_grad_query_kernel(
    grad_query_sum, grad_key_sum, grad_value_sum, grad_query, grad_key, grad_value, grad_query_strides,
    grad_key_strides, grad_value_strides, num_tiles, num_heads, group_size, num_queries, num_keys, padded_queries,
    padded_keys, scale, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write dQ = scale * grad_query_sum; with key_sums also dK = scale * grad_key_sum and dV = grad_value_sum."""
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
