"""``optimizer_state_sharding_accounting`` and ``fsdp_accounting``: what ranks hold, and how long their steps take."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.ideal import sent_bytes, state_answers
from cs336sys.accounting.sharding.step import RankMemory
from cs336sys.report.course.answer import ALIKE, Answer, faster, gib, times
from cs336sys.report.course.evidence import Selection
from cs336sys.report.course.problem import Command, Target
from cs336sys.report.course.problems.ddp import lack_xl, rows_of, say_setup, xl_command
from cs336sys.report.numbers import format_operand
from cs336sys.report.shard import COMPONENTS, memory_of
from cs336sys.results.model import Cell
from cs336sys.results.statistics import Interval
from cs336sys.sizes import SIZES

_STEP_COLUMNS = (
    *("size", "precision", "compile", "strategy", "prefetch", "step_ms", "speedup", "exposed_ms", "calls"),
    *("sent_bytes", "status"),
)
_SHARDED = ("optimizer", "optimizer-flat")

_MOMENTS = {
    "initialized": "after initialization",
    "before the first optimizer step": "directly before the first optimizer step",
    "after the first optimizer step": "directly after it",
    "before the optimizer": "with gradients and optimizer state, directly before the second one",
    "after the optimizer": "after the second step (gradients dropped)",
    "peak": "at the peak of the second step",
}


def _shard_steps(answer: Answer, *strategies: str, cuda_graph: str = "off") -> list[Selection]:
    """Find steps of the handout's xl by these strategies on two ranks."""
    plain = {"compile": ("off",), "cuda_graph": (cuda_graph,), "checkpointing": ("none",)}
    wanted = {"size": (answer.handout.xl,), "world_size": (2,), "context": (512,), "batch_size": (4,), **plain}
    return answer.find("shard", wanted, strategy=strategies)


def _is_as_asked(group: Selection) -> bool:
    """Trained with the handout's own attention and AdamW."""
    return (group.setting("attention"), group.setting("optimizer")) == ("reference", "course")


def _sharded_steps(answer: Answer) -> list[Selection]:
    """Find steps with and without a sharded optimizer, launched ones before those in CUDA graphs."""
    graphs = ("off", "on")
    return [group for graph in graphs for group in _shard_steps(answer, "none", *_SHARDED, cuda_graph=graph)]


def _by_precision(runs: Sequence[Selection]) -> list[Selection]:
    """For each precision the first invocation that measured it together with plain data parallel training."""
    groups: dict[str, Selection] = {}
    for group in runs:
        for precision in dict.fromkeys(cell.configuration["precision"] for cell in group.cells):
            if group.of(precision=precision, strategy="none") and precision not in groups:
                cells = [cell for cell in group.cells if cell.configuration["precision"] == precision]
                groups[precision] = Selection(group.invocation, cells)
    return list(groups.values())


def memory(answer: Answer) -> None:
    runs = [group for group in _sharded_steps(answer) if len(group.by("strategy")) > 1]
    if not runs:
        return
    # Asked are the moments of the first step, which earlier versions did not record.
    runs.sort(key=lambda group: (-_recorded_of_first_step(group), not _is_as_asked(group)))
    groups = _by_precision(runs[:1]) or runs[:1]
    rows: list[dict] = []
    for group in groups:
        cells, precision = group.by("strategy"), group.setting("precision")
        where = f" in {precision}" * (len(groups) > 1)
        moments = {name: rank_moments for name, cell in cells.items() if (rank_moments := _held_at_moments(cell))}
        for name, rank_moments in moments.items():
            answer.say(f"held with {name}", where=where, moments=rank_moments)
            rows += [{"precision": precision, "strategy": name, **moment} for moment in rank_moments]
        _say_saved(answer, cells, where)
        for name, rank_moments in moments.items():
            # The last moment that has optimizer state.
            for moment in [moment for moment in rank_moments if moment["optimizer_state_gib"]][-1:]:
                parts = [{"part": header, "gib": moment[f"{part}_gib"]} for part, header in COMPONENTS.items()]
                answer.say("of these", moment, strategy=name, parts=[part for part in parts if part["gib"]])
    say_setup(answer, runs[0])
    headers = {name: name for name in ("precision", "strategy", "moment")}
    headers |= {f"{part}_gib": header for part, header in COMPONENTS.items()} | {"total_gib": "total"}
    answer.add_table("memory", "memory of the rank that holds most", headers, rows)
    lack_xl(answer, groups[0])
    recorded = _recorded_of_first_step(groups[0])
    if recorded < 2:
        answer.lack("after the first step" if recorded else "first step")
    answer.draw([Selection(groups[0].invocation, [cell for group in groups for cell in group.measured])], "memory")
    answer.measured_by(groups)


