"""RMSNorm, alone or of a sum with the residual stream, forward and backward in one pass over memory each."""

import math
from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336sys.kernels import operators

Matrix = namedtuple("Matrix", "pointer strides")  # A matrix, with strides of its rows and columns.


@triton.jit
def _load_row(matrix, row, column, mask):
    pointers = matrix.pointer + row * matrix.strides[0] + column * matrix.strides[1]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _load_total(x, residual, total_ptr, row, column, width, mask, HAS_RESIDUAL: tl.constexpr, STORES: tl.constexpr):
    """Load a tile of x, or of x + residual rounded as total holds it, in float32; with STORES write it to total."""
    total = _load_row(x, row, column, mask).to(tl.float32)
    if HAS_RESIDUAL:
        rounded = (total + _load_row(residual, row, column, mask).to(tl.float32)).to(total_ptr.dtype.element_ty)
        if STORES:
            tl.store(total_ptr + row * width + column, rounded, mask=mask)
        total = rounded.to(tl.float32)
    return total


@triton.jit
def rms_norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, inverse_rms_ptr, x_strides, residual_strides, weight_stride,
    num_rows, width, eps, HAS_RESIDUAL: tl.constexpr, ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr,
    ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Compute y = total * inverse_rms * weight of a tile of rows in each program.

    ``total`` is x or x + residual, ``inverse_rms`` 1 / sqrt(mean(total^2) + eps). ONE_TILE: a tile has whole rows.
    """
    x, residual = Matrix(x_ptr, x_strides), Matrix(residual_ptr, residual_strides)
    # Offsets are int64, for tensors of more than 2**31 elements.
    row = (tl.program_id(0).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE))[:, None]
    row_mask = row < num_rows
    if ONE_TILE:
        column = tl.arange(0, COLUMN_TILE)[None, :]
        mask = row_mask & (column < width)
        weight = tl.load(weight_ptr + column * weight_stride, mask=column < width, other=0.0).to(tl.float32)
        total = _load_total(x, residual, total_ptr, row, column, width, mask, HAS_RESIDUAL, STORES=True)
        sum_of_squares = tl.sum(total * total, axis=1, keep_dims=True)
        inverse_rms = tl.rsqrt(sum_of_squares / width + eps)
        tl.store(y_ptr + row * width + column, total * inverse_rms * weight, mask=mask)
    else:
        sum_of_squares = tl.zeros((ROW_TILE, 1), dtype=tl.float32)
        for start in range(0, width, COLUMN_TILE):
            column = start + tl.arange(0, COLUMN_TILE)[None, :]
            mask = row_mask & (column < width)
            total = _load_total(x, residual, total_ptr, row, column, width, mask, HAS_RESIDUAL, STORES=True)
            sum_of_squares += tl.sum(total * total, axis=1, keep_dims=True)
        inverse_rms = tl.rsqrt(sum_of_squares / width + eps)
        for start in range(0, width, COLUMN_TILE):
            column = start + tl.arange(0, COLUMN_TILE)[None, :]
            mask = row_mask & (column < width)
            total = _load_total(x, residual, total_ptr, row, column, width, mask, HAS_RESIDUAL, STORES=False)
            weight = tl.load(weight_ptr + column * weight_stride, mask=column < width, other=0.0).to(tl.float32)
            tl.store(y_ptr + row * width + column, total * inverse_rms * weight, mask=mask)
    tl.store(inverse_rms_ptr + row, inverse_rms, mask=row_mask)


@triton.jit
def _rows_of_tile(tile, num_rows, ROW_TILE: tl.constexpr):
    """Return the row indices of a tile (ROW_TILE, 1), and whether such rows exist."""
    row = (tile * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)[:, None]
    return row, row < num_rows


@triton.jit
def _load_normalized(total, grad_y, row, column, inverse_rms, mask):
    """Load a tile of n = total * inverse_rms and of y's gradient, in float32."""
    total_tile, grad_y_tile = _load_row(total, row, column, mask), _load_row(grad_y, row, column, mask)
    return total_tile.to(tl.float32) * inverse_rms, grad_y_tile.to(tl.float32)


