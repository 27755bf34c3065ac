"""The pass of backward over tiles of queries, for dQ: a pass of its own in the separate form."""

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton.backward_rows import base2_logsumexps, load_statistic, output_products
from cs336sys.kernels.attention.triton.tiles import is_visible, load_rows, store_rows, tile_of_program, visible_keys


@triton.jit
def query_pass(
    program,
    query,
    key,
    value,
    grad_out,
    row_statistics,
    grad_query,
    out,
    query_strides,
    key_strides,
    value_strides,
    grad_out_strides,
    grad_query_strides,
    out_strides,
    num_heads,
    group_size,
    num_sequences,
    num_queries,
    padded_queries,
    num_keys,
    window,
    sequences_per_group,
    scale,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PREPARED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """dQ of QUERY_ROWS queries of one sequence."""
    num_tiles = tl.cdiv(num_queries, QUERY_ROWS)
    tile, sequence = tile_of_program(program, num_tiles, num_sequences, sequences_per_group, CAUSAL)
    batch = sequence // num_heads
    head = sequence % num_heads
    key_head = head // group_size
    first_query = tile * QUERY_ROWS
    query_tile = load_rows(
        query, query_strides, batch, head, first_query, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
    )
    grad_out_tile = load_rows(
        grad_out, grad_out_strides, batch, head, first_query, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
    )
    if PREPARED:
        logsumexps = load_statistic(row_statistics, 2 * sequence, first_query, padded_queries, QUERY_ROWS, TMA)
        delta = load_statistic(row_statistics, 2 * sequence + 1, first_query, padded_queries, QUERY_ROWS, TMA)
    else:
        queries = first_query + tl.arange(0, QUERY_ROWS)
        logsumexps = base2_logsumexps(row_statistics, sequence, queries, num_queries)
        delta = output_products(
            out, out_strides, grad_out_tile, batch, head, first_query, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM
        )
    grad_query_tile = tl.zeros([QUERY_ROWS, BLOCK_DIM], tl.float32)

    first_key, first_whole, whole_keys, end_key = visible_keys(
        first_query, num_keys, window, QUERY_ROWS, KEY_ROWS, CAUSAL, WINDOWED
    )
    # As in forward_kernel.
    for STRETCH in tl.static_range(3 if WINDOWED else 2):
        begin = first_whole
        end = whole_keys
        if STRETCH == 1:
            begin = whole_keys
            end = end_key
        if STRETCH == 2:
            begin = first_key
            end = tl.minimum(first_whole, end_key)
        for start in tl.range(begin, end, KEY_ROWS):
            key_tile = load_rows(key, key_strides, batch, key_head, start, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA)
            value_tile = load_rows(
                value, value_strides, batch, key_head, start, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
            )
            scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)  # [QUERY_ROWS, KEY_ROWS]
            weights = tl.math.exp2(scores * scale_log2 - logsumexps[:, None])
            if STRETCH > 0:
                keys = start + tl.arange(0, KEY_ROWS)
                queries = first_query + tl.arange(0, QUERY_ROWS)
                visible = is_visible(keys[None, :], queries[:, None], num_keys, window, CAUSAL, WINDOWED)
                weights = tl.where(visible, weights, 0.0)
            grad_weights = tl.dot(grad_out_tile, tl.trans(value_tile), input_precision=PRECISION)
            grad_scores = (weights * (grad_weights - delta[:, None])).to(key_tile.dtype)
            grad_query_tile = tl.dot(grad_scores, key_tile, grad_query_tile, input_precision=PRECISION)

    grad_query_tile *= scale
    store_rows(
        grad_query,
        grad_query_strides,
        grad_query_tile,
        batch,
        head,
        first_query,
        num_queries,
        QUERY_ROWS,
        HEAD_DIM,
        BLOCK_DIM,
    )
