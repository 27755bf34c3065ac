"""Compare ranks with one process, moment by moment: find the first tensor that is off, and by how much."""

import math
from collections.abc import Sequence
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
        self._weights(0, "start")
        for step in range(first, self.program.steps):
            self._number("loss", step + 1, step - first)
            self._gradients(step, step - first)
            self._number("norm", step + 1, step - first)
            if self.program.evaluate and step < self.program.steps - 1:
                self._number("evaluation", step + 1, step)
            if step + 1 in self.reference.record.weights:
                self._weights(step + 1, "weight")
                self._states(step + 1)
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

    def _weights(self, step: int, kind: str) -> None:
        rank_weights = [report.record.weights.get(step, {}) for report in self.reports]
        if not any(rank_weights):
            return
        # Shapes of slices are known from the first moment on.
        whole, unknown = assemble(rank_weights, self.shapes, self.groups)
        self.unknown |= unknown
        expected = self.reference.record.weights[step]
        if kind == "start" and self.workload.case == "start":
            others = [expected]
        else:
            others = [record.weights[step] for record in self.reference.others]
        # Every parameter that no rank has: pipeline stages have some each.
        for name, value in expected.items():
            if name in unknown:
                continue
            rounding = self._rounding(value, [weights[name] for weights in others])
            for rank, tensors in enumerate(whole):
                self.records[rank].weights[step] = tensors
                if name in tensors:
                    self._compare(kind, step, name, rank, tensors[name], value, rounding)

    def _gradients(self, step: int, index: int) -> None:
        rank_gradients = [
            report.record.gradients[index] if index < len(report.record.gradients) else {} for report in self.reports
        ]
        whole, unknown = assemble(rank_gradients, self.shapes, self.groups)
        for record, tensors in zip(self.records, whole, strict=True):
            record.gradients.append(tensors)
        if self.program.scale and step + 1 == OVERFLOWN_STEP:
            return
        expected = self.reference.record.gradients[step]
        others = [record.gradients[step] for record in self.reference.others]
        total = math.hypot(*map(norm, expected.values()))
        leaves_none = not any(whole)
        for name, shape in self.shapes.items():
            if name in unknown or leaves_none:
                continue
            zeros = torch.zeros(shape, dtype=self.reference.dtype)
            value = expected.get(name, zeros)
            rounding = self._rounding(value, [gradients.get(name, value) for gradients in others], total)
            for rank, tensors in enumerate(whole):
                is_missing = name not in tensors
                if name not in self.reports[rank].owned or (is_missing and name not in expected):
                    continue
                actual = tensors.get(name, torch.zeros_like(value))
                self._compare("gradient", step + 1, name, rank, actual, value, rounding, is_missing=is_missing)

    def _states(self, step: int) -> None:
        expected = self.reference.record.states.get(step, {})
        rank_states = [report.record.states.get(step, {}) for report in self.reports]
        keys = {key for state in expected.values() for key in state}
        for key in sorted(keys):
            shapes = {name: state[key].shape for name, state in expected.items() if key in state}
            rank_tensors = [
                {name: state[key] for name, state in states.items() if key in state} for states in rank_states
            ]
            whole, _ = assemble(rank_tensors, shapes, self.groups)
            for name in shapes:
                value = expected[name][key]
                others = [record.states[step][name][key] for record in self.reference.others]
                # Squares are never negative.
                rounding = self._rounding(value, others, power=2 if bool((value >= 0).all()) else 1)
                for rank, tensors in enumerate(whole):
                    if name in tensors and name in self.reports[rank].owned:
                        self._compare("state", step, f"{name} {key}", rank, tensors[name], value, rounding)

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

    def _number(self, kind: str, step: int, index: int) -> None:
        """A loss or norm of all ranks: losses are of shares and add up, norms are the same on every rank."""
        attribute = {"loss": "losses", "norm": "norms", "evaluation": "evaluations"}[kind]
        at = index if kind == "evaluation" else step - 1
        expected_of = [getattr(record, attribute) for record in (self.reference.record, *self.reference.others)]
        if at >= len(expected_of[0]):
            return
        value, *others = (torch.tensor(numbers[at], dtype=torch.float64) for numbers in expected_of)
        rank_numbers = [getattr(report.record, attribute) for report in self.reports]
        if any(index >= len(numbers) for numbers in rank_numbers):
            return
        numbers = [series[index] for series in rank_numbers]
        rounding = self._rounding(value, others)
        for rank, number in enumerate(numbers if kind == "norm" else [self._added(numbers)]):
            self._compare(kind, step, "", rank, torch.tensor(number, dtype=torch.float64), value, rounding)

    def _added(self, numbers: Sequence[float]) -> float:
        """The loss of the batch from those of ranks, each weighted by its sequences."""
        total = 0.0
        for data in range(self.workload.data_ranks):
            sharing_ranks = [rank for rank in range(self.workload.world_size) if self.workload.data_place(rank) == data]
            # Ranks that share sequences have parts of their loss, or all of it, each.
            total += sum(numbers[rank] for rank in sharing_ranks) / len(sharing_ranks)
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
