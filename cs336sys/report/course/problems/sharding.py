"""``optimizer_state_sharding_accounting`` and ``fsdp_accounting``: what ranks hold, and how long their steps take."""

from functools import partial
from typing import Any

from cs336sys.accounting.sharding.ideal import state_answers
from cs336sys.report.course.answer import Answer, facts_of, where
from cs336sys.report.course.evidence import Selection, measured_of
from cs336sys.report.course.problem import Command, Target
from cs336sys.report.course.problems.ddp import write_setup, xl_command
from cs336sys.report.shard import COMPONENTS
from cs336sys.sizes import SIZES

_STEP_COLUMNS = ("strategy", "prefetch", "step_ms", "speedup", "exposed_ms", "calls", "sent_bytes", "bare_ms", "status")
_MEMORY_COLUMNS = ("strategy", "moment", *(f"{part}_gib" for part in COMPONENTS), "total_gib")
_SHARDED = ("optimizer", "optimizer-flat")
_MOMENTS = ("initialized", "before the first optimizer step", "after the first optimizer step")


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


def _sharded_steps(answer: Answer) -> list[Selection]:
    """Find steps with and without a sharded optimizer, a precision each, launched ones before those in CUDA graphs."""
    runs = [
        Selection(group.invocation, [cell for cell in group.cells if cell.configuration["precision"] == precision])
        for graph in ("off", "on")
        for group in _shard_steps(answer, "none", *_SHARDED, cuda_graph=graph)
        if group.setting("cuda_graph") == graph
        for precision in dict.fromkeys(cell.configuration["precision"] for cell in group.cells)
    ]
    return [group for group in runs if "none" in group.by("strategy") and len(group.by("strategy")) > 1]


def memory(answer: Answer) -> None:
    # Asked are the moments of the first step, which earlier versions did not record.
    def order(run: Selection) -> tuple[int, bool]:
        moments = {row["moment"] for row in where(run.rows("memory"), source="measured")}
        return -len(moments & {*_MOMENTS}), not _is_as_asked(run)

    runs = sorted(_sharded_steps(answer), key=order)
    for group in [run for run in runs if run.invocation is runs[0].invocation]:
        answer.show([group], "memory", *_MEMORY_COLUMNS, keep=partial(where, source="measured"))
        write_setup(answer, group)
        facts = {"plain": facts_of(group.by("strategy")["none"]), "asked": _MOMENTS}
        answer.write("sharding.memory", rows=where(group.rows("memory"), source="measured"), **facts)
        answer.draw([group], "memory")


def speeds(answer: Answer) -> None:
    runs = [group for group in _sharded_steps(answer) if "optimizer" in group.by("strategy")]
    runs.sort(key=lambda group: (not _is_as_asked(group), -group.setting("steps")))
    groups = list({run.setting("precision"): run for run in reversed(runs)}.values())[::-1]
    for group in groups:
        answer.show([group], "shard", *_STEP_COLUMNS, medians=True)
        write_setup(answer, group)
        answer.write("sharding.speeds", cells=group.by("strategy"), strategies=_SHARDED)
    measured = [group.cells[0].configuration for group in groups]
    answer.lack_unmeasured("the same in {precision}", measured, {"precision": ("fp32", "bf16")} if groups else {})


def against_zero(answer: Answer) -> None:
    answers = [a for strategy in _SHARDED for a in state_answers(SIZES[answer.handout.xl], 2, strategy)]
    answer.derive([a for a in answers if a.question.endswith("(c)")], "sent", "what each sends, optimizer-flat second")
    answer.write("sharding.against_zero")


def shard_commands(target: Target) -> list[Command]:
    flags = ("--strategy", "none,optimizer,optimizer-flat")
    return [xl_command(target, "shard", *flags, cells=6, precision=("fp32", "bf16"))]


def fsdp_memory(answer: Answer) -> None:
    answers = state_answers(SIZES[answer.handout.xl], 2, "fsdp")
    answer.derive(answers, "state", "training state of a rank, FSDP on 2 ranks")
    # Bytes a parameter that FSDP shards and the other does not: parameters, gradients and AdamW's moments in fp32, or
    # these but for the moments.
    per_parameter = {"none": 16, "optimizer": 8}
    savings = {name: next(a for a in answers if a.quantity.endswith(f"less than {name}")) for name in per_parameter}
    facts: dict[str, Any] = {"peaks": {}, "cell": {}}
    runs = _shard_steps(answer, "none", "optimizer", "fsdp")
    for group in [run for run in runs if {"none", "fsdp"} <= run.by("strategy").keys()][:1]:
        at_peak = partial(where, source="measured", moment="peak")
        answer.show([group], "memory", *_MEMORY_COLUMNS, keep=at_peak)
        write_setup(answer, group)
        facts = {"peaks": {row["strategy"]: row for row in at_peak(group.rows("memory"))}}
        facts["cell"] = facts_of(group.by("strategy")["fsdp"])
    answer.write("sharding.fsdp_memory", savings=savings, per_parameter=per_parameter, parts=COMPONENTS, **facts)


def fsdp_gathers(answer: Answer) -> None:
    runs = [run.only(lambda cell: cell.derived.get("gathers")) for run in _shard_steps(answer, "fsdp")]
    groups: list[Selection] = []
    prefetches: set[int] = set()
    for group in [run for run in runs if run.measured]:
        # Of two invocations with the same, the one that measured more says it.
        groups += [group] if group.by("prefetch").keys() - prefetches else []
        prefetches |= group.by("prefetch").keys()
    if not groups:
        return
    in_graphs = list(filter(_is_as_asked, _shard_steps(answer, "fsdp", cuda_graph="on")))
    cells = sorted(map(facts_of, measured_of(groups)), key=lambda cell: cell["prefetch"])
    settled = sorted(map(facts_of, measured_of(in_graphs)), key=lambda cell: cell["prefetch"])
    # Steps of one cell that differ by more have not settled, or something else ran.
    unsettled = [cell for cell in cells if max(cell["step"].measured) > 1.1 * min(cell["step"].measured)]
    # What communication costs follows from no unsettled steps.
    columns = [name for name in _STEP_COLUMNS if name not in ("speedup", "exposed_ms") or not unsettled]
    answer.show(groups, "gathers")
    answer.show(groups, "shard", *columns, medians=True)
    answer.show(in_graphs, "shard", *_STEP_COLUMNS, medians=True)
    answer.draw(groups, "timelines")
    write_setup(answer, groups[0], *in_graphs)
    answer.write("sharding.fsdp_gathers", cells=cells, unsettled=unsettled, settled=settled)
    answer.lack_unmeasured("prefetch {prefetch}", cells, {"prefetch": (0, 1, 2)})


def fsdp_commands(target: Target) -> list[Command]:
    options = {"precision": ("bf16",), "prefetch": ("0", "1", "2")}
    return [xl_command(target, "shard", "--strategy", "none,fsdp", cells=4, **options)]
