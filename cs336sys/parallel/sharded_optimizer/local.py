"""The optimizer of this rank's share, kept consistent with the groups of all parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError
from cs336sys.parallel.sharded_optimizer.checkpoint import MASTER, State
from cs336sys.parallel.sharded_optimizer.groups import Group, copy_options, options_of, parameters_of
from cs336sys.parallel.sharded_optimizer.partition import Partition


class LocalOptimizer:
    """Updates what this rank owns; each of its groups holds the local tensors of one group of all parameters.

    Args:
        optimizer_cls, options: the optimizer to build.
        groups: the groups of all parameters; options that the class adds are copied to them.
        partition: knows the local tensor of each parameter.
    """

    def __init__(
        self,
        optimizer_cls: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        groups: Sequence[Group],
        partition: Partition,
    ):
        self._partition = partition
        self._optimizer = optimizer_cls([self._local_group(group) for group in groups], **options)
        copy_options(self._optimizer.param_groups, groups)

    @property
    def defaults(self) -> dict[str, Any]:
        return self._optimizer.defaults

    @property
    def tensors(self) -> Sequence[Tensor]:
        return parameters_of(self._optimizer.param_groups)

    @property
    def state(self) -> dict[Tensor, State]:
        return self._optimizer.state

    def check_options(self, group: Group) -> None:
        """Let the class check the options of a group, and raise what it raises."""
        groups = self._optimizer.param_groups
        count = len(groups)
        try:
            self._optimizer.add_param_group({**options_of(group), "params": []})
        finally:
            del groups[count:]

    def add_group(self, group: Group) -> None:
        """Add the local tensors of a group."""
        self._optimizer.add_param_group(self._local_group(group))

    def take_members(self, groups: Sequence[Group]) -> None:
        """Let each local group hold the local tensors of its counterpart's parameters."""
        for group, local_group in zip(groups, self._optimizer.param_groups, strict=True):
            local_group["params"] = self._local_group(group)["params"]

    def take_state(self, state: Mapping[Any, State], names: Mapping[nn.Parameter, str]) -> None:
        """Replace the state by that of each parameter in ``state``; who has none there begins anew.

        Raises:
            UsageError: a tensor does not have the shape of the slice that this rank updates.
        """
        own = {key: value for key, value in self.state.items() if not isinstance(key, Tensor)}
        for parameter, name in names.items():
            tensor = self._partition.local(parameter)
            if tensor is None or not state.get(parameter):
                continue
            for key, value in state[parameter].items():
                is_slice = tensor is not parameter and isinstance(value, Tensor) and key != "step" and value.dim() > 0
                if is_slice and value.shape != tensor.shape:
                    raise UsageError(
                        f"the state {key} of {name} is {tuple(value.shape)}, and this rank updates {len(tensor)} of "
                        "its elements: load a whole state by load_state_dict()"
                    )
            own[tensor] = state[parameter]
        self._optimizer.state = defaultdict(dict, own)

    def step(self, groups: Sequence[Group], arguments: Mapping[str, Any]) -> None:
        """Update the local tensors with the options of the groups, and copy options that the step changes back."""
        copy_options(groups, self._optimizer.param_groups)
        if self.tensors:
            self._optimizer.step(**arguments)
        copy_options(self._optimizer.param_groups, groups)

    def state_of(self, parameters: Sequence[nn.Parameter]) -> dict[Tensor, State]:
        """The state of each parameter that has any; these are the local optimizer's own dicts."""
        local = ((parameter, self._partition.local(parameter)) for parameter in parameters)
        return {parameter: self.state[tensor] for parameter, tensor in local if tensor in self.state}

    def own_states(self, parameters: Sequence[nn.Parameter]) -> dict[int, tuple[range, State]]:
        """By index of the parameter: the elements that this rank owns, and their state, including a master copy."""
        own = {}
        for index, parameter in enumerate(parameters):
            tensor = self._partition.local(parameter)
            if tensor is not None:
                master = {} if tensor.dtype == parameter.dtype else {MASTER: tensor.detach()}
                own[index] = self._partition.owned(parameter), {**self.state.get(tensor, {}), **master}
        return own

    def load(self, states: Mapping[int, State], saved_groups: Sequence[Group], groups: Sequence[Group]) -> None:
        """Replace state and options, including the options of the groups of all parameters.

        Args:
            states: by index of the parameter, as in :meth:`own_states`; master copies are ignored.
            saved_groups: the groups whose options to load.
        """
        parameters = parameters_of(groups)
        numbers = {tensor: number for number, tensor in enumerate(self.tensors)}
        kept = {
            numbers[tensor]: {k: v for k, v in state.items() if k != MASTER}
            for index, state in states.items()
            if (tensor := self._partition.local(parameters[index])) is not None
        }
        local_groups = [
            {**options_of(saved), "params": [numbers[tensor] for tensor in group["params"]]}
            for saved, group in zip(saved_groups, self._optimizer.param_groups, strict=True)
        ]
        self._optimizer.load_state_dict({"state": {n: s for n, s in kept.items() if s}, "param_groups": local_groups})
        copy_options(self._optimizer.param_groups, groups)

    def _local_group(self, group: Group) -> Group:
        local = [self._partition.local(parameter) for parameter in group["params"]]
        return {**options_of(group), "params": [tensor for tensor in local if tensor is not None]}
