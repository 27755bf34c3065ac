"""How the kernels of rms_norm are launched: settings by width, and what is checked and allocated."""

from typing import NamedTuple

import torch
import triton

from cs336sys.kernels.operators import as_rows, check_tensors, num_multiprocessors
from cs336sys.kernels.partial_sums import sum_of_partials
from cs336sys.kernels.rms_norm.kernels import rms_norm_backward_kernel, rms_norm_forward_kernel

# One H200, triton 3.6, bf16, 32768 rows (16384 of 8192 and more): microseconds, and the share of a copy's 4.25 TB/s.
# Forward, 1024 elements a warp, against four or eight times as many warps and against programs that walk along rows:
#   width 768: 30 (79 %) against 34;  1600: 58 (86 %) against 63;  4096: 133 (95 %) against 144;  8192: 134 (94 %)
#   against 149;  11008 in two tiles: 198 (86 %), in one of 16384 elements 298
# Backward, (warps, programs on a multiprocessor, stages):
#   768, two rows a tile: (4, 4, 4) 57 (62 %), (4, 3, 3) 60, (4, 5, 1) 73
#   1600: (4, 3, 4) 92 (80 %), (4, 3, 3) 98, (4, 5, 1) 107
#   2560: (8, 2, 4) 135 (88 %), (8, 2, 3) 149, (8, 3, 1) 160
#   4096: (8, 1, 4) 211 (90 %), (8, 3, 1) 210, (8, 2, 1) 240; with residual (8, 1, 4) 265 (96 %), (8, 2, 3) 272,
#   (8, 3, 1) 376
#   8192: (8, 1, 3) 204 (93 %), (16, 1, 3) 206, (16, 1, 1) 260
#   11008 in several tiles: four rows of 4096 elements 468 (54 %), one of 8192 578; in one of 16384 elements 498

# Most elements of a row in one tile. A longer row is walked along twice, in several tiles.
FORWARD_TILE = 8192
BACKWARD_TILE = 8192
# Rows and columns of a tile where a row has several, in the backward pass.
LONG_ROW_TILES = 4, 4096
# Narrow rows share a tile of so many elements.
NARROW_TILE = 2048
# What the stages of a program may take together: a little less than every GPU from compute capability 8.6 on has; and
# those of all programs of a multiprocessor, so that they are there at once on an H200, which has 227 KB for them: 2048
# rows of 768 with a float32 stream took 8.4 us, and 10.4 where only three of four programs fitted.
STAGED_BYTES = 96 * 1024
STAGED_BYTES_OF_MULTIPROCESSOR = 208 * 1024


class Settings(NamedTuple):
    """How a kernel is launched.

    Attributes:
        programs: of the backward pass on one multiprocessor, among which the rows are shared out.
        stages: tiles that these load ahead through shared memory, and the one they compute; 1 loads none ahead.
    """

    row_tile: int
    column_tile: int
    num_warps: int
    programs: int = 1
    stages: int = 1


