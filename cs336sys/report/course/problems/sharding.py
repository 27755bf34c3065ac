"""``optimizer_state_sharding_accounting`` and ``fsdp_accounting``: what ranks hold, and how long their steps take."""

from typing import Any

from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.ideal import sent_bytes, state_answers
from cs336sys.report.course.answer import Answer, facts_of, where
from cs336sys.report.course.evidence import Selection, cells_of
from cs336sys.report.course.problem import Command, Target
from cs336sys.report.course.problems.ddp import write_setup, xl_command
from cs336sys.report.numbers import format_operand
from cs336sys.report.shard import COMPONENTS
from cs336sys.sizes import SIZES

_STEP_COLUMNS = ("strategy", "prefetch", "step_ms", "speedup", "exposed_ms", "calls", "sent_bytes", "status")
_MEMORY_COLUMNS = ("strategy", "moment", *(f"{part}_gib" for part in COMPONENTS), "total_gib")
_SHARDED = ("optimizer", "optimizer-flat")


def _shard_steps(answer: Answer, *strategies: str, cuda_graph: str = "off") -> list[Selection]:
    """Find steps of the handout's xl by these strategies on two ranks."""
    plain = {"compile": ("off",), "cuda_graph": (cuda_graph,), "checkpointing": ("none",)}
    wanted = {"size": (answer.handout.xl,), "world_size": (2,), "context": (512,), "batch_size": (4,), **plain}
    groups = answer.find("shard", wanted, strategy=strategies)
    # Launched steps do not stand for those in graphs.
    return [group for group in groups if cuda_graph == "off" or group.setting("cuda_graph") == "on"]


def _is_as_asked(group: Selection) -> bool:
    """Trained with the handout's own attention and AdamW."""
    return (group.setting("attention"), group.setting("optimizer")) == ("reference", "course")


def _sharded_steps(answer: Answer, *needed: str) -> list[Selection]:
    """Find steps with and without a sharded optimizer, a precision each, launched ones before those in CUDA graphs."""
    runs = [
        Selection(group.invocation, [cell for cell in group.cells if cell.configuration["precision"] == precision])
        for graph in ("off", "on")
        for group in _shard_steps(answer, "none", *_SHARDED, cuda_graph=graph)
        if group.setting("cuda_graph") == graph
        for precision in dict.fromkeys(cell.configuration["precision"] for cell in group.cells)
    ]
    return [group for group in runs if {"none", *needed} <= group.by("strategy").keys() and len(group.cells) > 1]


def _recorded_of_first_step(group: Selection) -> int:
    """Return how many moments of the first step were recorded."""
    return sum(
        "first" in moment for moment in {row["moment"] for row in group.rows("memory") if row["source"] == "measured"}
    )


def memory(answer: Answer) -> None:
    # Asked are the moments of the first step, which earlier versions did not record.
    runs = sorted(_sharded_steps(answer), key=lambda run: (-_recorded_of_first_step(run), not _is_as_asked(run)))
    groups = [run for run in runs if run.invocation is runs[0].invocation]
    for group in groups:
        answer.show([group], "memory", *_MEMORY_COLUMNS, keep=lambda row: row["source"] == "measured")
        write_setup(answer, group)
        recorded = _recorded_of_first_step(group)
        # The moment before the second step holds the same, and stands for the one after the first.
        repeated = "before the optimizer" if recorded == 2 else ""
        rows = [row for row in where(group.rows("memory"), source="measured") if row["moment"] != repeated]
        facts = {"parts": COMPONENTS, "plain": facts_of(group.by("strategy")["none"]), "gib": GIB}
        answer.write("sharding.memory", rows=rows, recorded=recorded, **facts)
        answer.draw([group], "memory")


def speeds(answer: Answer) -> None:
    runs = _sharded_steps(answer, "optimizer")
    runs.sort(key=lambda group: (not _is_as_asked(group), -group.setting("steps")))
    groups = list({run.setting("precision"): run for run in reversed(runs)}.values())[::-1]
    for group in groups:
        answer.show([group], "shard", *_STEP_COLUMNS, medians=True)
        answer.write("sharding.speeds", cells=group.by("strategy"), strategies=_SHARDED)
    if groups:
        write_setup(answer, *groups)
        measured = [group.cells[0].configuration for group in groups]
        answer.lack_unmeasured("the same in {precision}", measured, {"precision": ("fp32", "bf16")})


