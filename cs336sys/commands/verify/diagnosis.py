"""Diagnose a difference: find the mistake that turns the right numbers into exactly these."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cs336sys.commands.verify.comparison import GRADIENT_PHASES, ComparedCase, TensorDifference, with_facts
from cs336sys.commands.verify.training import gradients_of_shares
from cs336sys.findings import Finding, sentence
from cs336sys.parity.subject import build_subject
from cs336sys.parity.weights import EXPLAINED, RELATIVE_TOLERANCE, is_near, norm, scale_factor
from cs336sys.settings.verification import SAVED_AFTER


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
    diagnosis = _BY_KIND.get(first.kind, _diagnose_other)(case, first)
    if not case.is_plain_step_right:
        return diagnosis
    # The plain step is right, so the case is the cause where ``sentences.jinja`` has its ``right_where``.
    if case.program.resume is not None and diagnosis.cause != "wrong slices":  # Wrong before anything was saved.
        kept_facts = {fact: diagnosis.facts[fact] for fact in ("ratio", "collective")}  # Columns of the table.
        return replace(with_facts(_diagnose_resume(case), **kept_facts), where=diagnosis.where)
    cause = {"no-sync": "accumulation"}.get(case.workload.case, case.workload.case)  # Both accumulate.
    if diagnosis.cause != cause and (when := sentence(__package__, "right where", case=cause)):
        return with_facts(diagnosis, cause, right_where=when)
    names = {difference.name for difference in case.differences_of("gradient", first.step)}
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
    """Blame inputs, or the first module, in the order in which calls return, whose output is off in step 1."""
    all_expected, sent = case.reference.record.outputs, case.launches(("forward",), step=0)
    # By data rank, the first of the ranks that share its sequences.
    ranks = {case.workload.data_place(rank): rank for rank in reversed(range(len(case.watched)))}
    summand = ""  # The last module of which ranks have parts of a sum: no fault if the module around it adds them up.
    # First, under the empty name, what the model was called with.
    for name, expected in sorted(all_expected.items(), key=lambda named: named[0] != ""):
        outputs: list[Any] = [report.record.outputs.get(name) for report in case.watched]  # None where not seen.
        parts = {rank: _part_of_place(case, place, outputs[rank], expected) for place, rank in ranks.items()}
        pairs = {rank: (outputs[rank], part) for rank, part in parts.items() if part is not None}
        # But for rounding in float32; NaN is off.
        off = {rank: not norm(output - part) <= 1e-6 * norm(part) for rank, (output, part) in pairs.items()}
        parent = name.rpartition(".")[0]  # The module around it, which returns later.
        if not any(off.values()):
            if pairs and name == summand.rpartition(".")[0]:
                summand = ""  # It has added up the summand's outputs.
            continue
        rank = next(rank for rank, is_off in off.items() if is_off)
        facts: dict[str, Any] = {"rank": rank, "is_alone": not all(off.values())}
        if not name:
            return case.conclude("wrong inputs", **facts)
        if len(ranks) == 1 and _add_up(outputs, expected):
            summand = name
            # layers.0.ffn.w2 is in a part of a block, which may add outputs up when it returns; a block does not.
            if parent in all_expected and name.count(".") > 2:
                continue
            break
        if (ratio := scale_factor(*pairs[rank])) is not None:
            return case.conclude("partial sum", "scaled", launches=sent, ratio=ratio, module=name, **facts)
        return case.conclude("forward", "output", launches=sent, module=name, **facts)
    return case.conclude("partial sum", "output", launches=sent, module=summand) if summand else None


def _part_of_place(case: ComparedCase, place: int, output: Tensor | None, expected: Tensor) -> Tensor | None:
    """Return what the first rank of a data rank should have of an output; None if that cannot be compared."""
    data_ranks, context_ranks = case.workload.data_ranks, case.workload.dimensions.get("context", 1)
    if output is None or output.dim() != expected.dim():
        return None
    if data_ranks * context_ranks > 1:
        if not expected.dim():
            return None  # A single number of a rank's part of the batch is not that of the whole batch.
        first = place * case.workload.training.size.batch_size // data_ranks
        expected = expected[first : first + len(output)]  # Empty where one process has the first share alone.
        expected = expected[:, : output.shape[1]] if expected.dim() > 1 and context_ranks > 1 else expected
    return expected.to(output.dtype) if output.shape == expected.shape else None  # Inputs may be cast.


def _add_up(outputs: Sequence[Tensor | None], expected: Tensor) -> bool:
    """Return whether the ranks' outputs are parts of a sum, which is expected."""
    parts = [part for part in outputs if part is not None and part.shape == expected.shape]
    return len(parts) == len(outputs) and norm(torch.stack(parts).sum(0) - expected) < EXPLAINED * norm(expected)


