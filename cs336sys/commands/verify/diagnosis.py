"""Diagnose a difference: find the mistake that turns the right numbers into exactly these."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cs336sys.commands.verify.cases import SAVED_AFTER, build_subject
from cs336sys.commands.verify.comparison import EXPLAINED, GRADIENT_PHASES, ComparedCase, Diagnosis, Finding
from cs336sys.commands.verify.gradient_diagnosis import diagnose_gradient, is_near, scale_factor
from cs336sys.commands.verify.record import OptimizerSpec, RankReport
from cs336sys.parity.collectives import first_disagreement
from cs336sys.parity.weights import norm
from cs336sys.settings.verification import VerifiedWorkload


def diagnose_case(case: ComparedCase, plain_diagnosis: Diagnosis | None) -> Diagnosis:
    """Say what a case's findings mean, compared with the fault of the plain step, None if none is known."""
    first = case.findings[0]
    if plain_diagnosis is not None and plain_diagnosis.first == (first.kind, first.step, first.name):
        return replace(plain_diagnosis, meaning=f"as in the plain step: {plain_diagnosis.meaning}")
    if (race := _race(case)) is not None:
        return race
    is_loaded = case.program.resume is not None and first.step > SAVED_AFTER
    if is_loaded and first.kind in ("loss", "weight", "state"):
        return case.conclude("resume", _explain_resume(case))
    return _attribute_to_case(case, _BY_KIND.get(first.kind, _diagnose_other)(case, first))


# Cases that, where the plain step is right, are themselves what is wrong: the cause, and when it is right.
_CAUSES_OF_CASES = {
    "unused": ("unused", "while every rank uses every parameter"),
    "frozen": ("frozen", "without a frozen parameter"),
    "checkpoint": ("checkpoint", "without activation checkpoints"),
    "compile": ("compile", "without compiled blocks"),
    "evaluation": ("evaluation", "without an evaluation between steps"),
    "scaling": ("scaling", "without a scaled loss; ranks must skip a step together"),
    "uneven": ("uneven", "while all ranks have equally many sequences"),
    "accumulation": ("accumulation", "with one micro-batch a step"),
    "no-sync": ("accumulation", "with one micro-batch a step"),
    "clipping": ("clipping", "without clipping"),
    "tied": ("tied", "without tied weights"),
}


def _attribute_to_case(case: ComparedCase, diagnosis: Diagnosis) -> Diagnosis:
    """Name what the case does as the cause, where the plain step is right."""
    if not case.is_new:
        return diagnosis
    if case.program.resume is not None and diagnosis.cause != "wrong slices":
        return replace(diagnosis, cause="resume", meaning=_explain_resume(case))
    cause, when = _CAUSES_OF_CASES.get(case.workload.case, (diagnosis.cause, ""))
    if diagnosis.cause != cause:
        return replace(diagnosis, cause=cause, meaning=f"{diagnosis.meaning}; it is right {when}")
    names = {finding.name for finding in case.findings_of("gradient")}
    if names == {build_subject(case.workload, case.program, torch.device("cpu"), case.training.dtype).tied}:
        meaning = f"only the weight that several layers share is off: {diagnosis.meaning}"
        return replace(diagnosis, cause="tied", meaning=meaning)
    return diagnosis


def _race(case: ComparedCase) -> Diagnosis | None:
    """Find gradients that are wrong when a rank is late, or that change from run to run."""
    sent = case.launches(GRADIENT_PHASES)
    if case.workload.case == "late" and case.is_new:
        meaning = (
            f"right while ranks are equally fast, wrong when rank {case.program.late_rank} is late: something is read "
            "before its collective is done"
        )
        return case.conclude("race", meaning, sent)
    allowed = max(case.findings[0].allowed, 1e-12)
    if not math.isfinite(allowed):
        return None
    # The case was run twice where its collectives were watched.
    for report, rerun in zip(case.reports, case.watched, strict=False):
        for (kind, step), tensors in report.record.moments.items():
            for name, value in tensors.items() if kind == "gradient" else ():
                other = rerun.record.at(kind, step).get(name, value)
                if other.shape == value.shape and norm(other - value) > allowed * max(norm(value), 1e-300):
                    return case.conclude("race", f"the gradient of {name} in step {step} changes from run to run", sent)
    return None


def _diagnose_start(case: ComparedCase, first: Finding) -> Diagnosis:
    """Explain weights that are not those of one process before the first step."""
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
    ratio = scale_factor(first.actual, first.expected, case.explained)
    return case.conclude("wrong slices", f"wrapping changes {first.name}", ratio=ratio)


def _holds_twice(values: Tensor) -> bool:
    """Return whether two rows are equal."""
    rows = values.flatten(1) if values.dim() > 1 else values[:, None]
    return len(torch.unique(rows, dim=0)) < len(rows)


