"""The verdict of ``trace`` on a capture, in two or three sentences, and the tables of each GPU.

The verdict: how much of a step is computing, what the rest waits for, what to try next. Columns: ``docs/columns.md``.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cs336sys.accounting.communication import WITH_BUS_BANDWIDTH, BusBandwidths, bus_factor
from cs336sys.accounting.hardware import Ceilings
from cs336sys.accounting.memory import GIB
from cs336sys.capture.analysis import IDLE_PARTS, Analysis, KernelGroup, StepPart
from cs336sys.capture.capture import RECEIVE, SEND
from cs336sys.capture.operators import operator_work, roofline
from cs336sys.capture.ranks import RankMatching, find_stragglers, local_ms
from cs336sys.capture.taxonomy import Category
from cs336sys.commands.trace.kernel_tables import shown_names, unclassified_note
from cs336sys.findings import Finding, sentence
from cs336sys.results.model import Samples
from cs336sys.tables.numbers import format_quantity
from cs336sys.tables.table import Column, Table, fill_row, named_columns, with_rows

say_trace = partial(sentence, __package__, quantity=format_quantity)  # Renders a block of ``sentences.jinja``.

_LEAST_SHARE = 0.03  # The verdict names parts of a step from this share on, which are worth a change.
_MUCH_UNKNOWN = 0.1  # From this share on a sentence says that the cause of idling is unknown.
_MOSTLY_COMPUTING = 0.8  # From this share of computing on, faster kernels help more than fewer gaps.
_SHORT_US = 15.0  # Kernels shorter than this are launched no faster than they run.


def verdict(analyses: Sequence[Analysis], ranks: RankMatching | None = None) -> list[str]:
    """Return the sentences about a capture, the most important first.

    Of several ranks: which of them holds the others up, then the step of the rank whose step is of median length.
    """
    sentences = damage_sentences(analyses)
    if len(analyses) == 1:
        return [*sentences, *_step_sentences(analyses[0], most_parts=2)]
    findings = find_stragglers(analyses, ranks)
    if ranks is not None and ranks.missing:
        sentences.append(f"{capital(ranks.missing)}: waiting for ranks is a lower bound.")
    middle = sorted(analyses, key=lambda analysis: analysis.median_step_ms)[len(analyses) // 2]
    # A rank that holds the others up is worth more attention than the second cause of idling.
    where, most_parts = f"on {middle.label} ({middle.file}) ", 1 if findings[0].cause == "straggler" else 2
    return [*sentences, rank_sentence(len(analyses), findings), *_step_sentences(middle, most_parts, where)]


def damage_sentences(analyses: Sequence[Analysis]) -> list[str]:
    """Say what the captures lack or hold that cannot be; of several, whose."""
    labels_of: dict[str, list[str]] = {}
    for analysis in analyses:
        for fault in analysis.damage:
            labels_of.setdefault(fault, []).append(analysis.label)
    count = len(analyses)
    sentences = [
        fault if len(labels) == count else f"{capital(_listed(labels))}: {fault[0].lower()}{fault[1:]}"
        for fault, labels in labels_of.items()
    ]
    unknown = [analysis.label for analysis in analyses if not analysis.is_idle_known]
    if unknown:
        whose = "" if len(unknown) == count else _listed(unknown)
        sentences.append(say_trace("unknown idle time", labels=whose))
    return sentences


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _step_sentences(analysis: Analysis, most_parts: int, where: str = "") -> list[str]:
    """Say how much of a step is computing and what its largest other parts are; nothing where that is not known."""
    if not analysis.is_idle_known:
        return []
    facts = _facts(analysis) | {
        "analysis": analysis,
        "where": where,
        "share": lambda part: format_quantity(100 * analysis.share(part), "percent"),
    }
    parts = sorted(_EXPLAINED_PARTS, key=lambda part: -analysis.share(part))
    causes = [say_trace(part, **facts) for part in parts if analysis.share(part) >= _LEAST_SHARE]
    if not causes or analysis.share(StepPart.COMPUTING) >= _MOSTLY_COMPUTING:  # Faster kernels are what helps most.
        causes.insert(0, _kernel_advice(analysis))
    sentences = [capital(say_trace("computing", **facts)), *causes[:most_parts]]
    if analysis.share(StepPart.UNKNOWN) >= _MUCH_UNKNOWN:
        sentences.append(say_trace("unknown", **facts))
    return sentences


# Parts of a step that have a sentence; of equal ones the first is named first.
_EXPLAINED_PARTS = [part for part in IDLE_PARTS if part != StepPart.UNKNOWN]
_EXPLAINED_PARTS += [StepPart.COMMUNICATION, StepPart.WAITING, StepPart.COPIES]


def _facts(analysis: Analysis) -> dict[str, Any]:
    """Return the values, besides shares, that the sentences on the parts of a step name."""
    steps = len(analysis.step_ms)
    # Without collectives, which last as long as they wait for other ranks.
    kernels = [kernel for kernel in analysis.kernels if kernel.kind != Category.COMMUNICATION]
    count = sum(sum(kernel.count) for kernel in kernels)  # A kernel has a count, and ms, of each step.
    mean_us = 1e3 * sum(sum(kernel.ms) for kernel in kernels) / count if count else 0.0
    # The call that waited longest, and how often it was made: waits are (times, ms) by the call's name.
    call, (calls, _) = max(analysis.waits.items(), key=lambda item: item[1][1], default=("a call", (0, 0.0)))
    kinds = dict.fromkeys(row.kind for row in analysis.collectives)
    longest_collective = max(
        kinds, key=lambda kind: sum(row.ms for row in analysis.collectives if row.kind == kind), default=""
    )
    return {
        "count": count / steps,
        "mean_us": mean_us,
        "is_short": mean_us < _SHORT_US,
        "call": call,
        "calls": calls / steps,
        "collective": longest_collective,
        "is_pipeline": longest_collective in (SEND, RECEIVE),
    }


def _kernel_advice(analysis: Analysis) -> str:
    """Suggest what to try where nothing waits, by the largest kind of kernel."""
    groups = _group_kernels(analysis, lambda kernel: kernel.kind)  # Of kernels without length nobody knows the share.
    percents = {kind: times["share_percent"] or 0.0 for kind, _, times in groups} or {Category.MATMUL: 0.0}
    moving = sum(percents.get(kind, 0) for kind in (Category.ELEMENTWISE, Category.REDUCTION, Category.NORMALIZATION))
    kind, percent = next(iter(percents.items()))  # The largest comes first.
    # Together they may be the largest, though none of them is; under about a third of the time they are no advice.
    if moving > max(35.0, percents.get(Category.MATMUL, 0)):
        kind, percent = "moving memory", moving
    return say_trace("kernels", kind=kind, percent=percent)


def rank_sentence(count: int, findings: Sequence[Finding]) -> str:
    """Say which of ``count`` ranks hold the others up, that none does, or why nobody can tell."""
    first = findings[0]
    name = first.certainty if first.certainty == "cannot tell" else first.cause
    return capital(say_trace(name, first, count=count, findings=findings))


_MOST_STEPS = 30
_SHAPE_CHARACTERS = 120
_MUCH_LAUNCHING = 0.03  # From this share of a step on a note says how a profiler changes it.


@dataclass(frozen=True)
class DisplayOptions:
    """Options of a capture's tables; ``ceilings`` and ``bandwidths`` are what was measured on such GPUs."""

    top: int = 10
    full_names: bool = False
    roofline: bool = False
    ceilings: Ceilings | None = None
    bandwidths: BusBandwidths | None = None


