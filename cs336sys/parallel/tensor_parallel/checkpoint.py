"""Checkpoints of models whose layers ranks share, alone or on a mesh, which any other mesh or one process can read.

A checkpoint is one file of ``torch.save`` with whole tensors: ``model`` (a state dict of the plain model),
``extra_states`` (what its modules' ``get_extra_state()`` returned), ``optimizer`` (names to the optimizer's state of a
parameter), ``groups`` (the optimizer's options, with names in place of parameters) and ``extra``. Tensors are gathered
one after the other, and put together in the host's memory of the first rank, which must have room for all of them.
Loading maps the file: a rank reads the parts that it holds, and runs no code that is in it.
"""

import functools
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import cut_dimension
from cs336sys.errors import UsageError
from cs336sys.parallel import checkpoint_state
from cs336sys.parallel.checkpoint_state import is_elementwise
from cs336sys.parallel.fsdp.parameter import ShardedParameter
from cs336sys.parallel.fsdp.wrapper import FSDP
from cs336sys.parallel.rank_consistency import on_first_rank, same_on_every_rank, ties_of
from cs336sys.parallel.safe_unpickle import require_plain
from cs336sys.parallel.tensor_parallel.weights import part_of, shape_of_part, whole_tensor
from cs336sys.parallel.tensor_parallel.wrapper import TensorParallel


def save_checkpoint(
    path: str | os.PathLike,
    shared: TensorParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    sharded: FSDP | None = None,
    extra: Any = None,
) -> None:
    """Write the whole model and the optimizer's state to the file ``path``. All ranks of all groups call it.

    The file is written under another name and renamed when it is complete. Of buffers, extra state and ``extra``, those
    of the first rank are saved.

    Args:
        optimizer: one over the parameters of ``shared``, or of ``sharded``.
        sharded: the FSDP module around ``shared.module``, if there is one.
        extra: plain data, for example the step: tensors, numbers, strings, and lists and dicts of these.

    Raises:
        UsageError: on every rank: the module holds other parameters than it was wrapped with; the optimizer has other
            parameters, or a state that is not cut like its parameter; ``extra``, an option of the optimizer or a part
            of its state is not plain data.
        OSError: on every rank, if the file cannot be written.
    """
    with same_on_every_rank() as lines:
        require_plain("extra", extra)
        updated = _updated_tensors(shared, sharded)
        groups = [] if optimizer is None else _groups_by_name(optimizer, updated)
        require_plain("groups", groups)
        state_of = {} if optimizer is None else optimizer.state
        states = {name: state_of.get(tensor, {}) for name, (tensor, _) in updated.items()}
        extra_states = {name: part.get_extra_state() for name, part in _with_extra_state(shared.module).items()}
        require_plain("extra state", extra_states)
        require_plain("the optimizer's state", states)
        # Tensors are gathered one after the other, so every rank must have the same ones in the same order.
        lines += [f"{key} of {name}" for name in updated for key in ("parameter", *states.get(name, ()))]
    saved: dict[str, Any] = {"model": {}, "optimizer": {}, "groups": groups, "extra": extra}
    is_first = dist.get_rank() == 0
    for name, (tensor, slices) in updated.items():
        whole = _whole_tensor(tensor.detach(), name, slices, shared)
        state = {
            key: _whole_tensor(value, name, slices, shared) if is_elementwise(key, value) else value
            for key, value in states.get(name, {}).items()
        }
        if is_first:
            saved["model"][name] = whole.cpu()
            state = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
            saved["optimizer"] |= {name: state} if state else {}
    if is_first:
        ties = ties_of(shared.module.named_parameters(remove_duplicate=False))
        saved["model"] |= {name: saved["model"][first] for name, first in ties.items()}
        saved["model"] |= {name: buffer.detach().cpu() for name, buffer in _saved_buffers(shared.module).items()}
    on_first_rank(lambda: _write(Path(path), saved | {"extra_states": extra_states}))


