"""Compare ranks with one process, moment by moment: find the first tensor that is off, and by how much."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cs336sys.experiments.verify.cases import OVERFLOWN_STEP, Program
from cs336sys.experiments.verify.rank import RankReport
from cs336sys.experiments.verify.record import Record
from cs336sys.experiments.verify.reference import Reference
from cs336sys.parity.assembly import assemble
from cs336sys.parity.rounding import rounding_in
from cs336sys.parity.weights import norm, relative_difference
from cs336sys.workload.verification import VerifiedWorkload


@dataclass(frozen=True)
class Finding:
    """Something that is off.

    Attributes:
        kind: ``start``, ``loss``, ``gradient``, ``norm``, ``weight``, ``state``, ``buffer``, ``evaluation``.
        step: counted from 1; of weights and states, after which.
        name: of the parameter or buffer; of a state, ``layers.0.weight exp_avg``; empty for numbers.
        rank: the first rank on which it is off.
        relative: the norm of the difference over that of what is expected.
        allowed: how large rounding explains.
        is_missing: whether the rank has no such gradient; ``actual`` is zero then.
    """

    kind: str
    step: int
    name: str
    rank: int
    relative: float
    allowed: float
    actual: Tensor
    expected: Tensor
    is_missing: bool = False

    @property
    def message(self) -> str:
        subject = _SUBJECTS[self.kind].format(self.name)
        by = "missing" if self.is_missing else f"off by {format_relative(self.relative)}"
        when = "before the first step" if self.step == 0 else f"step {self.step}"
        return f"{when}, rank {self.rank}: {subject} is {by}"


_SUBJECTS = {
    "start": "{}, as it is wrapped,",
    "loss": "the loss",
    "gradient": "gradient of {}",
    "norm": "the norm of all gradients",
    "weight": "weight of {}",
    "state": "optimizer state of {}",
    "buffer": "buffer {}",
    "evaluation": "the loss of the evaluation",
}


def format_relative(relative: float) -> str:
    """Write a relative difference in percent."""
    return "more than its size" if not math.isfinite(relative) else f"{100 * relative:.3g} %"


@dataclass
class ComparedCase:
    """All that is off in a case, in the order of time.

    Attributes:
        records: of each rank, with whole tensors.
        largest: of all that agrees, the largest relative difference, and of what.
        unknown: parameters of which the ranks' slices do not make a whole.
        not_compared: what the case could not look at, in words.
    """

    findings: list[Finding]
    records: list[Record]
    largest: float
    largest_of: str
    unknown: tuple[str, ...]
    not_compared: tuple[str, ...]


def rank_groups(workload: VerifiedWorkload) -> list[list[int]]:
    """Ranks that may hold slices of one tensor: those along each dimension of the mesh, then all."""
    sizes = list(workload.dimensions.values())
    ranks = torch.arange(workload.world_size).view(sizes)
    groups = []
    for dimension in reversed(range(len(sizes))):
        if sizes[dimension] > 1:
            groups += ranks.movedim(dimension, -1).reshape(-1, sizes[dimension]).tolist()
    return [*groups, list(range(workload.world_size))]


def moments(record: Record, first: int = 0) -> dict[tuple[str, int], dict[str, Tensor]]:
    """All that a record holds but buffers, by kind and step in the order of time; numbers have an empty name.

    Args:
        first: steps that others have trained before.
    """

    def number(series: Sequence[float], index: int) -> dict[str, Tensor]:
        return {"": torch.tensor(series[index], dtype=torch.float64)} if index < len(series) else {}

    tensors = {("start", 0): record.weights.get(0, {})}
    for index in range(len(record.losses)):
        step = first + index + 1
        states = record.states.get(step, {})
        keys = sorted({key for state in states.values() for key in state})
        tensors |= {
            ("loss", step): number(record.losses, index),
            ("gradient", step): record.gradients[index],
            ("norm", step): number(record.norms, index),
            ("evaluation", step): number(record.evaluations, index),
            ("weight", step): record.weights.get(step, {}),
            ("state", step): {
                f"{name} {key}": state[key] for key in keys for name, state in states.items() if key in state
            },
        }
    return tensors


class CaseComparison:
    """Compares a case's ranks with one process."""

    def __init__(
        self, workload: VerifiedWorkload, program: Program, reference: Reference, reports: Sequence[RankReport]
    ):
        self.workload, self.program, self.reference, self.reports = workload, program, reference, reports
        self.groups = rank_groups(workload)
        self.shapes = {name: value.shape for name, value in reference.record.weights[0].items()}
        self.findings: list[Finding] = []
        self.largest, self.largest_of = 0.0, ""
        self.unknown: set[str] = set()
        self.compared_kinds: set[str] = set()
        self.rounding = rounding_in(reference.dtype, reference.half)
        self.records = [replace(report.record, gradients=[], weights={}) for report in reports]

    def compare(self, first: int = 0) -> ComparedCase:
        """Compare everything that ranks have, which others have trained ``first`` steps before."""
        reference, *others = (moments(record) for record in (self.reference.record, *self.reference.others))
        ranks = [moments(report.record, first) for report in self.reports]
        for moment, expected in reference.items():
            _, step = moment
            if not 0 < step <= first:
                rank_tensors = [rank.get(moment, {}) for rank in ranks]
                self._moment(*moment, expected, [other[moment] for other in others], rank_tensors)
        self._buffers()
        unknown = tuple(sorted(self.unknown))
        return ComparedCase(
            self.findings, self.records, self.largest, self.largest_of, unknown, self._not_compared(unknown)
        )

    def _not_compared(self, unknown: Sequence[str]) -> tuple[str, ...]:
        record = self.reference.record
        labels = {"loss": "losses", "gradient": "gradients", "weight": "weights"}
        labels |= {"state": "optimizer state"} if any(record.states.values()) else {}
        labels |= {"norm": "norms"} if record.norms else {}
        labels |= {"evaluation": "evaluations"} if record.evaluations else {}
        labels |= {"buffer": "buffers"} if record.buffers else {}
        slices = [f"slices of {', '.join(unknown[:3])}{', ...' if unknown[3:] else ''}"] if unknown else []
        return (*(label for kind, label in labels.items() if kind not in self.compared_kinds), *slices)

    def _moment(
        self,
        kind: str,
        step: int,
        expected: dict[str, Tensor],
        others: Sequence[Mapping[str, Tensor]],
        rank_tensors: Sequence[Mapping[str, Tensor]],
    ) -> None:
        required: Collection[str] = ()
        scale = 0.0
        if kind == "gradient":
            required, scale = expected.keys(), math.hypot(*map(norm, expected.values()))
            dtype = self.reference.dtype
            expected = {
                name: expected.get(name, torch.zeros(shape, dtype=dtype)) for name, shape in self.shapes.items()
            }
        elif kind in ("loss", "evaluation"):
            # Nothing of a sum that lacks a part.
            parts = [tensors[""] for tensors in rank_tensors] if all(rank_tensors) else []
            rank_tensors = [{"": self._added(parts)}] if parts else []
        elif kind == "start" and self.workload.case == "start":
            others = [expected]
        whole, unknown = assemble(rank_tensors, {name: value.shape for name, value in expected.items()}, self.groups)
        if kind == "gradient":
            for record, tensors in zip(self.records, whole, strict=True):
                record.gradients.append(tensors)
            if self.program.scale and step == OVERFLOWN_STEP:
                return
        elif kind in ("start", "weight"):
            # Shapes of slices are known from the first moment on.
            self.unknown |= unknown
            for record, tensors in zip(self.records, whole, strict=True):
                record.weights[step] = tensors
        for name, value in expected.items() if any(whole) else ():
            if name in unknown:
                continue
            # Squares are never negative.
            power = 2 if kind == "state" and bool((value >= 0).all()) else 1
            rounding = self._rounding(value, [other.get(name, value) for other in others], scale, power)
            for rank, tensors in enumerate(whole):
                is_missing = name not in tensors
                is_compared = kind not in ("gradient", "state") or name.partition(" ")[0] in self.reports[rank].owned
                # Of pipeline stages each has some parameters.
                if is_compared and (not is_missing or name in required):
                    actual = tensors.get(name, torch.zeros_like(value))
                    self._compare(kind, step, name, rank, actual, value, rounding, is_missing=is_missing)

    def _buffers(self) -> None:
        if not self.reference.is_whole:
            # Statistics are those of the sequences that a rank has seen.
            return
        for name, value in self.reference.record.buffers.items():
            for rank, record in enumerate(self.records):
                buffer = record.buffers.get(name)
                if buffer is None or buffer.shape != value.shape:
                    continue
                others = [other_record.buffers[name] for other_record in self.reference.others]
                steps = self.program.steps
                if not value.is_floating_point():
                    self.compared_kinds.add("buffer")
                    if not torch.equal(buffer, value) and torch.equal(value, others[0]):
                        self.findings.append(Finding("buffer", steps, name, rank, math.inf, 0.0, buffer, value))
                elif torch.equal(torch.nan_to_num(value), torch.nan_to_num(others[0])) or not steps:
                    # What depends on how a batch is cut is each rank's own.
                    self._compare("buffer", steps, name, rank, buffer, value, self._rounding(value, others))

    def _added(self, numbers: Sequence[Tensor]) -> Tensor:
        """The loss of the batch from those of ranks, each weighted by its sequences."""
        total = torch.zeros((), dtype=torch.float64)
        for data in range(self.workload.data_ranks):
            sharing_ranks = [rank for rank in range(self.workload.world_size) if self.workload.data_place(rank) == data]
            # Ranks that share sequences have parts of their loss, or all of it, each.
            total += torch.stack([numbers[rank] for rank in sharing_ranks]).mean()
        return total

    def _rounding(self, value: Tensor, others: Sequence[Tensor], scale: float = 0.0, power: int = 1) -> float:
        """The norm of a difference that rounding explains, of one of a group of tensors whose norm is ``scale``."""
        repeated = max((norm(other - value) for other in others), default=0.0)
        size = max(norm(value), scale / math.sqrt(max(len(self.shapes), 1)))
        return self.rounding.allowed(size, repeated, power)

    def _compare(
        self,
        kind: str,
        step: int,
        name: str,
        rank: int,
        actual: Tensor,
        expected: Tensor,
        rounding: float,
        *,
        is_missing: bool = False,
    ) -> None:
        self.compared_kinds.add(kind)
        size, off = norm(expected), norm(actual.to(expected.dtype) - expected)
        relative = relative_difference(off, size)
        if not off <= rounding:
            allowed = rounding / size if size else 0.0
            self.findings.append(Finding(kind, step, name, rank, relative, allowed, actual, expected, is_missing))
        elif relative > self.largest and size:
            self.largest, self.largest_of = relative, f"{kind} {name}".strip()
