"""Gather and free the units of an FSDP module, and reduce their gradients, at the right moments.

Collectives are matched by the order of calls alone. So each is launched by an event that happens in the same order on
every rank: a unit is called, a weight is used outside of such calls, the backward pass arrives at a unit's output, the
backward pass ends. That a gradient is ready is not such an event: a parameter may be unused on one rank.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336sys.errors import UsageError, a_value
from cs336sys.parallel.buckets import GradientBucket
from cs336sys.parallel.collectives import AnyRank
from cs336sys.parallel.fsdp.gather_order import GatherOrder, GatherWatch
from cs336sys.parallel.fsdp.parameter import StandIn
from cs336sys.parallel.fsdp.unit import ShardedUnit, SliceVersions
from cs336sys.parallel.gradient_memory import require_eager_backward
from cs336sys.parallel.wrapped_modules import SynchronizationSwitch

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # Attributes that every module has.


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in lists, tuples, dictionaries and dataclasses, however deep, or a tensor itself."""
    tensors: list[Tensor] = []
    seen: set[int] = set()
    unvisited = [value]
    while unvisited:
        part = unvisited.pop()
        if isinstance(part, Tensor):
            tensors.append(part)
        elif id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, Mapping):
                unvisited += part.values()
            elif isinstance(part, list | tuple):
                unvisited += part
            elif dataclasses.is_dataclass(part) and not isinstance(part, type | nn.Module):  # Modules hold weights.
                unvisited += vars(part).values()
    return tensors


