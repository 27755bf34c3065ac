"""Sum up the work of timelines by the named ranges in which it was launched: phases of a step, parts of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.capture import Capture, Ranges, SavedRecord, say_capture
from cs336sys.capture.intervals import Cover, Nested, Times, is_within_another
from cs336sys.capture.range_names import ATTENTION_PARTS, STEP, STEP_PHASES, run_configuration
from cs336sys.capture.timeline import PROFILER_STEP, LaunchedWork, Timeline, timelines
from cs336sys.errors import UsageError

# Names that no capture holds, and their numbers: they follow all texts, so that they count from the end.
_UNNAMED = ("the whole capture", "ProfilerStep")
_WHOLE_CAPTURE, _PROFILER_STEP = -2, -1
# Annotations that cover less of the work's time do not speak for the capture; phases that have less give wrong answers.
_LEAST_PERCENT = 95.0


@dataclass(frozen=True)
class RangeTime:
    """All ranges of one name, and the work that was launched in them. Times are sums over the ranges, in ns."""

    name: str
    count: int  # How many ranges there are.
    wall_ns: int  # Length of the ranges on the CPU's clock.
    kernels: int  # Kernels, copies and fills launched in them.
    kernel_ns: int  # Durations of these, added up; more than busy_ns where some ran side by side.
    busy_ns: int  # How long at least one of them ran.
    span_ns: int  # From the start of a range's first kernel to the end of its last.
    gpu: int | None = None  # The number of the GPU that did this work; None for all GPUs.


@dataclass(frozen=True)
class KernelTime:
    """All launches of one kernel in all ranges of one name; durations in ns, ``std_ns`` of two launches or more."""

    range: str
    kernel: str
    count: int
    total_ns: int
    median_ns: float
    min_ns: int
    max_ns: int
    std_ns: float | None = None


@dataclass(frozen=True)
class Profile(SavedRecord):
    """A capture summed up by phase."""

    profiler: str  # The program that made the capture.
    is_gpu: bool  # False where CPU operations replace kernels.
    phases: tuple[RangeTime, ...]  # In the order in which they first begin; they do not overlap.
    step: RangeTime | None  # The ranges called "step", which consist of the phases; None where there are none.
    parts: tuple[RangeTime, ...]  # Parts of the attention in the forward pass, by launching thread, within the steps.
    kernels: tuple[KernelTime, ...]  # By phase and kernel, the longest first.
    part_kernels: tuple[KernelTime, ...]  # Likewise for parts.
    # Share of the work's time that has a phase, in the time from the first to the last step; where the phases were
    # chosen by hand and need not cover everything, the share whose launch was recorded.
    attributed_percent: float
    configuration: dict[str, Any] | None = None  # What `cs336sys nsys` ran, as its report says.
    phases_are: str = ""  # A sentence on which phases were chosen, where neither we nor the user named them.
    of_gpus: tuple[RangeTime, ...] = ()  # GPU by GPU, in a capture of several: where one waits, another may be busy.
    damage: tuple[str, ...] = ()  # What the capture lacks, or holds that cannot be, a sentence each.
    is_idle_known: bool = True  # False where work or launches are missing.


def summarize(capture: Capture, chosen: Sequence[str] = (), gpus: Sequence[Timeline] | None = None) -> Profile:
    """Sum up a capture by phase.

    A kernel belongs to the range that is open, on whatever thread of the same process, when the API call that launched
    it begins: the backward pass launches from autograd's thread, and the kernel itself runs later than its launch. All
    kernels of a CUDA graph belong to the graph's launch. Parts of the attention are those of the launching thread.

    Args:
        chosen: names of the ranges that are the phases; none for those of ``cs336sys nsys``, or where it has none,
            for torch.profiler's steps, the outermost annotations, or the capture as a whole.
        gpus: the capture's timelines, if the caller has them already.

    Raises:
        UsageError: a chosen range is unknown, the chosen ones overlap, or phases have too little of the work.
    """
    gpus = gpus or timelines(capture)
    work = gpus[0] if len(gpus) == 1 else LaunchedWork.joined(*gpus)
    names = tuple(dict.fromkeys(chosen)) or [name for name in STEP_PHASES if name in capture.range_names()]
    # The ranges, and a sentence on them where neither the user nor we named them.
    phases, phases_are = (_named_phases(capture, names), "") if names else _choose_phases(capture, work)
    if _WHOLE_CAPTURE in phases.name:
        # It holds work without a launch, too: as if this were launched when it begins.
        work = replace(work, launched=np.where(work.launched < 0, work.start, work.launched))
    phases_are_ours = not (chosen or phases_are)
    # Our ranges of whole steps. A range of that name in another capture, or next to chosen ranges, counts as no step.
    steps = capture.rows_named(capture.ranges, lambda text: phases_are_ours and text == STEP)
    steps = _outermost(steps, steps.process)
    parts = capture.rows_named(capture.ranges, ATTENTION_PARTS.__contains__)
    parts = _outermost(parts, parts.process, parts.thread, parts.name)
    # A warm-up has attention too: only the steps' counts, or all in a process without steps.
    is_in_step = Nested(steps.start, steps.stop, steps.process).innermost(parts.start, parts.process) >= 0
    parts = parts.select(is_in_step | ~np.isin(parts.process, steps.process))
    phase_of_work, part_of_work = work.launched_in(phases), work.launched_in(parts, same_thread=True)
    covered = Ranges.joined(phases, steps) if phases_are_ours else None  # Other ranges may leave work out.
    texts = [*capture.texts, *_UNNAMED]  # With the names that ranges of no text have.
    step = _range_times(texts, work, steps, work.launched_in(steps))
    gpu_numbers = np.unique(work.gpu).tolist()
    of_gpus = []
    for gpu in gpu_numbers if len(gpu_numbers) > 1 else ():  # The sums of a single GPU are those of all.
        gpu_work = work.select(work.gpu == gpu)
        for ranges in (phases, steps):
            gpu_ranges = ranges.select(np.isin(ranges.process, gpu_work.process))
            times = _range_times(texts, gpu_work, gpu_ranges, gpu_work.launched_in(gpu_ranges))
            of_gpus += [replace(time, gpu=gpu) for time in times]
    return Profile(
        profiler=capture.profiler,
        is_gpu=capture.is_gpu,
        phases=_range_times(texts, work, phases, phase_of_work),
        step=step[0] if step else None,  # All steps have the same name.
        parts=_range_times(texts, work, parts, part_of_work),
        kernels=_kernel_times(texts, work, phases, phase_of_work),
        part_kernels=_kernel_times(texts, work, parts, part_of_work),
        attributed_percent=_attributed_percent(work, phase_of_work >= 0, covered),
        configuration=next(filter(None, map(run_configuration, capture.range_names())), None),
        phases_are=phases_are,
        of_gpus=tuple(of_gpus),
        damage=capture.damage.sentences,
        is_idle_known=not capture.damage.hides_times,
    )


def _outermost(ranges: Ranges, *keys: Times) -> Ranges:
    """Return the ranges without those that lie in another of equal keys."""
    return ranges.select(~is_within_another(ranges.start, ranges.stop, *keys))


def _overlap(ranges: Ranges) -> list[int]:
    """Return the names of two ranges of a process that overlap and are called differently, or none."""
    order = np.lexsort((-ranges.stop, ranges.start, ranges.process))
    before, after = ranges.select(order[:-1]), ranges.select(order[1:])
    is_overlap = (before.process == after.process) & (after.start < before.stop) & (after.name != before.name)
    return [int(side.name[place]) for place in np.flatnonzero(is_overlap)[:1] for side in (before, after)]


def _named_phases(capture: Capture, names: Sequence[str]) -> Ranges:
    """Return the ranges of these names, or raise a UsageError: there are none of a name, or two overlap."""
    for name in names:
        capture.require_range(name, "--range")
    phases = capture.rows_named(capture.ranges, names.__contains__)
    phases = _outermost(phases, phases.process, phases.name)
    if overlap := _overlap(phases):
        both = " and ".join(f"'{capture.texts[name]}'" for name in overlap)
        raise UsageError(f"ranges {both} overlap, so kernels would count twice: choose ranges that do not")
    return phases


def _choose_phases(capture: Capture, work: LaunchedWork) -> tuple[Ranges, str]:
    """Choose the ranges to sum up in a capture without ours, and return them with a sentence that names them.

    They are torch.profiler's steps; without any the outermost annotations, if they cover the work and those of
    different names do not overlap; else a range around everything.
    """
    is_step = capture.is_named(capture.ranges.name, PROFILER_STEP.match)
    steps, others = capture.ranges.select(is_step), capture.ranges.select(~is_step)
    # All get one name, without the number of the step.
    steps = _outermost(replace(steps, name=np.full(len(steps), _PROFILER_STEP)), steps.process)
    is_in_step = work.launched_in(steps) >= 0
    least_ns = _LEAST_PERCENT / 100 * work.length.sum()
    # Steps need not cover the work: what is launched between them may have no phase. But work without a launch is in no
    # range: where there is more than a little, the whole capture is summed up.
    if is_in_step.any() and work.length[work.launched >= 0].sum() >= least_ns:
        return steps, f"phases: the steps of torch.profiler, {len(steps)} of them; others are chosen with --range"
    outermost = _outermost(others, others.process)
    annotations = others.select(np.isin(others.name, outermost.name))
    covered_ns = work.length[is_in_step | (work.launched_in(outermost) >= 0)].sum()
    if len(outermost) and covered_ns >= least_ns and not _overlap(annotations):
        sentence = "phases: the program's own annotations, the outermost; others are chosen with --range"
        return _outermost(annotations, annotations.process, annotations.name), sentence
    rows = []
    for process in np.unique(work.process).tolist():
        calls, of_process = capture.calls, work.process == process
        edges = np.concatenate((calls.start[calls.process == process], work.start[of_process], work.stop[of_process]))
        no_thread = -1
        rows.append((_WHOLE_CAPTURE, edges.min(), edges.max(), process, no_thread))
    sentence = "phases: none, the capture as a whole; where it has ranges they are chosen with --range"
    return Ranges(*np.array(rows, np.int64).T), sentence


def _attributed_percent(work: LaunchedWork, is_in_phase: NDArray[np.bool_], covered: Ranges | None) -> float:
    """Return how many percent of the work's time belong to a phase, and refuse a capture where most does not.

    ``covered`` are ranges from the first to the last of which phases should cover everything; None: they need not.
    """
    has_launch = work.launched >= 0
    if not is_in_phase.any():
        raise UsageError("no kernel was launched in these ranges: the kernels belong to other processes or other times")
    # Expected in a phase is all work, or what was launched while the ``covered`` ranges went on. Without these, phases
    # may leave work out: all counts as attributed but what has no launch, which can be of no phase.
    is_expected, is_attributed = np.ones(len(work), bool), has_launch
    if covered is not None:
        is_expected, is_attributed = np.zeros(len(work), bool), is_in_phase
        # What has no launch (it was recorded before the capture began, or dropped) is placed by when it ran.
        times = np.where(has_launch, work.launched, work.start)
        for process in np.unique(covered.process).tolist():
            of_process = covered.select(covered.process == process)
            is_inside = (times >= of_process.start.min()) & (times <= of_process.stop.max())
            is_expected |= (work.process == process) & is_inside
    expected_ns = int(work.length[is_expected].sum())
    if not expected_ns:
        raise UsageError("all kernels in these ranges begin and end at once: the capture has no durations to sum up")
    percent = 100 * int(work.length[is_expected & is_attributed].sum()) / expected_ns
    if percent < _LEAST_PERCENT:
        facts = {"expected_ms": expected_ns / 1e6, "unlaunched_ms": work.length[~has_launch].sum() / 1e6}
        raise UsageError(say_capture("no phase for most", percent=percent, least_percent=_LEAST_PERCENT, **facts))
    return percent


def _range_times(texts: Sequence[str], work: LaunchedWork, ranges: Ranges, range_of: Times) -> tuple[RangeTime, ...]:
    """Return sums by name, in the order in which these begin; ``range_of`` has the row of each work's range, or -1."""
    chosen = np.flatnonzero(range_of >= 0)
    chosen = chosen[np.lexsort((work.stop[chosen], work.start[chosen], range_of[chosen]))]
    sums = np.zeros((len(ranges), 4), np.int64)
    numbers, firsts = np.unique(range_of[chosen], return_index=True)  # From 0 on: np.split's first part is empty.
    for number, members in zip(numbers.tolist(), np.split(chosen, firsts)[1:], strict=True):
        start, stop = work.start[members], work.stop[members]
        sums[number] = len(members), (stop - start).sum(), Cover(start, stop).total, stop.max() - start.min()
    rows = []
    for name in dict.fromkeys(ranges.name[np.argsort(ranges.start, kind="stable")].tolist()):
        of_name = ranges.name == name
        wall_ns = int(ranges.length[of_name].sum())
        kernels, kernel_ns, busy_ns, span_ns = sums[of_name].sum(axis=0).tolist()
        rows.append(RangeTime(texts[name], int(of_name.sum()), wall_ns, kernels, kernel_ns, busy_ns, span_ns))
    return tuple(rows)


def _kernel_times(texts: Sequence[str], work: LaunchedWork, ranges: Ranges, range_of: Times) -> tuple[KernelTime, ...]:
    """Return launches by the name of their range, whose row is in ``range_of`` or -1, and kernel, the longest first."""
    chosen = np.flatnonzero(range_of >= 0)
    pairs = np.column_stack((ranges.name[range_of[chosen]], work.name[chosen]))
    order = np.lexsort((work.length[chosen], pairs[:, 1], pairs[:, 0]))
    groups, firsts = np.unique(pairs[order], axis=0, return_index=True)  # From 0 on: np.split's first part is empty.
    rows = []
    for (name, kernel), times in zip(groups.tolist(), np.split(work.length[chosen][order], firsts)[1:], strict=True):
        # Sorted, so that the first is the least and the last the most.
        statistics = (int(times.sum()), float(np.median(times)), int(times[0]), int(times[-1]))
        std_ns = float(np.std(times, ddof=1)) if len(times) > 1 else None
        rows.append(KernelTime(texts[name], texts[kernel], len(times), *statistics, std_ns))
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.kernel)))
