"""What a rank's memory holds at five moments of training, by component, from the allocator's own events."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cs336sys.accounting.sharding.step import MOMENTS, RankMemory
from cs336sys.experiments.parallel.communication import (
    Communication,
    communication_at_once,
    recorded_communication,
)
from cs336sys.experiments.parallel.step import ParallelStep
from cs336sys.measure.allocations.history import AllocationHistory, CpuHistory, CudaHistory
from cs336sys.measure.allocations.timeline import AllocationTimeline, Region, build_timeline, peak_position


def build_recorded(
    build: Callable[[], ParallelStep], device: torch.device
) -> tuple[ParallelStep, list[RankMemory], list[Communication]]:
    """Build a step and run it twice; all ranks call it together.

    Returns:
        the step; what its memory held: after it was built, before the first optimizer step, and in the second run
        (optimizer state and buffers of communication exist then) before the optimizer, after it and at the peak. An
        empty list where the allocator's history was too short; and the collectives of the second run.
    """
    on_gpu = device.type == "cuda"
    held_before = torch.cuda.memory_allocated(device) if on_gpu else None
    history: AllocationHistory = CudaHistory(device) if on_gpu else CpuHistory()
    # The history of the CPU misses what Gloo's threads free; that of a GPU misses nothing.
    communication = nullcontext() if on_gpu else communication_at_once()
    with history, communication, _OptimizerMemory(history) as optimizer_memory:
        step = build()
        built = history.mark()
        with step.aside():
            first = _run_marked(step, history)
            first_gradients = optimizer_memory.gradients
            start = history.mark()
            with recorded_communication() as communications:
                before = _run_marked(step, history)
        end = history.mark()
        parameters = _addresses(history, step.model.parameters())
    if history.lost_events:
        return step, [], communications
    timeline = build_timeline(history.events, regions=(), held_size=held_before)
    totals = timeline.totals()
    at_built, at_first, at_start, at_optimizer, at_end = (
        history.position(mark) for mark in (built, first, start, before, end)
    )
    at_peak = peak_position(totals, Region("step", at_start, at_end))
    kept = _blocks(timeline, parameters, at_optimizer), _blocks(timeline, optimizer_memory.state, at_end)
    gradients = _blocks(timeline, optimizer_memory.gradients, at_optimizer)
    of_first = _blocks(timeline, first_gradients, at_first)
    positions = (at_built, at_first, at_optimizer, at_end, at_peak)
    held = [
        _held(moment, position, (kept[0], of_first if position == at_first else gradients, kept[1]), totals)
        for moment, position in zip(MOMENTS, positions, strict=True)
    ]
    return step, held, communications


def _run_marked(step: ParallelStep, history: AllocationHistory) -> int:
    """Run the step, and return the mark of the moment before the optimizer."""
    for name, run in step.phases.items():
        if name == "optimizer":
            before = history.mark()
        run()
    return before


class _OptimizerMemory:
    """Notes where the gradients and the state of every optimizer that steps are, of optimizers inside others, too.

    Attributes:
        gradients, state: addresses at the last step.
    """

    def __init__(self, history: AllocationHistory):
        self.gradients: set[int] = set()
        self.state: set[int] = set()
        self._history = history
        self._depth = 0

    def __enter__(self) -> "_OptimizerMemory":
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if self._depth == 0:
            self.gradients, self.state = set(), set()
        self._depth += 1
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self.gradients |= _addresses(self._history, (parameter.grad for parameter in parameters))

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._depth -= 1
        values = (value for state in optimizer.state.values() for value in state.values())
        self.state |= _addresses(self._history, (value for value in values if isinstance(value, Tensor)))


def _addresses(history: AllocationHistory, tensors: Iterable[Tensor | None]) -> set[int]:
    """Those of the tensors that are not None; of torch's DTensor, that of its part on this rank."""
    present = [tensor for tensor in tensors if tensor is not None]
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in present)
    # A slice may be empty: it has no memory.
    return {history.address(tensor) for tensor in local} - {0}


# Allocations as (first position, position after the last, bytes).
_Block = tuple[int, int, int]


def _blocks(timeline: AllocationTimeline, addresses: set[int], position: int) -> list[_Block]:
    """The allocations at these addresses at a moment."""
    return [
        (allocation.start, allocation.end, allocation.size)
        for allocation in timeline.allocations
        if allocation.address in addresses and allocation.start <= position < allocation.end
    ]


def _held(moment: str, position: int, components: tuple[list[_Block], ...], totals: list[int]) -> RankMemory:
    parameters, gradients, state = (
        sum(size for start, end, size in blocks if start <= position < end) for blocks in components
    )
    return RankMemory(moment, parameters, gradients, state, totals[position] - parameters - gradients - state)
