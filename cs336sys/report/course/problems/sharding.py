"""``optimizer_state_sharding_accounting``: what ranks hold, and how long their steps take."""

from cs336sys.accounting.sharding.ideal import sent_bytes, state_answers
from cs336sys.accounting.sharding.step import RankMemory
from cs336sys.report.account.answers import answers_table
from cs336sys.report.course.evidence import Evidence, Found, plain_table
from cs336sys.report.course.problem import (
    GIB,
    Answer,
    Command,
    Handout,
    Part,
    Problem,
    Sweep,
    Target,
    arithmetic,
    pictures_of,
    runs_of,
    state_gib,
)
from cs336sys.report.course.problems.ddp import exposed_words, other_size, rows_of, setup_words
from cs336sys.report.course.words import derived_value, faster, gib, joined, ms, percent, spread, times
from cs336sys.report.numbers import format_operand
from cs336sys.report.shard import COMPONENTS, memory_of
from cs336sys.report.table import Column, Table
from cs336sys.results.model import Cell, Run
from cs336sys.results.statistics import Interval
from cs336sys.sizes import SIZES

STEP_COLUMNS = (
    *("size", "precision", "compile", "strategy", "prefetch", "step_ms", "speedup", "exposed_ms", "calls"),
    *("sent_bytes", "peak_gib", "status"),
)
_STRATEGIES = ("none", "optimizer", "optimizer-flat")


def sharded(evidence: Evidence, handout: Handout, *strategies: str) -> list[Found]:
    """Steps of the handout's xl by these strategies on two ranks."""
    wanted = {
        "size": (handout.xl,),
        "world_size": (2,),
        "compile": ("off",),
        "cuda_graph": ("off",),
        "context": (512,),
        "batch_size": (4,),
        "checkpointing": ("none",),
    }
    return evidence.find("shard", wanted, strategy=strategies)


def _is_as_asked(group: Found) -> bool:
    """Trained with the handout's own attention and AdamW."""
    names = group.cells[0].configuration
    return (names["attention"], names["optimizer"]) == ("reference", "course")


def by_strategy(group: Found) -> dict[str, Cell]:
    """The measured cells of one invocation."""
    return {cell.configuration["strategy"]: cell for cell in group.measured}


def memory(evidence: Evidence, handout: Handout) -> Answer | None:
    found = [group for group in sharded(evidence, handout, *_STRATEGIES) if len(by_strategy(group)) > 1]
    if not found:
        return None
    # Asked are the moments of the first step, which earlier versions did not record.
    found.sort(key=lambda group: (not _has_first_step(group), not _is_as_asked(group)))
    groups = _by_precision(found[:1]) or found[:1]
    sentences = [f"Setup: {setup_words(found[0], handout)}."]
    rows: list[dict] = []
    for group in groups:
        precision = group.cells[0].configuration["precision"]
        sentences += _held_words(by_strategy(group), precision, rows, f" in {precision}" * (len(groups) > 1))
    columns = (
        Column("precision", "precision"),
        Column("strategy", "strategy"),
        Column("moment", "moment"),
        *(Column(f"{part}_gib", words, "gib") for part, words in COMPONENTS.items()),
        Column("total_gib", "total", "gib"),
    )
    tables = plain_table("memory", "memory of the rank that holds most", columns, rows)
    shown = [cell for group in groups for cell in group.measured]
    missing = other_size(groups[0], handout)
    if not _has_first_step(groups[0]):
        missing.append("the moments of the first step; those here are of the second, when AdamW's state is there")
    picture = Found(groups[0].invocation, shown)
    return Answer(sentences, tables, picture.pictures("memory"), runs_of(groups), missing)


def _has_first_step(group: Found) -> bool:
    return any("first" in held["moment"] for cell in group.measured for held in cell.derived["memory"])


