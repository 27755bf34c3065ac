"""FlashAttention-2 backward in Triton: Algorithm 2 and equations 13 to 19 of the handout, in two forms.

*Fused*: a pass over tiles of keys computes dK and dV and adds its share of dQ to a float32 buffer: five matrix products
for a pair of tiles, but the additions come in any order. *Separate*: a second pass, over tiles of queries, computes dQ:
seven matrix products, deterministic. The two passes may share a launch. A kernel for D = rowsum(dO * O) comes before
either (``prepare``); after the fused pass another one converts dQ (``convert``). Where launching takes
longest the separate form goes without the first: its passes compute D themselves, each as often as it reads a query.

With few tiles of keys the fused pass gives each of them to several programs, each of which takes a split of the
queries; they add up dK and dV as well in float32 buffers.
"""

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton.tiles import is_visible, load_rows, store_rows, tile_of_program, visible_keys

# What the kernels of the backward pass share: a query's logsumexp and D, and float32 sums of gradients in memory.


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_statistic(row_statistics, row, first_query, padded_queries, QUERY_ROWS: tl.constexpr, TMA: tl.constexpr):
    """QUERY_ROWS numbers of one row of row_statistics (rows, padded_queries)."""
    if TMA:
        statistic = row_statistics.load([row, first_query]).reshape(QUERY_ROWS)
    else:
        base = row_statistics + row.to(tl.int64) * padded_queries
        statistic = tl.load(base + first_query + tl.arange(0, QUERY_ROWS))
    return statistic


@triton.jit
def base2_logsumexps(logsumexp, sequence, rows, num_queries):
    """logsumexp * log2(e) of some queries, from logsumexp (sequences, num_queries).

    Rows behind the last query, and those whose scores were all -inf, get +inf, so their weights exp2(score - inf) are 0
    and no pass needs a mask for them.
    """
    pointers = logsumexp + sequence.to(tl.int64) * num_queries + rows
    logsumexps = tl.load(pointers, mask=rows < num_queries, other=float("-inf"))
    return tl.where(logsumexps == float("-inf"), float("inf"), logsumexps * LOG2_E)


@triton.jit
def output_products(
    out,
    out_strides,
    grad_out_tile,
    batch,
    head,
    first_row,
    num_queries,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """D = rowsum(dO * O) of ROWS queries."""
    out_tile = load_rows(out, out_strides, batch, head, first_row, num_queries, ROWS, HEAD_DIM, BLOCK_DIM, False)
    return tl.sum(out_tile.to(tl.float32) * grad_out_tile.to(tl.float32), 1)


@triton.jit
def sum_pointers(sums, sequence, rows, padded_rows, BLOCK_DIM: tl.constexpr):
    """Pointers [ROWS, BLOCK_DIM] into sums (sequences * padded_rows, BLOCK_DIM)."""
    offsets = (sequence.to(tl.int64) * padded_rows + rows) * BLOCK_DIM
    return sums + offsets[:, None] + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def is_key_sequence(sequence, num_tiles, group_size):
    """Return whether a query sequence, by which programs are numbered, stands for the keys' sequence as well."""
    return sequence < tl.num_programs(0) // num_tiles // group_size


# The pass of backward over tiles of keys, for dK and dV; fused, it adds its share of dQ as well.
#
# It works on transposed tiles, S^T = K Q^T, because P^T and dS^T are then the left operands of dV and dK, which the
# tensor cores take from registers.


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


# The pass of backward over tiles of queries, for dQ: a pass of its own in the separate form.


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


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "group_size",
        "num_sequences",
        "num_queries",
        "num_keys",
        "window",
        "sequences_per_group",
        "key_programs",
        "num_splits",
    ]
)
def backward_kernel(
    query,
    key,
    value,
    grad_out,
    row_statistics,
    grad_query_sum,
    grad_query,
    grad_key,
    grad_value,
    out,
    query_strides,
    key_strides,
    value_strides,
    grad_out_strides,
    grad_query_strides,
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
    key_programs,
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
    KEY_PASS: tl.constexpr,
    QUERY_PASS: tl.constexpr,
    PREPARED: tl.constexpr,
    FUSED: tl.constexpr,
    KEY_SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One pass or both: the first key_programs programs take tiles of keys, the others tiles of queries.

    PREPARED: row_statistics is what prepare_kernel wrote, and out is not touched. Else it is the logsumexp of forward.
    """
    program = tl.program_id(0)
    if KEY_PASS and program < key_programs:
        key_pass(
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
            HEAD_DIM,
            BLOCK_DIM,
            QUERY_ROWS,
            KEY_ROWS,
            CAUSAL,
            WINDOWED,
            GROUPED,
            PREPARED,
            FUSED,
            KEY_SUMS,
            PRECISION,
            TMA,
        )
    if QUERY_PASS and program >= key_programs:
        query_pass(
            program - key_programs,
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
            HEAD_DIM,
            BLOCK_DIM,
            QUERY_ROWS,
            KEY_ROWS,
            CAUSAL,
            WINDOWED,
            PREPARED,
            PRECISION,
            TMA,
        )
