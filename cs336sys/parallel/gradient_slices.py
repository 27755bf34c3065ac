"""Which gradients are a slice of this rank's: what takes them for whole ones is refused, or ranks would drift apart."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from cs336sys.errors import UsageError
from cs336sys.parallel.gradient_synchronizer import hands_gradient_on

# kernels.adamw.AdamW looks for it, too, and may not import this.
_MARK = "is_slice_of_this_rank"

# What clip_grad_norm_ of torch.nn.utils calls by this name once it knows the norm; nn.utils has it by another.
_CLIPPING = "_clip_grads_with_norm_"


def mark_slice(parameter: nn.Parameter) -> None:
    """Let what decides by the gradient of this parameter alone refuse it: it is a slice of this rank."""
    setattr(parameter, _MARK, True)
    refuse_clipping_alone()


def is_slice(parameter: Tensor) -> bool:
    """Whether :func:`mark_slice` has marked it."""
    return hasattr(parameter, _MARK)


@functools.cache
def refuse_clipping_alone() -> None:
    """Let ``torch.nn.utils.clip_grad_norm_`` refuse slices, from now on and in this process.

    Each rank would scale what it holds by another factor. What it calls is wrapped, and not itself, because scripts
    have imported that by name before the first slice is made.
    """
    setattr(clip_grad, _CLIPPING, _refusing(getattr(clip_grad, _CLIPPING)))


def _refusing(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def checked(parameters: Tensor | Iterable[Tensor], *args: Any, **settings: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(is_slice(parameter) or hands_gradient_on(parameter) for parameter in parameters):
            raise UsageError(
                "torch.nn.utils.clip_grad_norm_ would clip by the norm of what this rank has of the gradients: call "
                "clip_grad_norm_() of the FSDP or TensorParallel module, or of the sharded optimizer, on every rank"
            )
        return clip(parameters, *args, **settings)

    return checked