def kept_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return tensors that are attributes or buffers of these modules, for example auxiliary losses; no parameters."""
    values: list[Any] = []
    for module in modules:
        values += [value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
        values += module._buffers.values()
    return tensors_in(values)


class UnitRunner(SynchronizationSwitch):
    """Runs units forward and backward.

    In the forward pass a unit is gathered before its module is called, and freed when that returns, unless the same
    unit is used next, as the last one is by the backward pass. In the backward pass it is gathered when the gradient of
    its output arrives, and freed when the backward pass arrives at the output of another unit. Autograd goes strictly
    back in time, so the unit's gradients are complete by then: their reduction starts, and is finished one unit later.
    While a unit computes, the next ``prefetch`` units are being gathered; no others have memory, but those that stay.

    Modules hold slices, except within a forward pass of the whole module, and within a backward pass, however these
    end. There they hold the whole parameters of units in use, and stand-ins for others. The first operation on a
    stand-in *lends* its unit: it stays gathered until the backward pass (without one: the forward pass) has ended.
    A lent unit is reduced then.

    Args:
        keep_gathered: how many units besides the last stay gathered between a forward pass and its backward pass.
        group: the ranks that hold slices.

    Attributes:
        replicated: gradients of parameters that every rank holds whole. They are averaged in :meth:`finish`, which
            every rank calls whatever its backward passes went through; a launch per unit would take the CPU 0.2 ms.
        watch: if set, records how late gathers are.
    """

    def __init__(self, prefetch: int, keep_gathered: int, group: dist.ProcessGroup):
        self._group = group
        self.replicated: Sequence[GradientBucket] = ()
        self.watch: GatherWatch | None = None
        self._prefetch = prefetch
        self._keep_gathered = keep_gathered
        # The expected order of units in the forward pass that is running, or that the backward pass belongs to.
        self._order: GatherOrder | None = None
        self._ahead: set[ShardedUnit] = set()  # Units that have been gathered ahead of use.
        # Units whose memory is used outside of their calls, with the versions of their slices. The hooks of a forward
        # pass hold its dictionary, for a second backward pass through the same graph.
        self._lent: dict[ShardedUnit, SliceVersions] = {}
        self._in_forward = self._in_backward = self._has_failed = False
        # In the backward pass: the unit it arrived at last, those it is inside of, those whose gradients are unreduced.
        self._current: ShardedUnit | None = None
        self._inside: set[ShardedUnit] = set()
        self._unreduced: dict[ShardedUnit, None] = {}  # A set in order of arrival: all ranks reduce in one order.
        self._reducing: ShardedUnit | None = None  # The unit whose reduction is under way.
        # Since the last finish(), even if refresh() came between, for each tensor of the optimizer whose gradient was
        # reduced: whether this rank had a gradient. And the tensors whose ``grad`` was None before.
        self._present: dict[nn.Parameter, bool] = {}
        self._new: set[nn.Parameter] = set()
        self.units: Sequence[ShardedUnit] = ()  # run() sets them, and the attributes that depend on them.

    def run(self, units: Sequence[ShardedUnit]) -> None:
        """Run these units from now on. Call it between two steps."""
        self._discard_failed_pass()
        self._free_all()
        self.units = units
        # So many units before the last, and the last, which stays anyway, because the backward pass begins with it.
        self._staying = frozenset(units[max(0, len(units) - 1 - self._keep_gathered) :] if self._keep_gathered else ())
        # By whether gradients are enabled, because only then does a backward pass follow.
        self._orders = {True: GatherOrder(), False: GatherOrder()}

    @contextlib.contextmanager
    def forward_pass(self, begin: Callable[[], None]) -> Iterator[Callable[[Any], None]]:
        """Within this context, the whole module computes: no modules hold slices.

        Args:
            begin: called first, while they still hold slices, unless this is a part of another pass.

        Yields:
            a function to call with the output.
        """
        if self._in_forward or self._in_backward:
            yield lambda output: None  # The module calls itself, or a checkpoint computes it again.
            return
        self._discard_failed_pass()
        begin()
        self._free_all()  # A failed pass may have left units gathered.
        for unit in self.units:
            unit.calls_ahead = unit.depth = 0
            unit.begin_pass()
        for bucket in self.replicated:
            # Autograd will add to the gradients of an earlier pass in place: their memory must be theirs alone.
            bucket.collect_present()
        self._in_forward = True
        self._order = self._orders[torch.is_grad_enabled()]  # Without a backward pass, other units come next.
        self._order.begin()
        try:
            yield self._hook_end
            for unit in self._lent:
                unit.require_unchanged()
        finally:
            self._in_forward = False
            for unit in self.units:
                unit.end_pass()
        if not torch.is_grad_enabled():  # No backward pass follows, at whose end this would be done.
            self._free_all()
            self._order = None

    def call(
        self, unit: ShardedUnit, parts: Sequence[nn.Module], function: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Call one of the unit's modules, which consists of ``parts``, with its parameters gathered; return its output.

        Hooks on all tensors that the call has computed tell when the backward pass comes back to it.
        """
        # Checkpointing computes a unit again while the backward pass is inside of it.
        is_in_use = unit.depth > 0 or unit in self._inside
        if not is_in_use:
            if not (self._in_forward or self._in_backward):
                unit.free()  # Weights that a forward pass has left gathered may be older than the slices.
            self._use(unit)
        arguments = (*args, *kwargs.values())
        inputs = tensors_in(arguments)
        # To see which inputs the call changes in place: their gradients come back to it, too.
        versions = [version_of(tensor) for tensor in inputs]
        unit.depth += 1
        try:
            with _uncached_casts(unit.device):
                output = function(*args, **kwargs)
        except BaseException:
            if not is_in_use:
                with contextlib.suppress(UsageError):
                    unit.hide()  # It refuses replaced parameters, and would hide the error of the call.
            raise
        finally:
            unit.depth -= 1
        outputs = self._outputs(unit, output)
        if any(map(unit.stores, outputs)):
            # It returns a view of a weight, which is freed. (Not lent: only ranks that come here would gather it then.)
            output = tree_map_only(Tensor, lambda tensor: tensor.clone() if unit.stores(tensor) else tensor, output)
            outputs = self._outputs(unit, output)
        changed = [tensor for tensor, before in zip(inputs, versions, strict=True) if version_of(tensor) != before]
        if torch.is_grad_enabled() and not _returns_new(outputs, inputs, changed) and _may_have_gradient(parts, inputs):
            # The call has only handed its inputs on, but may have computed something on another rank: new nodes of the
            # graph let the backward pass arrive here on all ranks.
            output = tree_map_only(Tensor, _as_new_node, output)
            outputs = self._outputs(unit, output)
        # Modules and containers among the arguments may hold more tensors now.
        kept = kept_tensors(parts) + tensors_in([value for value in arguments if not isinstance(value, Tensor)])
        # Views of weights outlive the call if they are kept, or returned in a dataclass, into which tree_map_only()
        # does not look. Weights themselves that are kept, as in nn.LSTM's list, are replaced when the unit is hidden.
        if any(unit.stores(tensor) and not unit.is_parameter(tensor) for tensor in outputs + kept):
            self._lent[unit] = unit.versions()
        if torch.is_grad_enabled():
            self._hook(unit, outputs + changed + _computed_now(kept, unit, inputs))
        if not is_in_use:
            self._leave(unit)
        return output

    @torch._disable_dynamo  # Gathering stays outside of compiled code.
    def access(self, unit: ShardedUnit) -> None:
        """Gather and lend a unit for an operation on a stand-in; from now on its modules hold whole parameters."""
        if not (self._in_forward or self._in_backward):
            raise UsageError(
                f"a weight of {unit.name} was kept from a forward pass and is used after it: take it from the module, "
                "in the forward pass"
            )
        if unit not in self._lent:
            self._use(unit)
            self._lent[unit] = unit.versions()

    def arrive(self, unit: ShardedUnit | None, versions: SliceVersions, lent: dict[ShardedUnit, SliceVersions]) -> None:
        """Gather a unit for its backward pass, when autograd has the gradient of its output and is about to use it.

        Args:
            unit: None for the output of the whole module.
            versions: of the unit's slices, in the forward pass.
            lent: what the forward pass has lent.
        """
        self._begin_backward()
        # The first arrival brings back what the backward pass may use at any moment until its end.
        for lent_unit, lent_versions in lent.items():
            if lent_unit not in self._unreduced:
                lent_unit.require_versions(lent_versions)
                self._lent[lent_unit] = lent_versions
                self._unreduced[lent_unit] = None
                if not lent_unit.is_gathered:
                    self._use(lent_unit)
                lent_unit.use()  # Also one that was gathered ahead: its modules are to hold whole parameters.
        if unit is None:
            return
        unit.require_versions(versions)
        unit.calls_ahead -= 1
        previous, self._current = self._current, unit
        self._inside.add(unit)
        self._unreduced[unit] = None
        # A unit that was called twice, or contains others, is not left yet; a lent one is reduced when the pass ends.
        if previous is None or previous is unit or previous.contains_units or previous in self._lent:
            self._use(unit)
            return
        self._inside.discard(previous)
        previous.hide()
        self._free(previous)
        # A unit with calls ahead of the backward pass does not have all of its gradients yet.
        self._use(unit, to_reduce=None if previous.calls_ahead > 0 else previous)

    def lacks_finish(self) -> bool:
        """Return whether gradients of backward passes have not been finished."""
        return bool(self._present) or any(unit.has_kept for unit in self.units)

    def finish(self) -> None:
        """Average what has not been averaged yet, and wait; a gradient that no rank had becomes None."""
        self._discard_failed_pass()
        self._free_all()  # A forward pass without a backward pass leaves units gathered.
        for unit in self.units:
            unit.require_no_gradient()
            if unit.has_kept:
                self._start_reduction(unit)
        for bucket in self.replicated:
            bucket.launch()
            self._note(bucket.parameters.values(), bucket.present)
        self._finish_reduction()
        for bucket in self.replicated:
            bucket.wait()
            # As if some rank had each gradient: those that no rank had are found below, together with those of slices.
            bucket.finish([True] * len(bucket.parameters))
        # Every parameter has a mean now. If no rank had a gradient, ``grad`` becomes None again, if it was before.
        parameters = list(self._present)
        if parameters:
            anywhere = AnyRank(list(self._present.values()), parameters[0].device, self._group).wait()
            for parameter, is_anywhere in zip(parameters, anywhere, strict=True):
                if not is_anywhere and parameter in self._new:
                    parameter.grad = None
        self._present, self._new = {}, set()

    def _hook_end(self, output: Any) -> None:
        """Hook the output of the whole module, where the backward pass begins; refuse weights in it."""
        tensors = tensors_in(output)
        for tensor in tensors:
            if isinstance(tensor, StandIn) or any(unit.stores(tensor) for unit in self._lent):
                raise UsageError(
                    f"the module returns a weight, or a view of one, of shape {tuple(tensor.shape)}, whose memory is "
                    "freed: return a copy, weight.clone()"
                )
        if torch.is_grad_enabled():
            self._hook(unit=None, tensors=tensors)

    def _begin_backward(self) -> None:
        """Show stand-ins from now on, and have :meth:`end_backward` called, unless this has been done."""
        if self._in_backward:
            return
        require_eager_backward()
        self._discard_failed_pass()
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(_BackwardEnd(self))
        for unit in self.units:
            unit.begin_pass()

    def _use(self, unit: ShardedUnit, to_reduce: ShardedUnit | None = None) -> None:
        """Gather a unit and those expected after it, and use it; before waiting, start to reduce ``to_reduce``."""
        upcoming: list[ShardedUnit] = []
        if self._order is not None:
            self._order.use(unit)
            upcoming = self._order.upcoming(self._prefetch)
        for other in self._ahead - {unit, *upcoming}:
            self._free(other)  # This step uses units in another order than expected.
        unit.gather()
        # An upcoming unit that was gathered, but not ahead of use, is in use around this one, and not freed as unused.
        self._ahead = {other for other in upcoming if other in self._ahead or not other.is_gathered}
        for other in upcoming:
            other.gather()
        if to_reduce is not None:
            self._reduce(to_reduce)
        if self.watch is not None and unit.is_under_way:  # It records how long use() waits for the gather.
            self.watch.use(unit, self._in_backward)
        else:
            unit.use()

    def _leave(self, unit: ShardedUnit) -> None:
        """Free a unit after its outermost call, unless it is lent, used next, or kept for the backward pass."""
        is_lent = unit in self._lent
        if not (is_lent and (self._in_forward or self._in_backward)):  # The end of the pass hides lent ones.
            unit.hide()
        unit.require_unchanged()
        if is_lent:
            return
        if self._order is not None and self._order.repeats():
            self._ahead.add(unit)  # It is the next one, too; freed if another comes instead.
        elif unit not in self._staying or not torch.is_grad_enabled():
            unit.free()

    def _outputs(self, unit: ShardedUnit, output: Any) -> list[Tensor]:
        """Return the tensors in the output of a unit; refuse one without any, at which no gradient would be seen."""
        tensors = tensors_in(output)
        if not tensors and output is not None and torch.is_grad_enabled():
            raise UsageError(
                f"{unit.name} returns {a_value(output)}, in which no tensor was found: "
                "return tensors, or lists, tuples, dictionaries or dataclasses of them"
            )
        return tensors

    def _hook(self, unit: ShardedUnit | None, tensors: list[Tensor]) -> None:
        """Let autograd call :meth:`arrive` before it uses the gradient of any of these tensors that a call has left."""
        # If an output is a view and is changed in place, its hook is no longer called, but that of its base is.
        tensors = tensors + [tensor._base for tensor in tensors if tensor._base is not None]
        # A weight that is returned as it is would keep the hook for ever.
        watched = [tensor for tensor in tensors if tensor.requires_grad and not isinstance(tensor, nn.Parameter)]
        if watched:
            # -1: no backward pass is running. A checkpoint that computes a unit again within one adds no call.
            if unit is not None and torch._C._current_graph_task_id() == -1:
                unit.calls_ahead += 1
            arrival = _Arrival(self, unit, self._lent)  # The dictionary itself: this pass may lend more.
            for tensor in watched:
                hooks = tensor._backward_hooks or {}
                handle = tensor.register_hook(arrival)
                # The tensor may be an output of earlier calls, too, as of a unit that returns what one in it returns.
                # The backward pass comes to the last call first: its hook goes before theirs.
                for earlier_id in [hook_id for hook_id in hooks if hook_id != handle.id]:
                    hooks[earlier_id] = hooks.pop(earlier_id)

    def _reduce(self, unit: ShardedUnit) -> None:
        del self._unreduced[unit]
        if self.synchronizes:
            self._start_reduction(unit)
        else:
            unit.keep_gradients()

    def _start_reduction(self, unit: ShardedUnit) -> None:
        self._finish_reduction()  # One at a time, because the buffers of a reduction are as large as the unit.
        shards = [parameter.shard for parameter in unit.trained]
        self._note(shards, unit.start_reduction())
        self._reducing = unit

    def _finish_reduction(self) -> None:
        if self._reducing is not None:
            self._reducing.finish_reduction()
            self._reducing = None

    def _note(self, parameters: Iterable[nn.Parameter], present: Sequence[bool]) -> None:
        """Note which gradients this rank had, before means are added to ``grad``; one dropped since does not count."""
        for parameter, is_present in zip(parameters, present, strict=True):
            if not is_present and parameter.grad is None:
                self._new.add(parameter)
            # A gradient from before this step, of which nothing is noted, counts as present, even if it was zeroed. One
            # that an earlier reduction of this step has left counts if this rank had one: it may be the mean of none.
            had_before = parameter.grad is not None and self._present.get(parameter, parameter not in self._new)
            self._present[parameter] = is_present or had_before

    def end_backward(self) -> None:
        """Free all units and finish their reductions: called by autograd when a backward pass has come to its end."""
        self._leave_backward()
        # Units that are lent, contained others or came last are not reduced yet.
        for unit in list(self._unreduced):
            self._reduce(unit)
        self._finish_reduction()

    def fail_backward(self) -> None:
        """Show slices after a backward pass has raised. Communication is left to whatever runs next."""
        self._in_backward = False
        self._has_failed = True
        self._show_slices()

    def _discard_failed_pass(self) -> None:
        """Discard what a failed backward pass has left behind."""
        if self._has_failed:
            self._has_failed = False
            for unit in self._unreduced:
                unit.drop_gradients()
            if self._reducing is not None:
                self._reducing.finish_reduction(drops=True)
            self._reducing, self._unreduced = None, {}
            self._leave_backward()

    def _leave_backward(self) -> None:
        self._inside, self._current = set(), None
        self._in_backward = False
        if not self._in_forward:
            self._order = None
        self._show_slices()
        self._free_all()

    def _show_slices(self) -> None:
        if not self._in_forward:  # A backward pass may run within a forward pass, which goes on with whole parameters.
            for unit in self.units:
                unit.end_pass()

    def _free(self, unit: ShardedUnit) -> None:
        if unit not in self._lent and unit.depth == 0:
            unit.free()

    def _free_all(self) -> None:
        if not self._in_forward:  # Otherwise the forward pass, in which a backward pass has run, still uses them.
            self._lent = {}
        for unit in self.units:
            self._free(unit)
        self._ahead = set()


