"""``optimizer_state_sharding_accounting`` and ``fsdp_accounting``: what ranks hold, and how long their steps take."""

from collections.abc import Sequence
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

# Steps of one cell that differ by more have not settled, or something else ran.
_UNSETTLED = 1.1


def _steps(answer: Answer, *strategies: str, cuda_graph: str = "off") -> list[Selection]:
    """Find steps of the handout's xl by these strategies on two ranks."""
    plain = {"compile": ("off",), "cuda_graph": (cuda_graph,), "checkpointing": ("none",)}
    wanted = {"size": (answer.handout.xl,), "world_size": (2,), "context": (512,), "batch_size": (4,), **plain}
    return answer.find("shard", wanted, strategy=strategies)


def _is_as_asked(group: Selection) -> bool:
    """Trained with the handout's own attention and AdamW."""
    names = group.cells[0].configuration
    return (names["attention"], names["optimizer"]) == ("reference", "course")


def _sharded_steps(answer: Answer) -> list[Selection]:
    """Find steps with and without a sharded optimizer, launched ones before those in CUDA graphs."""
    return [group for cuda_graph in ("off", "on") for group in _steps(answer, "none", *_SHARDED, cuda_graph=cuda_graph)]


def _by_strategy(group: Selection) -> dict[str, Cell]:
    """The measured cells of one invocation."""
    return {cell.configuration["strategy"]: cell for cell in group.measured}


def _precision(group: Selection) -> str:
    return group.cells[0].configuration["precision"]


def _by_precision(groups_of_runs: Sequence[Selection]) -> list[Selection]:
    """For each precision the first invocation that measured it together with plain data parallel training."""
    groups: dict[str, Selection] = {}
    for group in groups_of_runs:
        for precision in dict.fromkeys(cell.configuration["precision"] for cell in group.cells):
            cells = [cell for cell in group.cells if cell.configuration["precision"] == precision]
            chosen = Selection(group.invocation, cells)
            if "none" in _by_strategy(chosen):
                groups.setdefault(precision, chosen)
    return list(groups.values())


def memory(answer: Answer) -> None:
    runs = [group for group in _sharded_steps(answer) if len(_by_strategy(group)) > 1]
    if not runs:
        return
    # Asked are the moments of the first step, which earlier versions did not record.
    runs.sort(key=lambda group: (-_recorded_of_first_step(group), not _is_as_asked(group)))
    groups = _by_precision(runs[:1]) or runs[:1]
    rows: list[dict] = []
    for group in groups:
        cells, where = _by_strategy(group), f" in {_precision(group)}" * (len(groups) > 1)
        moments = {name: rank_moments for name, cell in cells.items() if (rank_moments := _held(cell))}
        for name, rank_moments in moments.items():
            answer.say(f"held with {name}", where=where, moments=rank_moments)
            rows += [{"precision": _precision(group), "strategy": name, **moment} for moment in rank_moments]
        _say_saved(answer, cells, where)
        for name, rank_moments in moments.items():
            _say_parts(answer, name, rank_moments)
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
    return len(
        {m for cell in group.measured for moment in cell.derived["memory"] if "first" in (m := moment["moment"])}
    )


def _held(cell: Cell) -> list[dict[str, Any]]:
    """Return what the fullest rank holds at the moments that the handout asks for, and at the peak.

    Directly after the first step: parameters, gradients and the state that it made. Where it was not recorded, the
    moment before the second step stands for it, which holds the same.
    """
    moments: dict[str, RankMemory] = {memory.moment: memory for memory in memory_of(cell)["measured"]}
    descriptions = {
        "initialized": "after initialization",
        "before the first optimizer step": "directly before the first optimizer step",
        "after the first optimizer step": "directly after it",
        "before the optimizer": "with gradients and optimizer state, directly before the second one",
        "after the optimizer": "after the second step (gradients dropped)",
        "peak": "at the peak of the second step",
    }
    return [
        {"moment": descriptions.get(moment, moment), "total_gib": rank_memory.total_gib}
        | {f"{part}_gib": getattr(rank_memory, part) / GIB for part in COMPONENTS}
        for moment, rank_memory in moments.items()
        if moment != "before the optimizer" or "after the first optimizer step" not in moments
    ]


def _say_parts(answer: Answer, strategy: str, moments: Sequence[dict]) -> None:
    """Break down the last moment that has optimizer state."""
    at = next((at for at in reversed(moments) if at["optimizer_state_gib"]), None)
    if at is not None:
        parts = [{"part": header, "gib": at[f"{part}_gib"]} for part, header in COMPONENTS.items()]
        answer.say("of these", at, strategy=strategy, parts=[part for part in parts if part["gib"]])


