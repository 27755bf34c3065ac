"""Explain a wrong gradient as a combination of those that micro-batches have by themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from cs336sys.experiments.verify.cases import Program, shares_of
from cs336sys.experiments.verify.comparison import ComparedCase, Finding, norm
from cs336sys.experiments.verify.rank import RankReport
from cs336sys.experiments.verify.reference import Reference, parts_of_gradients
from cs336sys.parity.collectives import CollectiveLaunch
from cs336sys.workload.verification import VerifiedWorkload

# Parts explain a gradient whose rest is smaller than this, relatively; and coefficients are equal that are so near.
EXPLAINED = 1e-3
EQUAL = 2e-2

# Phases in which gradients are sent.
GRADIENT_PHASES = ("backward", "finish", "optimizer")


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a fault.

    Attributes:
        cause: one word or two for programs, as in ``docs/verify.md``.
        meaning: a sentence for people.
        ratio: of what was found to what is right; None where they are not in proportion.
        collective: the one that is missing, early, or that others do not launch; empty where none is to blame.
        line: of the user's code: of the collective, else of the wrap.
    """

    cause: str
    meaning: str
    ratio: float | None = None
    collective: str = ""
    line: str = ""
    first: tuple[str, int, str] = ("", 0, "")

    def columns(self) -> dict[str, object]:
        """The fields as derived columns of a cell."""
        columns = asdict(self)
        del columns["first"]
        return columns


@dataclass
class FaultEvidence:
    """A case that is wrong, run twice.

    Attributes:
        watched: of the case run again, with its collectives recorded; empty where it was not.
        is_new: whether the plain step is right.
    """

    workload: VerifiedWorkload
    program: Program
    reference: Reference
    compared: ComparedCase
    reports: Sequence[RankReport]
    watched: Sequence[RankReport]
    wrap_line: str
    is_new: bool

    @property
    def explained(self) -> float:
        """How much of a gradient may be left, relatively, where others explain it."""
        return EXPLAINED if self.reference.half is None else 8 * torch.finfo(self.reference.half).eps

    @property
    def ranks(self) -> int:
        """Ranks whose gradients are averaged."""
        sizes = self.workload.dimensions
        return sizes.get("data", 1) * sizes.get("context", 1)

    def launches(self, phases: Sequence[str], step: int | None = None) -> list[CollectiveLaunch]:
        """Collectives of the first rank in these phases."""
        watched_launches = self.watched[0].launches if self.watched else []
        return [launch for launch in watched_launches if launch.phase in phases and step in (None, launch.step)]

    def conclude(
        self, cause: str, meaning: str, sent: Sequence[CollectiveLaunch] = (), ratio: float | None = None
    ) -> Diagnosis:
        """Blame the last of the collectives ``sent``, and its line; without any the wrap."""
        collective, line = (sent[-1].description, sent[-1].line) if sent else ("", "")
        first = self.compared.findings[0]
        place = first.kind, first.step, first.name
        return Diagnosis(cause, meaning, ratio, collective, line or self.wrap_line, place)


def ratio_of(case: FaultEvidence, finding: Finding) -> float | None:
    return proportion(finding.actual, finding.expected, case.explained)


def proportion(actual: Tensor, expected: Tensor, tolerance: float = EXPLAINED) -> float | None:
    """Return the factor from ``expected``; None if they are not in proportion but for a relative ``tolerance``."""
    size = norm(expected)
    if not size or actual.shape != expected.shape or not torch.isfinite(actual).all():
        return None
    ratio = float((actual.double() * expected.double()).sum()) / size**2
    return ratio if norm(actual.double() - ratio * expected.double()) <= tolerance * size and ratio else None


def is_near(value: float, other: float) -> bool:
    return abs(value - other) <= EQUAL * max(abs(other), 1e-300)


