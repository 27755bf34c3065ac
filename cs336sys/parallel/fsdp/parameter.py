"""A parameter cut along its first dimension into one slice per rank, and how the parameters of a module are cut.

A module is initialized and cut one layer at a time, so the whole module never has to exist in memory.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import own_rows, rows_per_rank
from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import SliceGather, broadcast_from_first, group_device
from cs336sys.parallel.fsdp.plan import PlannedParameter, ShardingPlan
from cs336sys.parallel.gradient_memory import in_own_memory, require_averageable
from cs336sys.parallel.gradient_scaler import refuse_other_scalers
from cs336sys.parallel.gradient_slices import is_slice, mark_slice


class ShardedParameter:
    """A parameter of which this rank holds some rows.

    Attributes:
        group: the ranks that hold it.
        names: its names in the wrapped module; tied weights have several.
        owners: the modules that hold it, each with the name of the attribute.
        shape: the shape of the whole parameter.
        is_part_of_more: whether the whole parameter is itself this rank's part of one that another wrapper has cut.
        rows: which rows this rank holds.
        divides_evenly: whether all ranks hold equally many rows.
        slice_sizes: for each rank, the number of elements in its rows.
        shard: this rank's rows, (len(rows), ...): what the module holds between steps and the optimizer updates.
        full: all rows in the dtype to compute in: what the module holds, and autograd sees, while they are gathered.
            It is always the same tensor, so that what autograd saved of it stays valid; its memory comes and goes.
    """

    def __init__(
        self,
        planned: PlannedParameter,
        whole: nn.Parameter,
        compute_dtype: torch.dtype | None,
        group: dist.ProcessGroup,
    ):
        """Copy this rank's rows of the whole parameter."""
        self.group = group
        self.names = planned.names
        self.owners = planned.owners
        self.shape = whole.shape
        self.is_part_of_more = is_slice(whole)
        world_size = group.size()
        self.rows = own_rows(len(whole), group.rank(), world_size)
        self.divides_evenly = len(whole) % world_size == 0
        self.slice_sizes = [
            len(own_rows(len(whole), rank, world_size)) * math.prod(whole.shape[1:]) for rank in range(world_size)
        ]
        own = whole.detach()[self.rows.start : self.rows.stop].clone(memory_format=torch.contiguous_format)
        self.shard = nn.Parameter(own, requires_grad=whole.requires_grad)
        mark_slice(self.shard)
        refuse_other_scalers()
        self.gathered_dtype = compute_dtype if compute_dtype and own.is_floating_point() else own.dtype
        # The sum of the gradients of backward passes under no_sync, in the dtype of the shard.
        self.kept: Tensor | None = None

    def gather_into(self, memory: Tensor) -> Tensor:
        """Let ``full`` be a view of ``memory`` (uint8), in which rows will be gathered; return where this rank's go."""
        each = rows_per_rank(self.shape[0], self.group.size())
        padded = memory.view(self.gathered_dtype).view(-1, *self.shape[1:])
        # .data has a version counter of its own, so autograd does not see that its saved tensors are filled again.
        self.full = nn.Parameter(padded.data[: self.shape[0]], requires_grad=self.shard.requires_grad)
        return padded[self.group.rank() * each :][: len(self.rows)]

    def gather_whole(self, own: Tensor | None = None) -> Tensor:
        """All rows in new memory: of the shard, or of what is cut like it. Every rank must call it."""
        own = self.shard.detach() if own is None else own
        each, rank = rows_per_rank(self.shape[0], self.group.size()), self.group.rank()
        padded = own.new_zeros((self.group.size() * each, *self.shape[1:]))
        padded[rank * each :][: len(self.rows)] = own
        gather = SliceGather([padded.view(-1)], self.names[0], self.group)
        gather.start()
        gather.wait()
        return padded[: self.shape[0]]

    def take_gradient(self) -> Tensor | None:
        """Remove and return the whole gradient that autograd has left in ``full``; None if there is none.

        Raises:
            UsageError: it is sparse.
        """
        gradient, self.full.grad = self.full.grad, None
        if gradient is not None:
            require_averageable(self.names[0], gradient, self.gathered_dtype)
        return gradient

    def keep_gradient(self) -> None:
        """Add the gradient of this backward pass to those kept."""
        gradient = self.take_gradient()
        if gradient is None:
            return
        if self.kept is None:
            # Later ones are added to it in place.
            self.kept = in_own_memory(gradient.to(self.shard.dtype))
        else:
            self.kept.add_(gradient)

    def add_mean_gradient(self, gradient: Tensor) -> None:
        if self.shard.grad is None:
            self.shard.grad = gradient
        else:
            self.shard.grad.add_(gradient)


def distribute_parameters(
    module: nn.Module,
    plan: ShardingPlan,
    compute_dtype: torch.dtype | None,
    initialize: Callable[[nn.Module], None] | None,
    device: torch.device | None,
    group: dist.ProcessGroup,
) -> dict[PlannedParameter, ShardedParameter]:
    """Overwrite parameters and buffers with rank 0's, and cut the parameters that the plan shards.

    Layers on the meta device get memory and values first. Replicated parameters may be new objects afterwards. For
    arguments and errors see :class:`~cs336sys.parallel.fsdp.wrapper.FSDP`.
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
        broadcast_from_first(list(part.buffers(recurse=False)), group=group)
        for attribute, parameter in part._parameters.items():
            if parameter is None:
                continue
            entry = entries[part, attribute]
            if entry in to_shard and entry not in sharded:
                broadcast_from_first([parameter], group=group)
                sharded[entry] = ShardedParameter(entry, parameter, compute_dtype, group)
            elif entry not in to_shard and entry not in replicated:
                broadcast_from_first([parameter], group=group)
                replicated[entry] = parameter
            # A tied weight stays one parameter, and nothing refers to the whole of a sharded one any longer.
            part._parameters[attribute] = sharded[entry].shard if entry in sharded else replicated[entry]
    return sharded


def _is_on_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of the module itself, children aside, has no memory yet."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def _materialize(
    module: nn.Module, name: str, device: torch.device, initialize: Callable[[nn.Module], None] | None
) -> None:
    module.to_empty(device=device, recurse=False)
    if initialize is not None:
        initialize(module)
    elif callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    elif any(parameter is not None for parameter in module._parameters.values()):
        raise UsageError(
            f"{name} is on the meta device and its class {type(module).__name__} has no reset_parameters(): "
            "give FSDP a function to initialize it"
        )
