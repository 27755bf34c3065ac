"""What a difference means: which mistake makes exactly these numbers of the right ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from cs336sys.experiments.verify.cases import SAVED_AFTER, Program, shares_of
from cs336sys.experiments.verify.collectives import Launch
from cs336sys.experiments.verify.comparison import Compared, Finding, norm_of
from cs336sys.experiments.verify.rank import Found
from cs336sys.experiments.verify.reference import Record, Reference, parts_of_gradients
from cs336sys.workload.verification import VerifiedWorkload

# Parts explain a gradient whose rest is smaller than this, relatively; and coefficients are equal that are so near.
_EXPLAINED = 1e-3
_EQUAL = 2e-2

# Phases in which gradients are sent.
_OF_GRADIENTS = ("backward", "finish", "optimizer")


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong.

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
class _Case:
    workload: VerifiedWorkload
    program: Program
    reference: Reference
    compared: Compared
    found: Sequence[Found]
    watched: Sequence[Found]
    wrap_line: str
    is_new: bool

    @property
    def ranks(self) -> int:
        """Ranks whose gradients are averaged."""
        sizes = self.workload.dimensions
        return sizes.get("data", 1) * sizes.get("context", 1)

    def launches(self, phases: Sequence[str], step: int | None = None) -> list[Launch]:
        """Collectives of the first rank in these phases."""
        own = self.watched[0].launches if self.watched else []
        return [one for one in own if one.phase in phases and step in (None, one.step)]

    def conclude(
        self, cause: str, meaning: str, ratio: float | None = None, launches: Sequence[Launch] = ()
    ) -> Diagnosis:
        lines = [one.line for one in launches if one.line]
        collective = launches[-1].told if launches else ""
        first = self.compared.findings[0]
        place = first.what, first.step, first.name
        return Diagnosis(cause, meaning, ratio, collective, lines[-1] if lines else self.wrap_line, place)


def diagnose(
    workload: VerifiedWorkload,
    program: Program,
    reference: Reference,
    compared: Compared,
    found: Sequence[Found],
    watched: Sequence[Found],
    wrap_line: str,
    known: Diagnosis | None,
) -> Diagnosis:
    """Say what a case's findings mean.

    Args:
        watched: of the same case run again, with its collectives recorded; empty where it was not.
        known: what was wrong with the plain step; None if that is right.
    """
    first = compared.findings[0]
    if known is not None and known.first == (first.what, first.step, first.name):
        return replace(known, meaning=f"as in the plain step: {known.meaning}")
    case = _Case(workload, program, reference, compared, found, watched, wrap_line, known is None)
    if (race := _race(case)) is not None:
        return race
    by_kind = {
        "start": _of_start,
        "loss": _of_loss,
        "gradient": _of_gradient,
        "norm": _of_norm,
        "weight": _of_weight,
        "state": _of_state,
        "buffer": _of_buffer,
        "evaluation": _of_evaluation,
    }
    told = by_kind[first.what](case, first)
    return _in_its_case(case, told)


# Cases that, where the plain step is right, are themselves what is wrong.
_OWN_CAUSES = {
    "unused": ("unused", "it is right while every rank uses every parameter"),
    "frozen": ("frozen", "it is right without a frozen parameter"),
    "checkpoint": ("checkpoint", "it is right without activation checkpoints"),
    "compile": ("compile", "it is right without compiled blocks"),
    "evaluation": ("evaluation", "it is right without an evaluation between steps"),
    "scaling": ("scaling", "it is right without a scaled loss; ranks must skip a step together"),
    "uneven": ("uneven", "it is right while all ranks have equally many sequences"),
    "accumulation": ("accumulation", "it is right with one micro-batch a step"),
    "no-sync": ("accumulation", "it is right with one micro-batch a step"),
    "clipping": ("clipping", "it is right without clipping"),
    "tied": ("tied", "it is right without tied weights"),
}


def _in_its_case(case: _Case, told: Diagnosis) -> Diagnosis:
    program = case.program
    if not case.is_new:
        return told
    if program.resume is not None and told.cause != "wrong slices":
        return replace(told, cause="resume", meaning=_resumed(case))
    if case.workload.case in _OWN_CAUSES:
        cause, when = _OWN_CAUSES[case.workload.case]
        if told.cause != cause:
            return replace(told, cause=cause, meaning=f"{told.meaning}; {when}")
    names = {finding.name for finding in case.compared.findings if finding.what == "gradient"}
    shared = _tied_names(case)
    if names and shared and names <= shared:
        return replace(told, cause="tied", meaning=f"only the weight that several layers share is off: {told.meaning}")
    return told


def _tied_names(case: _Case) -> set[str]:
    from cs336sys.experiments.verify.cases import build_subject

    subject = build_subject(case.workload, case.program, torch.device("cpu"), case.reference.dtype)
    return set() if subject.tied is None else {subject.tied}


def _race(case: _Case) -> Diagnosis | None:
    if case.workload.case == "late" and case.is_new:
        sent = case.launches(_OF_GRADIENTS)
        meaning = (
            f"right while ranks are equally fast, wrong when rank {case.program.late} is late: something is read "
            "before its collective is done"
        )
        return case.conclude("race", meaning, launches=sent[-1:])
    if not case.watched:
        return None
    first = case.compared.findings[0]
    for own, again in zip(case.found, case.watched, strict=True):
        for step, gradients in enumerate(own.record.gradients[: len(again.record.gradients)]):
            for name, value in gradients.items():
                other = again.record.gradients[step].get(name)
                if other is not None and other.shape == value.shape:
                    size = max(norm_of(value), 1e-300)
                    if norm_of(other - value) / size > max(first.allowed, 1e-12) and math.isfinite(first.allowed):
                        sent = case.launches(_OF_GRADIENTS)
                        meaning = f"the gradient of {name} in step {step + 1} changes from run to run"
                        return case.conclude("race", meaning, launches=sent[-1:])
    return None


def _of_start(case: _Case, first: Finding) -> Diagnosis:
    if case.workload.case == "start":
        meaning = (
            f"rank {first.rank} starts with weights of its own: broadcast those of the first rank when the model is "
            "wrapped, or build all ranks from one seed"
        )
        return case.conclude("not broadcast", meaning)
    assert first.found is not None
    assert first.expected is not None
    same = sorted(first.found.flatten().tolist()) == sorted(first.expected.flatten().tolist())
    if same:
        return case.conclude("wrong slices", f"the ranks' slices of {first.name} are in another order than its rows")
    if _holds_twice(first.found):
        return case.conclude("wrong slices", f"several ranks hold the same slice of {first.name}")
    return case.conclude("wrong slices", f"wrapping changes {first.name}", _ratio(first))


def _holds_twice(values: Tensor) -> bool:
    rows = values.flatten(1) if values.dim() > 1 else values[:, None]
    return len(torch.unique(rows, dim=0)) < len(rows)


def _of_loss(case: _Case, first: Finding) -> Diagnosis:
    program = case.program
    if program.resume is not None and first.step > SAVED_AFTER:
        return case.conclude("resume", "the weights after loading are not those that were saved")
    if first.step > 1:
        meaning = f"step {first.step} computes with other weights than the last step left: they are gathered too early"
        gathers = [one for one in case.launches(("forward", "optimizer")) if "gather" in one.name]
        return case.conclude("stale weights", meaning, launches=gathers[-1:])
    outputs = _first_output_off(case)
    sent = case.launches(("forward",), 0)
    if outputs is None:
        if program.uneven:
            return case.conclude("uneven", "the loss counts ranks alike that have different numbers of sequences")
        return case.conclude("forward", "the loss is not that of one process, with the same weights and sequences")
    name, kind, ratio = outputs
    if kind == "partial":
        meaning = f"the output of {name} is a part of the sum on each rank: its all-reduce over ranks is missing"
        return case.conclude("partial sum", meaning, launches=sent[-1:])
    if ratio is not None:
        meaning = f"the output of {name} is {ratio:.3g} times what it should be"
        return case.conclude("partial sum", meaning, ratio, sent[-1:])
    return case.conclude("forward", f"the output of {name} is the first that is off", launches=sent[-1:])


def _first_output_off(case: _Case) -> tuple[str, str, float | None] | None:
    """The first module whose output is off, in the order of calls; ``partial``: ranks' outputs add up to it."""
    if not case.watched:
        return None
    expected = case.reference.record.outputs
    sizes = case.workload.dimensions
    is_shared = sizes.get("data", 1) * sizes.get("context", 1) == 1
    for name, value in expected.items():
        outputs = [one.record.outputs.get(name) for one in case.watched]
        own = outputs[0]
        if own is None:
            continue
        if not is_shared:
            shape = list(value.shape)
            if own.dim() != len(shape) or not shape or own.dim() == 0:
                continue
            wanted = value[: own.shape[0]]
            if own.dim() > 1 and sizes.get("context", 1) > 1:
                wanted = wanted[:, : own.shape[1]]
        else:
            wanted = value
        if own.shape != wanted.shape:
            continue
        if norm_of(own - wanted) > 1e-6 * norm_of(wanted):
            if is_shared and all(one is not None and one.shape == wanted.shape for one in outputs):
                total = sum(one for one in outputs if one is not None)
                if isinstance(total, Tensor) and norm_of(total - wanted) < _EXPLAINED * norm_of(wanted):
                    return name, "partial", None
            return name, "", _proportion(own, wanted)
    return None