def diagnose_gradient(case: FaultEvidence, first: Finding) -> Diagnosis:
    """Explain the first gradient that is off."""
    step = first.step - 1
    early = [launch for launch in case.launches(("backward",)) if launch.incomplete]
    if early:
        meaning = f"the gradient of {early[0].incomplete[0]} was sent before the backward pass had completed it"
        return case.conclude("too early", meaning, early[:1])
    sent = case.launches(GRADIENT_PHASES, step)
    if first.is_missing:
        every = all(first.name not in record.gradients[step] for record in case.compared.records if record.gradients)
        who = "on every rank" if every else f"on rank {first.rank}"
        return case.conclude("left out", f"{first.name} has no gradient {who}: the wrap leaves it out", sent)
    findings = [
        finding for finding in case.compared.findings if finding.kind == "gradient" and finding.step == first.step
    ]
    diagnosis = diagnose_combination(case, step, findings, sent)
    if diagnosis is not None:
        return diagnosis
    for name, gradient in case.reference.record.gradients[step].items():
        is_alike = name != first.name and gradient.shape == first.expected.shape
        if is_alike and proportion(first.actual, gradient) is not None:
            return case.conclude("mixed up", f"{first.name} has the gradient of {name}", sent)
    names = list(dict.fromkeys(finding.name for finding in findings))
    shares_layers = any(case.workload.dimensions.get(name, 1) > 1 for name in ("tensor", "pipeline", "context"))
    # The backward pass begins at the last one, and what follows it is off in no proportion.
    last = next(finding for finding in findings if finding.name == names[-1])
    for finding in (first, last) if shares_layers else (first,):
        ratio = ratio_of(case, finding)
        diagnosis = _added_up(case, finding, sent) if ratio is None else diagnose_ratio(case, ratio, sent)
        if diagnosis is not None:
            meaning = f"{finding.name}, the first in the backward pass: {diagnosis.meaning}"
            return diagnosis if finding is first else replace(diagnosis, meaning=meaning)
    correct = [name for name in case.reference.record.gradients[step] if name not in names]
    near = f"; those of {', '.join(correct[-2:])} are right" if correct else ""
    meaning = f"{len(names)} gradients are off, the last one in the model that of {names[-1]}{near}"
    return case.conclude("partial sum" if shares_layers else "forward", meaning, sent)


def diagnose_ratio(case: FaultEvidence, ratio: float, sent: Sequence[CollectiveLaunch]) -> Diagnosis:
    ranks, all_ranks = case.ranks, case.workload.world_size
    if is_near(ratio, ranks) and ranks > 1:
        meaning = f"gradients are {ratio:.3g} times too large, the number of ranks: they are summed"
        return case.conclude("not averaged", meaning, sent, ratio)
    if is_near(ratio, 1 / ranks) and ranks > 1:
        meaning = f"gradients are 1/{ranks} of what they should be: they are averaged twice"
        return case.conclude("averaged twice", meaning, sent, ratio)
    if is_near(ratio, all_ranks) or is_near(ratio, 1 / all_ranks):
        how = "added up once too often" if ratio > 1 else "divided by, or spread over, ranks that all have them"
        return case.conclude("scaled", f"gradients are {ratio:.3g} times what they should be: {how}", sent, ratio)
    return case.conclude("scaled", f"gradients are {ratio:.4g} times what they should be", sent, ratio)


def _added_up(case: FaultEvidence, first: Finding, sent: Sequence[CollectiveLaunch]) -> Diagnosis | None:
    """Ranks that share layers and each have a part of a gradient's sum."""
    step = first.step - 1
    parts = [record.gradients[step].get(first.name) for record in case.compared.records]
    present = [part for part in parts if part is not None and part.shape == first.expected.shape]
    if len(present) < len(parts):
        return None
    ratio = proportion(torch.stack(present).sum(0), first.expected)
    if ratio is None:
        return None
    over = "" if is_near(ratio, 1) else f" ({ratio:.3g} times it)"
    meaning = f"each rank has a part of the gradient of {first.name}, and they add up to it{over}: sum it over ranks"
    return case.conclude("partial sum", meaning, sent)


@dataclass(frozen=True)
class _Mixture:
    """A gradient as a combination of what it could be made of.

    Attributes:
        coefficients: of micro-batches, by data rank and micro-batch, over those that are right.
        before: of the gradient of the step before.
    """

    coefficients: Mapping[tuple[int, int], float]
    before: float


def diagnose_combination(
    case: FaultEvidence, step: int, findings: Sequence[Finding], sent: Sequence[CollectiveLaunch]
) -> Diagnosis | None:
    """Explain gradients as combinations of those that each rank's micro-batches have by themselves."""
    if case.workload.dimensions.get("data", 1) == 1 or case.program.clip:
        return None
    at = case.reference.record
    if step and step not in at.weights:
        return None
    program, device = replace(case.program, late=None), torch.device("cpu")
    parts = parts_of_gradients(case.workload, program, device, case.reference.dtype, step, at)
    mixtures: dict[int, _Mixture] = {}
    name = findings[0].name
    for finding in findings:
        if finding.name == name and not finding.is_missing:
            mixture = _mixture(case, parts, finding, step)
            if mixture is None:
                return None
            mixtures[finding.rank] = mixture
    return diagnose_mixtures(case, name, mixtures, sent) if mixtures else None


