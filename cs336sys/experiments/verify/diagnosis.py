"""Diagnose a difference: find the mistake that turns the right numbers into exactly these."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cs336sys.experiments.verify.cases import OVERFLOWN_STEP, SAVED_AFTER, build_subject
from cs336sys.experiments.verify.comparison import Finding, norm
from cs336sys.experiments.verify.gradient_diagnosis import (
    EXPLAINED,
    GRADIENT_PHASES,
    Diagnosis,
    FaultEvidence,
    diagnose_gradient,
    is_near,
    proportion,
    ratio_of,
)
from cs336sys.experiments.verify.rank import RankReport
from cs336sys.experiments.verify.record import OptimizerSpec
from cs336sys.parity.collectives import first_disagreement
from cs336sys.workload.verification import VerifiedWorkload


def diagnose_case(case: FaultEvidence, plain_diagnosis: Diagnosis | None) -> Diagnosis:
    """Say what a case's findings mean.

    Args:
        plain_diagnosis: the plain step's fault; None if none is known.
    """
    first = case.compared.findings[0]
    if plain_diagnosis is not None and plain_diagnosis.first == (first.kind, first.step, first.name):
        return replace(plain_diagnosis, meaning=f"as in the plain step: {plain_diagnosis.meaning}")
    if (race := _race(case)) is not None:
        return race
    if first.kind == "evaluation":
        return case.conclude("evaluation", "the model evaluates with other weights, or otherwise, than it trains")
    by_kind = {
        "start": diagnose_start,
        "loss": diagnose_forward_loss,
        "gradient": diagnose_gradient,
        "norm": diagnose_norm,
        "weight": diagnose_weight,
        "state": diagnose_state,
        "buffer": diagnose_buffer,
    }
    is_loaded = case.program.resume is not None and first.step > SAVED_AFTER
    if is_loaded and first.kind in ("loss", "weight", "state"):
        return case.conclude("resume", _resumed(case))
    return attribute_to_case(case, by_kind[first.kind](case, first))


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


def attribute_to_case(case: FaultEvidence, diagnosis: Diagnosis) -> Diagnosis:
    program = case.program
    if not case.is_new:
        return diagnosis
    if program.resume is not None and diagnosis.cause != "wrong slices":
        return replace(diagnosis, cause="resume", meaning=_resumed(case))
    if case.workload.case in _OWN_CAUSES:
        cause, when = _OWN_CAUSES[case.workload.case]
        if diagnosis.cause != cause:
            return replace(diagnosis, cause=cause, meaning=f"{diagnosis.meaning}; {when}")
    names = {finding.name for finding in case.compared.findings if finding.kind == "gradient"}
    subject = build_subject(case.workload, case.program, torch.device("cpu"), case.reference.dtype)
    if names == {subject.tied}:
        meaning = f"only the weight that several layers share is off: {diagnosis.meaning}"
        return replace(diagnosis, cause="tied", meaning=meaning)
    return diagnosis


def _race(case: FaultEvidence) -> Diagnosis | None:
    if case.workload.case == "late" and case.is_new:
        sent = case.launches(GRADIENT_PHASES)
        meaning = (
            f"right while ranks are equally fast, wrong when rank {case.program.late} is late: something is read "
            "before its collective is done"
        )
        return case.conclude("race", meaning, sent)
    if not case.watched:
        return None
    first = case.compared.findings[0]
    pairs = (
        (name, step, value, other_gradients[name])
        for report, rerun in zip(case.reports, case.watched, strict=True)
        for step, (gradients, other_gradients) in enumerate(
            zip(report.record.gradients, rerun.record.gradients, strict=False), 1
        )
        for name, value in gradients.items()
        if name in other_gradients and other_gradients[name].shape == value.shape
    )
    for name, step, value, other in pairs:
        difference = norm(other - value) / max(norm(value), 1e-300)
        if difference > max(first.allowed, 1e-12) and math.isfinite(first.allowed):
            meaning = f"the gradient of {name} in step {step} changes from run to run"
            return case.conclude("race", meaning, case.launches(GRADIENT_PHASES))
    return None


def diagnose_start(case: FaultEvidence, first: Finding) -> Diagnosis:
    if case.workload.case == "start":
        meaning = (
            f"rank {first.rank} starts with weights of its own: broadcast those of the first rank when the model is "
            "wrapped, or build all ranks from one seed"
        )
        return case.conclude("not broadcast", meaning)
    if sorted(first.actual.flatten().tolist()) == sorted(first.expected.flatten().tolist()):
        return case.conclude("wrong slices", f"the ranks' slices of {first.name} are in another order than its rows")
    if _holds_twice(first.actual):
        return case.conclude("wrong slices", f"several ranks hold the same slice of {first.name}")
    return case.conclude("wrong slices", f"wrapping changes {first.name}", ratio=ratio_of(case, first))


def _holds_twice(values: Tensor) -> bool:
    rows = values.flatten(1) if values.dim() > 1 else values[:, None]
    return len(torch.unique(rows, dim=0)) < len(rows)


def diagnose_forward_loss(case: FaultEvidence, first: Finding) -> Diagnosis:
    if first.step > 1:
        if not all(record.weights.get(first.step - 1) for record in case.compared.records):
            meaning = f"the loss of step {first.step} is the first that is off; the weights before it are not compared"
            return case.conclude("forward", meaning)
        meaning = f"step {first.step} computes with other weights than the last step left: they are gathered too early"
        gathers = [launch for launch in case.launches(("forward", "optimizer")) if "gather" in launch.name]
        return case.conclude("stale weights", meaning, gathers)
    outputs = _first_output_off(case)
    sent = case.launches(("forward",), 0)
    if outputs is None:
        if case.program.uneven:
            return case.conclude("uneven", "the loss counts ranks alike that have different numbers of sequences")
        return case.conclude("forward", "the loss is not that of one process, with the same weights and sequences")
    name, kind, ratio = outputs
    if kind == "partial":
        meaning = f"the output of {name} is a part of the sum on each rank: its all-reduce over ranks is missing"
        return case.conclude("partial sum", meaning, sent)
    if ratio is not None:
        meaning = f"the output of {name} is {ratio:.3g} times what it should be"
        return case.conclude("partial sum", meaning, sent, ratio)
    return case.conclude("forward", f"the output of {name} is the first that is off", sent)


def _first_output_off(case: FaultEvidence) -> tuple[str, str, float | None] | None:
    """The first module whose output is off, in the order of calls; ``partial``: ranks' outputs add up to it."""
    if not case.watched:
        return None
    expected = case.reference.record.outputs
    sizes = case.workload.dimensions
    is_shared = sizes.get("data", 1) * sizes.get("context", 1) == 1
    partial = ""
    for name, value in expected.items():
        outputs = [report.record.outputs.get(name) for report in case.watched]
        output, wanted = outputs[0], value
        if output is None or output.dim() != value.dim():
            continue
        if not is_shared:
            if not value.dim():
                continue
            wanted = value[: output.shape[0]]
            if output.dim() > 1 and sizes.get("context", 1) > 1:
                wanted = wanted[:, : output.shape[1]]
        if output.shape != wanted.shape:
            continue
        if norm(output - wanted) <= 1e-6 * norm(wanted):
            partial = "" if name == partial.rpartition(".")[0] else partial
            continue
        if is_shared and all(part is not None and part.shape == wanted.shape for part in outputs):
            total = sum(part for part in outputs if part is not None)
            if isinstance(total, Tensor) and norm(total - wanted) < EXPLAINED * norm(wanted):
                # A layer's output may be a part of a sum that the module around it adds up.
                partial = name
                if expected.get(name.rpartition(".")[0]) is not None and name.count(".") > 2:
                    continue
                return name, "partial", None
        return name, "", proportion(output, wanted)
    return (partial, "partial", None) if partial else None


