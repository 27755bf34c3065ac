"""Diagnose a difference: find the mistake that turns the right numbers into exactly these."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cs336sys.commands.verify.comparison import GRADIENT_PHASES, ComparedCase, TensorDifference, fault, with_facts
from cs336sys.commands.verify.gradient_diagnosis import diagnose_gradient
from cs336sys.findings import Finding, sentence
from cs336sys.parity.collectives import first_disagreement
from cs336sys.parity.optimizers import OptimizerSpec
from cs336sys.parity.record import RankReport
from cs336sys.parity.subject import build_subject
from cs336sys.parity.weights import EXPLAINED, is_near, norm, scale_factor
from cs336sys.settings.verification import SAVED_AFTER, VerifiedWorkload


def diagnose_case(case: ComparedCase, plain_fault: Finding | None) -> Finding:
    """Say what a case's differences mean; ``plain_fault`` is that of the case "step", None where it is right."""
    first = case.differences[0]
    if plain_fault is not None and plain_fault.facts["moment"] == (first.kind, first.step, first.name):
        return with_facts(plain_fault, is_of_plain_step=True)  # The same tensor is the first that is off.
    if (race := _race(case)) is not None:  # Before the others: nothing explains the numbers of a race.
        return race
    # A loss, weight or state shows what was loaded; a gradient may have other causes, which are attributed to the case.
    is_loaded = case.program.resume is not None and first.step > SAVED_AFTER
    if is_loaded and first.kind in ("loss", "weight", "state"):
        return _diagnose_resume(case)
    return _attribute_to_case(case, _BY_KIND.get(first.kind, _diagnose_other)(case, first))


def _attribute_to_case(case: ComparedCase, diagnosis: Finding) -> Finding:
    """Name the case as the cause, where the plain step is right and ``sentences.jinja`` has its ``right_where``."""
    if not case.is_plain_step_right:
        return diagnosis
    if case.program.resume is not None and diagnosis.cause != "wrong slices":  # Wrong before anything was saved.
        kept_facts = {fact: diagnosis.facts[fact] for fact in ("ratio", "collective")}  # Columns of the table.
        return replace(with_facts(_diagnose_resume(case), **kept_facts), where=diagnosis.where)
    cause = {"no-sync": "accumulation"}.get(case.workload.case, case.workload.case)  # Both accumulate.
    if diagnosis.cause != cause and (when := sentence(__package__, "right where", case=cause)):
        return with_facts(diagnosis, cause, right_where=when)
    names = {difference.name for difference in case.differences_of("gradient")}
    # Only the weight that layers share is off, so sharing is the cause: a model may tie weights itself, in any case.
    if names == {build_subject(case.workload, case.program, torch.device("cpu"), case.training.dtype).tied}:
        return with_facts(diagnosis, "tied", is_tied_alone=True)
    return diagnosis


def _race(case: ComparedCase) -> Finding | None:
    """Find gradients that are wrong when a rank is late, or that change from run to run."""
    sent = case.launches(GRADIENT_PHASES)
    if case.workload.case == "late" and case.is_plain_step_right:  # Only being late is new.
        return case.conclude("race", "late", launches=sent, late_rank=case.program.late_rank)
    allowed = max(case.differences[0].allowed, 1e-12)  # Relative. With 0, the last bits of float64 would be a race.
    if not math.isfinite(allowed):
        return None  # Rounding would explain any difference.
    # The watched run repeats the first: what differs by more than rounding was read or written in no fixed order.
    for report, rerun in zip(case.reports, case.watched, strict=False):  # ``watched`` is empty without such a run.
        for (kind, step), tensors in report.record.moments.items():
            for name, value in tensors.items() if kind == "gradient" else ():
                other = rerun.record.at(kind, step).get(name, value)
                if other.shape == value.shape and norm(other - value) > allowed * norm(value):
                    return case.conclude("race", launches=sent, name=name, step=step)
    return None


