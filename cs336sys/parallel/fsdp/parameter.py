"""The parameters that FSDP shards, which are gathered together, and each of them cut along its first dimension.

A layer is sharded if it owns a parameter of two or more dimensions: ``Linear``, ``Embedding`` and the like, whoever
wrote them; its bias goes with it. Norms and other small parameters are replicated. Planning moves no data.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336sys.accounting.sharding.partition import own_rows, rows_per_rank
from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import SliceGather
from cs336sys.parallel.gradient_memory import in_own_memory, require_averageable
from cs336sys.parallel.gradient_slices import WAS_CUT, is_slice, mark_slice

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # Modules that are never called themselves; only their children are.


@dataclass(eq=False)
class PlannedParameter:
    """One parameter and everywhere it is used.

    Attributes:
        names: its names in the whole module; tied weights have several.
        owners: the modules that hold it, each with the attribute that it is held as.
    """

    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def held(self) -> nn.Parameter:
        """Return the parameter that the modules hold: the whole one at first; once it is sharded, this rank's slice."""
        owner, attribute = self.owners[0]
        parameter = owner._parameters[attribute]
        assert parameter is not None
        return parameter


@dataclass(eq=False)
class PlannedUnit:
    """Modules whose weights are gathered when one of them is called, and freed when it returns.

    Attributes:
        name: the name of its first module.
        modules: usually one; modules that share weights form one unit.
        contains_units: whether one of its modules contains a module of another unit.
    """

    name: str
    modules: list[nn.Module]
    sharded: list[PlannedParameter] = field(default_factory=list)
    contains_units: bool = field(init=False)


@dataclass
class ShardingPlan:
    """All parameters of a module, each either in one unit or replicated.

    Attributes:
        units: in the order of the module's children.
        replicated: parameters that every rank holds whole.
    """

    units: list[PlannedUnit]
    replicated: list[PlannedParameter]

    @property
    def all_sharded(self) -> list[PlannedParameter]:
        return [entry for unit in self.units for entry in unit.sharded]


def plan_sharding(module: nn.Module, unit_modules: Collection[nn.Module] | None = None) -> ShardingPlan:
    """Divide the parameters of a module into units.

    Args:
        unit_modules: modules that each become a unit. By default these are the modules in an ``nn.ModuleList``, which
            are the blocks of a Transformer; a list within such a module is part of its unit. Every sharded layer
            outside of them is a unit of its own. A layer with children (for example attention that passes its output
            projection's weight to a function) forms one unit with those of them that are not units themselves.
    """
    roots: dict[nn.Module, PlannedUnit] = {}
    # The units that each module is called in; None stands for a call outside of all units.
    homes: dict[nn.Module, set[PlannedUnit | None]] = {}

    def visit(child: nn.Module, name: str, home: PlannedUnit | None, in_list: bool, in_block: bool) -> None:
        """Note that a module is called in ``home``, or make it a unit of its own; then visit its children."""
        is_block = in_list and not in_block and not isinstance(child, _CONTAINERS)
        if unit_modules is not None:
            is_block = child in unit_modules
        if is_block or (home is None and _owns_matrix(child)):  # A block, or a sharded layer outside of all blocks.
            home = roots.setdefault(child, PlannedUnit(name, [child]))
        # A module may be a child of several; its own children are visited once for each unit that it is called in.
        if home in homes.setdefault(child, set()):
            return
        homes[child].add(home)
        for attribute, grandchild in child.named_children():
            child_name = f"{name}.{attribute}" if name else attribute
            visit(grandchild, child_name, home, isinstance(child, nn.ModuleList), in_block or is_block)

    visit(module, name="", home=None, in_list=False, in_block=False)
    units = list(roots.values())
    order = {unit: position for position, unit in enumerate(units)}
    sharded, replicated = [], []
    for entry in _module_parameters(module):
        # A module outside of all units may hold it, too, and gets it whole when it uses it.
        used_in = {unit for owner, _ in entry.owners for unit in homes[owner] if unit is not None}
        can_be_cut = entry.held.dim() > 0 and entry.held.numel() > 0
        if not (can_be_cut and used_in and any(_owns_matrix(owner) for owner, _ in entry.owners)):
            replicated.append(entry)
        else:
            sharded.append(entry)
            # Units that share a weight become one, in the place of the first.
            first, *others = sorted(used_in, key=order.__getitem__)
            for other in others:
                first.modules += other.modules
                units.remove(other)
                homes = {part: {first if home is other else home for home in used} for part, used in homes.items()}

    # After all units that share something were united, each weight is in one.
    for entry in sharded:
        unit = next(unit for owner, _ in entry.owners for unit in homes[owner] if unit is not None)
        unit.sharded.append(entry)
    unit_of = {module: unit for unit in units for module in unit.modules}
    for unit in units:
        inside = (part for module in unit.modules for part in module.modules())
        unit.contains_units = any(unit_of.get(part, unit) is not unit for part in inside)
    # A unit of a user's choice, or of norms alone, may have nothing to gather.
    return ShardingPlan([unit for unit in units if unit.sharded], replicated)