def diagnose_norm(case: FaultEvidence, first: Finding) -> Diagnosis:
    step = first.step - 1
    norms = [report.record.norms[step] for report in case.reports]
    expected = case.reference.record.norms[step]
    if len(set(norms)) > 1:
        together = math.hypot(*norms)
        fits = ", and their squares add up to its square" if abs(together - expected) < 1e-3 * expected else ""
        meaning = f"each rank clips by the norm of what it has ({', '.join(f'{norm:.3g}' for norm in norms)}){fits}"
        return case.conclude("clipping", meaning)
    ratio = norms[0] / expected if expected else None
    meaning = (
        f"the norm is {norms[0]:.4g}, and {expected:.4g} in one process: slices or replicas are counted twice or not"
    )
    return case.conclude("clipping", meaning, ratio=ratio)


def diagnose_weight(case: FaultEvidence, first: Finding) -> Diagnosis:
    program, step = case.program, first.step
    findings = [finding for finding in case.compared.findings if finding.kind == "weight" and finding.step == step]
    names = list(dict.fromkeys(finding.name for finding in findings))
    start = case.reference.record.weights[0][first.name]
    sent = case.launches(("optimizer",))
    is_frozen = torch.equal(first.expected, start)
    if is_frozen and program.frozen:
        return case.conclude("frozen", f"{first.name} is frozen and was changed", sent)
    off_on = sorted({finding.rank for finding in findings if finding.name == first.name})
    if len(off_on) == len(case.reports) and _are_late(case, first):
        meaning = f"{first.name} after step {step + 1} is what it should be after {step}"
        return case.conclude("stale weights", meaning, sent)
    if norm(first.actual - start) <= 1e-12 * max(norm(start), 1e-300):
        owners = [rank for rank, report in enumerate(case.reports) if first.name in report.owned]
        if not owners:
            return case.conclude("left out", f"no rank's optimizer has {first.name}")
        if len(off_on) < len(case.reports):
            who = ", ".join(map(str, off_on))
            meaning = f"rank {who} does not get the new values of {first.name}: send them after the step"
            return case.conclude("not sent", meaning, sent)
        return case.conclude("left out", f"{first.name} is never updated", sent)
    if program.scale:
        if step == OVERFLOWN_STEP and len({finding.rank for finding in findings}) == len(case.reports):
            meaning = (
                "no rank skips the step in which the gradients of one were infinite: they were changed before ranks "
                "looked at them, or each looked before they were averaged"
            )
            return case.conclude("scaling", meaning)
        return case.conclude("scaling", "a step that overflowed on one rank is not skipped on every one")
    if (schedule := _schedule(case, step)) is not None:
        return schedule
    if program.clip:
        return case.conclude(
            "clipping", "gradients are not clipped by the norm that was found", ratio=_update_ratio(case, first)
        )
    off_on = sorted({finding.rank for finding in findings})
    if len(off_on) < len(case.reports):
        who = ", ".join(map(str, off_on))
        meaning = f"only rank {who} has wrong weights, {_gradient_clause(case)}: {', '.join(names[:3])}"
        return case.conclude("not sent", meaning, sent)
    if (unsynchronized := _sent_unsynchronized(case)) is not None:
        return unsynchronized
    ratio = _update_ratio(case, first)
    how = f"the step is {ratio:.4g} times too long" if ratio is not None else "the step is another"
    return case.conclude("optimizer", f"{how}, {_gradient_clause(case)}: {', '.join(names[:3])}", sent, ratio)


