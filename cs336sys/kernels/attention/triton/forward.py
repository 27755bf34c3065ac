"""FlashAttention-2 forward in Triton: Algorithm 1 of Dao, "FlashAttention-2" (2023), with exp2 for exp.

With few tiles of queries several programs share the keys of each, as in Flash-Decoding (Dao, Haziza, Massa and Sizov,
2023): each finds output and logsumexp over its split of the keys, and a second kernel combines the splits.
"""

from collections import namedtuple
from dataclasses import dataclass

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton.tiles import (
    LOG2_E,
    Dims,
    Rows,
    TileConfig,
    is_visible,
    keys_of_stretch,
    load_rows,
    store_rows,
    tile_of_program,
    visible_keys,
)

LN_2 = tl.constexpr(0.6931471805599453)


ForwardStrides = namedtuple("ForwardStrides", "query key value out")


@dataclass(frozen=True)
class ForwardConfig(TileConfig):
    num_splits: int


@dataclass(frozen=True)
class CombineConfig(Dims):
    rows: int
    num_splits: int


@triton.jit
def _partial_logsumexps(partial, num_sequences, num_queries, CONFIG: tl.constexpr):
    """Return where in ``partial`` the logsumexps (splits, sequences, queries) begin, behind as many rows of output."""
    return partial + CONFIG.num_splits * CONFIG.head_dim * num_sequences.to(tl.int64) * num_queries