def _diagnose_start(case: ComparedCase, first: TensorDifference) -> Finding:
    """Explain weights that are not those of one process before the first step."""
    if case.workload.case == "start":
        return case.conclude("not broadcast")
    if sorted(first.actual.flatten().tolist()) == sorted(first.expected.flatten().tolist()):  # The same numbers.
        return case.conclude("wrong slices", "order")
    if _holds_twice(first.actual):
        return case.conclude("wrong slices", "twice")
    return case.conclude("wrong slices", ratio=scale_factor(first.actual, first.expected, case.unexplained_share))


def _holds_twice(values: Tensor) -> bool:
    """Return whether two rows are equal, as no two rows of random weights are."""
    rows = values.flatten(1) if values.dim() > 1 else values[:, None]
    return len(torch.unique(rows, dim=0)) < len(rows)


def _diagnose_loss(case: ComparedCase, first: TensorDifference) -> Finding:
    """Explain a loss that is off while the gradients and weights before it are right, or not compared."""
    if first.step > 1:  # The loss of step 1 was right, and so was the forward pass: only its weights can be wrong.
        if not all(record.at("weight", first.step - 1) for record in case.records):
            return case.conclude("forward", "later")  # Some rank's weights before this step were not compared.
        # As the last step left them they are right, so that others were gathered for this one.
        gathers = [launch for launch in case.launches(("forward", "optimizer")) if "gather" in launch.name]
        return case.conclude("stale weights", launches=gathers)
    if (diagnosis := _diagnose_outputs(case)) is not None:
        return diagnosis
    # Outputs are right, or were not seen: with shares of unequal size the likeliest fault is to count them alike.
    return case.conclude("uneven" if case.program.uneven else "forward", "loss")


def _diagnose_outputs(case: ComparedCase) -> Finding | None:
    """Blame the first module, in the order in which calls return, whose output is off in step 1; None without any."""
    all_expected, sizes = case.reference.record.outputs, case.workload.dimensions
    sent, context_ranks = case.launches(("forward",), step=0), sizes.get("context", 1)
    has_whole_batch = sizes.get("data", 1) * context_ranks == 1  # Each rank: their outputs may be parts of a sum.
    summand = ""  # The last module of which ranks have parts of a sum: no fault if the module around it adds them up.
    for name, expected in all_expected.items() if case.watched else ():
        outputs = [report.record.outputs.get(name) for report in case.watched]
        output = outputs[0]  # The first rank's is compared.
        if output is None or output.dim() != expected.dim():
            continue
        if not has_whole_batch:
            expected = _part_of_first_rank(expected, output.shape, context_ranks)
        if output.shape != expected.shape or not (has_whole_batch or expected.dim()):
            continue  # A single number of a rank's part of the batch is not that of the whole batch.
        parent = name.rpartition(".")[0]  # The module around it, which returns later.
        if norm(output - expected) <= 1e-6 * norm(expected):  # Right but for rounding in float32.
            summand = "" if name == summand.rpartition(".")[0] else summand  # It has added up the summand's outputs.
            continue
        if has_whole_batch and _add_up(outputs, expected):
            summand = name
            # layers.0.ffn.w2 is in a part of a block, which may add outputs up when it returns; a block does not.
            if parent in all_expected and name.count(".") > 2:
                continue
            break
        if (ratio := scale_factor(output, expected)) is not None:
            return case.conclude("partial sum", "scaled", launches=sent, ratio=ratio, module=name)
        return case.conclude("forward", "output", launches=sent, module=name)
    return case.conclude("partial sum", "output", launches=sent, module=summand) if summand else None


def _part_of_first_rank(expected: Tensor, shape: torch.Size, context_ranks: int) -> Tensor:
    """Return the first sequences of an output of the whole batch and, where ranks split these, their first tokens."""
    part = expected[: shape[0]] if expected.dim() else expected
    return part[:, : shape[1]] if part.dim() > 1 and context_ranks > 1 else part


def _add_up(outputs: Sequence[Tensor | None], expected: Tensor) -> bool:
    """Return whether the ranks' outputs are parts of a sum, which is expected."""
    parts = [part for part in outputs if part is not None and part.shape == expected.shape]
    return len(parts) == len(outputs) and norm(torch.stack(parts).sum(0) - expected) < EXPLAINED * norm(expected)