def _held_words(cells: dict[str, Cell], precision: str, rows: list[dict], where: str) -> list[str]:
    """What each strategy's fullest rank holds at the moments asked for; adds the table's rows."""
    sentences = []
    for name, cell in cells.items():
        held = {memory.moment: memory for memory in memory_of(cell)["measured"]}
        if not held:
            continue
        listed = [f"{gib(held[moment].total_gib)} {_moment_words(moment)}" for moment in _asked(held)]
        sentences.append(f"{_called(name)}{where}: {joined(listed)}.")
        for moment in _asked(held):
            parts = {f"{part}_gib": getattr(held[moment], part) / GIB for part in COMPONENTS}
            row = {"precision": precision, "strategy": name, "moment": _moment_words(moment)}
            rows.append(row | {"total_gib": held[moment].total_gib} | parts)
        at = next((held[moment] for moment in reversed(_asked(held)) if held[moment].optimizer_state), None)
        if at is not None:
            sentences.append(
                f"Of the {gib(at.total_gib)} {_moment_words(at.moment)}, "
                + joined(
                    f"{gib(size / GIB)} are {words}"
                    for part, words in COMPONENTS.items()
                    if (size := getattr(at, part))
                )
                + "."
            )
    return sentences + _saved_words(cells, where)


def _asked(held: dict[str, RankMemory]) -> list[str]:
    """The moments that the handout asks for, of the first step where it was recorded; and the peak.

    After its first step a rank holds what it holds after every other one.
    """
    first = any("first" in moment for moment in held)
    return [moment for moment in held if moment != "before the optimizer" or not first]


def _moment_words(moment: str) -> str:
    return {
        "initialized": "after initialization",
        "before the first optimizer step": "directly before the first optimizer step",
        "before the optimizer": "directly before the optimizer step",
        "after the optimizer": "directly after it",
        "peak": "at the peak",
    }.get(moment, moment)


def _called(strategy: str) -> str:
    return {
        "none": "Without sharding",
        "optimizer": "With the optimizer state sharded by whole parameters",
        "optimizer-flat": "With it sharded by slices of all parameters",
    }[strategy]


def _saved_words(cells: dict[str, Cell], where: str) -> list[str]:
    sentences = []
    if "none" not in cells:
        return []
    plain = cells["none"]
    ranks = plain.configuration["world_size"]
    expected = 8 * plain.derived["parameters"] * (1 - 1 / ranks) / GIB
    share = "half" if ranks == 2 else f"{ranks - 1} / {ranks}"
    for name in ("optimizer", "optimizer-flat"):
        if name in cells:
            of_state = _state(plain) - _state(cells[name])
            verdict = "as expected" if abs(of_state / expected - 1) <= 0.05 else "not as expected"
            # Only GPUs count their peak.
            peaks = [cell.derived["peak_gib"] for cell in (plain, cells[name])]
            saved = f"{gib(peaks[0] - peaks[1])} of the peak and " if None not in peaks else ""
            sentences.append(
                f"`{name}`{where} saves {saved}{gib(of_state)} of optimizer state; {share} of AdamW's 8 bytes a "
                f"parameter is {gib(expected)}: {verdict}."
            )
    return sentences


def _state(cell: Cell) -> float:
    return max((held.optimizer_state for held in memory_of(cell)["measured"]), default=0) / GIB


def speeds(evidence: Evidence, handout: Handout) -> Answer | None:
    found = [
        group
        for group in sharded(evidence, handout, *_STRATEGIES)
        if {"none", "optimizer"} <= by_strategy(group).keys()
    ]
    if not found:
        return None
    groups = _by_precision(sorted(found, key=lambda group: not _is_as_asked(group)))
    sentences = [f"Setup: {words}." for words in dict.fromkeys(setup_words(group, handout) for group in groups)]
    tables: list[Table] = []
    for group in groups:
        cells = by_strategy(group)
        plain = cells["none"].samples["step"]
        precision = group.cells[0].configuration["precision"]
        for name in ("optimizer", "optimizer-flat"):
            if name in cells:
                step = cells[name].samples["step"]
                parts = [
                    f"{part} {ms(cells['none'].samples[part].median)} to {ms(cells[name].samples[part].median)}"
                    for part in ("backward", "synchronize", "optimizer")
                    if part in step_parts(cells["none"], cells[name])
                ]
                sentences.append(
                    f"In {precision} a step takes {ms(plain.mean)} ± {ms(plain.std)} without sharding and "
                    f"{ms(step.mean)} ± {ms(step.std)} with `{name}`: {faster(plain, step)}"
                    + (f"; medians: {joined(parts)}." if parts else ".")
                )
        tables += group.table("shard", *STEP_COLUMNS)
    there = {group.cells[0].configuration["precision"] for group in groups}
    missing = other_size(found[0], handout)
    missing += [f"the same in {precision}" for precision in ("fp32", "bf16") if precision not in there]
    return Answer(sentences, tables, {}, runs_of(groups), missing)