def _of_gradient(case: _Case, first: Finding) -> Diagnosis:
    step = first.step - 1
    early = [one for one in case.launches(("backward",)) if one.incomplete]
    if early:
        meaning = f"the gradient of {early[0].incomplete[0]} was sent before the backward pass had completed it"
        return case.conclude("too early", meaning, launches=early[:1])
    sent = case.launches(_OF_GRADIENTS, step)
    if first.found is None:
        every = all(first.name not in record.gradients[step] for record in case.compared.records if record.gradients)
        who = "on every rank" if every else f"on rank {first.rank}"
        return case.conclude(
            "left out", f"{first.name} has no gradient {who}: the wrap leaves it out", launches=sent[-1:]
        )
    findings = [one for one in case.compared.findings if one.what == "gradient" and one.step == first.step]
    told = _of_parts(case, step, findings, sent)
    if told is not None:
        return told
    for name, gradient in case.reference.record.gradients[step].items():
        assert first.expected is not None
        is_alike = name != first.name and gradient.shape == first.expected.shape
        if is_alike and _proportion(first.found, gradient) is not None:
            return case.conclude("mixed up", f"{first.name} has the gradient of {name}", launches=sent[-1:])
    ratio = _ratio(first)
    if ratio is not None:
        return _of_ratio(case, ratio, sent)
    if (told := _added_up(case, first, sent)) is not None:
        return told
    names = list(dict.fromkeys(one.name for one in findings))
    correct = [name for name in case.reference.record.gradients[step] if name not in names]
    near = f"; those of {', '.join(correct[-2:])} are right" if correct else ""
    meaning = f"{len(names)} gradients are off, the last one in the model that of {names[-1]}{near}"
    return case.conclude("partial sum" if _shares_layers(case) else "forward", meaning, launches=sent[-1:])


