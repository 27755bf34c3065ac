"""One cell of ``verify``: a case run on ranks and in one process, compared, and diagnosed where it is wrong."""

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cs336sys.commands.verify.cases import CONDITIONS, PROGRAMS, Program, build_subject
from cs336sys.commands.verify.comparison import ComparedCase, Diagnosis
from cs336sys.commands.verify.diagnosis import (
    diagnose_case,
    diagnose_groups,
    diagnose_lost_ranks,
    diagnose_masks,
    merged_spec,
)
from cs336sys.commands.verify.program import Reference, Training
from cs336sys.commands.verify.rank import RankReport, RankSettings, is_sound, train_on_rank
from cs336sys.commands.verify.record import ADAMW_SETTINGS, group_of_one
from cs336sys.commands.verify.wraps import line_of_wrap
from cs336sys.errors import CapabilityError, LostProcessError, UserCodeError
from cs336sys.machine.device import choose_device
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError
from cs336sys.parity.collectives import first_disagreement
from cs336sys.processes import started_outside
from cs336sys.processes.folders import OwnedFolder
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.training import UserCode
from cs336sys.settings.user_code import is_user_code
from cs336sys.settings.verification import VerifiedWorkload
from cs336sys.training import user_models

# Why no other case is run: of plain steps that say all of a wrap, and of models of users that fail in one process.
_not_run_because: dict[VerifiedWorkload | tuple[UserCode, ModelSize], str] = {}

# Plain steps of wraps that raise errors in float64, and none in float32.
_float32_only: set[VerifiedWorkload] = set()

# What was wrong with the plain step: other cases that are wrong alike are not run again.
_plain_step_diagnoses: dict[VerifiedWorkload, Diagnosis | None] = {}


@dataclass(frozen=True)
class Lost:
    """Ranks that died or hang: what was said of them, and what each had done as far as that is known."""

    reason: str
    reports: tuple[RankReport, ...] = ()
    is_hang: bool = True