def _diagnose_norm(case: ComparedCase, first: TensorDifference) -> Finding:
    """Explain a wrong norm of right gradients."""
    norms = [report.record.at("norm", first.step)[""].item() for report in case.reports]  # Numbers have no name.
    expected = first.expected.item()
    if len(set(norms)) > 1:
        add_up = abs(math.hypot(*norms) - expected) < 1e-3 * expected  # The squares, as for parts of the gradients.
        listed = ", ".join(f"{value:.3g}" for value in norms)
        return case.conclude("clipping", "locally", norms=listed, add_up=add_up)
    ratio = norms[0] / expected if expected else None  # All ranks have the same norm.
    return case.conclude("clipping", "norm", ratio=ratio, norm=norms[0], expected=expected)


def _diagnose_weight(case: ComparedCase, first: TensorDifference) -> Finding:
    """Explain weights that are off after a step whose gradients are right, or not compared: the first that fits."""
    program, step, name, rank_count = case.program, first.step, first.name, len(case.reports)
    differences = case.differences_of("weight", step)
    start, sent = case.reference.record.at("start", 0)[name], case.launches(("optimizer",))
    ranks_off = sorted({difference.rank for difference in differences})
    ranks_off_first = sorted({difference.rank for difference in differences if difference.name == name})
    if program.frozen and torch.equal(first.expected, start):  # It should not move.
        return case.conclude("frozen", launches=sent)
    if len(ranks_off_first) == rank_count and _comes_a_step_late(case, first):
        return case.conclude("stale weights", "late", launches=sent)
    if norm(first.actual - start) <= 1e-12 * norm(start):  # It has not moved at all, but for rounding in float64.
        return _diagnose_unchanged(case, name, ranks_off_first)
    # Gradients are compared before they are clipped, or their step is skipped: if right, these are to blame.
    if program.scales:
        return case.conclude("scaling", is_on_all=program.overflows(step) and len(ranks_off) == rank_count)
    if (schedule := _diagnose_schedule(case, step)) is not None:
        return schedule
    before = _weight_before(case, first)
    ratio = scale_factor(first.actual - before, first.expected - before)  # Of how far the step has moved it.
    if program.clips:
        return case.conclude("clipping", ratio=ratio)
    names = list(dict.fromkeys(difference.name for difference in differences))
    facts: dict[str, Any] = {"are_compared": "gradients" not in case.not_compared, "names": names}
    if len(ranks_off) < rank_count:  # Others have the right weights.
        return case.conclude("not sent", launches=sent, ranks=ranks_off, **facts)
    leaves_gradients = any(report.record.at("gradient", 1) for report in case.reports)
    if case.watched and not leaves_gradients and not case.launches(GRADIENT_PHASES):
        return case.conclude("not synchronized")  # Nor were there gradients to compare, which would have shown it.
    return case.conclude("optimizer", launches=sent, ratio=ratio, **facts)


def _diagnose_unchanged(case: ComparedCase, name: str, ranks: Sequence[int]) -> Finding:
    """Explain a weight that is on some ranks what it was at first."""
    sent = case.launches(("optimizer",))
    if not any(name in report.owned for report in case.reports):
        return case.conclude("left out", "of optimizer")
    if len(ranks) == len(case.reports):
        return case.conclude("left out", "unchanged", launches=sent)
    return case.conclude("not sent", "unchanged", launches=sent, ranks=ranks)


def _weight_before(case: ComparedCase, first: TensorDifference) -> Tensor:
    record = case.reference.record  # A large model's weights are not there after every step, but at the start.
    return (record.weights_after(first.step - 1) or record.at("start", 0))[first.name]


def _comes_a_step_late(case: ComparedCase, first: TensorDifference) -> bool:
    """Return whether a rank's weights after the next step are those that one process has now."""
    later, moved = case.records[first.rank].at("weight", first.step + 1), first.expected - _weight_before(case, first)
    return first.name in later and norm(later[first.name] - first.expected) <= case.unexplained_share * norm(moved)


