"""Compare ranks with one process, moment by moment: find the first tensor that is off, and by how much."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cs336sys.experiments.verify.cases import OVERFLOWN_STEP, Program
from cs336sys.experiments.verify.rank import RankReport
from cs336sys.experiments.verify.record import Record
from cs336sys.experiments.verify.reference import OneProcess, Reference
from cs336sys.experiments.verify.wraps import line_of_wrap
from cs336sys.parity.assembly import assemble
from cs336sys.parity.collectives import CollectiveLaunch
from cs336sys.parity.rounding import rounding_in
from cs336sys.parity.weights import norm, relative_difference
from cs336sys.workload.verification import VerifiedWorkload

_Tensors = dict[str, Tensor]
_Launches = Sequence[CollectiveLaunch]

# Parts explain a gradient whose rest is smaller than this, relatively.
EXPLAINED = 1e-3

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
        first: kind, step and name of the first finding.
    """

    cause: str
    meaning: str
    ratio: float | None = None
    collective: str = ""
    line: str = ""
    first: tuple[str, int, str] = ("", 0, "")


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


def rank_groups(workload: VerifiedWorkload) -> list[list[int]]:
    """Ranks that may hold slices of one tensor: those along each dimension of the mesh, then all."""
    sizes = list(workload.dimensions.values())
    ranks = torch.arange(workload.world_size).view(sizes)
    along = [ranks.movedim(number, -1).reshape(-1, size).tolist() for number, size in reversed(list(enumerate(sizes)))]
    return [group for groups in along for group in groups if len(group) > 1] + [list(range(workload.world_size))]


def moments(record: Record, first: int = 0) -> dict[tuple[str, int], _Tensors]:
    """All that a record holds but buffers, by kind and step in the order of time; numbers have an empty name.

    Args:
        first: steps that others have trained before.
    """

    def number(series: Sequence[float], index: int) -> _Tensors:
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


