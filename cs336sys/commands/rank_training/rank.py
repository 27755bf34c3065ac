"""One rank's measurement: the phases of its steps, what it communicates, and when."""

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
from cs336sys.errors import DEBUG_VARIABLE, CapabilityError, UserCodeError
from cs336sys.findings import sentence
from cs336sys.machine.device import free_gpu_memory, peak_memory_gib, reset_peak_memory
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
    allocated_before = torch.cuda.memory_allocated(device) if on_gpu else None
    history: AllocationHistory = CudaHistory(device) if on_gpu else CpuHistory()
    # The history of the CPU misses what Gloo's threads free, so that collectives have to end before launches return.
    collectives_wait = nullcontext() if on_gpu else communication.communication_at_once()
    with history, collectives_wait, _OptimizerMemory(history) as optimizer_memory:
        step = build()
        built = history.mark()
        with step.on_launch_stream():  # On which it may be captured later.
            before_first_update = _run_marked(step, history)
            # Before the second step replaces them.
            first_gradient_addresses, after_first_update = optimizer_memory.gradients, optimizer_memory.after_step
            second_start = history.mark()
            with communication.recorded_communication() as communications:
                before_second_update = _run_marked(step, history)
        end = history.mark()
        parameter_addresses = _addresses(history, step.model.parameters())
    if history.lost_events:
        return step, [], communications
    timeline = build_timeline(history.events, regions=(), held_size=allocated_before)
    totals = timeline.totals()
    marks = (built, before_first_update, after_first_update, before_second_update, end)
    positions = dict(zip(MOMENTS[:-1], map(history.position, marks), strict=True))  # The last moment is the peak.
    second_step = Region("step", history.position(second_start), positions["after the optimizer"])
    positions["peak"] = peak_position(totals, second_step)
    weights = _blocks_at(timeline, parameter_addresses, positions["before the optimizer"])
    state = _blocks_at(timeline, optimizer_memory.state, second_step.end)
    # Every step allocates its gradients anew.
    first_gradients = _blocks_at(timeline, first_gradient_addresses, positions["before the first optimizer step"])
    gradients = _blocks_at(timeline, optimizer_memory.gradients, positions["before the optimizer"])
    memory = []
    for moment, position in positions.items():
        is_in_first_step = position <= positions["after the first optimizer step"]
        present_gradients = first_gradients if is_in_first_step else gradients
        in_weights, in_gradients, in_state = (
            sum(block.size for block in blocks if block.start <= position < block.end)
            for blocks in (weights, present_gradients, state)
        )
        other = totals[position] - in_weights - in_gradients - in_state
        memory.append(RankMemory(moment, in_weights, in_gradients, in_state, rest=other))
    return step, memory, communications


def _run_marked(step: ParallelStep, history: AllocationHistory) -> int:
    """Run the phases, and return the history's mark before the optimizer's."""
    for name, run in step.phases.items():
        if name == "optimizer":
            before = history.mark()
        run()
    return before


class _OptimizerMemory(ExitStack):
    """Notes, until it is left, where the gradients and the state of optimizers are that step, of inner ones, too.

    Attributes:
        gradients, state: addresses at the last step.
        after_step: the history's mark after it, when gradients are not dropped yet.
    """

    def __init__(self, history: AllocationHistory):
        super().__init__()
        self.gradients: set[int] = set()
        self.state: set[int] = set()
        self.after_step = history.mark()
        self._history = history
        self._depth = 0
        self.callback(register_optimizer_step_pre_hook(self._before).remove)
        self.callback(register_optimizer_step_post_hook(self._after).remove)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        # An optimizer inside another steps during the other's step, and adds what it has.
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
    """Return the addresses of tensors that are not None; of torch's DTensor, that of its part on this rank."""
    present = [tensor for tensor in tensors if tensor is not None]
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in present)
    # A slice may be empty: without memory, its address is 0.
    return {history.address(tensor) for tensor in local} - {0}


def _blocks_at(timeline: AllocationTimeline, addresses: set[int], position: int) -> list[Allocation]:
    """Return the allocations that hold these addresses at a position of the history."""
    blocks = (block for block in timeline.allocations if block.address in addresses)
    return [block for block in blocks if block.start <= position < block.end]


# What latency and bandwidth of all-reduces are fitted to: bytes, calls in a row, and repetitions of those.
_LINK_BYTES = {"cuda": (10_000, 1_000_000, 10_000_000, 100_000_000), "cpu": (1_000, 100_000, 1_000_000, 10_000_000)}
_LINK_CALLS = 10
_LINK_REPETITIONS = 3