def measure_case(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``verify``: runs in the worker process.

    Derived: see ``docs/columns.md``.

    Raises:
        CapabilityError: there is no such device, or too few GPUs.
        UserCodeError: the model or its loss fails in one process.
    """
    workload = VerifiedWorkload.from_configuration(configuration)
    plain = replace(workload, case="step")
    training = workload.training
    model = training.user, replace(training.size, batch_size=1)
    for key in (model, plain):
        if key in _not_run_because and key != workload:
            return _refused(f"not run: {_not_run_because[key]}")
    progress("one process: precision and learning rate")
    try:
        with OwnedFolder() as folder, group_of_one(_device_of(workload)), user_models.telling_user_errors(training):
            outcome = _Case(workload, str(folder), progress).outcome()
    except CapabilityError as error:
        return _refused(str(error), "does not apply")
    except UserCodeError:
        # The model or its loss, not the wrap.
        _not_run_because[model] = "the model or its loss fails in one process, see the first case"
        raise
    cause = outcome.derived.get("cause")
    if workload.case == "step" and cause in _UNUSABLE_BECAUSE:
        _not_run_because[plain] = f"the plain step {_UNUSABLE_BECAUSE[cause]}"
    return outcome


def _device_of(workload: VerifiedWorkload) -> torch.device:
    if workload.backend == "gloo":
        return torch.device("cpu")
    return choose_device("cuda" if workload.backend == "nccl" else workload.training.device)


_UNUSABLE_BECAUSE = {"hang": "hangs", "died": "ends a rank", "raises": "fails"}


def _least_precise(lower: Iterable[tuple[str, torch.dtype]]) -> torch.dtype:
    return max((dtype for _, dtype in lower), key=lambda dtype: torch.finfo(dtype).eps)


def _ok(not_compared: str, notes: Sequence[str] = (), compared: ComparedCase | None = None) -> Outcome:
    derived: dict[str, Any] = {"verdict": "ok", "not_compared": not_compared or None, "notes": list(notes)}
    if compared is not None:
        derived |= {"relative_difference": compared.largest, "farthest": compared.largest_of}
        derived |= compared.training.columns()
    return Outcome("ok", derived=derived)


def _refused(reason: str, verdict: str = "refused") -> Outcome:
    return Outcome("unsupported", derived={"verdict": verdict}, reason=reason)


def _leaves_unused_gradients(compared: ComparedCase) -> bool:
    """Return whether gradients that a wrap's own steps leave are none that it steps by.

    They are each rank's own then, and the weights of all ranks are the same.
    """
    if not any(finding.kind == "weight" for finding in compared.findings):
        return True
    weights = [record.at("weight", 1) for record in compared.records]
    gradients = [record.at("gradient", 1) for record in compared.records]
    return _are_alike(weights) and not _are_alike(gradients)


def _are_alike(rank_tensors: Sequence[Mapping[str, torch.Tensor]]) -> bool:
    """Return whether all ranks have the same tensors as the first, of those that both have."""
    first, *others = rank_tensors
    return all(torch.equal(first[name], other[name]) for other in others for name in first.keys() & other.keys())


class _Case:
    def __init__(self, workload: VerifiedWorkload, folder: str, progress: Progress):
        self.workload, self.folder, self.progress = workload, folder, progress
        self.program = PROGRAMS[workload.case]
        self.device = _device_of(workload)
        if self.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # Threads for products this small only wait for one another.
            torch.set_num_threads(1)
        self.plain = replace(workload, case="step")
        if is_user_code(workload.wrap):
            # What ranks send back may be of classes of the wrap's file.
            with contextlib.suppress(UserCodeError):
                user_models.load(workload.wrap)
        # They start while this process trains.
        self.ranks()
        dtype = torch.float32 if self.plain in _float32_only else None
        training = Training.choose(workload, self.device, dtype)
        self.training = training.clipping() if self.program.clip else training

    def outcome(self) -> Outcome:
        if self.workload == self.plain:
            _plain_step_diagnoses[self.plain] = None
        if self.workload.case == "late":
            # Who is late may be right while those who wait are not.
            outcome = self._outcome_of(replace(self.program, late=0))
            last = replace(self.program, late=self.workload.world_size - 1)
            return self._outcome_of(last) if outcome.status == "ok" else outcome
        if self.workload.case == "order":
            return self._order()
        outcome = self._outcome_of(self.program)
        if outcome.derived.get("cause") == "raises" and self.training.dtype == torch.float64:
            # The wrap may be what computes in no float64.
            self.training = replace(self.training, dtype=torch.float32)
            float32_outcome = self._outcome_of(self.program)
            if float32_outcome.derived.get("cause") != "raises":
                _float32_only.add(self.plain)
                return float32_outcome
        return outcome

    def _outcome_of(self, program: Program) -> Outcome:
        self.progress(f"{self.workload.case}: ranks")
        reports = self.run(program)
        if isinstance(reports, Lost):
            return self._lost(program, reports)
        if (refusal := self._refusal(reports)) is not None:
            return refusal
        if self.workload.case == "dropout":
            return self._agreed(diagnose_masks(self.workload, reports))
        if self.workload.case == "groups":
            return self._groups(reports)
        self.progress(f"{self.workload.case}: one process")
        reference = self.reference(program, reports)
        compared = ComparedCase(self.training, program, reference, reports)
        has_gradients = any(finding.kind == "gradient" for finding in compared.findings)
        if reports[0].runs_steps and has_gradients and _leaves_unused_gradients(compared):
            compared.ignore_gradients()
        if compared.findings:
            if program.start and any(report.is_sliced for report in reports):
                reason = "its slices are of what each rank starts with: build all from one seed"
                return _refused(reason, "does not apply")
            return self._wrong_outcome(compared)
        moments = [moment for record in compared.records for moment in record.moments.items()]
        seen = {name for (kind, _), tensors in moments if kind in ("start", "weight") for name in tensors}
        missing = sorted(reference.record.at("start", 0).keys() - seen)
        if missing and not set(missing) <= compared.unknown:
            unmatched = sorted({name for report in reports for name in report.unmatched})
            reason = f"the wrapped module has no parameter that is the model's {missing[0]}"
            return _refused("; ".join([reason, *(f"{name} is none of the model's" for name in unmatched[:1])]))
        if "weights" in compared.not_compared:
            return _refused(f"nothing of the weights could be compared: {', '.join(compared.not_compared)}")
        return _ok(", ".join(compared.not_compared), self._notes(reports, ()), compared)

    @property
    def backend(self) -> str | None:
        automatic = "gloo" if self.device.type == "cpu" else None
        return automatic if self.workload.backend == "auto" else self.workload.backend

    def ranks(self, timeout_s: float | None = None) -> launch.Ranks:
        """The ranks of the last case, or new ones, which start while this process goes on."""
        timeout_s = timeout_s or self.workload.timeout_s
        return launch.kept(self.workload.world_size, backend=self.backend, timeout_s=timeout_s)

    def run(self, program: Program, *, watch: bool = False, timeout_s: float | None = None) -> list[RankReport] | Lost:
        """Run the program on ranks, which are started where there are none."""
        settings = RankSettings(watch, self.folder)
        # Ranks have the wrap's optimizer.
        training = replace(self.training, optimizer=None)
        try:
            ranks = self.ranks(timeout_s)
            reports = ranks.run(train_on_rank, training, program, settings)
            failed = [report for report in reports if report.failure]
            if failed and not self._is_sound(ranks, reports):
                launch.end_kept()
                if all(report.is_timeout for report in failed):
                    return Lost("the ranks wait for each other", tuple(reports))
            if program.resume == "ranks" and not failed:
                reports = self._loaded_by_others(training, program, settings)
        except (RankError, LostProcessError) as error:
            launch.end_kept()
            first_line = str(error).splitlines()[0]
            return Lost(first_line, is_hang="hang" in first_line or "imed out" in first_line)
        return reports

    def _is_sound(self, ranks: launch.Ranks, reports: Sequence[RankReport]) -> bool:
        with contextlib.suppress(RankError, LostProcessError):
            is_lost = any(report.is_timeout for report in reports)
            return not is_lost and all(ranks.run(is_sound, self.workload.world_size))
        return False

    def _loaded_by_others(self, training: Training, program: Program, settings: RankSettings) -> list[RankReport]:
        workload = self.workload
        if started_outside() is not None:
            raise CapabilityError("ranks that torchrun started cannot be joined by others: run verify by itself")
        if len(workload.dimensions) > 1:
            raise CapabilityError("with several dimensions of the mesh there is no smaller one of its kind")
        rank_count = max(1, workload.world_size // 2)
        smaller = replace(workload, world_size=rank_count, mesh=next(iter(workload.dimensions)))
        with launch.start(rank_count, backend=self.backend, timeout_s=workload.timeout_s) as ranks:
            settings = replace(settings, saved_ranks=workload.world_size)
            loaded = ranks.run(train_on_rank, replace(training, workload=smaller), program, settings)
        self.workload = smaller
        return loaded

    def reference(self, program: Program, reports: Sequence[RankReport]) -> Reference:
        # Ranks that loaded what others saved may be fewer than at first.
        optimizer = merged_spec(reports)
        self.training = replace(self.training, workload=self.workload, optimizer=optimizer)
        try:
            return self.training.reference(program)
        except (CapabilityError, UserCodeError):
            raise
        except Exception as error:
            if optimizer is None:
                raise
            raise CapabilityError(
                f"{optimizer.optimizer_class.__name__} fails in one process, so nothing is compared: "
                f"{type(error).__name__}: {error!s:.160}"
            ) from error

    def _refusal(self, reports: Sequence[RankReport]) -> Outcome | None:
        failed = [(rank, report) for rank, report in enumerate(reports) if report.failure]
        if not failed:
            return None
        rank, first = next(((rank, report) for rank, report in failed if not report.is_timeout), failed[0])
        if not first.applies:
            return _refused(first.failure, "does not apply")
        reason = first.failure if len(failed) == len(reports) else f"{first.failure} (on rank {rank})"
        if self.workload.case == "step":
            return Outcome("wrong", derived={"verdict": "wrong", "cause": "raises", "when": first.at}, reason=reason)
        return _refused(reason)

    def _notes(self, reports: Sequence[RankReport], lower: Collection[tuple[str, torch.dtype]]) -> list[str]:
        """Say what ranks do in ``lower`` precision, and what a wrap's own steps are compared with."""
        notes, wrap = [], self.workload.wrap
        if reports[0].hides_optimizer:
            settings = {"lr": self.training.learning_rate, **ADAMW_SETTINGS}
            described = ", ".join(f"{name} {value:g}" for name, value in settings.items())
            notes.append(
                f"{wrap}: its optimizer cannot be built in one process, so its steps are compared with those of AdamW "
                f"({described}); return one torch.optim.Optimizer, or an object that has it as optimizer"
            )
        if lower:
            lowest = _least_precise(lower)
            uses = " and ".join(sorted(use for use, dtype in lower if dtype == lowest))
            dtype = str(lowest).removeprefix("torch.")
            notes.append(f"{wrap}: ranks {uses} in {dtype}, so they may be as far off as one process in it")
        return notes

    def _agreed(self, diagnosis: Diagnosis | None, not_compared: Sequence[str] = ()) -> Outcome:
        if diagnosis is not None:
            return _diagnosed(replace(diagnosis, line=diagnosis.line or line_of_wrap(self.workload)))
        return _ok("; ".join(not_compared))

    def _order(self) -> Outcome:
        """Compare all ranks' collectives where one rank alone meets a condition, for each condition."""
        not_compared = []
        for number, (condition, program) in enumerate(CONDITIONS.items(), start=1):
            self.progress(f"order: {condition}, {number} of {len(CONDITIONS)}")
            reports, reason = self.run(program, watch=True), ""
            if isinstance(reports, Lost):
                # That they hang or die is what the case of this condition reports.
                reason, reports = reports.reason, list(reports.reports)
            elif failures := [report.failure for report in reports if report.failure]:
                reason, reports = failures[0], []
            if not any(report.launches for report in reports):
                not_compared.append(f"{condition}: {reason or 'no collective was seen'}")
                continue
            launches = [[launch for launch in report.launches if launch.phase != "wrap"] for report in reports]
            if (difference := first_disagreement(launches)) is not None:
                meaning, last = difference
                meaning = f"with {condition}, {meaning}; all must launch the same, even where nothing hangs"
                return self._agreed(Diagnosis("order", meaning, None, last.description, last.line))
        if len(not_compared) == len(CONDITIONS):
            return _refused("; ".join(not_compared))
        return self._agreed(None, not_compared)

    def _groups(self, reports: Sequence[RankReport]) -> Outcome:
        """Compare the groups of the ranks' optimizers with those of one process."""
        if merged_spec(reports) is None:
            return _refused("the wrap has no optimizer", "does not apply")
        if started_outside() is not None:
            return _refused("ranks that torchrun started cannot be joined by one alone: run verify by itself")
        one_rank_workload = replace(self.workload, world_size=1, mesh=next(iter(self.workload.dimensions)))
        in_one_process = train_on_rank(replace(self.training, workload=one_rank_workload), self.program, RankSettings())
        model = build_subject(self.workload, self.program, torch.device("cpu"), self.training.dtype).model
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        diagnosis, not_compared = diagnose_groups(reports, in_one_process, shapes)
        if in_one_process.failure:
            not_compared.insert(0, f"the groups of one process, in which the wrap fails: {in_one_process.failure}")
        return self._agreed(diagnosis, not_compared)

    def _wrong_outcome(self, compared: ComparedCase) -> Outcome:
        program, reference, reports = compared.program, compared.reference, compared.reports
        workload, is_loaded_by_others = self.workload, program.resume == "ranks"
        self.progress(f"{workload.case}: diagnosis")
        if self.plain not in _plain_step_diagnoses:
            # Only then it is known what the case alone does.
            _Case(self.plain, self.folder, self.progress).outcome()
        plain_diagnosis = _plain_step_diagnoses[self.plain]
        watched_run: list[RankReport] | Lost = []
        if is_loaded_by_others:
            # Others than these have trained what was loaded: they show their precision in the plain step.
            watched_run = _Case(self.plain, self.folder, self.progress).run(PROGRAMS["step"], watch=True)
        elif plain_diagnosis is None or workload.case == "late":
            watched_run = self.run(program, watch=True)
        watched = [] if isinstance(watched_run, Lost) else watched_run
        lower = {pair for report in (*reports, *watched) for pair in report.dtypes}
        if lower and reference.half is None:
            reference = self.training.in_half_precision(reference, program, _least_precise(lower))
            compared = ComparedCase(self.training, program, reference, reports)
            if not compared.findings:
                return _ok(", ".join(compared.not_compared), self._notes(reports, lower), compared)
        compared.watched, compared.is_new = [] if is_loaded_by_others else watched, plain_diagnosis is None
        diagnosis = diagnose_case(compared, plain_diagnosis)
        notes = self._notes(reports, lower)
        if diagnosis.cause == "optimizer" and reports[0].hides_optimizer:
            diagnosis = replace(diagnosis, meaning=f"{diagnosis.meaning}; {notes[0].partition(': ')[2]}")
        if workload.case == "step":
            _plain_step_diagnoses[workload] = diagnosis
        return _diagnosed(diagnosis, compared, notes)

    def _lost(self, program: Program, lost: Lost) -> Outcome:
        self.progress(f"{self.workload.case}: diagnosis")
        reports = lost.reports
        if lost.is_hang and not any(report.launches for report in reports):
            # That they hang is known; what they compile is in its caches by now.
            watched_run = self.run(program, watch=True, timeout_s=self.workload.timeout_s / 4)
            reports = watched_run.reports if isinstance(watched_run, Lost) else tuple(watched_run)
        return _diagnosed(diagnose_lost_ranks(lost.reason, lost.is_hang, reports, line_of_wrap(self.workload)))


def _diagnosed(diagnosis: Diagnosis, case: ComparedCase | None = None, notes: Sequence[str] = ()) -> Outcome:
    columns = {name: getattr(diagnosis, name) for name in ("cause", "meaning", "ratio", "collective", "line")}
    derived: dict[str, Any] = {"verdict": "wrong", **columns, "notes": list(notes)}
    reason = diagnosis.meaning
    if case is not None:
        first = case.findings[0]
        reason = f"{first.message}; {reason}"
        derived |= {
            "relative_difference": min(first.relative, 1e300),
            "allowed_difference": min(first.allowed, 1e300),
            "farthest": f"{first.kind} {first.name}".strip(),
            "at_step": first.step,
            "off": len({(finding.kind, finding.name) for finding in case.findings}),
            **case.training.columns(),
        }
    return Outcome("wrong", derived=derived, reason=reason)
