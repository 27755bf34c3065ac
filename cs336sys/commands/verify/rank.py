"""Run a case on a rank, and report its tensors at each moment."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from cs336sys.commands.verify.program import ProgramRun, Training
from cs336sys.errors import CapabilityError, UsageError, UserCodeError, lines_of
from cs336sys.parity.record import RankReport
from cs336sys.settings.verification import Program
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
