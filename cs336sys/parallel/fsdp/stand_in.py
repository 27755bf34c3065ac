"""What modules show in place of a weight that is not gathered: an operation on it gathers the weight first."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336sys.errors import UsageError

# What needs no values; the memory is asked for by those who count it. All else is done to the whole weight.
_PROPERTIES = (
    "shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad grad_fn is_cuda is_cpu is_meta "
    "is_sparse is_quantized"
)
_METHODS = (
    "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex is_signed "
    "get_device __len__ untyped_storage storage_offset"
)
_WITHOUT_VALUES = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES.split()]
    + [getattr(Tensor, name) for name in _METHODS.split()]
    + [torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed]
)
_FREEZING = frozenset([Tensor.requires_grad_] + [getattr(Tensor, name).__set__ for name in ("requires_grad",)])


class StandIn(nn.Parameter):
    """A parameter without memory that is replaced by the whole one in every operation.

    Attributes:
        stands_for: name of the parameter.
        whole: returns the whole parameter, with its values.
    """

    stands_for: str
    whole: Callable[[], nn.Parameter]

    @staticmethod
    def of(whole: nn.Parameter, name: str, gather: Callable[[], nn.Parameter]) -> "StandIn":
        """Make the stand-in of a parameter, which shares its memory, if any, and its attributes."""
        stand_in: StandIn = Tensor._make_subclass(StandIn, whole.data, True)
        vars(stand_in).update(vars(whole))
        stand_in.stands_for, stand_in.whole = name, gather

        def hand_on(_: Tensor) -> None:
            # An autograd.Function gets the stand-in itself, and operates on it within.
            with torch._C.DisableTorchFunctionSubclass():
                gradient, stand_in.grad = stand_in.grad, None
            if gradient is not None:
                whole.grad = gradient if whole.grad is None else whole.grad + gradient

        with torch._C.DisableTorchFunctionSubclass():
            stand_in.register_post_accumulate_grad_hook(hand_on)
            stand_in.requires_grad_(whole.requires_grad)
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``function`` with whole parameters in place of stand-ins."""
        if function in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function in _FREEZING:
            raise UsageError(f"{args[0].stands_for} is frozen or unfrozen in the forward pass: do it between two steps")
        args, kwargs = tree_map_only(StandIn, lambda stand_in: stand_in.whole(), (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.stands_for}, {tuple(self.shape)} in {self.dtype}, not gathered"
