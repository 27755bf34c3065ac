"""What an optimizer class must be like to be sharded: by parameters, or by slices of them."""

from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError

_STEPS = 3


def require_optimizer(optimizer_cls: Any) -> None:
    """Refuse what cannot be an optimizer of some of the parameters.

    Raises:
        UsageError: it is no optimizer class, or LBFGS, which takes products of all gradients.
    """
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
        raise UsageError(f"optimizer_cls {optimizer_cls}: must be a subclass of torch.optim.Optimizer")
    if issubclass(optimizer_cls, torch.optim.LBFGS):
        raise UsageError(
            f"{optimizer_cls.__name__} cannot be sharded: choose a class that updates each parameter by itself"
        )


def require_elementwise(
    optimizer_cls: type[torch.optim.Optimizer], options: dict[str, Any], device: torch.device
) -> None:
    """Step a small matrix as a whole and in two slices, and compare the parameters and what is kept of them.

    Optimizers with the norm of a parameter (LAMB), with row and column means (Adafactor) or with matrix products (Muon)
    differ or fail; so does one that draws random numbers.

    Args:
        options: what the class is constructed with, besides the parameters.
        device: of the parameters, because some options work on some devices alone.

    Raises:
        UsageError: it is not element by element, or cannot be stepped so.
    """
    refusal = f"flat=True cannot shard {optimizer_cls.__name__}"
    tensors = torch.randn(1 + _STEPS, 16, 8, generator=torch.Generator().manual_seed(0)).to(device)
    vectors = tensors.flatten(1)
    # What it says of its options leaves as it is.
    optimizer_cls([nn.Parameter(tensors[0])], **options)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            whole, first, second = (
                _stepped(optimizer_cls, options, values) for values in (tensors, vectors[:, :40], vectors[:, 40:])
            )
        except Exception as error:
            raise UsageError(f"{refusal}, which cannot step a slice ({error}): choose flat=False") from error
    for key, value in whole.items():
        if not _agree(value, first.get(key), second.get(key)):
            raise UsageError(f"{refusal}, whose {key} is not computed element by element: choose flat=False")


def _stepped(optimizer_cls: type[torch.optim.Optimizer], options: dict[str, Any], values: Tensor) -> dict[str, Any]:
    """The parameter, and the state kept of it, that starts as ``values[0]`` and gets the others as gradients."""
    parameter = nn.Parameter(values[0].clone())
    optimizer = optimizer_cls([parameter], **options)
    for gradient in values[1:]:
        parameter.grad = gradient.clone()
        optimizer.step()
    return {"update": parameter.detach() - values[0], **optimizer.state[parameter]}


def _agree(whole: Any, first: Any, second: Any) -> bool:
    if not isinstance(whole, Tensor) or whole.numel() == 1:
        return True
    if not isinstance(first, Tensor) or first.numel() + second.numel() != whole.numel():
        return False
    # Vectorized and remaining elements may be rounded differently; other computations differ by far more.
    return torch.allclose(torch.cat([first, second]), whole.flatten(), rtol=1e-3, atol=1e-7, equal_nan=True)