class _BackwardEnd:
    """Callback at the end of a backward pass, which autograd drops uncalled if the pass raises."""

    def __init__(self, runner: UnitRunner):
        self._runner: UnitRunner | None = runner

    def __call__(self) -> None:
        assert self._runner is not None
        self._runner.end_backward()
        self._runner = None

    def __del__(self) -> None:
        if self._runner is not None:
            self._runner.fail_backward()


class _Arrival:
    """Tensor hook that reports each backward pass once, on however many outputs of a call it is registered."""

    def __init__(self, runner: UnitRunner, unit: ShardedUnit | None, lent: dict[ShardedUnit, SliceVersions]):
        self._runner = runner
        self.unit = unit
        self._versions = [] if unit is None else unit.versions()
        self._lent = lent
        self._last_pass: int | None = None

    def __call__(self, gradient: Tensor) -> None:
        """Report the first gradient of each backward pass; refuse a pass with ``create_graph=True``."""
        # Autograd runs hooks with gradients enabled where it makes a graph of the backward pass.
        if torch.is_grad_enabled():
            if self.unit is None:  # The units that the pass reaches refuse it, by their names.
                return
            raise UsageError(
                f"the backward pass through {self.unit.name} has create_graph=True, and FSDP frees the weights that a "
                "second one would need: take gradients of gradients with DDP or a ShardedOptimizer"
            )
        this_pass = torch._C._current_graph_task_id()
        if this_pass != self._last_pass:
            self._last_pass = this_pass
            self._runner.arrive(self.unit, self._versions, self._lent)