def _mixture(
    case: FaultEvidence, parts: Mapping[tuple[int, int], Mapping[str, Tensor]], finding: Finding, step: int
) -> _Mixture | None:
    shares = {
        (share.data, share.micro): share.weight for share in shares_of(case.workload, case.program, case.program.micro)
    }
    keys = [key for key in parts if finding.name in parts[key]]
    columns = [parts[key][finding.name].flatten().double() * shares[key] for key in keys]
    if step > 0 and finding.name in case.reference.record.gradients[step - 1]:
        columns.append(case.reference.record.gradients[step - 1][finding.name].flatten().double())
    if not columns or len(columns[0]) < len(columns) or not torch.isfinite(finding.actual).all():
        return None
    matrix, wanted = torch.stack(columns, 1), finding.actual.flatten().double()
    solution = torch.linalg.lstsq(matrix, wanted[:, None]).solution[:, 0]
    if norm(matrix @ solution - wanted) > case.explained * max(norm(wanted), 1e-300):
        return None
    coefficients = [*solution.tolist(), 0.0]
    return _Mixture(dict(zip(keys, coefficients, strict=False)), coefficients[len(keys)])


def diagnose_mixtures(
    case: FaultEvidence, name: str, mixtures: Mapping[int, _Mixture], sent: Sequence[CollectiveLaunch]
) -> Diagnosis | None:
    workload, program = case.workload, case.program
    data, micro = workload.data_ranks, program.micro
    rank, mixture = next(iter(mixtures.items()))
    values = list(mixture.coefficients.values())
    if not values:
        return None
    if abs(mixture.before) > EQUAL:
        alone = all(abs(coefficient) < EQUAL for coefficient in values)
        origin = "is that of the step before" if alone else "has that of the step before in it"
        meaning = f"the gradient of {name} {origin}: it was not set to zero, or is sent late"
        return case.conclude("stale gradient", meaning)
    if all(is_near(coefficient, values[0]) for coefficient in values):
        return None if is_near(values[0], 1) else diagnose_ratio(case, values[0], sent)
    by_rank = {
        data_rank: [mixture.coefficients.get((data_rank, number), 0.0) for number in range(micro)]
        for data_rank in range(data)
    }
    used = [
        data_rank for data_rank, coefficients in by_rank.items() if any(abs(value) > EQUAL for value in coefficients)
    ]
    if micro > 1 and len({round(value, 3) for value in values}) > 1 and len(used) == data:
        means = [sum(by_rank[data_rank][number] for data_rank in range(data)) / data for number in range(micro)]
        counts = ", ".join(f"{round(mean, 6):.3g}" for mean in means)
        meaning = f"of the micro-batches of a step, each counts {counts} times: gradients that were averaged are again"
        if all(is_near(mean, 1) for mean in means):
            unsent = [number for number in range(micro) if not is_near(by_rank[0][number], by_rank[data - 1][number])]
            meaning = (
                f"micro-batch {', '.join(str(number + 1) for number in unsent)} of {micro} is each rank's own, and the "
                "others are the mean over ranks: what is sent is the gradient of one backward pass"
            )
        return case.conclude("accumulation", meaning, sent)
    if len(used) == 1 and len(mixtures) > 1:
        largest = [max(each.coefficients.items(), key=lambda item: abs(item[1])) for each in mixtures.values()]
        if len({data_rank for (data_rank, _), _ in largest}) == 1:
            which = used[0]
            sender = "the last rank" if which == data - 1 else "the first rank" if which == 0 else f"rank {which}"
            return case.conclude("one rank's", f"every rank has the gradient of {sender} alone", sent)
        return _not_synchronized(case, name, sent)
    if len(used) == 1:
        if used[0] == case.workload.data_place(rank):
            return _not_synchronized(case, name, sent)
        return case.conclude("one rank's", f"rank {rank} has the gradient of rank {used[0]} alone", sent)
    if len(used) < data:
        missing = ", ".join(str(data_rank) for data_rank in range(data) if data_rank not in used)
        return case.conclude("rank left out", f"the gradient of rank {missing} is not in the mean", sent)
    if program.uneven:
        return case.conclude("uneven", "ranks are averaged evenly that have different numbers of sequences", sent)
    counts = ", ".join(f"{sum(coefficients):.3g}" for coefficients in by_rank.values())
    return case.conclude("scaled", f"the ranks' gradients count {counts} times what they should", sent)


def _not_synchronized(case: FaultEvidence, name: str, sent: Sequence[CollectiveLaunch]) -> Diagnosis:
    total = sum(value.numel() for value in case.reference.record.gradients[0].values()) * case.program.micro
    fitting = [launch for launch in sent if "gather" not in launch.name]
    elements = sum(launch.elements for launch in fitting)
    if fitting and elements >= total / case.program.micro and not case.program.no_sync:
        meaning = (
            f"each rank keeps its own gradient of {name}, though as many elements are sent as there are: the result is "
            "not waited for, or not copied back, or it is that of another parameter"
        )
        return case.conclude("not waited for", meaning, fitting)
    seen = f"{elements:,} of {total:,} elements are sent" if fitting else "no collective follows the backward pass"
    return case.conclude("not synchronized", f"each rank keeps its own gradient of {name}: {seen}")
