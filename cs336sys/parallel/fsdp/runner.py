"""When the units of an FSDP module are gathered and freed, and when their gradients are reduced.

Collectives are matched by the order of calls alone. So each is launched by an event that happens in the same order on
every rank: a unit is called, the backward pass arrives at its output, the backward pass ends. That a gradient is ready
is not such an event: a parameter may be unused on one rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.errors import UsageError, a_value
from cs336sys.parallel.collectives import AnyRank
from cs336sys.parallel.fsdp.gather_order import GatherOrder
from cs336sys.parallel.fsdp.gather_timing import GatherWatch
from cs336sys.parallel.fsdp.left_tensors import containers_in, kept_tensors, tensors_in
from cs336sys.parallel.fsdp.unit import ShardedUnit
from cs336sys.parallel.gradient_buckets import GradientBucket
from cs336sys.parallel.gradient_synchronizer import SynchronizationSwitch


class UnitRunner(SynchronizationSwitch):
    """Runs units forward and backward.

    In the forward pass a unit is gathered before its module is called, and freed when that returns, unless the same
    unit is used next, as the last one is by the backward pass. In the backward pass it is gathered when the gradient of
    its output arrives, and freed when the backward pass arrives at the output of another unit. Autograd goes strictly
    back in time, so the unit's gradients are complete by then: their reduction starts, and is finished one unit later.
    While a unit computes, the next ``prefetch`` units are being gathered; no others have memory, but those that stay.

    Args:
        units: all units of the module.
        prefetch: how many units to gather ahead of use.
        staying: units that are not freed between a forward pass with gradients and their part of the backward pass.
        group: the ranks that hold slices.

    Attributes:
        replicated: gradients of parameters that every rank holds whole. They are averaged in :meth:`finish`, which
            every rank calls whatever its backward passes went through; they are small, and a launch per unit would
            take the CPU 0.2 ms.
        watch: if set, records how late gathers are.
    """

    def __init__(
        self, units: Sequence[ShardedUnit], prefetch: int, group: dist.ProcessGroup, staying: Sequence[ShardedUnit] = ()
    ):
        self._group = group
        self.replicated: Sequence[GradientBucket] = ()
        self.watch: GatherWatch | None = None
        self._units = units
        self._prefetch = prefetch
        self._staying = frozenset(staying)
        # One with gradients and one without, because only the former is followed by a backward pass.
        self._orders: dict[bool, GatherOrder[ShardedUnit]] = {True: GatherOrder(), False: GatherOrder()}
        self._order: GatherOrder[ShardedUnit] | None = None
        # Units that have been gathered ahead of use.
        self._ahead: set[ShardedUnit] = set()
        self._in_backward = False
        # In the backward pass: the unit it arrived at last, those it is inside of, those whose gradients are unreduced.
        self._current: ShardedUnit | None = None
        self._inside: set[ShardedUnit] = set()
        self._unreduced: dict[ShardedUnit, None] = {}
        self._reducing: ShardedUnit | None = None
        # Since the last finish(): of what was reduced, which gradients this rank had, and parameters that had no
        # gradient before.
        self._present: dict[ShardedUnit | GradientBucket, list[bool]] = {}
        self._new: set[nn.Parameter] = set()

    def begin_forward(self) -> None:
        """Begin a forward pass of the whole module; discard what a failed forward or backward pass has left behind."""
        if self._in_backward:
            self._drop_backward()
        self._free_all()
        for unit in self._units:
            unit.calls_ahead = unit.depth = 0
        for bucket in self.replicated:
            # Autograd will add to those of an earlier pass in place.
            bucket.collect_present()
        self._order = self._orders[torch.is_grad_enabled()]
        self._order.begin()

    def end_forward(self) -> None:
        if not torch.is_grad_enabled():
            self._free_all()
            self._order = None

    def wait_for_gathers(self) -> None:
        """Let the current stream wait for units that are gathered ahead of use."""
        for unit in self._units:
            unit.use()

    def call(
        self, unit: ShardedUnit, parts: Sequence[nn.Module], function: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Call one of the unit's modules, which consists of ``parts``, with its parameters gathered."""
        # Checkpointing computes a unit again while the backward pass is inside of it.
        in_use = unit.depth > 0 or unit in self._inside
        if not in_use:
            self._use(unit)
        given = (*args, *kwargs.values())
        containers = containers_in(given)
        inputs = tensors_in(given) if containers else given
        unit.depth += 1
        try:
            output = function(*args, **kwargs)
        finally:
            unit.depth -= 1
        if torch.is_grad_enabled():
            left = kept_tensors(parts)
            if containers:
                # They may have more in them now.
                left += tensors_in(containers)
            self._hook_outputs(unit, output, _left_since(left, unit, inputs))
        if not in_use:
            if self._order is not None and self._order.repeats():
                self._ahead.add(unit)
            elif unit not in self._staying or not torch.is_grad_enabled():
                unit.free()
        return output

    def arrive(self, unit: ShardedUnit) -> None:
        """Called when the backward pass has the gradient of the unit's output and is about to use it."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        unit.calls_ahead -= 1
        left, self._current = self._current, unit
        self._inside.add(unit)
        self._unreduced[unit] = None
        if left is None or left is unit or left.contains_units:
            self._use(unit)
            return
        self._inside.discard(left)
        left.free()
        self._use(unit, meanwhile=None if left.calls_ahead > 0 else left)

    def finish(self) -> None:
        """Average what has not been averaged yet, and wait; a gradient that no rank had becomes None."""
        if self._in_backward:
            self._drop_backward()
        # A forward pass without a backward pass leaves units gathered; between steps modules hold slices.
        self._free_all()
        for unit in self._units:
            if unit.has_kept:
                self._start_reduction(unit)
        self._average_replicated()
        parameters = [parameter for reduced in self._present for parameter in _trained(reduced)]
        if parameters:
            facts = [here for present in self._present.values() for here in present]
            anywhere = AnyRank(facts, parameters[0].device, self._group).wait()
            for parameter, is_anywhere in zip(parameters, anywhere, strict=True):
                if not is_anywhere and parameter in self._new:
                    parameter.grad = None
        self._present, self._new = {}, set()

    def _use(self, unit: ShardedUnit, meanwhile: ShardedUnit | None = None) -> None:
        """Gather a unit and those expected after it; start to reduce ``meanwhile`` before waiting for the unit."""
        wanted: list[ShardedUnit] = []
        if self._order is not None:
            self._order.use(unit)
            wanted = self._order.upcoming(self._prefetch)
        for other in self._ahead.difference(wanted, (unit,)):
            other.free()
        unit.gather()
        # A wanted unit that is gathered, but was not ahead, is in use: it is around this one.
        self._ahead = {other for other in wanted if other in self._ahead or not other.is_gathered}
        for other in wanted:
            other.gather()
        if meanwhile is not None:
            self._reduce(meanwhile)
        if self.watch is not None and unit.is_under_way:
            self.watch.use(unit, self._in_backward)
        else:
            unit.use()

    def _hook_outputs(self, unit: ShardedUnit, output: Any, left: list[Tensor]) -> None:
        """Let autograd call :meth:`arrive` before it uses the gradient of any output, or of what else the call left."""
        tensors = tensors_in(output)
        if not tensors and output is not None:
            raise UsageError(
                f"{unit.name} returns {a_value(output)}, in which no tensor was found: "
                "return tensors, or lists, tuples, dictionaries or dataclasses of them"
            )
        tensors += left
        # If an output is a view and is changed in place, its hook is no longer called, but that of its base is.
        tensors += [tensor._base for tensor in tensors if tensor._base is not None]
        watched = [tensor for tensor in tensors if tensor.requires_grad]
        if watched:
            if not _in_backward_pass():
                unit.calls_ahead += 1
            arrival = _Arrival(self, unit)
            for tensor in watched:
                tensor.register_hook(arrival)

    def _reduce(self, unit: ShardedUnit) -> None:
        del self._unreduced[unit]
        if self.synchronizes:
            self._start_reduction(unit)
        else:
            unit.keep_gradients()

    def _start_reduction(self, unit: ShardedUnit) -> None:
        # One at a time, because the buffers of a reduction are as large as the unit.
        self._finish_reduction()
        self._note(unit, unit.start_reduction())
        self._reducing = unit

    def _finish_reduction(self) -> None:
        if self._reducing is not None:
            self._reducing.finish_reduction()
            self._reducing = None

    def _average_replicated(self) -> None:
        for bucket in self.replicated:
            bucket.launch()
            self._note(bucket, bucket.present)
        self._finish_reduction()
        for bucket in self.replicated:
            bucket.wait()
            bucket.finish([True] * len(bucket.parameters))

    def _note(self, reduced: ShardedUnit | GradientBucket, present: list[bool]) -> None:
        before = self._present.get(reduced)
        if before is not None:
            self._present[reduced] = [here or earlier for here, earlier in zip(present, before, strict=True)]
            return
        self._present[reduced] = present
        if not all(present):
            self._new.update(parameter for parameter in _trained(reduced) if parameter.grad is None)

    def _end_backward(self) -> None:
        for unit in list(self._unreduced):
            unit.free()
            self._reduce(unit)
        self._finish_reduction()
        self._leave_backward()

    def _drop_backward(self) -> None:
        for unit in self._units:
            unit.drop_gradients()
        self._reducing, self._unreduced = None, {}
        self._present, self._new = {}, set()
        self._leave_backward()

    def _leave_backward(self) -> None:
        self._free_all()
        self._inside, self._current, self._order = set(), None, None
        self._in_backward = False

    def _free_all(self) -> None:
        for unit in self._units:
            unit.free()
        self._ahead = set()


class _Arrival:
    """Tensor hook that reports each backward pass once, on however many outputs of a call it is registered."""

    def __init__(self, runner: UnitRunner, unit: ShardedUnit):
        self._runner = runner
        self.unit = unit
        self._last_pass: int | None = None

    def __call__(self, gradient: Tensor) -> None:
        # Autograd runs hooks with gradients enabled where it makes a graph of the backward pass.
        if torch.is_grad_enabled():
            raise UsageError(
                f"the backward pass through {self.unit.name} has create_graph=True, and FSDP frees the weights that a "
                "second one would need: take gradients of gradients with DDP or a ShardedOptimizer"
            )
        this_pass = torch._C._current_graph_task_id()
        if this_pass != self._last_pass:
            self._last_pass = this_pass
            self._runner.arrive(self.unit)


def _left_since(left: Sequence[Tensor], unit: ShardedUnit, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Those tensors that this call has computed: they are no inputs, and no earlier call of the unit has left them."""
    given = {id(tensor) for tensor in inputs}
    return [
        tensor
        for tensor in left
        if tensor.grad_fn is not None and id(tensor) not in given and not _is_watched(tensor, unit)
    ]


def _is_watched(tensor: Tensor, unit: ShardedUnit) -> bool:
    hooks = tensor._backward_hooks or {}
    return any(isinstance(hook, _Arrival) and hook.unit is unit for hook in hooks.values())


def _trained(reduced: ShardedUnit | GradientBucket) -> list[nn.Parameter]:
    """The parameters, as the optimizer updates them, whose gradients were reduced."""
    if isinstance(reduced, GradientBucket):
        return list(reduced.parameters.values())
    return [parameter.shard for parameter in reduced.trained]


def _in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1
