"""One rank's measurement: the phases of its steps, what it communicates, and when."""

import contextlib
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.step import MOMENTS, RankMemory
from cs336sys.allocations.history import AllocationHistory, CpuHistory, CudaHistory
from cs336sys.allocations.timeline import Allocation, AllocationTimeline, Region, build_timeline, peak_position
from cs336sys.commands.rank_training import communication
from cs336sys.commands.rank_training.verification import verify_training
from cs336sys.errors import DEBUG_VARIABLE, CapabilityError, UserCodeError
from cs336sys.machine.device import free_gpu_memory, peak_memory_gib, reset_peak_memory
from cs336sys.parity.weights import WeightDifference
from cs336sys.results.model import Samples
from cs336sys.settings.parallel import SHARD_STRATEGIES, ParallelWorkload
from cs336sys.timing.phases import time_phases
from cs336sys.training.flop_counting import count_step
from cs336sys.training.profiler_ranges import RecordFunctionMarks
from cs336sys.training.ranks.step import ParallelStep, rank_device
from cs336sys.training.step import time_steps, training_warnings
from cs336sys.training.user_models import telling_user_errors

T = TypeVar("T")


def build_recorded(
    build: Callable[[], ParallelStep], device: torch.device
) -> tuple[ParallelStep, list[RankMemory], list[communication.Communication]]:
    """Build a step, run it twice, and record what its memory holds; all ranks call it together.

    Returns:
        The step; its memory at each of ``MOMENTS``, or an empty list where the allocator's history was too short; the
        collectives of the second run, in which the buffers of communication exist.
    """
    on_gpu = device.type == "cuda"
    held_before = torch.cuda.memory_allocated(device) if on_gpu else None
    history: AllocationHistory = CudaHistory(device) if on_gpu else CpuHistory()
    # The history of the CPU misses what Gloo's threads free; that of a GPU misses nothing.
    collectives_wait = nullcontext() if on_gpu else communication.communication_at_once()
    with history, collectives_wait, _OptimizerMemory(history) as optimizer_memory:
        step = build()
        built = history.mark()
        # On the stream on which the step may be captured later.
        with step.on_launch_stream():
            before_first_update = _run_marked(step, history)
            first_gradient_addresses, after_first_update = optimizer_memory.gradients, optimizer_memory.after_step
            second_start = history.mark()
            with communication.recorded_communication() as communications:
                before_second_update = _run_marked(step, history)
        end = history.mark()
        parameters = _addresses(history, step.model.parameters())
    if history.lost_events:
        return step, [], communications
    timeline = build_timeline(history.events, regions=(), held_size=held_before)
    totals = timeline.totals()
    at_built, at_first_update, at_after_first_update, at_second_start, at_second_update, at_end = (
        history.position(mark)
        for mark in (built, before_first_update, after_first_update, second_start, before_second_update, end)
    )
    at_peak = peak_position(totals, Region("step", at_second_start, at_end))
    weights = _blocks_at(timeline, parameters, at_second_update)
    state = _blocks_at(timeline, optimizer_memory.state, at_end)
    gradients = _blocks_at(timeline, optimizer_memory.gradients, at_second_update)
    first_gradient_blocks = _blocks_at(timeline, first_gradient_addresses, at_first_update)
    moments = []
    positions = (at_built, at_first_update, at_after_first_update, at_second_update, at_end, at_peak)
    for moment, position in zip(MOMENTS, positions, strict=True):
        in_parameters, in_gradients, in_state = (
            sum(block.size for block in blocks if block.start <= position < block.end)
            for blocks in (weights, first_gradient_blocks if position <= at_after_first_update else gradients, state)
        )
        other = totals[position] - in_parameters - in_gradients - in_state
        moments.append(RankMemory(moment, in_parameters, in_gradients, in_state, other))
    return step, moments, communications


def _run_marked(step: ParallelStep, history: AllocationHistory) -> int:
    """Run the phases, and return the history's mark before the optimizer's."""
    for name, run in step.phases.items():
        if name == "optimizer":
            before = history.mark()
        run()
    return before