class ComparedCase:
    """A case's ranks, compared with one process.

    Attributes:
        findings: all that is off, in the order of time.
        records: of each rank, with whole tensors.
        largest: of all that agrees, the largest relative difference, and ``largest_of`` what.
        unknown: parameters of which the ranks' slices do not make a whole.
        watched: of the case run again, with its collectives recorded; empty where it was not.
        is_new: whether the plain step is right.
    """

    watched: Sequence[RankReport] = ()
    is_new = True

    def __init__(self, process: OneProcess, program: Program, reference: Reference, reports: Sequence[RankReport]):
        self.process, self.program, self.reference, self.reports = process, program, reference, reports
        self.workload = process.workload
        self.groups = rank_groups(self.workload)
        self.shapes = {name: value.shape for name, value in reference.record.weights[0].items()}
        self.rounding = rounding_in(reference.dtype, reference.half)
        self.findings: list[Finding] = []
        self.largest, self.largest_of = 0.0, ""
        self.unknown: set[str] = set()
        self._compared_kinds: set[str] = set()
        self.records = [replace(report.record, gradients=[], weights={}) for report in reports]
        first = program.first_step
        expected, *others = (moments(record) for record in (reference.record, *reference.others))
        ranks = [moments(report.record, first) for report in reports]
        for moment, tensors in expected.items():
            if not 0 < moment[1] <= first:
                self._moment(moment, tensors, [run[moment] for run in others], [run.get(moment, {}) for run in ranks])
        self._buffers()

    @property
    def explained(self) -> float:
        """Return how much of a gradient may be left, relatively, where others explain it."""
        return EXPLAINED if self.reference.half is None else 8 * torch.finfo(self.reference.half).eps

    def launches(self, phases: Sequence[str], step: int | None = None) -> list[CollectiveLaunch]:
        """Collectives of the first rank in these phases."""
        watched_launches = self.watched[0].launches if self.watched else []
        return [launch for launch in watched_launches if launch.phase in phases and step in (None, launch.step)]

    def conclude(
        self, cause: str, meaning: str, sent: _Launches | None = None, ratio: float | None = None
    ) -> Diagnosis:
        """Blame the last of the collectives ``sent``, and its line; without any the wrap.

        Args:
            sent: None is those that send the gradient that is the first finding.
        """
        first = self.findings[0]
        if sent is None:
            sent = self.launches(GRADIENT_PHASES, first.step - 1) if first.kind == "gradient" else ()
        collective, line = (sent[-1].description, sent[-1].line) if sent else ("", "")
        line = line or line_of_wrap(self.workload)
        return Diagnosis(cause, meaning, ratio, collective, line, (first.kind, first.step, first.name))

    def ignore_gradients(self) -> None:
        """Count gradients as not compared."""
        self.findings = [finding for finding in self.findings if finding.kind != "gradient"]
        self._compared_kinds.discard("gradient")

    @property
    def not_compared(self) -> list[str]:
        """Return what the case could not look at, in words."""
        record = self.reference.record
        labels = {
            "gradient": ("gradients", True),
            "loss": ("losses", True),
            "weight": ("weights", True),
            "state": ("optimizer state", any(record.states.values())),
            "norm": ("norms", record.norms),
            "evaluation": ("evaluations", record.evaluations),
            "buffer": ("buffers", record.buffers),
        }
        unseen = [label for kind, (label, exists) in labels.items() if exists and kind not in self._compared_kinds]
        unknown = sorted(self.unknown)
        slices = [f"slices of {', '.join(unknown[:3])}{', ...' if unknown[3:] else ''}"] if unknown else []
        return unseen + slices

    def _moment(
        self, moment: tuple[str, int], expected: _Tensors, others: list[_Tensors], ranks: list[_Tensors]
    ) -> None:
        kind, step = moment
        required: Collection[str] = ()
        scale = 0.0
        if kind == "gradient":
            required, scale = expected.keys(), math.hypot(*map(norm, expected.values()))
            zeros = {name: torch.zeros(shape, dtype=self.reference.dtype) for name, shape in self.shapes.items()}
            expected = {name: expected.get(name, zero) for name, zero in zeros.items()}
        elif kind in ("loss", "evaluation"):
            # Nothing of a sum that lacks a part.
            ranks = [{"": self._added([part[""] for part in ranks])}] if all(ranks) else []
        elif kind == "start" and self.workload.case == "start":
            others = [expected]
        whole, unknown = assemble(ranks, {name: value.shape for name, value in expected.items()}, self.groups)
        for record, tensors in zip(self.records, whole, strict=False):
            if kind == "gradient":
                record.gradients.append(tensors)
            elif kind in ("start", "weight"):
                record.weights[step] = tensors
        if kind in ("start", "weight"):
            # Shapes of slices are known from the first moment on.
            self.unknown |= unknown
        if kind == "gradient" and self.program.scale and step == OVERFLOWN_STEP:
            return
        for name, value in expected.items() if any(whole) else ():
            if name in unknown:
                continue
            # Squares are never negative.
            power = 2 if kind == "state" and bool((value >= 0).all()) else 1
            rounding = self._rounding(value, [other.get(name, value) for other in others], scale, power)
            for rank, tensors in enumerate(whole):
                is_compared = kind not in ("gradient", "state") or name.partition(" ")[0] in self.reports[rank].owned
                # Of pipeline stages each has some parameters.
                if is_compared and (name in tensors or name in required):
                    self._compare(kind, step, name, rank, tensors.get(name), value, rounding)

    def _buffers(self) -> None:
        others_of = [record.buffers for record in self.reference.others]
        steps = self.program.steps
        # Else statistics are those of the sequences that a rank has seen.
        for name, value in self.reference.record.buffers.items() if self.reference.is_whole else ():
            others = [buffers[name] for buffers in others_of]
            # What depends on how a batch is cut is each rank's own.
            if not torch.equal(torch.nan_to_num(value), torch.nan_to_num(others[0])) and steps:
                continue
            rounding = self._rounding(value, others) if value.is_floating_point() else 0.0
            for rank, record in enumerate(self.records):
                buffer = record.buffers.get(name)
                if buffer is not None and buffer.shape == value.shape:
                    self._compare("buffer", steps, name, rank, buffer, value, rounding)

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
        self, kind: str, step: int, name: str, rank: int, tensor: Tensor | None, expected: Tensor, rounding: float
    ) -> None:
        self._compared_kinds.add(kind)
        actual = torch.zeros_like(expected) if tensor is None else tensor
        size, off = norm(expected), norm(actual.double() - expected.double())
        relative = relative_difference(off, size)
        if not off <= rounding:
            allowed = rounding / size if size else 0.0
            finding = Finding(kind, step, name, rank, relative, allowed, actual, expected, is_missing=tensor is None)
            self.findings.append(finding)
        elif relative > self.largest and size:
            self.largest, self.largest_of = relative, f"{kind} {name}".strip()
