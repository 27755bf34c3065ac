"""FlashAttention-2 backward in Triton: Algorithm 2 and equations 13 to 19 of the handout, in two forms.

*Fused*: a pass over tiles of keys computes dK and dV and adds its share of dQ to a float32 buffer: five matrix products
for a pair of tiles, but the additions come in any order. *Separate*: a second pass, over tiles of queries, computes dQ:
seven matrix products, deterministic. The two passes may share a launch. A kernel for D = rowsum(dO * O) comes before
either; after the fused pass another one converts dQ. Where launching takes longest the separate form goes without the
first: its passes compute D themselves, each as often as it reads a query.

With few tiles of keys the fused pass gives each of them to several programs, each of which takes a split of the
queries; they add up dK and dV as well in float32 buffers.

The pass over the keys works on transposed tiles, S^T = K Q^T, because P^T and dS^T are then the left operands of dV and
dK, which the tensor cores take from registers.
"""

import triton
import triton.language as tl

from cs336sys.kernels.attention.triton.tiles import load_rows, store_rows, tile_of_program, visible_keys

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_statistic(row_statistics, row, first_query, padded_queries, QUERY_ROWS: tl.constexpr, TMA: tl.constexpr):
    """QUERY_ROWS numbers of one row of row_statistics (rows, padded_queries)."""
    if TMA:
        statistic = row_statistics.load([row, first_query]).reshape(QUERY_ROWS)
    else:
        base = row_statistics + row.to(tl.int64) * padded_queries
        statistic = tl.load(base + first_query + tl.arange(0, QUERY_ROWS))
    return statistic


@triton.jit
def _base2_logsumexps(logsumexp, sequence, rows, num_queries):
    """logsumexp * log2(e) of some queries, from logsumexp (sequences, num_queries).

    Rows behind the last query, and those whose scores were all -inf, get +inf, so their weights exp2(score - inf) are 0
    and no pass needs a mask for them.
    """
    pointers = logsumexp + sequence.to(tl.int64) * num_queries + rows
    logsumexps = tl.load(pointers, mask=rows < num_queries, other=float("-inf"))
    return tl.where(logsumexps == float("-inf"), float("inf"), logsumexps * LOG2_E)


@triton.jit
def _output_products(
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
def _sum_pointers(sums, sequence, rows, padded_rows, BLOCK_DIM: tl.constexpr):
    """Pointers [ROWS, BLOCK_DIM] into sums (sequences * padded_rows, BLOCK_DIM)."""
    offsets = (sequence.to(tl.int64) * padded_rows + rows) * BLOCK_DIM
    return sums + offsets[:, None] + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def _clear_sums(sums, sequence, rows, padded_rows, BLOCK_DIM: tl.constexpr):
    pointers = _sum_pointers(sums, sequence, rows, padded_rows, BLOCK_DIM)
    tl.store(pointers, tl.zeros(pointers.shape, tl.float32), mask=(rows < padded_rows)[:, None])


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "num_queries"])
def prepare_kernel(
    out,
    grad_out,
    logsumexp,
    row_statistics,
    grad_query_sum,
    grad_key_sum,
    grad_value_sum,
    out_strides,
    grad_out_strides,
    num_tiles,
    num_heads,
    num_queries,
    padded_queries,
    padded_keys,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    FUSED: tl.constexpr,
    KEY_SUMS: tl.constexpr,
):
    """What the passes read for each query: in row_statistics two rows a sequence, logsumexp * log2(e) and D.

    Fused: also clears the sum of dQ; with KEY_SUMS those of dK and dV. A sequence has num_tiles programs, enough for
    its queries and for the keys to be cleared.
    """
    sequence = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * ROWS
    batch = sequence // num_heads
    head = sequence % num_heads
    grad_out_tile = load_rows(
        grad_out, grad_out_strides, batch, head, first_row, num_queries, ROWS, HEAD_DIM, BLOCK_DIM, False
    )
    delta = _output_products(
        out, out_strides, grad_out_tile, batch, head, first_row, num_queries, ROWS, HEAD_DIM, BLOCK_DIM
    )
    rows = first_row + tl.arange(0, ROWS)
    logsumexps = _base2_logsumexps(logsumexp, sequence, rows, num_queries)
    statistics = row_statistics + sequence.to(tl.int64) * 2 * padded_queries + rows
    tl.store(statistics, logsumexps, mask=rows < padded_queries)
    tl.store(statistics + padded_queries, delta, mask=rows < padded_queries)
    if FUSED:
        _clear_sums(grad_query_sum, sequence, rows, padded_queries, BLOCK_DIM)
    if KEY_SUMS:
        _clear_sums(grad_key_sum, sequence, rows, padded_keys, BLOCK_DIM)
        _clear_sums(grad_value_sum, sequence, rows, padded_keys, BLOCK_DIM)