def _recorded_of_first_step(group: Selection) -> int:
    """Return how many moments of the first step were recorded."""
    moments = {moment["moment"] for cell in group.measured for moment in cell.derived["memory"]}
    return sum("first" in moment for moment in moments)


def _held_at_moments(cell: Cell) -> list[dict[str, Any]]:
    """Return what the fullest rank holds at the moments that the handout asks for, and at the peak.

    Directly after the first step: parameters, gradients and the state that it made. Where it was not recorded, the
    moment before the second step stands for it, which holds the same.
    """
    moments: dict[str, RankMemory] = {memory.moment: memory for memory in memory_of(cell)["measured"]}
    if "after the first optimizer step" in moments:
        moments.pop("before the optimizer", None)
    return [
        {"moment": _MOMENTS.get(moment, moment), "total_gib": rank_memory.total_gib}
        | {f"{part}_gib": getattr(rank_memory, part) / GIB for part in COMPONENTS}
        for moment, rank_memory in moments.items()
    ]


def _say_saved(answer: Answer, cells: dict[str, Cell], where: str) -> None:
    """Report what each strategy saves of the peak and of the optimizer state."""
    if "none" not in cells:
        return
    plain = cells["none"]
    ranks = plain.configuration["world_size"]
    expected = 8 * plain.derived["parameters"] * (1 - 1 / ranks) / GIB
    for name in _SHARDED:
        if name in cells:
            state = _most_gib(plain, "optimizer_state") - _most_gib(cells[name], "optimizer_state")
            # By the allocations, as all that is said of moments; the table of steps has the allocator's counter.
            peaks = [_most_gib(cell, "total") for cell in (plain, cells[name])]
            saved = f"{gib(peaks[0] - peaks[1])} of the peak and " if all(peaks) else ""
            share = "half" if ranks == 2 else f"{ranks - 1} / {ranks}"
            facts = {"strategy": name, "where": where, "saved": saved, "state": state, "share": share}
            answer.say("saves", facts, expected=expected, as_expected=abs(state / expected - 1) <= 0.05)


def _most_gib(cell: Cell, part: str) -> float:
    """The most of a part that the fullest rank held, by its allocations."""
    return max((getattr(moment, part) for moment in memory_of(cell)["measured"]), default=0) / GIB


def speeds(answer: Answer) -> None:
    runs = [group for group in _sharded_steps(answer) if {"none", "optimizer"} <= group.by("strategy").keys()]
    if not runs:
        return
    runs.sort(key=lambda group: (not _is_as_asked(group), -group.setting("steps")))
    groups = _by_precision(runs)
    for group in groups:
        cells = group.by("strategy")
        for name in _SHARDED:
            if name in cells:
                _say_step(answer, cells["none"], cells[name])
        answer.show([group], "shard", *_STEP_COLUMNS, medians=True)
    say_setup(answer, *groups)
    lack_xl(answer, runs[0])
    answer.lack_unmeasured("same in", [group.cells[0].configuration for group in groups], precision=("fp32", "bf16"))


def _say_step(answer: Answer, plain: Cell, sharded: Cell) -> None:
    """Compare a step with a sharded optimizer and one without, part by part."""
    before, after = plain.samples, sharded.samples
    parts: list[dict[str, Any]] = [
        {"part": part, "before": before[part].median, "after": after[part].median}
        for part in ("forward", "backward", "synchronize", "optimizer")
        if part in before and part in after
    ]
    longer = after["step"].median - before["step"].median
    rest = longer - sum(part["after"] - part["before"] for part in parts)
    waits = "forward" in before and after["forward"].median > (1 + ALIKE) * before["forward"].median
    facts = {**sharded.configuration, "plain": before["step"], "sharded": after["step"]}
    facts |= {"faster": faster(before["step"], after["step"]), "in_graphs": facts["cuda_graph"] == "on"}
    answer.say("step", facts, medians={"parts": parts, "rest": rest, "waits": waits} if parts else None)


def against_zero(answer: Answer) -> None:
    answer.say("ZeRO")
    ours, flat, none = (float(sent_bytes(name, 4, 2)) for name in (*_SHARDED, "none"))
    answer.say("the handout's way", bytes=ours / none, of_zero="as many" if flat == none else times(flat / none))
    for scheme, strategy in (("the handout's way", "optimizer"), ("ZeRO stage 1", "optimizer-flat")):
        answers = state_answers(SIZES[answer.handout.xl], 2, strategy)
        sent = next(value for value in answers if value.question.endswith("(c)"))
        answer.say("sent", xl=answer.handout.xl, scheme=scheme, derivation=sent.derivation(format_operand), value=sent)
    answer.say("optimizer-flat")


