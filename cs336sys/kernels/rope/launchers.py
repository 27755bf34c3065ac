"""What is checked and allocated for a rotation, and how its launch is shared out to programs."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from cs336sys.kernels.operators import check_tensors, num_multiprocessors
from cs336sys.kernels.rope.kernels import rope_kernel, rope_qkv_kernel

# Elements of a tile, and the most heads that a program rotates by the same cosines and sines, one after another: fewer
# where a multiprocessor would get less than so many programs. On an H200, 2048 tokens of 25 heads took 7.2 us with 8.
TILE = 1024
HEADS = 8
NUM_WARPS = 4
MIN_PROGRAMS = 12


@functools.lru_cache(maxsize=32)
def _frequencies(dim: int, theta: float, inverse: bool, device: torch.device) -> torch.Tensor:
    """theta^(-2i / dim) / (2 pi) for each pair i: what a position adds to the angle, in units of 2^-64 turns."""
    turns = (math.fmod(theta ** (-2 * pair / dim) / (2 * math.pi), 1) for pair in range(dim // 2))
    # A fraction of more than a half is a negative int64.
    units = [(round(turn * 2**64) + 2**63) % 2**64 - 2**63 for turn in turns]
    return torch.tensor([-unit if inverse else unit for unit in units], dtype=torch.int64, device=device)


class Tiling(NamedTuple):
    """How rows and heads are shared out to programs."""

    tiles: int
    groups: int
    constants: dict[str, int]


def _tiling(batches: int, heads: Sequence[int], num_rows: int, dim: int, device: torch.device) -> Tiling:
    """``heads``: of each tensor that one launch rotates. A tensor's heads are in at most ``groups`` groups."""
    half_tile = triton.next_power_of_2(dim) // 2
    row_tile = min(max(1, TILE // (2 * half_tile)), triton.next_power_of_2(num_rows))
    tiles = batches * triton.cdiv(num_rows, row_tile)
    in_group = HEADS
    # The interpreter, which runs one program after another, is best off with few.
    if device.type == "cuda":
        at_least = MIN_PROGRAMS * num_multiprocessors(device)
        while in_group > 1 and tiles * sum(triton.cdiv(number, in_group) for number in heads) < at_least:
            in_group //= 2
    constants = {"HEADS": in_group, "ROW_TILE": row_tile, "HALF_TILE": half_tile, "num_warps": NUM_WARPS}
    return Tiling(tiles, triton.cdiv(max(heads), in_group), constants)


def _rotate(x: torch.Tensor, y: torch.Tensor, positions: torch.Tensor | None, theta: float, inverse: bool) -> None:
    """Writes x (..., S, D), rotated, to y of the same shape and any strides; ``positions`` broadcast to (..., S)."""
    if x.numel() == 0:
        return
    *leading, num_rows, dim = x.shape
    shape = (math.prod(leading[:-1]), leading[-1] if leading else 1, num_rows, dim)
    x, y = x.reshape(shape), y.view(shape)
    is_implied = positions is None
    if positions is None:
        positions = torch.empty(0, dtype=torch.int64, device=x.device)
        positions_strides: tuple[int, ...] = (0, 0, 0)
    else:
        positions = positions.expand(*leading, num_rows).reshape(shape[:-1])
        positions_strides = positions.stride()
    tiling = _tiling(shape[0], shape[1:2], num_rows, dim, x.device)
    with torch.cuda.device_of(x):
        rope_kernel[(tiling.tiles * tiling.groups,)](
            x,
            y,
            positions,
            _frequencies(dim, theta, inverse, x.device),
            *x.stride(),
            *y.stride(),
            *positions_strides,
            shape[1],
            num_rows,
            dim // 2,
            IMPLIED=is_implied,
            SHARED=positions_strides[1] == 0 or shape[1] == 1,
            **tiling.constants,
        )


def _rotate_qkv(
    qkv: torch.Tensor,
    parts: Sequence[torch.Tensor],
    positions: torch.Tensor | None,
    theta: float,
    backward: bool,
) -> None:
    """Writes query, key and value (..., H, S, D) from qkv (..., S, all heads x D), or qkv from their gradients.

    ``positions`` broadcast to (..., S). What is written is a view of four dimensions whatever its strides are.
    """
    if qkv.numel() == 0:
        return
    *leading, num_rows, _ = qkv.shape
    batches, dim = math.prod(leading), parts[0].shape[-1]
    heads = [part.shape[-3] for part in parts]
    qkv = qkv.reshape(batches, num_rows, -1, dim)
    flat = [part.reshape(batches, -1, num_rows, dim) for part in parts]
    is_implied = positions is None
    if positions is None:
        positions = torch.empty((0, 0), dtype=torch.int64, device=qkv.device)
    else:
        positions = positions.expand(*leading, num_rows).reshape(batches, num_rows)
    tiling = _tiling(batches, heads, num_rows, dim, qkv.device)
    batch_stride, row_stride, head_stride, column_stride = qkv.stride()
    with torch.cuda.device_of(qkv):
        rope_qkv_kernel[(tiling.tiles * tiling.groups, len(parts))](
            qkv,
            *flat,
            positions,
            _frequencies(dim, theta, backward, qkv.device),
            batch_stride,
            head_stride,
            row_stride,
            column_stride,
            *(stride for part in flat for stride in part.stride()),
            *positions.stride(),
            heads[0],
            heads[1],
            tiling.groups,
            num_rows,
            dim // 2,
            BACKWARD=backward,
            IMPLIED=is_implied,
            **tiling.constants,
        )


def _check_positions(positions: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    if positions is None:
        return
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions must be of dtype torch.int32 or torch.int64, not {positions.dtype}")
    if positions.device != device:
        raise ValueError(f"positions must be on the device of what is rotated, {device}, not on {positions.device}")
    fits = 1 <= positions.dim() <= len(shape) and all(
        size in (1, expected) for size, expected in zip(reversed(positions.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"positions of shape {tuple(positions.shape)} do not broadcast to {tuple(shape)}")


def _check_inputs(x: torch.Tensor, positions: torch.Tensor | None, theta: float) -> None:
    if x.dim() < 2 or x.shape[-1] % 2 or x.shape[-1] == 0:
        raise ValueError(f"rope rotates pairs of x (..., S, D) with D even, got x of shape {tuple(x.shape)}")
    _check_theta(theta)
    _check_positions(positions, x.shape[:-1], x.device)


def _check_theta(theta: float) -> None:
    if not 0 < theta < math.inf:
        raise ValueError(f"theta {theta}: must be a positive number")


def empty_rotated(
    x: torch.Tensor,
    positions: torch.Tensor | None,
    theta: float,
    inverse: bool,
    strides: Sequence[int] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    _check_inputs(x, positions, theta)
    if strides is None:
        # With more dimensions the kernel could not address every order of them.
        return torch.empty_like(x, dtype=dtype) if x.dim() <= 4 else torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device)


def compute(
    x: torch.Tensor,
    positions: torch.Tensor | None,
    theta: float,
    inverse: bool,
    strides: Sequence[int] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x rotated, or with ``inverse`` rotated back, with these strides, or those of x where it is dense."""
    y = empty_rotated(x, positions, theta, inverse, strides, dtype)
    check_tensors("rope", rope_kernel, x=x)
    _rotate(x, y, positions, theta, inverse)
    return y


def _check_qkv(qkv: torch.Tensor, positions: torch.Tensor | None, num_heads: int, num_key_value_heads: int) -> int:
    """The head dimension."""
    if num_heads < 1 or num_key_value_heads < 1:
        raise ValueError(f"num_heads {num_heads}, num_key_value_heads {num_key_value_heads}: must be at least 1")
    head_dim, rest = divmod(qkv.shape[-1] if qkv.dim() > 1 else 0, num_heads + 2 * num_key_value_heads)
    if rest or head_dim % 2 or head_dim == 0:
        raise ValueError(
            f"qkv (..., S, ({num_heads} + 2 * {num_key_value_heads}) D) needs an even D, got {tuple(qkv.shape)}"
        )
    _check_positions(positions, qkv.shape[:-1], qkv.device)
    return head_dim


def empty_qkv(
    qkv: torch.Tensor,
    positions: torch.Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    theta: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    head_dim = _check_qkv(qkv, positions, num_heads, num_key_value_heads)
    _check_theta(theta)
    query, key, value = (
        torch.empty((*qkv.shape[:-1], heads, head_dim), dtype=dtype, device=qkv.device).transpose(-3, -2)
        for heads in (num_heads, num_key_value_heads, num_key_value_heads)
    )
    return query, key, value


def compute_qkv(
    qkv: torch.Tensor,
    positions: torch.Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    theta: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    results = empty_qkv(qkv, positions, num_heads, num_key_value_heads, theta, dtype)
    check_tensors("rope_qkv", rope_qkv_kernel, qkv=qkv)
    _rotate_qkv(qkv, results, positions, theta, backward=False)
    return results


def empty_grad_qkv(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    positions: torch.Tensor | None,
    theta: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    *leading, num_heads, length, head_dim = grad_query.shape
    width = (num_heads + 2 * grad_key.shape[-3]) * head_dim
    return torch.empty((*leading, length, width), dtype=dtype, device=grad_query.device)


def compute_grad_qkv(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    positions: torch.Tensor | None,
    theta: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    grad_qkv = empty_grad_qkv(grad_query, grad_key, grad_value, positions, theta, dtype)
    _rotate_qkv(grad_qkv, (grad_query, grad_key, grad_value), positions, theta, backward=True)
    return grad_qkv