_GPU = Column("gpu", "GPU", value=lambda analysis: analysis.label or None)


def _gpu(analysis: Analysis) -> dict[str, Any]:
    return fill_row((_GPU,), analysis)


def file_words(analyses: Sequence[Analysis]) -> str:
    """Return the files' names, for a title: of more than two the first and how many more."""
    files = list(dict.fromkeys(analysis.file for analysis in analyses))
    return " and ".join(files) if len(files) <= 2 else f"{files[0]} and {len(files) - 1} more"


def verdict_table(sentences: Sequence[str], title: str) -> Table:
    return Table("verdict", title, (Column("verdict", "verdict"),), [{"verdict": sentence} for sentence in sentences])


def step_samples(values: Sequence[float]) -> Samples | float:
    """Return the values of steps, as samples where there are several."""
    return Samples("ms", "capture", tuple(values)) if len(values) > 1 else values[0]


def part_table(analyses: Sequence[Analysis]) -> Table:
    """Build the table of a step's parts, which add up to the step."""
    rows: list[dict[str, Any]] = []
    for analysis in analyses:
        parts = [(part, step_ms, 100 * analysis.share(part)) for part, step_ms in analysis.parts.items()]
        parts += [("step", analysis.step_ms, 100.0)] if parts else []
        for part, step_ms, percent in parts:
            rows.append(_gpu(analysis) | {"part": part, "ms": step_samples(step_ms), "share_percent": percent})
    columns = (_GPU, *named_columns("part", ms="a step", share_percent="share"))
    notes = [f"steps: {definition}" for definition in dict.fromkeys(analysis.steps_are for analysis in analyses)]
    if any(analysis.is_gpu and analysis.share(StepPart.LAUNCHING) >= _MUCH_LAUNCHING for analysis in analyses):
        notes.append("a profiler slows the CPU down and not the GPU: without it launching takes less of a step")
    if not all(analysis.is_gpu for analysis in analyses):
        notes.append("no GPU: CPU operators replace kernels; launching is Python's time between them")
    return Table("parts", "trace: where the step goes", columns, rows, notes=notes)


