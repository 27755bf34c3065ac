"""Checkpoints of FSDP, written by all ranks at once and loaded by any number of ranks.

A checkpoint is a folder of ``torch.distributed.checkpoint``: one file for each rank that saved, with its slices, and
``.metadata``, which says what is where. Its keys are ``model/<name>``, ``optimizer/<state>/<name>``,
``optimizer_groups`` and ``extra``. All ranks must share a file system. Loading runs no code that is in it
(``plain_data.py``).
"""

import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cs336sys.errors import UsageError
from cs336sys.parallel.fsdp.parameter import ShardedParameter
from cs336sys.parallel.fsdp.plain_data import PlainLoadPlanner, PlainReader, load_old_plain, require_plain
from cs336sys.parallel.fsdp.wrapper import FSDP
from cs336sys.parallel.same_on_ranks import on_first_rank, same_on_every_rank


def save_checkpoint(
    path: str | os.PathLike, sharded: FSDP, optimizer: torch.optim.Optimizer | None = None, extra: Any = None
) -> None:
    """Write parameters, buffers and the optimizer's state to the folder ``path``. Every rank must call it.

    The folder is written under another name and renamed when it is complete. One that existed before is kept as
    ``<path>.previous``: at every moment one of the two is complete.

    Args:
        optimizer: one over ``sharded.parameters()``.
        extra: plain data, for example the step and a scheduler's state: tensors, numbers, strings, bools, None, and
            lists, tuples and dicts of these; the same on every rank.

    Raises:
        UsageError: the optimizer has other parameters, or a state that cannot be cut like its parameter; ``extra``, an
            option of the optimizer or a part of its state is not plain data (the message says which, and its type).
        OSError: on every rank; the checkpoint that existed before is still complete.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    with same_on_every_rank():
        require_plain("extra", extra)
        # In a list, because a tensor alone would be saved as such.
        state = _model_state(sharded) | {"extra": [extra]}
        if optimizer is not None:
            state |= _optimizer_state(sharded, optimizer)
    on_first_rank(lambda: _make_empty(partial))
    try:
        # Otherwise dictionaries and lists would be split into further keys, or have theirs turned into strings.
        whole = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.save(state, checkpoint_id=str(partial), planner=whole)
    except dcp.api.CheckpointException as error:
        raise OSError(f"checkpoint {path} could not be written: {error}") from error
    on_first_rank(lambda: _replace(path, partial))


def load_checkpoint(path: str | os.PathLike, sharded: FSDP, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load parameters, buffers and the optimizer's state that any number of ranks saved. Every rank must call it.

    Args:
        optimizer: one over ``sharded.parameters()``, with the groups it was saved with; it need not have made a step.

    Returns:
        what was saved as ``extra``; tensors in it are on the CPU.

    Raises:
        UsageError: on every rank, before anything is changed: there is no complete checkpoint (the message says what is
            missing, and whether there is a previous one), it is that of another model or optimizer (the message
            gives names and shapes), or something in it could run code.
    """
    path = Path(path)
    on_first_rank(lambda: _check_whole(path))
    reader = PlainReader(path)
    saved = reader.read_metadata()
    state = _model_state(sharded)
    _check_same_model(state, saved, path)
    objects = _load_objects(reader, saved, path, with_optimizer=optimizer is not None)
    if optimizer is not None:
        _check_same_groups(objects.get("optimizer_groups"), sharded, optimizer, path)
        state |= _room_for_optimizer_state(sharded, saved)
    dcp.load(state, storage_reader=reader, planner=PlainLoadPlanner())
    if optimizer is not None:
        _set_optimizer_state(sharded, optimizer, state | objects, objects["optimizer_groups"])
    return objects["extra"]


def _load_objects(reader: PlainReader, saved: Metadata, path: Path, *, with_optimizer: bool) -> dict[str, Any]:
    """What is no tensor, by key.

    Raises:
        UsageError: on every rank, if it is not plain data.
    """
    objects: dict[str, Any] = {
        key: None
        for key, entry in saved.state_dict_metadata.items()
        if isinstance(entry, BytesStorageMetadata) and (with_optimizer or not key.startswith("optimizer"))
    }
    try:
        dcp.load(objects, storage_reader=reader, planner=PlainLoadPlanner())
    except dcp.api.CheckpointException as error:
        refusals = [raised for raised, _ in error.failures.values() if isinstance(raised, UsageError)]
        if refusals:
            raise UsageError(f"checkpoint {path}: {refusals[0]}") from error
        raise
    if "extra" not in objects:
        raise UsageError(f"checkpoint {path} has no extra: choose one that save_checkpoint wrote")
    for key in ("extra", "optimizer_groups"):
        if isinstance(objects.get(key), bytes):
            objects[key] = load_old_plain(f"{key} of checkpoint {path}", objects[key])
        elif key == "extra":
            (objects[key],) = objects[key]
    return objects


def _model_state(sharded: FSDP) -> dict[str, Any]:
    """Parameters and buffers by key; sharded ones as DTensors over this rank's memory."""
    own = sharded.sharded_parameters
    tied = {name for parameter in own.values() for name in parameter.names[1:]}
    return {
        f"model/{name}": _as_dtensor(own[name], own[name].shard.detach()) if name in own else value
        for name, value in sharded.state_dict().items()
        if isinstance(value, Tensor) and name not in tied
    }


def _as_dtensor(parameter: ShardedParameter, own: Tensor) -> DTensor:
    mesh = init_device_mesh(own.device.type, (dist.get_world_size(),))
    strides = torch.empty(parameter.shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=strides)