def _are_late(case: FaultEvidence, first: Finding) -> bool:
    """Return whether a rank's weights after the next step are those that one process has now."""
    weights, later = case.reference.record.weights, case.compared.records[first.rank].weights.get(first.step + 1, {})
    moved = first.expected - weights.get(first.step - 1, weights[0])[first.name]
    return first.name in later and norm(later[first.name] - first.expected) <= case.explained * norm(moved)


def _gradient_clause(case: FaultEvidence) -> str:
    compared = "gradients" not in case.compared.not_compared
    return "with the right gradients" if compared else "with gradients that could not be compared"


def _sent_unsynchronized(case: FaultEvidence) -> Diagnosis | None:
    """Diagnose a run without visible gradients in which no collective sends any."""
    leaves_gradients = any(report.record.gradients and report.record.gradients[0] for report in case.reports)
    if leaves_gradients or not case.watched or case.launches(GRADIENT_PHASES):
        return None
    return case.conclude("not synchronized", "no collective follows the backward pass")


def _schedule(case: FaultEvidence, steps: int) -> Diagnosis | None:
    """Diagnose learning rates that are not those of one process, after any of the first ``steps``."""
    for step, expected in enumerate(case.reference.record.rates[:steps], 1):
        for rank, report in enumerate(case.reports):
            rates = report.record.rates[step - 1] if step <= len(report.record.rates) else ()
            if rates and expected and not is_near(max(rates), max(expected)):
                meaning = (
                    f"after step {step} the learning rate is {max(rates):.4g} on rank {rank}, and {max(expected):.4g} "
                    "in one process: the schedule counts other steps, as where it steps once a rank"
                )
                return case.conclude("schedule", meaning, ratio=max(rates) / max(expected) if max(expected) else None)
    return None


