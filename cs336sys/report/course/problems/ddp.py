"""The problems on data parallel training that are measured: naive, flat and overlapped."""

from collections.abc import Mapping, Sequence
from typing import Any

from cs336sys.accounting.communication import bucket_answers
from cs336sys.accounting.parameters import count_parameters
from cs336sys.report.account.answers import answers_table
from cs336sys.report.course.evidence import Evidence, Found
from cs336sys.report.course.problem import (
    Answer,
    Command,
    Handout,
    Part,
    Problem,
    Sweep,
    Target,
    arithmetic,
    runs_of,
    state_gib,
)
from cs336sys.report.course.words import ALIKE, derived_sentence, failures, faster, joined, ms, percent, times
from cs336sys.report.ddp import bucket_sweeps, link_of
from cs336sys.report.numbers import format_quantity
from cs336sys.results.model import Cell, Samples
from cs336sys.results.statistics import Interval, ratio
from cs336sys.sizes import SIZES

STEP_COLUMNS = (
    *("size", "precision", "compile", "strategy", "bucket_mb", "step_ms", "unsynchronized_ms", "exposed_ms"),
    *("communication_ms", "hidden_percent", "speedup", "calls", "relative_difference_percent", "status"),
)
# A smaller share of a profiled step is a matter of its clock.
_LEAST_PERCENT = 0.1

_NAMES = {
    "naive": "one all-reduce for each parameter after the backward pass",
    "flat": "one all-reduce of all gradients",
    "overlap": "an all-reduce for each parameter as soon as its gradient is there",
}


def steps_of(evidence: Evidence, handout: Handout, command: str = "ddp") -> list[Found]:
    """The plain steps of the handout's xl on two ranks."""
    return evidence.find(
        command,
        {
            "size": (handout.xl,),
            "world_size": (2,),
            "compile": ("off",),
            "precision": ("fp32",),
            "attention": ("reference",),
            "cuda_graph": ("off",),
            "gradient_dtype": ("fp32",),
            "batch_size": (4,),
            "context": (512,),
        },
    )


def rows_of(group: Found, command: str = "ddp") -> list[Mapping[str, Any]]:
    """The rows of the table of steps, of cells that were measured."""
    return [row for table in group.table(command) for row in table.rows if row["status"] == "ok"]


def exposed_words(exposed: Interval) -> str:
    """What communication adds to a step, as far as the noise allows."""
    if exposed.is_noise:
        return f"less than {ms(max(exposed.high, 0))}, below the noise,"
    return f"{ms(exposed.estimate)} ({ms(exposed.low)} to {ms(exposed.high)})"


def setup_words(group: Found, handout: Handout) -> str:
    """What was trained, and how."""
    cell = (group.measured or group.cells)[0]
    names = cell.configuration
    precisions = joined(dict.fromkeys(cell.configuration["precision"] for cell in group.cells))
    return (
        f"{handout.called(names['size'])} on {names['world_size']} ranks, batch {names['batch_size']} shared out, "
        f"context {names['context']}, {precisions}, compile {names['compile']}, "
        f"{names['attention']} attention, {names['optimizer']} optimizer, "
        f"{names['steps']} steps after {names['warmup']} warm-up"
    )


def other_size(group: Found, handout: Handout) -> list[str]:
    """What is missing where another size stands in for the handout's xl."""
    size = group.cells[0].configuration["size"]
    return [] if size == handout.xl else [f"{handout.called(handout.xl)}; these are of {size}"]


def _with(found: Sequence[Found], *strategies: str) -> Found | None:
    """The first invocation that measured all of these strategies."""
    for group in found:
        there = {cell.configuration["strategy"] for cell in group.measured}
        if set(strategies) <= there:
            chosen = [cell for cell in group.cells if cell.configuration["strategy"] in strategies]
            return Found(group.invocation, chosen)
    return None


def _row(group: Found, strategy: str) -> Mapping[str, Any]:
    return next(row for row in rows_of(group) if row["strategy"] == strategy)


