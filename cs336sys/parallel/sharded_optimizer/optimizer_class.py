"""Which optimizer classes can be sharded: by whole parameters, and by slices."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError

_STEPS = 3


def require_optimizer(optimizer_cls: Any) -> None:
    """Refuse a class that cannot update some of the parameters without the others.

    Raises:
        UsageError: it is not an optimizer class, or it is LBFGS, which takes inner products over all gradients.
    """
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
        raise UsageError(f"optimizer_cls {optimizer_cls}: must be a subclass of torch.optim.Optimizer")
    if issubclass(optimizer_cls, torch.optim.LBFGS):
        raise UsageError(
            f"{optimizer_cls.__name__} cannot be sharded: choose a class that updates each parameter by itself"
        )


def require_no_clipping(options: Mapping[str, Any]) -> None:
    """Refuse options by which a class clips by the norm of all gradients.

    Raises:
        UsageError: ``max_grad_norm`` is given.
    """
    if options.get("max_grad_norm") is not None:
        raise UsageError(
            f"max_grad_norm {options['max_grad_norm']} would clip by the norm of what this rank updates: leave it out, "
            "and call clip_grad_norm_() of the sharded optimizer before step()"
        )


def require_elementwise(
    optimizer_cls: type[torch.optim.Optimizer],
    options: dict[str, Any],
    device: torch.device,
    of_group: Mapping[str, Any] | None = None,
) -> None:
    """Step a small matrix as a whole and in two slices, and compare the results and the optimizers' states.

    Optimizers that use the norm of a parameter (LAMB), row and column means (Adafactor) or matrix products (Muon)
    differ or fail; so does one that draws random numbers.

    Args:
        options: what the class is constructed with, parameters aside.
        device: where the parameters are; some options work on some devices only.
        of_group: options of a group of parameters, which may make of the class another.

    Raises:
        UsageError: the class does not update each element by itself, or cannot step a slice.
    """
    refusal = f"flat=True cannot shard {optimizer_cls.__name__}"
    tensors = torch.randn(1 + _STEPS, 16, 8, generator=torch.Generator().manual_seed(0)).to(device)
    vectors = tensors.flatten(1)
    # What the class raises about its options is passed on unchanged.
    of_group = of_group or {}
    optimizer_cls([{**of_group, "params": [nn.Parameter(tensors[0])]}], **options)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            whole, first, second = (
                _stepped(optimizer_cls, options, of_group, values)
                for values in (tensors, vectors[:, :40], vectors[:, 40:])
            )
        except Exception as error:
            raise UsageError(f"{refusal}, which cannot step a slice ({error}): choose flat=False") from error
    for key, value in whole.items():
        if not _agree(value, first.get(key), second.get(key)):
            raise UsageError(f"{refusal}, whose {key} is not computed element by element: choose flat=False")


class CheckedOptions:
    """Refuses options of groups with which a class cannot be sharded, once for each kind of options.

    Numbers are of one kind, except that zero is of another, so that schedules of learning rates need no check anew.

    Args:
        optimizer_cls, options: the class, and what it is constructed with.
        flat: as for :class:`~cs336sys.parallel.sharded_optimizer.optimizer.ShardedOptimizer`.
        device: where the parameters are.
    """

    def __init__(
        self, optimizer_cls: type[torch.optim.Optimizer], options: dict[str, Any], *, flat: bool, device: torch.device
    ):
        self._optimizer_cls, self._options, self._flat, self._device = optimizer_cls, options, flat, device
        self._known: set[Hashable] = set()

    def require(self, of_group: Mapping[str, Any]) -> None:
        """Refuse options of one group.

        Raises:
            UsageError: with them, the class does not update each parameter or, with ``flat``, each element by itself.
        """
        kind = tuple((key, _kind(value)) for key, value in sorted(of_group.items()))
        if kind in self._known:
            return
        require_no_clipping({**self._options, **of_group})
        if self._flat:
            require_elementwise(self._optimizer_cls, self._options, self._device, of_group)
        self._known.add(kind)


def _kind(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, (str, bool)):
        return value
    return type(value), isinstance(value, Tensor) or bool(value)


def _stepped(
    optimizer_cls: type[torch.optim.Optimizer], options: dict[str, Any], of_group: Mapping[str, Any], values: Tensor
) -> dict[str, Any]:
    """The update, and the state, of a parameter that starts as ``values[0]`` and gets the others as gradients."""
    parameter = nn.Parameter(values[0].clone())
    optimizer = optimizer_cls([{**of_group, "params": [parameter]}], **options)
    for gradient in values[1:]:
        parameter.grad = gradient.clone()
        optimizer.step()
    return {"update": parameter.detach() - values[0], **optimizer.state[parameter]}


def _agree(whole: Any, first: Any, second: Any) -> bool:
    if not isinstance(whole, Tensor) or whole.numel() == 1:
        return True
    if not isinstance(first, Tensor) or first.numel() + second.numel() != whole.numel():
        return False
    # Elements in a vector register and those left over may be rounded differently; real differences are far larger.
    return torch.allclose(torch.cat([first, second]), whole.flatten(), rtol=1e-3, atol=1e-7, equal_nan=True)
