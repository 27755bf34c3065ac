"""Compare ranks with one process, moment by moment, and with each other: find what is off first, and by how much."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cs336sys.commands.verify.program import Training
from cs336sys.commands.verify.training import Reference
from cs336sys.findings import Finding, sentence
from cs336sys.parity.collectives import CollectiveLaunch, first_disagreement
from cs336sys.parity.optimizers import OptimizerSpec
from cs336sys.parity.record import RankReport, Record, assemble
from cs336sys.parity.rounding import rounding_in
from cs336sys.parity.weights import EXPLAINED, norm, relative_difference
from cs336sys.settings.verification import Program, VerifiedWorkload

GRADIENT_PHASES = ("backward", "finish", "optimizer")  # In which gradients are sent.

# Kinds of what is compared, of which a case may have nothing, and their plurals that are irregular.
_KINDS = ("gradient", "loss", "weight", "state", "norm", "evaluation", "buffer")
_PLURALS = {"loss": "losses", "state": "optimizer state"}


def fault(cause: str, seen: str = "", where: str = "", **facts: Any) -> Finding:
    """Build the finding of a fault: ``cause`` and ``seen``, how it shows, name its block of ``sentences.jinja``."""
    return Finding(cause, where, facts={"block": f"{cause} {seen}".strip().replace("'", "").replace(" ", "_"), **facts})


def with_facts(finding: Finding, cause: str = "", **facts: Any) -> Finding:
    """Return a fault with further facts, of another ``cause`` if one is given."""
    return replace(finding, cause=cause or finding.cause, facts={**finding.facts, **facts})


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is off."""

    kind: str  # Of a moment.
    step: int  # Counted from 1; of weights and states, after which.
    name: str  # Of the parameter or buffer; of a state, ``layers.0.weight exp_avg``; empty for numbers.
    rank: int  # The first on which it is off.
    relative: float  # The norm of the difference over that of what is expected.
    allowed: float  # How large ``relative`` may be by rounding.
    actual: Tensor  # Zero where it is missing.
    expected: Tensor
    is_missing: bool = False  # Whether the rank has no such gradient.

    @property
    def message(self) -> str:
        return sentence(__package__, "difference", **vars(self), infinity=math.inf)


