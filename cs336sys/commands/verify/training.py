"""Train by a program: on a rank, which reports its tensors, and in one process, in several orders of summation."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336sys.commands.verify.program import ProgramRun, Training
from cs336sys.errors import CapabilityError, UsageError, UserCodeError, lines_of
from cs336sys.parity.record import RankReport, Record
from cs336sys.parity.rounding import LEARNING_RATES, MEAN_LOSS, stay_near
from cs336sys.settings.verification import CASES, Program, Share, VerifiedWorkload
from cs336sys.training import user_models


def is_sound(world_size: int) -> bool:
    """Return whether this rank's collectives still meet those of the others, ``world_size`` in all."""
    numbers = torch.full((3,), float(dist.get_rank()))  # Added to others if a rank is still in an earlier collective.
    if dist.get_backend() == "nccl":
        numbers = numbers.cuda()
    dist.all_reduce(numbers)
    return bool((numbers == world_size * (world_size - 1) / 2).all())  # The sum of all ranks' numbers.


def train_on_rank(training: Training, program: Program, **settings: Any) -> RankReport:
    """Run the program on this rank, on its device. Whatever is raised comes back as a failure.

    ``settings`` are other fields of :class:`ProgramRun`.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    training = replace(training, device=device)
    run = ProgramRun(training, program, on_ranks=True, **settings)
    report = run.report
    try:
        with (
            # One process would draw other masks: only the case that compares the ranks' masks has any.
            nullcontext() if program.masks else user_models.nothing_dropped(),
            run.watcher if run.watch or program.late_rank is not None else nullcontext(),  # Delays a late rank.
            open(f"{run.folder}/launches{run.rank}", "wb") if run.watch else nullcontext() as run.watcher.log,
        ):
            run.all_steps()
    except CapabilityError as error:
        report.failure, report.applies = str(error), False
    except Exception as error:
        report.is_timeout = _is_timeout(error)
        report.failure = str(error)
        if not isinstance(error, UsageError | UserCodeError):
            line = user_models.innermost_line(lines_of(error), run.user_files)
            first_line = next(iter(report.failure.strip().splitlines()), "")
            where = f"{line}: " if line else ""
            report.failure = f"{where}{type(error).__name__}: {first_line}"
    report.at = f"step {run.watcher.step + 1}, {run.watcher.phase}"
    report.launches = run.watcher.launches
    lower = {(use, dtype) for use, dtype in run.watcher.dtypes if torch.finfo(dtype).eps > torch.finfo(run.dtype).eps}
    report.dtypes = tuple(sorted(lower, key=str))
    return report


def _is_timeout(error: BaseException | None) -> bool:
    """Return whether an error says that other ranks did not come, or have left after they waited in vain."""
    lost = ("timed out", "timeout", "connection reset", "connection closed", "broken pipe", "socket")
    return error is not None and (any(text in str(error).lower() for text in lost) or _is_timeout(error.__cause__))


@dataclass
class Reference:
    """One process's training, and runs that rounding alone leads elsewhere."""

    record: Record  # Of the whole batch at once; of the ranks' shares where the loss of a batch is not their mean.
    rounding_runs: Sequence[Record]  # Summed in other orders, or computed in a lower precision.
    is_whole: bool  # Whether ``record`` is of the whole batch at once.
    lower_dtype: torch.dtype | None = None  # The less precise dtype that ranks compute or send in, where they do.


_dtype_and_rate_of: dict[Any, tuple[torch.dtype, float]] = {}
_references: dict[Any, Reference] = {}


def choose_training(workload: VerifiedWorkload, device: torch.device, dtype: torch.dtype | None) -> Training:
    """Choose the dtype unless one is passed, and the largest learning rate with which losses do not run away.

    The dtype is float64 where the model computes in it, else float32; the steps of case "run" show whether losses stay.
    """
    key = (workload.training, device)
    if key not in _dtype_and_rate_of:
        training = Training(workload, device, torch.float64)
        try:
            train_in_one_process(training, Program(steps=1))
        except UserCodeError:  # A RuntimeError, too: but it is the model that cannot be used, in whatever dtype.
            raise
        except (RuntimeError, TypeError, NotImplementedError):
            training = replace(training, dtype=torch.float32)
        for rate in LEARNING_RATES:  # The largest first; the smallest stays if losses run away with all.
            trial = replace(training, learning_rate=rate)
            record = train_in_one_process(trial, CASES["run"], keeps_tensors=False)
            if stay_near(record.numbers("loss")):
                break
        _dtype_and_rate_of[key] = training.dtype, rate
    chosen_dtype, rate = _dtype_and_rate_of[key]
    return Training(workload, device, dtype or chosen_dtype, rate)