def _names(sharded: FSDP) -> dict[Tensor, str]:
    slices: dict[Tensor, str] = {parameter.shard: name for name, parameter in sharded.sharded_parameters.items()}
    return slices | {parameter: name for name, parameter in sharded.replicated_parameters.items()}


def _optimizer_groups(sharded: FSDP, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups with names in place of parameters."""
    names = _names(sharded)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the FSDP module has not: "
                    "build it over parameters() of the FSDP module"
                )
    return [group | {"params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups]


def _optimizer_state(sharded: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = _optimizer_groups(sharded, optimizer)
    require_plain("optimizer_groups", groups)
    state: dict[str, Any] = {"optimizer_groups": groups}
    names = _names(sharded)
    for parameter, values in optimizer.state.items():
        name = names[parameter]
        for key, value in values.items():
            if name in sharded.sharded_parameters and isinstance(value, Tensor) and value.dim() > 0:
                if value.shape != parameter.shape:
                    raise UsageError(
                        f"{key} of {name} is {tuple(value.shape)} where the slice is {tuple(parameter.shape)}: "
                        "only state of the slice's shape can be shared out to other ranks"
                    )
                value = _as_dtensor(sharded.sharded_parameters[name], value)
            else:
                require_plain(f"{key} of {name}", value)
            state[f"optimizer/{key}/{name}"] = value
    return state


def _room_for_optimizer_state(sharded: FSDP, saved: Metadata) -> dict[str, Any]:
    room: dict[str, Any] = {}
    for saved_key, entry in saved.state_dict_metadata.items():
        if not saved_key.startswith("optimizer/") or not isinstance(entry, TensorStorageMetadata):
            continue
        _, _, name = saved_key.split("/", 2)
        dtype = entry.properties.dtype
        if name in sharded.sharded_parameters and len(entry.size) > 0:
            parameter = sharded.sharded_parameters[name]
            own = torch.empty_like(parameter.shard, dtype=dtype, requires_grad=False)
            room[saved_key] = _as_dtensor(parameter, own)
        else:
            room[saved_key] = torch.empty(entry.size, dtype=dtype)
    return room


def _set_optimizer_state(
    sharded: FSDP, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], groups: list[dict[str, Any]]
) -> None:
    indices = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    by_index: dict[int, dict[str, Any]] = {}
    for saved_key, value in state.items():
        if saved_key.startswith("optimizer/"):
            _, key, name = saved_key.split("/", 2)
            own = value.to_local() if isinstance(value, DTensor) else value
            by_index.setdefault(indices[name], {})[key] = own
    numbered = [
        {key: _on_device_of(current.get(key), value) for key, value in group.items()}
        | {"params": [indices[name] for name in group["params"]]}
        for group, current in zip(groups, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": by_index, "param_groups": numbered})


def _on_device_of(current: Any, value: Any) -> Any:
    """An option that was loaded, where the optimizer has it: a learning rate may be a tensor on a GPU."""
    return value.to(current.device) if isinstance(current, Tensor) and isinstance(value, Tensor) else value


def _check_same_groups(
    groups: list[dict[str, Any]] | None, sharded: FSDP, optimizer: torch.optim.Optimizer, path: Path
) -> None:
    if groups is None:
        raise UsageError(f"checkpoint {path} has no optimizer: load it without one")
    there = [group["params"] for group in groups]
    here = [group["params"] for group in _optimizer_groups(sharded, optimizer)]
    if there != here:
        different = sorted({name for group in there for name in group} ^ {name for group in here for name in group})
        raise UsageError(
            f"checkpoint {path} has an optimizer with groups of {[len(group) for group in there]} parameters, this one "
            f"has {[len(group) for group in here]}; in one only: {', '.join(different) or 'none, but their order'}"
        )


def _check_same_model(state: Mapping[str, Any], saved: Metadata, path: Path) -> None:
    here = {key: tuple(tensor.shape) for key, tensor in state.items()}
    there = {
        key: tuple(entry.size)
        for key, entry in saved.state_dict_metadata.items()
        if key.startswith("model/") and isinstance(entry, TensorStorageMetadata)
    }
    differences = [
        f"{key.removeprefix('model/')} is {there.get(key, 'missing')} there and {here.get(key, 'missing')} here"
        for key in (*here, *(key for key in there if key not in here))
        if there.get(key) != here.get(key)
    ]
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UsageError(f"checkpoint {path} is of another model: {'; '.join(differences[:3])}{more}")


def _make_empty(partial: Path) -> None:
    # A run that was killed while it saved may have left one.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _replace(path: Path, partial: Path) -> None:
    if path.exists():
        shutil.rmtree(_previous(path), ignore_errors=True)
        path.rename(_previous(path))
    partial.rename(path)


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _check_whole(path: Path) -> None:
    instead = f"; the one before it is {_previous(path)}" if _previous(path).is_dir() else ""
    if not path.is_dir():
        raise UsageError(f"there is no checkpoint {path}{instead}")
    try:
        saved = PlainReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"checkpoint {path} is not whole: its .metadata cannot be read ({error}){instead}") from error
    ends: dict[str, int] = {}
    for entry in saved.storage_data.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in ends.items():
        size = (path / name).stat().st_size if (path / name).exists() else 0
        if size < end:
            raise UsageError(f"checkpoint {path} is not whole: {name} has {size} of {end} bytes{instead}")