def diagnose_gradient(case: ComparedCase, first: TensorDifference) -> Finding:
    """Explain the first gradient that is off, and others of its step."""
    step = first.step
    early = [launch for launch in case.launches(("backward",)) if launch.incomplete]
    if early:  # Launched before the backward pass had completed what they sent: the first names one of its gradients.
        return case.conclude("too early", launches=early[:1], parameter=early[0].incomplete[0])
    if not first.expected.any():  # One process has none: of a parameter that is frozen, or that it does not use.
        model = build_subject(case.workload, case.program, torch.device("cpu"), case.training.dtype).model
        if not model.get_parameter(first.name).requires_grad:
            return case.conclude("frozen", "by the model")
    if first.is_missing:
        on_all = all(first.name not in record.at("gradient", step) for record in case.records)
        return case.conclude("left out", is_on_all=on_all)
    differences = case.differences_of("gradient", step)
    if (diagnosis := _diagnose_combination(case, step, differences)) is not None:
        return diagnosis
    expected_gradients = case.reference.record.at("gradient", step)
    for name, gradient in expected_gradients.items():
        is_alike = name != first.name and gradient.shape == first.expected.shape
        if is_alike and scale_factor(first.actual, gradient) is not None:
            return case.conclude("mixed up", other=name)
    names = list(dict.fromkeys(difference.name for difference in differences))
    # Ranks that share layers or sequences have parts of gradients, whose sum may be missing. The last, with which the
    # backward pass begins, may be off by a plain factor: layers on the way mix up the others.
    shares_layers = any(case.workload.dimensions.get(name, 1) > 1 for name in ("tensor", "pipeline", "context"))
    last = next(difference for difference in differences if difference.name == names[-1])
    for difference in (first, last) if shares_layers else (first,):
        ratio = scale_factor(difference.actual, difference.expected, case.unexplained_share)
        diagnosis = _diagnose_summands(case, difference) if ratio is None else diagnose_ratio(case, ratio)
        if diagnosis is not None:
            return diagnosis if difference is first else with_facts(diagnosis, first_in_pass=difference.name)
    correct = [name for name in expected_gradients if name not in names]
    return case.conclude("partial sum" if shares_layers else "forward", names=names, correct=correct)


def diagnose_ratio(case: ComparedCase, ratio: float) -> Finding:
    """Name the cause of gradients that are ``ratio`` times what they should be, by which number of ranks that is."""
    sizes, all_ranks = case.workload.dimensions, case.workload.world_size
    ranks = sizes.get("data", 1) * sizes.get("context", 1)  # Gradients are averaged over these.
    causes = (  # Ratio, cause and how it shows; the first that is near. 1 stands first, as numbers of ranks may be 1.
        (1, "scaled", ""),
        (ranks, "not averaged", ""),
        (1 / ranks, "averaged twice", ""),
        (all_ranks, "scaled", "by ranks"),
        (1 / all_ranks, "scaled", "by ranks"),
    )
    matches = ((cause, seen) for value, cause, seen in causes if is_near(ratio, value))
    cause, seen = next(matches, ("scaled", ""))
    return case.conclude(cause, seen, ratio=ratio, ranks=ranks)


