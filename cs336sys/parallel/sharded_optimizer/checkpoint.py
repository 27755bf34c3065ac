"""The state of a sharded optimizer: gathered into that of an ordinary one, and cut up again for any number of ranks.

The state of one parameter is a dict, for example with the keys ``exp_avg`` and ``step``. Where ranks own slices, its
tensors are slices too, (n,), except ``step`` and others that do not have an element for each of the parameter's.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.sharded_optimizer.groups import Group, given_names, parameters_of

MASTER = "master_parameter"  # The key of a parameter's master copy in its state.

State = dict[str, Any]


def gather_states(
    states_of_rank: Mapping[int, tuple[range, State]], parameters: Sequence[nn.Parameter], *, sliced: bool
) -> dict[int, State] | None:
    """Gather the states of all ranks on rank 0, one parameter of one rank at a time, in CPU memory.

    Args:
        states_of_rank: by index of the parameter: which elements this rank owns, in memory order, and their state.
        parameters: all parameters, the same on every rank.
        sliced: whether ranks own slices of parameters.

    Returns:
        the whole state of each parameter, by its index; None on ranks other than 0.
    """
    indices_of_ranks = gather_objects(list(states_of_rank))
    # In a batch, or NCCL would make a communicator for each two ranks.
    if dist.get_rank() > 0:
        for elements, state in states_of_rank.values():
            dist.send_object_list([(elements, copy_state(state, "cpu"))], dst=0, use_batch=True)
        return None
    # By index of the parameter, from each rank that has elements of it, in rank order.
    parts: dict[int, list[tuple[range, State]]] = {}
    for rank, indices in enumerate(indices_of_ranks):
        for index in indices:
            if rank == 0:
                elements, state = states_of_rank[index]
                received: list[Any] = [(elements, copy_state(state, "cpu"))]
            else:
                received = [None]  # The next line fills it.
                dist.recv_object_list(received, src=rank, use_batch=True)
            parts.setdefault(index, []).extend(received)
    if sliced:
        return {index: _join_states(parts[index], parameters[index]) for index in sorted(parts)}
    # Each parameter is one rank's, whose part is the whole state.
    return {index: with_strides(state, parameters[index]) for index, ((_, state),) in sorted(parts.items())}


def check_same_model(state_dict: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Refuse a state dict whose groups, names or shapes differ from ``groups``."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise UsageError(
            f"no state of an optimizer: found {', '.join(state_dict) or 'nothing'}, not state and param_groups"
        )
    saved_sizes, sizes = ([len(group["params"]) for group in side] for side in (state_dict["param_groups"], groups))
    if saved_sizes != sizes:
        raise UsageError(f"the state belongs to another model: groups of {saved_sizes} parameters there, {sizes} here")
    for index, saved in enumerate(state_dict.get("parameters", [])):
        name, shape = given_names(groups)[index], tuple(parameters_of(groups)[index].shape)
        if tuple(saved["shape"]) != shape or (None not in (name, saved["name"]) and saved["name"] != name):
            raise UsageError(
                f"the state belongs to another model: parameter {index} is {saved['name'] or ''}{saved['shape']} "
                f"there, {name or ''}{shape} here"
            )


def cut_state(
    state: State, parameter: nn.Parameter, elements: range, scalars: Container[str], dtype: torch.dtype | None = None
) -> State:
    """Copy the state of some elements of a parameter: elementwise tensors as (n,), in memory order.

    Args:
        scalars: keys whose values hold for the whole parameter, even if they have its shape: they are copied whole.
        dtype: of the elementwise copies; None keeps that of the state.
    """
    cut: State = {}
    for key, value in state.items():
        if key not in scalars and _is_elementwise(key, value, parameter.shape):
            stored = _laid_out_like(parameter, value)
            in_memory_order = stored.as_strided((stored.numel(),), (1,), stored.storage_offset())
            cut[key] = in_memory_order[elements.start : elements.stop].to(dtype or value.dtype, copy=True)
        else:
            cut[key] = _copy(value)
    return cut


def copy_state(state: State, device: str | None = None) -> State:
    """Return a state with tensors of its own, on another device if it is given."""
    return {key: _copy(value, device) for key, value in state.items()}


def _copy(value: Any, device: str | None = None) -> Any:
    return value.detach().to(device or value.device, copy=True) if isinstance(value, Tensor) else value


def check_saved_shapes(state: Mapping[str, Any], name: str, shape: torch.Size, *, sliced: bool) -> None:
    """Refuse a whole state with tensors of other shapes than the parameter's.

    An optimizer may keep tensors of any shape, for example a row of means. So where ranks own no slices, a dimension
    may also be 1, and tensors with more or fewer dimensions than the parameter are accepted.
    """
    for key, value in state.items():
        if not isinstance(value, Tensor) or key == "step" or value.numel() == 1:
            continue
        fits = value.shape == shape
        if not sliced:
            sizes = zip(value.shape, shape, strict=True)  # Read where there are as many.
            fits = value.dim() != len(shape) or all(size in (parameter_size, 1) for size, parameter_size in sizes)
        if not fits:
            raise UsageError(
                f"the state belongs to another model: {key} of {name} is {tuple(value.shape)} there, "
                f"the parameter is {tuple(shape)} here"
            )


def _is_elementwise(key: str, value: Any, shape: Sequence[int]) -> bool:
    # "step" never is, as in torch itself: with parameters of one element it would be mistaken for one that is.
    return isinstance(value, Tensor) and key != "step" and tuple(value.shape) == tuple(shape)


def _join_states(parts: Sequence[tuple[range, State]], parameter: nn.Parameter) -> State:
    """Join the states of slices to a whole state; entries that are not elementwise are the same in all of them."""
    # Entries of the first part stay where no joined slices replace them below.
    _, first_state = parts[0]
    whole = dict(first_state)
    for key, value in whole.items():
        if all(_is_elementwise(key, state[key], (len(elements),)) for elements, state in parts):
            joined = torch.empty(parameter.numel(), dtype=value.dtype)
            for elements, state in parts:
                joined[elements.start : elements.stop] = state[key]
            whole[key] = joined.as_strided(parameter.shape, parameter.stride())
    return whole


def with_strides(state: State, parameter: nn.Parameter) -> State:
    """Return the state with elementwise tensors laid out like the parameter, as fused optimizers assume."""
    return {
        key: _laid_out_like(parameter, value) if _is_elementwise(key, value, parameter.shape) else value
        for key, value in state.items()
    }


def _laid_out_like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return the value, or a copy if its elements are in another order in memory than a dense parameter's."""
    strides = torch.empty_like(parameter, device="meta").stride()
    if value.stride() == strides:
        return value
    return torch.empty_strided(parameter.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
