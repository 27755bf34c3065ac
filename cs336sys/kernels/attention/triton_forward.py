"""FlashAttention-2 forward in Triton: Algorithm 1 of Dao, "FlashAttention-2" (2023), with exp2 for exp."""

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton_tiles import load_rows, store_rows, tile_of_program, visible_keys

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_heads", "num_sequences", "num_queries", "num_keys", "sequences_per_group"])
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
    num_sequences,
    num_queries,
    num_keys,
    sequences_per_group,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Output and logsumexp of QUERY_ROWS queries of one sequence; scale_log2 is log2(e) / sqrt(head dimension)."""
    num_tiles = tl.cdiv(num_queries, QUERY_ROWS)
    tile, sequence = tile_of_program(tl.program_id(0), num_tiles, num_sequences, sequences_per_group, CAUSAL)
    batch = sequence // num_heads
    head = sequence % num_heads
    first_query = tile * QUERY_ROWS
    query_tile = load_rows(
        query, query_strides, batch, head, first_query, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
    )
    out_tile = tl.zeros([QUERY_ROWS, BLOCK_DIM], tl.float32)
    row_max = tl.full([QUERY_ROWS], float("-inf"), tl.float32)  # of scores * scale_log2
    row_sum = tl.zeros([QUERY_ROWS], tl.float32)

    whole_keys, end_key = visible_keys(first_query, num_keys, QUERY_ROWS, KEY_ROWS, CAUSAL)
    for MASKED in tl.static_range(2):
        for first_key in tl.range(whole_keys if MASKED else 0, end_key if MASKED else whole_keys, KEY_ROWS):
            key_tile = load_rows(key, key_strides, batch, head, first_key, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA)
            scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)  # [QUERY_ROWS, KEY_ROWS]
            if MASKED:
                keys = first_key + tl.arange(0, KEY_ROWS)
                visible = (keys < num_keys)[None, :]
                if CAUSAL:
                    queries = first_query + tl.arange(0, QUERY_ROWS)
                    visible = visible & (keys[None, :] <= queries[:, None])
                scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
            # A row that has seen only -inf keeps the maximum -inf; subtracting 0 then gives weights 0 instead of NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.math.exp2(scores * scale_log2 - shift[:, None])
            rescale = tl.math.exp2(row_max - shift)
            row_max = new_max
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            value_tile = load_rows(
                value, value_strides, batch, head, first_key, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
            )
            out_tile *= rescale[:, None]
            out_tile = tl.dot(weights.to(value_tile.dtype), value_tile, out_tile, input_precision=PRECISION)

    # Scores that are all -inf leave a sum of 0: such a row is 0 / 1, and its logsumexp -inf.
    out_tile = out_tile / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    store_rows(out, out_strides, out_tile, batch, head, first_query, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM)
    queries = first_query + tl.arange(0, QUERY_ROWS)
    natural_logsumexp = (row_max + tl.math.log2(row_sum)) * LN_2
    tl.store(logsumexp + sequence.to(tl.int64) * num_queries + queries, natural_logsumexp, mask=queries < num_queries)