class ComparedCase:
    """A case's ranks, compared with one process.

    Attributes:
        differences: all that is off, in the order of time.
        records: of each rank, with whole tensors.
        largest: of all that agrees, the largest relative difference, and ``largest_of`` what.
        unknown: parameters of which the ranks' slices do not make a whole.
        watched: of the case run again, with its collectives recorded; set before a diagnosis, as the next; else empty.
        is_plain_step_right: whether the case "step" has no fault, so that this one's is of what the case does.
    """

    watched: Sequence[RankReport] = ()
    is_plain_step_right = True

    def __init__(self, training: Training, program: Program, reference: Reference, reports: Sequence[RankReport]):
        self.training, self.program, self.reference, self.reports = training, program, reference, reports
        self.workload = training.workload
        self.shapes = {name: value.shape for name, value in reference.record.at("start", 0).items()}
        self.rounding = rounding_in(training.dtype, reference.lower_dtype)
        self.differences: list[TensorDifference] = []
        self.largest, self.largest_of = 0.0, ""  # Until something agrees.
        self.unknown: set[str] = set()
        self._compared_kinds: set[str] = set()  # Of moments; the others are ``not_compared``.
        self.records = [Record() for _ in reports]
        for (kind, step), expected in reference.record.moments.items():
            self._compare_moment(kind, step, expected)

    @property
    def unexplained_share(self) -> float:
        """Return the share of a gradient's norm that may remain where others explain it: 8 units of a lower dtype."""
        return EXPLAINED if self.reference.lower_dtype is None else 8 * torch.finfo(self.reference.lower_dtype).eps

    def differences_of(self, kind: str, step: int | None = None) -> list[TensorDifference]:
        """Return what is off of a kind, in one step or in all."""
        return [off for off in self.differences if off.kind == kind and step in (None, off.step)]

    def launches(self, phases: Sequence[str], step: int | None = None) -> list[CollectiveLaunch]:
        """Return the first rank's collectives in these phases, of one step, which is counted from 0 here, or of all."""
        watched_launches = self.watched[0].launches if self.watched else []
        return [launch for launch in watched_launches if launch.phase in phases and step in (None, launch.step)]

    def conclude(
        self,
        cause: str,
        seen: str = "",
        launches: Sequence[CollectiveLaunch] | None = None,
        ratio: float | None = None,
        **facts: Any,
    ) -> Finding:
        """Build the finding of ``cause`` that shows as ``seen``; blame the last of ``launches``, else the wrap.

        By default they are the collectives that send gradients in the first difference's step, if it is of a gradient.
        """
        first = self.differences[0]
        if launches is None:  # They count steps from 0, and differences from 1.
            launches = self.launches(GRADIENT_PHASES, first.step - 1) if first.kind == "gradient" else ()
        collective, line = (launches[-1].description, launches[-1].line) if launches else ("", "")
        moment = first.kind, first.step, first.name
        facts = {"name": first.name, "step": first.step, "rank": first.rank} | facts
        return fault(cause, seen, line, moment=moment, ratio=ratio, collective=collective, **facts)

    def ignore_gradients(self) -> None:
        """Count gradients as not compared."""
        self.differences = [difference for difference in self.differences if difference.kind != "gradient"]
        self._compared_kinds.discard("gradient")

    @property
    def not_compared(self) -> list[str]:
        """Return what the case could not look at, in words."""
        recorded = {kind for (kind, _), tensors in self.reference.record.moments.items() if tensors}
        uncompared = recorded - self._compared_kinds
        unseen = [_PLURALS.get(kind, f"{kind}s") for kind in _KINDS if kind in uncompared]
        unknown = sorted(self.unknown)
        slices = [f"slices of {', '.join(unknown[:3])}{', ...' if unknown[3:] else ''}"] if unknown else []
        return unseen + slices

    def _compare_moment(self, kind: str, step: int, expected: dict[str, Tensor]) -> None:
        """Compare what ranks have recorded; those that loaded what others saved have nothing of the first steps."""
        others = [other.at(kind, step) for other in self.reference.rounding_runs]
        ranks = [report.record.at(kind, step) for report in self.reports]
        # Gradients alone have names that no rank may lack, and a norm of all together, by which small ones may be off.
        required: set[str] = set()
        total_norm = 0.0
        if kind == "gradient":
            required, total_norm = set(expected), math.hypot(*map(norm, expected.values()))
            # A gradient that one process does not have must be zero if a rank has it.
            zeros = {name: torch.zeros(shape, dtype=self.training.dtype) for name, shape in self.shapes.items()}
            expected = {name: expected.get(name, zero) for name, zero in zeros.items()}
        elif kind in ("loss", "evaluation"):
            # All ranks have one loss together, under the empty name. Without a rank's part it is not compared.
            ranks = [{"": self._batch_loss([part[""] for part in ranks])}] if all(ranks) else []
        elif kind == "buffer":
            expected = self._comparable_buffers(expected, by_rank=others[0])  # See train_reference(): share by share.
            buffer_shapes = {name: value.shape for name, value in expected.items()}
            ranks = [  # Without slices of buffers.
                {name: value for name, value in rank.items() if value.shape == buffer_shapes.get(name)}
                for rank in ranks
            ]
        whole, unknown = assemble(ranks, {name: value.shape for name, value in expected.items()}, self.workload.groups)
        for record, tensors in zip(self.records, whole, strict=False):  # A loss, of all ranks, stands with the first.
            record.moments[kind, step] = tensors
        if kind in ("start", "weight"):
            self.unknown |= unknown  # Gradients are cut as weights are, and states have names of their own.
        if not any(whole) or (kind == "gradient" and self.program.overflows(step)):
            return  # Infinite gradients are not compared.
        for name, value in expected.items():
            if name in unknown:
                continue
            # A state that is nowhere negative is taken for squares, of which rounding is twice as large.
            power = 2 if kind == "state" and bool((value >= 0).all()) else 1
            rounding = self._rounding(value, [other.get(name, value) for other in others], total_norm, power)
            for rank, tensors in enumerate(whole):
                # Gradients of what another rank updates may be wrong; a stage lacks the weights of others. A state is
                # named after its parameter: ``layers.0.weight exp_avg``.
                is_owned = kind not in ("gradient", "state") or name.partition(" ")[0] in self.reports[rank].owned
                if is_owned and (name in tensors or name in required):
                    self._compare(kind, step, name, rank, tensors.get(name), value, rounding)

    def _comparable_buffers(self, expected: dict[str, Tensor], by_rank: dict[str, Tensor]) -> dict[str, Tensor]:
        """Leave out buffers that end otherwise where one process trains ``by_rank``, as statistics of sequences do."""
        if not self.reference.is_whole:
            return {}  # Any may depend on it.
        return {
            name: value
            for name, value in expected.items()
            if torch.equal(torch.nan_to_num(value), torch.nan_to_num(by_rank[name]))  # NaN is equal to itself.
        }

    def _batch_loss(self, rank_losses: Sequence[Tensor]) -> Tensor:
        """Return the loss of the batch from those of ranks, each weighted by its sequences."""
        total = torch.zeros((), dtype=torch.float64)
        for data_rank in range(self.workload.data_ranks):
            # Each rank that shares these sequences has the mean of its tokens, or of all: their mean is right for both.
            shared = [loss for rank, loss in enumerate(rank_losses) if self.workload.data_place(rank) == data_rank]
            total += torch.stack(shared).mean()
        return total

    def _rounding(self, value: Tensor, others: Sequence[Tensor], total_norm: float = 0.0, power: int = 1) -> float:
        """Return the norm of a difference that rounding explains; ``others`` is the tensor in other orders of summing.

        A small tensor may be as far off as one of average norm, where all of its kind have ``total_norm`` together.
        ``power`` is 2 for squares, whose relative error is twice as large as that of the numbers themselves.
        """
        if not value.is_floating_point():
            return 0.0
        repeated = max((norm(other - value) for other in others), default=0.0)  # How far one process is from itself.
        size = max(norm(value), total_norm / math.sqrt(max(len(self.shapes), 1)))  # sqrt: squares of norms add up.
        return self.rounding.allowed(size, repeated, power)

    def _compare(
        self, kind: str, step: int, name: str, rank: int, tensor: Tensor | None, expected: Tensor, rounding: float
    ) -> None:
        """Compare a rank's tensor, None for none, and note what is off by more than ``rounding``, a norm."""
        self._compared_kinds.add(kind)
        actual = torch.zeros_like(expected) if tensor is None else tensor
        size, off = norm(expected), norm(actual.double() - expected.double())
        relative = relative_difference(off, size)
        if not off <= rounding:  # Or it is NaN.
            allowed = rounding / size if size else 0.0
            self.differences.append(
                TensorDifference(kind, step, name, rank, relative, allowed, actual, expected, is_missing=tensor is None)
            )
        elif relative > self.largest and size:  # Relative to a size of 0, any difference is infinite.
            self.largest, self.largest_of = relative, f"{kind} {name}".strip()