def _say_saved(answer: Answer, cells: dict[str, Cell], where: str) -> None:
    """Report what each strategy saves of the peak and of the optimizer state."""
    if "none" not in cells:
        return
    plain = cells["none"]
    ranks = plain.configuration["world_size"]
    expected = 8 * plain.derived["parameters"] * (1 - 1 / ranks) / GIB
    for name in _SHARDED:
        if name in cells:
            state = _state(plain) - _state(cells[name])
            # By the allocations, as all that is said of moments; the table of steps has the allocator's counter.
            peaks = [_recorded_peak_gib(cell) for cell in (plain, cells[name])]
            saved = f"{gib(peaks[0] - peaks[1])} of the peak and " if all(peaks) else ""
            share = "half" if ranks == 2 else f"{ranks - 1} / {ranks}"
            facts = {"strategy": name, "where": where, "saved": saved, "state": state, "share": share}
            answer.say("saves", facts, expected=expected, as_expected=abs(state / expected - 1) <= 0.05)


def _recorded_peak_gib(cell: Cell) -> float:
    """The most that the fullest rank held, by its allocations."""
    return max((rank_memory.total_gib for rank_memory in memory_of(cell)["measured"]), default=0.0)


def _state(cell: Cell) -> float:
    return max((rank_memory.optimizer_state for rank_memory in memory_of(cell)["measured"]), default=0) / GIB


def speeds(answer: Answer) -> None:
    runs = [group for group in _sharded_steps(answer) if {"none", "optimizer"} <= _by_strategy(group).keys()]
    if not runs:
        return
    runs.sort(key=lambda group: (not _is_as_asked(group), -group.cells[0].configuration["steps"]))
    groups = _by_precision(runs)
    for group in groups:
        cells = _by_strategy(group)
        before = cells["none"].samples
        for name in _SHARDED:
            if name in cells:
                after = cells[name].samples
                parts: list[dict[str, Any]] = [
                    {"part": part, "before": before[part].median, "after": after[part].median}
                    for part in ("forward", "backward", "synchronize", "optimizer")
                    if part in before and part in after
                ]
                longer = after["step"].median - before["step"].median
                rest = longer - sum(part["after"] - part["before"] for part in parts)
                waits = "forward" in before and after["forward"].median > (1 + ALIKE) * before["forward"].median
                steps = {"plain": before["step"], "sharded": after["step"]}
                facts = {"strategy": name, "faster": faster(*steps.values()), **steps}
                facts |= {"in_graphs": cells[name].configuration["cuda_graph"] == "on"}
                answer.say(
                    "step",
                    facts,
                    precision=_precision(group),
                    medians={"parts": parts, "rest": rest, "waits": waits} if parts else None,
                )
        answer.show([group], "shard", *_STEP_COLUMNS, medians=True)
    say_setup(answer, *groups)
    lack_xl(answer, runs[0])
    for precision in ("fp32", "bf16"):
        if precision not in map(_precision, groups):
            answer.lack("same in", precision=precision)


def against_zero(answer: Answer) -> None:
    answer.say("ZeRO")
    ours, flat, none = (float(sent_bytes(name, 4, 2)) for name in (*_SHARDED, "none"))
    answer.say("the handout's way", bytes=ours / none, of_zero="as many" if flat == none else times(flat / none))
    for called, strategy in (("the handout's way", "optimizer"), ("ZeRO stage 1", "optimizer-flat")):
        answers = state_answers(SIZES[answer.handout.xl], 2, strategy)
        answer_part = next(answer_part for answer_part in answers if answer_part.question.endswith("(c)"))
        facts = {
            "called_": called,
            "derivation": answer_part.derivation(format_operand),
            "value": answer_part,
            "reason": answer_part.reason,
        }
        answer.say("sent", facts, xl=answer.handout.xl)
    answer.say("optimizer-flat")


def shard_commands(target: Target) -> list[Command]:
    flags = ("--strategy", "none,optimizer,optimizer-flat")
    return [xl_command(target, "shard", *flags, cells=6, precision=("fp32", "bf16"))]


# ``fsdp_accounting``: what fully sharded ranks hold, and whether weights are gathered in time.


# Bytes a parameter that FSDP shards and the other does not: parameters, gradients and AdamW's moments in fp32, or these
# but for the moments.
_SHARDED_BYTES = {"none": 16, "optimizer": 8}