def _computed_now(kept: Sequence[Tensor], unit: ShardedUnit, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that this call computed: no inputs, and none that an earlier call of the unit has kept."""

    def has_arrival(tensor: Tensor) -> bool:
        hooks = (tensor._backward_hooks or {}).values()
        return any(isinstance(hook, _Arrival) and hook.unit is unit for hook in hooks)

    computed = [tensor for tensor in kept if tensor.grad_fn is not None and not has_arrival(tensor)]
    input_ids = {id(tensor) for tensor in inputs}
    return [tensor for tensor in computed if id(tensor) not in input_ids]


class _InGraph(torch.autograd.Function):
    """Copies a tensor that has no gradient so that the backward pass comes through it nevertheless."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _as_new_node(tensor: Tensor) -> Tensor:
    """Return the same values as a new node of the graph, whose hook sees the backward pass; integers as they are."""
    if tensor.requires_grad:
        return tensor.view_as(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return _InGraph.apply(tensor, torch.zeros((), requires_grad=True))  # The anchor puts it into the graph.


def _returns_new(outputs: Sequence[Tensor], inputs: Sequence[Tensor], changed: Sequence[Tensor]) -> bool:
    """Return whether a call returns a tensor with a gradient other than the inputs that it has left as they were."""
    unchanged_ids = set(map(id, inputs)).difference(map(id, changed))
    return any(tensor.requires_grad and id(tensor) not in unchanged_ids for tensor in outputs)


def _may_have_gradient(parts: Sequence[nn.Module], inputs: Sequence[Tensor]) -> bool:
    """Return whether a call of ``parts`` may compute something with a gradient, whatever it has done on this rank."""
    if any(tensor.requires_grad for tensor in inputs):
        return True
    parameters = (parameter for part in parts for parameter in part._parameters.values())
    return any(parameter is not None and parameter.requires_grad for parameter in parameters)


def version_of(tensor: Tensor) -> int:
    """Count the changes of a tensor; one made in inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def _uncached_casts(device: torch.device) -> Iterator[None]:
    """Within this context, autocast keeps no casts of weights.

    It would keep one for each weight, until the outermost autocast context ends: half of the whole module's memory.
    And a second pass in that context would use the first one's, so that its gradients came after their units.
    """
    if not (torch.is_autocast_cache_enabled() and torch.is_autocast_enabled(device.type)):
        yield
        return
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)
