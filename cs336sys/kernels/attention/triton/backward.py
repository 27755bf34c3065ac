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

from cs336sys.kernels.attention.triton.key_pass import key_pass
from cs336sys.kernels.attention.triton.query_pass import query_pass


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