def step_table(analysis: Analysis) -> Table | None:
    """Build the table of each step by itself; None where the capture as a whole replaces steps."""
    if not analysis.has_steps:
        return None
    parts = {f"{part.replace(' ', '_')}_ms": part for part in analysis.parts}
    columns = (_GPU, Column("step", "step", "count"), *named_columns(step_ms="step", **parts))
    count = len(analysis.step_ms)
    numbers = analysis.step_numbers or range(count)
    steps = list(zip(numbers, analysis.step_ms, *analysis.parts.values(), strict=True))[:_MOST_STEPS]
    keys = [column.key for column in columns[1:]]
    rows = [_gpu(analysis) | dict(zip(keys, step, strict=True)) for step in steps]
    notes = [f"the first {_MOST_STEPS} of {count} steps"] if count > _MOST_STEPS else []
    return Table("steps", "trace: each step", columns, rows, notes=notes)


_TIMES = named_columns(count="times a step", ms="a step", share_percent="share of kernel time", own_ms="of the step")


def _group_kernels(analysis: Analysis, key: Callable[[KernelGroup], str]) -> list[tuple[str, list[KernelGroup], dict]]:
    """Return kernels by a key, the longest first: the key, the kernels, and a row of the GPU and their mean times."""
    groups: dict[str, list[KernelGroup]] = {}
    for kernel in analysis.kernels:
        groups.setdefault(key(kernel), []).append(kernel)
    steps = len(analysis.step_ms)
    total_ms = sum(sum(kernel.ms) for kernel in analysis.kernels) / steps
    results = []
    for name, kernels in groups.items():
        times = _gpu(analysis)
        for column in ("count", "ms", "own_ms"):  # A value for each step; own_ms counts each instant once.
            times[column] = sum(sum(getattr(kernel, column)) for kernel in kernels) / steps
        times["share_percent"] = 100 * times["ms"] / total_ms if total_ms else None
        results.append((name, kernels, times))
    return sorted(results, key=lambda result: -result[2]["ms"])  # By the time in their rows.


def kind_table(analysis: Analysis) -> Table:
    rows = [times | {"category": kind} for kind, _, times in _group_kernels(analysis, lambda kernel: kernel.kind)]
    notes = ["kernel time counts kernels that run side by side twice; of the step, each instant once"]
    notes += unclassified_note((kernel.name, sum(kernel.ms)) for kernel in analysis.kernels)
    return Table("kinds", "trace: kernels by kind", (_GPU, Column("category", "kind"), *_TIMES), rows, notes=notes)


