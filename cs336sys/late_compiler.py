"""Functions that torch's compiler leaves out, without importing it to tell it so."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def importing_no_compiler(left_out: Function) -> Function:
    """Let what ``torch._disable_dynamo`` has made of a function be called without importing torch's compiler.

    At the first call torch would import it, to have the function left out of what it compiles: 1.1 of the 3 CPU seconds
    in which a rank starts and takes a first step. Here that waits until somebody else has imported it; before,
    nothing is compiled.
    """
    function = getattr(left_out, "__wrapped__", None)
    if function is None:
        return left_out

    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        vars(function).pop("__dynamo_disable", None)
        return left_out(*args, **kwargs)

    # What it calls, where there is one.
    vars(function)["__dynamo_disable"] = run
    return left_out
