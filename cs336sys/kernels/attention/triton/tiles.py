"""Tiles that the forward and backward kernels share: which one a program takes, and how rows are loaded and stored.

A *sequence* is one head of one batch element; tensors are seen as (batch, head, row, element), contiguous in the last
dimension, with strides = (batch, head, row) in elements.
"""

from collections import namedtuple
from dataclasses import dataclass

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

# What a kernel reads or writes of a tensor: the rows of one sequence, ``num_rows`` of them.
Rows = namedtuple("Rows", "tensor strides batch head num_rows")


@dataclass(frozen=True)
class Dims:
    """Elements of a row, and of a row in a tile: a power of two, and at least the 16 that ``tl.dot`` needs."""

    head_dim: int
    block_dim: int


@dataclass(frozen=True)
class TileConfig(Dims):
    """Constants of all passes over tiles of queries and keys; ``precision``: of their products.

    ``shifted``: the causal mask's diagonal does not begin at the first query and the first key.
    """

    query_rows: int
    key_rows: int
    causal: bool
    windowed: bool
    shifted: bool
    precision: str
    tma: bool


@triton.jit
def tile_of_program(program, num_tiles, num_sequences, sequences_per_group, LAST_TILE_FIRST: tl.constexpr):
    """Return (tile, sequence) that a program of a one-dimensional grid works on.

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
def row_pointers(rows, indices, BLOCK_DIM: tl.constexpr):
    """Return pointers [ROWS, BLOCK_DIM]; offsets in 64 bits, as one tensor may hold more than 2^31 elements."""
    base = rows.tensor + (rows.batch.to(tl.int64) * rows.strides[0] + rows.head.to(tl.int64) * rows.strides[1])
    return base + indices.to(tl.int64)[:, None] * rows.strides[2] + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def row_mask(indices, num_rows, DIMS: tl.constexpr):
    """Return a mask [ROWS, BLOCK_DIM] of what lies inside the sequence and the head dimension."""
    mask = (indices < num_rows)[:, None]
    if DIMS.head_dim != DIMS.block_dim:
        mask = mask & (tl.arange(0, DIMS.block_dim) < DIMS.head_dim)[None, :]
    return mask


@triton.jit
def load_rows(rows, first_row, ROWS: tl.constexpr, DIMS: tl.constexpr, TMA: tl.constexpr):
    """Load rows [ROWS, BLOCK_DIM], zero beyond the end of the sequence and beyond the head dimension.

    ``rows.tensor``: with TMA a descriptor of the whole tensor, which zero-fills by itself, or else a pointer.
    """
    if TMA:
        tile = rows.tensor.load([rows.batch, rows.head, first_row, 0]).reshape(ROWS, DIMS.block_dim)
    else:
        indices = first_row + tl.arange(0, ROWS)
        mask = row_mask(indices, rows.num_rows, DIMS)
        tile = tl.load(row_pointers(rows, indices, DIMS.block_dim), mask=mask, other=0.0)
    return tile


@triton.jit
def store_rows(rows, tile, first_row, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Write a tile [ROWS, BLOCK_DIM] in the tensor's dtype, without what lies beyond the sequence."""
    indices = first_row + tl.arange(0, ROWS)
    pointers = row_pointers(rows, indices, DIMS.block_dim)
    tl.store(pointers, tile.to(rows.tensor.dtype.element_ty), mask=row_mask(indices, rows.num_rows, DIMS))


@triton.jit
def key_of_query(query, diagonal, CONFIG: tl.constexpr):
    """Return the last key that a query sees under a causal mask."""
    if CONFIG.shifted:
        query += diagonal
    return query


@triton.jit
def query_of_key(key, diagonal, CONFIG: tl.constexpr):
    """Return the first query that sees a key under a causal mask."""
    if CONFIG.shifted:
        key = tl.maximum(0, key - diagonal)
    return key


@triton.jit
def visible_keys(first_query, num_keys, window, diagonal, CONFIG: tl.constexpr):
    """Return (begin, first_whole, whole, end), which keys a tile of queries sees; the first three begin tiles.

    All queries see the keys from ``first_whole`` to ``whole``, if that is more; none sees a key before ``begin`` or
    from ``end`` on.
    """
    KEY_ROWS: tl.constexpr = CONFIG.key_rows
    begin = 0
    first_whole = 0
    whole = num_keys
    end = num_keys
    first_query = key_of_query(first_query, diagonal, CONFIG)
    if CONFIG.causal:
        whole = tl.minimum(num_keys, first_query + 1)
        end = tl.minimum(num_keys, first_query + CONFIG.query_rows)
    if CONFIG.shifted:  # Then the first queries may see no key.
        whole = tl.maximum(0, whole)
        end = tl.maximum(0, end)
    whole = whole // KEY_ROWS * KEY_ROWS
    if CONFIG.windowed:
        begin = tl.maximum(0, first_query + 1 - window) // KEY_ROWS * KEY_ROWS
        first_whole = tl.cdiv(tl.maximum(0, first_query + CONFIG.query_rows - window), KEY_ROWS) * KEY_ROWS
        whole = tl.maximum(whole, first_whole)
    return begin, first_whole, whole, end


@triton.jit
def keys_of_stretch(STRETCH: tl.constexpr, first_key, first_whole, whole_keys, end_key):
    """Return (begin, end) of the keys of a stretch of tiles, from what :func:`visible_keys` returns.

    0: tiles that all queries see, 1: those at the diagonal or the end, 2: those at the far end of the window.
    """
    begin = first_whole
    end = whole_keys
    if STRETCH == 1:
        begin = whole_keys
        end = end_key
    if STRETCH == 2:
        begin = first_key
        end = tl.minimum(first_whole, end_key)  # first_whole is rounded up to a whole tile.
    return begin, end


@triton.jit
def is_visible(keys, queries, num_keys, window, diagonal, CONFIG: tl.constexpr):
    """Return which of the keys each query sees; one of the two indices varies along rows, the other along columns."""
    visible = keys < num_keys
    queries = key_of_query(queries, diagonal, CONFIG)
    if CONFIG.causal:
        visible = visible & (keys <= queries)
    if CONFIG.windowed:
        visible = visible & (keys > queries - window)
    return visible
