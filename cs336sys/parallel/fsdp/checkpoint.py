"""Checkpoints of FSDP, written by all ranks at once and loaded by any number of ranks.

A checkpoint is a folder of ``torch.distributed.checkpoint``: one file for each rank that saved, with its slices, and
``.metadata``, which says what is where. Its keys are ``model/<name>`` for tensors of the module's state dict and
``data/<name>`` for what else is in it (extra state), ``versions`` of the modules, ``optimizer/<state>/<name>``,
``optimizer_groups`` and ``extra``. All ranks must share a file system. Loading runs no code that is in it
(``parallel/safe_unpickle.py``).

What is saved is what the module holds then, with the names that it has then. State-dict hooks of its parts are called,
as in ``state_dict()`` and ``load_state_dict()``; what they make of slices is refused.
"""

import functools
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from cs336sys.errors import UsageError
from cs336sys.parallel import checkpoint_state
from cs336sys.parallel.checkpoint_state import as_dtensor, is_elementwise
from cs336sys.parallel.fsdp.parameter import ShardedParameter
from cs336sys.parallel.fsdp.wrapper import FSDP
from cs336sys.parallel.rank_consistency import on_first_rank, same_on_every_rank
from cs336sys.parallel.safe_unpickle import PlainLoadPlanner, PlainReader, require_plain


