"""``fsdp_accounting``: what fully sharded ranks hold, and whether weights are gathered in time."""

from cs336sys.accounting.answers.memory import state_answers
from cs336sys.report.account.answers import answers_table
from cs336sys.report.course.evidence import Evidence, Found
from cs336sys.report.course.problem import Answer, Part, Problem, pictures_of, runs_of
from cs336sys.report.course.problems.ddp import exposed_words, other_size, rows_of, setup_words
from cs336sys.report.course.problems.sharding import STEP_COLUMNS, by_strategy, shard_command, sharded
from cs336sys.report.course.target import GIB, Command, Handout, Target, arithmetic
from cs336sys.report.course.words import derived_value, gib, joined, ms, percent, spread
from cs336sys.report.noise import Interval
from cs336sys.report.parallel.shard import memory_of
from cs336sys.results import Cell, Run
from cs336sys.sizes import SIZES

# Bytes a parameter that FSDP shards and the other does not: parameters, gradients and AdamW's moments in fp32, or these
# but for the moments.
_SHARDED_BYTES = {"none": 16, "optimizer": 8}
_AGAINST = {"none": "no sharding", "optimizer": "optimizer-state sharding"}


def fsdp_memory(evidence: Evidence, handout: Handout) -> Answer:
    answers = state_answers(SIZES[handout.xl], 2, "fsdp")
    saved = {
        name: one for one in answers for name in ("none", "optimizer") if one.quantity.endswith(f"less than {name}")
    }
    sentences = [
        "FSDP leaves each of N ranks 1 / N of the parameters p, the gradients g and the optimizer state o; without "
        "sharding a rank holds all of them, with optimizer-state sharding all of p and g.",
        f"On 2 ranks, for {handout.called(handout.xl)}, that should save {derived_value(saved['none'])} of what a rank "
        f"without sharding holds when all of it exists, and {derived_value(saved['optimizer'])} of what one with "
        "optimizer-state sharding does.",
    ]
    found = sharded(evidence, handout, "none", "optimizer", "fsdp")
    group = next((one for one in found if {"none", "fsdp"} <= by_strategy(one).keys()), None)
    runs: tuple[Run, ...] = ()
    if group is not None:
        cells = by_strategy(group)
        peak = {name: cell.derived["peak_gib"] or _peak(cell) for name, cell in cells.items()}
        runs = tuple(runs_of([group]))
        savings = {name: peak[name] - peak["fsdp"] for name in _SHARDED_BYTES if name in peak}
        # Of the size that was measured, which may be another than the handout's.
        left_out = cells["fsdp"].derived["parameters"] * (1 - 1 / cells["fsdp"].configuration["world_size"]) / GIB
        shares = {name: saving / (_SHARDED_BYTES[name] * left_out) for name, saving in savings.items()}
        listed = [
            f"{gib(saving)} against {_AGAINST[name]} ({percent(100 * shares[name])} of what is expected)"
            for name, saving in savings.items()
        ]
        sentences += [
            f"Measured at the peak: {joined(f'{gib(value)} ({name})' for name, value in peak.items())}.",
            f"FSDP saves {joined(listed)}"
            + ("; what is missing are the weights that it gathers." if max(shares.values()) < 1 else "."),
        ]
    return Answer(sentences, [answers_table("state", "training state of a rank, FSDP on 2 ranks", answers)], {}, runs)


def _peak(cell: Cell) -> float:
    """By the allocator's events, which a CPU has, too."""
    return max((held.total_gib for held in memory_of(cell)["measured"]), default=0.0)


def fsdp_gathers(evidence: Evidence, handout: Handout) -> Answer | None:
    found = sharded(evidence, handout, "fsdp")
    groups: list[Found] = []
    there: set[int] = set()
    for group in found:
        kept = [cell for cell in group.measured if cell.derived.get("gathers")]
        prefetched = {cell.configuration["prefetch"] for cell in kept}
        # Of two invocations with the same, the one that measured more says it.
        if prefetched - there:
            groups.append(Found(group.invocation, kept))
        there |= prefetched
    if not groups:
        return None
    sentences, tables = [f"Setup: {setup_words(groups[0], handout)}."], []
    for group in groups:
        for cell in sorted(group.cells, key=lambda cell: cell.configuration["prefetch"]):
            sentences += _late_words(cell)
        tables += group.table("gathers")
        tables += group.table("shard", *STEP_COLUMNS, "bare_ms")
    for group in groups:
        for row in sorted(rows_of(group, "shard"), key=lambda row: row["prefetch"]):
            if isinstance(row.get("exposed_ms"), Interval):
                sentences.append(
                    f"With prefetch {row['prefetch']} communication costs the step "
                    f"{exposed_words(row['exposed_ms']).rstrip(',')}."
                )
    pictures = pictures_of(groups, "timelines")
    missing = other_size(groups[0], handout)
    missing += [f"prefetch {count}" for count in (0, 1, 2) if count not in there]
    return Answer(sentences, tables, pictures, runs_of(groups), missing)


def _late_words(cell: Cell) -> list[str]:
    forward = [gather["late_ms"] for gather in cell.derived["gathers"] if not gather["is_backward"]]
    if not forward:
        return []
    late = [value for value in forward if value > 0]
    prefetch = cell.configuration["prefetch"]
    sentence = (
        f"Gathering {prefetch} block{'s' * (prefetch != 1)} ahead, {len(forward) - len(late)} of {len(forward)} "
        "all-gathers of the forward pass finish before their weights are needed"
    )
    if not late:
        return [sentence + f", by {spread([-value for value in forward], ms)}: the communication finishes in time."]
    share = sum(late) / cell.samples["forward"].median
    return [
        f"{sentence}; the others come {spread(late, ms)} late, {ms(sum(late))} together, {percent(100 * share)} of the "
        f"forward pass: {'it does not always finish' if len(late) < len(forward) else 'none finishes'} in time."
    ]


def fsdp_commands(target: Target) -> list[Command]:
    options = {"precision": ("bf16",), "prefetch": ("0", "1", "2")}
    return [shard_command(target, "none,fsdp", options, 4)]


FSDP_ACCOUNTING = Problem(
    "fsdp_accounting",
    "FSDP accounting",
    (
        Part(
            "a",
            fsdp_memory,
            lambda target: arithmetic(
                "account", "memory", "--size", target.handout.xl, "--strategy", "none,optimizer,fsdp"
            ),
        ),
        Part("b", fsdp_gathers, fsdp_commands),
    ),
)