def _diagnose_loss(case: ComparedCase, first: Finding) -> Diagnosis:
    """Explain a loss that is off while the gradients and weights before it are right, or not compared."""
    if first.step > 1:
        if not all(record.at("weight", first.step - 1) for record in case.records):
            meaning = f"the loss of step {first.step} is the first that is off; the weights before it are not compared"
            return case.conclude("forward", meaning)
        meaning = f"step {first.step} computes with other weights than the last step left: they are gathered too early"
        gathers = [launch for launch in case.launches(("forward", "optimizer")) if "gather" in launch.name]
        return case.conclude("stale weights", meaning, gathers)
    sent = case.launches(("forward",), 0)
    if (output := _first_output_off(case)) is not None:
        cause, meaning, ratio = output
        return case.conclude(cause, f"the output of {meaning}", sent, ratio)
    if case.program.uneven:
        return case.conclude("uneven", "the loss counts ranks alike that have different numbers of sequences")
    return case.conclude("forward", "the loss is not that of one process, with the same weights and sequences")


def _first_output_off(case: ComparedCase) -> tuple[str, str, float | None] | None:
    """Return cause, meaning and ratio of the first module, in order of calls, whose output is off; None without any."""
    all_expected, sizes = case.reference.record.outputs, case.workload.dimensions
    context_ranks = sizes.get("context", 1)
    has_whole_batch = sizes.get("data", 1) * context_ranks == 1
    # The last layer whose ranks' outputs add up to what is expected: the module around it may do that.
    summand = ""
    for name, expected in all_expected.items() if case.watched else ():
        outputs = [report.record.outputs.get(name) for report in case.watched]
        output = outputs[0]
        if output is None or output.dim() != expected.dim():
            continue
        if not has_whole_batch and expected.dim():
            # Of the first rank: the first sequences, and the first tokens of each.
            expected = expected[: output.shape[0]]
            if expected.dim() > 1 and context_ranks > 1:
                expected = expected[:, : output.shape[1]]
        if output.shape != expected.shape or not (has_whole_batch or expected.dim()):
            continue
        parent = name.rpartition(".")[0]
        if norm(output - expected) <= 1e-6 * norm(expected):
            summand = "" if name == summand.rpartition(".")[0] else summand
            continue
        parts = [part for part in outputs if part is not None and part.shape == expected.shape]
        may_be_sum = has_whole_batch and len(parts) == len(outputs)
        if may_be_sum and norm(torch.stack(parts).sum(0) - expected) < EXPLAINED * norm(expected):
            summand = name
            if parent in all_expected and name.count(".") > 2:
                continue
            break
        if (ratio := scale_factor(output, expected)) is not None:
            return "partial sum", f"{name} is {ratio:.3g} times what it should be", ratio
        return "forward", f"{name} is the first that is off", None
    meaning = f"{summand} is a part of the sum on each rank: its all-reduce over ranks is missing"
    return ("partial sum", meaning, None) if summand else None


def _diagnose_norm(case: ComparedCase, first: Finding) -> Diagnosis:
    """Explain a wrong norm of right gradients."""
    norms = [report.record.at("norm", first.step)[""].item() for report in case.reports]
    expected = first.expected.item()
    if len(set(norms)) > 1:
        add_up = abs(math.hypot(*norms) - expected) < 1e-3 * expected
        fits = ", and their squares add up to its square" if add_up else ""
        meaning = f"each rank clips by the norm of what it has ({', '.join(f'{norm:.3g}' for norm in norms)}){fits}"
        return case.conclude("clipping", meaning)
    meaning = (
        f"the norm is {norms[0]:.4g}, and {expected:.4g} in one process: slices or replicas are counted twice or not"
    )
    return case.conclude("clipping", meaning, ratio=norms[0] / expected if expected else None)


