"""Diagnose a difference: find the mistake that turns the right numbers into exactly these."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cs336sys.experiments.verify.cases import SAVED_AFTER, Program, build_subject
from cs336sys.experiments.verify.comparison import ComparedCase, Finding, norm_of
from cs336sys.experiments.verify.gradient_diagnosis import (
    EXPLAINED,
    OF_GRADIENTS,
    Diagnosis,
    FaultEvidence,
    of_gradient,
    proportion,
    ratio_of,
)
from cs336sys.experiments.verify.rank import RankFindings
from cs336sys.experiments.verify.reference import Reference
from cs336sys.workload.verification import VerifiedWorkload


def diagnose_case(
    workload: VerifiedWorkload,
    program: Program,
    reference: Reference,
    compared: ComparedCase,
    found: Sequence[RankFindings],
    watched: Sequence[RankFindings],
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
    case = FaultEvidence(workload, program, reference, compared, found, watched, wrap_line, known is None)
    if (race := _race(case)) is not None:
        return race
    by_kind = {
        "start": _of_start,
        "loss": _of_loss,
        "gradient": of_gradient,
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


def _in_its_case(case: FaultEvidence, told: Diagnosis) -> Diagnosis:
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


def _tied_names(case: FaultEvidence) -> set[str]:
    subject = build_subject(case.workload, case.program, torch.device("cpu"), case.reference.dtype)
    return set() if subject.tied is None else {subject.tied}


def _race(case: FaultEvidence) -> Diagnosis | None:
    if case.workload.case == "late" and case.is_new:
        sent = case.launches(OF_GRADIENTS)
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
                        sent = case.launches(OF_GRADIENTS)
                        meaning = f"the gradient of {name} in step {step + 1} changes from run to run"
                        return case.conclude("race", meaning, launches=sent[-1:])
    return None


def _of_start(case: FaultEvidence, first: Finding) -> Diagnosis:
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
    return case.conclude("wrong slices", f"wrapping changes {first.name}", ratio_of(first))


def _holds_twice(values: Tensor) -> bool:
    rows = values.flatten(1) if values.dim() > 1 else values[:, None]
    return len(torch.unique(rows, dim=0)) < len(rows)


def _of_loss(case: FaultEvidence, first: Finding) -> Diagnosis:
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


def _first_output_off(case: FaultEvidence) -> tuple[str, str, float | None] | None:
    """The first module whose output is off, in the order of calls; ``partial``: ranks' outputs add up to it."""
    if not case.watched:
        return None
    expected = case.reference.record.outputs
    sizes = case.workload.dimensions
    is_shared = sizes.get("data", 1) * sizes.get("context", 1) == 1
    partial = ""
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
        if norm_of(own - wanted) <= 1e-6 * norm_of(wanted):
            partial = "" if name == partial.rpartition(".")[0] else partial
            continue
        if is_shared and all(one is not None and one.shape == wanted.shape for one in outputs):
            total = sum(one for one in outputs if one is not None)
            if isinstance(total, Tensor) and norm_of(total - wanted) < EXPLAINED * norm_of(wanted):
                # A layer's output may be a part of a sum that the module around it adds up.
                partial = name
                if expected.get(name.rpartition(".")[0]) is not None and name.count(".") > 2:
                    continue
                return name, "partial", None
        return name, "", proportion(own, wanted)
    if partial:
        return partial, "partial", None
    return None


def _of_norm(case: FaultEvidence, first: Finding) -> Diagnosis:
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


def _of_weight(case: FaultEvidence, first: Finding) -> Diagnosis:
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


def _sent_unsynchronized(case: FaultEvidence) -> Diagnosis | None:
    """Diagnose a run without visible gradients in which no collective sends any."""
    if any(one.record.gradients and one.record.gradients[0] for one in case.found) or not case.watched:
        return None
    sent = case.launches(OF_GRADIENTS)
    if sent:
        return None
    return case.conclude("not synchronized", "no collective follows the backward pass")


def _update_ratio(case: FaultEvidence, first: Finding) -> float | None:
    start = case.reference.record.weights[0][first.name]
    assert first.found is not None
    assert first.expected is not None
    return proportion(first.found - start, first.expected - start)


def _of_state(case: FaultEvidence, first: Finding) -> Diagnosis:
    if case.program.resume is not None and first.step > SAVED_AFTER:
        return case.conclude("resume", _resumed(case))
    return case.conclude("optimizer", f"the optimizer's {first.name} is off, with the right weights", ratio_of(first))


def _resumed(case: FaultEvidence) -> str:
    kinds = [finding.what for finding in case.compared.findings]
    if "loss" in kinds:
        return "the weights after loading are not those that were saved"
    states = [finding.name for finding in case.compared.findings if finding.what == "state"]
    of = f" ({states[0]})" if states else ""
    return f"loaded weights are right, the optimizer's state is not{of}: save and load it"


def _of_buffer(case: FaultEvidence, first: Finding) -> Diagnosis:
    cause = "not broadcast" if case.workload.case == "start" else "buffers"
    return case.conclude(cause, f"rank {first.rank} has a buffer {first.name} of its own: broadcast it")


def _of_evaluation(case: FaultEvidence, first: Finding) -> Diagnosis:
    return case.conclude("evaluation", "the model evaluates with other weights, or otherwise, than it trains")


def diagnose_loss(reason: str, is_hang: bool, found: Sequence[RankFindings], wrap_line: str) -> Diagnosis:
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
