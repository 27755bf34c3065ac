"""Profiles one cell of ``nsys``: its steps timed without a profiler, then run annotated under one, and summed up.

Run as ``python -m cs336sys.commands.nsys.measure CONFIGURATION OUTCOME_FILE`` this is the program that the
cell's worker starts under nsys.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from cs336sys.capture import nsys as nsight_systems
from cs336sys.capture.range_names import STEP, WARM_UP, run_name
from cs336sys.capture.reading import open_capture
from cs336sys.capture.summary import Profile, summarize
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.machine.device import choose_device
from cs336sys.machine.diagnosis.software import Profiler, find_nsys, makes_reports
from cs336sys.parity.step import check_few_blocks
from cs336sys.processes.files import OwnedFolder, written_whole
from cs336sys.processes.parent import python_module
from cs336sys.results.model import Samples
from cs336sys.run.cells import Outcome, Progress, guarded, release_memory
from cs336sys.settings.profiling import ProfileWorkload
from cs336sys.settings.training import Workload
from cs336sys.timing.phases import TorchProfiler, activities_on
from cs336sys.training.flop_counting import counted_columns
from cs336sys.training.model import blocks_of
from cs336sys.training.profiler_ranges import Marks, NvtxMarks, RecordFunctionMarks, annotated_model, phase
from cs336sys.training.step import TrainStep, set_matmul_precision, time_steps, training_warnings, with_notes
from cs336sys.training.user_models import telling_user_errors


def measure_profile(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``nsys``: runs in the worker process.

    Samples (ms), all without a profiler: one series a phase, ``step`` and ``wall``; ``annotated`` is the wall of steps
    with ranges. Derived: ``profiler``, its name; ``profiler_reason``, why it is not nsys, or None; ``profile``, a
    :class:`Profile` as JSON; and :func:`~cs336sys.training.flop_counting.counted_columns`.
    """
    workload = ProfileWorkload.from_configuration(configuration)
    with telling_user_errors(workload.training):
        device = choose_device(workload.training.device)
        nsys, why_not = _choose_nsys(workload.profiler, device)
        notes, failure = _check_model(workload.training, device, progress)
        if failure is not None:
            return failure
        samples, flop_columns = _time_unprofiled(workload.training, device, progress)
        release_memory()  # For the model in the process that nsys starts.
        with OwnedFolder() as folder:
            profile = None
            if nsys is not None:
                try:
                    profile = _profile_under_nsys(nsys, workload, folder, progress)
                except _ProfiledRunFailed as failed:
                    return failed.outcome
                except (CapabilityError, UsageError) as error:
                    if workload.profiler == "nsys":
                        raise
                    nsys, why_not = None, str(error)  # With "auto", torch.profiler stands in.
            if profile is None:
                profile = _profile_under_torch(workload, device, folder, progress)
        profiler = f"{profile.profiler} {nsys.version}" if nsys else profile.profiler
        derived = {"profiler": profiler, "profiler_reason": why_not, "profile": profile.to_json()}
        return Outcome("ok", samples, with_notes(flop_columns, notes) | derived)