class _OptimizerMemory:
    """Notes where the gradients and the state of every optimizer that steps are, of optimizers inside others, too.

    Attributes:
        gradients, state: addresses at the last step.
        after_step: the mark after it, when gradients are not dropped yet.
    """

    def __init__(self, history: AllocationHistory):
        self.gradients: set[int] = set()
        self.state: set[int] = set()
        self.after_step = history.mark()
        self._history = history
        self._depth = 0

    def __enter__(self) -> "_OptimizerMemory":
        self._handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
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
        self.after_step = self._history.mark()


def _addresses(history: AllocationHistory, tensors: Iterable[Tensor | None]) -> set[int]:
    """Those of the tensors that are not None; of torch's DTensor, that of its part on this rank."""
    present = [tensor for tensor in tensors if tensor is not None]
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in present)
    # A slice may be empty: it has no memory.
    return {history.address(tensor) for tensor in local} - {0}


def _blocks_at(timeline: AllocationTimeline, addresses: set[int], position: int) -> list[Allocation]:
    return [
        allocation
        for allocation in timeline.allocations
        if allocation.address in addresses and allocation.start <= position < allocation.end
    ]


# What latency and bandwidth of all-reduces are fitted to: sizes in bytes, calls in a row, and repetitions of those.
_LINK_SIZES = {"cuda": (10_000, 1_000_000, 10_000_000, 100_000_000), "cpu": (1_000, 100_000, 1_000_000, 10_000_000)}
_LINK_CALLS = 10
_LINK_REPETITIONS = 3


@dataclass(frozen=True)
class RankMeasurement:
    """One rank's measurement of one strategy.

    Attributes:
        samples: in ms, a series for each phase, ``step``, ``wall`` and, where the step communicates, ``communication``:
            its collectives alone, launched one after another.
        peak_gib: most memory that tensors held from before the first step to the last, in GiB; None on a CPU.
        calls: collectives a step; several tensors launched as one group count as one.
        gradient_calls: those of them that carry numbers, not flags.
        communicated_bytes: of the arrays of all calls.
        timeline: of one more step, on rank 0; None where the profiler saw nothing, and of one rank alone.
        sent_bytes: what this rank sends in a step where ranks form a ring, flags aside.
        memory: at the moments of ``accounting.sharding.step.MOMENTS``; empty where it was not recorded.
        gathers: how late the weights of units arrived in some steps, by unit and whether for the backward pass.
        capture_s: how long it took to capture the step in CUDA graphs; None if it was launched.
        graph_pool_gib: memory that only the graphs can use.
        warnings: of the last loss of this rank.
    """

    samples: dict[str, Samples]
    peak_gib: float | None
    calls: int
    gradient_calls: int
    communicated_bytes: int
    timeline: communication.StepTimeline | None
    sent_bytes: float = 0.0
    memory: Sequence[RankMemory] = ()
    gathers: Mapping[tuple[str, bool], Sequence[float]] = field(default_factory=dict)
    capture_s: float | None = None
    graph_pool_gib: float | None = None
    warnings: Sequence[str] = ()


def fits_on_one_rank(workload: ParallelWorkload) -> bool:
    """Return whether a rank's memory is predicted to hold the whole training state and its share of the batch."""
    device = rank_device(workload)
    if device.type == "cpu":
        return True
    training = workload.training
    if training.is_ours:
        checkpointing = "none" if kept_blocks(workload.checkpointing) is not None else workload.checkpointing
        needed_bytes = replace(training, size=workload.share_size).predicted_peak(checkpointing).total
    else:
        # Weights, gradients and two states in fp32, and as much again for activations.
        needed_bytes = 2 * 4 * 4 * (count_step(training).parameters or 0)
    # How much of a GPU's memory a model may be predicted to fill: allocators fragment it, and NCCL and cuBLAS take
    # some.
    return needed_bytes < 0.9 * torch.cuda.get_device_properties(device).total_memory