def _diagnose_summands(case: ComparedCase, difference: TensorDifference) -> Finding | None:
    """Say that each rank has a part of a gradient's sum; None where their sum is not in proportion to the gradient."""
    parts = [record.at("gradient", difference.step).get(difference.name) for record in case.records]
    present = [part for part in parts if part is not None and part.shape == difference.expected.shape]
    ratio = scale_factor(torch.stack(present).sum(0), difference.expected) if len(present) == len(parts) else None
    if ratio is None:
        return None
    times = None if is_near(ratio, 1) else ratio
    return case.conclude("partial sum", "of ranks", parameter=difference.name, times=times)


# How often other gradients are in a wrong one, if it is their sum: those of micro-batches, by (data rank, micro-batch),
# and that of the step before. Micro-batches without such a gradient are left out.
_Counts = Mapping[tuple[int, int], float]
_STEP_BEFORE = (-1, -1)


def _diagnose_combination(case: ComparedCase, step: int, differences: Sequence[TensorDifference]) -> Finding | None:
    """Explain a gradient by how often that of each micro-batch is in it; None unless such counts explain all ranks'."""
    weights = case.reference.record.weights_after(step - 1)
    # With one data rank there are no others' to combine. Clipping multiplies by an unknown factor. A large model's
    # weights are not recorded in each step.
    if case.workload.dimensions.get("data", 1) == 1 or case.program.clips or not weights:
        return None
    by_part = gradients_of_shares(case.training, case.program, step, weights)
    by_part[_STEP_BEFORE] = case.reference.record.at("gradient", step - 1)
    name = differences[0].name  # The first that is off, on each rank.
    columns = {part: gradients[name].flatten().double() for part, gradients in by_part.items() if name in gradients}
    counts_of_ranks = {
        difference.rank: _solve_counts(columns, difference.actual.flatten().double(), case.unexplained_share)
        for difference in differences
        if difference.name == name and not difference.is_missing
    }
    solved_counts = {rank: counts for rank, counts in counts_of_ranks.items() if counts is not None}
    # A rank that is no such combination refutes the explanation for all.
    is_explained = solved_counts and len(solved_counts) == len(counts_of_ranks)
    return _diagnose_counts(case, name, solved_counts) if is_explained else None


def _solve_counts(columns: Mapping[tuple[int, int], Tensor], gradient: Tensor, tolerance: float) -> _Counts | None:
    """Return how often each of ``columns`` is in a gradient; None where they leave more than ``tolerance`` of it."""
    if not columns.keys() - {_STEP_BEFORE} or len(gradient) < len(columns) or not torch.isfinite(gradient).all():
        return None  # No micro-batch has such a gradient, or fewer numbers than unknowns would fit anything.
    matrix = torch.stack([*columns.values()], dim=1)
    solution = torch.linalg.lstsq(matrix, gradient[:, None]).solution[:, 0]
    if norm(matrix @ solution - gradient) > tolerance * norm(gradient):
        return None
    return {_STEP_BEFORE: 0.0} | dict(zip(columns, solution.tolist(), strict=True))