def module_table(analysis: Analysis, top: int) -> Table | None:
    """Build the table of kernels by the module, or the range, that launched them; None where no kernel has any."""
    if not any(kernel.module for kernel in analysis.kernels):
        return None
    groups = _group_kernels(analysis, lambda kernel: kernel.module)[:top]
    rows = [times | {"module": module or "(none)"} for module, _, times in groups]
    notes = ["in the backward pass, the module of the forward operator; without recorded modules, the innermost range"]
    return Table("modules", "trace: kernels by module", (_GPU, Column("module", "module"), *_TIMES), rows, notes=notes)


def longest_kernels_table(analysis: Analysis, shown: DisplayOptions) -> Table:
    """Build the table of the kernels that take most time, by name."""
    rows = []
    groups = _group_kernels(analysis, lambda kernel: kernel.name)[: shown.top]
    names = shown_names([name for name, _, _ in groups], shown.full_names)
    for name, (_, kernels, times) in zip(names, groups, strict=True):
        mean_us = 1e3 * times["ms"] / times["count"] if times["count"] else None
        rows.append(times | {"mean_us": mean_us, "category": kernels[0].kind, "kernel": name})
    columns = (_GPU, *_TIMES, *named_columns("mean_us", category="kind", kernel="kernel"))
    return Table("kernels", f"trace: the {shown.top} kernels that take most time", columns, rows)


def operator_table(analysis: Analysis, shown: DisplayOptions) -> Table:
    """Build the table of the longest operators by the shapes of their inputs, with FLOPs, bytes and the roofline."""
    rows: list[dict[str, Any]] = []
    sources: dict[str, None] = {}
    groups = _group_kernels(analysis, lambda kernel: f"{kernel.operator}\0{kernel.shape}" if kernel.shape else "")
    with_shapes = [group for group in groups if group[0]]  # All kernels without shapes have the empty key.
    for key, kernels, times in with_shapes[: shown.top]:
        operator, _, shape = key.partition("\0")
        row = times | {"operator": operator, "shapes": shape_words(shape)}
        work = operator_work(operator, shape)
        if work is not None and times["ms"]:  # FLOPs of compiled Triton kernels are not known, and 0.
            call_s = times["ms"] / 1e3 / _calls_in_step(kernels)
            row |= {"tflops": work.flops / call_s / 1e12 or None, "gbps": work.bytes / call_s / 1e9}
            if shown.roofline:
                limits = roofline(work, call_s, analysis.gpu_name, shown.ceilings)
                row |= {"peak_percent": limits.percent, "bound": limits.bound}
                sources[limits.source] = None
        rows.append(row)
    columns = (
        _GPU,
        *_TIMES,
        *named_columns(tflops="FLOPs", gbps="bytes", peak_percent="of the roofline", bound="bound by"),
        *named_columns(operator="operator", shapes="shapes of inputs"),
    )
    notes = ["bytes: each input and output once; FLOPs: of products and attention, by their shapes"] if rows else []
    if any(str(row["operator"]).startswith("triton_") for row in rows):
        notes.append("of compiled Triton kernels, bytes are each argument once, and FLOPs are not known")
    notes += [f"roofline: {source}" for source in sources]
    return Table("operators", "trace: operators by shape", columns, rows, notes=notes)


def _calls_in_step(kernels: Sequence[KernelGroup]) -> float:
    """Return how often a step calls the operator of these kernels: as often as the kernel that it launches most."""
    counts: Counter[str] = Counter()
    for kernel in kernels:
        counts[kernel.name] += sum(kernel.count)
    return max(counts.values()) / len(kernels[0].count)  # The number of steps.