@triton.jit
def _grad_key_value(
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
    num_sequences,
    num_queries,
    padded_queries,
    num_keys,
    sequences_per_group,
    num_splits,
    scale,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PREPARED: tl.constexpr,
    FUSED: tl.constexpr,
    KEY_SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """dK and dV of KEY_ROWS keys of one sequence; fused: also adds their share of dQ / scale to grad_query_sum.

    KEY_SUMS: num_splits programs share a tile of keys; each takes every num_splits-th tile of the queries, and adds
    its shares of dK / scale and dV to grad_key and grad_value, which are then float32 sums like that of dQ.
    """
    split = 0
    query_step = QUERY_ROWS
    if KEY_SUMS:
        split = program % num_splits
        program //= num_splits
        query_step = num_splits * QUERY_ROWS
    tile, sequence = tile_of_program(program, tl.cdiv(num_keys, KEY_ROWS), num_sequences, sequences_per_group, False)
    batch = sequence // num_heads
    head = sequence % num_heads
    first_key = tile * KEY_ROWS
    key_tile = load_rows(key, key_strides, batch, head, first_key, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA)
    value_tile = load_rows(value, value_strides, batch, head, first_key, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA)
    grad_key_tile = tl.zeros([KEY_ROWS, BLOCK_DIM], tl.float32)
    grad_value_tile = tl.zeros([KEY_ROWS, BLOCK_DIM], tl.float32)

    # Query tiles in front of the keys see none of them; those on the diagonal need a mask; all later ones see all.
    first_query = 0
    unmasked_query = 0
    if CAUSAL:
        first_query = first_key // QUERY_ROWS * QUERY_ROWS
        unmasked_query = tl.cdiv(first_key + KEY_ROWS - 1, QUERY_ROWS) * QUERY_ROWS
    if FUSED and first_key + KEY_ROWS > num_keys:
        # Rows behind the last key end up in no dK or dV, but exp2 of their score 0 may be inf and would reach dQ.
        unmasked_query = num_queries
    for MASKED in tl.static_range(1, -1, -1):
        begin = (first_query if MASKED else unmasked_query) + split * QUERY_ROWS
        end = tl.minimum(unmasked_query, num_queries) if MASKED else num_queries
        for start in tl.range(begin, end, query_step):
            query_tile = load_rows(
                query, query_strides, batch, head, start, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
            )
            scores = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)  # S^T [KEY_ROWS, QUERY_ROWS]
            if PREPARED:
                logsumexps = _load_statistic(row_statistics, 2 * sequence, start, padded_queries, QUERY_ROWS, TMA)
            else:
                queries = start + tl.arange(0, QUERY_ROWS)
                logsumexps = _base2_logsumexps(row_statistics, sequence, queries, num_queries)
            weights = tl.math.exp2(scores * scale_log2 - logsumexps[None, :])  # P^T
            if MASKED:
                keys = first_key + tl.arange(0, KEY_ROWS)
                visible = (keys < num_keys)[:, None]
                if CAUSAL:
                    visible = visible & (keys[:, None] <= start + tl.arange(0, QUERY_ROWS)[None, :])
                weights = tl.where(visible, weights, 0.0)
            grad_out_tile = load_rows(
                grad_out, grad_out_strides, batch, head, start, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
            )
            grad_value_tile = tl.dot(
                weights.to(grad_out_tile.dtype), grad_out_tile, grad_value_tile, input_precision=PRECISION
            )
            grad_weights = tl.dot(value_tile, tl.trans(grad_out_tile), input_precision=PRECISION)  # dP^T
            if PREPARED:
                delta = _load_statistic(row_statistics, 2 * sequence + 1, start, padded_queries, QUERY_ROWS, TMA)
            else:
                delta = _output_products(
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
                    sums = _sum_pointers(grad_query_sum, sequence, queries, padded_queries, BLOCK_DIM)
                    tl.atomic_add(sums, grad_query_tile, sem="relaxed")

    if KEY_SUMS:
        keys = first_key + tl.arange(0, KEY_ROWS)
        padded_keys = tl.cdiv(num_keys, KEY_ROWS) * KEY_ROWS
        sums = _sum_pointers(grad_key, sequence, keys, padded_keys, BLOCK_DIM)
        tl.atomic_add(sums, grad_key_tile, sem="relaxed")
        sums = _sum_pointers(grad_value, sequence, keys, padded_keys, BLOCK_DIM)
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


@triton.jit
def _grad_query(
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
    num_sequences,
    num_queries,
    padded_queries,
    num_keys,
    sequences_per_group,
    scale,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PREPARED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """dQ of QUERY_ROWS queries of one sequence."""
    num_tiles = tl.cdiv(num_queries, QUERY_ROWS)
    tile, sequence = tile_of_program(program, num_tiles, num_sequences, sequences_per_group, CAUSAL)
    batch = sequence // num_heads
    head = sequence % num_heads
    first_query = tile * QUERY_ROWS
    query_tile = load_rows(
        query, query_strides, batch, head, first_query, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
    )
    grad_out_tile = load_rows(
        grad_out, grad_out_strides, batch, head, first_query, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
    )
    if PREPARED:
        logsumexps = _load_statistic(row_statistics, 2 * sequence, first_query, padded_queries, QUERY_ROWS, TMA)
        delta = _load_statistic(row_statistics, 2 * sequence + 1, first_query, padded_queries, QUERY_ROWS, TMA)
    else:
        queries = first_query + tl.arange(0, QUERY_ROWS)
        logsumexps = _base2_logsumexps(row_statistics, sequence, queries, num_queries)
        delta = _output_products(
            out, out_strides, grad_out_tile, batch, head, first_query, num_queries, QUERY_ROWS, HEAD_DIM, BLOCK_DIM
        )
    grad_query_tile = tl.zeros([QUERY_ROWS, BLOCK_DIM], tl.float32)

    whole_keys, end_key = visible_keys(first_query, num_keys, QUERY_ROWS, KEY_ROWS, CAUSAL)
    for MASKED in tl.static_range(2):
        for first_key in tl.range(whole_keys if MASKED else 0, end_key if MASKED else whole_keys, KEY_ROWS):
            key_tile = load_rows(key, key_strides, batch, head, first_key, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA)
            value_tile = load_rows(
                value, value_strides, batch, head, first_key, num_keys, KEY_ROWS, HEAD_DIM, BLOCK_DIM, TMA
            )
            scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)  # [QUERY_ROWS, KEY_ROWS]
            weights = tl.math.exp2(scores * scale_log2 - logsumexps[:, None])
            if MASKED:
                keys = first_key + tl.arange(0, KEY_ROWS)
                visible = (keys < num_keys)[None, :]
                if CAUSAL:
                    queries = first_query + tl.arange(0, QUERY_ROWS)
                    visible = visible & (keys[None, :] <= queries[:, None])
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
        "num_sequences",
        "num_queries",
        "num_keys",
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
    num_sequences,
    num_queries,
    padded_queries,
    num_keys,
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
        _grad_key_value(
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
            num_sequences,
            num_queries,
            padded_queries,
            num_keys,
            sequences_per_group,
            num_splits,
            scale,
            scale_log2,
            HEAD_DIM,
            BLOCK_DIM,
            QUERY_ROWS,
            KEY_ROWS,
            CAUSAL,
            PREPARED,
            FUSED,
            KEY_SUMS,
            PRECISION,
            TMA,
        )
    if QUERY_PASS and program >= key_programs:
        _grad_query(
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
            num_sequences,
            num_queries,
            padded_queries,
            num_keys,
            sequences_per_group,
            scale,
            scale_log2,
            HEAD_DIM,
            BLOCK_DIM,
            QUERY_ROWS,
            KEY_ROWS,
            CAUSAL,
            PREPARED,
            PRECISION,
            TMA,
        )


@triton.jit
def _convert_sums(
    sums,
    grad,
    grad_strides,
    sequence,
    first_row,
    num_heads,
    num_rows,
    padded_rows,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows of a gradient from first_row on: scale * sums, in the dtype of the gradient."""
    rows = first_row + tl.arange(0, ROWS)
    pointers = _sum_pointers(sums, sequence, rows, padded_rows, BLOCK_DIM)
    tile = tl.load(pointers, mask=(rows < num_rows)[:, None]) * scale
    batch = sequence // num_heads
    head = sequence % num_heads
    store_rows(grad, grad_strides, tile, batch, head, first_row, num_rows, ROWS, HEAD_DIM, BLOCK_DIM)


@triton.jit(do_not_specialize=["num_tiles", "num_heads", "num_queries", "num_keys"])
def convert_grad_query_kernel(
    grad_query_sum,
    grad_key_sum,
    grad_value_sum,
    grad_query,
    grad_key,
    grad_value,
    grad_query_strides,
    grad_key_strides,
    grad_value_strides,
    num_tiles,
    num_heads,
    num_queries,
    num_keys,
    padded_queries,
    padded_keys,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_SUMS: tl.constexpr,
):
    """dQ = scale * grad_query_sum; with KEY_SUMS also dK = scale * grad_key_sum and dV = grad_value_sum."""
    sequence = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * ROWS
    _convert_sums(
        grad_query_sum,
        grad_query,
        grad_query_strides,
        sequence,
        first_row,
        num_heads,
        num_queries,
        padded_queries,
        scale,
        HEAD_DIM,
        BLOCK_DIM,
        ROWS,
    )
    if KEY_SUMS:
        _convert_sums(
            grad_key_sum,
            grad_key,
            grad_key_strides,
            sequence,
            first_row,
            num_heads,
            num_keys,
            padded_keys,
            scale,
            HEAD_DIM,
            BLOCK_DIM,
            ROWS,
        )
        _convert_sums(
            grad_value_sum,
            grad_value,
            grad_value_strides,
            sequence,
            first_row,
            num_heads,
            num_keys,
            padded_keys,
            1.0,
            HEAD_DIM,
            BLOCK_DIM,
            ROWS,
        )
