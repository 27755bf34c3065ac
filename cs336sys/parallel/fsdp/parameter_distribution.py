"""Gives every rank its slices of a module's parameters, one layer at a time, so that the whole never has to exist."""

from collections.abc import Callable

import torch
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import broadcast_from_first, group_device
from cs336sys.parallel.fsdp.parameter import ShardedParameter
from cs336sys.parallel.fsdp.plan import PlannedParameter, ShardingPlan


def distribute_parameters(
    module: nn.Module,
    plan: ShardingPlan,
    compute_dtype: torch.dtype | None,
    initialize: Callable[[nn.Module], None] | None,
    device: torch.device | None,
) -> dict[PlannedParameter, ShardedParameter]:
    """Make parameters and buffers rank 0's and cut those parameters that the plan shards.

    Layers on the meta device are given memory and values first; arguments and errors as of
    :class:`~cs336sys.parallel.fsdp.wrapper.FSDP`. Replicated parameters may be new objects afterwards.
    """
    to_shard = set(plan.all_sharded)
    entries = {use: entry for entry in (*plan.all_sharded, *plan.replicated) for use in entry.owners}
    sharded: dict[PlannedParameter, ShardedParameter] = {}
    replicated: dict[PlannedParameter, nn.Parameter] = {}
    for name, part in module.named_modules():
        if _is_on_meta(part):
            _materialize(part, name or type(part).__name__, device or group_device(), initialize)
        elif device is not None:
            part._apply(lambda tensor: tensor.to(device), recurse=False)
        broadcast_from_first(list(part.buffers(recurse=False)))
        for attribute, parameter in part._parameters.items():
            if parameter is None:
                continue
            entry = entries[part, attribute]
            if entry in to_shard and entry not in sharded:
                broadcast_from_first([parameter])
                sharded[entry] = ShardedParameter(entry, parameter, compute_dtype)
            elif entry not in to_shard and entry not in replicated:
                broadcast_from_first([parameter])
                replicated[entry] = parameter
            # A tied weight stays one parameter, and nothing holds the whole of a sharded one any longer.
            part._parameters[attribute] = sharded[entry].shard if entry in sharded else replicated[entry]
    return sharded


def _is_on_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of the module itself, not of its children, has no memory."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def _materialize(
    module: nn.Module, name: str, device: torch.device, initialize: Callable[[nn.Module], None] | None
) -> None:
    module.to_empty(device=device, recurse=False)
    if initialize is not None:
        initialize(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
    elif any(parameter is not None for parameter in module._parameters.values()):
        raise UsageError(
            f"{name} is on the meta device and its class {type(module).__name__} has no reset_parameters(): "
            "give FSDP a function to initialize it"
        )