def rank_job(run: Callable[..., T]) -> Callable[..., T]:
    """Decorate what ranks run on a workload: memory is free before and after, and errors of user code are told."""

    @functools.wraps(run)
    def on_rank(workload: ParallelWorkload, *arguments: Any) -> T:
        release_last_job(workload)
        with explaining_errors_of_rank(workload):
            result = run(workload, *arguments)
        release_last_job(workload)
        return result

    return on_rank


@rank_job
def verify_on_rank(workload: ParallelWorkload) -> WeightDifference:
    """:func:`~cs336sys.commands.rank_training.verification.verify_training`, with memory free before and after."""
    return verify_training(workload)


@rank_job
def measure_on_rank(workload: ParallelWorkload, trace: Path | None = None) -> RankMeasurement:
    """Time the steps of one strategy; rank 0 writes one more to a Chrome ``trace``. All ranks call it together."""
    device = rank_device(workload)
    memory: Sequence[RankMemory] = ()
    communications: list[communication.Communication] | None = None
    if workload.strategy in SHARD_STRATEGIES:
        step, memory, communications = build_recorded(functools.partial(ParallelStep, workload, device), device)
    else:
        step = ParallelStep(workload, device)
    training = workload.training
    if training.cuda_graph == "on" and communications is None:
        # A replay hands nothing to torch's dispatcher.
        with step.on_launch_stream():
            # torch's DDP makes its buckets anew after the first step.
            step()
            communications = _recorded(step)
    reset_peak_memory(device)
    step.capture()
    # Ranks that do not synchronize must compute at the same time, too.
    dist.barrier()
    samples = time_steps(step, step.phases)
    warnings = training_warnings(step.loss, training)
    peak_gib = peak_memory_gib(device)
    if not workload.strategy_record.communicates:
        # Its time is all that others are compared with, and a step may take seconds.
        return RankMeasurement(samples, peak_gib, calls=0, gradient_calls=0, communicated_bytes=0, timeline=None)
    if communications is None:
        communications = _recorded(step)
    timeline = None
    # One rank sends nothing that lanes could show, and its step may take a quarter of a minute.
    if dist.get_world_size() > 1:
        copies = step.replica.copy_engines is not None
        profile = functools.partial(communication.profile_step, step.phases, device, copies_communicate=copies)
        timeline = run_profiled(step, profile)
    gathers = _watched_gathers(step)
    # By themselves copies and means are launched more slowly than they run: 25 ms for large's, which take 9 in a graph.
    if communications and step.replica.copy_engines is None:
        # Without sharing, collectives of a fully sharded model, or of long sequences, may need more than a GPU has.
        shares = workload.strategy_record.shards_weights or workload.strategy_record.splits_sequences
        tensors: dict[Any, Tensor] | None = {} if shares else None
        launchers = [collective.launcher(tensors) for collective in communications]
        samples["communication"] = _time_alone(launchers, training.steps, device)
    # Last, so that nothing is measured with its ranges.
    if trace is not None:
        write_step_trace(step, device, trace)
    return RankMeasurement(
        samples,
        peak_gib,
        calls=len(communications),
        gradient_calls=sum(not collective.is_flags for collective in communications),
        communicated_bytes=sum(collective.bytes for collective in communications),
        timeline=timeline,
        sent_bytes=sum(collective.sent_bytes for collective in communications if not collective.is_flags),
        memory=memory,
        gathers=gathers,
        capture_s=step.graphs.capture_s if step.graphs is not None else None,
        graph_pool_gib=step.graphs.pool_bytes / GIB if step.graphs is not None else None,
        warnings=warnings,
    )


def run_profiled(step: ParallelStep, profile: Callable[[], T]) -> T | None:
    """One more step, which rank 0 runs by ``profile``, and all others without a profiler; what rank 0 saw."""
    if dist.get_rank() == 0:
        return profile()
    step()
    communication.finish_communication()
    return None