@triton.jit
def _add_to_softmax(scores, scale_log2, row_max, row_sum):
    """Return weights of a tile's keys, the factor of what was summed before, and new maximum and sum of each row."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # A row that has seen only -inf keeps the maximum -inf; subtracting 0 then gives weights 0 instead of NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.math.exp2(scores * scale_log2 - shift[:, None])
    rescale = tl.math.exp2(row_max - shift)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


# Of these Triton would compile a variant for 1 and for multiples of 16.
_COUNTS = [
    "num_heads", "group_size", "num_sequences", "num_queries", "num_keys", "window", "diagonal", "sequences_per_group"
]  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)
def forward_kernel(
    query, key, value, out, logsumexp, strides, num_heads, group_size, num_sequences, num_queries, num_keys, window,
    diagonal, sequences_per_group, scale_log2, CONFIG: tl.constexpr,
):  # fmt: skip
    """Output and logsumexp of query_rows queries of one sequence; scale_log2 is log2(e) times the scale.

    group_size heads of queries share one of keys. Windowed: a query sees only the last ``window`` keys up to its own.
    With num_splits > 1 the program sees only every num_splits-th tile of the keys. Then ``out`` and ``logsumexp`` are
    both the buffer that combine_kernel reads, and strides.out those of (split, sequence, row).
    """
    QUERY_ROWS: tl.constexpr = CONFIG.query_rows
    BLOCK_DIM: tl.constexpr = CONFIG.block_dim
    NUM_SPLITS: tl.constexpr = CONFIG.num_splits
    split = tl.program_id(0) % NUM_SPLITS
    program = tl.program_id(0) // NUM_SPLITS
    num_tiles = tl.cdiv(num_queries, QUERY_ROWS)
    tile, sequence = tile_of_program(program, num_tiles, num_sequences, sequences_per_group, CONFIG.causal)
    batch = sequence // num_heads
    head = sequence % num_heads
    key_head = head // group_size
    first_query = tile * QUERY_ROWS
    query_tile = load_rows(
        Rows(query, strides.query, batch, head, num_queries), first_query, QUERY_ROWS, CONFIG, CONFIG.tma
    )
    key_rows = Rows(key, strides.key, batch, key_head, num_keys)
    value_rows = Rows(value, strides.value, batch, key_head, num_keys)
    out_tile = tl.zeros([QUERY_ROWS, BLOCK_DIM], tl.float32)
    row_max = tl.full([QUERY_ROWS], float("-inf"), tl.float32)  # of scores * scale_log2
    row_sum = tl.zeros([QUERY_ROWS], tl.float32)

    first_key, first_whole, whole_keys, end_key = visible_keys(first_query, num_keys, window, diagonal, CONFIG)
    for STRETCH in tl.static_range(3 if CONFIG.windowed else 2):
        begin, end = keys_of_stretch(STRETCH, first_key, first_whole, whole_keys, end_key)
        # The first tile from there on whose index is ``split`` modulo num_splits.
        begin += (split + NUM_SPLITS - begin // CONFIG.key_rows % NUM_SPLITS) % NUM_SPLITS * CONFIG.key_rows
        for start in tl.range(begin, end, NUM_SPLITS * CONFIG.key_rows):
            key_tile = load_rows(key_rows, start, CONFIG.key_rows, CONFIG, CONFIG.tma)
            scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=CONFIG.precision)  # [QUERY_ROWS, KEY_ROWS]
            if STRETCH > 0:
                keys = start + tl.arange(0, CONFIG.key_rows)
                queries = first_query + tl.arange(0, QUERY_ROWS)
                visible = is_visible(keys[None, :], queries[:, None], num_keys, window, diagonal, CONFIG)
                scores = tl.where(visible, scores, float("-inf"))
            weights, rescale, row_max, row_sum = _add_to_softmax(scores, scale_log2, row_max, row_sum)
            value_tile = load_rows(value_rows, start, CONFIG.key_rows, CONFIG, CONFIG.tma)
            out_tile *= rescale[:, None]
            out_tile = tl.dot(weights.to(value_tile.dtype), value_tile, out_tile, input_precision=CONFIG.precision)

    # Scores that are all -inf leave a sum of 0: such a row is 0 / 1, and its logsumexp -inf.
    out_tile = out_tile / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if NUM_SPLITS > 1:
        logsumexp = _partial_logsumexps(logsumexp, num_sequences, num_queries, CONFIG)
        batch, head = split, sequence
        sequence = split * num_sequences + sequence
    store_rows(Rows(out, strides.out, batch, head, num_queries), out_tile, first_query, QUERY_ROWS, CONFIG)
    queries = first_query + tl.arange(0, QUERY_ROWS)
    natural_logsumexp = (row_max + tl.math.log2(row_sum)) * LN_2
    tl.store(logsumexp + sequence.to(tl.int64) * num_queries + queries, natural_logsumexp, mask=queries < num_queries)


@triton.jit(do_not_specialize=["num_heads", "num_sequences", "num_queries"])
def combine_kernel(
    partial, out, logsumexp, partial_strides, out_strides, num_heads, num_sequences, num_queries, CONFIG: tl.constexpr
):
    """Output and logsumexp L of some queries from the O_s and L_s of the splits: O = sum_s exp(L_s - L) O_s."""
    ROWS: tl.constexpr = CONFIG.rows
    BLOCK_DIM: tl.constexpr = CONFIG.block_dim
    NUM_SPLITS: tl.constexpr = CONFIG.num_splits
    num_tiles = tl.cdiv(num_queries, ROWS)
    sequence = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * ROWS
    rows = first_row + tl.arange(0, ROWS)
    inside = rows < num_queries
    partial_logsumexps = _partial_logsumexps(partial, num_sequences, num_queries, CONFIG)
    partial_logsumexps += sequence.to(tl.int64) * num_queries + rows
    stride = num_sequences.to(tl.int64) * num_queries
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        partial_logsumexp = tl.load(partial_logsumexps + split * stride, mask=inside, other=0.0)
        row_max = tl.maximum(row_max, partial_logsumexp)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)  # As in _add_to_softmax(): weights 0, not NaN.
    row_sum = tl.zeros([ROWS], tl.float32)
    out_tile = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        partial_logsumexp = tl.load(partial_logsumexps + split * stride, mask=inside, other=0.0)
        weight = tl.math.exp2((partial_logsumexp - shift) * LOG2_E)
        row_sum += weight
        batch = tl.full([], split, tl.int32)  # splits lie as batches would, whose number is a tensor
        tile = load_rows(
            Rows(partial, partial_strides, batch, sequence, num_queries), first_row, ROWS, CONFIG, TMA=False
        )
        out_tile += weight[:, None] * tile
    out_tile = out_tile / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    batch = sequence // num_heads
    head = sequence % num_heads
    store_rows(Rows(out, out_strides, batch, head, num_queries), out_tile, first_row, ROWS, CONFIG)
    tl.store(
        logsumexp + sequence.to(tl.int64) * num_queries + rows, row_max + tl.math.log2(row_sum) * LN_2, mask=inside
    )