def median_words(samples: Samples) -> str:
    """``272.7 ms``."""
    return ms(samples.median)


def naive(evidence: Evidence, handout: Handout) -> Answer | None:
    group = _with(steps_of(evidence, handout), "naive")
    if group is None:
        return None
    row = _row(group, "naive")
    sentences = [f"Setup: {setup_words(group, handout)}.", _communication_words(row)]
    return Answer(sentences, group.table("ddp", *STEP_COLUMNS), {}, runs_of([group]), other_size(group, handout))


def _communication_words(row: Mapping[str, Any]) -> str:
    step: Samples = row["step_ms"]
    sentence = f"A step takes {ms(step.mean)} (standard deviation {ms(step.std)})"
    if isinstance(row.get("synchronize_ms"), Samples):
        # Of the same statistic as the step, or the share would be of another number than the reader's.
        waiting = row["synchronize_ms"].mean
        sentence += (
            f", of which {ms(waiting)}, {percent(100 * waiting / step.mean)}, pass between the end of the backward "
            f"pass and the last averaged gradient ({row['calls']} calls)"
        )
    if isinstance(row.get("exposed_ms"), Interval):
        sentence += f"; against the same step without communication it is {exposed_words(row['exposed_ms'])} more"
    timeline = row.get("timeline")
    if timeline:
        sentence += f"; in one profiled step communication ran for {ms(timeline['communication_ms'])}"
    return sentence + "."


def flat(evidence: Evidence, handout: Handout) -> Answer | None:
    group = _with(steps_of(evidence, handout), "naive", "flat")
    if group is None:
        return None
    one, many = _row(group, "flat"), _row(group, "naive")
    sentences = [
        f"With one flat all-reduce: {_communication_words(one)[:1].lower()}{_communication_words(one)[1:]}",
        compared("one call of all gradients", one, f"{many['calls']} calls", many),
    ]
    return Answer(sentences, group.table("ddp", *STEP_COLUMNS), {}, runs_of([group]), other_size(group, handout))


def compared(name: str, row: Mapping[str, Any], other: str, theirs: Mapping[str, Any]) -> str:
    """How fast a row's steps are beside another's."""
    before, after = theirs["step_ms"], row["step_ms"]
    return (
        f"Against {other} (median {median_words(before)} a step), {name} (median {median_words(after)}) is "
        f"{faster(before, after)}."
    )


def overlapped(evidence: Evidence, handout: Handout) -> Answer | None:
    found = steps_of(evidence, handout)
    group = _with(found, "naive", "flat", "overlap") or _with(found, "naive", "overlap")
    if group is None:
        return None
    rows = {row["strategy"]: row for row in rows_of(group)}
    sentences = [
        f"{_NAMES[name][:1].upper()}{_NAMES[name][1:]}: {ms(row['step_ms'].mean)} a step (standard deviation "
        f"{ms(row['step_ms'].std)})."
        for name, row in rows.items()
    ]
    mine = rows["overlap"]
    for name in ("naive", "flat"):
        if name in rows:
            sentences.append(compared("overlapping", mine, name, rows[name]))
    hidden = mine.get("hidden_percent")
    if isinstance(hidden, Interval):
        between = f"{percent(hidden.low)} to {percent(hidden.high)}"
        share = between if hidden.is_range else f"{percent(hidden.estimate)} ({between})"
        sentences.append(
            f"It hides {share} of the communication; what stays exposed is "
            f"{exposed_words(mine['exposed_ms']).rstrip(',')}."
        )
    sentences += _beside_computing(rows["naive"], mine)
    return Answer(sentences, group.table("ddp", *STEP_COLUMNS), {}, runs_of([group]), other_size(group, handout))


