"""The causes that ``verify`` names, and what a diagnosis can look at."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from cs336sys.experiments.verify.cases import Program
from cs336sys.experiments.verify.collectives import CollectiveLaunch
from cs336sys.experiments.verify.comparison import ComparedCase, Finding, norm_of
from cs336sys.experiments.verify.rank import RankFindings
from cs336sys.experiments.verify.reference import Reference
from cs336sys.workload.verification import VerifiedWorkload

# Parts explain a gradient whose rest is smaller than this, relatively; and coefficients are equal that are so near.
EXPLAINED = 1e-3
EQUAL = 2e-2

# Phases in which gradients are sent.
OF_GRADIENTS = ("backward", "finish", "optimizer")


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a fault.

    Attributes:
        cause: one word or two for programs, one of :data:`CAUSES`.
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


# Every cause, with what it is.
CAUSES = {
    "not averaged": "gradients are summed over ranks, and not divided",
    "averaged twice": "gradients are divided once too often",
    "scaled": "gradients are right but for a factor",
    "not synchronized": "each rank keeps its own gradient",
    "not waited for": "a collective was launched, and its result is not used",
    "too early": "a collective was launched before its gradient was complete",
    "one rank's": "every rank has the gradient of one of them",
    "rank left out": "the gradient of a rank is not in the mean",
    "uneven": "ranks with different numbers of sequences count alike",
    "accumulation": "micro-batches are combined wrongly",
    "stale gradient": "the gradient of an earlier step is used, or was not set to zero",
    "mixed up": "a parameter has the gradient of another",
    "left out": "a parameter gets no gradient, or is not in the optimizer",
    "tied": "only a weight that several layers share is wrong",
    "unused": "only right while every rank uses every parameter",
    "frozen": "only right without a frozen parameter",
    "partial sum": "a sum over ranks is missing",
    "forward": "the ranks compute something else",
    "stale weights": "the forward pass computes with weights from before the last step",
    "not broadcast": "ranks start with weights or buffers of their own",
    "wrong slices": "ranks hold other slices than they should",
    "clipping": "the norm is not that of all gradients",
    "scaling": "ranks do not agree on overflow",
    "not sent": "ranks do not get the updates that another one made",
    "optimizer": "the update is wrong, with the right gradients",
    "buffers": "buffers differ",
    "evaluation": "only the evaluation, or what follows one, is wrong",
    "checkpoint": "only wrong with activation checkpoints",
    "compile": "only wrong with compiled blocks",
    "resume": "only wrong after saving and loading",
    "race": "changes from run to run, or with who is late",
    "dropout": "ranks draw the wrong masks",
    "hang": "ranks wait for each other",
    "died": "a rank was ended",
    "raises": "the wrap raises an error in the plain step",
}


@dataclass
class FaultEvidence:
    """A case that is wrong, run twice."""

    workload: VerifiedWorkload
    program: Program
    reference: Reference
    compared: ComparedCase
    found: Sequence[RankFindings]
    watched: Sequence[RankFindings]
    wrap_line: str
    is_new: bool

    @property
    def ranks(self) -> int:
        """Ranks whose gradients are averaged."""
        sizes = self.workload.dimensions
        return sizes.get("data", 1) * sizes.get("context", 1)

    def launches(self, phases: Sequence[str], step: int | None = None) -> list[CollectiveLaunch]:
        """Collectives of the first rank in these phases."""
        own = self.watched[0].launches if self.watched else []
        return [one for one in own if one.phase in phases and step in (None, one.step)]

    def conclude(
        self, cause: str, meaning: str, ratio: float | None = None, launches: Sequence[CollectiveLaunch] = ()
    ) -> Diagnosis:
        lines = [one.line for one in launches if one.line]
        collective = launches[-1].told if launches else ""
        first = self.compared.findings[0]
        place = first.what, first.step, first.name
        return Diagnosis(cause, meaning, ratio, collective, lines[-1] if lines else self.wrap_line, place)


def ratio_of(finding: Finding) -> float | None:
    if finding.found is None or finding.expected is None:
        return None
    return proportion(finding.found, finding.expected)


def proportion(found: Tensor, expected: Tensor) -> float | None:
    """Return the factor from ``expected``; None if they are not in proportion."""
    size = norm_of(expected)
    if not size or found.shape != expected.shape or not torch.isfinite(found).all():
        return None
    ratio = float((found.double() * expected.double()).sum()) / size**2
    return ratio if norm_of(found.double() - ratio * expected.double()) <= EXPLAINED * size and ratio else None


def is_near(value: float, other: float) -> bool:
    return abs(value - other) <= EQUAL * max(abs(other), 1e-300)