def shape_words(shape: str) -> str:
    """Return recorded shapes as text, ``[[4, 8], []]`` as ``4x8``, without numbers, whose shape is []; "" for none."""
    try:
        shapes, _ = json.loads(shape)  # JSON of sizes and types of inputs.
    except ValueError:
        return ""

    def word(extents: Any) -> str:
        if isinstance(extents, list) and extents and all(isinstance(extent, list) for extent in extents):
            return "[" + ", ".join(map(word, extents)) + "]"
        return "x".join(map(str, extents)) if isinstance(extents, list) else ""

    text = ", ".join(filter(None, map(word, shapes)))
    return text if len(text) <= _SHAPE_CHARACTERS else text[: _SHAPE_CHARACTERS - 3] + "..."


def copy_table(analysis: Analysis) -> Table:
    """Build the table of the GPU's copies within steps; their bytes are negative where they were not recorded."""
    steps = len(analysis.step_ms)
    columns = (
        replace(_GPU, value=lambda copy: analysis.label or None),  # Of the analysis: rows here are copies.
        Column("copy", "copy", value=lambda copy: copy.name),
        Column("count", "times a step", value=lambda copy: copy.count / steps),
        Column("bytes", "bytes a step", "decimal_bytes", lambda copy: copy.bytes / steps if copy.bytes >= 0 else None),
        Column("ms", "a step", "ms", lambda copy: copy.ms / steps),
        Column("gbps", "bandwidth", "gbps", lambda c: c.bytes / c.ms / 1e6 if c.bytes > 0 and c.ms else None),
    )
    return Table("copies", "trace: copies", columns, [fill_row(columns, copy) for copy in analysis.copies])


def wait_table(analysis: Analysis) -> Table:
    steps = len(analysis.step_ms)
    rows = [
        _gpu(analysis) | {"call": name, "count": count / steps, "ms": ms / steps}
        for name, (count, ms) in sorted(analysis.waits.items(), key=lambda item: -item[1][1])  # The longest first.
    ]
    columns = (_GPU, *named_columns("call", count="times a step", ms="a step"))
    notes = ["time in these calls is no loss by itself: the GPU may be computing meanwhile"] if rows else []
    return Table("waits", "trace: calls that wait for the GPU", columns, rows, notes=notes)


def collective_table(analyses: Sequence[Analysis], bandwidths: BusBandwidths | None = None) -> Table:
    """Build the table of collectives by kind and size: their time, and the bandwidth once the last rank has come.

    ``bandwidths`` are what ``allreduce`` measured of such collectives alone, for the column next to this bandwidth.
    """
    rows = []
    for analysis, collective in [(rank, collective) for rank in analyses for collective in rank.collectives]:
        kind, ranks, size, steps = collective.kind, collective.ranks, collective.bytes, len(analysis.step_ms)
        transfer_ms = collective.ms - (collective.waiting_ms or 0.0)
        busbw_gbps = alone_gbps = None  # A number of ranks or a size that was not recorded is no more than 0.
        if ranks > 1 and kind in WITH_BUS_BANDWIDTH and size > 0 and transfer_ms > 0:
            busbw_gbps = bus_factor(kind, ranks) * size * collective.count / transfer_ms / 1e6  # From bytes/ms.
            alone_gbps = bandwidths.gbps_at(kind, ranks, size) if bandwidths is not None else None
        row = _gpu(analysis) | {"collective": kind, "group": collective.group or None, "bytes": size or None}
        row |= {"ranks": ranks if ranks > 0 else None, "count": collective.count / steps, "ms": collective.ms / steps}
        row["waiting_ms"] = None if collective.waiting_ms is None else collective.waiting_ms / steps
        row |= {"busbw_gbps": busbw_gbps, "alone_busbw_gbps": alone_gbps}
        rows.append(row | {"of_alone_percent": 100 * busbw_gbps / alone_gbps if busbw_gbps and alone_gbps else None})
    columns = (
        _GPU,
        *named_columns("collective", "group"),
        Column("ranks", "ranks", "count"),
        Column("bytes", "size", "decimal_bytes"),
        *named_columns(count="times a step", ms="a step", waiting_ms="of it waiting for the last rank"),
        *named_columns(busbw_gbps="bus bandwidth", alone_busbw_gbps="allreduce measured", of_alone_percent="of that"),
    )
    notes = []
    if bandwidths is not None and rows and not any(row["alone_busbw_gbps"] for row in rows):
        notes.append("allreduce measured none of these collectives, sizes and numbers of ranks")
    if any(row["busbw_gbps"] for row in rows):
        is_waiting_known = any(row["waiting_ms"] is not None for row in rows)
        waiting = "without waiting" if is_waiting_known else "waiting for others included"
        notes.append(f"bus bandwidth as `cs336sys allreduce` has it, {waiting}")
    return Table("collectives", "trace: collectives", columns, rows, notes=notes)