def write_step_trace(step: ParallelStep, device: torch.device, path: Path) -> None:
    """One more step, which rank 0 writes to a Chrome trace."""
    if dist.get_rank() == 0:
        step.mark(RecordFunctionMarks())
    run_profiled(step, lambda: communication.write_trace(step.phases, device, path))


def _recorded(step: ParallelStep) -> list[communication.Communication]:
    """Its collectives; where copy engines send gradients, those that would."""
    engines = step.replica.copy_engines
    collectives = contextlib.nullcontext() if engines is None else engines.switched_off()
    with collectives, communication.recorded_communication() as communications:
        step()
    return communications


def _watched_gathers(step: ParallelStep) -> dict[tuple[str, bool], list[float]]:
    """Return how many ms late each gather was, for each unit and pass in some steps."""
    gathers: dict[tuple[str, bool], list[float]] = {}
    # Replays call nothing that could be watched.
    if step.replica.watched_gathers is not None and step.graphs is None:
        with step.replica.watched_gathers() as watch:
            # Steps in which gathers are watched.
            for _ in range(3):
                step()
        for timing in watch.timings():
            gathers.setdefault((timing.unit, timing.is_backward), []).append(timing.late_ms)
    return gathers


def time_all_reduces(workload: ParallelWorkload) -> dict[int, float]:
    """Return how long an all-reduce takes, in s by its size in bytes; the next is launched without waiting for it."""
    device = rank_device(workload)
    times_s = {}
    for size in _LINK_SIZES[device.type]:
        tensor = torch.zeros(size // 4, device=device)
        launchers = [functools.partial(dist.all_reduce, tensor, async_op=True)] * _LINK_CALLS
        times_s[size] = _time_alone(launchers, _LINK_REPETITIONS, device).median / 1e3 / _LINK_CALLS
    return times_s


def _time_alone(launchers: Sequence[Callable[[], Any]], repetitions: int, device: torch.device) -> Samples:
    phases = {"communication": functools.partial(communication.run_alone, launchers)}
    # Repetitions of the communication alone before it is timed.
    return time_phases(phases, warmup=2, steps=repetitions, device=device)["communication"]


# Gloo ends a rank that receives more than it expects. Which of these its peer sees is a race: whether it had data left
# to read, none, or was writing.
_LOST_CONNECTION = re.compile("Connection (reset|closed) by peer|Broken pipe")


@contextlib.contextmanager
def explaining_errors_of_rank(workload: ParallelWorkload) -> Iterator[None]:
    """Tell errors of user code as :func:`telling_user_errors` does, and explain two of torch's.

    With CS336SYS_DEBUG the rank's traceback is added, which otherwise is not sent.
    """
    try:
        with telling_user_errors(workload.training):
            yield
    except UserCodeError as error:
        if "Expected to have finished reduction" in str(error):
            raise CapabilityError(
                f"strategy '{workload.strategy}': torch's DDP waits for the gradients of all parameters, and a step "
                f"of this model used only some; choose another strategy"
            ) from error
        # Where weights are sharded, every layer that runs has collectives of its own.
        if workload.strategy_record.shards_weights and _LOST_CONNECTION.search(str(error)):
            raise CapabilityError(
                f"strategy '{workload.strategy}': the ranks' collectives did not match, as where a model skips other "
                "layers on each rank: all must run the same ones; choose another strategy, or skip none"
            ) from error
        if DEBUG_VARIABLE in os.environ:
            error.add_note("".join(traceback.format_exception(error.__cause__ or error)))
        raise


_compiled_for: str | None = None


def release_last_job(workload: ParallelWorkload) -> None:
    """Free what the last job left behind; compiled code only if this job cannot use it."""
    global _compiled_for
    # torch compiles something else under its own wrappers (its DDP cuts graphs where buckets end), and for sharded
    # models, which compute without autocast.
    kind = workload.strategy_record.is_torchs if workload.uses_autocast else workload.strategy
    key = f"{workload.unsynchronized} {kind}"
    if _compiled_for != key:
        # It would import the compiler.
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        _compiled_for = key
    free_gpu_memory()
