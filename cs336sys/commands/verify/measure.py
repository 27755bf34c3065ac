"""One cell of ``verify``: a case run on ranks and in one process, compared, and diagnosed where it is wrong."""

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cs336sys.commands.verify import comparison as comparisons
from cs336sys.commands.verify import training as trainings
from cs336sys.commands.verify.comparison import ComparedCase, fault, with_facts
from cs336sys.commands.verify.diagnosis import diagnose_case
from cs336sys.commands.verify.program import Training
from cs336sys.commands.verify.wraps import line_of_wrap
from cs336sys.errors import CapabilityError, LostProcessError, UserCodeError
from cs336sys.findings import Finding, sentence
from cs336sys.machine.device import choose_device
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError
from cs336sys.parity.collectives import first_disagreement, read_log
from cs336sys.parity.optimizers import ADAMW_SETTINGS, group_of_one, refusing_optimizer
from cs336sys.parity.record import RankReport, Record
from cs336sys.parity.subject import build_subject
from cs336sys.processes import started_outside
from cs336sys.processes.files import OwnedFolder
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.training import UserCode
from cs336sys.settings.user_code import is_user_code
from cs336sys.settings.verification import CONDITIONS, Program, VerifiedWorkload
from cs336sys.training import user_models

# Why no other case is run: of plain steps that say all of a wrap, and of models of users that fail in one process.
_not_run_because: dict[VerifiedWorkload | tuple[UserCode, ModelSize], str] = {}

# Plain steps of wraps that raise errors in float64, and none in float32.
_float32_only: set[VerifiedWorkload] = set()

# What was wrong with the plain step: other cases that are wrong alike are not run again.
_plain_step_diagnoses: dict[VerifiedWorkload, Finding | None] = {}

_UNUSABLE_BECAUSE = {"hang": "hangs", "died": "ends a rank", "raises": "fails"}  # Then no other case is run.


@dataclass(frozen=True)
class RanksRun:
    """A program, run on ranks."""

    reports: Sequence[RankReport] = ()  # In the order of ranks; of lost ones as far as they are known.
    lost_because: str = ""  # Why ranks died or hang, in a sentence.
    is_hang: bool = False