def _diagnose_schedule(case: ComparedCase, last_step: int) -> Finding | None:
    """Diagnose learning rates that are not those of one process, after any step up to ``last_step``."""
    for step, expected in case.reference.record.rates.items():
        for rank, report in enumerate(case.reports):
            rates = report.record.rates.get(step)  # One of each group of parameters: the largest is compared.
            if step <= last_step and rates and expected and not is_near(max(rates), max(expected)):
                ratio = max(rates) / max(expected) if max(expected) else None
                facts: dict[str, Any] = {"step": step, "rank": rank, "rate": max(rates), "expected": max(expected)}
                return case.conclude("schedule", ratio=ratio, **facts)
    return None


def _diagnose_other(case: ComparedCase, first: TensorDifference) -> Finding:
    """Explain an evaluation, a buffer or a state that is off."""
    if first.kind == "evaluation":
        return case.conclude("evaluation")
    if first.kind == "buffer":
        is_start = case.workload.case == "start"
        return case.conclude("not broadcast", "buffer") if is_start else case.conclude("buffers")
    return case.conclude("optimizer", "state", ratio=scale_factor(first.actual, first.expected, case.unexplained_share))


_BY_KIND = {
    "start": _diagnose_start,
    "loss": _diagnose_loss,
    "gradient": diagnose_gradient,
    "norm": _diagnose_norm,
    "weight": _diagnose_weight,
}


def _diagnose_resume(case: ComparedCase) -> Finding:
    """Say what was not loaded as it was saved."""
    states = [difference.name for difference in case.differences_of("state")]
    return case.conclude("resume", is_loss=bool(case.differences_of("loss")), states=states)


def diagnose_lost_ranks(reason: str, is_hang: bool, reports: Sequence[RankReport]) -> Finding:
    """Say why ranks wait for each other or died, by the collectives that they launched."""
    cause, launches = "hang" if is_hang else "died", [report.launches for report in reports]
    if not any(launches):
        return Finding(cause, facts={"block": "lost_ranks", "reason": reason})
    last = max(launches, key=len)[-1]  # Of the rank that came farthest.
    messages = [launch for rank_launches in launches for launch in rank_launches if launch.is_point_to_point]
    receives = sum(launch.name.startswith("recv") for launch in messages)
    if (difference := first_disagreement(launches)) is not None:
        reason, last = difference
    elif 2 * receives > len(messages):  # More than were sent.
        rank = next(rank for rank, rank_launches in enumerate(launches) if rank_launches[-1:] == [last])
        reason = sentence(__package__, "hang receive", rank=rank, launch=last)
    else:
        reason = f"{reason}, after {last.description}"
    return Finding(cause, last.line, facts={"block": "lost_ranks", "reason": reason, "collective": last.description})


# Cases that compare ranks with each other, or with a rank alone, rather than numbers with those of one process.


def diagnose_masks(workload: VerifiedWorkload, reports: Sequence[RankReport]) -> Finding | None:
    """Say whether dropout masks differ between ranks that have the same sequences, or are equal between others."""
    masks = [(workload.data_place(rank), report.masks) for rank, report in enumerate(reports)]
    pairs = [  # Whether the two ranks have the same sequences, and the mask of each.
        (place == other_place, mask, other_mask)
        for (place, mask), (other_place, other_mask) in itertools.combinations(masks, 2)
        if mask is not None and other_mask is not None
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
    """Say which parameter has other settings of the optimizer than the same wrap gives it on one rank.

    Returns:
        the diagnosis, None where all have the same, and what could not be compared.
    """
    spec, expected = merged_spec(reports), in_one_process.optimizer  # The latter is None where the wrap fails there.
    assert spec is not None  # Else the case does not apply.
    seen_shapes = {name: shape for report in reports for name, shape in report.optimizer_shapes.items()}
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
    unused = [settings for settings in reports[0].empty_groups if settings not in used]
    if not flattened or not unused or any(report.empty_groups != reports[0].empty_groups for report in reports):
        return None, not_compared
    name = flattened[0]  # Named for all.
    _, its_settings = spec.settings[name]
    group = ", ".join(f"{key} {value}" for key, value in unused[0].items() if its_settings.get(key) != value)
    facts = {"settings": group, "count": len(flattened), "name": name, "sees": seen_shapes[name], "shape": shapes[name]}
    return fault("groups", "flattened", **facts), not_compared