def save_checkpoint(
    path: str | os.PathLike, sharded: FSDP, optimizer: torch.optim.Optimizer | None = None, extra: Any = None
) -> None:
    """Write the module's state dict and the optimizer's state to the folder ``path``. Every rank of its group calls it.

    The folder is written under another name and renamed when it is complete. One that existed before is kept as
    ``<path>.previous``: at every moment one of the two is complete.

    Of buffers, extra state, replicated parameters and ``extra``, those of the group's rank 0 are saved, and loaded on
    every rank: running statistics of batch norm, for example, which differ between ranks.

    Args:
        optimizer: one over ``sharded.parameters()``.
        extra: plain data, for example the step and a scheduler's state: tensors, numbers, strings, bools, None, and
            lists, tuples and dicts of these.

    Raises:
        UsageError: on every rank: the module has parameters that were added after it was wrapped; a hook has made a
            tensor of what may be a slice; slices are those of tensor parallel parts; another group has saved to this
            path, or something else is there; the optimizer has other parameters, or a state that cannot be cut like its
            parameter; ``extra``, an option of the optimizer or a part of its state is not plain data (the message says
            which, and its type).
        OSError: on every rank; the checkpoint that existed before is still complete.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    with same_on_every_rank(sharded.group) as lines:  # Ranks must save the same keys.
        require_plain("extra", extra)
        state = _model_state(sharded) | {"extra": [extra]}  # In a list, because a tensor alone would be saved as such.
        if optimizer is not None:
            state |= _sharded_optimizer_state(sharded, optimizer)
        lines += [f"{key} {tuple(value.shape) if isinstance(value, DTensor) else ''}" for key, value in state.items()]
    on_first_rank(lambda: _begin(path, partial, sharded.group), sharded.group)
    if sharded.group.rank() > 0:
        # torch would take what ranks hold whole from any of them, and it may differ: buffers, for example.
        state = {key: value for key, value in state.items() if isinstance(value, DTensor)}
    try:
        # Not flattened: dictionaries and lists would be split into further keys, and keys be turned into strings.
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.save(state, checkpoint_id=str(partial), planner=planner, process_group=sharded.group)
    except dcp.api.CheckpointException as error:  # On every rank, whichever failed.
        on_first_rank(lambda: shutil.rmtree(partial, ignore_errors=True), sharded.group)
        raise OSError(f"checkpoint {path} could not be written: {error}") from error
    on_first_rank(lambda: _replace(path, partial), sharded.group)


def load_checkpoint(path: str | os.PathLike, sharded: FSDP, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load the module's and the optimizer's state that any number of ranks saved. Every rank of the group calls it.

    Call it between two steps. It needs memory for the slices once more.

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
    on_first_rank(lambda: _check_whole(path), sharded.group)
    reader = PlainReader(path)
    saved = reader.read_metadata()
    with same_on_every_rank(sharded.group):
        current = _model_state(sharded)
        if different := checkpoint_state.differences(_shapes_of(saved.state_dict_metadata), _shapes_of(current)):
            raise UsageError(f"checkpoint {path} belongs to another model: {different}")
    objects = _load_objects(reader, saved, path, sharded.group, with_optimizer=optimizer is not None)
    with same_on_every_rank(sharded.group):
        if optimizer is not None:
            groups = objects.get("optimizer_groups", [])  # Without any, _named_groups() is not called.
            checkpoint_state.require_same_groups(groups, functools.partial(_named_groups, sharded, optimizer), path)
        room = _room_for(sharded, current, saved, with_optimizer=optimizer is not None)
    dcp.load(room, storage_reader=reader, planner=PlainLoadPlanner(), process_group=sharded.group)
    with same_on_every_rank(sharded.group):
        _set_model_state(sharded, room | objects, path)
        if optimizer is not None:
            state: dict[str, dict[str, Any]] = {}
            for saved_key, value in (room | objects).items():
                if saved_key.startswith("optimizer/"):
                    _, key, name = saved_key.split("/", 2)
                    state.setdefault(name, {})[key] = value.to_local() if isinstance(value, DTensor) else value
            checkpoint_state.load_named_state(optimizer, state, groups)
    return objects["extra"]


def _load_objects(
    reader: PlainReader, saved: Metadata, path: Path, group: dist.ProcessGroup, *, with_optimizer: bool
) -> dict[str, Any]:
    """Load all entries that are no tensors, by key: without the optimizer neither its groups nor its state."""
    objects: dict[str, Any] = {
        key: None
        for key, entry in saved.state_dict_metadata.items()
        if isinstance(entry, BytesStorageMetadata) and (with_optimizer or not key.startswith("optimizer"))
    }
    try:
        dcp.load(objects, storage_reader=reader, planner=PlainLoadPlanner(), process_group=group)
    except dcp.api.CheckpointException as error:
        refusals = [raised for raised, _ in error.failures.values() if isinstance(raised, UsageError)]
        if refusals:
            raise UsageError(f"checkpoint {path}: {refusals[0]}") from error
        raise
    # It was saved in a list, because torch saves a tensor by itself as another kind of entry.
    extra = objects.get("extra")
    if not (isinstance(extra, list) and len(extra) == 1):
        raise UsageError(f"checkpoint {path} has no extra: choose one that save_checkpoint wrote")
    return objects | {"extra": extra[0]}


def _model_state(sharded: FSDP) -> dict[str, Any]:
    """Return the module's state dict by keys of the checkpoint, with slices as DTensors over this rank's memory."""
    pairs = sharded.held_parameters().values()
    slices = {_memory_of(shard): parameter for shard, parameter in pairs if parameter is not None}
    # Rows of another wrapper's part are no simple slice of a whole parameter, which a DTensor must be.
    if any(parameter.is_part_of_more for parameter in slices.values()):
        raise UsageError(
            "this FSDP module has slices of tensor parallel parts: use save_checkpoint() and load_checkpoint() of "
            "cs336sys.parallel.tensor_parallel.checkpoint"
        )
    module_memory = {_memory_of(tensor) for tensor in (*sharded.module.parameters(), *sharded.module.buffers())}
    entries = _state_dict(sharded)
    state: dict[str, Any] = {
        "versions": {name: entry.get("version") for name, entry in getattr(entries, "_metadata", {}).items()}
    }
    seen: set[ShardedParameter] = set()
    for key, value in entries.items():
        if not isinstance(value, Tensor) or key.endswith("_extra_state"):
            require_plain(key, value)
            state[f"data/{key}"] = [value]  # In a list, because a tensor alone would be saved as such.
            continue
        memory = _memory_of(value)
        if memory not in slices:
            # A hook has made this tensor: if of slices, it could not be saved.
            if memory not in module_memory:
                _require_made_of_no_slice(sharded, key)
            state[f"model/{key}"] = value.detach()
        elif (parameter := slices[memory]) not in seen:  # Cut along dimension 0.
            seen.add(parameter)  # A tied weight is saved under its first name.
            state[f"model/{key}"] = as_dtensor(parameter.shard.detach(), parameter.shape, 0, sharded.group)
    return state


def _state_dict(sharded: FSDP) -> Any:
    # With the parameters themselves, so that hooks that pass them on or rename them show which they are.
    with torch.no_grad():
        return sharded.module.state_dict(keep_vars=True)


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Identify the memory of a tensor: the same for a parameter and what ``detach()`` makes of it, empty or not."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _require_made_of_no_slice(sharded: FSDP, key: str) -> None:
    """Refuse an entry of the state dict that a hook may have made of slices: its module holds some."""
    modules = dict(sharded.module.named_modules())
    owner = key
    while owner not in modules:  # At last it is "", the whole module.
        owner = owner.rpartition(".")[0]
    inside = set(modules[owner].parameters())
    if any(parameter.shard in inside for unit in sharded.units for parameter in unit.parameters):
        raise UsageError(
            f"{key} of the state dict is no parameter or buffer of {type(modules[owner]).__name__}, but made by a hook "
            "or _save_to_state_dict(), maybe of this rank's slices: let it pass on what the module holds, or return "
            "the tensor from get_extra_state()"
        )


def _set_model_state(sharded: FSDP, loaded: Mapping[str, Any], path: Path) -> None:
    """Let the module load what was read, as it loads any state dict, so that its hooks are called."""
    entries = _state_dict(sharded)
    first_keys: dict[Any, str] = {}
    state = OrderedDict[str, Any]()
    for key, value in entries.items():
        if f"data/{key}" in loaded:
            (state[key],) = loaded[f"data/{key}"]  # Saved in a list, see _model_state().
        else:
            # A tied weight was saved under its first name alone.
            first = first_keys.setdefault(_memory_of(value), key)
            tensor = loaded[f"model/{key}" if f"model/{key}" in loaded else f"model/{first}"]
            state[key] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    versions = loaded.get("versions", {})
    state._metadata = {  # type: ignore[attr-defined]
        name: entry | ({"version": versions[name]} if name in versions else {})
        for name, entry in getattr(entries, "_metadata", {}).items()
    }
    # A hook may leave out on purpose what it does not load either, as the frozen weights under an adapter.
    result = sharded.module.load_state_dict(state, strict=False)
    missed = [name for name in result.missing_keys if name in state]
    if result.unexpected_keys or missed:
        raise UsageError(
            f"checkpoint {path}: the module does not load {', '.join((*result.unexpected_keys, *missed)[:3])}, which "
            "its own state dict has: give it a load_state_dict hook for what its state_dict hook changes"
        )


def _named_groups(sharded: FSDP, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    entries = checkpoint_state.by_first_name(sharded.held_parameters())
    slices = {name for name, (_, cut) in entries.items() if cut is not None}
    return checkpoint_state.named_groups(optimizer, entries, slices)


def _sharded_optimizer_state(sharded: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return groups and state of the optimizer by keys of the checkpoint; slices of state as DTensors."""
    groups = _named_groups(sharded, optimizer)
    require_plain("optimizer_groups", groups)
    state: dict[str, Any] = {"optimizer_groups": groups}
    for name, (shard, parameter) in checkpoint_state.by_first_name(sharded.held_parameters()).items():
        for key, value in optimizer.state.get(shard, {}).items():
            if parameter is not None and is_elementwise(key, value):
                value = as_dtensor(value, parameter.shape, dimension=0, group=sharded.group)
            else:
                require_plain(f"{key} of {name}", value)
            state[f"optimizer/{key}/{name}"] = value
    return state