def run_for_nsys(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Run the steps of a training workload as a profiler should see them, in a process that nsys has started."""
    workload = Workload.from_configuration(configuration)
    device = choose_device(workload.device)
    if device.type != "cuda":
        raise CapabilityError("nsys traces GPU work, and this machine has no GPU: run without nsys, with --device cpu")
    with telling_user_errors(workload):
        _run_annotated(workload, device, NvtxMarks(), torch.cuda.profiler.profile(), progress)
    return Outcome("ok")


def run_checked_for_nsys(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Check the step, as no worker did it before, and :func:`run_for_nsys`."""
    workload = Workload.from_configuration(configuration)
    with telling_user_errors(workload):
        _, failure = _check_model(workload, choose_device(workload.device), progress)
    return failure or run_for_nsys(configuration, progress)


def _check_model(workload: Workload, device: torch.device, progress: Progress) -> tuple[list[str], Outcome | None]:
    """Return notes of the check of a few blocks, and its outcome if it failed."""
    set_matmul_precision(workload)
    notes_and_outcome = check_few_blocks(workload, device, progress)
    release_memory()
    return notes_and_outcome


def _choose_nsys(profiler: str, device: torch.device) -> tuple[Profiler | None, str | None]:
    """Return the nsys to use, or None for torch.profiler, and why it is not nsys where one might expect that."""
    if profiler == "torch" or (profiler == "auto" and device.type == "cpu"):
        return None, None
    if device.type == "cpu":
        raise CapabilityError("profiler 'nsys' traces GPU work, and this machine has no GPU: choose torch")
    nsys = find_nsys()
    if nsys is not None and makes_reports(nsys.path):
        return nsys, None
    why_not = "nsys is not installed" if nsys is None else f"nsys {nsys.version} lacks libdw.so.1"
    if profiler == "nsys":
        raise CapabilityError(f"profiler 'nsys': {why_not}; see `cs336sys doctor`, or choose torch")
    return None, why_not


def _time_unprofiled(workload: Workload, device: torch.device, progress: Progress) -> tuple[dict[str, Samples], dict]:
    """Time the steps as ``bench`` does; and by the CPU clock with ranges, as under a profiler, to show what these cost.

    Returns:
        the samples, and the columns of :func:`~cs336sys.training.flop_counting.counted_columns`.
    """
    progress("building the model")
    step = TrainStep(workload, device)
    flop_columns = counted_columns(step, progress)
    step.capture(with_loss=True)  # In CUDA graphs, if the workload asks for them.
    samples = time_steps(step, step.phases_with_loss, progress)
    flop_columns = with_notes(flop_columns, training_warnings(step.loss, workload))
    durations_ms = []
    marks = NvtxMarks() if device.type == "cuda" else RecordFunctionMarks()
    with _annotated(step, marks) as run_step:
        for _ in range(workload.steps):
            started_s = time.perf_counter()
            run_step()  # Its range waits for the device.
            durations_ms.append((time.perf_counter() - started_s) * 1e3)
    return samples | {"annotated": Samples("ms", "cpu clock", measured=tuple(durations_ms))}, flop_columns


@contextmanager
def _annotated(step: TrainStep, marks: Marks) -> Iterator[Callable[[], None]]:
    """Yield a function that runs one step with ranges around its parts; inside compiled code there are none."""

    def run() -> None:
        with phase(STEP, marks, wait_for=step.device):
            for name, run_phase in step.phases_with_loss.items():
                with phase(name, marks):
                    run_phase()

    blocks = {} if step.workload.is_compiled_whole else blocks_of(step.workload, step.model)
    with annotated_model(list(blocks.values()), marks, attention=not step.workload.is_compiled):
        yield run


def _run_annotated(
    workload: Workload, device: torch.device, marks: Marks, profiler: AbstractContextManager, progress: Progress
) -> None:
    """Build, warm up, and run the measured steps with ranges around their parts, while the profiler records."""
    set_matmul_precision(workload)
    progress("building the model")
    step = TrainStep(workload, device)
    progress("warm-up")
    with phase(WARM_UP, marks, wait_for=device):
        step.capture(with_loss=True)  # In CUDA graphs, if the workload asks for them.
        for _ in range(workload.warmup):
            step()
    progress("profiling")
    whole_run = phase(run_name(workload.configuration()), marks, wait_for=device)
    with _annotated(step, marks) as run_step, profiler, whole_run:
        with phase(WARM_UP, marks, wait_for=device):  # While the profiler starts: it is not counted.
            step()
        for _ in range(workload.steps):
            run_step()


def _profile_under_torch(workload: ProfileWorkload, device: torch.device, folder: Path, progress: Progress) -> Profile:
    profiler = TorchProfiler(activities_on(device))
    _run_annotated(workload.training, device, RecordFunctionMarks(), profiler, progress)
    trace = folder / "trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    release_memory()  # The step's: reading the trace needs none of it.
    _copy_kept_file(trace, workload, ending="trace.json.gz")
    progress("reading the trace")
    capture = open_capture(trace, called="the trace")
    if device.type == "cuda" and not capture.is_gpu:
        raise CapabilityError("torch.profiler saw no work on the GPU: CUPTI cannot trace it on this machine")
    return summarize(capture)


class _ProfiledRunFailed(Exception):
    def __init__(self, outcome: Outcome):
        super().__init__(outcome.reason)
        self.outcome = outcome


def _profile_under_nsys(nsys: Profiler, workload: ProfileWorkload, folder: Path, progress: Progress) -> Profile:
    """Run the steps in a process of their own under nsys, and sum up its report.

    Raises:
        CapabilityError, UsageError: there is no report, or it lacks something.
        _ProfiledRunFailed: the steps themselves failed: out of memory, ...
    """
    progress(f"running under nsys {nsys.version}")
    outcome_file = folder / "outcome.json"
    configuration = json.dumps(workload.training.configuration(), allow_nan=False)
    command = python_module("cs336sys.commands.nsys.measure", configuration, str(outcome_file))
    try:
        report = nsight_systems.profile(nsys, command, folder)
    finally:
        if outcome_file.exists():  # What it says about its failure replaces an error of profile(), which knows less.
            outcome = Outcome(**json.loads(outcome_file.read_text()))
            if outcome.status != "ok":
                raise _ProfiledRunFailed(outcome)
    if not outcome_file.exists():
        raise _ProfiledRunFailed(Outcome("error", reason="the profiled process ended before its steps were done"))
    _copy_kept_file(report, workload, ending=report.suffix.removeprefix("."))
    progress("reading the report")
    database = folder / "report.sqlite"
    nsight_systems.export(nsys, report, database)
    _copy_kept_file(database, workload, ending="sqlite")
    return summarize(open_capture(database, called="the report"))


def _copy_kept_file(file: Path, workload: ProfileWorkload, ending: str) -> None:
    """Copy a file of the profiler to the folder of ``--keep``, if it was given."""
    if workload.keep is not None:
        folder = Path(workload.keep)
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(folder / f"{workload.training.name}.{ending}") as whole:
            shutil.copyfile(file, whole)


def _main(configuration: str, outcome_file: str) -> None:
    outcome = guarded(run_for_nsys, json.loads(configuration), lambda stage: None)
    Path(outcome_file).write_text(json.dumps({"status": outcome.status, "reason": outcome.reason}, allow_nan=False))


if __name__ == "__main__":
    _main(*sys.argv[1:])
