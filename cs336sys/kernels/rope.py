"""Rotary position embeddings, from projections as they come out of the matrix product to what attention reads."""

import functools
import math
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336sys.kernels import operators


@triton.jit
def _cos_sin(turns):
    """Return cosine and sine of an angle in 2^-64 turns, int64, in which sums and products wrap around as angles do.

    The nearest quarter turn is taken off; for the remainder, at most pi / 4, the polynomials are right to float32.
    """
    high = (turns >> 32).to(tl.int32)  # in 2^-32 turns: a quarter turn is 1 << 30
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
    """Return the angles of rows' positions, which are the rows' numbers if IMPLIED, in 2^-64 turns."""
    if IMPLIED:
        position = row
    else:
        position = tl.load(positions_ptr + row * stride, mask=row_mask, other=0).to(tl.int64)
    return position * frequency


# A tensor, with strides of (batch, head, row, column); positions have no columns.
View = namedtuple("View", "pointer strides")


@dataclass(frozen=True)
class RotationConfig:
    """A program's tile of rows of so many heads, with pairs padded to ``half_tile``.

    ``implied_positions``: a row's position is its number. ``shared_positions``: all heads have the same positions, so
    their cosines and sines are computed once.
    """

    heads: int
    row_tile: int
    half_tile: int
    implied_positions: bool
    shared_positions: bool


