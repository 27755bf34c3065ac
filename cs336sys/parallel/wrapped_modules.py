"""What a module is wrapped in already, and whether it still holds the parameters that were wrapped.

Wrappers, units and optimizers mark what they have, and refuse what another one has marked. A mark is an attribute and
not a class, so that whoever looks for it need not import whoever sets it.
"""

import contextlib
import gc
import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError, a_value

# On the hook of a parameter: its gradient is averaged over ranks.
AVERAGES_GRADIENT = "averages_gradient"

# On the same hook: the gradient is handed on in slices, and none is left with the parameter.
HANDS_GRADIENT_ON = "hands_gradient_on"

# On the call that FSDP puts where nn.Module keeps a compiled one: it gathers the module's parameters first.
GATHERS_PARAMETERS = "gathers_parameters"

# By name: importing torch's FSDP takes 0.6 s of CPU time in every process.
_TORCH_WRAPPERS = {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel"}


class SynchronizationSwitch:
    """Averages gradients over ranks, unless it is switched off for gradient accumulation.

    Attributes:
        synchronizes: if False, backward passes accumulate gradients on this rank only.
    """

    synchronizes = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, backward passes accumulate gradients on this rank only."""
        was_synchronizing, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = was_synchronizing


def is_unit(module: nn.Module) -> bool:
    """Return whether FSDP gathers the module's parameters when it is called."""
    return getattr(module.__dict__.get("_compiled_call_impl"), GATHERS_PARAMETERS, False)


def has_marked_hook(parameter: Tensor, mark: str) -> bool:
    """Return whether a synchronizer that still exists does with the parameter's gradient what this mark says."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(getattr(hook, mark, False) for hook in hooks.values())


def require_module(module: Any) -> None:
    """Refuse what is no module, as None, a list of modules or the class of one."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"the module is {a_value(module)}: must be a torch.nn.Module")


def require_unwrapped(module: nn.Module) -> None:
    """Refuse a module that is wrapped, or has a part that is, by a class of ours or torch's that averages gradients."""
    for name, part in module.named_modules():
        is_wrapper = hasattr(part, "finish_gradient_synchronization") or is_unit(part)
        if is_wrapper or any(base.__name__ in _TORCH_WRAPPERS for base in type(part).__mro__):
            raise UsageError(
                f"{name or 'the module'} ({type(part).__name__}) is wrapped already: wrap the plain module"
            )


def require_unsynchronized(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters whose gradients another synchronizer averages: averaged twice, they would be wrong."""
    for name, parameter in named_parameters:
        if has_marked_hook(parameter, AVERAGES_GRADIENT):
            gc.collect()  # A synchronizer to which nothing refers any more may still exist as part of a cycle.
            if has_marked_hook(parameter, AVERAGES_GRADIENT):
                raise UsageError(
                    f"{name} has its gradient averaged already, by a data parallel wrapper or a sharded optimizer: "
                    "unwrap the module or delete that optimizer"
                )


_layout = operator.attrgetter("shape", "dtype", "device")


class _Held(NamedTuple):
    """Meaning of one name of a parameter when it was read."""

    owner: nn.Module
    reference: "weakref.ref[Tensor]"
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_trained: bool

    @property
    def parameter(self) -> Tensor | None:
        """Return the parameter, or None if it exists no longer."""
        return self.reference()


class HeldParameters:
    """A snapshot of the parameters that a module holds, to be compared with the module before each use.

    It sees parameters that were added, removed, replaced, moved, tied or untied, that have another shape or dtype, and
    those that were frozen and are trained now. Parameters that were trained may be frozen and unfrozen again, as GANs
    do. Modules without parameters may come and go. It keeps no parameter alive: another wrapper may have cut it.

    Args:
        module: the module, or a wrapper that has it as a child.
        prefix: the beginning of names that errors leave out: of a wrapper the child's, as in ``"module."``.
    """

    def __init__(self, module: nn.Module, prefix: str = ""):
        # The wrapper owns this object: a strong reference back would keep GPU memory until Python's collector runs.
        self._module = weakref.proxy(module)
        self._prefix = prefix
        self._entries = self._read_entries()
        self._note_contents()

    def require_unchanged(self, allows_exchanged: bool = False) -> None:
        """Refuse a module that holds other parameters than at the snapshot.

        This compares on this rank alone: programs change modules alike on all ranks, so each rank finds the change by
        itself. It takes about 35 microseconds for 170 modules with 110 parameters.

        Args:
            allows_exchanged: accept tensors from outside of the module, as ``torch.func.functional_call`` puts there.
        """
        if self._is_unchanged():
            return
        now = self._read_entries()
        exchanged_names: set[str] = set()
        if allows_exchanged:
            # Those of places in modules where a parameter was before, and a tensor from outside is now.
            ids_before = {id(entry.parameter) for entry in self._entries.values()}
            unmoved = [
                name for name in now.keys() & self._entries.keys() if now[name].owner is self._entries[name].owner
            ]
            exchanged_names = {name for name in unmoved if id(now[name].parameter) not in ids_before}
        for name in dict.fromkeys([*now, *self._entries]):
            if name not in exchanged_names and (change := self._change(name, now)):
                raise UsageError(
                    f"{name.removeprefix(self._prefix)} was {change} after it was wrapped: call refresh() on every rank"
                )
        # Only modules without parameters have come or gone. Tensors from outside are there for this call alone.
        if not exchanged_names:
            self._note_contents()

    def _note_contents(self) -> None:
        """Note what :meth:`_is_unchanged` compares: cheaper than :meth:`_read_entries`, and it names no change."""
        owners = list(self._module.modules())
        # The modules' own dictionaries, which change with them, and copies of these. Scripted modules have objects of
        # another type, new at each access, which could not be compared.
        self._children = [owner._modules for owner in owners if isinstance(owner._modules, dict)]
        self._children_then = [dict(children) for children in self._children]
        self._parameters = [owner._parameters for owner in owners if isinstance(owner._parameters, dict)]
        self._contents_then = self._contents()
        # Of a tied parameter, one entry.
        entries = {id(entry.parameter): entry for entry in self._entries.values()}.values()
        # Parameters that exist no longer: a new one may have the id of one of them.
        self._gone: list[weakref.ref[Tensor]] = []
        self._references = [
            weakref.ref(entry.parameter, self._gone.append) for entry in entries if entry.parameter is not None
        ]
        self._layouts_then = [(entry.shape, entry.dtype, entry.device) for entry in entries]
        self._frozen = [entry.reference for entry in entries if not entry.is_trained]

    def _contents(self) -> tuple[list[int], list[int], list[str]]:
        """Return the ids of all parameters, how many each module has, and the attributes of all."""
        joined = itertools.chain.from_iterable
        ids = list(map(id, joined(map(dict.values, self._parameters))))
        return ids, list(map(len, self._parameters)), list(joined(self._parameters))

    def _is_unchanged(self) -> bool:
        """Compare with what :meth:`_note_contents` noted: layouts late, because parameters that are gone have none."""
        return (
            self._children == self._children_then
            and self._contents() == self._contents_then
            and not self._gone
            and [_layout(reference()) for reference in self._references] == self._layouts_then
            and not any(parameter.requires_grad for reference in self._frozen if (parameter := reference()) is not None)
        )

    def _read_entries(self) -> dict[str, _Held]:
        """Return what the module holds now, by full name; tied parameters once for each name."""
        entries = {}
        for prefix, owner in self._module.named_modules(remove_duplicate=False):
            for attribute, parameter in owner._parameters.items():
                if parameter is not None:
                    layout = _layout(parameter)
                    entry = _Held(owner, weakref.ref(parameter), *layout, is_trained=parameter.requires_grad)
                    entries[f"{prefix}.{attribute}" if prefix else attribute] = entry
        return entries

    def _change(self, name: str, now: dict[str, _Held]) -> str | None:
        """Name the change of a parameter, as a participle before "after it was wrapped"; None if nothing happened."""
        old, new = self._entries.get(name), now.get(name)
        if new is None:
            return "removed"
        tied_now = [other for other, entry in now.items() if entry.parameter is new.parameter and other != name]
        if old is None:
            names_before = [other for other, entry in self._entries.items() if entry.parameter is new.parameter]
            if not names_before:
                return f"added, tied to {self._shown(tied_now)}," if tied_now else "added"
            return f"{'tied to' if names_before[0] in now else 'moved from'} {self._shown(names_before)}"
        if new.parameter is not old.parameter:
            if tied_now:
                return f"tied to {self._shown(tied_now)}"
            entries = self._entries.items()
            tied_before = [other for other, entry in entries if entry.parameter is old.parameter and other != name]
            # Parameters that exist no longer are all None now, and need not have been tied.
            if tied_before and old.parameter is not None:
                return f"untied from {self._shown(tied_before)}"
            return "replaced (as load_state_dict() with assign=True does)"
        layouts = ((entry.dtype, tuple(entry.shape), entry.device) for entry in (old, new))
        for before, current in zip(*layouts, strict=True):
            if before != current:
                return f"changed from {before} to {current}"
        if new.owner is not old.owner:
            return "moved into another module"
        return "unfrozen" if new.is_trained and not old.is_trained else None

    def _shown(self, names: list[str]) -> str:
        """Return the first name as users write it."""
        return names[0].removeprefix(self._prefix)