def against_zero(answer: Answer) -> None:
    bytes_sent = {name: float(sent_bytes(name, 4, 2)) for name in (*_SHARDED, "none")}
    sent = []
    for scheme, strategy in (("the handout's way", "optimizer"), ("ZeRO stage 1", "optimizer-flat")):
        answers = state_answers(SIZES[answer.handout.xl], 2, strategy)
        value = next(value for value in answers if value.question.endswith("(c)"))
        sent.append((scheme, value, value.derivation(format_operand)))
    answer.write("sharding.against_zero", bytes_sent=bytes_sent, sent=sent)


def shard_commands(target: Target) -> list[Command]:
    flags = ("--strategy", "none,optimizer,optimizer-flat")
    return [xl_command(target, "shard", *flags, cells=6, precision=("fp32", "bf16"))]


def fsdp_memory(answer: Answer) -> None:
    answers = state_answers(SIZES[answer.handout.xl], 2, "fsdp")
    # Bytes a parameter that FSDP shards and the other does not: parameters, gradients and AdamW's moments in fp32, or
    # these but for the moments.
    per_parameter = {"none": 16, "optimizer": 8}
    savings = {name: next(a for a in answers if a.quantity.endswith(f"less than {name}")) for name in per_parameter}
    answer.derive(answers, "state", "training state of a rank, FSDP on 2 ranks")
    runs = _shard_steps(answer, "none", "optimizer", "fsdp")
    facts: dict[str, Any] = {"cells": {}, "peaks": {}}
    for group in [run for run in runs if {"none", "fsdp"} <= run.by("strategy").keys()][:1]:
        answer.show(
            [group], "memory", *_MEMORY_COLUMNS, keep=lambda row: (row["source"], row["moment"]) == ("measured", "peak")
        )
        answer.measured_by([group])
        write_setup(answer, group)
        peaks = {row["strategy"]: row for row in where(group.rows("memory"), source="measured", moment="peak")}
        facts = {"cells": {name: facts_of(cell) for name, cell in group.by("strategy").items()}, "peaks": peaks}
    answer.write(
        "sharding.fsdp_memory", savings=savings, per_parameter=per_parameter, parts=COMPONENTS, gib=GIB, **facts
    )


def fsdp_gathers(answer: Answer) -> None:
    groups: list[Selection] = []
    prefetches: set[int] = set()
    for group in _shard_steps(answer, "fsdp"):
        chosen = group.only(lambda cell: cell.status == "ok" and cell.derived.get("gathers"))
        # Of two invocations with the same, the one that measured more says it.
        groups += [chosen] if chosen.by("prefetch").keys() - prefetches else []
        prefetches |= chosen.by("prefetch").keys()
    if not groups:
        return
    in_graphs = list(filter(_is_as_asked, _shard_steps(answer, "fsdp", cuda_graph="on")))
    cells = sorted(map(facts_of, cells_of(groups)), key=lambda cell: cell["prefetch"])
    # Steps of one cell that differ by more have not settled, or something else ran.
    unsettled = [cell for cell in cells if max(cell["step"].measured) > 1.1 * min(cell["step"].measured)]
    # What communication costs follows from no unsettled steps.
    columns = [name for name in _STEP_COLUMNS if name not in ("speedup", "exposed_ms") or not unsettled]
    for group in groups:
        answer.show([group], "gathers")
    for group in [*groups, *in_graphs]:
        answer.show([group], "shard", *(columns if group in groups else _STEP_COLUMNS), "bare_ms", medians=True)
    answer.draw(groups, "timelines")
    write_setup(answer, groups[0], *in_graphs)
    settled = sorted(map(facts_of, cells_of(in_graphs)), key=lambda cell: cell["prefetch"])
    answer.write("sharding.fsdp_gathers", cells=cells, unsettled=unsettled, settled=where(settled, status="ok"))
    answer.lack_unmeasured("prefetch {prefetch}", cells, {"prefetch": (0, 1, 2)})


def fsdp_commands(target: Target) -> list[Command]:
    options = {"precision": ("bf16",), "prefetch": ("0", "1", "2")}
    return [xl_command(target, "shard", "--strategy", "none,fsdp", cells=4, **options)]