@triton.jit
def _rotate_heads(
    x, y, positions, frequencies_ptr, num_heads, num_groups, num_rows, half_dim,
    ROTATES: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of rows of one of ``num_groups`` groups of heads in each program; without ROTATES copy it.

    A group has ``CONFIG.heads`` heads; of a tensor with fewer groups the last programs have nothing to do.
    """
    ROW_TILE: tl.constexpr = CONFIG.row_tile
    HALF_TILE: tl.constexpr = CONFIG.half_tile
    num_row_tiles = tl.cdiv(num_rows, ROW_TILE)
    program = tl.program_id(0).to(tl.int64)
    first_head = (program % num_groups) * CONFIG.heads
    row = ((program // num_groups) % num_row_tiles) * ROW_TILE + tl.arange(0, ROW_TILE)[:, None]
    batch = program // (num_groups * num_row_tiles)
    row_mask = row < num_rows
    column = tl.arange(0, 2 * HALF_TILE)[None, :]
    mask = row_mask & (column < 2 * half_dim)
    x_ptr = x.pointer + (batch * x.strides[0] + row * x.strides[2] + column * x.strides[3])
    y_ptr = y.pointer + (batch * y.strides[0] + row * y.strides[2] + column * y.strides[3])
    if ROTATES:
        pair = tl.arange(0, HALF_TILE)[None, :]
        frequency = tl.load(frequencies_ptr + pair, mask=pair < half_dim, other=0)
        positions_ptr = positions.pointer + batch * positions.strides[0]
        row_stride = positions.strides[2]
        if CONFIG.shared_positions:
            turns = _position_turns(positions_ptr, row, row_mask, row_stride, frequency, CONFIG.implied_positions)
            cos, sin = _cos_sin(turns)
    for head in range(first_head, tl.minimum(first_head + CONFIG.heads, num_heads)):
        tile = tl.load(x_ptr + head * x.strides[1], mask=mask, other=0.0).to(tl.float32)
        if ROTATES:
            if not CONFIG.shared_positions:
                head_positions_ptr = positions_ptr + head * positions.strides[1]
                turns = _position_turns(
                    head_positions_ptr, row, row_mask, row_stride, frequency, CONFIG.implied_positions
                )
                cos, sin = _cos_sin(turns)
            x1, x2 = tl.split(tl.reshape(tile, (ROW_TILE, HALF_TILE, 2)))
            tile = tl.reshape(tl.join(x1 * cos - x2 * sin, x1 * sin + x2 * cos), (ROW_TILE, 2 * HALF_TILE))
        tl.store(y_ptr + head * y.strides[1], tile, mask=mask)


@triton.jit
def rope_kernel(
    x_ptr, y_ptr, positions_ptr, frequencies_ptr, x_strides, y_strides, positions_strides, num_heads, num_rows,
    half_dim, CONFIG: tl.constexpr,
):  # fmt: skip
    _rotate_heads(
        View(x_ptr, x_strides), View(y_ptr, y_strides), View(positions_ptr, positions_strides), frequencies_ptr,
        num_heads, tl.cdiv(num_heads, CONFIG.heads), num_rows, half_dim, ROTATES=True, CONFIG=CONFIG,
    )  # fmt: skip


@triton.jit
def _part_of_qkv(
    qkv, part, positions, frequencies_ptr, num_heads, num_groups, num_rows, half_dim,
    ROTATES: tl.constexpr, BACKWARD: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Rotate or copy from the projection to query, key or value, or with BACKWARD from these to the projection."""
    if BACKWARD:
        _rotate_heads(part, qkv, positions, frequencies_ptr, num_heads, num_groups, num_rows, half_dim, ROTATES, CONFIG)
    else:
        _rotate_heads(qkv, part, positions, frequencies_ptr, num_heads, num_groups, num_rows, half_dim, ROTATES, CONFIG)


@triton.jit
def rope_qkv_kernel(
    qkv_ptr, query_ptr, key_ptr, value_ptr, positions_ptr, frequencies_ptr, qkv_strides, query_strides, key_strides,
    value_strides, positions_strides, num_heads, num_key_value_heads, num_groups, num_rows, half_dim,
    BACKWARD: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Rotate query and key out of the projection and copy value, or back: one of them along the grid's second axis."""
    part = tl.program_id(1)
    # Positions (batch, row) are those of all heads. In the projection heads of query, key and value follow each other.
    positions = View(positions_ptr, (positions_strides[0], 0, positions_strides[1]))
    if part == 0:
        _part_of_qkv(
            View(qkv_ptr, qkv_strides), View(query_ptr, query_strides), positions, frequencies_ptr,
            num_heads, num_groups, num_rows, half_dim, ROTATES=True, BACKWARD=BACKWARD, CONFIG=CONFIG,
        )  # fmt: skip
    elif part == 1:
        _part_of_qkv(
            View(qkv_ptr + num_heads * qkv_strides[1], qkv_strides), View(key_ptr, key_strides), positions,
            frequencies_ptr, num_key_value_heads, num_groups, num_rows, half_dim, ROTATES=True, BACKWARD=BACKWARD,
            CONFIG=CONFIG,
        )  # fmt: skip
    else:
        _part_of_qkv(
            View(qkv_ptr + (num_heads + num_key_value_heads) * qkv_strides[1], qkv_strides),
            View(value_ptr, value_strides), positions, frequencies_ptr,
            num_key_value_heads, num_groups, num_rows, half_dim, ROTATES=False, BACKWARD=BACKWARD, CONFIG=CONFIG,
        )  # fmt: skip


TILE_ELEMENTS = 1024
NUM_WARPS = 4
# The most heads that a program rotates by the same cosines and sines, one after another: fewer where a multiprocessor
# would get less than so many programs. On an H200, 2048 tokens of 25 heads took 7.2 us with 8 heads a program.
MAX_HEADS_OF_PROGRAM = 8
MIN_PROGRAMS_OF_MULTIPROCESSOR = 12


@functools.cache  # Without bound: CUDA graphs read the tables by address.
def _frequencies(dim: int, theta: float, inverse: bool, device: torch.device) -> Tensor:
    """Return theta^(-2i / dim) / (2 pi) for each pair i: what a position adds to the angle, in 2^-64 turns.

    ``inverse``: for the rotation back the negative of that.
    """
    turns = (math.fmod(theta ** (-2 * pair / dim) / (2 * math.pi), 1) for pair in range(dim // 2))
    # A fraction of more than a half is a negative int64.
    units = [(round(turn * 2**64) + 2**63) % 2**64 - 2**63 for turn in turns]
    return torch.tensor([-unit if inverse else unit for unit in units], dtype=torch.int64, device=device)


def _tiling(
    batches: int, heads: Sequence[int], num_rows: int, dim: int, device: torch.device
) -> tuple[int, int, tuple[int, int, int]]:
    """Return the programs that the largest tensor needs, its groups of heads, and a program's (heads, rows, pairs).

    ``heads``: of each tensor that the launch rotates.
    """
    half_tile = triton.next_power_of_2(dim) // 2  # The pairs.
    row_tile = min(max(1, TILE_ELEMENTS // (2 * half_tile)), triton.next_power_of_2(num_rows))
    num_tiles = batches * triton.cdiv(num_rows, row_tile)
    group_size = MAX_HEADS_OF_PROGRAM
    # The interpreter, which runs one program after another, is best off with few.
    if device.type == "cuda":
        min_programs = MIN_PROGRAMS_OF_MULTIPROCESSOR * operators.num_multiprocessors(device)
        while group_size > 1 and num_tiles * sum(triton.cdiv(number, group_size) for number in heads) < min_programs:
            group_size //= 2
    num_groups = triton.cdiv(max(heads), group_size)
    return num_tiles * num_groups, num_groups, (group_size, row_tile, half_tile)


def _rotate(x: Tensor, y: Tensor, positions: Tensor | None, theta: float, inverse: bool) -> None:
    """Write x (..., S, D), rotated, to y of the same shape and any strides; ``positions`` broadcast to (..., S)."""
    if x.numel() == 0:
        return
    *leading, num_rows, dim = x.shape
    batches, heads = math.prod(leading[:-1]), leading[-1] if leading else 1
    shape = batches, heads, num_rows, dim
    x, y = x.reshape(shape), y.view(shape)
    implied = positions is None
    if positions is None:
        positions = torch.empty(0, dtype=torch.int64, device=x.device)  # Not read where they are implied.
        positions_strides: tuple[int, ...] = (0, 0, 0)
    else:
        positions = positions.expand(*leading, num_rows).reshape(shape[:-1])
        positions_strides = positions.stride()
    shared = positions_strides[1] == 0 or heads == 1  # The stride of heads: 0 if all have the same positions.
    num_programs, _, tile = _tiling(batches, [heads], num_rows, dim, x.device)
    config = RotationConfig(*tile, implied_positions=implied, shared_positions=shared)
    frequencies, strides = _frequencies(dim, theta, inverse, x.device), (x.stride(), y.stride(), positions_strides)
    with torch.cuda.device_of(x):
        rope_kernel[(num_programs,)](
            x, y, positions, frequencies, *strides, heads, num_rows, dim // 2, CONFIG=config, num_warps=NUM_WARPS
        )


def _rotate_qkv(qkv: Tensor, parts: Sequence[Tensor], positions: Tensor | None, theta: float, backward: bool) -> None:
    """Rotate qkv (..., S, all heads x D) into ``parts``: query, key, value (..., H, S, D); backward, parts into qkv.

    ``positions`` broadcast to (..., S). Reshaping may copy inputs, but no results, which are dense.
    """
    if qkv.numel() == 0:
        return
    *leading, num_rows, _ = qkv.shape
    batches, dim = math.prod(leading), parts[0].shape[-1]
    heads = [part.shape[-3] for part in parts]
    qkv = qkv.reshape(batches, num_rows, -1, dim)
    flat = [part.reshape(batches, -1, num_rows, dim) for part in parts]
    implied = positions is None
    if positions is None:
        positions = torch.empty((0, 0), dtype=torch.int64, device=qkv.device)  # Not read where they are implied.
    else:
        positions = positions.expand(*leading, num_rows).reshape(batches, num_rows)
    num_programs, num_groups, tile = _tiling(batches, heads, num_rows, dim, qkv.device)
    config = RotationConfig(*tile, implied_positions=implied, shared_positions=True)
    batch_stride, row_stride, head_stride, column_stride = qkv.stride()
    tensors = qkv, *flat, positions, _frequencies(dim, theta, backward, qkv.device)
    part_strides = [part.stride() for part in flat]
    strides = (batch_stride, head_stride, row_stride, column_stride), *part_strides, positions.stride()
    sizes = *heads[:2], num_groups, num_rows, dim // 2
    with torch.cuda.device_of(qkv):
        rope_qkv_kernel[(num_programs, len(parts))](
            *tensors, *strides, *sizes, BACKWARD=backward, CONFIG=config, num_warps=NUM_WARPS
        )


def _check_angles(positions: Tensor | None, theta: float, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse a theta that is no base of angles, and positions that do not broadcast to rows of shape (..., S)."""
    if not 0 < theta < math.inf:
        raise ValueError(f"theta {theta}: must be a positive number")
    if positions is None:
        return
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions must be of dtype torch.int32 or torch.int64, not {positions.dtype}")
    if positions.device != device:
        raise ValueError(f"positions must be on the rotated tensor's device, {device}, not on {positions.device}")
    fits = 1 <= positions.dim() <= len(shape) and all(
        size in (1, expected) for size, expected in zip(reversed(positions.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"positions of shape {tuple(positions.shape)} do not broadcast to {tuple(shape)}")


def empty_rotated(
    x: Tensor, positions: Tensor | None, theta: float, inverse: bool, strides: Sequence[int] | None, dtype: torch.dtype
) -> Tensor:
    """Check arguments, and allocate the rotated x."""
    if x.dim() < 2 or x.shape[-1] % 2 or x.shape[-1] == 0:
        raise ValueError(f"rope rotates pairs of x (..., S, D) with D even, got x of shape {tuple(x.shape)}")
    _check_angles(positions, theta, x.shape[:-1], x.device)
    if strides is None:
        # With more dimensions the kernel could not address every order of them.
        return torch.empty_like(x, dtype=dtype) if x.dim() <= 4 else torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device)


def compute_rotated(
    x: Tensor, positions: Tensor | None, theta: float, inverse: bool, strides: Sequence[int] | None, dtype: torch.dtype
) -> Tensor:
    """Return x rotated, or with ``inverse`` rotated back, with these strides, or those of x where it is dense."""
    y = empty_rotated(x, positions, theta, inverse, strides, dtype)
    operators.check_tensors("rope", rope_kernel, x=x)
    _rotate(x, y, positions, theta, inverse)
    return y


def empty_qkv(
    qkv: Tensor, positions: Tensor | None, num_heads: int, num_key_value_heads: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Check arguments, and allocate query, key and value (..., H, S, D) in memory (..., S, H, D)."""
    if num_heads < 1 or num_key_value_heads < 1:
        raise ValueError(f"num_heads {num_heads}, num_key_value_heads {num_key_value_heads}: must be at least 1")
    head_dim, remainder = divmod(qkv.shape[-1] if qkv.dim() > 1 else 0, num_heads + 2 * num_key_value_heads)
    if remainder or head_dim % 2 or head_dim == 0:
        raise ValueError(
            f"qkv (..., S, ({num_heads} + 2 * {num_key_value_heads}) D) needs an even D, got {tuple(qkv.shape)}"
        )
    _check_angles(positions, theta, qkv.shape[:-1], qkv.device)
    query, key, value = (
        torch.empty((*qkv.shape[:-1], heads, head_dim), dtype=dtype, device=qkv.device).transpose(-3, -2)
        for heads in (num_heads, num_key_value_heads, num_key_value_heads)
    )
    return query, key, value


def compute_qkv(
    qkv: Tensor, positions: Tensor | None, num_heads: int, num_key_value_heads: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query and key, rotated, and value."""
    results = empty_qkv(qkv, positions, num_heads, num_key_value_heads, theta, dtype)
    operators.check_tensors("rope_qkv", rope_qkv_kernel, qkv=qkv)
    _rotate_qkv(qkv, results, positions, theta, backward=False)
    return results


def empty_grad_qkv(
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, positions: Tensor | None, theta: float, dtype: torch.dtype
) -> Tensor:
    *leading, num_heads, length, head_dim = grad_query.shape
    width = (num_heads + 2 * grad_key.shape[-3]) * head_dim
    return torch.empty((*leading, length, width), dtype=dtype, device=grad_query.device)


def compute_grad_qkv(
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, positions: Tensor | None, theta: float, dtype: torch.dtype
) -> Tensor:
    grad_qkv = empty_grad_qkv(grad_query, grad_key, grad_value, positions, theta, dtype)
    _rotate_qkv(grad_qkv, (grad_query, grad_key, grad_value), positions, theta, backward=True)
    return grad_qkv


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, positions, ctx.theta, ctx.inverse, *_ = inputs
    ctx.dtype, ctx.strides = x.dtype, output.stride()  # The strides of x, but without gaps.
    ctx.save_for_backward(positions)


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    (positions,) = ctx.saved_tensors
    # The transposed rotation is the rotation back. In the layout of x a projection's gradient is contiguous.
    grad_x = _rotate_once(grad, positions, ctx.theta, not ctx.inverse, ctx.strides, ctx.dtype)
    return grad_x, None, None, None, None, None  # None: of all behind x.


_rotate_once = operators.define_call(
    "rope(Tensor x, Tensor? positions, float theta, bool inverse, SymInt[]? strides, ScalarType dtype) -> Tensor",
    compute_rotated, fake=empty_rotated,
    name="Rope", differentiate=_differentiate, save=_save_for_backward, twice=True,
)  # fmt: skip


def rope(x: Tensor, positions: Tensor | None = None, *, theta: float = 10_000.0) -> Tensor:
    """Rotate the pair ``(x[2i], x[2i + 1])`` at position p by the angle ``p theta^(-2i / D)``.

    RoFormer (https://arxiv.org/abs/2104.09864), eq. 34, with neighbours as pairs. Angles are exact to float32 at any
    position, arithmetic is in float32, and nothing but the positions is kept for the backward pass. A projection
    (B, S, H D) is rotated as it lies, ``projection.unflatten(-1, (H, D)).transpose(1, 2)``: the result has the same
    layout, in which attention reads it, and so has the gradient. ``torch.compile`` keeps it in one graph. Under
    ``torch.autocast`` the result has its dtype.

    Args:
        x: (..., S, D), D even, float32, float16 or bfloat16, of any strides.
        positions: int32 or int64, broadcasts to (..., S); None stands for 0 to S - 1.
        theta: base of the angles.

    Returns:
        Of the shape and dtype of ``x``; of its strides where it is dense, and else of the same order of dimensions.

    Raises:
        ValueError: D is odd, or shapes or devices do not fit together.
        TypeError, CapabilityError: as in :func:`~cs336sys.kernels.rms_norm.rms_norm`.
    """
    inverse, strides_of_result = False, None
    return _rotate_once(x, positions, theta, inverse, strides_of_result, operators.result_dtype(x))


_grad_qkv = operators.define_call(
    "rope_qkv_backward(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor? positions, float theta,"
    " ScalarType dtype) -> Tensor",
    compute_grad_qkv,
    fake=empty_grad_qkv,
)


def _save_qkv_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    qkv, positions, _, _, ctx.theta, _ = inputs
    ctx.dtype = qkv.dtype
    ctx.save_for_backward(positions)


def _differentiate_qkv(ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> tuple:
    (positions,) = ctx.saved_tensors
    grad_qkv = _grad_qkv(grad_query, grad_key, grad_value, positions, ctx.theta, ctx.dtype)
    return grad_qkv, None, None, None, None, None  # None: of all behind qkv.


_split_qkv = operators.define_call(
    "rope_qkv(Tensor qkv, Tensor? positions, int num_heads, int num_key_value_heads, float theta, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    compute_qkv, fake=empty_qkv, name="RopeQKV", differentiate=_differentiate_qkv, save=_save_qkv_for_backward,
)  # fmt: skip


def rope_qkv(
    qkv: Tensor,
    num_heads: int,
    num_key_value_heads: int | None = None,
    positions: Tensor | None = None,
    *,
    theta: float = 10_000.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection into query and key, rotated by :func:`rope`, and value, each in memory of its own.

    The backward pass writes the projection's whole gradient at once, which autograd would add up from three slices.
    Differentiable once.

    Args:
        qkv: (..., S, (H + 2 H_kv) D): the heads of the query, then those of key and value, D even; any strides.
        num_heads: H.
        num_key_value_heads: H_kv; None stands for H.
        positions, theta: as in :func:`rope`.

    Returns:
        (..., H, S, D), (..., H_kv, S, D) and (..., H_kv, S, D), in memory (..., S, H, D) as attention reads them.

    Raises:
        ValueError: D is odd, the heads do not divide the projection, or shapes or devices do not fit together.
        TypeError, CapabilityError, RuntimeError: as in :func:`~cs336sys.kernels.rms_norm.rms_norm`.
    """
    if num_key_value_heads is None:
        num_key_value_heads = num_heads
    return _split_qkv(qkv, positions, num_heads, num_key_value_heads, theta, operators.result_dtype(qkv))


def reference_rope(x: Tensor, positions: Tensor | None = None, *, theta: float = 10_000.0) -> Tensor:
    """Compute :func:`rope` in PyTorch, with angles in float64: the ground truth of the tests."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    frequencies = theta ** -(torch.arange(0, x.shape[-1], 2, device=x.device, dtype=torch.float64) / x.shape[-1])
    angles = positions[..., None].double() * frequencies
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    x1, x2 = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2).to(x.dtype)