def _diagnose_weight(case: ComparedCase, first: Finding) -> Diagnosis:
    """Explain weights that are off after a step whose gradients are right, or not compared."""
    program, step, name, rank_count = case.program, first.step, first.name, len(case.reports)
    findings = case.findings_of("weight", step)
    start, sent = case.reference.record.at("start", 0)[name], case.launches(("optimizer",))
    ranks_off = sorted({finding.rank for finding in findings})
    ranks_off_first = sorted({finding.rank for finding in findings if finding.name == name})
    names = ", ".join(list(dict.fromkeys(finding.name for finding in findings))[:3])
    if program.frozen and torch.equal(first.expected, start):
        return case.conclude("frozen", f"{name} is frozen and was changed", sent)
    if len(ranks_off_first) == rank_count and _comes_a_step_late(case, first):
        return case.conclude("stale weights", f"{name} after step {step + 1} is what it should be after {step}", sent)
    if norm(first.actual - start) <= 1e-12 * max(norm(start), 1e-300):
        return _diagnose_unchanged(case, name, ranks_off_first)
    if program.scales:
        meaning = "a step that overflowed on one rank is not skipped on every one"
        if program.overflows(step) and len(ranks_off) == rank_count:
            meaning = (
                "no rank skips the step in which the gradients of one were infinite: they were changed before ranks "
                "looked at them, or each looked before they were averaged"
            )
        return case.conclude("scaling", meaning)
    if (schedule := _diagnose_schedule(case, step)) is not None:
        return schedule
    before = _weight_before(case, first)
    ratio = scale_factor(first.actual - before, first.expected - before)
    if program.clips:
        return case.conclude("clipping", "gradients are not clipped by the norm that was found", ratio=ratio)
    are_compared = "gradients" not in case.not_compared
    clause = "with the right gradients" if are_compared else "with gradients that could not be compared"
    if len(ranks_off) < rank_count:
        who = ", ".join(map(str, ranks_off))
        return case.conclude("not sent", f"only rank {who} has wrong weights, {clause}: {names}", sent)
    leaves_gradients = any(report.record.at("gradient", 1) for report in case.reports)
    if case.watched and not leaves_gradients and not case.launches(GRADIENT_PHASES):
        return case.conclude("not synchronized", "no collective follows the backward pass")
    how = f"the step is {ratio:.4g} times too long" if ratio is not None else "the step is another"
    return case.conclude("optimizer", f"{how}, {clause}: {names}", sent, ratio)


def _diagnose_unchanged(case: ComparedCase, name: str, ranks: Sequence[int]) -> Diagnosis:
    """Explain a weight that is on some ranks what it was at first."""
    sent = case.launches(("optimizer",))
    if not any(name in report.owned for report in case.reports):
        return case.conclude("left out", f"no rank's optimizer has {name}")
    if len(ranks) == len(case.reports):
        return case.conclude("left out", f"{name} is never updated", sent)
    meaning = f"rank {', '.join(map(str, ranks))} does not get the new values of {name}: send them after the step"
    return case.conclude("not sent", meaning, sent)


def _weight_before(case: ComparedCase, first: Finding) -> Tensor:
    record = case.reference.record
    return (record.weights_after(first.step - 1) or record.at("start", 0))[first.name]


def _comes_a_step_late(case: ComparedCase, first: Finding) -> bool:
    """Return whether a rank's weights after the next step are those that one process has now."""
    later, moved = case.records[first.rank].at("weight", first.step + 1), first.expected - _weight_before(case, first)
    return first.name in later and norm(later[first.name] - first.expected) <= case.explained * norm(moved)


def _diagnose_schedule(case: ComparedCase, last_step: int) -> Diagnosis | None:
    """Diagnose learning rates that are not those of one process, after any step up to ``last_step``."""
    for step, expected in case.reference.record.rates.items():
        for rank, report in enumerate(case.reports):
            rates = report.record.rates.get(step)
            if step <= last_step and rates and expected and not is_near(max(rates), max(expected)):
                meaning = (
                    f"after step {step} the learning rate is {max(rates):.4g} on rank {rank}, and {max(expected):.4g} "
                    "in one process: the schedule counts other steps, as where it steps once a rank"
                )
                return case.conclude("schedule", meaning, ratio=max(rates) / max(expected) if max(expected) else None)
    return None


def _diagnose_other(case: ComparedCase, first: Finding) -> Diagnosis:
    """Explain an evaluation, a buffer or a state that is off."""
    if first.kind == "evaluation":
        return case.conclude("evaluation", "the model evaluates with other weights, or otherwise, than it trains")
    if first.kind == "buffer":
        cause = "not broadcast" if case.workload.case == "start" else "buffers"
        return case.conclude(cause, f"rank {first.rank} has a buffer {first.name} of its own: broadcast it")
    ratio = scale_factor(first.actual, first.expected, case.explained)
    return case.conclude("optimizer", f"the optimizer's {first.name} is off, with the right weights", ratio=ratio)


_BY_KIND = {
    "start": _diagnose_start,
    "loss": _diagnose_loss,
    "gradient": diagnose_gradient,
    "norm": _diagnose_norm,
    "weight": _diagnose_weight,
}


def _explain_resume(case: ComparedCase) -> str:
    """Say what was not loaded as it was saved."""
    if case.findings_of("loss"):
        return "the weights after loading are not those that were saved"
    states = [f" ({finding.name})" for finding in case.findings_of("state")]
    return f"loaded weights are right, the optimizer's state is not{''.join(states[:1])}: save and load it"