def capture_table(analyses: Sequence[Analysis]) -> Table:
    """Build the table of the whole capture, in and outside of steps; without a recorded allocation, no peak memory."""
    columns = (
        _GPU,
        Column("gpu_name", "name", value=lambda analysis: analysis.gpu_name or None),
        Column("profiler", "profiler", value=lambda analysis: analysis.profiler),
        Column("steps", "steps", "count", lambda analysis: len(analysis.step_ms) if analysis.has_steps else None),
        Column("events", "kernels and copies", "count"),
        *named_columns(kernel_ms="sum of kernels", busy_ms="busy", computing_ms="computing"),
        *named_columns(communication_ms="communication", span_ms="span"),
        Column("peak_gib", "peak memory of tensors", "gib", lambda analysis: (analysis.peak_bytes or 0) / GIB or None),
    )
    rows = [{**fill_row(columns, analysis), **analysis.totals} for analysis in analyses]  # Totals have columns' keys.
    return Table("capture", "trace: the whole capture", columns, rows)


def rank_table(analyses: Sequence[Analysis], ranks: RankMatching | None) -> Table:
    """Build the table of each rank's steps: the parts, and the time that no other rank makes longer."""
    columns = (
        replace(_GPU, header="rank"),
        Column("step_ms", "step", "ms", lambda analysis: step_samples(analysis.step_ms)),
        Column("local_ms", "computing, copies, idle", "ms", lambda analysis: step_samples(local_ms(analysis))),
        Column("computing_ms", "computing", "ms", lambda analysis: analysis.mean(StepPart.COMPUTING)),
        Column("exposed_ms", "communication alone", "ms", lambda analysis: analysis.mean(StepPart.COMMUNICATION)),
        Column("waiting_ms", "waiting for ranks", "ms", _waiting_ms),
        Column("copies_ms", "copies alone", "ms", lambda analysis: analysis.mean(StepPart.COPIES)),
        Column("idle_ms", "idle", "ms", lambda analysis: sum(map(analysis.mean, IDLE_PARTS))),
    )
    notes = []
    if ranks is not None:
        waits = [f"nobody can tell who waited: {ranks.why_no_waits}"] if ranks.why_no_waits else []
        notes = [say_trace("aligned clocks", ranks=ranks), *waits, *ranks.notes]
    return Table("ranks", "trace: each rank", columns, [fill_row(columns, rank) for rank in analyses], notes=notes)


def _waiting_ms(analysis: Analysis) -> float | None:
    return analysis.mean(StepPart.WAITING) if StepPart.WAITING in analysis.parts else None


def trace_tables(analyses: Sequence[Analysis], ranks: RankMatching | None, shown: DisplayOptions) -> list[Table]:
    """Build all tables; with several ranks, those of steps, kernels and calls are of the first alone."""
    first = analyses[0]
    profilers = " and ".join(dict.fromkeys(analysis.profiler for analysis in analyses))
    return [
        verdict_table(verdict(analyses, ranks), f"trace: {file_words(analyses)}, by {profilers}"),
        *with_rows(
            rank_table(analyses, ranks) if len(analyses) > 1 else None,
            part_table(analyses[:1]),
            step_table(first),
            kind_table(first),
            longest_kernels_table(first, shown),
            module_table(first, shown.top),
            operator_table(first, shown),
            copy_table(first),
            wait_table(first),
            collective_table(analyses, shown.bandwidths),
            capture_table(analyses),
        ),
    ]
