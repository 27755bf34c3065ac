"""Find gradients that may be changed in place, because their memory is theirs alone."""

import itertools
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError
from cs336sys.machine.late_imports import importing_no_compiler


def owns_memory(gradient: Tensor) -> bool:
    """Return whether nothing but this tensor uses its memory, which a backward pass may then change in place.

    Autograd adopts a gradient without a copy even if it is a view of a tensor that other functions of the backward pass
    have yet to read, or that is another parameter's gradient, too: ``x + weight.unsqueeze(0)``,
    ``first.view(n) + second.view(n)`` (torch/csrc/autograd/functions/accumulate_grad.h looks at the tensor's users, not
    at those of its memory).
    """
    storage = gradient.untyped_storage()
    # Two users: the tensor, and the Python object that stands for its storage here.
    return torch._C._storage_Use_Count(storage._cdata) <= 2 and storage.nbytes() == gradient.nbytes


def in_own_memory(gradient: Tensor) -> Tensor:
    """Return the gradient, or a copy if its memory has other users."""
    return gradient if owns_memory(gradient) else gradient.clone()


def own_memory_together(gradients: Sequence[Tensor]) -> set[int]:
    """Return the ids of gradients whose memory nothing but these gradients uses, each a part of its own.

    Layers computed as one product get the rows of one gradient: none owns the memory, and all may be changed in place.
    """
    gradients_of_storage: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        gradients_of_storage.setdefault(gradient.untyped_storage()._cdata, []).append(gradient)
    owner_ids: set[int] = set()
    for sharing in gradients_of_storage.values():
        storage = sharing[0].untyped_storage()
        sharing.sort(key=Tensor.storage_offset)
        *starts, _ = itertools.accumulate((gradient.numel() for gradient in sharing), initial=0)  # If without gaps.
        is_filled = storage.nbytes() == sum(gradient.nbytes for gradient in sharing) and all(
            gradient.is_contiguous() and gradient.storage_offset() == start
            for gradient, start in zip(sharing, starts, strict=True)
        )
        # The Python object of the storage is one user more, as in owns_memory().
        if is_filled and torch._C._storage_Use_Count(storage._cdata) <= len(sharing) + 1:
            owner_ids.update(map(id, sharing))
    return owner_ids


def graph_refusal(name: str) -> UsageError:
    """Return the error for a gradient computed with ``create_graph=True``, whose graph would lack the average."""
    return UsageError(
        f"{name} got its gradient with create_graph=True, and the average over ranks is in no graph: take gradients "
        "to differentiate again by torch.autograd.grad, and call backward() without it"
    )


# Compiled autograd would trace it instead of running it, and end in an error of torch's compiler. The outer decorator
# keeps the inner one from importing that compiler.
@importing_no_compiler
@torch._disable_dynamo
def require_eager_backward() -> None:
    """Refuse a backward pass that compiled autograd runs, which has no end at which to launch what is left."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        raise UsageError(
            "compiled autograd runs this backward pass, in which gradients cannot be averaged as they become ready: "
            "leave torch._dynamo.config.compiled_autograd off and compile blocks, or choose FlatDDP"
        )


def require_averageable(name: str, gradient: Tensor, dtype: torch.dtype, shape: torch.Size | None = None) -> None:
    """Refuse a gradient that cannot be averaged with other ranks'.

    Args:
        shape: that of the parameter when it was wrapped; None if it cannot have changed.
    """
    if gradient.requires_grad:
        raise graph_refusal(name)
    if gradient.layout != torch.strided:
        raise UsageError(f"{name} has a sparse gradient, which cannot be averaged: choose sparse=False")
    if gradient.dtype != dtype:
        raise UsageError(
            f"{name} has a gradient in {gradient.dtype}, not in {dtype}: convert a module before it is wrapped or its "
            "optimizer is built, and leave grad_dtype as it is"
        )
    if shape is not None and gradient.shape != shape:
        raise UsageError(
            f"{name} was changed from {tuple(shape)} to {tuple(gradient.shape)} after it was wrapped: call refresh() "
            "on every rank"
        )


def gradient_dtype_of(parameter: nn.Parameter) -> torch.dtype | None:
    """Return the dtype that autograd gives the parameter's gradient; None for the dtype it is computed in."""
    # A parameter that is not trained has no grad_dtype.
    return getattr(parameter, "grad_dtype", parameter.dtype) if parameter.requires_grad else parameter.dtype


def require_own_gradient_dtype(
    named_parameters: Iterable[tuple[str, nn.Parameter]], sent_dtype: torch.dtype | None = None
) -> None:
    """Refuse parameters that ask autograd for gradients in another dtype than their own.

    Args:
        sent_dtype: the dtype that gradients are sent in, which they may have from the beginning.
    """
    for name, parameter in named_parameters:
        dtype = gradient_dtype_of(parameter)
        if dtype not in (parameter.dtype, sent_dtype or parameter.dtype):
            raise UsageError(
                f"{name} is in {parameter.dtype} and has grad_dtype {dtype}, in which gradients cannot be averaged: "
                "leave grad_dtype as it is, and choose the dtype to send in by gradient_dtype"
            )