def diagnose_lost_ranks(reason: str, is_hang: bool, reports: Sequence[RankReport]) -> Finding:
    """Say why ranks wait for each other or died, by the collectives that they launched."""
    cause, launches = "hang" if is_hang else "died", [report.launches for report in reports]
    if not any(launches):
        return Finding(cause, facts={"block": "lost_ranks", "reason": reason})
    last = max(launches, key=len)[-1]  # Of the rank that came farthest.
    messages = [launch for rank_launches in launches for launch in rank_launches if launch.is_point_to_point]
    receives = sum(launch.name.startswith("recv") for launch in messages)
    if (difference := first_disagreement(launches)) is not None:
        message, last = difference
        reason = message if is_hang else f"{reason}: {message}"
    elif is_hang and 2 * receives > len(messages):  # More than were sent.
        rank = next(rank for rank, rank_launches in enumerate(launches) if rank_launches[-1:] == [last])
        reason = sentence(__package__, "hang receive", rank=rank, launch=last)
    else:
        reason = f"{reason}, after {last.description}"
    return Finding(cause, last.line, facts={"block": "lost_ranks", "reason": reason, "collective": last.description})


# Cases that compare ranks with each other, or with a rank alone, rather than numbers with those of one process.


def diagnose_masks(workload: VerifiedWorkload, reports: Sequence[RankReport]) -> Finding | None:
    """Say whether dropout masks differ between ranks that have the same sequences, or are equal between others."""
    masks = [
        (workload.data_place(rank), report.masks) for rank, report in enumerate(reports) if report.masks is not None
    ]
    pairs = [  # Whether the two ranks have the same sequences, and the mask of each.
        (place == other_place, mask, other) for (place, mask), (other_place, other) in itertools.combinations(masks, 2)
    ]
    if any(shares and mask.shape == other.shape and not torch.equal(mask, other) for shares, mask, other in pairs):
        return fault("dropout", "shared")
    if any(not shares and torch.equal(mask, other) for shares, mask, other in pairs):
        return fault("dropout")
    return None