def load_checkpoint(
    path: str | os.PathLike,
    shared: TensorParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    sharded: FSDP | None = None,
) -> Any:
    """Load what :func:`save_checkpoint` wrote on whatever mesh. Arguments as there; all ranks call it.

    Returns:
        what was saved as ``extra``.

    Raises:
        UsageError: the file is missing, cannot be read, or is of another model or optimizer; nothing is changed.
    """
    with same_on_every_rank():
        saved = _read_parts(Path(path))
        updated = _updated_tensors(shared, sharded)
        buffers = _saved_buffers(shared.module)
        ties = ties_of(shared.module.named_parameters(remove_duplicate=False))  # ``updated`` has first names alone.
        saved_shapes: Any = {name: tuple(tensor.shape) for name, tensor in saved["model"].items() if name not in ties}
        shapes: Any = {name: tuple(shared.shapes[name]) for name in updated}
        shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        extra_states = _with_extra_state(shared.module)  # It has no shape: both sides must have it, whatever it is.
        saved_shapes |= {f"extra state of {name}": "data" for name in saved["extra_states"]}
        shapes |= {f"extra state of {name}": "data" for name in extra_states}
        if different := checkpoint_state.differences(saved_shapes, shapes):
            raise UsageError(f"checkpoint {path} belongs to another model: {different}")
        if optimizer is not None:
            current = functools.partial(_groups_by_name, optimizer, updated)  # Called only if the file has groups.
            checkpoint_state.require_same_groups(saved["groups"], current, Path(path))
    with torch.no_grad():
        for name, (target, slices) in updated.items():
            target.copy_(_part(saved["model"][name], name, slices, shared))
        for name, buffer in buffers.items():
            buffer.copy_(saved["model"][name])
    for name, part in extra_states.items():
        part.set_extra_state(saved["extra_states"][name])
    if optimizer is not None:
        state = {}
        for name, values in saved["optimizer"].items():
            _, slices = updated[name]
            state[name] = {
                key: _part(value, name, slices, shared) if is_elementwise(key, value) else value
                for key, value in values.items()
            }
        checkpoint_state.load_named_state(optimizer, state, saved["groups"])
    return saved["extra"]


def _updated_tensors(shared: TensorParallel, sharded: FSDP | None) -> checkpoint_state.Entries:
    """Return what this rank's optimizer updates, by first names, each with the record of how FSDP cuts it."""
    if sharded is None:
        updated: checkpoint_state.Entries = {name: (tensor, None) for name, tensor in shared.module.named_parameters()}
    else:
        updated = checkpoint_state.by_first_name(sharded.held_parameters())
    rank, size = shared.group.rank(), shared.group.size()
    for name, (tensor, slices) in updated.items():
        expected = shape_of_part(shared.shapes[name], name, rank, size) if name in shared.shapes else []
        shape = tensor.shape if slices is None else slices.shape
        if list(shape) != expected:  # Also if nothing of this name was cut: then [] is expected.
            raise UsageError(
                f"{name} is {tuple(shape)}, and this rank's part of it was {tuple(expected)}: give sharded= if an FSDP "
                "module is around it; a module whose parameters were changed must be wrapped anew"
            )
    return updated


def _groups_by_name(optimizer: torch.optim.Optimizer, updated: checkpoint_state.Entries) -> list[dict[str, Any]]:
    slices = {name for name, (_, sharded) in updated.items() if sharded is not None or cut_dimension(name) is not None}
    return checkpoint_state.named_groups(optimizer, updated, slices)


def _saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict has."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def _with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules, by name, whose classes define get_extra_state()."""
    default = nn.Module.get_extra_state
    return {name: part for name, part in module.named_modules() if type(part).get_extra_state is not default}


def _whole_tensor(tensor: Tensor, name: str, slices: ShardedParameter | None, shared: TensorParallel) -> Tensor:
    """Gather a parameter or its state: over FSDP's ranks this rank's part, and over tensor parallel ranks the whole."""
    part = tensor if slices is None else slices.gather_whole(tensor)
    return whole_tensor(part, name, shared.shapes[name], shared.group)


def _part(whole: Tensor, name: str, slices: ShardedParameter | None, shared: TensorParallel) -> Tensor:
    """Return this rank's part of a tensor of the file, in memory of its own."""
    part = part_of(whole, name, shared.group.rank(), shared.group.size())
    return (part if slices is None else part[slices.rows.start : slices.rows.stop]).clone()


def _write(path: Path, saved: dict[str, Any]) -> None:
    """Write the file under another name, and rename it when it is complete: an earlier one stays whole until then."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        torch.save(saved, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        if partial.is_file():  # torch raises RuntimeError, on a full disk too.
            partial.unlink()
        raise OSError(f"checkpoint {path} could not be written: {error}") from error


def _read_parts(path: Path) -> dict[str, Any]:
    """Return the parts of a checkpoint, see the module's docstring; its tensors are mapped and not read yet."""
    if not path.is_file():
        raise UsageError(f"there is no checkpoint {path}")
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"checkpoint {path} is damaged, or more than plain data: {reason}") from error
    if not isinstance(saved, dict) or not {"model", "optimizer", "groups", "extra"} <= saved.keys():
        raise UsageError(f"{path} is no checkpoint of tensor parallel training: choose one that save_checkpoint wrote")
    return {"extra_states": {}} | saved  # Checkpoints of earlier versions have no extra_states.
