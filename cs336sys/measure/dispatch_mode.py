"""A base for what watches torch's operators."""

import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` that does not import torch's compiler.

    torch wraps every ``__torch_dispatch__`` such that compilers leave it out, and imports its own for that at the first
    operator: 1.1 of the 3 CPU seconds in which a rank starts and takes a first step. Here it waits until somebody else
    has imported it; before that nothing is compiled.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        left_out = cls.__dict__.get("__torch_dispatch__")
        method = getattr(left_out, "__wrapped__", None)
        if left_out is not None and method is not None:
            # What it calls, where there is one.
            vars(method)["__dynamo_disable"] = _until_the_compiler_is_there(left_out, method)


def _until_the_compiler_is_there(left_out: Callable, method: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        vars(method).pop("__dynamo_disable", None)
        return left_out(*args, **kwargs)

    return run
