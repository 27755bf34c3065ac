"""Checkpoints of models whose layers ranks share, alone or on a mesh, which any other mesh or one process can read.

A checkpoint is one file of ``torch.save`` with whole tensors: ``model`` (names to parameters), ``optimizer`` (names to
the optimizer's state of a parameter), ``groups`` (the optimizer's options, with names in place of parameters) and
``extra``. Tensors are gathered one after the other, and put together in the host's memory of the first rank, which must
have room for all of them. Loading maps the file: a rank reads the parts that it holds, and runs no code that is in it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.errors import UsageError
from cs336sys.parallel.fsdp.parameter import ShardedParameter
from cs336sys.parallel.fsdp.wrapper import FSDP
from cs336sys.parallel.same_on_ranks import on_first_rank, same_on_every_rank
from cs336sys.parallel.tensor_parallel.weights import part_of, whole_tensor
from cs336sys.parallel.tensor_parallel.wrapper import TensorParallel


def save_checkpoint(
    path: str | os.PathLike,
    shared: TensorParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    sharded: FSDP | None = None,
    extra: Any = None,
) -> None:
    """Write whole parameters and the optimizer's state to the file ``path``. All ranks of all groups call it.

    The file is written under another name and renamed when it is complete.

    Args:
        optimizer: one over the parameters of ``shared``, or of ``sharded``.
        sharded: the FSDP module around ``shared.module``, if there is one.
        extra: plain data, for example the step: tensors, numbers, strings, and lists and dicts of these.

    Raises:
        UsageError: on every rank: the optimizer has other parameters, or a state that is not cut like its parameter.
        OSError: on every rank, if the file cannot be written.
    """
    held = _held(shared, sharded)
    with same_on_every_rank():
        groups = [] if optimizer is None else _groups(optimizer, held)
    is_first = dist.get_rank() == 0
    saved: dict[str, Any] = {"model": {}, "optimizer": {}, "groups": groups, "extra": extra}
    for name, parameter, value, key in _values(held, optimizer):
        whole = _whole(value, parameter, name, shared, sharded)
        if is_first:
            whole = whole.cpu() if isinstance(whole, Tensor) else whole
            if key is None:
                saved["model"][name] = whole
            else:
                saved["optimizer"].setdefault(name, {})[key] = whole
    on_first_rank(lambda: _write(Path(path), saved))


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
        UsageError: there is no such file, or it is of another model or optimizer; nothing is changed.
    """
    with same_on_every_rank():
        if not Path(path).is_file():
            raise UsageError(f"there is no checkpoint {path}")
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        held = _held(shared, sharded)
        there = {name: tuple(tensor.shape) for name, tensor in saved["model"].items()}
        here = {name: tuple(shared.shapes[name]) for name in held}
        if there != here:
            different = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
            raise UsageError(f"checkpoint {path} is of another model: {', '.join(different[:3])} differ")
        if optimizer is not None:
            names = [group["params"] for group in _groups(optimizer, held)]
            if [group["params"] for group in saved["groups"]] != names:
                raise UsageError(f"checkpoint {path} has an optimizer with other groups of parameters, or none")
    for name, parameter in held.items():
        with torch.no_grad():
            parameter.copy_(_part(saved["model"][name], name, shared, sharded))
    if optimizer is not None:
        numbers = {name: number for number, name in enumerate(name for names in names for name in names)}
        state = {
            numbers[name]: {
                key: _part(value, name, shared, sharded) if _is_cut(value, shared.shapes[name]) else value
                for key, value in values.items()
            }
            for name, values in saved["optimizer"].items()
        }
        groups = [group | {"params": [numbers[name] for name in group["params"]]} for group in saved["groups"]]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    return saved["extra"]


def _held(shared: TensorParallel, sharded: FSDP | None) -> dict[str, nn.Parameter]:
    """What this rank's optimizer updates, by first names: parts, or slices of parts."""
    if sharded is None:
        return dict(shared.module.named_parameters())
    slices = {name: parameter.shard for name, parameter in sharded.sharded_parameters.items()}
    return slices | sharded.replicated_parameters


def _groups(optimizer: torch.optim.Optimizer, held: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    names = {parameter: name for name, parameter in held.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model has not: build it "
                    "over the parameters of the wrapped model"
                )
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape:
                    raise UsageError(
                        f"{key} of {names[parameter]} is {tuple(value.shape)} where the parameter's part is "
                        f"{tuple(parameter.shape)}: only state of that shape can be put together"
                    )
    return [group | {"params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]


def _values(
    held: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, nn.Parameter, Any, str | None]]:
    """Parameters, and what the optimizer keeps of each: in the same order on every rank."""
    for name, parameter in held.items():
        yield name, parameter, parameter.detach(), None
        for key, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
            yield name, parameter, value, key


def _is_cut(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.dim() > 0


def _whole(value: Any, parameter: nn.Parameter, name: str, shared: TensorParallel, sharded: FSDP | None) -> Any:
    if not _is_cut(value, parameter.shape):
        return value
    slices = _slices(name, sharded)
    part = value if slices is None else slices.gather_whole(value)
    return whole_tensor(part, name, shared.shapes[name], shared.group)


def _part(whole: Tensor, name: str, shared: TensorParallel, sharded: FSDP | None) -> Tensor:
    part = part_of(whole, name, shared.group.rank(), shared.group.size())
    slices = _slices(name, sharded)
    return part if slices is None else part[slices.rows.start : slices.rows.stop].clone()


def _slices(name: str, sharded: FSDP | None) -> ShardedParameter | None:
    return None if sharded is None else sharded.sharded_parameters.get(name)


def _write(path: Path, saved: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    torch.save(saved, partial)
    partial.replace(path)
