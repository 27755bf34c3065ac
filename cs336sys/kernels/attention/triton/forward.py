"""FlashAttention-2 forward in Triton: Algorithm 1 of Dao, "FlashAttention-2" (2023), with exp2 for exp.

With few tiles of queries several programs share the keys of each, as in Flash-Decoding (Dao, Haziza, Massa and Sizov,
2023): each finds output and logsumexp over its split of the keys, and a second kernel combines the splits.
"""

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton.tiles import is_visible, load_rows, store_rows, tile_of_program, visible_keys

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _partial_logsumexps(partial, num_sequences, num_queries, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Return where in ``partial`` the logsumexps (splits, sequences, queries) begin, behind as many rows of output."""
    return partial + NUM_SPLITS * HEAD_DIM * num_sequences.to(tl.int64) * num_queries


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "group_size",
        "num_sequences",
        "num_queries",
        "num_keys",
        "window",
        "sequences_per_group",
    ]
)
def forward_kernel(
    query,
    key,
    value,
    out,
    logsumexp,
    query_strides,
    key_strides,
    value_strides,
    out_strides,
    num_heads,
    group_size,
    num_sequences,
    num_queries,
    num_keys,
    window,
    sequences_per_group,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Output and logsumexp of QUERY_ROWS queries of one sequence; scale_log2 is log2(e) / sqrt(head dimension).

    group_size heads of queries share one of keys. WINDOWED: a query sees only the last ``window`` keys up to its own.
    With NUM_SPLITS > 1 the program sees only every NUM_SPLITS-th tile of the keys. Then ``out`` and ``logsumexp`` are
    both the buffer that combine_kernel reads, and out_strides those of (split, sequence, row).
    """
    split = tl.program_id(0) % NUM_SPLITS
    program = tl.program_id(0) // NUM_SPLITS
    num_tiles = tl.cdiv(num_queries, QUERY_ROWS)
    tile, sequence = tile_of_program(program, num_tiles, num_sequences, sequences_per_group, CAUSAL)
    batch = sequence // num_heads
    head = sequence % num_heads
    key_head = head // group_size
    first_query = tile * QUERY_ROWS
    query_tile = load_rows(
        query, query_strides, batch, head, first_query, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
    )
    out_tile = tl.zeros([QUERY_ROWS, BLOCK_DIM], tl.float32)
    row_max = tl.full([QUERY_ROWS], float("-inf"), tl.float32)  # of scores * scale_log2
    row_sum = tl.zeros([QUERY_ROWS], tl.float32)

    first_key, first_whole, whole_keys, end_key = visible_keys(
        first_query, num_keys, window, QUERY_ROWS, KEY_ROWS, CAUSAL, WINDOWED
    )
    # Tiles that all queries see, those at the diagonal or the end, and those at the far end of the window.
    for STRETCH in tl.static_range(3 if WINDOWED else 2):
        begin = first_whole
        end = whole_keys
        if STRETCH == 1:
            begin = whole_keys
            end = end_key
        if STRETCH == 2:
            begin = first_key
            end = tl.minimum(first_whole, end_key)
        # The first tile from there on whose index is ``split`` modulo NUM_SPLITS.
        begin += (split + NUM_SPLITS - begin // KEY_ROWS % NUM_SPLITS) % NUM_SPLITS * KEY_ROWS
        for start in tl.range(begin, end, NUM_SPLITS * KEY_ROWS):
            key_tile = load_rows(key, key_strides, batch, key_head, start, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA)
            scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)  # [QUERY_ROWS, KEY_ROWS]
            if STRETCH > 0:
                keys = start + tl.arange(0, KEY_ROWS)
                queries = first_query + tl.arange(0, QUERY_ROWS)
                visible = is_visible(keys[None, :], queries[:, None], num_keys, window, CAUSAL, WINDOWED)
                scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
            # A row that has seen only -inf keeps the maximum -inf; subtracting 0 then gives weights 0 instead of NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.math.exp2(scores * scale_log2 - shift[:, None])
            rescale = tl.math.exp2(row_max - shift)
            row_max = new_max
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            value_tile = load_rows(
                value, value_strides, batch, key_head, start, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
            )
            out_tile *= rescale[:, None]
            out_tile = tl.dot(weights.to(value_tile.dtype), value_tile, out_tile, input_precision=PRECISION)

    # Scores that are all -inf leave a sum of 0: such a row is 0 / 1, and its logsumexp -inf.
    out_tile = out_tile / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if NUM_SPLITS > 1:
        logsumexp = _partial_logsumexps(logsumexp, num_sequences, num_queries, HEAD_DIM, NUM_SPLITS)
        batch, head = split, sequence
        sequence = split * num_sequences + sequence
    store_rows(out, out_strides, out_tile, batch, head, first_query, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM)
    queries = first_query + tl.arange(0, QUERY_ROWS)
    natural_logsumexp = (row_max + tl.math.log2(row_sum)) * LN_2
    tl.store(logsumexp + sequence.to(tl.int64) * num_queries + queries, natural_logsumexp, mask=queries < num_queries)


@triton.jit(do_not_specialize=["num_heads", "num_sequences", "num_queries"])
def combine_kernel(
    partial,
    out,
    logsumexp,
    partial_strides,
    out_strides,
    num_heads,
    num_sequences,
    num_queries,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Output and logsumexp L of ROWS queries from the O_s and L_s of the splits: O = sum_s exp(L_s - L) O_s."""
    num_tiles = tl.cdiv(num_queries, ROWS)
    sequence = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * ROWS
    rows = first_row + tl.arange(0, ROWS)
    inside = rows < num_queries
    partial_logsumexps = _partial_logsumexps(partial, num_sequences, num_queries, HEAD_DIM, NUM_SPLITS)
    partial_logsumexps += sequence.to(tl.int64) * num_queries + rows
    stride = num_sequences.to(tl.int64) * num_queries
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        one = tl.load(partial_logsumexps + split * stride, mask=inside, other=0.0)
        row_max = tl.maximum(row_max, one)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)  # as in forward_kernel
    row_sum = tl.zeros([ROWS], tl.float32)
    out_tile = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        one = tl.load(partial_logsumexps + split * stride, mask=inside, other=0.0)
        weight = tl.math.exp2((one - shift) * LOG2_E)
        row_sum += weight
        first = tl.full([], split, tl.int32)
        tile = load_rows(
            partial, partial_strides, first, sequence, first_row, num_queries, ROWS, HEAD_DIM, BLOCK_DIM, False
        )
        out_tile += weight[:, None] * tile
    out_tile = out_tile / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    batch = sequence // num_heads
    head = sequence % num_heads
    store_rows(out, out_strides, out_tile, batch, head, first_row, num_queries, ROWS, HEAD_DIM, BLOCK_DIM)
    tl.store(
        logsumexp + sequence.to(tl.int64) * num_queries + rows, row_max + tl.math.log2(row_sum) * LN_2, mask=inside
    )
