"""SwiGLU's product silu(gate) * up, which keeps its two inputs alone, and its down projection, which recomputes it."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336sys.kernels import operators
from cs336sys.kernels.autograd import once_differentiable
from cs336sys.kernels.linear import weight_gradient

TILE_ELEMENTS = 1024
NUM_WARPS = 4


@triton.jit
def _tile_of_program(num_rows, num_columns, ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr):
    """Return row and column indices, int64, of the tile that this program takes, and which of them exist."""
    num_column_tiles = tl.cdiv(num_columns, COLUMN_TILE)
    tile = tl.program_id(0).to(tl.int64)
    row = ((tile // num_column_tiles) * ROW_TILE + tl.arange(0, ROW_TILE))[:, None]
    column = ((tile % num_column_tiles) * COLUMN_TILE + tl.arange(0, COLUMN_TILE))[None, :]
    return row, column, (row < num_rows) & (column < num_columns)


@triton.jit
def _swiglu_forward_kernel(
    gate_ptr, up_ptr, product_ptr, gate_strides, up_strides, num_rows, num_columns,
    ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr,
):  # fmt: skip
    row, column, mask = _tile_of_program(num_rows, num_columns, ROW_TILE, COLUMN_TILE)
    gate = tl.load(gate_ptr + row * gate_strides[0] + column * gate_strides[1], mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_strides[0] + column * up_strides[1], mask=mask).to(tl.float32)
    tl.store(product_ptr + row * num_columns + column, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def _swiglu_backward_kernel(
    gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, product_ptr, gate_strides, up_strides, grad_strides,
    grad_inputs_row_stride, num_rows, num_columns,
    RECOMPUTES: tl.constexpr, ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr,
):  # fmt: skip
    """Compute both gradients in one pass and, if RECOMPUTES, the product once more."""
    row, column, mask = _tile_of_program(num_rows, num_columns, ROW_TILE, COLUMN_TILE)
    gate = tl.load(gate_ptr + row * gate_strides[0] + column * gate_strides[1], mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_strides[0] + column * up_strides[1], mask=mask).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_strides[0] + column * grad_strides[1], mask=mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    offset = row * grad_inputs_row_stride + column
    # silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x)))
    tl.store(grad_gate_ptr + offset, grad * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=mask)
    tl.store(grad_up_ptr + offset, grad * silu, mask=mask)
    if RECOMPUTES:
        tl.store(product_ptr + row * num_columns + column, silu * up, mask=mask)


def _as_matrices(*tensors: Tensor) -> tuple[Tensor, ...]:
    """View equally shaped tensors as rows and columns: as one row where all are contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return tuple(tensor.view(1, -1) for tensor in tensors)
    return tuple(operators.as_rows(tensor) for tensor in tensors)


def _swiglu_tiling(matrix: Tensor) -> tuple[int, dict[str, int]]:
    """Return the number of programs and the constants of a launch over a matrix."""
    num_rows, num_columns = matrix.shape
    column_tile = min(triton.next_power_of_2(num_columns), TILE_ELEMENTS)
    row_tile = TILE_ELEMENTS // column_tile if num_rows > 1 else 1
    num_programs = triton.cdiv(num_rows, row_tile) * triton.cdiv(num_columns, column_tile)
    return num_programs, {"ROW_TILE": row_tile, "COLUMN_TILE": column_tile, "num_warps": NUM_WARPS}


