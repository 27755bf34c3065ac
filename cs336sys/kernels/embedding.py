"""Rows of an embedding's weight, and its gradient: each row's sum over tokens in their order, without atomics."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336sys.kernels.autograd import once_differentiable
from cs336sys.kernels.operators import check_tensors, needs_operators

# The most tokens that are put in order by comparing each with each, in one launch; more are sorted. A program finds the
# places of RANKED_TOKENS, comparing them with COMPARED_TOKENS at a time.
MOST_COMPARED = 2**14
RANKED_TOKENS = 16
COMPARED_TOKENS = 512
# Gradients of one row that are added up at once.
SUMMED_TOKENS = 8
COLUMN_TILE = 512


@triton.jit
def _row_of(ids_ptr, token, mask, num_rows):
    """Load the row that a token reads: negative ids count from the end."""
    row = tl.load(ids_ptr + token, mask=mask, other=0)
    return tl.where(row < 0, row + num_rows, row)


@triton.jit
def _embedding_order_kernel(ids_ptr, order_ptr, num_tokens, num_rows, TILE: tl.constexpr, COMPARED: tl.constexpr):
    """Write each token to its place in the order of rows, and of positions among equal rows."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = _row_of(ids_ptr, token, token < num_tokens, num_rows)[:, None]
    place = tl.zeros((TILE,), tl.int32)
    for start in range(0, num_tokens, COMPARED):
        other_token = start + tl.arange(0, COMPARED)
        other_row = _row_of(ids_ptr, other_token, other_token < num_tokens, num_rows)[None, :]
        is_before = (other_row < row) | ((other_row == row) & (other_token[None, :] < token[:, None]))
        place += tl.sum((is_before & (other_token < num_tokens)[None, :]).to(tl.int32), axis=1)
    tl.store(order_ptr + place, token, mask=token < num_tokens)


@triton.jit
def _embedding_sum_kernel(
    ids_ptr, order_ptr, grad_ptr, grad_weight_ptr, num_tokens, num_rows, width,
    TILE: tl.constexpr, COLUMN_TILE: tl.constexpr,
):  # fmt: skip
    """Add up the gradients of a row's tokens, TILE at a time, in the program at the row's first place."""
    place = tl.program_id(0)
    row = _row_of(ids_ptr, tl.load(order_ptr + place), True, num_rows)
    token_before = tl.load(order_ptr + place - 1, mask=place > 0, other=0)
    is_first = (place == 0) | (_row_of(ids_ptr, token_before, True, num_rows) != row)
    if is_first:
        column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)[None, :]
        total = tl.zeros((TILE, COLUMN_TILE), tl.float32)
        start = place
        goes_on = 1
        while goes_on > 0:
            places = start + tl.arange(0, TILE)
            token = tl.load(order_ptr + places, mask=places < num_tokens, other=0)
            in_row = (places < num_tokens) & (_row_of(ids_ptr, token, places < num_tokens, num_rows) == row)
            offset = token.to(tl.int64)[:, None] * width + column
            total += tl.load(grad_ptr + offset, mask=in_row[:, None] & (column < width), other=0.0).to(tl.float32)
            start += TILE
            goes_on = tl.min(in_row.to(tl.int32), axis=0)
        offset = row.to(tl.int64) * width + column
        tl.store(grad_weight_ptr + offset, tl.sum(total, axis=0, keep_dims=True), mask=column < width)


def _tokens_by_row(ids: Tensor, num_rows: int) -> Tensor:
    """Return the tokens' indices in the order of their rows, int32 or int64."""
    if len(ids) > MOST_COMPARED:
        return (ids % num_rows).argsort(stable=True)
    order = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    _embedding_order_kernel[(triton.cdiv(len(ids), RANKED_TOKENS),)](
        ids, order, len(ids), num_rows, TILE=RANKED_TOKENS, COMPARED=COMPARED_TOKENS, num_warps=8
    )
    return order


def embedding_gradient(ids: Tensor, grad: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient (num_rows, d) in ``dtype`` of a weight: ``grad`` (..., d) is that of its rows ``ids`` (...).

    Added up in float32 in an order that is always the same, and rounded once.
    """
    check_tensors("embedding", _embedding_sum_kernel, grad=grad)
    width = grad.shape[-1]
    ids, grad = ids.reshape(-1).contiguous(), grad.reshape(-1, width).contiguous()
    grad_weight = torch.zeros((num_rows, width), dtype=dtype, device=grad.device)
    if grad.numel():
        column_tile = min(COLUMN_TILE, triton.next_power_of_2(width))
        numbers = len(ids), num_rows, width
        with torch.cuda.device_of(grad):
            tensors = ids, _tokens_by_row(ids, num_rows), grad, grad_weight
            _embedding_sum_kernel[(len(ids), triton.cdiv(width, column_tile))](
                *tensors, *numbers, TILE=SUMMED_TOKENS, COLUMN_TILE=column_tile
            )
    return grad_weight


class EmbeddingRows(torch.autograd.Function):
    """``EmbeddingRows.apply(weight, ids)``; see :func:`embedding_rows`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.dtype = len(weight), weight.dtype
        return weight[ids]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (ids,) = ctx.saved_tensors
        return embedding_gradient(ids, grad, ctx.num_rows, ctx.dtype), None


def embedding_rows(weight: Tensor, ids: Tensor) -> Tensor:
    """Return ``weight[ids]``, whose gradient is two launches besides zeros where torch's is six.

    On a GPU; elsewhere, and where a compiler sees it, it is torch's. Equal from run to run to the last bit.
    Differentiable once.

    Args:
        weight: (V, d), float32, float16 or bfloat16.
        ids: int64 (...), from -V to V - 1.

    Returns:
        (..., d).
    """
    if not weight.is_cuda or needs_operators(weight):
        return weight[ids]
    return EmbeddingRows.apply(weight, ids)