def _update_ratio(case: FaultEvidence, first: Finding) -> float | None:
    weights = case.reference.record.weights
    start = weights.get(first.step - 1, weights[0])[first.name]
    return proportion(first.actual - start, first.expected - start)


def diagnose_state(case: FaultEvidence, first: Finding) -> Diagnosis:
    return case.conclude(
        "optimizer", f"the optimizer's {first.name} is off, with the right weights", ratio=ratio_of(case, first)
    )


def _resumed(case: FaultEvidence) -> str:
    kinds = [finding.kind for finding in case.compared.findings]
    if "loss" in kinds:
        return "the weights after loading are not those that were saved"
    states = [finding.name for finding in case.compared.findings if finding.kind == "state"]
    of = f" ({states[0]})" if states else ""
    return f"loaded weights are right, the optimizer's state is not{of}: save and load it"


def diagnose_buffer(case: FaultEvidence, first: Finding) -> Diagnosis:
    cause = "not broadcast" if case.workload.case == "start" else "buffers"
    return case.conclude(cause, f"rank {first.rank} has a buffer {first.name} of its own: broadcast it")


def diagnose_lost_ranks(reason: str, is_hang: bool, reports: Sequence[RankReport], wrap_line: str) -> Diagnosis:
    """Say why ranks wait for each other or died, by the collectives that they launched."""
    cause = "hang" if is_hang else "died"
    launches = [report.launches for report in reports]
    if (difference := first_disagreement(launches)) is not None:
        launch = difference.launch
        return Diagnosis(cause, difference.meaning, None, launch.description, launch.line or wrap_line)
    if not any(launches):
        return Diagnosis(cause, reason, line=wrap_line)
    last = max(launches, key=len)[-1]
    messages = [launch for rank_launches in launches for launch in rank_launches if launch.is_point_to_point]
    if 2 * sum(launch.name.startswith("recv") for launch in messages) > len(messages):
        rank = next(rank for rank, rank_launches in enumerate(launches) if rank_launches[-1:] == [last])
        meaning = (
            f"rank {rank} waits in the {last.description} of {last.phase} in step {last.step + 1}, which none sends"
        )
        return Diagnosis(cause, meaning, None, last.description, last.line or wrap_line)
    return Diagnosis(cause, f"{reason}, after {last.description}", None, last.description, last.line or wrap_line)


# Cases that compare ranks with each other, or with a rank alone, rather than numbers with those of one process.


