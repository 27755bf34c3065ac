"""Tiles that the forward and backward kernels share: which one a program takes, and how rows are loaded and stored.

A *sequence* is one head of one batch element; tensors are seen as (batch, head, row, element), contiguous in the last
dimension, with strides = (batch, head, row) in elements.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of_program(program, num_tiles, num_sequences, sequences_per_group, LAST_TILE_FIRST: tl.constexpr):
    """(tile, sequence) that a program of a one-dimensional grid works on.

    Sequences come in groups whose streamed operands fit in the L2 cache together. Inside a group the programs go tile
    by tile, each tile for all its sequences: under a causal mask the longest run first and the shortest fill the gaps.
    """
    first_sequence = program // (num_tiles * sequences_per_group) * sequences_per_group
    group_size = tl.minimum(sequences_per_group, num_sequences - first_sequence)
    index = program - first_sequence * num_tiles
    tile = index // group_size
    if LAST_TILE_FIRST:
        tile = num_tiles - 1 - tile
    return tile, first_sequence + index % group_size


@triton.jit
def row_pointers(base, strides, batch, head, rows, BLOCK_DIM: tl.constexpr):
    """Pointers [ROWS, BLOCK_DIM]; offsets in 64 bits, as one tensor may hold more than 2^31 elements."""
    base += batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    return base + rows.to(tl.int64)[:, None] * strides[2] + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def row_mask(rows, num_rows, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Mask [ROWS, BLOCK_DIM] of what lies inside the sequence and the head dimension."""
    mask = (rows < num_rows)[:, None]
    if HEAD_DIM != BLOCK_DIM:
        mask = mask & (tl.arange(0, BLOCK_DIM) < HEAD_DIM)[None, :]
    return mask


@triton.jit
def load_rows(
    source,
    strides,
    batch,
    head,
    first_row,
    num_rows,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows [ROWS, BLOCK_DIM], zero beyond the end of the sequence and beyond the head dimension.

    ``source`` is a TMA descriptor of the whole tensor, which zero-fills by itself, or else a pointer.
    """
    if TMA:
        tile = source.load([batch, head, first_row, 0]).reshape(ROWS, BLOCK_DIM)
    else:
        rows = first_row + tl.arange(0, ROWS)
        mask = row_mask(rows, num_rows, HEAD_DIM, BLOCK_DIM)
        tile = tl.load(row_pointers(source, strides, batch, head, rows, BLOCK_DIM), mask=mask, other=0.0)
    return tile


@triton.jit
def store_rows(
    destination,
    strides,
    tile,
    batch,
    head,
    first_row,
    num_rows,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Writes a tile [ROWS, BLOCK_DIM] in the destination's dtype, without what lies beyond the sequence."""
    rows = first_row + tl.arange(0, ROWS)
    pointers = row_pointers(destination, strides, batch, head, rows, BLOCK_DIM)
    tl.store(pointers, tile.to(destination.dtype.element_ty), mask=row_mask(rows, num_rows, HEAD_DIM, BLOCK_DIM))


@triton.jit
def visible_keys(
    first_query,
    num_keys,
    window,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """(begin, first_whole, whole, end), the first three whole tiles: which keys a tile of queries sees.

    All queries see the keys from ``first_whole`` to ``whole``, if that is more; none sees a key before ``begin`` or
    from ``end`` on.
    """
    begin = 0
    first_whole = 0
    whole = num_keys
    end = num_keys
    if CAUSAL:
        whole = tl.minimum(num_keys, first_query + 1)
        end = tl.minimum(num_keys, first_query + QUERY_ROWS)
    whole = whole // KEY_ROWS * KEY_ROWS
    if WINDOWED:
        begin = tl.maximum(0, first_query + 1 - window) // KEY_ROWS * KEY_ROWS
        first_whole = tl.cdiv(tl.maximum(0, first_query + QUERY_ROWS - window), KEY_ROWS) * KEY_ROWS
        whole = tl.maximum(whole, first_whole)
    return begin, first_whole, whole, end


@triton.jit
def is_visible(keys, queries, num_keys, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Return which of the keys each query sees; one of the two indices varies along rows, the other along columns."""
    visible = keys < num_keys
    if CAUSAL:
        visible = visible & (keys <= queries)
    if WINDOWED:
        visible = visible & (keys > queries - window)
    return visible
