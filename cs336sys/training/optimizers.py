"""The optimizers that a workload can choose."""

import inspect
from typing import Any

import torch

from cs336sys.errors import CapabilityError
from cs336sys.machine.triton_package import why_no_triton
from cs336sys.settings.choices import import_named
from cs336sys.settings.training import Workload
from cs336sys.settings.user_code import is_user_code
from cs336sys.training import user_models

_LEARNING_RATE = 1e-3  # torch's default.


def require_kernels(option: str) -> None:
    """Refuse an option where our kernels cannot be loaded: Triton is not installed, or cannot be imported."""
    if (reason := why_no_triton()) is not None:
        raise CapabilityError(f"{option} needs {reason}")


def _spare_the_compiler() -> None:
    """Let optimizers be made and used without importing torch's compiler.

    ``torch._disable_dynamo``, around these methods, imports it at their first call to have them left out of it: 1.4 of
    the 3.6 CPU seconds in which a process starts and trains a tiny model. Nothing here compiles an optimizer.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            # Where ``_disable_dynamo`` keeps the version of a method that the compiler leaves out, once it has one.
            vars(method).setdefault("__dynamo_disable", method)


def choose_optimizer(workload: Workload) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the workload's class of optimizer and its settings; for CUDA graphs it counts steps on the GPU if it can.

    Raises:
        CapabilityError: it is ours, and Triton is not installed; or it is the user's, with groups of parameters.
    """
    _spare_the_compiler()  # Else torch imports it for optimizers, which takes 1.4 s.
    if is_user_code(workload.optimizer):
        return user_models.optimizer_class(workload.optimizer)
    record = workload.optimizer_record
    if record.is_ours:
        require_kernels(f"--optimizer {workload.optimizer}")
        return import_named(record.name), {"state_dtype": workload.state_dtype}
    optimizer_class, settings = import_named(record.name), record.settings
    parameters = inspect.signature(optimizer_class).parameters
    if workload.cuda_graph == "on" and "capturable" in parameters:
        settings = {**settings, "capturable": True}
    if "lr" in parameters and parameters["lr"].default is inspect.Parameter.empty:
        settings = {**settings, "lr": _LEARNING_RATE}  # A cs336_basics of the user's need not have a default.
    return optimizer_class, settings


def build_optimizer(workload: Workload, parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """Build the workload's optimizer of these parameters; ``settings`` replace those of the workload's choice."""
    _spare_the_compiler()
    if is_user_code(workload.optimizer):
        return user_models.make_optimizer(workload.optimizer, parameters, settings)
    optimizer_class, defaults = choose_optimizer(workload)
    return optimizer_class(parameters, **{**defaults, **settings})