def with_max_norm(training: Training) -> Training:
    """Return the training with ``max_norm`` at half the norm of the first step's gradients."""
    record = train_in_one_process(replace(training, learning_rate=0.0), Program(steps=1, clips=True))
    return replace(training, max_norm=0.5 * record.numbers("norm")[0])  # Of the only step.


def train_in_one_process(training: Training, program: Program, shares: Sequence[Share] = (), **settings: Any) -> Record:
    """Train in this process, the ``shares`` of each batch one after another; without any, the whole batch at once.

    ``settings`` are other fields of :class:`ProgramRun`.
    """
    shares = shares or training.workload.shares(program, micro_batches=1, whole=True)
    run = ProgramRun(training, program, step_shares=shares, **settings)
    with user_models.nothing_dropped():
        run.all_steps()
    return run.record


def gradients_of_shares(
    training: Training, program: Program, step: int, weights: Mapping[str, Tensor]
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Return what each micro-batch of each data rank adds to the gradients of a step, which begins with ``weights``."""
    run, gradients = ProgramRun(replace(training, optimizer=None), program.in_one_process), {}  # Any optimizer will do.
    with user_models.nothing_dropped():
        run.prepare()
        for share in training.workload.shares(program, program.micro_batches):
            with torch.no_grad():  # The step of the last share has changed them.
                for name, value in weights.items():
                    run.parameters[name].copy_(value)
            run.step_shares = [share]
            run.one_step(step)
            gradients[share.data_rank, share.micro_batch] = run.record.at("gradient", step)
    return gradients


def train_reference(training: Training, program: Program) -> Reference:
    """Train the program in one process in several orders of summation; kept for other cases of the same training."""
    program, workload = program.in_one_process, training.workload
    spec = training.optimizer
    optimizer = spec and (spec.optimizer_class, repr(spec.settings))  # repr: dicts cannot be hashed.
    numbers = training.device, training.dtype, training.learning_rate, training.max_norm
    # Other cases and wraps that differ in what ranks do alone have the same.
    key = workload.training, workload.data_ranks, program, optimizer, numbers
    if key in _references:
        return _references[key]
    if len(_references) > 8:  # They hold weights: more would fill the memory.
        _references.clear()
    by_rank, in_micro_batches = (workload.shares(program, micro_batches) for micro_batches in (1, 2))
    # A layer that is unused on one rank alone cannot be trained on the whole batch at once.
    whole = by_rank if program.unused else workload.shares(program, micro_batches=1, whole=True)
    orders = [whole, by_rank, in_micro_batches, in_micro_batches[::-1]]
    # One of the first two becomes the record, which has outputs of modules, too.
    records = [train_in_one_process(training, program, order, watch=order in (whole, by_rank)) for order in orders]
    whole_loss, mean_loss = (record.numbers("loss")[0] for record in records[:2])  # Of step 1.
    if abs(whole_loss - mean_loss) <= MEAN_LOSS[training.dtype] * abs(whole_loss):
        reference = Reference(records[0], records[1:], is_whole=True)
    else:
        # Sequences of a batch look at each other, as in batch norm: ranks see their own shares, which none may cut.
        reference = Reference(records[1], [train_in_one_process(training, program, by_rank[::-1])], is_whole=False)
    _references[key] = reference
    return reference


def with_lower_precision(
    training: Training, program: Program, reference: Reference, lower_dtype: torch.dtype
) -> Reference:
    """Add runs in ``lower_dtype`` to a reference, so that what is allowed covers what ranks lose in that dtype."""
    program = program.in_one_process
    shares = training.workload.shares(program, micro_batches=1)
    # In float32, because autocast does not cast float64.
    train = partial(train_in_one_process, replace(training, dtype=torch.float32), program, shares)
    half = None if lower_dtype == torch.float32 else lower_dtype
    with torch.autocast(training.device.type, half) if half else nullcontext():
        runs = [*reference.rounding_runs, train()]
    if half is not None:
        # Ranks may have copies of weights in half precision instead. Model or device may lack operations for that.
        with suppress(RuntimeError, NotImplementedError):
            runs.append(train(copies_dtype=half))
    return replace(reference, rounding_runs=runs, lower_dtype=lower_dtype)
