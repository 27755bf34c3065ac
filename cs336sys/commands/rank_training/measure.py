"""One cell of ``ddp`` or ``shard``, or of ``shard --board``: checked first, then timed."""

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
from cs336sys.commands.rank_training.verification import verify_training
from cs336sys.findings import sentence
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
from cs336sys.training.user_models import hidden_warnings, layer_initializer

# Steps without communication, by configuration: measured once a round for all strategies compared with them.
_unsynchronized: dict[str, list[on_rank.RankMeasurement]] = {}

# Columns of checks that found nothing wrong, by configuration.
_checked_columns: dict[str, dict[str, Any]] = {}

# Latency and bandwidth of what ranks communicate through, by their number and backend.
_links: dict[tuple[int, str], AlphaBeta] = {}


def measure_parallel_training(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``ddp`` or ``shard``: runs in the worker process, which keeps its ranks for the next cell.

    Samples (ms), each the maximum over ranks: one series a phase, ``step``, ``wall``, ``unsynchronized`` (the step
    without communication, where one rank has memory for it) and ``communication`` (alone). Derived columns: see
    ``docs/columns.md``. The status is ``wrong``, and there are no samples, if the weights are not those of one process.
    """
    workload = ParallelWorkload.from_configuration(configuration)
    ranks = kept_ranks(workload)
    round_number, key = configuration.get("round", 1), configuration_key(workload.configuration())
    # Later rounds keep the first's columns, unless that was in another process, as after a crash or on --resume.
    if round_number == 1 or key not in _checked_columns:
        progress(f"checking {workload.strategy} against one process")
        # Weights in half precision are rounded after every step, which hides errors: gradients are compared.
        check = gradients_outcome if workload.has_half_weights else _weights_outcome
        columns, failure = check(ranks, workload)
        if failure is not None:
            return failure
        _checked_columns[key] = columns
    unsynchronized = _unsynchronized_steps(ranks, workload, round_number, progress)
    progress(f"timing {workload.strategy}")
    measured = ranks.run(on_rank.measure_on_rank, workload, trace_path(configuration))
    samples = slowest(measured)
    if unsynchronized is not None:
        samples["unsynchronized"] = unsynchronized
    warnings = list(dict.fromkeys(warning for rank in measured for warning in rank.warnings))
    derived = with_notes(_checked_columns[key] | _derived(workload, measured, samples), warnings)
    if workload.strategy_record.has_buckets:
        progress("timing all-reduces")
        link = _link(ranks, workload)
        derived |= {"link_latency_s": link.latency_s, "link_bytes_per_s": link.bytes_per_s}
    return Outcome("ok", samples, derived)


def _unsynchronized_steps(
    ranks: launch.Ranks, workload: ParallelWorkload, round_number: int, progress: Progress
) -> Samples | None:
    """Time steps without communication, once a round; None for strategies or models that have none on one rank."""
    if not workload.has_unsynchronized:
        return None
    key = configuration_key(workload.unsynchronized.configuration() | {"round": round_number})
    if key not in _unsynchronized and all(ranks.run(on_rank.fits_on_one_rank, workload)):
        progress("timing steps without communication")
        _unsynchronized[key] = ranks.run(on_rank.measure_on_rank, workload.unsynchronized)
    return slowest(_unsynchronized[key])["step"] if key in _unsynchronized else None


def _weights_outcome(ranks: launch.Ranks, workload: ParallelWorkload) -> tuple[dict[str, Any], Outcome | None]:
    """Compare weights after some steps: return derived columns, and a ``wrong`` outcome if rounding is no reason."""
    differences = ranks.run(verify_training, workload)
    # A rank that could compare nothing has NaN, which says nothing of the others.
    worst = max(differences, key=lambda difference: (not math.isnan(difference.relative), difference.relative))
    derived = _describe_model(workload) | {"checked_layers": worst.num_layers}
    notes = [note for difference in differences for note in difference.notes]
    notes += [difference.reason for difference in differences if math.isnan(difference.relative)]
    notes = list(dict.fromkeys(notes))
    if math.isnan(worst.relative):
        return with_notes(derived, notes), None
    derived = with_notes(derived, notes) | {
        "largest_difference": max(difference.largest for difference in differences),
        "relative_difference_percent": 100 * worst.relative,
    }
    if worst.relative <= worst.allowed:
        return derived, None
    kernels = workload.training.kernels if workload.training.fused_kernels else ""
    facts = {"strategy": workload.strategy, "steps": STEPS, "difference": worst, "kernels": kernels}
    return derived, Outcome("wrong", derived=derived, reason=sentence(__package__, "wrong weights", **facts))


def _link(ranks: launch.Ranks, workload: ParallelWorkload) -> AlphaBeta:
    """Return latency and bandwidth of the slowest rank's all-reduces, timed once for all cells."""
    key = (workload.world_size, _backend(workload))
    if key not in _links:
        times_s = ranks.run(on_rank.time_all_reduces, workload)
        slowest_s = {size: max(rank_times_s[size] for rank_times_s in times_s) for size in times_s[0]}
        _links[key] = fit_alpha_beta(list(slowest_s), list(slowest_s.values()))
    return _links[key]


def _derived(
    workload: ParallelWorkload, measured: Sequence[on_rank.RankMeasurement], samples: dict[str, Samples]
) -> dict[str, Any]:
    """Return the columns of a measured cell: of its communication, memory and rates."""
    first = measured[0]  # Rank 0, which alone has a timeline; all ranks launch the same calls.
    timeline = first.timeline
    running_ms = None if timeline is None else timeline.communication_ms
    derived: dict[str, Any] = {
        **exposed_communication({name: series.median for name, series in samples.items()}, running_ms),
        "overlap_percent": 100 * timeline.overlap_ms / running_ms if timeline and running_ms else None,
        "calls": first.calls,
        "gradient_calls": first.gradient_calls,
        "communicated_bytes": first.communicated_bytes,
        "peak_gib": max((rank.peak_gib for rank in measured if rank.peak_gib is not None), default=None),
        "capture_s": max((rank.capture_s for rank in measured if rank.capture_s is not None), default=None),
        "graph_pool_gib": max((rank.graph_pool_gib for rank in measured if rank.graph_pool_gib), default=None),
        **workload.training.throughput(samples["step"]),
        "timeline": None if timeline is None else asdict(timeline),
    }
    return derived | _sharding(measured) if workload.strategy in SHARD_STRATEGIES else derived


def _describe_model(workload: ParallelWorkload) -> dict[str, Any]:
    """Describe the model: its parameters, and what is done otherwise for a user's."""
    training = workload.training
    if training.is_ours:
        return {"parameters": training.parameters}
    count = count_step(training)
    model = str(training.user.model)
    notes = hidden_warnings(model, count.hidden)
    if count.drops:
        notes.append(f"{model}: trained without dropout, so that weights can be checked")
    # Strategies that shard weights, which do without autocast, build a model layer by layer where they know how.
    if not workload.uses_autocast and initializer_of(training) is None:
        _, reason = layer_initializer(model, training.size)
        notes.append(sentence(__package__, "whole model", model=model, why=reason))
    return {"parameters": count.parameters, "notes": notes}


def _sharding(measured: Sequence[on_rank.RankMeasurement]) -> dict[str, Any]:
    """Return the columns of ``shard``: memory of each moment on the fullest rank, bytes sent, gathers."""
    timeline = measured[0].timeline
    of_moments = zip(*(rank.memory for rank in measured), strict=False)  # Too short a history has none.
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

    def longest(name: str, part: str) -> tuple[float, ...]:
        """Return a series, its ``measured`` or ``warmup`` steps, each of the rank whose step took longest."""
        # A step's phases are of one rank, so that they add up to it. These two are no phases and have their own ranks.
        judged = name if name in ("wall", "communication") else "step"
        # Of each rank's steps, the time by which the slowest is chosen, and that of ``name``.
        of_ranks = (
            zip(getattr(rank.samples[judged], part), getattr(rank.samples[name], part), strict=True)
            for rank in measured
        )
        return tuple(time_ms for _, time_ms in map(max, zip(*of_ranks, strict=True)))

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
    """Return the ranks of the last cell, or new ones where it had others, which read the variables set here."""
    backend = _backend(workload)
    if backend == "gloo":
        # No message at each start of torch's profiler, as torch 2.13 writes on a CPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    else:
        # By default NCCL prepares for collectives that are launched while a CUDA graph with others runs, for which
        # ParallelStep.__call__() waits. To prepare, each in a graph waits for an event, and has a branch of its own:
        # 436 all-reduces of large took 41.2 ms, and 19.2 without. There were more branches than the GPU has queues:
        # while updated parameters of optimizer-flat arrived, the forward pass of xl stood still for 11 ms of 26.9;
        # without, it takes 20.5.
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    return launch.kept(workload.world_size, backend=backend, timeout_s=workload.timeout_s)


def _backend(workload: ParallelWorkload) -> str:
    return workload.backend_on(choose_device(workload.training.device).type)


def trace_path(configuration: Mapping[str, Any]) -> Path | None:
    """Return a file of its own for each cell; None without ``--trace``.

    Its name says what cells usually differ in, and ends in a digest of all that they may.
    """
    workload = ParallelWorkload.from_configuration(dict(configuration))
    if workload.trace is None:
        return None
    size, training = workload.training.size, workload.training
    bucket = "" if workload.bucket_mb is None else bucket_name(workload.bucket_mb).replace(" ", "").lower()
    ahead = "" if workload.prefetch is None else f"prefetch{workload.prefetch}"
    ahead += f"-gathered{workload.keep_gathered}" if workload.keep_gathered else ""
    parts = (
        *(size.name, f"context{size.context}", f"batch{size.batch_size}"),
        *(training.precision, training.compile, training.attention, training.optimizer),
        "fused-kernels" if training.is_fused else "",
        "" if training.keeps_fp32_state else f"state-{training.state_dtype}",
        "graph" if training.uses_graphs else "",
        *(f"world{workload.world_size}", f"gradients-{workload.gradient_dtype}", workload.strategy, bucket, ahead),
        "" if workload.checkpointing == "none" else f"checkpoint-{workload.checkpointing}",
        # Of all that a sweep has added to the configuration, too, such as the round.
        hashlib.sha256(configuration_key(configuration, ignore=("trace", "timeout_s")).encode()).hexdigest()[:8],
    )
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", "_".join(filter(None, parts)))
    return Path(workload.trace) / f"{name}.json.gz"


@dataclass(frozen=True)
class BoardMeasurement:
    """One rank's measurement of the board's step."""

    samples: dict[str, Samples]  # In ms, a series for each phase, ``step`` and ``wall``.
    ready_s: float  # Until the first step was done: building, compiling of kernels, and that step.
    peak_gib: float | None  # Most memory that tensors held, in a second or later step; None on a CPU.
    reserved_gib: float | None  # Most that the allocator held for them.
    losses: list[float]  # Of this rank's sequences, of every step from the first to the last timed one.
    shares: StepShares | None  # Where the time of one more step went; None where the profiler saw nothing.
    device: str  # The GPU's name.


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
    started_s = time.perf_counter()
    # All steps are on one batch, whose loss says whether they train. AdamW's default, 1e-3, is too much for random
    # weights of the 8B model: its loss leaps from 12 up to 14.
    step = ParallelStep(workload, device, lr=1e-4)
    losses: list[Tensor] = []  # Of all steps, () each, kept without waiting for them.
    update = step.phases["optimizer"]

    def update_and_keep() -> None:
        update()
        assert step.loss is not None
        losses.append(step.loss.detach())

    step.phases["optimizer"] = update_and_keep
    step()
    synchronize(device)
    ready_s = time.perf_counter() - started_s
    reset_peak_memory(device)
    dist.barrier()
    measurement = BoardMeasurement(
        samples=time_steps(step, step.phases),
        ready_s=ready_s,
        peak_gib=peak_memory_gib(device),
        losses=torch.stack(losses).tolist(),
        shares=on_rank.run_profiled(step, lambda: profile_shares(step.phases, device)),
        reserved_gib=torch.cuda.max_memory_reserved(device) / 2**30 if on_gpu else None,
        device=torch.cuda.get_device_name(device) if on_gpu else "",
    )
    if trace is not None:
        on_rank.write_step_trace(step, device, trace)
    return measurement


def _board_derived(workload: ParallelWorkload, measured: list[BoardMeasurement], step_s: float) -> dict[str, Any]:
    """Return the columns of a board's cell."""
    training, first = workload.training, measured[0]
    assert training.flops is not None, "the board's model is ours"
    peak = peak_tflops(first.device, training.precision)
    peak_of_all_ranks = None if peak is None else peak * workload.world_size
    losses = [statistics.fmean(rank_losses) for rank_losses in zip(*(rank.losses for rank in measured), strict=True)]
    utilizations = {
        name: model_flops_utilization(flops, step_s, peak_of_all_ranks)
        for name, flops in (("mfu_percent", training.flops), ("hfu_percent", computed_flops(workload)))
    }
    return {
        **{name: None if part is None else 100 * part for name, part in utilizations.items()},
        "tokens_per_s": training.tokens / step_s,
        "ready_s": max(rank.ready_s for rank in measured),
        "peaks_gib": [rank.peak_gib for rank in measured],
        "reserved_gib": [rank.reserved_gib for rank in measured],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "losses": losses,
        "shares": None if first.shares is None else asdict(first.shares),
    }
