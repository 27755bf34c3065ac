"""The kernels that rotate heads, out of a tensor of their own or out of a fused projection."""

import triton
import triton.language as tl


@triton.jit
def _cos_sin(turns):
    """Cosine and sine of an angle in units of 2^-64 turns, int64, in which a sum or product wraps around as angles do.

    The nearest quarter turn is taken off; of what remains, at most pi / 4, the polynomials are right to float32.
    """
    high = (turns >> 32).to(tl.int32)
    quadrant = (high + (1 << 29)) >> 30
    angle = (high - (quadrant << 30)).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    square = angle * angle
    # Coefficients of sinf and cosf in Moshier's Cephes library.
    sine = ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1) * square * angle + angle
    cosine = ((2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2) * square * square
    cosine += 1 - 0.5 * square
    is_odd = (quadrant & 1) != 0
    cos = tl.where(is_odd, sine, cosine)
    sin = tl.where(is_odd, cosine, sine)
    return tl.where(((quadrant + 1) & 2) != 0, -cos, cos), tl.where((quadrant & 2) != 0, -sin, sin)


@triton.jit
def _position_turns(positions_ptr, row, row_mask, stride, frequency, IMPLIED: tl.constexpr):
    if IMPLIED:
        position = row
    else:
        position = tl.load(positions_ptr + row * stride, mask=row_mask, other=0).to(tl.int64)
    return position * frequency


@triton.jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    positions_ptr,
    frequencies_ptr,
    x_batch_stride,
    x_head_stride,
    x_row_stride,
    x_column_stride,
    y_batch_stride,
    y_head_stride,
    y_row_stride,
    y_column_stride,
    positions_batch_stride,
    positions_head_stride,
    positions_row_stride,
    num_heads,
    num_groups,
    num_rows,
    half_dim,
    ROTATES: tl.constexpr,
    IMPLIED: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Each program takes a tile of rows of one of ``num_groups`` of HEADS heads; without ROTATES it copies them.

    SHARED: all heads have the same positions, so their cosines and sines are computed once.
    """
    num_row_tiles = tl.cdiv(num_rows, ROW_TILE)
    program = tl.program_id(0).to(tl.int64)
    first_head = (program % num_groups) * HEADS
    row = ((program // num_groups) % num_row_tiles) * ROW_TILE + tl.arange(0, ROW_TILE)[:, None]
    batch = program // (num_groups * num_row_tiles)
    row_mask = row < num_rows
    column = tl.arange(0, 2 * HALF_TILE)[None, :]
    mask = row_mask & (column < 2 * half_dim)
    x_ptr += batch * x_batch_stride + row * x_row_stride + column * x_column_stride
    y_ptr += batch * y_batch_stride + row * y_row_stride + column * y_column_stride
    if ROTATES:
        pair = tl.arange(0, HALF_TILE)[None, :]
        frequency = tl.load(frequencies_ptr + pair, mask=pair < half_dim, other=0)
        positions_ptr += batch * positions_batch_stride
        if SHARED:
            turns = _position_turns(positions_ptr, row, row_mask, positions_row_stride, frequency, IMPLIED)
            cos, sin = _cos_sin(turns)
    for head in range(first_head, tl.minimum(first_head + HEADS, num_heads)):
        y = tl.load(x_ptr + head * x_head_stride, mask=mask, other=0.0).to(tl.float32)
        if ROTATES:
            if not SHARED:
                head_positions_ptr = positions_ptr + head * positions_head_stride
                turns = _position_turns(head_positions_ptr, row, row_mask, positions_row_stride, frequency, IMPLIED)
                cos, sin = _cos_sin(turns)
            x1, x2 = tl.split(tl.reshape(y, (ROW_TILE, HALF_TILE, 2)))
            y = tl.reshape(tl.join(x1 * cos - x2 * sin, x1 * sin + x2 * cos), (ROW_TILE, 2 * HALF_TILE))
        tl.store(y_ptr + head * y_head_stride, y, mask=mask)


@triton.jit
def rope_kernel(
    x_ptr,
    y_ptr,
    positions_ptr,
    frequencies_ptr,
    x_batch_stride,
    x_head_stride,
    x_row_stride,
    x_column_stride,
    y_batch_stride,
    y_head_stride,
    y_row_stride,
    y_column_stride,
    positions_batch_stride,
    positions_head_stride,
    positions_row_stride,
    num_heads,
    num_rows,
    half_dim,
    IMPLIED: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    _rotate_heads(
        x_ptr, y_ptr, positions_ptr, frequencies_ptr, x_batch_stride, x_head_stride, x_row_stride, x_column_stride,
        y_batch_stride, y_head_stride, y_row_stride, y_column_stride,
        positions_batch_stride, positions_head_stride, positions_row_stride,
        num_heads, tl.cdiv(num_heads, HEADS), num_rows, half_dim, True, IMPLIED, SHARED, HEADS, ROW_TILE, HALF_TILE,
    )  # fmt: skip


@triton.jit
def _part_of_qkv(
    qkv_ptr,
    part_ptr,
    positions_ptr,
    frequencies_ptr,
    qkv_batch_stride,
    qkv_head_stride,
    qkv_row_stride,
    qkv_column_stride,
    part_batch_stride,
    part_head_stride,
    part_row_stride,
    part_column_stride,
    positions_batch_stride,
    positions_row_stride,
    num_heads,
    num_groups,
    num_rows,
    half_dim,
    ROTATES: tl.constexpr,
    BACKWARD: tl.constexpr,
    IMPLIED: tl.constexpr,
    HEADS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """From the projection to the part, or back."""
    if BACKWARD:
        _rotate_heads(
            part_ptr, qkv_ptr, positions_ptr, frequencies_ptr, part_batch_stride, part_head_stride, part_row_stride,
            part_column_stride, qkv_batch_stride, qkv_head_stride, qkv_row_stride, qkv_column_stride,
            positions_batch_stride, 0, positions_row_stride,
            num_heads, num_groups, num_rows, half_dim, ROTATES, IMPLIED, True, HEADS, ROW_TILE, HALF_TILE,
        )  # fmt: skip
    else:
        _rotate_heads(
            qkv_ptr, part_ptr, positions_ptr, frequencies_ptr, qkv_batch_stride, qkv_head_stride, qkv_row_stride,
            qkv_column_stride, part_batch_stride, part_head_stride, part_row_stride, part_column_stride,
            positions_batch_stride, 0, positions_row_stride,
            num_heads, num_groups, num_rows, half_dim, ROTATES, IMPLIED, True, HEADS, ROW_TILE, HALF_TILE,
        )  # fmt: skip


@triton.jit
def rope_qkv_kernel(
    qkv_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    positions_ptr,
    frequencies_ptr,
    qkv_batch_stride,
    qkv_head_stride,
    qkv_row_stride,
    qkv_column_stride,
    query_batch_stride,
    query_head_stride,
    query_row_stride,
    query_column_stride,
    key_batch_stride,
    key_head_stride,
    key_row_stride,
    key_column_stride,
    value_batch_stride,
    value_head_stride,
    value_row_stride,
    value_column_stride,
    positions_batch_stride,
    positions_row_stride,
    num_heads,
    num_key_value_heads,
    num_groups,
    num_rows,
    half_dim,
    BACKWARD: tl.constexpr,
    IMPLIED: tl.constexpr,
    HEADS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Query and key are rotated out of the projection and value is copied, or back; the grid's second axis has each."""
    part = tl.program_id(1)
    if part == 0:
        _part_of_qkv(
            qkv_ptr, query_ptr, positions_ptr, frequencies_ptr,
            qkv_batch_stride, qkv_head_stride, qkv_row_stride, qkv_column_stride,
            query_batch_stride, query_head_stride, query_row_stride, query_column_stride,
            positions_batch_stride, positions_row_stride, num_heads, num_groups, num_rows, half_dim,
            True, BACKWARD, IMPLIED, HEADS, ROW_TILE, HALF_TILE,
        )  # fmt: skip
    elif part == 1:
        _part_of_qkv(
            qkv_ptr + num_heads * qkv_head_stride, key_ptr, positions_ptr, frequencies_ptr,
            qkv_batch_stride, qkv_head_stride, qkv_row_stride, qkv_column_stride,
            key_batch_stride, key_head_stride, key_row_stride, key_column_stride,
            positions_batch_stride, positions_row_stride, num_key_value_heads, num_groups, num_rows, half_dim,
            True, BACKWARD, IMPLIED, HEADS, ROW_TILE, HALF_TILE,
        )  # fmt: skip
    else:
        _part_of_qkv(
            qkv_ptr + (num_heads + num_key_value_heads) * qkv_head_stride, value_ptr, positions_ptr, frequencies_ptr,
            qkv_batch_stride, qkv_head_stride, qkv_row_stride, qkv_column_stride,
            value_batch_stride, value_head_stride, value_row_stride, value_column_stride,
            positions_batch_stride, positions_row_stride, num_key_value_heads, num_groups, num_rows, half_dim,
            False, BACKWARD, IMPLIED, HEADS, ROW_TILE, HALF_TILE,
        )  # fmt: skip
