"""Explain a wrong gradient as a combination of those that micro-batches have by themselves."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cs336sys.commands.verify.comparison import GRADIENT_PHASES, ComparedCase, TensorDifference, with_facts
from cs336sys.commands.verify.training import gradients_of_shares
from cs336sys.findings import Finding
from cs336sys.parity.proportion import RELATIVE_TOLERANCE, is_near, scale_factor
from cs336sys.parity.weights import norm


def diagnose_gradient(case: ComparedCase, first: TensorDifference) -> Finding:
    """Explain the first gradient that is off, and others of its step."""
    step = first.step
    early = [launch for launch in case.launches(("backward",)) if launch.incomplete]
    if early:  # Launched before the backward pass had completed what they sent: the first names one of its gradients.
        return case.conclude("too early", launches=early[:1], parameter=early[0].incomplete[0])
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
    senders = (counts.abs() > RELATIVE_TOLERANCE).any(dim=1).nonzero().flatten().tolist()
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
    return case.conclude("scaled", "unequally", sums=sums)


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