def _shares_layers(case: _Case) -> bool:
    return any(case.workload.dimensions.get(name, 1) > 1 for name in ("tensor", "pipeline", "context"))


def _of_ratio(case: _Case, ratio: float, sent: Sequence[Launch]) -> Diagnosis:
    ranks, all_ranks = case.ranks, case.workload.world_size
    if _near(ratio, ranks) and ranks > 1:
        return case.conclude(
            "not averaged",
            f"gradients are {ratio:.3g} times too large, the number of ranks: they are summed",
            ratio,
            sent[-1:],
        )
    if _near(ratio, 1 / ranks) and ranks > 1:
        meaning = f"gradients are 1/{ranks} of what they should be: they are averaged twice"
        return case.conclude("averaged twice", meaning, ratio, sent[-1:])
    if _near(ratio, all_ranks) or _near(ratio, 1 / all_ranks):
        how = "added up once too often" if ratio > 1 else "divided by, or spread over, ranks that all have them"
        return case.conclude("scaled", f"gradients are {ratio:.3g} times what they should be: {how}", ratio, sent[-1:])
    return case.conclude("scaled", f"gradients are {ratio:.4g} times what they should be", ratio, sent[-1:])


def _added_up(case: _Case, first: Finding, sent: Sequence[Launch]) -> Diagnosis | None:
    """Ranks that share layers and each have a part of a gradient's sum."""
    step = first.step - 1
    own = [record.gradients[step].get(first.name) for record in case.compared.records]
    assert first.expected is not None
    if any(one is None or one.shape != first.expected.shape for one in own):
        return None
    total = sum(one for one in own if one is not None)
    assert isinstance(total, Tensor)
    ratio = _proportion(total, first.expected)
    if ratio is None:
        return None
    over = "" if _near(ratio, 1) else f" ({ratio:.3g} times it)"
    meaning = f"each rank has a part of the gradient of {first.name}, and they add up to it{over}: sum it over ranks"
    return case.conclude("partial sum", meaning, launches=sent[-1:])