def _room_for(sharded: FSDP, current: Mapping[str, Any], saved: Metadata, *, with_optimizer: bool) -> dict[str, Any]:
    """Return new tensors, by key, into which those of the checkpoint are read before anything is changed."""
    room: dict[str, Any] = {}
    parameters = sharded.held_parameters()
    for saved_key, entry in saved.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        dtype = entry.properties.dtype
        if saved_key.startswith("model/") and saved_key in current:
            room[saved_key] = torch.empty_like(current[saved_key], dtype=dtype)
        elif with_optimizer and saved_key.startswith("optimizer/"):
            _, key, name = saved_key.split("/", 2)
            shard, parameter = parameters[name]  # No parameter for one that is not cut: then the shard is all of it.
            if parameter is not None and is_elementwise(key, torch.empty(entry.size, device="meta")):
                new = torch.empty_like(shard, dtype=dtype)
                room[saved_key] = as_dtensor(new, parameter.shape, dimension=0, group=sharded.group)
            else:
                # On the CPU: the optimizer's load_state_dict() moves it.
                room[saved_key] = torch.empty(entry.size, dtype=dtype)
    return room


def _shapes_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes of a model's tensors, or of their entries in the metadata, by name; "data" for other data."""
    shapes: dict[str, Any] = {}
    for key, entry in entries.items():
        kind, _, name = key.partition("/")
        if kind == "data":
            shapes[name] = kind
        elif kind == "model" and isinstance(entry, Tensor | TensorStorageMetadata):
            shapes[name] = tuple(entry.shape if isinstance(entry, Tensor) else entry.size)
    return shapes


def _begin(path: Path, partial: Path, group: dist.ProcessGroup) -> None:
    """Claim the path for this group, and make an empty partial folder."""
    # The next two saves would rename it, and then remove it.
    if path.exists() and not (path / ".metadata").exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path} is there and is no checkpoint: choose another path, or remove it")
    # Another group of this run, with another state, would otherwise replace this checkpoint, and nobody would notice.
    ranks = str(dist.get_process_group_ranks(group))
    # compare_set() sets the value where there is none yet, and returns the one that is there afterwards.
    holders = _get_default_store().compare_set(f"cs336sys checkpoint {path.absolute()}", "", ranks).decode()
    if holders != ranks:
        raise UsageError(
            f"checkpoint {path} belongs to ranks {holders}, and ranks {ranks} have slices of their own: save on one "
            "group alone, or give each group a path of its own"
        )
    shutil.rmtree(partial, ignore_errors=True)  # A run that was killed while it saved may have left one.
    partial.mkdir(parents=True)


def _replace(path: Path, partial: Path) -> None:
    if path.exists():
        shutil.rmtree(_previous(path), ignore_errors=True)
        path.rename(_previous(path))
    partial.rename(path)


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _check_whole(path: Path) -> None:
    """Refuse a folder that is no checkpoint, or of which files are missing or cut short."""
    instead = f"; the one before it is {_previous(path)}" if _previous(path).is_dir() else ""
    if not path.is_dir():
        raise UsageError(f"there is no checkpoint {path}{instead}")
    try:
        saved = PlainReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"checkpoint {path} is not whole: its .metadata cannot be read ({error}){instead}") from error
    ends: dict[str, int] = {}  # For each file, the byte up to which entries are in it.
    for entry in saved.storage_data.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in ends.items():
        size = (path / name).stat().st_size if (path / name).exists() else 0
        if size < end:
            raise UsageError(f"checkpoint {path} is not whole: {name} has {size} of {end} bytes{instead}")
