"""The course's first Triton kernel: a weighted sum over the last dimension, forward and backward (handout, 4.2.1)."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336sys.kernels.autograd import once_differentiable
from cs336sys.kernels.operators import as_rows, check_tensors, sum_of_partials

# A tile of the forward pass: 16 elements in each of a program's 128 threads; a row fills whole 128-byte cache lines.
ROW_TILE = 16
COLUMN_TILE = 128
# The backward pass adds up columns: in wide tiles, of 32 elements in each thread, and at least so many rows to a
# program, so that the partial sums are 1/128 of x or less.
BACKWARD_TILE_ELEMENTS = 4096
MAX_BACKWARD_COLUMNS = 1024
BACKWARD_ROWS = 128
BACKWARD_STAGES = 3  # Tiles that a program loads ahead, and the one it computes.


@triton.jit
def _weighted_sum_forward_kernel(
    x_ptr, weight_ptr, output_ptr, x_row_stride, x_column_stride, weight_stride, num_rows, num_columns,
    ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr,
):  # fmt: skip
    """Sum one tile of rows, walking along the columns, in each program."""
    # Offsets are int64, for tensors of more than 2**31 elements.
    row = tl.program_id(0).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    row_mask = row < num_rows
    total = tl.zeros((ROW_TILE,), dtype=tl.float32)
    for start in range(0, num_columns, COLUMN_TILE):
        column = start + tl.arange(0, COLUMN_TILE).to(tl.int64)
        column_mask = column < num_columns
        x = tl.load(
            x_ptr + row[:, None] * x_row_stride + column[None, :] * x_column_stride,
            mask=row_mask[:, None] & column_mask[None, :],
            other=0.0,
        ).to(tl.float32)
        weight = tl.load(weight_ptr + column * weight_stride, mask=column_mask, other=0.0).to(tl.float32)
        total += tl.sum(x * weight[None, :], axis=1)
    tl.store(output_ptr + row, total, mask=row_mask)


@triton.jit
def _weighted_sum_backward_kernel(
    x_ptr, weight_ptr, grad_output_ptr, grad_x_ptr, partial_grad_weight_ptr, x_row_stride, x_column_stride,
    weight_stride, grad_output_stride, grad_x_row_stride, grad_x_column_stride, num_rows, num_columns,
    ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take one tile of columns, walking along a strip of ROWS rows, in each program."""
    num_column_tiles = tl.cdiv(num_columns, COLUMN_TILE)
    strip = tl.program_id(0).to(tl.int64) // num_column_tiles
    column = (tl.program_id(0).to(tl.int64) % num_column_tiles) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    column_mask = column < num_columns
    weight = tl.load(weight_ptr + column * weight_stride, mask=column_mask, other=0.0).to(tl.float32)
    # Added up over the rows of a tile once, in the end: threads would wait for each other in every tile.
    grad_weight = tl.zeros((ROW_TILE, COLUMN_TILE), dtype=tl.float32)
    for start in tl.range(0, ROWS, ROW_TILE, num_stages=STAGES):
        row = strip * ROWS + start + tl.arange(0, ROW_TILE)
        row_mask = row < num_rows
        mask = row_mask[:, None] & column_mask[None, :]
        grad_output = tl.load(grad_output_ptr + row * grad_output_stride, mask=row_mask, other=0.0).to(tl.float32)
        # grad_w[d] = sum_r x[r, d] grad_output[r]
        x_offset = row[:, None] * x_row_stride + column[None, :] * x_column_stride
        x = tl.load(x_ptr + x_offset, mask=mask, other=0.0).to(tl.float32)
        grad_weight += x * grad_output[:, None]
        # grad_x[r, d] = w[d] grad_output[r]
        grad_x_offset = row[:, None] * grad_x_row_stride + column[None, :] * grad_x_column_stride
        tl.store(grad_x_ptr + grad_x_offset, grad_output[:, None] * weight[None, :], mask=mask)
    tl.store(partial_grad_weight_ptr + strip * num_columns + column, tl.sum(grad_weight, axis=0), mask=column_mask)


class WeightedSum(torch.autograd.Function):
    """``WeightedSum.apply(x, weight)``; see :func:`weighted_sum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        if x.dim() == 0 or weight.shape != x.shape[-1:]:
            raise ValueError(f"x (..., D) needs a weight of shape (D,), got {tuple(x.shape)} and {tuple(weight.shape)}")
        if x.dtype != weight.dtype:
            raise TypeError(f"x and weight must have the same dtype, got {x.dtype} and {weight.dtype}")
        check_tensors("weighted_sum", _weighted_sum_forward_kernel, x=x, weight=weight)
        ctx.save_for_backward(x, weight)
        rows = as_rows(x)
        output = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
        strides = *rows.stride(), *weight.stride()
        with torch.cuda.device_of(x):
            _weighted_sum_forward_kernel[(triton.cdiv(len(rows), ROW_TILE),)](
                rows, weight, output, *strides, *rows.shape, ROW_TILE=ROW_TILE, COLUMN_TILE=COLUMN_TILE
            )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows, num_columns = as_rows(x), x.shape[-1]
        grad_output = grad_output.reshape(len(rows))
        grad_rows = torch.empty_like(rows)
        column_tile = min(triton.next_power_of_2(max(1, num_columns)), MAX_BACKWARD_COLUMNS)
        row_tile = BACKWARD_TILE_ELEMENTS // column_tile
        strip_rows = max(row_tile, BACKWARD_ROWS)  # Of a program, which takes one tile below another.
        num_strips = triton.cdiv(len(rows), strip_rows)
        num_column_tiles = triton.cdiv(num_columns, column_tile)
        partial_grad_weight = torch.empty((num_strips, num_columns), dtype=torch.float32, device=x.device)
        inputs = rows, weight, grad_output
        strides = [stride for tensor in (*inputs, grad_rows) for stride in tensor.stride()]
        constants = {"ROW_TILE": row_tile, "COLUMN_TILE": column_tile, "ROWS": strip_rows, "STAGES": BACKWARD_STAGES}
        with torch.cuda.device_of(x):
            # One dimension, as the second of a CUDA grid ends at 65535.
            _weighted_sum_backward_kernel[(num_strips * num_column_tiles,)](
                *inputs, grad_rows, partial_grad_weight, *strides, *rows.shape, **constants
            )
        return grad_rows.reshape(x.shape), sum_of_partials(partial_grad_weight, weight.dtype)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Sum the last dimension of ``x`` with ``weight``: f(x, w)[...] = sum_d w[d] x[..., d].

    Sums are in float32, forward and backward. Differentiable once, in ``x`` and ``weight``.

    Args:
        x: (..., D), float32, float16 or bfloat16, with any number of leading dimensions and any strides.
        weight: (D,), of the dtype and on the device of ``x``.

    Returns:
        (...), of the dtype of ``x``.

    Raises:
        ValueError, TypeError, CapabilityError, RuntimeError: as in :func:`~cs336sys.kernels.rms_norm.rms_norm`.
    """
    return WeightedSum.apply(x, weight)


def reference_weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Compute :func:`weighted_sum` in one line of PyTorch, for any dtypes: the ground truth of the tests."""
    return (x * weight).sum(dim=-1)