@dataclass(frozen=True)
class _Mixture:
    """A gradient as a combination of what it could be made of.

    Attributes:
        own: coefficients of micro-batches, by data rank and micro-batch, over those that are right.
        before: of the gradient of the step before.
    """

    own: Mapping[tuple[int, int], float]
    before: float


def _of_parts(case: _Case, step: int, findings: Sequence[Finding], sent: Sequence[Launch]) -> Diagnosis | None:
    """Explain gradients as combinations of those that each rank's micro-batches have by themselves."""
    if case.workload.dimensions.get("data", 1) == 1 or case.program.clip:
        return None
    device = torch.device("cpu")
    dtype = case.reference.dtype
    at = case.reference.record
    if step and step not in at.weights and step + 1 not in at.weights:
        return None
    if step and step not in at.weights:
        return None
    parts = parts_of_gradients(case.workload, replace(case.program, late=None), device, dtype, step, at)
    mixtures: dict[int, _Mixture] = {}
    name = findings[0].name
    for finding in findings:
        if finding.name == name and finding.found is not None:
            mixture = _mixture(case, parts, finding, step)
            if mixture is None:
                return None
            mixtures[finding.rank] = mixture
    if not mixtures:
        return None
    return _of_mixtures(case, name, mixtures, sent)


def _mixture(
    case: _Case, parts: Mapping[tuple[int, int], Mapping[str, Tensor]], finding: Finding, step: int
) -> _Mixture | None:
    assert finding.found is not None
    shares = {
        (share.data, share.micro): share.weight for share in shares_of(case.workload, case.program, case.program.micro)
    }
    keys = [key for key in parts if finding.name in parts[key]]
    columns = [parts[key][finding.name].flatten().double() * shares[key] for key in keys]
    if step > 0 and finding.name in case.reference.record.gradients[step - 1]:
        columns.append(case.reference.record.gradients[step - 1][finding.name].flatten().double())
    if not columns or len(columns[0]) < len(columns) or not torch.isfinite(finding.found).all():
        return None
    matrix, wanted = torch.stack(columns, 1), finding.found.flatten().double()
    solution = torch.linalg.lstsq(matrix, wanted[:, None]).solution[:, 0]
    if norm_of(matrix @ solution - wanted) > _EXPLAINED * max(norm_of(wanted), 1e-300):
        return None
    coefficients = solution.tolist()
    before = coefficients[len(keys)] if len(coefficients) > len(keys) else 0.0
    return _Mixture({key: coefficients[number] for number, key in enumerate(keys)}, before)


def _of_mixtures(case: _Case, name: str, mixtures: Mapping[int, _Mixture], sent: Sequence[Launch]) -> Diagnosis | None:
    workload, program = case.workload, case.program
    data, micro = workload.data_ranks, program.micro
    rank, mixture = next(iter(mixtures.items()))
    own = dict(mixture.own)
    values = list(own.values())
    if not values:
        return None
    if abs(mixture.before) > _EQUAL:
        what = (
            "is that of the step before"
            if all(abs(one) < _EQUAL for one in values)
            else "has that of the step before in it"
        )
        return case.conclude(
            "stale gradient", f"the gradient of {name} {what}: it was not set to zero, or is sent late"
        )
    if all(_near(one, values[0]) for one in values):
        return None if _near(values[0], 1) else _of_ratio(case, values[0], sent)
    by_rank = {one: [own.get((one, number), 0.0) for number in range(micro)] for one in range(data)}
    used = [one for one, coefficients in by_rank.items() if any(abs(value) > _EQUAL for value in coefficients)]
    if micro > 1 and len({round(value, 3) for value in values}) > 1 and len(used) == data:
        means = [sum(by_rank[one][number] for one in range(data)) / data for number in range(micro)]
        told = ", ".join(f"{round(mean, 6):.3g}" for mean in means)
        meaning = (
            f"of the micro-batches of a step, each counts {told} times: gradients that were averaged are again, or "
            "only the last are"
        )
        return case.conclude("accumulation", meaning, launches=sent[-1:])
    if len(used) == 1 and len(mixtures) > 1:
        alone = {one: _only(mixture.own) for one, mixture in mixtures.items()}
        if len(set(alone.values())) == 1:
            which = used[0]
            told = "the last rank" if which == data - 1 else "the first rank" if which == 0 else f"rank {which}"
            return case.conclude("one rank's", f"every rank has the gradient of {told} alone", launches=sent[-1:])
        return _not_synchronized(case, name, sent)
    if len(used) == 1:
        if used[0] == _data_of(case, rank):
            return _not_synchronized(case, name, sent)
        return case.conclude("one rank's", f"rank {rank} has the gradient of rank {used[0]} alone", launches=sent[-1:])
    if len(used) < data:
        missing = ", ".join(str(one) for one in range(data) if one not in used)
        return case.conclude("rank left out", f"the gradient of rank {missing} is not in the mean", launches=sent[-1:])
    if program.uneven:
        return case.conclude(
            "uneven", "ranks are averaged evenly that have different numbers of sequences", launches=sent[-1:]
        )
    told = ", ".join(f"{sum(coefficients):.3g}" for coefficients in by_rank.values())
    return case.conclude("scaled", f"the ranks' gradients count {told} times what they should", launches=sent[-1:])


