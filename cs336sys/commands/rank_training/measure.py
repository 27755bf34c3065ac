"""Measures one cell of ``ddp`` or ``shard``, or of ``shard --board``: checked first, then timed."""

import hashlib
import math
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336sys.accounting.communication import AlphaBeta, exposed_communication, fit_alpha_beta
from cs336sys.accounting.hardware import impossible_utilization, model_flops_utilization, peak_tflops
from cs336sys.accounting.sharding.selective_checkpointing import computed_flops
from cs336sys.commands.rank_training import rank as on_rank
from cs336sys.commands.rank_training.communication import StepShares, profile_shares
from cs336sys.commands.rank_training.gradient_check import gradients_outcome
from cs336sys.machine.device import choose_device, peak_memory_gib, reset_peak_memory, synchronize
from cs336sys.parallel.ranks import launch
from cs336sys.parity.weights import STEPS
from cs336sys.results.model import Samples, configuration_key
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.parallel import SHARD_STRATEGIES, ParallelWorkload, bucket_name
from cs336sys.training.flop_counting import count_step
from cs336sys.training.model import initializer_of
from cs336sys.training.ranks.step import ParallelStep, rank_device
from cs336sys.training.step import time_steps, with_notes
from cs336sys.training.user_models import hidden_warnings, why_built_whole

# Steps without communication, by configuration: measured once for all strategies that are compared with them, in each
# round.
_unsynchronized: dict[str, list[on_rank.RankMeasurement]] = {}

# What the check found right in the first of several rounds, by configuration.
_found_right: dict[str, dict[str, Any]] = {}

# Latency and bandwidth of what ranks communicate through, by their number, backend and priority.
_links: dict[tuple[int, str, bool], AlphaBeta] = {}