@triton.jit
def _store_grad(
    grad, grad_total, grad_x_ptr, grad_residual_ptr, row, column, width, mask,
    HAS_GRAD_TOTAL: tl.constexpr, WRITES_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store a tile of the gradient that reached the sum by y, plus what reached it directly, once for each dtype."""
    if HAS_GRAD_TOTAL:
        offset = row * grad_total.strides[0] + column * grad_total.strides[1]
        grad += tl.load(grad_total.pointer + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(grad_x_ptr + row * width + column, grad, mask=mask)
    if WRITES_RESIDUAL:
        tl.store(grad_residual_ptr + row * width + column, grad, mask=mask)


@triton.jit
def rms_norm_backward_kernel(
    grad_y_ptr, grad_total_ptr, total_ptr, weight_ptr, inverse_rms_ptr, grad_x_ptr, grad_residual_ptr,
    partial_grad_weight_ptr, grad_y_strides, grad_total_strides, total_strides, weight_stride, num_rows, width,
    HAS_GRAD_TOTAL: tl.constexpr, WRITES_RESIDUAL: tl.constexpr, ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr,
    ONE_TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk along a share of the tiles of rows in each program, which keeps a partial sum of the weight's gradient.

    n = x inverse_rms and g = grad_y weight give grad_x = inverse_rms (g - n mean(g n)), grad_weight = sum grad_y n.
    """
    total, grad_total = Matrix(total_ptr, total_strides), Matrix(grad_total_ptr, grad_total_strides)
    grad_y_matrix = Matrix(grad_y_ptr, grad_y_strides)
    program = tl.program_id(0)
    num_tiles = tl.cdiv(num_rows, ROW_TILE)
    partial_grad_weight_ptr += program.to(tl.int64) * width
    if ONE_TILE:
        column = tl.arange(0, COLUMN_TILE)[None, :]
        column_mask = column < width
        weight = tl.load(weight_ptr + column * weight_stride, mask=column_mask, other=0.0).to(tl.float32)
        grad_weight = tl.zeros((ROW_TILE, COLUMN_TILE), dtype=tl.float32)
        for tile in tl.range(program, num_tiles, tl.num_programs(0), num_stages=STAGES):
            row, row_mask = _rows_of_tile(tile, num_rows, ROW_TILE)
            mask = row_mask & column_mask
            inverse_rms = tl.load(inverse_rms_ptr + row, mask=row_mask, other=0.0)
            normalized, grad_y = _load_normalized(total, grad_y_matrix, row, column, inverse_rms, mask)
            grad_weight += grad_y * normalized
            grad = grad_y * weight
            mean = tl.sum(grad * normalized, axis=1, keep_dims=True) / width
            _store_grad(
                inverse_rms * (grad - normalized * mean), grad_total, grad_x_ptr, grad_residual_ptr, row, column,
                width, mask, HAS_GRAD_TOTAL, WRITES_RESIDUAL,
            )  # fmt: skip
        tl.store(partial_grad_weight_ptr + column, tl.sum(grad_weight, axis=0, keep_dims=True), mask=column_mask)
    else:
        for tile in range(program, num_tiles, tl.num_programs(0)):
            row, row_mask = _rows_of_tile(tile, num_rows, ROW_TILE)
            inverse_rms = tl.load(inverse_rms_ptr + row, mask=row_mask, other=0.0)
            mean = tl.zeros((ROW_TILE, 1), dtype=tl.float32)
            for start in range(0, width, COLUMN_TILE):
                column = start + tl.arange(0, COLUMN_TILE)[None, :]
                column_mask = column < width
                mask = row_mask & column_mask
                normalized, grad_y = _load_normalized(total, grad_y_matrix, row, column, inverse_rms, mask)
                weight = tl.load(weight_ptr + column * weight_stride, mask=column_mask, other=0.0).to(tl.float32)
                mean += tl.sum(grad_y * weight * normalized, axis=1, keep_dims=True) / width
            for start in range(0, width, COLUMN_TILE):
                column = start + tl.arange(0, COLUMN_TILE)[None, :]
                column_mask = column < width
                mask = row_mask & column_mask
                normalized, grad_y = _load_normalized(total, grad_y_matrix, row, column, inverse_rms, mask)
                weight = tl.load(weight_ptr + column * weight_stride, mask=column_mask, other=0.0).to(tl.float32)
                _store_grad(
                    inverse_rms * (grad_y * weight - normalized * mean), grad_total, grad_x_ptr, grad_residual_ptr,
                    row, column, width, mask, HAS_GRAD_TOTAL, WRITES_RESIDUAL,
                )  # fmt: skip
                # The sum stays in the L2 cache: no other program adds to it, and it began as zeros.
                sums = tl.load(partial_grad_weight_ptr + column, mask=column_mask, other=0.0)
                sums += tl.sum(grad_y * normalized, axis=0, keep_dims=True)
                tl.store(partial_grad_weight_ptr + column, sums, mask=column_mask)


# The settings below were the fastest on an H200, at 79 to 95 % of a copy's rate forward and 54 to 96 % backward: see
# docs/results/kernels-h200.md.

# Most elements of a row in one tile. A longer row is walked along twice, in several tiles.
FORWARD_ROW_ELEMENTS = 8192
BACKWARD_ROW_ELEMENTS = 8192
# Rows and columns of a tile where a row has several, in the backward pass.
LONG_ROW_TILES = 4, 4096
# Narrow rows share a tile of so many elements; half as many in the forward pass, where each thread takes 32.
NARROW_TILE_ELEMENTS = 2048
# What the stages of a program may take together: a little less than every GPU from compute capability 8.6 on has; and
# those of all programs of a multiprocessor, so that they are there at once on an H200, which has 227 KB for them: 2048
# rows of 768 with a float32 stream took 8.4 us, and 10.4 where only three of four programs fitted.
STAGED_BYTES = 96 * 1024
STAGED_BYTES_OF_MULTIPROCESSOR = 208 * 1024


class RMSNormSettings(NamedTuple):
    """Launch settings of a kernel."""

    row_tile: int
    column_tile: int
    num_warps: int
    programs: int = 1  # Of the backward pass on one multiprocessor, among which the rows are shared out.
    stages: int = 1  # Tiles that these load ahead through shared memory, and the one they compute; 1 loads none ahead.

    def constants(self, width: int) -> dict[str, Any]:
        """Return the constants of a launch over rows of ``width`` elements, and its warps."""
        tiles = {"ROW_TILE": self.row_tile, "COLUMN_TILE": self.column_tile, "ONE_TILE": width <= self.column_tile}
        return {**tiles, "num_warps": self.num_warps}


def forward_settings(width: int) -> RMSNormSettings:
    """Return the forward pass's settings for rows of ``width`` elements."""
    column_tile = triton.next_power_of_2(width)
    if column_tile > FORWARD_ROW_ELEMENTS:
        return RMSNormSettings(row_tile=1, column_tile=FORWARD_ROW_ELEMENTS, num_warps=16)
    row_tile = max(1, NARROW_TILE_ELEMENTS // 2 // column_tile)
    return RMSNormSettings(row_tile, column_tile, num_warps=max(1, row_tile * column_tile // 1024))


def backward_settings(width: int, element_bytes: int) -> RMSNormSettings:
    """Return the backward pass's settings; ``element_bytes``: of one element of each tensor that is read."""
    column_tile = triton.next_power_of_2(width)
    if column_tile > BACKWARD_ROW_ELEMENTS:
        return RMSNormSettings(*LONG_ROW_TILES, num_warps=16, programs=2)
    row_tile = max(1, NARROW_TILE_ELEMENTS // column_tile)
    if column_tile > 4096:  # These numbers, too, were the fastest on an H200.
        num_warps, programs, stages = 8, 1, 3
    elif column_tile > 2048:
        num_warps, programs, stages = 8, 1 if width > 3072 else 2, 4
    else:
        num_warps, programs, stages = 4, 3 if column_tile > 1024 else 4, 4
    staged_bytes = min(STAGED_BYTES, STAGED_BYTES_OF_MULTIPROCESSOR // programs)
    tiles_that_fit = staged_bytes // (row_tile * column_tile * element_bytes)  # Of those loaded ahead, stages - 1.
    return RMSNormSettings(row_tile, column_tile, num_warps, programs, stages=1 + min(stages - 1, tiles_that_fit))


def empty_results(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Check shapes, and allocate y, total and inverse RMS as :func:`launch_forward`, whose arguments these are."""
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"x (..., d) needs a weight of shape (d,), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"x and residual must have the same shape, got {tuple(x.shape)} and {tuple(residual.shape)}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps is {eps}, but must be finite and at least 0")
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if residual is None:
        total = torch.empty(0, dtype=x.dtype, device=x.device)
    else:
        total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    return y, total, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def launch_forward(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y in ``dtype``, x + residual (empty where there is no residual), and 1 / rms of each row in float32."""
    y, total, inverse_rms = empty_results(x, weight, residual, eps, dtype)
    tensors = {"x": x, "weight": weight} | ({} if residual is None else {"residual": residual})
    operators.check_tensors("rms_norm", rms_norm_forward_kernel, **tensors)
    if y.numel() == 0:  # A row of no elements has a mean square of 0.
        return y, total, inverse_rms.fill_(eps**-0.5 if eps else torch.inf)
    rows = operators.as_rows(x)
    residual_rows = rows if residual is None else operators.as_rows(residual)  # Not touched if there is none.
    width = x.shape[-1]
    settings = forward_settings(width)
    operands = rows, residual_rows, weight, y, total, inverse_rms
    strides = rows.stride(), residual_rows.stride(), weight.stride(0)
    has_residual, constants = residual is not None, settings.constants(width)
    with torch.cuda.device_of(x):
        rms_norm_forward_kernel[(triton.cdiv(len(rows), settings.row_tile),)](
            *operands, *strides, len(rows), width, eps, HAS_RESIDUAL=has_residual, **constants
        )
    return y, total, inverse_rms


def _empty_grads(grad_y, grad_total, total, weight, inverse_rms, x_dtype, residual_dtype):
    """Allocate the results of :func:`launch_backward`, whose arguments these are."""
    grad_x = torch.empty(total.shape, dtype=x_dtype, device=total.device)
    residual_shape = 0 if residual_dtype in (None, x_dtype) else total.shape
    grad_residual = torch.empty(residual_shape, dtype=residual_dtype or x_dtype, device=total.device)
    return grad_x, grad_residual, torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def launch_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the residual (empty unless its dtype differs from x's) and of the weight.

    ``total`` is x, or x + residual as forward returned it; ``grad_total``: what reached it not by y, None for nothing.
    """
    grad_x, grad_residual, grad_weight = _empty_grads(
        grad_y, grad_total, total, weight, inverse_rms, x_dtype, residual_dtype
    )
    if grad_x.numel() == 0:
        return grad_x, grad_residual, grad_weight.zero_()
    rows, grad_y_rows = operators.as_rows(total), operators.as_rows(grad_y)
    grad_total_rows = grad_y_rows if grad_total is None else operators.as_rows(grad_total)
    width = total.shape[-1]
    tensors_read = [total, grad_y] if grad_total is None else [total, grad_y, grad_total]
    settings = backward_settings(width, element_bytes=sum(tensor.element_size() for tensor in tensors_read))
    constants = settings.constants(width)
    num_tiles = triton.cdiv(len(rows), settings.row_tile)
    num_programs = min(num_tiles, settings.programs * operators.num_multiprocessors(rows.device))
    # Programs that walk along a row in several tiles add to their sums in memory.
    allocate = torch.empty if constants["ONE_TILE"] else torch.zeros
    partial_grad_weight = allocate((num_programs, width), dtype=torch.float32, device=total.device)
    inputs = grad_y_rows, grad_total_rows, rows, weight, inverse_rms.contiguous()
    results = grad_x, grad_residual, partial_grad_weight
    strides = *(tensor.stride() for tensor in inputs[:3]), weight.stride(0)
    constants |= {"HAS_GRAD_TOTAL": grad_total is not None, "WRITES_RESIDUAL": grad_residual.numel() > 0}
    with torch.cuda.device_of(total):
        rms_norm_backward_kernel[(num_programs,)](
            *inputs, *results, *strides, *rows.shape, STAGES=settings.stages, **constants
        )
    return grad_x, grad_residual, operators.sum_of_partials(partial_grad_weight, weight.dtype)


_backward = operators.define_call(
    "rms_norm_backward(Tensor grad_y, Tensor? grad_total, Tensor total, Tensor weight, Tensor inverse_rms,"
    " ScalarType x_dtype, ScalarType? residual_dtype) -> (Tensor, Tensor, Tensor)",
    launch_backward,
    fake=_empty_grads,
)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, residual, *_ = inputs
    _, total, inverse_rms = output
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)  # Zeros for what nothing reads, the inverse RMS and an empty sum, take a launch.
    ctx.save_for_backward(x if residual is None else total, weight, inverse_rms)


def _differentiate(ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None, _: Tensor | None) -> tuple:
    """Return gradients of the operator's arguments; ``grad_total``: of the sum. None: of what nothing has read."""
    total, weight, inverse_rms = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    grad_y = torch.zeros_like(total) if grad_y is None else grad_y
    grad_x, grad_residual, grad_weight = _backward(
        grad_y, grad_total, total, weight, inverse_rms, x_dtype, residual_dtype
    )
    if residual_dtype is None:
        return grad_x, grad_weight, None, None, None  # None: of residual, eps and dtype.
    # Both gradients are the same numbers: that of the residual was written apart only for another dtype.
    return grad_x, grad_weight, grad_x if residual_dtype == x_dtype else grad_residual, None, None


_forward = operators.define_call(
    "rms_norm_forward(Tensor x, Tensor weight, Tensor? residual, float eps, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    launch_forward, fake=empty_results, name="RMSNorm", differentiate=_differentiate, save=_save_for_backward,
)  # fmt: skip


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-5, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (https://arxiv.org/abs/1910.07467, eq. 4).

    With a residual the sum x + residual takes the place of x and is returned, too. Arithmetic is in float32, forward
    and backward, of the sum as it is rounded to its dtype. The backward pass reads y's gradient, x (or the sum), and
    one number a row. Differentiable once, in ``x``, ``weight`` and ``residual``; equal from run to run to the last bit.
    ``torch.compile`` keeps it in one graph. Under ``torch.autocast`` y has its dtype, whatever that of ``x``.

    Args:
        x: (..., d), float32, float16 or bfloat16, with any number of leading dimensions and any strides.
        weight: (d,), of any of these dtypes.
        eps: added to the mean square.
        residual: (..., d), of any of these dtypes.

    Returns:
        y (..., d), contiguous, of the dtype of ``x``; with a residual of the dtype to which the two promote, followed
        by x + residual.

    Raises:
        ValueError: shapes or devices do not fit together, or eps is out of range.
        TypeError: a dtype is not supported.
        CapabilityError: the tensors are not on a CUDA GPU, and the kernels were not loaded in Triton's interpreter.
        RuntimeError: it is differentiated twice.
    """
    dtype = operators.result_dtype(x) if residual is None else operators.result_dtype(x, residual)
    y, total, _ = _forward(x, weight, residual, eps, dtype)
    return y if residual is None else (y, total)


def reference_rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-5, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute :func:`rms_norm` in PyTorch, any dtypes, half precision in float32: the ground truth of the tests."""
    total = x if residual is None else x + residual
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    y = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(total.dtype)
    return y if residual is None else (y, total)