def merged_spec(reports: Sequence[RankReport]) -> OptimizerSpec | None:
    """Return the wrap's optimizer with all ranks' settings, of a parameter the first rank's; None if it has none."""
    specs = [report.optimizer for report in reports if report.optimizer is not None]
    settings = {name: values for spec in reversed(specs) for name, values in spec.settings.items()}
    return OptimizerSpec(specs[0].optimizer_class, settings) if specs else None


def diagnose_groups(
    reports: Sequence[RankReport], in_one_process: RankReport, shapes: Mapping[str, torch.Size]
) -> tuple[Finding | None, list[str]]:
    """Say which parameter has other settings of the optimizer than on one rank, None if none; and what is unknown."""
    spec, expected = merged_spec(reports), in_one_process.optimizer  # The latter is None where the wrap fails there.
    assert spec is not None  # Else the case does not apply.
    specs = [report.optimizer for report in reports if report.optimizer is not None]
    seen_shapes = {name: shape for rank_spec in specs for name, shape in rank_spec.shapes.items()}
    sliced = [name for name, shape in seen_shapes.items() if len(shape) < len(shapes[name])]
    not_compared = [
        sentence(__package__, "groups of slices", name=name, sees=seen_shapes[name], shape=shapes[name])
        for name in sliced[:1]  # The first stands for all.
    ]
    for name, (_, settings) in spec.settings.items():  # The class of the parameter's optimizer, and its settings.
        _, expected_settings = (None, {}) if expected is None else expected.settings.get(name, (None, {}))
        for key, value in settings.items():
            if expected_settings.get(key, value) != value:
                facts: dict[str, Any] = {"name": name, "key": key, "value": value, "expected": expected_settings[key]}
                facts |= {"sees": seen_shapes.get(name), "shape": shapes[name]}
                return fault("groups", **facts), not_compared
    # A group for matrices stays empty, on every rank, where the optimizer sees them as flattened slices.
    flattened = [name for name in sliced if len(seen_shapes[name]) < 2]
    used = [settings for _, settings in spec.settings.values()]
    unused = [settings for settings in specs[0].empty_groups if settings not in used]
    if not flattened or not unused or any(rank_spec.empty_groups != specs[0].empty_groups for rank_spec in specs):
        return None, not_compared
    name = flattened[0]  # Named for all.
    _, its_settings = spec.settings[name]
    group = ", ".join(f"{key} {value}" for key, value in unused[0].items() if its_settings.get(key) != value)
    facts = {"settings": group, "count": len(flattened), "name": name, "sees": seen_shapes[name], "shape": shapes[name]}
    return fault("groups", "flattened", **facts), not_compared