def _diagnose_counts(case: ComparedCase, name: str, counts_of_ranks: Mapping[int, _Counts]) -> Finding | None:
    """Say which micro-batches count too often, too rarely or not at all in a gradient; None where all count once.

    ``counts_of_ranks`` has the ranks on which it is off. Below, *senders* are data ranks with any micro-batch in it.
    """
    data_ranks, micro_batches = case.workload.data_ranks, case.program.micro_batches
    noun = "rank" if data_ranks == case.workload.world_size else "data rank"
    rank, first_counts = next(iter(counts_of_ranks.items()))
    # The first rank's show what is wrong; others tell only whether each rank has the gradient of another one.
    values = [count for part, count in first_counts.items() if part != _STEP_BEFORE]
    if abs(first_counts[_STEP_BEFORE]) > RELATIVE_TOLERANCE:
        is_alone = all(abs(count) < RELATIVE_TOLERANCE for count in values)
        return case.conclude("stale gradient", launches=(), name=name, is_alone=is_alone)
    if all(is_near(count, values[0]) for count in values):  # All alike: it is the right one, or that times a factor.
        return None if is_near(values[0], 1) else diagnose_ratio(case, values[0])
    parts = itertools.product(range(data_ranks), range(micro_batches))
    counts = torch.tensor([first_counts.get(part, 0.0) for part in parts]).view(data_ranks, micro_batches)
    # Of the largest: what ranks clip or divide before they are averaged is small, and there.
    senders = (counts.abs() > RELATIVE_TOLERANCE * counts.abs().max()).any(dim=1).nonzero().flatten().tolist()
    if micro_batches > 1 and len(senders) == data_ranks:
        return _diagnose_micro_batches(case, counts)
    if len(senders) == 1:
        (sender,) = senders
        is_one_rank_off = len(counts_of_ranks) == 1
        # Of each rank, the data rank (a part's first number) of the micro-batch that counts most.
        main_senders = {max(shares, key=lambda part: abs(shares[part]))[0] for shares in counts_of_ranks.values()}
        if len(main_senders) > 1 or (is_one_rank_off and sender == case.workload.data_place(rank)):
            return _diagnose_own_gradient(case, name)  # Each has its own, or the one that is off has.
        if is_one_rank_off:
            return case.conclude("one rank's", rank=rank, sender=f"{noun} {sender}", is_alone=True)
        described = {data_ranks - 1: f"the last {noun}", 0: f"the first {noun}"}.get(sender, f"{noun} {sender}")
        return case.conclude("one rank's", sender=described, is_alone=False)
    if len(senders) < data_ranks:
        return case.conclude("rank left out", missing=sorted({*range(data_ranks)} - {*senders}), noun=noun)
    if case.program.uneven:  # All are in it, but count alike, as if their shares were equally large.
        return case.conclude("uneven")
    sums = ", ".join(f"{total:.3g}" for total in counts.sum(1).tolist())
    return case.conclude("scaled", "unequally", sums=sums, shrink=bool((counts.sum(1) < 1).all()))


def _diagnose_micro_batches(case: ComparedCase, counts: Tensor) -> Finding:
    """Say how micro-batches count, by how often each of (data ranks, micro-batches) is in a gradient."""
    means = counts.mean(0).tolist()
    if not all(is_near(mean, 1) for mean in means):
        times = ", ".join(f"{round(mean, 6) + 0.0:.3g}" for mean in means)  # Adding 0.0 makes 0 of -0.
        return case.conclude("accumulation", times=times)
    # Of an unsent one this rank has its own part alone: those of the first and last data rank differ.
    unsent = [number for number, (first, *_, last) in enumerate(counts.T.tolist(), 1) if not is_near(first, last)]
    return case.conclude("accumulation", "unsent", unsent=unsent, count=len(means))


def _diagnose_own_gradient(case: ComparedCase, name: str) -> Finding:
    """Say why each rank has its own gradient: nothing or too little was sent, or what was received is not used."""
    elements = sum(value.numel() for value in case.reference.record.at("gradient", 1).values())  # As in every step.
    launches = case.launches(GRADIENT_PHASES, case.differences[0].step - 1)  # They count steps from 0.
    reductions = [launch for launch in launches if "gather" not in launch.name]  # Weights are gathered.
    sent = sum(launch.elements for launch in reductions)
    if reductions and sent >= elements and not case.program.no_sync:  # With it, one micro-batch's were sent.
        return case.conclude("not waited for", launches=reductions, name=name)
    facts = {"sent": sent if reductions else None, "elements": elements * case.program.micro_batches}
    return case.conclude("not synchronized", "gradient", launches=(), name=name, **facts)


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
        if not any(name in report.owned for report in case.reports):
            return case.conclude("left out", "of optimizer")
        if len(ranks_off_first) == rank_count:
            return case.conclude("left out", "unchanged", launches=sent)
        return case.conclude("not sent", "unchanged", launches=sent, ranks=ranks_off_first)
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
                facts["differ"] = len({report.record.rates.get(step) for report in case.reports}) > 1
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