def fsdp_memory(answer: Answer) -> None:
    answers = state_answers(SIZES[answer.handout.xl], 2, "fsdp")
    none, optimizer = (
        next(answer_part for answer_part in answers if answer_part.quantity.endswith(f"less than {name}"))
        for name in _SHARDED_BYTES
    )
    answer.say("a share of each")
    answer.say("should save", xl=answer.handout.xl, none=none, optimizer=optimizer)
    answer.derive(answers, "state", "training state of a rank, FSDP on 2 ranks")
    runs = _steps(answer, "none", "optimizer", "fsdp")
    for group in [run for run in runs if {"none", "fsdp"} <= _by_strategy(run).keys()][:1]:
        answer.measured_by([group])
        say_setup(answer, group)
        cells = _by_strategy(group)
        peak = {name: _recorded_peak_gib(cell) or cell.derived["peak_gib"] for name, cell in cells.items()}
        answer.say("peaks", peaks=[{"strategy": name, "gib": value} for name, value in peak.items()])
        # Of the size that was measured, which may be another than the handout's.
        fsdp = cells["fsdp"]
        left_out = fsdp.derived["parameters"] * (1 - 1 / fsdp.configuration["world_size"]) / GIB
        savings = []
        for name, size in _SHARDED_BYTES.items():
            if name in peak:
                saving = peak[name] - peak["fsdp"]
                savings.append({"is_none": name == "none", "gib": saving, "share": 100 * saving / (size * left_out)})
        answer.say("FSDP saves", savings=savings, is_less=max(saved["share"] for saved in savings) < 100)


def fsdp_gathers(answer: Answer) -> None:
    groups: list[Selection] = []
    prefetches: set[int] = set()
    for group in _steps(answer, "fsdp"):
        kept = [cell for cell in group.measured if cell.derived.get("gathers")]
        prefetched = {cell.configuration["prefetch"] for cell in kept}
        # Of two invocations with the same, the one that measured more says it.
        if prefetched - prefetches:
            groups.append(Selection(group.invocation, kept))
        prefetches |= prefetched
    if not groups:
        return
    for group in groups:
        for cell in sorted(group.cells, key=lambda cell: cell.configuration["prefetch"]):
            _say_late(answer, cell)
        answer.show([group], "gathers")
        answer.show([group], "shard", *_STEP_COLUMNS, "bare_ms", medians=True)
        steps = [(cell.configuration["prefetch"], cell.samples["step"].measured) for cell in group.cells]
        unsettled = [{"prefetch": ahead, "steps": run} for ahead, run in steps if max(run) > _UNSETTLED * min(run)]
        if unsettled:
            forwards = [cell.samples["forward"].median for cell in group.cells]
            answer.say("not settled", cells=sorted(unsettled, key=lambda step: step["prefetch"]), forwards=forwards)
    for group in filter(_is_as_asked, _steps(answer, "fsdp", cuda_graph="on")):
        rows = sorted(rows_of(group, "shard"), key=lambda row: row["prefetch"])
        captured = [
            {"prefetch": row["prefetch"], "median": row["step_ms"].median, "alone": row["bare_ms"]} for row in rows
        ]
        answer.say("in graphs", steps=captured)
        answer.show([group], "shard", *_STEP_COLUMNS, "bare_ms", medians=True)
    for group in groups:
        for row in sorted(rows_of(group, "shard"), key=lambda row: row["prefetch"]):
            if isinstance(row.get("exposed_ms"), Interval):
                answer.say("cost of communication", row)
    say_setup(answer, groups[0])
    answer.draw(groups, "timelines")
    lack_xl(answer, groups[0])
    for count in (0, 1, 2):
        if count not in prefetches:
            answer.lack("prefetch", count=count)


def _say_late(answer: Answer, cell: Cell) -> None:
    forward = [gather["late_ms"] for gather in cell.derived["gathers"] if not gather["is_backward"]]
    if not forward:
        return
    late = [value for value in forward if value > 0]
    facts = {"prefetch": cell.configuration["prefetch"], "in_time": len(forward) - len(late), "of": len(forward)}
    if late:
        answer.say("some late", facts, late=late, together=sum(late))
    else:
        answer.say("all in time", facts, early=[-value for value in forward])


def fsdp_commands(target: Target) -> list[Command]:
    options = {"precision": ("bf16",), "prefetch": ("0", "1", "2")}
    return [xl_command(target, "shard", "--strategy", "none,fsdp", cells=4, **options)]
