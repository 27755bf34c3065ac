"""Parts that fused kernels share: checks of tensors, dtypes of results, operators for torch.compile, partial sums."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses import FakeTensor

from cs336sys.errors import CapabilityError
from cs336sys.kernels.autograd import once_differentiable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# torch.library.custom_op would do the same and take 7.5 us a call in place of 2.1.
_library = torch.library.Library("cs336sys", "FRAGMENT")


def define_operator(schema: str, function: Callable, fake: Callable) -> Callable:
    """Make ``torch.ops.cs336sys.NAME`` of ``NAME(Tensor x, ...) -> Tensor``, on any device and without autograd.

    Args:
        function: computes it. Its results must not share memory with its arguments or with each other.
        fake: takes the same arguments and returns empty tensors of the same shapes, dtypes and strides.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cs336sys::{name}", fake, lib=_library)
    return getattr(torch.ops.cs336sys, name).default


def define_gradient(name: str, differentiate: Callable, save: Callable) -> None:
    """Give an operator its gradient: ``save(ctx, inputs, output)`` and ``differentiate(ctx, *grad_outputs)``.

    Derivatives in forward mode are refused, where ``torch.library.register_autograd`` would lose tangents in silence.
    """
    operator = getattr(torch.ops.cs336sys, name).default

    def below_autograd(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    _library.impl(name, define_function(name, below_autograd, differentiate, save, twice=True).apply, "Autograd")


def define_call(
    schema: str, function: Callable, fake: Callable, *, name: str = "", differentiate: Callable | None = None,
    save: Callable | None = None, twice: bool = False,
) -> Callable:  # fmt: skip
    """Define an operator, and return what calls it where :func:`needs_operators` of the first argument, a tensor.

    Other calls go to the function or, with a gradient, to an autograd function of this name. Arguments are those of
    :func:`define_operator` and :func:`define_function`.
    """
    operator = define_operator(schema, function, fake)
    if differentiate is not None and save is not None:
        define_gradient(schema.partition("(")[0], differentiate, save)
        function = define_function(name, function, differentiate, save, twice=twice).apply
    return lambda *arguments: (operator if needs_operators(arguments[0]) else function)(*arguments)


def define_function(name: str, compute: Callable, differentiate: Callable, save: Callable, *, twice: bool) -> Any:
    """Return the ``torch.autograd.Function`` that computes as an operator does, for calls that need no operator.

    Args:
        compute: the operator's function; ``differentiate`` and ``save`` are those of :func:`define_gradient`.
        twice: whether ``differentiate`` can be differentiated itself.
    """

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = compute(*arguments)
        save(ctx, arguments, output)
        return output

    backward = differentiate if twice else once_differentiable(differentiate)
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def needs_operators(tensor: Tensor) -> bool:
    """Return whether something but the plain call wants to see the kernels: a compiler, dispatch mode or subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    )


def check_tensors(function: str, kernel: object, **tensors: Tensor) -> None:
    """Refuse, in one sentence, tensors from which ``kernel`` cannot compute ``function``; they are given by name."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            choices = ", ".join(map(str, DTYPES))
            raise TypeError(f"{name} of dtype {tensor.dtype} is not supported: {function} takes {choices}")
    devices = [tensor.device for tensor in tensors.values()]
    if any(device != devices[0] for device in devices):
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{function} takes tensors on one device, got {places}")
    is_interpreted = not isinstance(kernel, triton.JITFunction)
    if devices[0].type == "cuda" or (is_interpreted and devices[0].type == "cpu"):
        return
    # Fake tensors, on any device, launch nothing.
    if not any(isinstance(tensor, FakeTensor) for tensor in tensors.values()):
        raise CapabilityError(
            f"{function} runs on CUDA tensors, got {devices[0]}: set TRITON_INTERPRET=1 before the first import to run "
            "it on the CPU in Triton's interpreter"
        )


def result_dtype(*tensors: Tensor) -> torch.dtype:
    """Return autocast's dtype where it is on, as later products would cast to it; else what the tensors promote to."""
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def as_rows(tensor: Tensor) -> Tensor:
    """View (..., D) as (rows, D), or copy it where the leading dimensions are no single stride apart."""
    # Not -1, which torch cannot infer where rows have no elements.
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Count a GPU's multiprocessors; 3 for the interpreter's CPU, few enough that programs of small tests loop."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


# A program adds up 8 columns, the 32 bytes of a sector, and so many rows at once that few loads wait for each other:
# 1024 where there are more than 256. 528 x 768 took 2.3 us on an H200; by 32 columns of 128 rows 3.8.
SMALL_ROW_TILE, LARGE_ROW_TILE = 256, 1024
COLUMN_TILE = 8
NUM_WARPS = 8


@triton.jit
def _partial_sums_kernel(partials_ptr, sum_ptr, num_partials, width, ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr):
    column = tl.program_id(0) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)[None, :]
    total = tl.zeros((ROW_TILE, COLUMN_TILE), dtype=tl.float32)
    for start in range(0, num_partials, ROW_TILE):
        row = (start + tl.arange(0, ROW_TILE)).to(tl.int64)[:, None]
        mask = (row < num_partials) & (column < width)
        total += tl.load(partials_ptr + row * width + column, mask=mask, other=0.0)
    tl.store(sum_ptr + column, tl.sum(total, axis=0, keep_dims=True), mask=column < width)


def sum_of_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the first dimension: (P, D) in float32, contiguous -> (D,), added in float32 and rounded to ``dtype``.

    For what each program of a kernel has summed: without atomics, so that the order is always the same. ``torch.sum``
    takes 10 us on an H200 for 132 x 4096 and 27 for 660 x 768, which with few rows is most of a backward pass.
    """
    num_partials, width = partials.shape
    row_tile = LARGE_ROW_TILE if num_partials > SMALL_ROW_TILE else SMALL_ROW_TILE
    total = torch.empty(width, dtype=dtype, device=partials.device)
    with torch.cuda.device_of(partials):
        _partial_sums_kernel[(triton.cdiv(width, COLUMN_TILE),)](
            partials, total, num_partials, width, ROW_TILE=row_tile, COLUMN_TILE=COLUMN_TILE, num_warps=NUM_WARPS
        )
    return total
