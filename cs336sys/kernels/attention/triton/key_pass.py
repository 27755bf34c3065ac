"""The pass of backward over tiles of keys, for dK and dV; fused, it adds its share of dQ as well.

It works on transposed tiles, S^T = K Q^T, because P^T and dS^T are then the left operands of dV and dK, which the
tensor cores take from registers.
"""

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton.backward_rows import (
    base2_logsumexps,
    load_statistic,
    output_products,
    sum_pointers,
)
from cs336sys.kernels.attention.triton.tiles import is_visible, load_rows, store_rows, tile_of_program


@triton.jit
def _add_queries(
    grad_key_tile,
    grad_value_tile,
    key_tile,
    value_tile,
    first_key,
    split,
    query_step,
    query,
    grad_out,
    row_statistics,
    grad_query_sum,
    out,
    query_strides,
    grad_out_strides,
    out_strides,
    sequence,
    num_heads,
    num_queries,
    padded_queries,
    num_keys,
    window,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PREPARED: tl.constexpr,
    FUSED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """dK / scale and dV of a tile of keys, with what the queries of one sequence add to them."""
    batch = sequence // num_heads
    head = sequence % num_heads
    # Query tiles in front of the keys see none of them; those on the diagonal need a mask; all later ones see all, up
    # to those that a window ends in, behind which none sees any.
    first_query = 0
    unmasked_query = 0
    if CAUSAL:
        first_query = first_key // QUERY_ROWS * QUERY_ROWS
        unmasked_query = tl.cdiv(first_key + KEY_ROWS - 1, QUERY_ROWS) * QUERY_ROWS
    end_query = num_queries
    if WINDOWED:
        end_query = tl.minimum(num_queries, first_key + KEY_ROWS - 1 + window)
    if FUSED and first_key + KEY_ROWS > num_keys:
        # Rows behind the last key end up in no dK or dV, but exp2 of their score 0 may be inf and would reach dQ.
        unmasked_query = end_query
    last_whole = end_query
    if WINDOWED:
        # Of tiles that end here every query sees the first key.
        last_whole = tl.maximum(unmasked_query, (first_key + window) // QUERY_ROWS * QUERY_ROWS)
    for STRETCH in tl.static_range(3 if WINDOWED else 2):
        begin = first_query
        end = tl.minimum(unmasked_query, end_query)
        if STRETCH == 1:
            begin = unmasked_query
            end = tl.minimum(last_whole, end_query)
        if STRETCH == 2:
            begin = last_whole
            end = end_query
        for start in tl.range(begin + split * QUERY_ROWS, end, query_step):
            query_tile = load_rows(
                query, query_strides, batch, head, start, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
            )
            scores = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)  # S^T [KEY_ROWS, QUERY_ROWS]
            if PREPARED:
                logsumexps = load_statistic(row_statistics, 2 * sequence, start, padded_queries, QUERY_ROWS, TMA)
            else:
                queries = start + tl.arange(0, QUERY_ROWS)
                logsumexps = base2_logsumexps(row_statistics, sequence, queries, num_queries)
            weights = tl.math.exp2(scores * scale_log2 - logsumexps[None, :])  # P^T
            if STRETCH != 1:
                keys = first_key + tl.arange(0, KEY_ROWS)
                queries = start + tl.arange(0, QUERY_ROWS)
                visible = is_visible(keys[:, None], queries[None, :], num_keys, window, CAUSAL, WINDOWED)
                weights = tl.where(visible, weights, 0.0)
            grad_out_tile = load_rows(
                grad_out, grad_out_strides, batch, head, start, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
            )
            grad_value_tile = tl.dot(
                weights.to(grad_out_tile.dtype), grad_out_tile, grad_value_tile, input_precision=PRECISION
            )
            grad_weights = tl.dot(value_tile, tl.trans(grad_out_tile), input_precision=PRECISION)  # dP^T
            if PREPARED:
                delta = load_statistic(row_statistics, 2 * sequence + 1, start, padded_queries, QUERY_ROWS, TMA)
            else:
                delta = output_products(
                    out, out_strides, grad_out_tile, batch, head, start, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM
                )
            grad_scores = (weights * (grad_weights - delta[None, :])).to(query_tile.dtype)  # dS^T
            grad_key_tile = tl.dot(grad_scores, query_tile, grad_key_tile, input_precision=PRECISION)
            if FUSED:
                grad_query_tile = tl.dot(tl.trans(grad_scores), key_tile, input_precision=PRECISION)
                if TMA:
                    grad_query_sum.atomic_add([sequence * padded_queries + start, 0], grad_query_tile)
                else:
                    queries = start + tl.arange(0, QUERY_ROWS)
                    sums = sum_pointers(grad_query_sum, sequence, queries, padded_queries, BLOCK_DIM)
                    tl.atomic_add(sums, grad_query_tile, sem="relaxed")
    return grad_key_tile, grad_value_tile


@triton.jit
def key_pass(
    program,
    query,
    key,
    value,
    grad_out,
    row_statistics,
    grad_query_sum,
    grad_key,
    grad_value,
    out,
    query_strides,
    key_strides,
    value_strides,
    grad_out_strides,
    grad_key_strides,
    grad_value_strides,
    out_strides,
    num_heads,
    group_size,
    num_sequences,
    num_queries,
    padded_queries,
    num_keys,
    window,
    sequences_per_group,
    num_splits,
    scale,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    GROUPED: tl.constexpr,
    PREPARED: tl.constexpr,
    FUSED: tl.constexpr,
    KEY_SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """dK and dV of KEY_ROWS keys of one sequence; fused: also adds their share of dQ / scale to grad_query_sum.

    KEY_SUMS: num_splits programs share a tile of keys; each takes every num_splits-th tile of the queries, and adds
    its shares of dK / scale and dV to grad_key and grad_value, which are then float32 sums like that of dQ. GROUPED:
    the group_size sequences of queries that share the keys add to dK and dV one after the other.
    """
    split = 0
    query_step = QUERY_ROWS
    if KEY_SUMS:
        split = program % num_splits
        program //= num_splits
        query_step = num_splits * QUERY_ROWS
    key_sequences = num_sequences
    key_heads = num_heads
    if GROUPED:
        key_sequences = num_sequences // group_size
        key_heads = num_heads // group_size
    tile, sequence = tile_of_program(program, tl.cdiv(num_keys, KEY_ROWS), key_sequences, sequences_per_group, False)
    batch = sequence // key_heads
    head = sequence % key_heads
    first_key = tile * KEY_ROWS
    key_tile = load_rows(key, key_strides, batch, head, first_key, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA)
    value_tile = load_rows(value, value_strides, batch, head, first_key, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA)
    grad_key_tile = tl.zeros([KEY_ROWS, BLOCK_DIM], tl.float32)
    grad_value_tile = tl.zeros([KEY_ROWS, BLOCK_DIM], tl.float32)
    if GROUPED:
        for member in tl.range(group_size):
            grad_key_tile, grad_value_tile = _add_queries(
                grad_key_tile,
                grad_value_tile,
                key_tile,
                value_tile,
                first_key,
                split,
                query_step,
                query,
                grad_out,
                row_statistics,
                grad_query_sum,
                out,
                query_strides,
                grad_out_strides,
                out_strides,
                sequence * group_size + member,
                num_heads,
                num_queries,
                padded_queries,
                num_keys,
                window,
                scale_log2,
                HEAD_DIM,
                BLOCK_DIM,
                QUERY_ROWS,
                KEY_ROWS,
                CAUSAL,
                WINDOWED,
                PREPARED,
                FUSED,
                PRECISION,
                TMA,
            )
    else:
        # No loop of one turn: the loop over the queries is pipelined best by itself.
        grad_key_tile, grad_value_tile = _add_queries(
            grad_key_tile,
            grad_value_tile,
            key_tile,
            value_tile,
            first_key,
            split,
            query_step,
            query,
            grad_out,
            row_statistics,
            grad_query_sum,
            out,
            query_strides,
            grad_out_strides,
            out_strides,
            sequence,
            num_heads,
            num_queries,
            padded_queries,
            num_keys,
            window,
            scale_log2,
            HEAD_DIM,
            BLOCK_DIM,
            QUERY_ROWS,
            KEY_ROWS,
            CAUSAL,
            WINDOWED,
            PREPARED,
            FUSED,
            PRECISION,
            TMA,
        )

    if KEY_SUMS:
        keys = first_key + tl.arange(0, KEY_ROWS)
        padded_keys = tl.cdiv(num_keys, KEY_ROWS) * KEY_ROWS
        sums = sum_pointers(grad_key, sequence, keys, padded_keys, BLOCK_DIM)
        tl.atomic_add(sums, grad_key_tile, sem="relaxed")
        sums = sum_pointers(grad_value, sequence, keys, padded_keys, BLOCK_DIM)
        tl.atomic_add(sums, grad_value_tile, sem="relaxed")
    else:
        grad_key_tile *= scale
        store_rows(
            grad_key, grad_key_strides, grad_key_tile, batch, head, first_key, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM
        )
        store_rows(
            grad_value,
            grad_value_strides,
            grad_value_tile,
            batch,
            head,
            first_key,
            num_keys,
            KEY_ROWS,
            HEAD_DIM,
            BLOCK_DIM,
        )