def _empty_product(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """Check shapes, and allocate the product in ``dtype``."""
    if gate.dim() == 0 or gate.shape != up.shape:
        raise ValueError(
            f"gate and up must have the same shape (..., d), got {tuple(gate.shape)} and {tuple(up.shape)}"
        )
    return torch.empty(gate.shape, dtype=dtype, device=gate.device)


def _forward(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    product = _empty_product(gate, up, dtype)
    operators.check_tensors("swiglu", _swiglu_forward_kernel, gate=gate, up=up)
    if product.numel() == 0:
        return product
    gate, up = _as_matrices(gate, up)
    num_programs, constants = _swiglu_tiling(gate)
    with torch.cuda.device_of(gate):
        _swiglu_forward_kernel[(num_programs,)](gate, up, product, gate.stride(), up.stride(), *gate.shape, **constants)
    return product


def _empty_grads(gate: Tensor, up: Tensor, grad: Tensor, recomputes: bool) -> tuple[Tensor, Tensor, Tensor]:
    grad_gate, grad_up = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (gate, up))
    # An operator returns tensors: one without elements stands for no product.
    return grad_gate, grad_up, torch.empty(gate.shape if recomputes else 0, dtype=grad.dtype, device=gate.device)


def _backward(gate: Tensor, up: Tensor, grad: Tensor, recomputes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, and the product in the dtype of ``grad``, empty unless recomputed."""
    grad_gate, grad_up, product = _empty_grads(gate, up, grad, recomputes)
    gate, up, grad = _as_matrices(gate, up, grad)
    _launch_backward((gate, up, grad), (grad_gate, grad_up, product), grad_row_stride=gate.shape[1])
    return grad_gate, grad_up, product


def _launch_backward(inputs: Sequence[Tensor], results: Sequence[Tensor], grad_row_stride: int) -> None:
    """Launch the backward kernel.

    Args:
        inputs: matrices gate, up, and the product's gradient.
        results: gradients of gate and up, and the product, which is written if it has elements.
        grad_row_stride: elements from one row of either gradient to the next.
    """
    (gate, _, _), (_, _, product) = inputs, results
    if gate.numel() == 0:
        return
    num_programs, constants = _swiglu_tiling(gate)
    numbers = *(tensor.stride() for tensor in inputs), grad_row_stride, *gate.shape
    with torch.cuda.device_of(gate):
        _swiglu_backward_kernel[(num_programs,)](
            *inputs, *results, *numbers, RECOMPUTES=product.numel() > 0, **constants
        )


def _empty_grad_of_pair(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate_up, product = (torch.empty_like(like, memory_format=torch.contiguous_format) for like in (gate_up, grad))
    return grad_gate_up, product


def _backward_of_pair(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``gate_up`` (..., gate, then up), as a whole, and the product in the dtype of ``grad``."""
    grad_gate_up, product = _empty_grad_of_pair(gate_up, grad)
    rows = operators.as_rows(gate_up)
    gate, up = rows.chunk(2, -1)
    grad_gate, grad_up = operators.as_rows(grad_gate_up).chunk(2, -1)
    _launch_backward((gate, up, operators.as_rows(grad)), (grad_gate, grad_up, product), grad_row_stride=rows.shape[1])
    return grad_gate_up, product


_grads = operators.define_call(
    "swiglu_backward(Tensor gate, Tensor up, Tensor grad, bool recomputes) -> (Tensor, Tensor, Tensor)",
    _backward,
    fake=_empty_grads,
)
_grad_of_pair = operators.define_call(
    "swiglu_pair_backward(Tensor gate_up, Tensor grad) -> (Tensor, Tensor)", _backward_of_pair, fake=_empty_grad_of_pair
)


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    gate, up, _ = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    gate, up = ctx.saved_tensors
    recomputes = False
    grad_gate, grad_up, _ = _grads(gate, up, grad, recomputes)
    return grad_gate, grad_up, None


_product = operators.define_call(
    "swiglu_forward(Tensor gate, Tensor up, ScalarType dtype) -> Tensor", _forward, fake=_empty_product,
    name="SwiGLU", differentiate=_differentiate, save=_save_for_backward,
)  # fmt: skip


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` (https://arxiv.org/abs/2002.05202, eq. 6), with silu(x) = x sigmoid(x).

    Keeps its two inputs for the backward pass, which computes both gradients at once; arithmetic is in float32.
    Differentiable once. ``torch.compile`` keeps it in one graph. Under ``torch.autocast`` the result has its dtype.

    Args:
        gate: (..., d), float32, float16 or bfloat16, of any strides, for example one half of a fused projection.
        up: (..., d), of any of these dtypes.

    Returns:
        (..., d), contiguous, of the dtype to which the two promote.

    Raises:
        ValueError, TypeError, CapabilityError, RuntimeError: as in :func:`~cs336sys.kernels.rms_norm.rms_norm`.
    """
    return _product(gate, up, operators.result_dtype(gate, up))


class SwiGLULinearOfCopy(torch.autograd.Function):
    """``SwiGLULinearOfCopy.apply(gate_up, copy, gradient_dtype, weight)``; see :func:`swiglu_linear_of_copy`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, copy: Tensor, gradient_dtype: torch.dtype, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, copy)
        ctx.gradient_dtype = gradient_dtype
        gate, up = gate_up.chunk(2, -1)
        if copy.dim() != 2 or copy.shape[1:] != gate.shape[-1:]:
            raise ValueError(
                f"gate (..., d) needs a weight of shape (d_out, d), got {tuple(gate.shape)} and {tuple(copy.shape)}"
            )
        return torch.nn.functional.linear(_product(gate, up, copy.dtype), copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        gate_up, copy = ctx.saved_tensors
        grad_gate_up, product = _grad_of_pair(gate_up, grad @ copy)
        return grad_gate_up, None, None, weight_gradient(grad, product, ctx.gradient_dtype)


def swiglu_linear_of_copy(
    gate_up: Tensor, copy: Tensor, weight: Tensor, gradient_dtype: torch.dtype | None = None
) -> Tensor:
    """Return ``swiglu(gate, up) @ copy.T``, the down projection, without keeping the product for the weight's gradient.

    The backward pass computes the product again while it reads gate and up anyway: 2 bytes an element more to write in
    half precision, and as much less to keep.

    Args:
        gate_up: (..., 2 d), of the dtype of ``copy``: gate, then up; its gradient is one tensor.
        copy: (d_out, d), the weight in half precision (:class:`~cs336sys.kernels.linear.WeightCopies`).
        weight: (d_out, d), which gets its gradient and is not read.
        gradient_dtype: of the weight's gradient, as in :func:`~cs336sys.kernels.linear.linear_of_copy`.

    Returns:
        (..., d_out), of the dtype of ``copy``.

    Raises:
        ValueError, TypeError, CapabilityError, RuntimeError: as in :func:`~cs336sys.kernels.rms_norm.rms_norm`.
    """
    # Autocast to another dtype than the copy's would cast the product and the copy once more.
    with torch.autocast(gate_up.device.type, enabled=False):
        return SwiGLULinearOfCopy.apply(gate_up, copy, gradient_dtype or weight.dtype, weight)


def reference_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute :func:`swiglu` in PyTorch, half precision in float32: the ground truth of the tests."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(dtype)