def _owns_matrix(module: nn.Module) -> bool:
    return any(parameter is not None and parameter.dim() >= 2 for parameter in module._parameters.values())


def _module_parameters(module: nn.Module) -> list[PlannedParameter]:
    """List the parameters of a module, each once, with all names and owners."""
    planned: dict[nn.Parameter, PlannedParameter] = {}
    for name, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                entry = planned.setdefault(parameter, PlannedParameter())
                entry.names.append(f"{name}.{attribute}" if name else attribute)
                if (owner, attribute) not in entry.owners:
                    entry.owners.append((owner, attribute))
    return list(planned.values())


# Operations that need no values; untyped_storage() is used to count memory. All others get the whole weight.
_PROPERTIES = (
    "shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad grad_fn is_cuda is_cpu is_meta "
    "is_sparse is_quantized"
)
_METHODS = (
    "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex is_signed "
    "get_device __len__ untyped_storage storage_offset"
)
_WITHOUT_VALUES = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES.split()]
    + [getattr(Tensor, name) for name in _METHODS.split()]
    + [torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed]
)
_FREEZING = frozenset((Tensor.requires_grad_, Tensor.requires_grad.__set__))  # type: ignore[attr-defined]


class StandIn(nn.Parameter):
    """A parameter without memory that is replaced by the whole one in every operation.

    Attributes:
        stands_for: name of the parameter.
        whole: returns the whole parameter, with its values.
    """

    stands_for: str
    whole: Callable[[], nn.Parameter]

    @staticmethod
    def of(full: nn.Parameter, name: str, gather: Callable[[], nn.Parameter]) -> "StandIn":
        """Make the stand-in of a parameter: with its attributes and its storage, which is empty unless gathered."""
        has_gradients = full.is_floating_point() or full.is_complex()  # Integers have no gradients.
        stand_in: StandIn = Tensor._make_subclass(StandIn, full.data, has_gradients)
        vars(stand_in).update(vars(full))
        stand_in.stands_for, stand_in.whole = name, gather
        if not has_gradients:
            return stand_in

        def hand_on(accumulated: Tensor) -> None:
            # An autograd.Function that was given the stand-in leaves its gradient there. Torch holds this hook where
            # Python's collector does not look: it must not refer to the stand-in. __torch_function__() would gather.
            with torch._C.DisableTorchFunctionSubclass():
                gradient, accumulated.grad = accumulated.grad, None
            if gradient is not None:
                full.grad = gradient if full.grad is None else full.grad + gradient

        with torch._C.DisableTorchFunctionSubclass():
            stand_in.register_post_accumulate_grad_hook(hand_on)
            stand_in.requires_grad_(full.requires_grad)  # Only now: a frozen tensor takes no hook.
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``function`` with whole parameters in place of stand-ins."""
        if function in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function in _FREEZING:
            raise UsageError(f"{args[0].stands_for} is frozen or unfrozen in the forward pass: do it between two steps")
        args, kwargs = tree_map_only(StandIn, lambda stand_in: stand_in.whole(), (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.stands_for}, {tuple(self.shape)} in {self.dtype}, not gathered"


class ShardedParameter:
    """A parameter of which this rank holds some rows.

    Attributes:
        group: the ranks that hold it.
        names, owners: those of the :class:`~cs336sys.parallel.fsdp.parameter.PlannedParameter`.
        shape: the shape of the whole parameter.
        is_part_of_more: whether the whole parameter is itself this rank's part of one that another wrapper has cut.
        rows: which rows this rank holds.
        divides_evenly: whether all ranks hold equally many rows.
        slice_sizes: for each rank, the number of elements in its rows.
        shard: this rank's rows, (len(rows), ...): what the module holds between steps and the optimizer updates.
        full: all rows in the dtype to compute in: what the module holds, and autograd sees, while they are gathered.
            It is always the same tensor, so that what autograd saved of it stays valid; its memory comes and goes.
        stand_in: what the module holds in a forward or backward pass while they are not gathered.
        kept: the sum of the gradients of backward passes under no_sync, in the dtype of the shard.
    """

    def __init__(
        self,
        planned: PlannedParameter,
        whole: nn.Parameter,
        compute_dtype: torch.dtype | None,
        group: dist.ProcessGroup,
    ):
        """Copy this rank's rows of the whole parameter."""
        self.group = group
        self.names = planned.names
        self.owners = planned.owners
        self.shape = whole.shape
        self.is_part_of_more = is_slice(whole)
        world_size = group.size()
        self.rows = own_rows(len(whole), group.rank(), world_size)
        self.divides_evenly = len(whole) % world_size == 0
        self.slice_sizes = [
            len(own_rows(len(whole), rank, world_size)) * math.prod(whole.shape[1:]) for rank in range(world_size)
        ]
        rows_of_rank = whole.detach()[self.rows.start : self.rows.stop].clone(memory_format=torch.contiguous_format)
        self.shard = nn.Parameter(rows_of_rank, requires_grad=whole.requires_grad)
        vars(self.shard).update(vars(whole) | {WAS_CUT: False})  # What a user or another wrapper has noted stays.
        self._attributes = dict(vars(whole))
        setattr(whole, WAS_CUT, whole.requires_grad)
        mark_slice(self.shard, whole=None if self.is_part_of_more else (tuple(self.shape), 0))  # Cut along dimension 0.
        self._compute_dtype = compute_dtype
        self.kept: Tensor | None = None
        # When a gradient was last kept: the shard's ``grad`` and its version. And whether that is a view of ``kept``.
        self._seen_gradient: tuple[Tensor, int] | None = None
        self._shows_kept = False
        self._is_guarded = False  # Whether refuse_outside_gradients() has put its hook on the shard.

    def gather_into(self, memory: Tensor, gather: Callable[[], object]) -> Tensor:
        """Let ``full`` be a view of ``memory`` (uint8), in which rows will be gathered; return where this rank's go.

        Args:
            gather: called when an operation needs the rows, and nobody has gathered them.
        """
        row_count = rows_per_rank(self.shape[0], self.group.size())
        # With room for equally many rows of every rank, although the last may have fewer.
        padded = memory.view(self.gathered_dtype).view(-1, *self.shape[1:])
        # .data has a version counter of its own, so autograd does not see that its saved tensors are filled again.
        self._all_rows = padded.data[: self.shape[0]]
        self.full = full = nn.Parameter(self._all_rows, requires_grad=self.shard.requires_grad)
        vars(full).update(self._attributes)
        self._version = full._version

        def gathered_parameter() -> nn.Parameter:
            gather()
            return full

        self.stand_in = StandIn.of(full, self.names[0], gathered_parameter)
        return padded[self.group.rank() * row_count :][: len(self.rows)]

    @property
    def gathered_dtype(self) -> torch.dtype:
        """Return the dtype in which :meth:`gather_into` makes ``full``; the shard's may have changed afterwards."""
        if self._compute_dtype is not None and self.shard.is_floating_point():
            return self._compute_dtype
        return self.shard.dtype

    def refuse_outside_gradients(self) -> None:
        """Refuse gradients that autograd would accumulate into the shard."""
        if self._is_guarded or not self.shard.requires_grad:
            return
        name = self.names[0]

        def refuse(_: Tensor) -> None:
            raise UsageError(
                f"{name} got a gradient outside of the forward pass, where this rank holds a slice of it: compute "
                "penalties on weights in the module's forward()"
            )

        self.shard.register_hook(refuse)
        self._is_guarded = True

    def require_no_hooks(self) -> None:
        """Refuse hooks of others on the shard."""
        shard = self.shard
        # One backward hook is ours, if it is guarded.
        if shard._post_accumulate_grad_hooks or len(shard._backward_hooks or ()) != self._is_guarded:
            raise hook_refusal(self.names[0])

    def follow_freezing(self) -> None:
        """Let the whole parameter be trained if the shard is."""
        is_trained = self.shard.requires_grad
        if self.full.requires_grad != is_trained:
            self.full.requires_grad_(is_trained)
            with torch._C.DisableTorchFunctionSubclass():  # Otherwise the stand-in refuses to be frozen.
                self.stand_in.requires_grad_(is_trained)

    def require_unchanged(self) -> None:
        """Refuse a whole parameter that was changed while it was gathered: no slice would have the change."""
        full = self.full
        if full._version != self._version or full.data_ptr() != self._all_rows.data_ptr():
            full.data = self._all_rows  # Which gathers fill; and later passes are not to refuse this change again.
            self._version = full._version
            raise UsageError(
                f"{self.names[0]} was changed in the forward pass, which is lost when its rows are freed: change the "
                "slices between two steps, or hold what forward() changes in a buffer"
            )

    def gather_whole(self, rows_of_rank: Tensor | None = None) -> Tensor:
        """Return all rows in new memory: of the shard, or of a tensor cut like it. Every rank must call it."""
        rows_of_rank = self.shard.detach() if rows_of_rank is None else rows_of_rank
        row_count, rank = rows_per_rank(self.shape[0], self.group.size()), self.group.rank()
        padded = rows_of_rank.new_zeros((self.group.size() * row_count, *self.shape[1:]))
        padded[rank * row_count :][: len(self.rows)] = rows_of_rank
        gather = SliceGather([padded.view(-1)], self.names[0], self.group)
        gather.start()
        gather.wait()
        return padded[: self.shape[0]]

    def take_gradient(self) -> Tensor | None:
        """Remove and return the whole gradient that autograd has left in ``full``; None if there is none."""
        gradient, self.full.grad = self.full.grad, None
        if gradient is not None:
            require_averageable(self.names[0], gradient, self.gathered_dtype)
        return gradient

    def keep_gradient(self) -> None:
        """Add the gradient of this backward pass to those kept."""
        gradient = self.take_gradient()
        self._drop_zeroed()  # The program may have dropped or zeroed those kept.
        if gradient is None:
            return
        if self.kept is None:
            self.kept = in_own_memory(gradient.to(self.shard.dtype))  # Later ones are added to it in place.
        else:
            self.kept.add_(gradient)
        if self.shard.grad is None:
            # The shard shows its rows, so that whoever drops gradients drops those kept.
            self.shard.grad = self.kept[self.rows.start : self.rows.stop]
            self._shows_kept = True
        self._seen_gradient = self.shard.grad, self.shard.grad._version  # For _drop_zeroed() to compare.

    def take_kept(self) -> Tensor | None:
        """Remove and return the sum of the gradients kept, unless they were dropped or set to zero since."""
        self._drop_zeroed()
        if self._shows_kept:  # The gradient is a view of ``kept``.
            self.shard.grad = None
        kept, self.kept, self._seen_gradient, self._shows_kept = self.kept, None, None, False
        return kept

    @property
    def has_kept(self) -> bool:
        """Return whether there are gradients kept that were not dropped or set to zero since."""
        self._drop_zeroed()
        return self.kept is not None

    def _drop_zeroed(self) -> None:
        """Forget the gradients kept if the gradient of the shard was dropped or set to zero since."""
        if self._seen_gradient is None:
            return
        gradient, version = self._seen_gradient  # Those of the shard when a gradient was last kept.
        if self.shard.grad is gradient and gradient._version == version:
            return
        # It was changed. Zeros and None drop what was kept; other values cannot be carried over to it.
        if self.shard.grad is not None and (self.shard.grad is not gradient or gradient.any()):
            raise UsageError(
                f"the gradient of {self.names[0]} was changed between backward passes under no_sync() and their "
                "average: scale and clip gradients after finish_gradient_synchronization()"
            )
        if self._shows_kept and self.shard.grad is not None:
            # A view of ``kept``: zeros of its own replace it, so that that memory is freed.
            self.shard.grad = torch.zeros_like(self.shard)
        self.kept, self._seen_gradient, self._shows_kept = None, None, False


def hook_refusal(name: str) -> UsageError:
    """Return the error for a sharded parameter with a hook."""
    return UsageError(
        f"{name} has a hook, which would not be called: backward passes go through whole weights, and it would be on a "
        "slice; remove it, and register hooks on modules or on what they return"
    )