def measure_case(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``verify``, with the columns of ``docs/columns.md``: runs in the worker process.

    A CapabilityError says that there is no such device, or too few GPUs; a UserCodeError, that the model or its loss
    fails in one process.
    """
    workload = VerifiedWorkload.from_configuration(configuration)
    plain_step = replace(workload, case="step")
    training = workload.training
    model = training.user, replace(training.size, batch_size=1)  # Whatever the batch, which grows with the ranks.
    for key in (model, plain_step):  # What may have made all cases impossible; the plain step itself is run again.
        if key in _not_run_because and key != workload:
            return _refused(f"not run: {_not_run_because[key]}")
    progress("one process: precision and learning rate")
    try:
        with OwnedFolder() as folder, group_of_one(_device_of(workload)), user_models.telling_user_errors(training):
            outcome = _Case(workload, str(folder), progress).outcome()
    except CapabilityError as error:
        return _refused(str(error), "does not apply")
    except UserCodeError:
        _not_run_because[model] = "the model or its loss fails in one process, see the first case"
        raise
    cause = outcome.derived.get("cause")
    if workload.case == "step" and cause in _UNUSABLE_BECAUSE:
        _not_run_because[plain_step] = f"the plain step {_UNUSABLE_BECAUSE[cause]}"
    return outcome


def _device_of(workload: VerifiedWorkload) -> torch.device:
    return choose_device({"gloo": "cpu", "nccl": "cuda"}.get(workload.backend, workload.training.device))


class _Case:
    """A case of a workload, whose ranks start while this process chooses how to train."""

    def __init__(self, workload: VerifiedWorkload, folder: str, progress: Progress):
        self.workload, self.folder, self.progress = workload, folder, progress
        self.program = workload.program
        self.device = _device_of(workload)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        if self.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # Threads for products this small only wait for one another.
        self.plain_step = replace(workload, case="step")
        if is_user_code(workload.wrap):
            with contextlib.suppress(UserCodeError):  # What ranks send back may be of classes of the wrap's file.
                user_models.load(workload.wrap)
        # Called for its effect: unless those of the last case stay, they start while this process trains.
        launch.kept(workload.world_size, backend=self.backend, timeout_s=workload.timeout_s)
        dtype = torch.float32 if self.plain_step in _float32_only else None  # None: float64, if the model can.
        training = trainings.choose_training(workload, self.device, dtype)
        self.training = trainings.with_max_norm(training) if self.program.clips else training

    def outcome(self) -> Outcome:
        """Run the case, in float32 if its wrap computes in no float64, and judge it."""
        case = self.workload.case
        if case == "step":
            _plain_step_diagnoses[self.workload] = None  # Right, unless a fault is found.
        if case == "order":
            return self._compare_collectives()
        outcome = self._outcome_of(self.program)
        # The plain step shows whether its wrap computes in float64; if it was not run in this process, the case does.
        shows_dtype = self.workload == self.plain_step or self.plain_step not in _plain_step_diagnoses
        if shows_dtype and self.training.dtype == torch.float64 and "when" in outcome.derived:  # An error was raised.
            self.training = replace(self.training, dtype=torch.float32)
            float32_outcome = self._outcome_of(self.program)
            if "when" not in float32_outcome.derived:
                _float32_only.add(self.plain_step)
                outcome = float32_outcome
        if case == "late" and outcome.status == "ok":
            # A wrap that is right while the first rank is late may be wrong while the last is.
            return self._outcome_of(replace(self.program, late_rank=self.workload.world_size - 1))
        return outcome

    def _outcome_of(self, program: Program) -> Outcome:
        """Run a program on ranks, and compare it as its case says."""
        self.progress(f"{self.workload.case}: ranks")
        run = self.run_on_ranks(program)
        if run.lost_because:
            return self._lost_outcome(program, run)
        if (refusal := self._refusal(run.reports)) is not None:
            return refusal
        if program.masks:  # They were recorded, and nothing was trained.
            return self._agreed(comparisons.diagnose_masks(self.workload, run.reports))
        if self.workload.case == "groups":  # It builds the optimizer, and runs no step.
            return self._compare_groups(run.reports)
        self.progress(f"{self.workload.case}: one process")
        optimizer = comparisons.merged_spec(run.reports)
        # With the wrap's optimizer, and the workload of ranks that loaded what others saved.
        self.training = replace(self.training, workload=self.workload, optimizer=optimizer)
        optimizer_class = optimizer and optimizer.optimizer_class
        with refusing_optimizer(optimizer_class, failure="fails") if optimizer_class else contextlib.nullcontext():
            reference = trainings.train_reference(self.training, program)
        compared = ComparedCase(self.training, program, reference, run.reports)
        # A wrap that runs whole steps may leave other gradients in .grad than those by which it has stepped.
        if run.reports[0].runs_steps and compared.differences_of("gradient") and _leaves_unused_gradients(compared):
            compared.ignore_gradients()
        if not compared.differences:
            return self._nothing_found(compared)
        if program.other_starts and any(report.is_sliced for report in run.reports):
            return _refused("its slices are of what each rank starts with: build all from one seed", "does not apply")
        return self._wrong_outcome(compared)

    def _nothing_found(self, compared: ComparedCase) -> Outcome:
        """Return that the case is ``ok``; refused where parameters could not be compared."""
        moments = [moment for record in compared.records for moment in record.moments.items()]
        seen = {name for (kind, _), tensors in moments if kind in ("start", "weight") for name in tensors}
        # Unknown ones have a name, but slices that make no whole: they are among not_compared.
        missing = sorted(compared.shapes.keys() - seen - compared.unknown)
        if missing:
            unmatched = min((name for report in compared.reports for name in report.unmatched), default="")  # A hint.
            return _refused(sentence(__package__, "unnamed parameter", missing=missing[0], unmatched=unmatched))
        if "weights" in compared.not_compared:
            return _refused(f"nothing of the weights could be compared: {', '.join(compared.not_compared)}")
        return _ok(", ".join(compared.not_compared), self._notes(compared.reports, lower=()), compared)

    def run_on_ranks(self, program: Program, *, watch: bool = False, timeout_s: float | None = None) -> RanksRun:
        """Run the program on the ranks of the last case, or on new ones; end those that could run no other case."""
        training = replace(self.training, optimizer=None)  # Ranks have the wrap's.
        try:
            timeout_s = timeout_s or self.workload.timeout_s
            ranks = launch.kept(self.workload.world_size, backend=self.backend, timeout_s=timeout_s)
            reports = ranks.run(partial(trainings.train_on_rank, watch=watch, folder=self.folder), training, program)
            failed = [report for report in reports if report.failure]
            if failed and not self._are_sound(ranks, reports):
                launch.end_kept()
                if all(report.is_timeout for report in failed):  # No rank has raised an error of its own.
                    return RanksRun(reports, "the ranks wait for each other", is_hang=True)
            if program.resume == "ranks" and not failed:
                reports = self._loaded_by_others(training, program)  # From files that these ranks have written.
        except (RankError, LostProcessError) as error:
            launch.end_kept()
            first_line = str(error).splitlines()[0]
            is_hang = "hang" in first_line or "timed out" in first_line.lower()  # As RankError says it, or Gloo.
            logs = [f"{self.folder}/launches{rank}" for rank in range(self.workload.world_size)] if watch else []
            launches = [read_log(log) for log in logs]  # By train_on_rank().
            # After a rank has died the others' next collectives are no difference.
            common = None if is_hang else min(map(len, launches), default=0)
            reports = [RankReport(Record(), launches=of_rank[:common]) for of_rank in launches]
            return RanksRun(reports, lost_because=first_line, is_hang=is_hang)
        return RanksRun(reports)

    def _are_sound(self, ranks: launch.Ranks, reports: Sequence[RankReport]) -> bool:
        """Return whether ranks of which some failed can still communicate."""
        with contextlib.suppress(RankError, LostProcessError):
            is_lost = any(report.is_timeout for report in reports)  # Its collective may still be under way.
            return not is_lost and all(ranks.run(trainings.is_sound, self.workload.world_size))
        return False

    def _loaded_by_others(self, training: Training, program: Program) -> list[RankReport]:
        """Let half as many ranks load what was saved, and train on."""
        workload = self.workload
        if started_outside() is not None:
            raise CapabilityError("ranks that torchrun started cannot be joined by others: run verify by itself")
        if len(workload.dimensions) > 1:
            raise CapabilityError("with several dimensions of the mesh there is no smaller one of its kind")
        rank_count = max(1, workload.world_size // 2)
        smaller = replace(workload, world_size=rank_count, mesh=next(iter(workload.dimensions)))  # Of one dimension.
        load_and_train = partial(trainings.train_on_rank, folder=self.folder, saved_ranks=workload.world_size)
        with launch.start(rank_count, backend=self.backend, timeout_s=workload.timeout_s) as ranks:
            reports = ranks.run(load_and_train, replace(training, workload=smaller), program)
        self.workload = smaller  # These ranks are compared, not those that saved.
        return reports

    def _refusal(self, reports: Sequence[RankReport]) -> Outcome | None:
        """Return what a wrap's errors mean, and ``when`` they came: the plain step is wrong, others are refused."""
        failed = [(rank, report) for rank, report in enumerate(reports) if report.failure]
        if not failed:
            return None
        # Others time out because they wait for the rank whose error is the cause.
        rank, first = min(failed, key=lambda failure: failure[1].is_timeout)
        if not first.applies:
            return _refused(first.failure, "does not apply")
        reason = first.failure if len(failed) == len(reports) else f"{first.failure} (on rank {rank})"
        if self.workload.case == "step":
            return Outcome("wrong", derived={"verdict": "wrong", "cause": "raises", "when": first.at}, reason=reason)
        return Outcome("unsupported", derived={"verdict": "refused", "when": first.at}, reason=reason)

    def _notes(self, reports: Sequence[RankReport], lower: Collection[tuple[str, torch.dtype]]) -> list[str]:
        """Say what ranks do in ``lower`` precision, and what a wrap's own steps are compared with."""
        notes, wrap = [], self.workload.wrap
        if reports[0].hides_optimizer:  # All ranks have the same wrap.
            settings = {"lr": self.training.learning_rate, **ADAMW_SETTINGS}
            described = ", ".join(f"{name} {value:g}" for name, value in settings.items())
            notes.append(sentence(__package__, "note optimizer", wrap=wrap, settings=described))
        if lower:
            lowest = _least_precise(lower)
            uses = sorted(use for use, dtype in lower if dtype == lowest)
            dtype_name = str(lowest).removeprefix("torch.")
            notes.append(sentence(__package__, "note precision", wrap=wrap, uses=uses, dtype=dtype_name))
        return notes

    def _agreed(self, diagnosis: Finding | None, not_compared: Sequence[str] = ()) -> Outcome:
        """Return what comparing ranks with each other has shown."""
        return _ok("; ".join(not_compared)) if diagnosis is None else self._diagnosed(diagnosis)

    def _compare_collectives(self) -> Outcome:
        """Compare all ranks' collectives where one rank alone meets a condition, for each condition."""
        not_compared = []
        for number, (condition, program) in enumerate(CONDITIONS.items(), start=1):
            self.progress(f"order: {condition}, {number} of {len(CONDITIONS)}")
            run = self.run_on_ranks(program, watch=True)
            failures = [report.failure for report in run.reports if report.failure]
            # That ranks hang or die is for another case to report: what they launched before is compared.
            has_failed = bool(failures) and not run.lost_because
            reports = () if has_failed else run.reports
            if not any(report.launches for report in reports):
                reason = failures[0] if has_failed else run.lost_because
                not_compared.append(f"{condition}: {reason or 'no collective was seen'}")
                continue
            # A rank meets the condition in a step, so that what is launched while wrapping does not depend on it.
            launches = [[launch for launch in report.launches if launch.phase != "wrap"] for report in reports]
            if (difference := first_disagreement(launches)) is not None:
                differing, last = difference
                facts = {"condition": condition, "difference": differing, "collective": last.description}
                return self._agreed(fault("order", where=last.line, **facts))
        if len(not_compared) == len(CONDITIONS):
            return _refused("; ".join(not_compared))
        return self._agreed(diagnosis=None, not_compared=not_compared)

    def _compare_groups(self, reports: Sequence[RankReport]) -> Outcome:
        """Compare the groups of the ranks' optimizers with those that the wrap makes here, on a single rank."""
        if comparisons.merged_spec(reports) is None:
            return _refused("the wrap has no optimizer", "does not apply")
        if started_outside() is not None:
            return _refused("ranks that torchrun started cannot be joined by one alone: run verify by itself")
        one_rank_workload = replace(self.workload, world_size=1, mesh=next(iter(self.workload.dimensions)))
        in_one_process = trainings.train_on_rank(replace(self.training, workload=one_rank_workload), self.program)
        model = build_subject(self.workload, self.program, torch.device("cpu"), self.training.dtype).model
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        diagnosis, not_compared = comparisons.diagnose_groups(reports, in_one_process, shapes)
        if in_one_process.failure:
            not_compared.insert(0, f"the groups of one process, in which the wrap fails: {in_one_process.failure}")
        return self._agreed(diagnosis, not_compared)

    def _wrong_outcome(self, compared: ComparedCase) -> Outcome:
        """Diagnose what is off, after another run in which collectives are watched; it may be lower precision alone."""
        program, reference, reports = compared.program, compared.reference, compared.reports
        workload = self.workload
        self.progress(f"{workload.case}: diagnosis")
        if self.plain_step not in _plain_step_diagnoses:
            # A case is not blamed for a fault of the plain step, which outcome() keeps in _plain_step_diagnoses.
            _Case(self.plain_step, self.folder, self.progress).outcome()
        plain_fault = _plain_step_diagnoses[self.plain_step]
        if program.resume == "ranks":
            # The ranks that loaded have ended: those of the plain step show the wrap's precision, but nothing else.
            plain_case = _Case(self.plain_step, self.folder, self.progress)
            run = plain_case.run_on_ranks(plain_case.program, watch=True)
        elif plain_fault is None or workload.case == "late":  # Numbers of late ranks may change from run to run.
            run = self.run_on_ranks(program, watch=True)
        else:
            run = RanksRun()  # What is wrong like the plain step is not run again.
        watched = () if run.lost_because else run.reports
        lower = {pair for report in (*reports, *watched) for pair in report.dtypes}
        if lower and reference.lower_dtype is None:  # One process has not yet rounded as these ranks do.
            reference = trainings.with_lower_precision(self.training, program, reference, _least_precise(lower))
            compared = ComparedCase(self.training, program, reference, reports)
            if not compared.differences:
                return _ok(", ".join(compared.not_compared), self._notes(reports, lower), compared)
        compared.watched = () if program.resume == "ranks" else watched
        compared.is_plain_step_right = plain_fault is None
        diagnosis = diagnose_case(compared, plain_fault)
        notes = self._notes(reports, lower)
        if diagnosis.cause == "optimizer" and reports[0].hides_optimizer:
            _, _, note = notes[0].partition(": ")  # The first note is of the optimizer; without the wrap's name.
            diagnosis = with_facts(diagnosis, note=note)
        if workload.case == "step":
            _plain_step_diagnoses[workload] = diagnosis
        return self._diagnosed(diagnosis, compared, notes)

    def _lost_outcome(self, program: Program, run: RanksRun) -> Outcome:
        """Diagnose why ranks hang or died, by the collectives that they launched."""
        self.progress(f"{self.workload.case}: diagnosis")
        reports = run.reports
        if not any(report.launches for report in reports):
            # To see the same again takes less time: what ranks compile is in its caches by now.
            rerun = self.run_on_ranks(program, watch=True, timeout_s=self.workload.timeout_s / 4)
            reports = rerun.reports if rerun.lost_because else ()
        return self._diagnosed(comparisons.diagnose_lost_ranks(run.lost_because, run.is_hang, reports))

    def _diagnosed(self, diagnosis: Finding, case: ComparedCase | None = None, notes: Sequence[str] = ()) -> Outcome:
        """Return the outcome of a fault, with the first difference of ``case`` where something was compared."""
        reason, line = sentence(__package__, "meaning", diagnosis), diagnosis.where or line_of_wrap(self.workload)
        derived: dict[str, Any] = {"verdict": "wrong", "cause": diagnosis.cause, "meaning": reason}
        derived |= {"ratio": diagnosis.facts.get("ratio"), "collective": diagnosis.facts.get("collective", "")}
        derived |= {"line": line, "notes": list(notes)}
        if case is not None:
            first = case.differences[0]
            reason = f"{first.message}; {reason}"
            derived |= {
                "relative_difference": min(first.relative, 1e300),  # JSON has no infinity.
                "allowed_difference": min(first.allowed, 1e300),
                "farthest": f"{first.kind} {first.name}".strip(),
                "at_step": first.step,
                "off": len({(difference.kind, difference.name) for difference in case.differences}),
                **case.training.columns(),
            }
        return Outcome("wrong", derived=derived, reason=reason)


def _leaves_unused_gradients(compared: ComparedCase) -> bool:
    """Return whether gradients that a wrap's own steps leave are not those that it has stepped by.

    Each rank has its own gradients then, though the weights of all ranks are the same.
    """
    if not compared.differences_of("weight"):
        return True  # It has stepped by the right ones.
    weights, gradients = ([record.at(kind, 1) for record in compared.records] for kind in ("weight", "gradient"))
    return _are_alike(weights) and not _are_alike(gradients)


def _are_alike(rank_tensors: Sequence[Mapping[str, torch.Tensor]]) -> bool:
    """Return whether all ranks have the same tensors as the first, of those that both have."""
    first, *others = rank_tensors
    return all(torch.equal(first[name], other[name]) for other in others for name in first.keys() & other.keys())


def _least_precise(uses: Collection[tuple[str, torch.dtype]]) -> torch.dtype:
    return max((dtype for _, dtype in uses), key=lambda dtype: torch.finfo(dtype).eps)


def _refused(reason: str, verdict: str = "refused") -> Outcome:
    return Outcome("unsupported", derived={"verdict": verdict}, reason=reason)


def _ok(not_compared: str, notes: Sequence[str] = (), compared: ComparedCase | None = None) -> Outcome:
    derived: dict[str, Any] = {"verdict": "ok", "not_compared": not_compared or None, "notes": list(notes)}
    if compared is not None:
        derived |= {"relative_difference": compared.largest, "farthest": compared.largest_of}
        derived |= compared.training.columns()
    return Outcome("ok", derived=derived)
