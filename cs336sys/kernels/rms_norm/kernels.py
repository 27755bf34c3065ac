"""The kernels of rms_norm."""

import triton
import triton.language as tl


@triton.jit
def _load_total(
    x_ptr,
    residual_ptr,
    total_ptr,
    row,
    column,
    width,
    x_row_stride,
    x_column_stride,
    residual_row_stride,
    residual_column_stride,
    mask,
    HAS_RESIDUAL: tl.constexpr,
    STORES: tl.constexpr,
):
    """A tile of x, or of x + residual as total holds it, in float32."""
    total = tl.load(x_ptr + row * x_row_stride + column * x_column_stride, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(
            residual_ptr + row * residual_row_stride + column * residual_column_stride, mask=mask, other=0.0
        )
        rounded = (total + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        if STORES:
            tl.store(total_ptr + row * width + column, rounded, mask=mask)
        total = rounded.to(tl.float32)
    return total


@triton.jit
def rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    inverse_rms_ptr,
    x_row_stride,
    x_column_stride,
    residual_row_stride,
    residual_column_stride,
    weight_stride,
    num_rows,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    """Each program takes a tile of rows: y = total * inverse_rms * weight.

    ``total`` is x or x + residual, ``inverse_rms`` 1 / sqrt(mean(total^2) + eps).
    """
    # Offsets are int64, for tensors of more than 2**31 elements.
    row = (tl.program_id(0).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE))[:, None]
    row_mask = row < num_rows
    if ONE_TILE:
        column = tl.arange(0, COLUMN_TILE)[None, :]
        mask = row_mask & (column < width)
        weight = tl.load(weight_ptr + column * weight_stride, mask=column < width, other=0.0).to(tl.float32)
        total = _load_total(
            x_ptr, residual_ptr, total_ptr, row, column, width, x_row_stride, x_column_stride,
            residual_row_stride, residual_column_stride, mask, HAS_RESIDUAL, True,
        )  # fmt: skip
        sum_of_squares = tl.sum(total * total, axis=1, keep_dims=True)
        inverse_rms = tl.rsqrt(sum_of_squares / width + eps)
        tl.store(y_ptr + row * width + column, total * inverse_rms * weight, mask=mask)
    else:
        sum_of_squares = tl.zeros((ROW_TILE, 1), dtype=tl.float32)
        for start in range(0, width, COLUMN_TILE):
            column = start + tl.arange(0, COLUMN_TILE)[None, :]
            total = _load_total(
                x_ptr, residual_ptr, total_ptr, row, column, width, x_row_stride, x_column_stride,
                residual_row_stride, residual_column_stride, row_mask & (column < width), HAS_RESIDUAL, True,
            )  # fmt: skip
            sum_of_squares += tl.sum(total * total, axis=1, keep_dims=True)
        inverse_rms = tl.rsqrt(sum_of_squares / width + eps)
        for start in range(0, width, COLUMN_TILE):
            column = start + tl.arange(0, COLUMN_TILE)[None, :]
            mask = row_mask & (column < width)
            total = _load_total(
                x_ptr, residual_ptr, total_ptr, row, column, width, x_row_stride, x_column_stride,
                residual_row_stride, residual_column_stride, mask, HAS_RESIDUAL, False,
            )  # fmt: skip
            weight = tl.load(weight_ptr + column * weight_stride, mask=column < width, other=0.0).to(tl.float32)
            tl.store(y_ptr + row * width + column, total * inverse_rms * weight, mask=mask)
    tl.store(inverse_rms_ptr + row, inverse_rms, mask=row_mask)


@triton.jit
def _load_normalized(
    total_ptr,
    grad_y_ptr,
    row,
    column,
    total_row_stride,
    total_column_stride,
    grad_y_row_stride,
    grad_y_column_stride,
    inverse_rms,
    mask,
):
    """A tile of n = total * inverse_rms and of y's gradient, in float32."""
    total = tl.load(total_ptr + row * total_row_stride + column * total_column_stride, mask=mask, other=0.0)
    grad_y = tl.load(grad_y_ptr + row * grad_y_row_stride + column * grad_y_column_stride, mask=mask, other=0.0)
    return total.to(tl.float32) * inverse_rms, grad_y.to(tl.float32)


@triton.jit
def _store_grad(
    grad,
    grad_total_ptr,
    grad_x_ptr,
    grad_residual_ptr,
    row,
    column,
    width,
    grad_total_row_stride,
    grad_total_column_stride,
    mask,
    HAS_GRAD_TOTAL: tl.constexpr,
    WRITES_RESIDUAL: tl.constexpr,
):
    """Stores a tile of the gradient that reached the sum by y, plus what reached it directly, once for each dtype."""
    if HAS_GRAD_TOTAL:
        offset = row * grad_total_row_stride + column * grad_total_column_stride
        grad += tl.load(grad_total_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(grad_x_ptr + row * width + column, grad, mask=mask)
    if WRITES_RESIDUAL:
        tl.store(grad_residual_ptr + row * width + column, grad, mask=mask)


@triton.jit
def rms_norm_backward_kernel(
    grad_y_ptr,
    grad_total_ptr,
    total_ptr,
    weight_ptr,
    inverse_rms_ptr,
    grad_x_ptr,
    grad_residual_ptr,
    partial_grad_weight_ptr,
    grad_y_row_stride,
    grad_y_column_stride,
    grad_total_row_stride,
    grad_total_column_stride,
    total_row_stride,
    total_column_stride,
    weight_stride,
    num_rows,
    width,
    HAS_GRAD_TOTAL: tl.constexpr,
    WRITES_RESIDUAL: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program walks along its share of the tiles of rows and keeps one partial sum of the weight's gradient.

    n = x inverse_rms and g = grad_y weight give grad_x = inverse_rms (g - n mean(g n)), grad_weight = sum grad_y n.
    """
    program = tl.program_id(0)
    num_tiles = tl.cdiv(num_rows, ROW_TILE)
    partial_grad_weight_ptr += program.to(tl.int64) * width
    if ONE_TILE:
        column = tl.arange(0, COLUMN_TILE)[None, :]
        column_mask = column < width
        weight = tl.load(weight_ptr + column * weight_stride, mask=column_mask, other=0.0).to(tl.float32)
        grad_weight = tl.zeros((ROW_TILE, COLUMN_TILE), dtype=tl.float32)
        for tile in tl.range(program, num_tiles, tl.num_programs(0), num_stages=STAGES):
            row = (tile * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)[:, None]
            row_mask = row < num_rows
            mask = row_mask & column_mask
            inverse_rms = tl.load(inverse_rms_ptr + row, mask=row_mask, other=0.0)
            normalized, grad_y = _load_normalized(
                total_ptr, grad_y_ptr, row, column, total_row_stride, total_column_stride,
                grad_y_row_stride, grad_y_column_stride, inverse_rms, mask,
            )  # fmt: skip
            grad_weight += grad_y * normalized
            grad = grad_y * weight
            mean = tl.sum(grad * normalized, axis=1, keep_dims=True) / width
            _store_grad(
                inverse_rms * (grad - normalized * mean), grad_total_ptr, grad_x_ptr, grad_residual_ptr, row, column,
                width, grad_total_row_stride, grad_total_column_stride, mask, HAS_GRAD_TOTAL, WRITES_RESIDUAL,
            )  # fmt: skip
        tl.store(partial_grad_weight_ptr + column, tl.sum(grad_weight, axis=0, keep_dims=True), mask=column_mask)
    else:
        for tile in range(program, num_tiles, tl.num_programs(0)):
            row = (tile * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)[:, None]
            row_mask = row < num_rows
            inverse_rms = tl.load(inverse_rms_ptr + row, mask=row_mask, other=0.0)
            mean = tl.zeros((ROW_TILE, 1), dtype=tl.float32)
            for start in range(0, width, COLUMN_TILE):
                column = start + tl.arange(0, COLUMN_TILE)[None, :]
                column_mask = column < width
                normalized, grad_y = _load_normalized(
                    total_ptr, grad_y_ptr, row, column, total_row_stride, total_column_stride,
                    grad_y_row_stride, grad_y_column_stride, inverse_rms, row_mask & column_mask,
                )  # fmt: skip
                weight = tl.load(weight_ptr + column * weight_stride, mask=column_mask, other=0.0).to(tl.float32)
                mean += tl.sum(grad_y * weight * normalized, axis=1, keep_dims=True) / width
            for start in range(0, width, COLUMN_TILE):
                column = start + tl.arange(0, COLUMN_TILE)[None, :]
                column_mask = column < width
                mask = row_mask & column_mask
                normalized, grad_y = _load_normalized(
                    total_ptr, grad_y_ptr, row, column, total_row_stride, total_column_stride,
                    grad_y_row_stride, grad_y_column_stride, inverse_rms, mask,
                )  # fmt: skip
                weight = tl.load(weight_ptr + column * weight_stride, mask=column_mask, other=0.0).to(tl.float32)
                _store_grad(
                    inverse_rms * (grad_y * weight - normalized * mean), grad_total_ptr, grad_x_ptr, grad_residual_ptr,
                    row, column, width, grad_total_row_stride, grad_total_column_stride, mask,
                    HAS_GRAD_TOTAL, WRITES_RESIDUAL,
                )  # fmt: skip
                # The sum stays in the L2 cache: no other program adds to it, and it began as zeros.
                sums = tl.load(partial_grad_weight_ptr + column, mask=column_mask, other=0.0)
                sums += tl.sum(grad_y * normalized, axis=0, keep_dims=True)
                tl.store(partial_grad_weight_ptr + column, sums, mask=column_mask)