def shard_commands(target: Target) -> list[Command]:
    flags = ("--strategy", "none,optimizer,optimizer-flat")
    return [xl_command(target, "shard", *flags, cells=6, precision=("fp32", "bf16"))]


# Bytes a parameter that FSDP shards and the other does not: parameters, gradients and AdamW's moments in fp32, or these
# but for the moments.
_SHARDED_BYTES = {"none": 16, "optimizer": 8}


def fsdp_memory(answer: Answer) -> None:
    answers = state_answers(SIZES[answer.handout.xl], 2, "fsdp")
    savings = {name: next(a for a in answers if a.quantity.endswith(f"less than {name}")) for name in _SHARDED_BYTES}
    answer.say("a share of each")
    answer.say("should save", savings, xl=answer.handout.xl)
    answer.derive(answers, "state", "training state of a rank, FSDP on 2 ranks")
    runs = _shard_steps(answer, "none", "optimizer", "fsdp")
    for group in [run for run in runs if {"none", "fsdp"} <= run.by("strategy").keys()][:1]:
        answer.measured_by([group])
        say_setup(answer, group)
        cells = group.by("strategy")
        peak = {name: _most_gib(cell, "total") or cell.derived["peak_gib"] for name, cell in cells.items()}
        answer.say("peaks", peaks=[{"strategy": name, "gib": value} for name, value in peak.items()])
        # Of the size that was measured, which may be another than the handout's.
        fsdp = cells["fsdp"]
        left_out = fsdp.derived["parameters"] * (1 - 1 / fsdp.configuration["world_size"]) / GIB
        saved = {name: peak[name] - peak["fsdp"] for name in _SHARDED_BYTES if name in peak}
        shares = {name: 100 * saved[name] / (_SHARDED_BYTES[name] * left_out) for name in saved}
        rows = [{"is_none": name == "none", "gib": saved[name], "share": shares[name]} for name in saved]
        answer.say("FSDP saves", savings=rows, is_less=max(shares.values()) < 100)


def fsdp_gathers(answer: Answer) -> None:
    groups: list[Selection] = []
    prefetches: set[int] = set()
    for group in _shard_steps(answer, "fsdp"):
        chosen = group.only(lambda cell: cell.status == "ok" and cell.derived.get("gathers"))
        # Of two invocations with the same, the one that measured more says it.
        if chosen.by("prefetch").keys() - prefetches:
            groups.append(chosen)
        prefetches |= chosen.by("prefetch").keys()
    if not groups:
        return
    for group in groups:
        cells = sorted(group.cells, key=lambda cell: cell.configuration["prefetch"])
        for cell in cells:
            _say_late(answer, cell)
        answer.show([group], "gathers")
        answer.show([group], "shard", *_STEP_COLUMNS, "bare_ms", medians=True)
        steps = [{**cell.configuration, "steps": cell.samples["step"].measured} for cell in cells]
        # Steps of one cell that differ by more have not settled, or something else ran.
        unsettled = [step for step in steps if max(step["steps"]) > 1.1 * min(step["steps"])]
        if unsettled:
            forwards = [cell.samples["forward"].median for cell in cells]
            answer.say("not settled", cells=unsettled, forwards=forwards)
    for group in filter(_is_as_asked, _shard_steps(answer, "fsdp", cuda_graph="on")):
        answer.say("in graphs", steps=sorted(rows_of(group, "shard"), key=itemgetter("prefetch")))
        answer.show([group], "shard", *_STEP_COLUMNS, "bare_ms", medians=True)
    for group in groups:
        for row in sorted(rows_of(group, "shard"), key=itemgetter("prefetch")):
            if isinstance(row.get("exposed_ms"), Interval):
                answer.say("cost of communication", row)
    say_setup(answer, groups[0])
    answer.draw(groups, "timelines")
    lack_xl(answer, groups[0])
    answer.lack_unmeasured("prefetch", [{"prefetch": count} for count in prefetches], prefetch=(0, 1, 2))


def _say_late(answer: Answer, cell: Cell) -> None:
    forward = [gather["late_ms"] for gather in cell.derived["gathers"] if not gather["is_backward"]]
    late = [value for value in forward if value > 0]
    facts = {**cell.configuration, "in_time": len(forward) - len(late), "of": len(forward)}
    if late:
        answer.say("some late", facts, late=late, together=sum(late))
    elif forward:
        answer.say("all in time", facts, early=[-value for value in forward])


def fsdp_commands(target: Target) -> list[Command]:
    options = {"precision": ("bf16",), "prefetch": ("0", "1", "2")}
    return [xl_command(target, "shard", "--strategy", "none,fsdp", cells=4, **options)]