def measure_parallel_training(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``ddp`` or ``shard``: runs in the worker process, which keeps its ranks for the next cell.

    Samples (ms), each the maximum over ranks: one series a phase, ``step``, ``wall``, ``unsynchronized`` (the step
    without communication, where one rank has memory for it) and ``communication`` (alone). Derived columns: see
    ``docs/columns.md``. The status is ``wrong``, and there are no samples, if the weights are not those of one process.
    """
    workload = ParallelWorkload.from_configuration(configuration)
    ranks = kept_ranks(workload)

    of_all_rounds, number = workload.configuration(), configuration.get("round", 1)
    right = _found_right.get(configuration_key(of_all_rounds)) if number > 1 else None
    if right is None:
        progress(f"checking {workload.strategy} against one process")
        # Weights in half precision are rounded after every step, which hides errors: gradients are compared.
        check = gradients_outcome if workload.has_half_weights else _weights_outcome
        right, failure = check(ranks, workload)
        if failure is not None:
            return failure
        _found_right[configuration_key(of_all_rounds)] = right

    has_baseline = workload.has_unsynchronized
    key = configuration_key(workload.unsynchronized.configuration() | {"round": number}) if has_baseline else ""
    if has_baseline and key not in _unsynchronized and all(ranks.run(on_rank.fits_on_one_rank, workload)):
        progress("timing steps without communication")
        _unsynchronized[key] = ranks.run(on_rank.measure_on_rank, workload.unsynchronized)
    progress(f"timing {workload.strategy}")
    measured = ranks.run(on_rank.measure_on_rank, workload, trace_path(configuration))
    samples = slowest(measured)
    if has_baseline and key in _unsynchronized:
        samples["unsynchronized"] = slowest(_unsynchronized[key])["step"]
    warnings = list(dict.fromkeys(warning for rank in measured for warning in rank.warnings))
    derived = with_notes(right | _derived(workload, measured, samples), warnings)
    if workload.strategy_record.has_buckets:
        progress("timing all-reduces")
        link = _link(ranks, workload)
        derived |= {"link_latency_s": link.latency_s, "link_bytes_per_s": link.bytes_per_s}
    return Outcome("ok", samples, derived)


def _weights_outcome(ranks: launch.Ranks, workload: ParallelWorkload) -> tuple[dict[str, Any], Outcome | None]:
    """Compare weights after some steps; a ``wrong`` outcome where rounding is no reason."""
    differences = ranks.run(on_rank.verify_on_rank, workload)
    worst = max(differences, key=lambda difference: difference.relative)
    derived = _of_the_model(workload) | {"checked_layers": worst.num_layers}
    notes = list(dict.fromkeys(note for rank_difference in differences for note in rank_difference.notes))
    if math.isnan(worst.relative):
        return with_notes(derived, [*notes, worst.reason]), None
    derived = with_notes(derived, notes) | {
        "largest_difference": max(difference.largest for difference in differences),
        "relative_difference_percent": 100 * worst.relative,
    }
    if worst.relative <= worst.allowed:
        return derived, None
    moved, target = "how far one process moves it", f"after {STEPS} steps {worst.parameter}"
    if worst.of_gradients:
        moved, target = "its gradient in one process", f"in the first step the gradient of {worst.parameter}"
    reason = (
        f"{workload.strategy}: {target} is off by {100 * worst.relative:.3g} % of {moved}, more than rounding explains "
        f"({100 * worst.allowed:g} %)"
    )
    if worst.reason:
        reason += f"; {worst.reason}"
    elif workload.training.fused_kernels:
        reason += f"; bench --kernels {workload.training.kernels} tells whether our kernels are off without ranks"
    return derived, Outcome("wrong", derived=derived, reason=reason)


def _link(ranks: launch.Ranks, workload: ParallelWorkload) -> AlphaBeta:
    """Latency and bandwidth of the slowest rank's all-reduces."""
    key = (workload.world_size, _backend(workload), workload.high_priority)
    if key not in _links:
        times_s = ranks.run(on_rank.time_all_reduces, workload)
        slowest = {size: max(of_rank[size] for of_rank in times_s) for size in times_s[0]}
        _links[key] = fit_alpha_beta(list(slowest), list(slowest.values()))
    return _links[key]


def _derived(
    workload: ParallelWorkload, measured: Sequence[on_rank.RankMeasurement], samples: dict[str, Samples]
) -> dict[str, Any]:
    first = measured[0]
    peaks_gib = [rank.peak_gib for rank in measured if rank.peak_gib is not None]
    running_ms = None if first.timeline is None else first.timeline.communication_ms
    derived: dict[str, Any] = {
        **exposed_communication({name: series.median for name, series in samples.items()}, running_ms),
        "overlap_percent": 100 * first.timeline.overlap_ms / running_ms if first.timeline and running_ms else None,
        "calls": first.calls,
        "gradient_calls": first.gradient_calls,
        "communicated_bytes": first.communicated_bytes,
        "peak_gib": max(peaks_gib, default=None),
        "capture_s": max((rank.capture_s for rank in measured if rank.capture_s is not None), default=None),
        "graph_pool_gib": max((rank.graph_pool_gib for rank in measured if rank.graph_pool_gib), default=None),
        **workload.training.throughput(samples["step"]),
        "timeline": None if first.timeline is None else asdict(first.timeline),
    }
    if workload.strategy in SHARD_STRATEGIES:
        derived |= _sharding(measured)
    return derived


def _of_the_model(workload: ParallelWorkload) -> dict[str, Any]:
    """Describe the model: its parameters, and what is done otherwise for a user's."""
    training = workload.training
    if training.is_ours:
        return {"parameters": training.parameters}
    count = count_step(training)
    notes = hidden_warnings(str(training.user.model), count.hidden)
    if count.drops:
        notes.append(f"{training.user.model}: trained without dropout, so that weights can be checked")
    if not workload.uses_autocast and initializer_of(training) is None:
        notes.append(
            f"{training.user.model}: its layers cannot be initialized one by one "
            f"({why_built_whole(str(training.user.model), training.size)}), so each rank holds the whole model in the "
            "host's memory at first"
        )
    return {"parameters": count.parameters, "notes": notes}


def _sharding(measured: Sequence[on_rank.RankMeasurement]) -> dict[str, Any]:
    """Return the columns of ``shard``: memory of each moment on the fullest rank, bytes sent, gathers."""
    timeline = measured[0].timeline
    # A rank whose history was too short has recorded none.
    of_moments = zip(*(rank.memory for rank in measured), strict=False)
    memory = [max(of_ranks, key=lambda moment: moment.total) for of_ranks in of_moments]
    gathers = [
        {
            "unit": unit,
            "is_backward": is_backward,
            "late_ms": max(statistics.median(rank.gathers[unit, is_backward]) for rank in measured),
        }
        for unit, is_backward in measured[0].gathers
    ]
    return {
        "memory": [asdict(moment) for moment in memory],
        "sent_bytes": max(rank.sent_bytes for rank in measured),
        "bare_ms": None if timeline is None else timeline.communication_ms - timeline.overlap_ms,
        "gathers": gathers,
    }


def slowest(measured: "Sequence[on_rank.RankMeasurement] | Sequence[BoardMeasurement]") -> dict[str, Samples]:
    """Return the longest step of all ranks, step by step, with the phases of the same rank, whose sum it is.

    Of the other series, the time of the rank that took longest.
    """

    def longest(name: str, kind: str) -> tuple[float, ...]:
        # Series that are not a part of the step as a rank's events time it.
        key = name if name in ("wall", "communication") else "step"
        keys, times = (
            zip(*(getattr(rank.samples[series], kind) for rank in measured), strict=True) for series in (key, name)
        )
        return tuple(max(zip(*of_ranks, strict=True))[1] for of_ranks in zip(keys, times, strict=True))

    return {
        name: Samples(
            series.unit,
            f"{series.method}, maximum over ranks",
            measured=longest(name, "measured"),
            warmup=longest(name, "warmup"),
        )
        for name, series in measured[0].samples.items()
    }


def kept_ranks(workload: ParallelWorkload) -> launch.Ranks:
    """The ranks of the last cell, or new ones where it had others."""
    backend = _backend(workload)
    if backend == "gloo":
        # On a CPU torch's profiler says at each start that it started (torch 2.13). Read by ranks when they start.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    else:
        # By default each collective in a graph waits for an event, in case others are launched while the graph runs
        # (:meth:`ParallelStep.__call__` sees to it that none is), and leaves a branch of its own: 436 all-reduces of
        # large took 41.2 ms, without 19.2. Branches were more than the GPU has queues: while updated parameters of
        # optimizer-flat arrived, the forward pass of xl stood still for 11 ms of 26.9; without, it takes 20.5.
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    return launch.kept(
        workload.world_size, backend=backend, timeout_s=workload.timeout_s, high_priority=workload.high_priority
    )


def _backend(workload: ParallelWorkload) -> str:
    return workload.backend_on(choose_device(workload.training.device).type)


def trace_path(configuration: Mapping[str, Any]) -> Path | None:
    """A file of its own for each cell: its name says what cells usually differ in, and ends in a digest of everything,
    what a sweep has added to the configuration, too.
    """
    workload = ParallelWorkload.from_configuration(dict(configuration))
    if workload.trace is None:
        return None
    size, training = workload.training.size, workload.training
    bucket = "" if workload.bucket_mb is None else bucket_name(workload.bucket_mb).replace(" ", "").lower()
    ahead = "" if workload.prefetch is None else f"prefetch{workload.prefetch}"
    ahead += f"-gathered{workload.keep_gathered}" if workload.keep_gathered else ""
    checkpoints = "" if workload.checkpointing == "none" else f"checkpoint-{workload.checkpointing}"
    parts = (
        *(size.name, f"context{size.context}", f"batch{size.batch_size}"),
        *(training.precision, training.compile, training.attention, training.optimizer),
        "fused-kernels" if training.is_fused else "",
        f"state-{training.state_dtype}" if training.state_dtype != "fp32" else "",
        "graph" if training.cuda_graph == "on" else "",
        *(f"world{workload.world_size}", f"gradients-{workload.gradient_dtype}", workload.strategy, bucket),
        *(ahead, checkpoints),
        hashlib.sha256(configuration_key(configuration, ignore=("trace", "timeout_s")).encode()).hexdigest()[:8],
    )
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", "_".join(filter(None, parts)))
    return Path(workload.trace) / f"{name}.json.gz"


@dataclass(frozen=True)
class BoardMeasurement:
    """The measurement of one rank.

    Attributes:
        samples: in ms, a series for each phase, ``step`` and ``wall``.
        ready_s: from the beginning until the first step was done: building, compiling of kernels, and that step.
        peak_gib: most memory that tensors held, in a second or later step; None on a CPU.
        reserved_gib: most that the allocator held for them.
        losses: of this rank's sequences, of every step from the first to the last timed one.
        shares: where the time of one more step went; None where the profiler saw nothing.
        device: the GPU's name.
    """

    samples: dict[str, Samples]
    ready_s: float
    peak_gib: float | None
    reserved_gib: float | None
    losses: list[float]
    shares: StepShares | None
    device: str


def measure_board(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``shard --board``: runs in the worker process, which keeps its ranks for the next cell.

    As the 2026 handout's leaderboard (section 9) has it, a step is forward pass, loss, backward pass and AdamW's update
    of all parameters, on random tokens; steps are repeated after a warm-up, all within ten minutes from empty caches.
    Samples (ms), each the maximum over ranks: one series a phase, ``step`` and ``wall``. The status is ``wrong``, and
    there are no samples, if the gradients of a step of few blocks are not those of one process.
    """
    workload = ParallelWorkload.from_configuration(configuration)
    # Most of each GPU is in use: holes that no tensor fits into would cost gate and up of some blocks. Ranks read this
    # when they first use their GPU.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    ranks = kept_ranks(workload)
    # Timed before the check, because the board counts steps that begin with empty caches.
    progress("timing steps")
    measured: list[BoardMeasurement] = ranks.run(measure_board_on_rank, workload, trace_path(configuration))
    progress("checking the gradients of a few blocks against one process")
    derived, failure = gradients_outcome(ranks, workload)
    if failure is not None:
        return failure
    samples = slowest(measured)
    derived |= _board_derived(workload, measured, samples["wall"].median / 1e3)
    impossible = impossible_utilization(derived["hfu_percent"])
    return Outcome("ok", samples, derived) if impossible is None else Outcome("error", reason=impossible)


@on_rank.rank_job
def measure_board_on_rank(workload: ParallelWorkload, trace: Path | None = None) -> BoardMeasurement:
    """Train, and time it; rank 0 writes a Chrome ``trace`` of one step. All ranks call it together."""
    device = rank_device(workload)
    on_gpu = device.type == "cuda"
    started = time.perf_counter()
    # All steps are on one batch, whose loss says whether they train. AdamW's default, 1e-3, is too much for random
    # weights of the 8B model: its loss leaps from 12 up to 14.
    step = ParallelStep(workload, device, lr=1e-4)
    # Of all steps, () each, kept without waiting for them.
    losses: list[Tensor] = []
    update = step.phases["optimizer"]

    def update_and_keep() -> None:
        update()
        assert step.loss is not None
        losses.append(step.loss.detach())

    step.phases["optimizer"] = update_and_keep
    step()
    synchronize(device)
    ready_s = time.perf_counter() - started
    reset_peak_memory(device)
    dist.barrier()
    samples = time_steps(step, step.phases)
    peak_gib = peak_memory_gib(device)
    values = torch.stack(losses).tolist()
    shares = on_rank.run_profiled(step, lambda: profile_shares(step.phases, device))
    if trace is not None:
        on_rank.write_step_trace(step, device, trace)
    return BoardMeasurement(
        samples,
        ready_s,
        peak_gib,
        torch.cuda.max_memory_reserved(device) / 2**30 if on_gpu else None,
        values,
        shares,
        torch.cuda.get_device_name(device) if on_gpu else "",
    )


def _board_derived(workload: ParallelWorkload, measured: list[BoardMeasurement], seconds: float) -> dict[str, Any]:
    training, first = workload.training, measured[0]
    assert training.flops is not None, "the board's model is ours"
    peak = peak_tflops(first.device, training.precision)
    of_all = None if peak is None else peak * workload.world_size
    losses = [sum(of_ranks) / len(measured) for of_ranks in zip(*(rank.losses for rank in measured), strict=True)]
    shares = {
        name: model_flops_utilization(flops, seconds, of_all)
        for name, flops in (("mfu_percent", training.flops), ("hfu_percent", computed_flops(workload)))
    }
    return {
        **{name: None if share is None else 100 * share for name, share in shares.items()},
        "tokens_per_s": training.tokens / seconds,
        "ready_s": max(rank.ready_s for rank in measured),
        "peaks_gib": [rank.peak_gib for rank in measured],
        "reserved_gib": [rank.reserved_gib for rank in measured],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "losses": losses,
        "shares": None if first.shares is None else asdict(first.shares),
    }
