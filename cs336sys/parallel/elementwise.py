"""Find out whether an optimizer updates each element by itself, as it must where a rank has slices of parameters."""

import inspect
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError

Options = Mapping[str, Any]
OptimizerClass = type[torch.optim.Optimizer]

_STEPS = 3

# How a matrix is cut into two slices: its rows as FSDP does, or columns as TensorParallel does, or its elements in
# memory order as ShardedOptimizer does. For each: the shape to cut, its dimension, and the size of the first slice.
_MATRIX = (16, 8)
_CUTS = {"rows": (_MATRIX, 0, 5), "columns": (_MATRIX, 1, 3), "elements": ((128,), 0, 40)}


def require_elementwise(
    optimizer_cls: OptimizerClass,
    options: Options,
    device: torch.device,
    group_options: Options,
    cut: str = "elements",
    refusal: str = "flat=True cannot shard",
    remedy: str = "choose flat=False",
) -> frozenset[str]:
    """Step a small matrix as a whole and in two slices, and compare the results and the optimizers' states.

    Optimizers that use the norm of a parameter (LAMB), row and column means (Adafactor) or matrix products (Muon)
    differ or fail; so does one that draws random numbers (those of the program are not used up).

    Args:
        options: what the class is constructed with, parameters aside.
        device: where the parameters are; some options work on some devices only.
        group_options: options of a group of parameters, by which the class may update otherwise.
        cut: rows, columns or elements.
        refusal: how the error begins.
        remedy: how it ends.

    Returns:
        the keys of the state that have one value for the whole matrix, as "step" has.
    """
    refusal = f"{refusal} {optimizer_cls.__name__}"
    # The matrix, and its gradient in each step.
    tensors = torch.randn(1 + _STEPS, *_MATRIX, generator=torch.Generator().manual_seed(0)).to(device)
    shape, dim, first_size = _CUTS[cut]
    # Dimension 0 counts the tensors.
    slices = [part.contiguous() for part in tensors.view(-1, *shape).tensor_split([first_size], 1 + dim)]
    # Outside of the "try" below: what the class raises about its options is passed on unchanged.
    optimizer_cls([{**group_options, "params": [nn.Parameter(tensors[0])]}], **options)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            whole, *parts = (_run_steps(optimizer_cls, options, group_options, values) for values in (tensors, *slices))
        except Exception as error:
            raise UsageError(f"{refusal}, which cannot step a slice ({error}): {remedy}") from error
    for key, value in whole.items():
        if not _is_same_in_slices(value, [part.get(key) for part in parts], dim):
            raise UsageError(f"{refusal}, whose {key} is not computed element by element: {remedy}")
    return frozenset(key for key, value in whole.items() if isinstance(value, Tensor) and value.numel() == 1)


# For each class of optimizers, the devices and kinds of options with which it was accepted.
_accepted: "weakref.WeakKeyDictionary[type, set[Hashable]]" = weakref.WeakKeyDictionary()


def require_elementwise_step(optimizer: torch.optim.Optimizer, group_options: Options, device: torch.device) -> None:
    """Refuse to step slices by an optimizer of the user's that does not update each element by itself.

    Its class is tried once for each kind of options, unless it has the attribute ``updates_elementwise = True``: some
    classes need more than their options to be constructed.

    Args:
        group_options: all options of one of its groups.
        device: where the parameters are.
    """
    optimizer_cls = type(optimizer)
    kind = device, options_kind(group_options)
    if getattr(optimizer_cls, "updates_elementwise", False) or kind in _accepted.setdefault(optimizer_cls, set()):
        return
    # Groups have entries that the constructor does not take, for example a scheduler's initial_lr.
    arguments = inspect.signature(optimizer_cls).parameters
    options = {key: value for key, value in {**optimizer.defaults, **group_options}.items() if key in arguments}
    refusal = "slices of FSDP or TensorParallel cannot be updated by"
    remedy = "choose a class that updates each element by itself, as AdamW and SGD do"
    for cut in ("rows", "columns"):  # FSDP cuts into rows, TensorParallel into rows or columns.
        try:
            require_elementwise(optimizer_cls, options, device, group_options, cut, refusal, remedy)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{refusal} {optimizer_cls.__name__}, which cannot be tried on a small matrix "
                f"({type(error).__name__}: {error}): set updates_elementwise = True in the class if it updates each "
                "element by itself"
            ) from error
    _accepted[optimizer_cls].add(kind)


def options_kind(value: Any) -> Hashable:
    """Return a key that is equal for options with which a class computes alike.

    All numbers but zero are alike, so that a schedule of learning rates does not need a new trial in each step.
    """
    if isinstance(value, Mapping):
        return tuple((key, options_kind(option)) for key, option in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(options_kind, value))
    if isinstance(value, (str, bool)):
        return value
    # A tensor is not asked whether it is zero: the CPU would wait for a GPU's answer.
    return type(value), isinstance(value, Tensor) or bool(value)


def _run_steps(
    optimizer_cls: OptimizerClass, options: Options, group_options: Options, values: Tensor
) -> dict[str, Any]:
    """Return the update and the state of a parameter that starts as ``values[0]`` and gets the others as gradients."""
    parameter = nn.Parameter(values[0].clone())
    optimizer = optimizer_cls([{**group_options, "params": [parameter]}], **options)
    for gradient in values[1:]:
        parameter.grad = gradient.clone()
        optimizer.step()
    return {"update": parameter.detach() - values[0], **optimizer.state[parameter]}


def _is_same_in_slices(whole: Any, parts: list[Any], dim: int) -> bool:
    """Return whether a value of the whole matrix, such as its update, is that of its slices joined along ``dim``."""
    # A single value, as "step", is not cut. If it depends on other elements, so does the update, which is compared.
    if not isinstance(whole, Tensor) or whole.numel() == 1:
        return True
    if not all(isinstance(part, Tensor) for part in parts) or sum(part.numel() for part in parts) != whole.numel():
        return False
    # Elements in a vector register and those left over may be rounded differently; real differences are far larger.
    return torch.allclose(torch.cat(parts, dim).view(whole.shape), whole, rtol=1e-3, atol=1e-7, equal_nan=True)