def diagnose_masks(workload: VerifiedWorkload, reports: Sequence[RankReport]) -> Diagnosis | None:
    """Say which ranks' dropout masks should be alike, or should not be."""
    by_data: dict[int, list[torch.Tensor]] = {}
    for rank, report in enumerate(reports):
        assert report.masks is not None
        by_data.setdefault(workload.data_place(rank), []).append(report.masks)
    pairs = [(mask, masks[0]) for masks in by_data.values() for mask in masks]
    firsts = [masks[0] for masks in by_data.values()]
    if any(mask.shape == other.shape and not torch.equal(mask, other) for mask, other in pairs):
        return Diagnosis("dropout", "ranks that share sequences drop different elements of them: seed them alike")
    if any(torch.equal(mask, firsts[0]) for mask in firsts[1:]):
        reason = "every rank drops the same elements of its own sequences: seed each rank by its number"
        return Diagnosis("dropout", reason)
    return None


def diagnose_order(reports_of: Mapping[str, Sequence[RankReport]]) -> Diagnosis | None:
    """Say under which of :data:`~cs336sys.experiments.verify.cases.CONDITIONS` ranks launch different collectives."""
    for condition, reports in reports_of.items():
        launches = [[launch for launch in report.launches if launch.phase != "wrap"] for report in reports]
        if (difference := first_disagreement(launches)) is not None:
            launch = difference.launch
            meaning = f"with {condition}, {difference.meaning}; all must launch the same, even where nothing hangs"
            return Diagnosis("order", meaning, None, launch.description, launch.line)
    return None


def merged_spec(reports: Sequence[RankReport]) -> OptimizerSpec | None:
    """The wrap's optimizer with the settings of every rank's parameters; None where the wrap has none."""
    specs = [report.optimizer for report in reports if report.optimizer is not None]
    settings = {name: values for spec in reversed(specs) for name, values in spec.settings.items()}
    return OptimizerSpec(specs[0].optimizer_class, settings) if specs else None


def diagnose_groups(
    reports: Sequence[RankReport], in_one_process: RankReport, shapes: Mapping[str, torch.Size]
) -> Diagnosis | None:
    """Say which parameter has other settings of the optimizer than the same wrap gives it on one rank.

    Args:
        shapes: of the model's parameters.
    """
    spec, expected = merged_spec(reports), in_one_process.optimizer
    assert spec is not None
    seen = {name: shape for report in reports for name, shape in report.optimizer_shapes.items()}
    for name, (_, settings) in spec.settings.items():
        _, right = (None, {}) if expected is None else expected.settings.get(name, (None, {}))
        differing = [key for key in settings if key in right and right[key] != settings[key]]
        if differing:
            key = differing[0]
            meaning = (
                f"{name} has {key} {settings[key]} on ranks and {right[key]} in one process: the optimizer sees "
                f"{_shape(seen.get(name))} where the model has {_shape(shapes[name])}"
            )
            return Diagnosis("groups", meaning)
    flattened = [name for name, shape in seen.items() if len(shape) < 2 <= len(shapes[name])]
    used = [settings for _, settings in spec.settings.values()]
    unused = [settings for settings in reports[0].empty_groups if settings not in used]
    if flattened and unused and all(report.empty_groups == reports[0].empty_groups for report in reports):
        keys = [key for key, value in unused[0].items() if spec.settings[flattened[0]][1].get(key) != value]
        group = ", ".join(f"{key} {unused[0][key]}" for key in keys)
        meaning = (
            f"the optimizer's group of {group} is empty, and all {len(flattened)} matrices are in another, as the "
            f"optimizer sees flattened slices: {flattened[0]} of {_shape(shapes[flattened[0]])} as "
            f"{_shape(seen[flattened[0]])}; group parameters before they are cut"
        )
        return Diagnosis("groups", meaning)
    return None


def _shape(shape: torch.Size | None) -> str:
    return "no such parameter" if shape is None else f"({', '.join(map(str, shape))})"
