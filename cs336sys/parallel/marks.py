"""Marks by which wrappers, units and optimizers know what another one has wrapped, and refuse it.

A mark is an attribute and not a class, so that whoever looks for it need not import whoever sets it.
"""

import contextlib
import gc
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from cs336sys.errors import UsageError

# On the hook of a parameter: its gradient is averaged over ranks.
AVERAGES_GRADIENT = "averages_gradient"

# On the same hook: the gradient is handed on in slices, and none is left with the parameter.
HANDS_GRADIENT_ON = "hands_gradient_on"

# On the call that FSDP puts where nn.Module keeps a compiled one: it gathers the module's parameters first.
GATHERS_PARAMETERS = "gathers_parameters"

# By name: importing torch's FSDP takes 0.6 s of CPU time in every process.
_TORCH_WRAPPERS = {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel"}


class SynchronizationSwitch:
    """Averages gradients over ranks, unless it is switched off for gradient accumulation.

    Attributes:
        synchronizes: if False, backward passes accumulate gradients on this rank only.
    """

    synchronizes = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, backward passes accumulate gradients on this rank only."""
        was_synchronizing, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = was_synchronizing


def is_unit(module: nn.Module) -> bool:
    """Return whether FSDP gathers the module's parameters when it is called."""
    return getattr(module.__dict__.get("_compiled_call_impl"), GATHERS_PARAMETERS, False)


def is_synchronized(parameter: Tensor) -> bool:
    """Return whether a synchronizer that still exists averages the gradient of this parameter."""
    return _has_marked_hook(parameter, AVERAGES_GRADIENT)


def hands_gradient_on(parameter: Tensor) -> bool:
    """Return whether backward passes leave no gradient with this parameter: a synchronizer hands it on in slices."""
    return _has_marked_hook(parameter, HANDS_GRADIENT_ON)


def require_unwrapped(module: nn.Module) -> None:
    """Refuse a module that is wrapped, or has a part that is, by a class of ours or torch's that averages gradients."""
    for name, part in module.named_modules():
        is_wrapper = hasattr(part, "finish_gradient_synchronization") or is_unit(part)
        if is_wrapper or any(base.__name__ in _TORCH_WRAPPERS for base in type(part).__mro__):
            raise UsageError(
                f"{name or 'the module'} ({type(part).__name__}) is wrapped already: wrap the plain module"
            )


def require_unsynchronized(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters whose gradients another synchronizer averages: averaged twice, they would be wrong."""
    for name, parameter in named_parameters:
        if is_synchronized(parameter):
            gc.collect()  # A synchronizer to which nothing refers any more may still exist as part of a cycle.
            if is_synchronized(parameter):
                raise UsageError(
                    f"{name} has its gradient averaged already, by a data parallel wrapper or a sharded optimizer: "
                    "unwrap the module or delete that optimizer"
                )


def _has_marked_hook(parameter: Tensor, mark: str) -> bool:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(getattr(hook, mark, False) for hook in hooks.values())
