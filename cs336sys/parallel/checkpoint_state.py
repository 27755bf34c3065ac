"""State dicts of wrappers, which are those of the wrapped module, and what checkpoints hold of an optimizer."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336sys.errors import UsageError
from cs336sys.parallel.gradient_slices import is_slice, whole_of
from cs336sys.parallel.rank_consistency import same_on_every_rank, ties_of

Groups = Sequence[Mapping[str, Any]]

# By name, the parameter that a module holds, and the record of how it is cut; None if it is whole.
Entries = Mapping[str, tuple[nn.Parameter, Any]]


def is_elementwise(key: str, value: Any) -> bool:
    """Return whether a state has an element for each of its parameter's. "step" never has, as in torch itself."""
    return isinstance(value, Tensor) and value.dim() > 0 and key != "step"


def by_first_name(entries: Entries) -> Entries:
    """Return the entries of tied parameters under their first names alone."""
    ties = ties_of((name, parameter) for name, (parameter, _) in entries.items())
    return {name: entry for name, entry in entries.items() if name not in ties}


def named_groups(optimizer: torch.optim.Optimizer, entries: Entries, slices: Container[str]) -> list[dict[str, Any]]:
    """Return the optimizer's groups with names in place of parameters.

    Args:
        entries: the parameters of the module as it is now, by their first names.
        slices: the names of those that are slices.

    Raises:
        UsageError: the optimizer has a parameter or a state of something that the module has not, or a state of
            a slice that is neither of its shape nor a single number.
    """
    names: dict[Tensor, str] = {parameter: name for name, (parameter, _) in entries.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the module lacks (by "
                    f"now): build it over parameters() of the wrapped module"
                )
    for member, values in optimizer.state.items():
        if member not in names:
            described = f"a tensor of shape {tuple(member.shape)}" if isinstance(member, Tensor) else repr(member)
            raise UsageError(
                f"the optimizer keeps state of {described}, which is no parameter of the module: remove it from "
                "optimizer.state, or save it as extra"
            )
        for key, value in values.items():
            if names[member] in slices and is_elementwise(key, value) and value.shape != member.shape:
                raise UsageError(
                    f"{key} of {names[member]} is {tuple(value.shape)} where the slice is "
                    f"{tuple(member.shape)}: only state of the slice's shape can be shared out to other ranks"
                )
    return [{**group, "params": [names[member] for member in group["params"]]} for group in optimizer.param_groups]


def require_same_groups(saved: Groups, current: Callable[[], Groups], path: Path) -> None:
    """Refuse a checkpoint whose optimizer has groups of other parameters than the optimizer that is to load it.

    Args:
        saved: the checkpoint's groups with names in place of parameters; empty if it was saved without an optimizer.
        current: calls :func:`named_groups`, which may refuse the optimizer: only done if the checkpoint has one.
    """
    if not saved:
        raise UsageError(f"checkpoint {path} has no optimizer: load it without one")
    saved_names, names = [group["params"] for group in saved], [group["params"] for group in current()]
    if saved_names != names:
        different = sorted(set().union(*saved_names) ^ set().union(*names))
        raise UsageError(
            f"checkpoint {path} has an optimizer with groups of {list(map(len, saved_names))} parameters, this one has "
            f"{list(map(len, names))}; in one only: {', '.join(different) or 'none, but their order'}"
        )


def load_named_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]], groups: Groups) -> None:
    """Load a state by names of parameters, and groups as :func:`named_groups` returned them.

    What was saved in fp32 of half-precision parameters stays so: ``Optimizer.load_state_dict`` alone would round it.
    """
    # Optimizer.load_state_dict knows parameters by their numbers, counted through all groups.
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    by_number = {numbers[name]: dict(values) for name, values in state.items()}
    numbered_groups = []
    for group, current in zip(groups, optimizer.param_groups, strict=True):
        numbered = {**group, "params": [numbers[name] for name in group["params"]]}
        for key, value in group.items():
            # A learning rate may be a tensor on a GPU, and was loaded to the CPU.
            if isinstance(value, Tensor) and isinstance(current.get(key), Tensor):
                numbered[key] = value.to(current[key].device)
        numbered_groups.append(numbered)
    optimizer.load_state_dict({"state": by_number, "param_groups": numbered_groups})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in by_number.items():
        loaded = optimizer.state.get(parameters[number], {})
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(loaded.get(key), Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return the first three entries of a saved model that differ from the module's, in words; empty if none does."""
    different = [
        f"{name} is {saved.get(name, 'missing')} there and {current.get(name, 'missing')} here"
        for name in dict.fromkeys((*current, *saved))
        if saved.get(name) != current.get(name)
    ]
    return "; ".join(different[:3]) + (f", and {len(different) - 3} more" if len(different) > 3 else "")


# What nn.Module.load_state_dict puts into the metadata of a module, for lack of an argument.
_ASSIGNS = "assign_to_params_buffers"


class StateDictOfWrapped(nn.Module):
    """A wrapper whose state dict is that of ``module``, also where the wrapper is a part of another module.

    State dicts are loaded with or without ``module.`` before the names: torch's wrappers, for example, write it.
    """

    module: nn.Module

    def _fqn_modifiers(self) -> NoReturn:
        # torch.distributed.checkpoint.state_dict calls this where a module has it, and knows names with "module." of
        # torch's wrappers alone: it would lack those of this one, and rename its optimizer's state.
        raise UsageError(
            f"torch.distributed.checkpoint.state_dict does not know {type(self).__name__}: give it the wrapped module, "
            "whose names these are, or save state_dict() of the wrapper"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's state dict, without a prefix."""
        state = self.module.state_dict(*args, **kwargs)
        # nn.Module's arguments are destination, prefix ("wrapper." within a module around this one) and keep_vars.
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        metadata = getattr(state, "_metadata", None)
        if prefix and metadata is not None:
            # The module around this one looks for values without "module.", but for metadata at "wrapper.module.part".
            wrapper = prefix.removesuffix(".")
            inner = {name: value for name, value in metadata.items() if f"{name}.".startswith(prefix)}
            metadata |= {f"{wrapper}.module{name.removeprefix(wrapper)}": value for name, value in inner.items()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the wrapped module, with or without ``module.`` before every name."""
        if self._has_prefix(state_dict, "module."):
            metadata = getattr(state_dict, "_metadata", None)
            state_dict = OrderedDict((key.removeprefix("module."), value) for key, value in state_dict.items())
            if metadata is not None:
                metadata = {name.removeprefix("module").removeprefix("."): entry for name, entry in metadata.items()}
                state_dict._metadata = metadata  # type: ignore[attr-defined]
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # nn.Module looks for the entries of a child under the child's name, here "module", which ours lack.
        keys = [key for key in state_dict if key.startswith(prefix)]
        if not self._has_prefix(keys, f"{prefix}module."):
            for key in keys:
                state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _has_prefix(self, keys: Any, prefix: str) -> bool:
        # Where the wrapped module has a child of this name, "module." is the child's.
        return not hasattr(self.module, "module") and all(key.startswith(prefix) for key in keys)


class StateDictOfSlices(StateDictOfWrapped):
    """A wrapper that has cut the parameters of ``module`` into slices for the ranks of ``group``."""

    group: dist.ProcessGroup

    def _fqn_modifiers(self) -> NoReturn:
        _refuse_gathering()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what ``state_dict()`` returned on the same rank of equally many ranks. Every rank must call it.

        Plain tensors do not say whose slices they are, and are loaded if the shapes fit.

        Raises:
            UsageError: on every rank: on some rank it holds another rank's slices; ``assign`` is True, which would
                replace the slices; the module computes, or holds other parameters than those that were wrapped.
        """
        with same_on_every_rank(self.group):
            self._require_slices()
            return super().load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        # The module around this one loads. The hooks of mark_share() would refuse, too, but only on the ranks that are
        # concerned: here every rank refuses. Metadata and DTensors say whose slices these are, plain tensors do not.
        with same_on_every_rank(self.group):
            self._require_slices()
            kind = type(self).__name__
            if kind in metadata:  # write() of mark_share() has put it there.
                require_share(metadata[kind], self.group)
            for key, value in state_dict.items():
                if key.startswith(prefix) and _is_dtensor(value):
                    require_share(_rank_of_slice(value), self.group)
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)

    def _require_slices(self) -> None:
        """Refuse a module that does not hold its slices now; a wrapper defines it that may hold something else."""


def mark_share(module: nn.Module, kind: str, group: dist.ProcessGroup) -> None:
    """Let state dicts of ``module`` and its parts say whose slices they hold, and refuse those of another rank.

    Slices leave as DTensors over this rank's memory, which ``torch.distributed.checkpoint`` saves and loads as parts of
    whole tensors. The metadata, which ``torch.save`` keeps, names the rank; a DTensor does in a plain dictionary, too.
    State dicts also refuse ``assign=True``, which would replace slices by other parameters.

    Args:
        kind: the class of the wrapper that has cut the parameters: a module may be cut by two, and has a mark of each.
        group: the ranks that hold slices.
    """
    share = {"rank": group.rank(), "ranks": group.size()}

    def write(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any]) -> None:
        """Name this rank in the metadata, and put DTensors in place of slices."""
        metadata[kind] = share
        for name, parameter in module._parameters.items():
            value = state_dict.get(prefix + name)
            # With keep_vars=True it is the parameter itself.
            if parameter is None or not is_slice(parameter) or value is None or value is parameter:
                continue
            # The hook of another wrapper, or a user's, has put something else in place of the slice.
            if _is_dtensor(value) or value.shape != parameter.shape:
                continue
            if (whole := whole_of(parameter)) is None:
                raise UsageError(
                    f"{prefix}{name} is cut as no DTensor can be, by two wrappers or into very few rows: use "
                    "save_checkpoint() of cs336sys.parallel.tensor_parallel.checkpoint, or full_state_dict()"
                )
            state_dict[prefix + name] = as_dtensor(value, *whole, group)

    def read(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        """Refuse slices of another rank, and take this rank's memory out of DTensors."""
        # nn.Module notes assign=True in the metadata, and leaves it there, where a later call would find it.
        if metadata.pop(_ASSIGNS, False):
            raise UsageError(f"assign=True would replace the slices that {kind} works with: choose assign=False")
        # A state dict without this metadata does not say whose slices it has, and passes.
        require_share(metadata.get(kind, share), group)
        for name, parameter in module._parameters.items():
            if parameter is not None and is_slice(parameter) and (key := prefix + name) in state_dict:
                state_dict[key] = _slice_in(state_dict[key], key, parameter, kind, group)

    # torch.distributed.checkpoint.state_dict calls this attribute where a module has it. Else it would save an
    # optimizer's state, which is no DTensors, from one rank, as if all ranks had the same.
    module.__dict__["_fqn_modifiers"] = _refuse_gathering
    for part in module.modules():
        # A module that was deep-copied with its hooks has this mark, too.
        if kind not in part.__dict__.setdefault("_has_slices_of", set()):
            part.__dict__["_has_slices_of"].add(kind)
            part.register_state_dict_post_hook(write)
            part.register_load_state_dict_pre_hook(read)


def _slice_in(value: Any, name: str, parameter: nn.Parameter, kind: str, group: dist.ProcessGroup) -> Any:
    """Return this rank's memory of a DTensor, and any other value itself; refuse what cannot be the slice."""
    shape, dimension = whole_of(parameter) or ((), 0)  # No slice has the shape ().
    if not _is_dtensor(value):
        if parameter.shape != getattr(value, "shape", None) == shape:
            raise UsageError(
                f"{name} is whole, of shape {shape}, and {kind} has slices of it: load the state dict of a plain "
                "module before you wrap it"
            )
        return value
    is_cut_alike = [placement.is_shard(dimension) for placement in value.placements] == [True]
    if tuple(value.shape) != shape or not is_cut_alike:
        raise UsageError(
            f"{name} is a DTensor of shape {tuple(value.shape)} and placements {value.placements}: {kind} has a slice "
            f"of shape {shape} along dimension {dimension}"
        )
    require_share(_rank_of_slice(value), group)
    return value.to_local()


def require_share(share: Mapping[str, int], group: dist.ProcessGroup) -> None:
    """Refuse slices that were saved by another rank, or among another number of ranks, than this one in ``group``."""
    if (share["rank"], share["ranks"]) != (group.rank(), group.size()):
        raise UsageError(
            f"the state dict holds the slices of rank {share['rank']} of {share['ranks']}, this is rank "
            f"{group.rank()} of {group.size()}: load the one of this rank, or use save_checkpoint()"
        )


def _is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing the class, which takes 0.6 s of CPU time."""
    return hasattr(value, "to_local")


def _rank_of_slice(dtensor: Any) -> dict[str, int]:
    # The coordinate is None if this rank is not in the mesh; no rank is -1.
    return {"rank": (dtensor.device_mesh.get_coordinate() or [-1])[0], "ranks": dtensor.device_mesh.size()}


def _refuse_gathering() -> NoReturn:
    """Refuse the call by which torch.distributed.checkpoint.state_dict asks a module for names that it modifies."""
    raise UsageError(
        "torch.distributed.checkpoint.state_dict does not know the slices of optimizers: save state_dict() of the "
        "wrapper, whose slices are DTensors, or use save_checkpoint()"
    )


# The slices of a state dict all have the same group and device: their mesh is made once.
_mesh_of = functools.lru_cache(maxsize=1)(DeviceMesh.from_group)


def as_dtensor(local: Tensor, shape: Sequence[int], dimension: int, group: dist.ProcessGroup) -> Any:
    """Return a DTensor over the memory of this rank's slice of a tensor that ``group`` has cut like ``torch.chunk``."""
    from torch.distributed.tensor import DTensor, Shard

    strides = torch.empty(shape, device="meta").stride()
    mesh, placements = _mesh_of(group, local.device.type), [Shard(dimension)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
