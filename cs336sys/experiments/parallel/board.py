"""Measures a cell of ``shard --board``: the whole step, as on the 2026 handout's leaderboard, and where its time goes.

Handout, section 9: a step is forward pass, loss, backward pass and AdamW's update of all parameters, on random tokens;
the benchmark is repeated steps after a warm-up, all within ten minutes from empty caches.
"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336sys.accounting.hardware import model_flops_utilization, peak_tflops
from cs336sys.experiments.parallel.gradient_check import gradients_outcome
from cs336sys.experiments.parallel.measurement import kept_ranks, slowest, trace_path
from cs336sys.experiments.parallel.rank import release_last_job
from cs336sys.experiments.parallel.step import ParallelStep, rank_device
from cs336sys.experiments.parallel.timeline import StepShares, finish_communication, profile_shares, write_trace
from cs336sys.experiments.training import time_steps
from cs336sys.measure.cells import Outcome, Progress
from cs336sys.measure.memory import peak_memory_gib, reset_peak_memory
from cs336sys.measure.phases import RecordFunctionMarks
from cs336sys.results.model import Samples
from cs336sys.workload import ParallelWorkload

# All steps are on one batch, whose loss says whether they train. AdamW's default, 1e-3, is too much for random weights
# of the 8B model: its loss leaps from 12 up to 14.
_LEARNING_RATE = 1e-4


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
    """Measure one cell: runs in the worker process, which keeps its ranks for the next cell.

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
    derived, wrong = gradients_outcome(ranks, workload)
    if wrong is not None:
        return wrong
    samples = slowest(measured)
    return Outcome("ok", samples, derived | _derived(workload, measured, samples["wall"].median / 1e3))


def measure_board_on_rank(workload: ParallelWorkload, trace: Path | None = None) -> BoardMeasurement:
    """Train, and time it. All ranks call it together.

    Args:
        trace: where rank 0 writes a Chrome trace.
    """
    release_last_job(workload)
    device = rank_device(workload)
    on_gpu = device.type == "cuda"
    started = time.perf_counter()
    step = ParallelStep(workload, device, lr=_LEARNING_RATE)
    losses = _kept_losses(step)
    step()
    if on_gpu:
        torch.cuda.synchronize(device)
    ready_s = time.perf_counter() - started
    reset_peak_memory(device)
    dist.barrier()
    samples = time_steps(step, step.phases)
    peak_gib = peak_memory_gib(device)
    values = torch.stack(losses).tolist()
    shares = None
    is_first = dist.get_rank() == 0
    if is_first:
        shares = profile_shares(step.phases, device)
    else:
        _step_beside_profiler(step)
    if trace is not None:
        if is_first:
            step.mark(RecordFunctionMarks())
            write_trace(step.phases, device, trace)
        else:
            _step_beside_profiler(step)
    measurement = BoardMeasurement(
        samples,
        ready_s,
        peak_gib,
        torch.cuda.max_memory_reserved(device) / 2**30 if on_gpu else None,
        values,
        shares,
        torch.cuda.get_device_name(device) if on_gpu else "",
    )
    del step
    release_last_job(workload)
    return measurement


def _step_beside_profiler(step: ParallelStep) -> None:
    step()
    finish_communication()


def _kept_losses(step: ParallelStep) -> list[Tensor]:
    """The losses of all steps from now on, () each, without waiting for them."""
    losses: list[Tensor] = []
    update = step.phases["optimizer"]

    def update_and_keep() -> None:
        update()
        assert step.loss is not None
        losses.append(step.loss.detach())

    step.phases["optimizer"] = update_and_keep
    return losses


def _derived(workload: ParallelWorkload, measured: list[BoardMeasurement], seconds: float) -> dict[str, Any]:
    training, first = workload.training, measured[0]
    assert training.flops is not None, "the board's model is ours"
    peak = peak_tflops(first.device, training.precision)
    of_all = None if peak is None else peak * workload.world_size
    losses = [sum(of_ranks) / len(measured) for of_ranks in zip(*(rank.losses for rank in measured), strict=True)]
    return {
        "mfu_percent": _percent(model_flops_utilization(training.flops, seconds, of_all)),
        "hfu_percent": _percent(model_flops_utilization(workload.computed_flops, seconds, of_all)),
        "tokens_per_s": training.tokens / seconds,
        "ready_s": max(rank.ready_s for rank in measured),
        "peaks_gib": [rank.peak_gib for rank in measured],
        "reserved_gib": [rank.reserved_gib for rank in measured],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "losses": losses,
        "shares": None if first.shares is None else asdict(first.shares),
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