def forward_settings(width: int) -> Settings:
    column_tile = triton.next_power_of_2(width)
    if column_tile > FORWARD_TILE:
        return Settings(1, FORWARD_TILE, num_warps=16)
    row_tile = max(1, NARROW_TILE // 2 // column_tile)
    return Settings(row_tile, column_tile, num_warps=max(1, row_tile * column_tile // 1024))


def backward_settings(width: int, element_bytes: int) -> Settings:
    """``element_bytes``: of one element of each tensor that is read."""
    column_tile = triton.next_power_of_2(width)
    if column_tile > BACKWARD_TILE:
        return Settings(*LONG_ROW_TILES, num_warps=16, programs=2)
    row_tile = max(1, NARROW_TILE // column_tile)
    if column_tile > 4096:
        num_warps, programs, stages = 8, 1, 3
    elif column_tile > 2048:
        num_warps, programs, stages = 8, 1 if width > 3072 else 2, 4
    else:
        num_warps, programs, stages = 4, 3 if column_tile > 1024 else 4, 4
    most = min(STAGED_BYTES, STAGED_BYTES_OF_MULTIPROCESSOR // programs)
    affordable = most // (row_tile * column_tile * element_bytes)
    return Settings(row_tile, column_tile, num_warps, programs, stages=1 + min(stages - 1, affordable))


def _num_programs(rows: torch.Tensor, settings: Settings) -> int:
    num_tiles = triton.cdiv(len(rows), settings.row_tile)
    return min(num_tiles, settings.programs * num_multiprocessors(rows.device))


def _check_shapes(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"x (..., d) needs a weight of shape (d,), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"x and residual must have the same shape, got {tuple(x.shape)} and {tuple(residual.shape)}")


def empty_results(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_shapes(x, weight, residual)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if residual is None:
        total = torch.empty(0, dtype=x.dtype, device=x.device)
    else:
        total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    return y, total, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def forward(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, x + residual (empty where there is no residual), and 1 / rms of each row in float32."""
    y, total, inverse_rms = empty_results(x, weight, residual, eps, dtype)
    tensors = {"x": x, "weight": weight} | ({} if residual is None else {"residual": residual})
    check_tensors("rms_norm", rms_norm_forward_kernel, **tensors)
    if y.numel() == 0:
        return y, total, inverse_rms.fill_(eps**-0.5 if eps else torch.inf)
    rows = as_rows(x)
    residual_rows = rows if residual is None else as_rows(residual)
    width = x.shape[-1]
    settings = forward_settings(width)
    with torch.cuda.device_of(x):
        rms_norm_forward_kernel[(triton.cdiv(len(rows), settings.row_tile),)](
            rows,
            residual_rows,
            weight,
            y,
            total,
            inverse_rms,
            *rows.stride(),
            *residual_rows.stride(),
            weight.stride(0),
            len(rows),
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            ROW_TILE=settings.row_tile,
            COLUMN_TILE=settings.column_tile,
            ONE_TILE=width <= settings.column_tile,
            num_warps=settings.num_warps,
        )
    return y, total, inverse_rms


def empty_grads(
    grad_y: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    inverse_rms: torch.Tensor,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_x = torch.empty(total.shape, dtype=x_dtype, device=total.device)
    if residual_dtype is None or residual_dtype == x_dtype:
        grad_residual = torch.empty(0, dtype=x_dtype, device=total.device)
    else:
        grad_residual = torch.empty(total.shape, dtype=residual_dtype, device=total.device)
    return grad_x, grad_residual, torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def backward(
    grad_y: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    inverse_rms: torch.Tensor,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, of the residual (empty unless its dtype is another than x's) and of the weight."""
    grad_x, grad_residual, grad_weight = empty_grads(
        grad_y, grad_total, total, weight, inverse_rms, x_dtype, residual_dtype
    )
    if grad_x.numel() == 0:
        return grad_x, grad_residual, grad_weight.zero_()
    rows, grad_y_rows = as_rows(total), as_rows(grad_y)
    grad_total_rows = grad_y_rows if grad_total is None else as_rows(grad_total)
    width = total.shape[-1]
    read = [total, grad_y] if grad_total is None else [total, grad_y, grad_total]
    settings = backward_settings(width, sum(tensor.element_size() for tensor in read))
    is_one_tile = width <= settings.column_tile
    num_programs = _num_programs(rows, settings)
    allocate = torch.empty if is_one_tile else torch.zeros
    partial_grad_weight = allocate((num_programs, width), dtype=torch.float32, device=total.device)
    with torch.cuda.device_of(total):
        rms_norm_backward_kernel[(num_programs,)](
            grad_y_rows,
            grad_total_rows,
            rows,
            weight,
            inverse_rms.contiguous(),
            grad_x,
            grad_residual,
            partial_grad_weight,
            *grad_y_rows.stride(),
            *grad_total_rows.stride(),
            *rows.stride(),
            weight.stride(0),
            len(rows),
            width,
            HAS_GRAD_TOTAL=grad_total is not None,
            WRITES_RESIDUAL=grad_residual.numel() > 0,
            ROW_TILE=settings.row_tile,
            COLUMN_TILE=settings.column_tile,
            ONE_TILE=is_one_tile,
            STAGES=settings.stages,
            num_warps=settings.num_warps,
        )
    return grad_x, grad_residual, sum_of_partials(partial_grad_weight, weight.dtype)