def step_parts(*cells: Cell) -> set[str]:
    """Phases that all of the cells were timed in."""
    return set.intersection(*(set(cell.samples) for cell in cells))


def _by_precision(found: list[Found]) -> list[Found]:
    """For each precision the first invocation that measured it with plain data parallel training beside."""
    groups: dict[str, Found] = {}
    for group in found:
        for precision in dict.fromkeys(cell.configuration["precision"] for cell in group.cells):
            chosen = Found(
                group.invocation, [cell for cell in group.cells if cell.configuration["precision"] == precision]
            )
            if "none" in by_strategy(chosen):
                groups.setdefault(precision, chosen)
    return list(groups.values())


def against_zero(evidence: Evidence, handout: Handout) -> Answer:
    parameters = 4
    shares = {name: sent_bytes(name, parameters, 2) for name in ("none", "optimizer", "optimizer-flat")}
    ours, flat, none = (float(shares[name]) for name in ("optimizer", "optimizer-flat", "none"))
    sends = {
        strategy: next(one for one in state_answers(SIZES[handout.xl], 2, strategy) if one.question.endswith("(c)"))
        for strategy in ("optimizer", "optimizer-flat")
    }
    return Answer(
        [
            "ZeRO stage 1 cuts the optimizer state into equal slices whatever the parameters are, reduce-scatters the "
            "gradients, so that a rank gets the average of its slice alone, and all-gathers the updated parameters.",
            "The handout's way gives each rank whole parameters, which fill ranks only as evenly as they can be "
            "dealt out, all-reduces every gradient to every rank, and broadcasts each updated parameter from its "
            f"owner: the same memory but for the rounding, and {times(ours / none)} the bytes of plain data parallel "
            f"training, where ZeRO stage 1 sends {'as many' if flat == none else times(flat / none)}.",
            *(
                f"For {handout.called(handout.xl)} on 2 ranks {called} sends {one.derivation(format_operand)}, "
                f"{derived_value(one)} a step. {one.reason}"
                for called, one in (("the first", sends["optimizer"]), ("ZeRO stage 1", sends["optimizer-flat"]))
            ),
            "`optimizer-flat` here is ZeRO's scheme; it also drops the gradients of other ranks' slices, as stage 2.",
        ]
    )


def shard_commands(target: Target) -> list[Command]:
    options = {"precision": ("fp32", "bf16")}
    return [shard_command(target, "none,optimizer,optimizer-flat", options, 6)]


def shard_command(target: Target, strategies: str, options: dict, cells: int, *flags: str) -> Command:
    """A sweep of ``shard`` with so many cells, and what a rank must hold for it."""
    sizes = target.sizes((target.handout.xl,))
    warm = ("--warmup", "1", "--steps", "3") if target.is_small else ("--warmup", "3", "--steps", "8")
    flags = ("--strategy", strategies, "--world-size", "2", *warm, *flags)
    planned = Sweep("shard", sizes, options=options, flags=flags, steps=20 * cells, ranks=2).on(target)
    need = max(planned.memory_gib or 0.0, state_gib(sizes[0]))
    return Command(planned.arguments, planned.seconds + 15 * cells, need, 2)


OPTIMIZER_STATE_SHARDING_ACCOUNTING = Problem(
    "optimizer_state_sharding_accounting",
    "Optimizer state sharding: accounting",
    (
        Part("a", memory, shard_commands),
        Part("b", speeds, shard_commands),
        Part("c", against_zero, lambda target: arithmetic("account", "memory", "--size", target.handout.xl)),
    ),
)

# ``fsdp_accounting``: what fully sharded ranks hold, and whether weights are gathered in time.


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