@dataclass(frozen=True)
class RankMeasurement:
    """One rank's measurement of one strategy."""

    # In ms, a series for each phase, ``step``, ``wall`` and, where the step communicates, ``communication``: its
    # collectives alone, launched one after another.
    samples: dict[str, Samples]
    peak_gib: float | None  # Most that tensors held from before the first step to the last; None on a CPU.
    calls: int  # Collectives a step; several tensors launched as one group count as one.
    gradient_calls: int  # Those of them that carry numbers, not flags.
    communicated_bytes: int  # Of the arrays of all calls.
    timeline: communication.StepTimeline | None  # Of one more step, on rank 0 of several, if the profiler saw it.
    sent_bytes: float = 0.0  # By this rank in a step where ranks form a ring, flags aside.
    memory: Sequence[RankMemory] = ()  # At ``MOMENTS``; empty where it was not recorded.
    # How many ms late the weights of units arrived in some steps, by unit and whether for the backward pass.
    gathers: Mapping[tuple[str, bool], Sequence[float]] = field(default_factory=dict)
    capture_s: float | None = None  # Spent to capture the step in CUDA graphs; None if it was launched.
    graph_pool_gib: float | None = None  # Memory that only the graphs can use.
    warnings: Sequence[str] = ()  # Of the last loss of this rank.


def fits_on_one_rank(workload: ParallelWorkload) -> bool:
    """Return whether a rank's memory is predicted to hold the whole training state and its share of the batch."""
    device = rank_device(workload)
    if device.type == "cpu":
        return True
    training = workload.training
    if training.is_ours:
        # The prediction does not know keep=N: without checkpoints, more is needed.
        checkpointing = "none" if kept_blocks(workload.checkpointing) is not None else workload.checkpointing
        needed_bytes = replace(training, size=workload.share_size).predicted_peak(checkpointing).total
    else:
        # Weights, gradients and two states in fp32, and as much again for activations; 0 where it cannot be counted.
        needed_bytes = 2 * 4 * 4 * (count_step(training).parameters or 0)
    # Not all of it can be filled: allocators fragment it, and NCCL and cuBLAS take some.
    return needed_bytes < 0.9 * torch.cuda.get_device_properties(device).total_memory


def rank_job(run: Callable[..., T]) -> Callable[..., T]:
    """Decorate what ranks run on a workload: memory is free before and after, and errors of user code are sentences."""

    @functools.wraps(run)
    def on_rank(workload: ParallelWorkload, *arguments: Any) -> T:
        release_last_job(workload)
        with explaining_errors_of_rank(workload):
            result = run(workload, *arguments)
        release_last_job(workload)
        return result

    return on_rank


@rank_job
def measure_on_rank(workload: ParallelWorkload, trace: Path | None = None) -> RankMeasurement:
    """Time the steps of one strategy; rank 0 writes one more to a Chrome ``trace``. All ranks call it together."""
    device, training, record = rank_device(workload), workload.training, workload.strategy_record
    memory: Sequence[RankMemory] = ()
    communications: list[communication.Communication] | None = None  # Of a step, recorded at one of three places.
    if workload.strategy in SHARD_STRATEGIES:
        step, memory, communications = build_recorded(functools.partial(ParallelStep, workload, device), device)
    else:
        step = ParallelStep(workload, device)
    if training.uses_graphs and communications is None:
        with step.on_launch_stream():  # A replay hands nothing to torch's dispatcher.
            step()  # torch's DDP makes its buckets anew after the first step.
            communications = _record_communication(step)
    reset_peak_memory(device)
    step.capture()  # If the workload has graphs.
    # Ranks that do not synchronize must compute at the same time, too.
    dist.barrier()
    samples = time_steps(step, step.phases)
    warnings = training_warnings(step.loss, training)
    peak_gib = peak_memory_gib(device)
    if not record.communicates:
        # Nothing else of it is compared with other strategies, and each further step may take seconds.
        return RankMeasurement(samples, peak_gib, calls=0, gradient_calls=0, communicated_bytes=0, timeline=None)
    if communications is None:  # Launched steps of ddp: after they were timed.
        communications = _record_communication(step)
    copy_engines = step.replica.copy_engines
    timeline = None
    # One rank sends nothing that lanes could show, and its step may take a quarter of a minute.
    if dist.get_world_size() > 1:
        has_copies = copy_engines is not None
        profile = functools.partial(communication.profile_step, step.phases, device, copies_communicate=has_copies)
        timeline = run_profiled(step, profile)
    gathers = _watch_gathers(step)
    # By themselves copies and means are launched more slowly than they run: 25 ms for large's, which take 9 in a graph.
    if communications and copy_engines is None:
        # Without sharing, collectives of a fully sharded model, or of long sequences, may need more than a GPU has.
        shares_memory = record.shards_weights or record.splits_sequences
        tensors: dict[Any, Tensor] | None = {} if shares_memory else None
        launchers = [collective.launcher(tensors) for collective in communications]
        samples["communication"] = _time_alone(launchers, training.steps, device)
    # Last, so that nothing is measured with its ranges.
    if trace is not None:
        write_step_trace(step, device, trace)
    of_numbers = [collective for collective in communications if not collective.is_flags]
    return RankMeasurement(
        samples,
        peak_gib,
        calls=len(communications),
        gradient_calls=len(of_numbers),
        communicated_bytes=sum(collective.bytes for collective in communications),
        timeline=timeline,
        sent_bytes=sum(collective.sent_bytes for collective in of_numbers),
        memory=memory,
        gathers=gathers,
        capture_s=step.graphs.capture_s if step.graphs is not None else None,
        graph_pool_gib=step.graphs.pool_bytes / GIB if step.graphs is not None else None,
        warnings=warnings,
    )