def _only(own: Mapping[tuple[int, int], float]) -> int:
    return max(own, key=lambda key: abs(own[key]))[0]


def _data_of(case: _Case, rank: int) -> int:
    sizes = case.workload.dimensions
    ranks = torch.arange(case.workload.world_size).view(*sizes.values())
    return int((ranks == rank).nonzero()[0][list(sizes).index("data")])


def _not_synchronized(case: _Case, name: str, sent: Sequence[Launch]) -> Diagnosis:
    total = sum(value.numel() for value in case.reference.record.gradients[0].values()) * case.program.micro
    fitting = [one for one in sent if "gather" not in one.name]
    elements = sum(one.elements for one in fitting)
    if fitting and elements >= total / case.program.micro and not case.program.no_sync:
        meaning = (
            f"each rank keeps its own gradient of {name}, though as many elements are sent as there are: the result is "
            "not waited for, or not copied back, or it is that of another parameter"
        )
        return case.conclude("not waited for", meaning, launches=fitting[-1:])
    seen = f"{elements:,} of {total:,} elements are sent" if fitting else "no collective follows the backward pass"
    return case.conclude("not synchronized", f"each rank keeps its own gradient of {name}: {seen}")


def _of_norm(case: _Case, first: Finding) -> Diagnosis:
    step = first.step - 1
    norms = [one.record.norms[step] for one in case.found]
    expected = case.reference.record.norms[step]
    if len(set(norms)) > 1:
        together = math.hypot(*norms)
        fits = ", and their squares add up to its square" if abs(together - expected) < 1e-3 * expected else ""
        meaning = f"each rank clips by the norm of what it has ({', '.join(f'{one:.3g}' for one in norms)}){fits}"
        return case.conclude("clipping", meaning)
    ratio = norms[0] / expected if expected else None
    meaning = (
        f"the norm is {norms[0]:.4g}, and {expected:.4g} in one process: slices or replicas are counted twice or not"
    )
    return case.conclude("clipping", meaning, ratio)


def _of_weight(case: _Case, first: Finding) -> Diagnosis:
    program, step = case.program, first.step
    if program.resume is not None and step > SAVED_AFTER:
        return case.conclude("resume", _resumed(case))
    assert first.found is not None
    assert first.expected is not None
    findings = [one for one in case.compared.findings if one.what == "weight" and one.step == step]
    names = list(dict.fromkeys(one.name for one in findings))
    start = case.reference.record.weights[0][first.name]
    sent = case.launches(("optimizer",))
    is_frozen = torch.equal(first.expected, start)
    if is_frozen and program.frozen:
        return case.conclude("frozen", f"{first.name} is frozen and was changed", launches=sent[-1:])
    if norm_of(first.found - start) <= 1e-12 * max(norm_of(start), 1e-300):
        owners = [rank for rank, one in enumerate(case.found) if first.name in one.owned]
        if not owners:
            return case.conclude("left out", f"no rank's optimizer has {first.name}")
        off_on = sorted({one.rank for one in findings if one.name == first.name})
        if len(off_on) < len(case.found):
            who = ", ".join(map(str, off_on))
            meaning = f"rank {who} does not get the new values of {first.name}: send them after the step"
            return case.conclude("not sent", meaning, launches=sent[-1:])
        return case.conclude("left out", f"{first.name} is never updated", launches=sent[-1:])
    if program.scale:
        return case.conclude("scaling", "a step that overflowed on one rank is not skipped on every one")
    if program.clip:
        return case.conclude(
            "clipping", "gradients are not clipped by the norm that was found", _update_ratio(case, first)
        )
    off_on = sorted({one.rank for one in findings})
    if len(off_on) < len(case.found):
        who = ", ".join(map(str, off_on))
        meaning = f"only rank {who} has wrong weights, with the right gradients: {', '.join(names[:3])}"
        return case.conclude("not sent", meaning, launches=sent[-1:])
    ratio = _update_ratio(case, first)
    how = f"the step is {ratio:.4g} times too long" if ratio is not None else "the step is another"
    gradients = _sent_unsynchronized(case)
    if gradients is not None:
        return gradients
    return case.conclude("optimizer", f"{how}, with the right gradients: {', '.join(names[:3])}", ratio, sent[-1:])