def _beside_computing(naive: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Why communication beside computing does not save all of its time."""
    after, beside = naive.get("timeline"), mine.get("timeline")
    if not after or not beside:
        return []
    longer = beside["communication_ms"] / after["communication_ms"]
    share = percent(100 * beside["overlap_ms"] / beside["communication_ms"])
    sentence = (
        f"In one profiled step {share} of its communication runs beside computing, and it runs for "
        f"{ms(beside['communication_ms'])} instead of {ms(after['communication_ms'])}"
    )
    if longer > 1 + ALIKE:
        sentence += ": both share the GPU, and a call waits until the other rank has its gradient, too"
    return [sentence + "."]


def traces(evidence: Evidence, handout: Handout) -> Answer | None:
    group = _with(steps_of(evidence, handout), "naive", "overlap")
    if group is None or any(cell.derived.get("timeline") is None for cell in group.measured):
        return None
    sentences = []
    for name in ("naive", "overlap"):
        timeline = _row(group, name)["timeline"]
        overlap = 100 * timeline["overlap_ms"] / timeline["communication_ms"]
        share = percent(overlap) if overlap >= _LEAST_PERCENT else f"less than {percent(_LEAST_PERCENT)}"
        sentences.append(
            f"{name}: of {ms(timeline['communication_ms'])} in which communication ran, computing ran beside it for "
            f"{share}; the backward pass ends at {ms(timeline['phases']['backward'])} and the gradients are "
            f"averaged at {ms(timeline['phases']['synchronize'])}."
        )
    shares = [_row(group, name)["timeline"] for name in ("naive", "overlap")]
    first, second = (one["overlap_ms"] / one["communication_ms"] for one in shares)
    sentences.append(
        "So the second implementation overlaps and the first does not."
        if second > 2 * first and second > 0.1
        else "So the traces show no clear difference here."
    )
    return Answer(sentences, (), group.pictures("timelines"), runs_of([group]), other_size(group, handout))


def _ddp(target: Target, modes: str, *options: str, seconds_factor: float = 1.0) -> Command:
    sizes = target.sizes((target.handout.xl,))
    warm = ("--warmup", "1", "--steps", "3") if target.is_small else ("--warmup", "3", "--steps", "10")
    flags = ("--mode", modes, "--world-size", "2", *warm, *options)
    count = modes.count(",") + 1
    planned = Sweep("ddp", sizes, flags=flags, steps=20 * count, ranks=2).on(target)
    need = state_gib(sizes[0])
    return Command(
        planned.arguments, planned.seconds * seconds_factor + 15 * count, max(planned.memory_gib or 0, need), 2
    )


def ddp_commands(target: Target) -> list[Command]:
    """One sweep answers all of these problems: only cells of one run are compared."""
    if target.handout.year == 2026:
        return [_ddp(target, "naive,flat,overlap")]
    buckets = "0.05,0.1,1" if target.is_small else "1,10,100,1000"
    return [_ddp(target, "naive,flat,overlap,bucketed", "--bucket-mb", buckets)]


NAIVE_DDP_BENCHMARKING = Problem("naive_ddp_benchmarking", "Benchmarking naive DDP", (Part("", naive, ddp_commands),))
MINIMAL_DDP_FLAT_BENCHMARKING = Problem(
    "minimal_ddp_flat_benchmarking", "Minimal DDP with flat gradients", (Part("", flat, ddp_commands),)
)
DDP_OVERLAP_BENCHMARKING = Problem(
    "ddp_overlap_individual_parameters_benchmarking",
    "Benchmarking DDP that overlaps individual parameters",
    (Part("a", overlapped, ddp_commands), Part("b", traces, ddp_commands)),
)

# ``ddp_bucketed_benchmarking``: sizes of buckets, and the model of their overhead.


def buckets(evidence: Evidence, handout: Handout) -> Answer | None:
    found = steps_of(evidence, handout)
    group = next((group for group in found if bucket_sweeps(group.measured)), None)
    if group is None:
        return None
    rows = [row for row in rows_of(group) if row["strategy"] == "bucketed"]
    others = [row for row in rows_of(group) if row["strategy"] in ("naive", "flat", "overlap")]
    listed = [f"{median_words(row['step_ms'])} ({row['bucket_mb']:g} MB, {row['calls']} calls)" for row in rows]
    best = min(rows, key=lambda row: row["step_ms"].median)
    sentences = [
        f"A step takes {joined(listed)}.",
        f"The fastest are buckets of {best['bucket_mb']:g} MB.",
        *(compared("that", best, row["strategy"], row) for row in others),
    ]
    sentences += _expectation(rows, best)
    link = link_of(bucket_sweeps(group.measured)[0][0])
    sentences.append(
        f"All-reduces of these ranks cost {format_quantity(1e6 * link.latency_s, 'us')} a call and move "
        f"{format_quantity(link.bytes_per_s / 1e9, 'gbps')}: a slower link, or more and smaller parameters, would make "
        "the differences between bucket sizes larger."
    )
    sentences += failures(group.cells, lambda cell: f"{cell.configuration['strategy']}")
    tables = [*group.table("ddp", *STEP_COLUMNS), *group.table("buckets")]
    return Answer(sentences, tables, group.pictures("buckets"), runs_of([group]), other_size(group, handout))


def _expectation(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> list[str]:
    largest = max(rows, key=lambda row: row["bucket_mb"])
    smallest = min(rows, key=lambda row: row["bucket_mb"])
    expected = best is not largest and best is not smallest
    sentence = (
        "Expected is a size in between: small buckets pay for many calls, and the last of the large ones starts when "
        "the backward pass is nearly done. "
    )
    slowest = max(rows, key=lambda row: row["step_ms"].median)
    found = ratio(slowest["step_ms"], best["step_ms"])
    spread = found.estimate
    if found.is_noise:
        return [
            f"{sentence}Here all sizes are alike within the noise: the slowest takes {times(found.low)} to "
            f"{times(found.high)} as long as the fastest."
        ]
    if expected:
        return [sentence + f"So it is here; the slowest size takes {times(spread)} as long as the fastest."]
    if best is largest:
        why = "calls cost more here, launched one by one, than the transfer that the last bucket exposes"
    else:
        why = "calls cost next to nothing here beside the transfer that the last bucket exposes"
    return [sentence + f"Here the {'largest' if best is largest else 'smallest'} win ({times(spread)} apart): {why}."]


def bucket_equation(evidence: Evidence, handout: Handout) -> Answer:
    group = next((one for one in steps_of(evidence, handout) if bucket_sweeps(one.measured)), None)
    cell: Cell | None = bucket_sweeps(group.measured)[0][0] if group else None
    if cell is not None:
        link, total = link_of(cell), cell.derived["communicated_bytes"]
        setting = (total, cell.derived["gradient_calls"], link.bytes_per_s, link.latency_s)
        given = "with the bandwidth and overhead measured on these ranks"
    else:
        setting = (4 * count_parameters(SIZES["xl"]), 100, 200e9, 20e-6)
        given = "with w = 200 GB/s and o = 20 us put in, as nothing was measured"
    sentences = [
        "All but the last of n_b buckets travel while the next one is computed, and every call costs o: "
        "overhead = s / (n_b w) + n_b o, least at n_b = sqrt(s / (w o)), that is for buckets of b = sqrt(s w o) bytes, "
        f"where it is 2 sqrt(s o / w). {given[:1].upper()}{given[1:]}:",
    ]
    if setting[3] == 0:
        sentences.append("calls look free, so the smallest buckets are best.")
        return Answer(sentences, (), {}, runs_of([group]) if group else ())
    answers = bucket_answers(*setting)
    sentences += map(derived_sentence, answers)
    table = answers_table("formulas", "bucket sizes by the equation", answers)
    return Answer(sentences, [table], {}, runs_of([group]) if group else ())


DDP_BUCKETED_BENCHMARKING = Problem(
    "ddp_bucketed_benchmarking",
    "Benchmarking bucketed DDP",
    (
        Part("a", buckets, ddp_commands),
        Part("b", bucket_equation, lambda target: arithmetic("account", "buckets", "--size", "xl")),
    ),
)