def diagnose_lost_ranks(reason: str, is_hang: bool, reports: Sequence[RankReport], wrap_line: str) -> Diagnosis:
    """Say why ranks wait for each other or died, by the collectives that they launched."""
    cause, launches = "hang" if is_hang else "died", [report.launches for report in reports]
    if not any(launches):
        return Diagnosis(cause, reason, line=wrap_line)
    last = max(launches, key=len)[-1]
    messages = [launch for rank_launches in launches for launch in rank_launches if launch.is_point_to_point]
    receives = sum(launch.name.startswith("recv") for launch in messages)
    if (difference := first_disagreement(launches)) is not None:
        reason, last = difference
    elif 2 * receives > len(messages):
        rank = next(rank for rank, rank_launches in enumerate(launches) if rank_launches[-1:] == [last])
        reason = (
            f"rank {rank} waits in the {last.description} of {last.phase} in step {last.step + 1}, which none sends"
        )
    else:
        reason = f"{reason}, after {last.description}"
    return Diagnosis(cause, reason, collective=last.description, line=last.line or wrap_line)


# Cases that compare ranks with each other, or with a rank alone, rather than numbers with those of one process.


def diagnose_masks(workload: VerifiedWorkload, reports: Sequence[RankReport]) -> Diagnosis | None:
    """Say which ranks' dropout masks should be alike, or should not be."""
    masks = [(workload.data_place(rank), report.masks) for rank, report in enumerate(reports)]
    pairs = [
        (place == other_place, mask, other_mask)
        for (place, mask), (other_place, other_mask) in itertools.combinations(masks, 2)
        if mask is not None and other_mask is not None
    ]
    meaning = ""
    if any(shares and mask.shape == other.shape and not torch.equal(mask, other) for shares, mask, other in pairs):
        meaning = "ranks that share sequences drop different elements of them: seed them alike"
    elif any(not shares and torch.equal(mask, other) for shares, mask, other in pairs):
        meaning = "every rank drops the same elements of its own sequences: seed each rank by its number"
    return Diagnosis("dropout", meaning) if meaning else None


def merged_spec(reports: Sequence[RankReport]) -> OptimizerSpec | None:
    """Return the wrap's optimizer with the settings of every rank's parameters; None where the wrap has none."""
    specs = [report.optimizer for report in reports if report.optimizer is not None]
    settings = {name: values for spec in reversed(specs) for name, values in spec.settings.items()}
    return OptimizerSpec(specs[0].optimizer_class, settings) if specs else None


def diagnose_groups(
    reports: Sequence[RankReport], in_one_process: RankReport, shapes: Mapping[str, torch.Size]
) -> tuple[Diagnosis | None, list[str]]:
    """Say which parameter has other settings of the optimizer than the same wrap gives it on one rank.

    Returns:
        the diagnosis, None where all have the same, and what could not be compared.
    """
    spec, expected = merged_spec(reports), in_one_process.optimizer
    assert spec is not None
    seen_shapes = {name: shape for report in reports for name, shape in report.optimizer_shapes.items()}
    sliced = [name for name, shape in seen_shapes.items() if len(shape) < len(shapes[name])]
    not_compared = [
        f"whether groups are chosen by shapes: the optimizer sees slices, {name} with {len(seen_shapes[name])} "
        f"dimension(s) instead of {len(shapes[name])}"
        for name in sliced[:1]
    ]
    for name, (_, settings) in spec.settings.items():
        expected_settings = {} if expected is None else expected.settings.get(name, (None, {}))[1]
        for key, value in settings.items():
            if expected_settings.get(key, value) != value:
                meaning = (
                    f"{name} has {key} {value} on ranks and {expected_settings[key]} in one process: the optimizer "
                    f"sees {_shape(seen_shapes.get(name))} where the model has {_shape(shapes[name])}"
                )
                return Diagnosis("groups", meaning), not_compared
    flattened = [name for name in sliced if len(seen_shapes[name]) < 2]
    used = [settings for _, settings in spec.settings.values()]
    unused = [settings for settings in reports[0].empty_groups if settings not in used]
    if not flattened or not unused or any(report.empty_groups != reports[0].empty_groups for report in reports):
        return None, not_compared
    name = flattened[0]
    group = ", ".join(f"{key} {value}" for key, value in unused[0].items() if spec.settings[name][1].get(key) != value)
    meaning = (
        f"the optimizer's group of {group} is empty, and all {len(flattened)} matrices are in another, as it sees "
        f"flattened slices: {name} of {_shape(shapes[name])} as {_shape(seen_shapes[name])}; group parameters before "
        "they are cut"
    )
    return Diagnosis("groups", meaning), not_compared


def _shape(shape: torch.Size | None) -> str:
    return "no such parameter" if shape is None else f"({', '.join(map(str, shape))})"