def _sent_unsynchronized(case: _Case) -> Diagnosis | None:
    """Where no gradients could be seen, and no collective sends any."""
    if any(one.record.gradients and one.record.gradients[0] for one in case.found) or not case.watched:
        return None
    sent = case.launches(_OF_GRADIENTS)
    if sent:
        return None
    return case.conclude("not synchronized", "no collective follows the backward pass")


def _update_ratio(case: _Case, first: Finding) -> float | None:
    start = case.reference.record.weights[0][first.name]
    assert first.found is not None
    assert first.expected is not None
    return _proportion(first.found - start, first.expected - start)


def _of_state(case: _Case, first: Finding) -> Diagnosis:
    if case.program.resume is not None and first.step > SAVED_AFTER:
        return case.conclude("resume", _resumed(case))
    return case.conclude("optimizer", f"the optimizer's {first.name} is off, with the right weights", _ratio(first))


def _resumed(case: _Case) -> str:
    kinds = [finding.what for finding in case.compared.findings]
    if "loss" in kinds:
        return "the weights after loading are not those that were saved"
    states = [finding.name for finding in case.compared.findings if finding.what == "state"]
    of = f" ({states[0]})" if states else ""
    return f"loaded weights are right, the optimizer's state is not{of}: save and load it"


def _of_buffer(case: _Case, first: Finding) -> Diagnosis:
    cause = "not broadcast" if case.workload.case == "start" else "buffers"
    return case.conclude(cause, f"rank {first.rank} has a buffer {first.name} of its own: broadcast it")


def _of_evaluation(case: _Case, first: Finding) -> Diagnosis:
    return case.conclude("evaluation", "the model evaluates with other weights, or otherwise, than it trains")


def _ratio(finding: Finding) -> float | None:
    if finding.found is None or finding.expected is None:
        return None
    return _proportion(finding.found, finding.expected)


def _proportion(found: Tensor, expected: Tensor) -> float | None:
    """What ``expected`` is multiplied by; None if they are not in proportion."""
    size = norm_of(expected)
    if not size or found.shape != expected.shape or not torch.isfinite(found).all():
        return None
    ratio = float((found.double() * expected.double()).sum()) / size**2
    return ratio if norm_of(found.double() - ratio * expected.double()) <= _EXPLAINED * size and ratio else None


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= _EQUAL * max(abs(other), 1e-300)


def diagnose_loss(reason: str, is_hang: bool, found: Sequence[Found], wrap_line: str) -> Diagnosis:
    """Say why ranks wait for each other or died, by the collectives that they launched."""
    cause = "hang" if is_hang else "died"
    launches = [one.launches for one in found]
    if not any(launches):
        return Diagnosis(cause, reason, line=wrap_line)
    shortest = min(len(one) for one in launches)
    for number in range(shortest):
        here = [own[number] for own in launches]
        if len({(one.name, one.elements, one.dtype) for one in here}) > 1:
            told = ", ".join(f"rank {rank} launches {one.told}" for rank, one in enumerate(here))
            line = next((one.line for one in here if one.line), wrap_line)
            return Diagnosis(cause, f"the ranks' collectives differ: {told}", None, here[-1].told, line)
    longest = max(launches, key=len)
    if len(longest) > shortest:
        extra = longest[shortest]
        missing = [rank for rank, own in enumerate(launches) if len(own) == shortest]
        meaning = (
            f"rank {', '.join(map(str, missing))} does not launch the {extra.told} of {extra.phase} in step "
            f"{extra.step + 1} that the others wait in"
        )
        return Diagnosis(cause, meaning, None, extra.told, extra.line or wrap_line)
    last = longest[-1]
    return Diagnosis(cause, f"{reason}, after {last.told}", None, last.told, last.line or wrap_line)


__all__ = ["CAUSES", "Diagnosis", "Record", "diagnose", "diagnose_loss"]
