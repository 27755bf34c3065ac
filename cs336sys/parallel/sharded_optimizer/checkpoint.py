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
from cs336sys.parallel.collectives import exchange_with, gather_objects, group_device, is_dense
from cs336sys.parallel.sharded_optimizer.groups import Group, given_names, parameters_of

# The key of a parameter's master copy in its state.
MASTER = "master_parameter"

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
    # A meta tensor says what to expect of a large one.
    of_ranks = gather_objects(
        {
            index: (
                elements,
                {
                    key: torch.empty(value.shape, dtype=value.dtype, device="meta")
                    if _is_large(value)
                    else _on_cpu(value)
                    for key, value in state.items()
                },
            )
            for index, (elements, state) in states_of_rank.items()
        }
    )
    device = group_device()
    if dist.get_rank() > 0:
        for _, state in states_of_rank.values():
            sent = [value.detach().to(device).contiguous() for value in state.values() if _is_large(value)]
            exchange_with(0, dist.isend, sent)
        return None

    parts: dict[int, list[tuple[range, State]]] = {}
    for rank, states in enumerate(of_ranks):
        for index, (elements, state) in states.items():
            if rank == 0:
                state = {key: _on_cpu(value) for key, value in states_of_rank[index][1].items()}
            else:
                received = {
                    key: torch.empty(value.shape, dtype=value.dtype, device=device)
                    for key, value in state.items()
                    if _is_large(value)
                }
                exchange_with(rank, dist.irecv, list(received.values()))
                state = {key: received[key].cpu() if key in received else value for key, value in state.items()}
            parts.setdefault(index, []).append((elements, state))
    whole = {}
    for index in sorted(parts):
        (_, first), *_ = parts[index]
        whole[index] = (
            _join_states(parts[index], parameters[index]) if sliced else _with_strides(first, parameters[index])
        )
    return whole


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


def take_own_states(
    state_dict: Mapping[str, Any],
    share: Mapping[str, Any],
    names: Sequence[str],
    parameters: Sequence[nn.Parameter],
    owned: Sequence[range],
    sliced: Container[nn.Parameter],
    scalars: Container[str],
) -> dict[int, State]:
    """Copies of the states in a state dict that belong to this rank, by index of the parameter.

    Args:
        state_dict: a whole one, or one rank's, which has the key ``share``.
        share: what this rank's own state dict has under ``share``.
        owned: which elements of each parameter this rank owns.
        sliced: the parameters that are cut into slices.
        scalars: keys with one value for a whole parameter: of one without dimensions, shapes do not tell.
    """
    saved_as = [key for group in state_dict["param_groups"] for key in group["params"]]
    states = {index: state_dict["state"][key] for index, key in enumerate(saved_as) if key in state_dict["state"]}
    if "share" in state_dict:
        saved = state_dict["share"]
        if saved != share:
            raise UsageError(
                f"the state is the share of rank {saved['rank']} of {saved['world_size']} with flat={saved['flat']}, "
                f"this is rank {share['rank']} of {share['world_size']} with flat={share['flat']}, or buckets differ: "
                "choose a consolidated_state_dict()"
            )
        return {index: {key: _copy(value) for key, value in state.items()} for index, state in states.items()}
    for index, state in states.items():
        _check_saved_shapes(state, names[index], parameters[index].shape, sliced=share["flat"])
    return {
        index: cut_state(state, parameters[index], owned[index], scalars)
        if parameters[index] in sliced
        else {key: _copy(value) for key, value in _with_strides(state, parameters[index]).items()}
        for index, state in states.items()
        if owned[index]
    }


def cut_state(
    state: State, parameter: nn.Parameter, elements: range, scalars: Container[str], dtype: torch.dtype | None = None
) -> State:
    """Copy the state of some elements, (n,) each, in memory order and ``dtype``; values of ``scalars`` as they are."""
    return {
        key: _in_memory_order(value, parameter)[elements.start : elements.stop].to(dtype or value.dtype, copy=True)
        if key not in scalars and _is_elementwise(key, value, parameter.shape)
        else _copy(value)
        for key, value in state.items()
    }


def _check_saved_shapes(state: Mapping[str, Any], name: str, shape: torch.Size, *, sliced: bool) -> None:
    # An optimizer may keep tensors of any shape, for example a row of means. So without slices a dimension may also be
    # 1, and tensors with more or fewer dimensions than the parameter are accepted.
    for key, value in state.items():
        if not isinstance(value, Tensor) or key == "step" or value.numel() == 1:
            continue
        fits = value.shape == shape
        if not sliced:
            fits = value.dim() != len(shape) or all(a in (b, 1) for a, b in zip(value.shape, shape, strict=True))
        if not fits:
            raise UsageError(
                f"the state belongs to another model: {key} of {name} is {tuple(value.shape)} there, "
                f"the parameter is {tuple(shape)} here"
            )


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_elementwise(key: str, value: Any, shape: Sequence[int]) -> bool:
    # "step" never is, as in torch itself: with parameters of one element it would be mistaken for one that is.
    return isinstance(value, Tensor) and key != "step" and tuple(value.shape) == tuple(shape)


def _join_states(parts: Sequence[tuple[range, State]], parameter: nn.Parameter) -> State:
    """The whole state from the states of slices; entries that are not elementwise are the same in all of them."""
    whole = dict(parts[0][1])
    for key, value in whole.items():
        if all(_is_elementwise(key, state[key], (len(elements),)) for elements, state in parts):
            joined = torch.empty(parameter.numel(), dtype=value.dtype)
            for elements, state in parts:
                joined[elements.start : elements.stop] = state[key]
            whole[key] = joined.as_strided(parameter.shape, parameter.stride())
    return whole


def _with_strides(state: State, parameter: nn.Parameter) -> State:
    """The state with its elementwise tensors laid out as the parameter is, which fused optimizers take for granted."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return {
        key: torch.empty_strided(parameter.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
        if _is_elementwise(key, value, parameter.shape) and value.stride() != strides
        else value
        for key, value in state.items()
    }


def _in_memory_order(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """The elements of a tensor, (numel,), in the memory order of the parameter, whose shape it has."""
    if value.stride() != parameter.stride() or not is_dense(value):
        laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device)
        value = laid_out.copy_(value)
    return value.as_strided((value.numel(),), (1,), value.storage_offset())
