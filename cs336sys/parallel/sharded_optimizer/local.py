"""The optimizer of this rank's share of the work, kept consistent with the groups of all parameters.

The *local tensor* of a parameter is what this rank updates: the parameter, a slice of it, or a master copy of that.
"""

import itertools
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import ALIGNMENT, greedy_partition
from cs336sys.errors import UsageError
from cs336sys.parallel.buckets import TensorSpec, assign_buckets
from cs336sys.parallel.checkpoint_state import is_elementwise
from cs336sys.parallel.collectives import Broadcasts, is_dense
from cs336sys.parallel.gradient_slices import OptimizerClass, Options
from cs336sys.parallel.sharded_optimizer import checkpoint
from cs336sys.parallel.sharded_optimizer.checkpoint import State
from cs336sys.parallel.sharded_optimizer.exchange import ExchangeBucket, ParameterExchange, move_into
from cs336sys.parallel.sharded_optimizer.groups import Group, copy_options, names_of, options_of, parameters_of
from cs336sys.parallel.sharded_optimizer.slices import SlicePartition


class ParameterPartition:
    """Parameters that this rank updates and then sends to all ranks.

    Gradients are not touched: a data parallel wrapper averages them. The other way to share out an optimizer's work is
    :class:`~cs336sys.parallel.sharded_optimizer.slices.SlicePartition`, which has these methods, too.

    Attributes:
        exchange: sends every parameter from the rank that updates it, at most ``cap_bytes`` in one operation.
    """

    def __init__(self, cap_bytes: float | None):
        self.exchange = ParameterExchange()
        self._cap_bytes = cap_bytes
        self._bytes_of_rank = [0] * dist.get_world_size()
        self._rank = dist.get_rank()
        self._owners: dict[nn.Parameter, int] = {}  # The ranks that update them.
        self._names: dict[nn.Parameter, str] = {}

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give each parameter to a rank. They are in the order in which the forward pass needs them."""
        names, adopted = list(parameters), list(parameters.values())
        specs = [TensorSpec(id(parameter), parameter.nbytes, kind=parameter.device) for parameter in adopted]
        owners = greedy_partition([spec.size_bytes for spec in specs], self._bytes_of_rank)
        for spec, owner in zip(specs, owners, strict=True):  # greedy_partition() has left the sums as they were.
            self._bytes_of_rank[owner] += spec.size_bytes
        self._owners |= zip(adopted, owners, strict=True)
        self._names |= {parameter: name for name, parameter in parameters.items()}

        buckets = []
        # assign_buckets() begins with the last tensor, which has its gradient first; the forward pass needs it last.
        for indices in reversed(assign_buckets(specs, self._cap_bytes)):
            bucket = {names[index]: adopted[index] for index in reversed(indices)}
            tensors, sources = zip(*self._lay_together(list(bucket.values())), strict=True)  # With their senders.
            buckets.append(ExchangeBucket(bucket, Broadcasts(tensors, sources, ", ".join(bucket))))
        self.exchange.extend(buckets)

    def local(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return what this rank's optimizer updates: the parameter itself, a slice of it, (n,), or nothing (None).

        A frozen parameter, which was not adopted, is whole on every rank, with the state that it may have.
        """
        return parameter if self._owners.get(parameter, self._rank) == self._rank else None

    def owned(self, parameter: nn.Parameter) -> range:
        """Return the elements of a parameter, in memory order, that this rank updates."""
        return range(parameter.numel() if self.local(parameter) is not None else 0)

    def prepare_update(self) -> None:
        """Check the gradients, which are complete."""
        for parameter, name in self._names.items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise UsageError(f"{name} has a sparse gradient, which cannot be sharded: choose sparse=False")

    def publish(self) -> None:
        """Start to send what this rank has updated."""
        self.exchange.start([parameter for parameter in self._owners if parameter.grad is not None])

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients, which every rank has whole; return their norm before, (), the same on every rank."""
        return nn.utils.clip_grad_norm_(self._owners, max_norm)

    def _lay_together(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[Tensor, int]]:
        """Yield tensors that hold these parameters, each with its sender: one for each rank and dtype if possible.

        Each broadcast costs the CPU time whatever its size, even within a group. A parameter stays where it is if it
        has gaps in memory, or if one placed after it would not be aligned. Changes of these tensors are not counted as
        changes of the parameters: exchange.start() counts those of a step.
        """
        by_owner_and_dtype: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for parameter in parameters:
            if is_dense(parameter) and parameter.numel() % ALIGNMENT == 0:
                by_owner_and_dtype.setdefault((self._owners[parameter], parameter.dtype), []).append(parameter)
            else:
                yield parameter.data, self._owners[parameter]
        for (owner, _), members in by_owner_and_dtype.items():
            if len(members) == 1:
                yield members[0].data, owner
                continue
            *starts, end = itertools.accumulate((parameter.numel() for parameter in members), initial=0)
            memory = members[0].detach().new_empty(end)
            move_into(memory, starts, members)
            yield memory, owner


Partition = ParameterPartition | SlicePartition


class LocalOptimizer:
    """Updates what this rank owns; each of its groups holds the local tensors of one group of all parameters.

    Args:
        groups: the groups of all parameters; options that the class adds are copied to them.

    Attributes:
        optimizer: the optimizer of the local tensors, (n,) each.
    """

    def __init__(self, optimizer_cls: OptimizerClass, options: Options, groups: Sequence[Group], partition: Partition):
        self._partition = partition
        self.optimizer = optimizer_cls([self._local_group(group) for group in groups], **options)
        copy_options(self.optimizer.param_groups, groups)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return parameters_of(self.optimizer.param_groups)

    def check_options(self, group: Group) -> None:
        """Let the class check the options of a group, by adding an empty group, and raise what it raises."""
        count = len(self.optimizer.param_groups)
        try:
            self.optimizer.add_param_group({**options_of(group), "params": []})
        finally:
            del self.optimizer.param_groups[count:]

    def add_group(self, group: Group) -> None:
        """Add the local tensors of a group."""
        self.optimizer.add_param_group(self._local_group(group))

    def take_members(self, groups: Sequence[Group], scalars: Container[str]) -> None:
        """Let each local group hold the local tensors of its counterpart's parameters; cut the states of unfrozen ones.

        Keys in ``scalars`` have one value for a whole parameter.
        """
        for group, local_group in zip(groups, self.optimizer.param_groups, strict=True):
            local_group["params"] = self._local_group(group)["params"]
        for parameter in parameters_of(groups):
            tensor = self._partition.local(parameter)
            # While it was frozen, every rank had its whole state.
            if tensor is not parameter and parameter in self.optimizer.state:
                state = self.optimizer.state.pop(parameter)
                if tensor is not None:
                    elements = self._partition.owned(parameter)
                    cut = checkpoint.cut_state(state, parameter, elements, scalars, tensor.dtype)
                    self.optimizer.state[tensor] = cut

    def take_state(self, state: Mapping[Any, State], names: Mapping[nn.Parameter, str]) -> None:
        """Replace the state by that of each parameter in ``state``; a parameter that has none there begins anew."""
        # A class may keep state under other keys than parameters.
        new_state = {key: value for key, value in self.optimizer.state.items() if not isinstance(key, Tensor)}
        for parameter, name in names.items():
            tensor = self._partition.local(parameter)
            if tensor is None or not state.get(parameter):
                continue
            for key, value in state[parameter].items():
                is_slice = tensor is not parameter and is_elementwise(key, value)
                if is_slice and value.shape != tensor.shape:
                    raise UsageError(
                        f"the state {key} of {name} is {tuple(value.shape)}, and this rank updates {len(tensor)} of "
                        "its elements: load a whole state by load_state_dict()"
                    )
            new_state[tensor] = state[parameter]
        self.optimizer.state = defaultdict(dict, new_state)

    def step(self, groups: Sequence[Group], arguments: Mapping[str, Any]) -> None:
        """Update the local tensors with the options of the groups, and copy options that the step changes back."""
        copy_options(groups, self.optimizer.param_groups)
        if self.tensors:  # A rank may own nothing, for which a class need not be prepared.
            self.optimizer.step(**arguments)
        copy_options(self.optimizer.param_groups, groups)

    def state_of(self, parameters: Sequence[nn.Parameter]) -> dict[Tensor, State]:
        """Return the state of each parameter that has any; these are the local optimizer's own dicts."""
        pairs = ((parameter, self._partition.local(parameter)) for parameter in parameters)
        state = self.optimizer.state
        return {parameter: state[tensor] for parameter, tensor in pairs if tensor is not None and tensor in state}

    def own_states(self, parameters: Sequence[nn.Parameter]) -> dict[int, tuple[range, State]]:
        """Return by index of the parameter: the elements that this rank owns, and their state with a master copy."""
        states = {}
        for index, parameter in enumerate(parameters):
            tensor = self._partition.local(parameter)
            if tensor is not None:
                # A tensor of another dtype is a master copy.
                master = {} if tensor.dtype == parameter.dtype else {checkpoint.MASTER: tensor.detach()}
                states[index] = self._partition.owned(parameter), {**self.optimizer.state.get(tensor, {}), **master}
        return states

    def own_states_in(
        self, state_dict: Mapping[str, Any], share: Mapping[str, Any], groups: Sequence[Group], scalars: Container[str]
    ) -> dict[int, State]:
        """Return copies of the states in a state dict that belong to this rank, by index of the parameter.

        Args:
            state_dict: a whole one, or one rank's, which has the key ``share``.
            share: what this rank's own state dict has under ``share``.
            scalars: keys with one value for a whole parameter, which has the shape of a parameter without dimensions.
        """
        # In a state dict of torch's, groups and states know a parameter by a key, usually its number.
        saved_keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        states = {index: state_dict["state"][key] for index, key in enumerate(saved_keys) if key in state_dict["state"]}
        if "share" in state_dict:
            saved = state_dict["share"]
            if saved != share:
                raise UsageError(
                    f"the state is the share of rank {saved['rank']} of {saved['world_size']} with "
                    f"flat={saved['flat']}, this is rank {share['rank']} of {share['world_size']} with "
                    f"flat={share['flat']}, or buckets differ: choose a consolidated_state_dict()"
                )
            return {index: checkpoint.copy_state(state) for index, state in states.items()}
        names, parameters = names_of(groups), parameters_of(groups)
        own_states = {}
        for index, state in states.items():
            parameter = parameters[index]
            checkpoint.check_saved_shapes(state, names[index], parameter.shape, sliced=share["flat"])
            elements = self._partition.owned(parameter)
            if elements and self._partition.local(parameter) is parameter:  # This rank updates it whole.
                own_states[index] = checkpoint.copy_state(checkpoint.with_strides(state, parameter))
            elif elements:
                own_states[index] = checkpoint.cut_state(state, parameter, elements, scalars)
        return own_states

    def load(self, states: Mapping[int, State], saved_groups: Sequence[Group], groups: Sequence[Group]) -> None:
        """Replace state and options, including the options of the groups of all parameters.

        Args:
            states: by index of the parameter, as in :meth:`own_states`; ``SlicePartition`` loads the master copies.
            saved_groups: the groups whose options to load.
        """
        parameters = parameters_of(groups)
        # Optimizer.load_state_dict() knows the local tensors by these numbers.
        numbers = {tensor: number for number, tensor in enumerate(self.tensors)}
        state_of_number = {}
        for index, state in states.items():
            tensor = self._partition.local(parameters[index])
            without_master = {key: value for key, value in state.items() if key != checkpoint.MASTER}
            if tensor is not None and without_master:
                state_of_number[numbers[tensor]] = without_master
        local_groups = [
            {**options_of(saved), "params": [numbers[tensor] for tensor in group["params"]]}
            for saved, group in zip(saved_groups, self.optimizer.param_groups, strict=True)
        ]
        self.optimizer.load_state_dict({"state": state_of_number, "param_groups": local_groups})
        copy_options(self.optimizer.param_groups, groups)

    def _local_group(self, group: Group) -> Group:
        tensors = map(self._partition.local, group["params"])
        return {**options_of(group), "params": [tensor for tensor in tensors if tensor is not None]}


def require_optimizer(optimizer_cls: Any) -> None:
    """Refuse a class that cannot update some of the parameters without the others.

    Raises:
        UsageError: it is not an optimizer class, or it is LBFGS, which takes inner products over all gradients.
    """
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
        raise UsageError(f"optimizer_cls {optimizer_cls}: must be a subclass of torch.optim.Optimizer")
    if issubclass(optimizer_cls, torch.optim.LBFGS):
        raise UsageError(f"{optimizer_cls.__name__} cannot be sharded: choose one that updates parameters one by one")