def run_profiled(step: ParallelStep, profile: Callable[[], T]) -> T | None:
    """Run one more step, on rank 0 by ``profile``, whose result is returned; on others without a profiler."""
    if dist.get_rank() == 0:
        return profile()
    step()
    communication.finish_communication()
    return None


def write_step_trace(step: ParallelStep, device: torch.device, path: Path) -> None:
    """Run one more step, which rank 0 writes to a Chrome trace."""
    if dist.get_rank() == 0:
        step.mark(RecordFunctionMarks())
    run_profiled(step, lambda: communication.write_trace(step.phases, device, path))


def _record_communication(step: ParallelStep) -> list[communication.Communication]:
    """Run a step, and return its collectives; where copy engines send gradients, those that would without engines."""
    engines = step.replica.copy_engines
    collectives = nullcontext() if engines is None else engines.switched_off()
    with collectives, communication.recorded_communication() as communications:
        step()
    return communications


def _watch_gathers(step: ParallelStep) -> dict[tuple[str, bool], list[float]]:
    """Return how many ms late each gather was, for each unit and pass in three steps."""
    late_ms: dict[tuple[str, bool], list[float]] = {}
    # Replays call nothing that could be watched.
    if step.replica.watched_gathers is not None and step.graphs is None:
        with step.replica.watched_gathers() as watch:
            for _ in range(3):
                step()
        for timing in watch.timings():
            late_ms.setdefault((timing.unit, timing.is_backward), []).append(timing.late_ms)
    return late_ms


def time_all_reduces(workload: ParallelWorkload) -> dict[int, float]:
    """Return how long an all-reduce takes, in s by its size in bytes; the next is launched without waiting for it."""
    device = rank_device(workload)
    times_s = {}
    for size_bytes in _LINK_BYTES[device.type]:
        tensor = torch.zeros(size_bytes // 4, device=device)  # In fp32.

        def launch(tensor: Tensor = tensor) -> Callable[[], Any]:
            return dist.all_reduce(tensor, async_op=True).wait

        times_s[size_bytes] = _time_alone([launch] * _LINK_CALLS, _LINK_REPETITIONS, device).median / 1e3 / _LINK_CALLS
    return times_s


def _time_alone(launchers: Sequence[Callable[[], Any]], repetitions: int, device: torch.device) -> Samples:
    """Time collectives launched one after another, in ms, ``repetitions`` times after two that warm up."""
    phases = {"communication": functools.partial(communication.run_alone, launchers)}
    return time_phases(phases, warmup=2, steps=repetitions, device=device)["communication"]


# Gloo ends a rank that receives more than it expects. Which of these its peer sees is a race: whether it had data left
# to read, none, or was writing.
_LOST_CONNECTION = re.compile("Connection (reset|closed) by peer|Broken pipe")


@contextmanager
def explaining_errors_of_rank(workload: ParallelWorkload) -> Iterator[None]:
    """Tell errors of user code as :func:`telling_user_errors` does, and explain two of torch's.

    With CS336SYS_DEBUG the rank's traceback is added, which otherwise is not sent.
    """
    try:
        with telling_user_errors(workload.training):
            yield
    except UserCodeError as error:
        if "Expected to have finished reduction" in str(error):  # torch's DDP waits for unused parameters.
            reason = sentence(__package__, "unused parameters", strategy=workload.strategy)
            raise CapabilityError(reason) from error
        # Where weights are sharded, every layer that runs has collectives of its own.
        if workload.strategy_record.shards_weights and _LOST_CONNECTION.search(str(error)):
            reason = sentence(__package__, "unmatched collectives", strategy=workload.strategy)
            raise CapabilityError(reason) from error
        if DEBUG_VARIABLE in os.environ:
            error.add_note("".join(traceback.format_exception(error.__cause__ or error)))
        raise


_compiled_for: tuple[object, ...] = ()


def release_last_job(workload: ParallelWorkload) -> None:
    """Free what the last job left behind; compiled code only if this job cannot use it."""
    global _compiled_for
    # Compiled code depends on the workload whatever its strategy, and on the wrapper. With autocast: whether it is
    # torch's (its DDP cuts graphs where buckets end). Without, as where weights are sharded: which strategy it is.
    wrapper = workload.strategy_record.is_torchs if workload.uses_autocast else workload.strategy
    compiled_for = (workload.unsynchronized, wrapper)
    # Without torch._dynamo, this would import the compiler.
    if compiled_for != _compiled_for and "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    _compiled_for = compiled_for
    free_gpu_memory()
