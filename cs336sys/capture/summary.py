"""Attribute every kernel of a capture to the range in which it was launched, and sum up."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cs336sys.capture.capture import Capture, Ranges, SavedRecord
from cs336sys.capture.intervals import Cover, Times
from cs336sys.capture.timeline import PROFILER_STEP as NUMBERED_STEP
from cs336sys.errors import UsageError
from cs336sys.measure.range_names import ATTENTION_PARTS, STEP, STEP_PHASES

PROFILER_STEP = "ProfilerStep"
WHOLE = "the whole capture"

# Annotations that cover less of the work's time than this do not speak for the capture.
_COVERED_PERCENT = 95.0


# Less than this share of the GPU's time given to phases means that the answers would be wrong, not imprecise.
MINIMUM_ATTRIBUTED_PERCENT = 95.0


@dataclass(frozen=True)
class RangeTime:
    """All ranges of one name, and the work that was launched in them. Times are sums over the ranges, in ns.

    Attributes:
        count: how many ranges there are.
        wall_ns: their own length on the CPU's clock.
        kernels: kernels, copies and fills launched in them.
        kernel_ns: how long each of these ran, added up; more than ``busy_ns`` where some ran side by side.
        busy_ns: how long at least one of them ran.
        span_ns: from the start of the first one to the end of the last one, range by range.
        gpu: the number of the GPU on which this work ran; None for that of all.
    """

    name: str
    count: int
    wall_ns: int
    kernels: int
    kernel_ns: int
    busy_ns: int
    span_ns: int
    gpu: int | None = None


@dataclass(frozen=True)
class KernelTime:
    """All launches of one kernel in all ranges of one name; durations in ns."""

    range: str
    kernel: str
    count: int
    total_ns: int
    median_ns: float
    min_ns: int
    max_ns: int


@dataclass(frozen=True)
class Profile(SavedRecord):
    """A capture's answer about its phases.

    Attributes:
        profiler: what made the capture.
        is_gpu: False where CPU operations replace kernels.
        phases: in the order in which they first begin; they do not overlap.
        step: the ranges called ``step``, which the phases are parts of; None where there are none.
        parts: those of the attention on the forward pass, by launching thread, within the steps.
        kernels: by phase and kernel, the longest first.
        part_kernels: likewise for ``parts``.
        attributed_percent: share of the work's time that has a phase, in the time from the first to the last step, or
            of all work whose launch was recorded where the phases were chosen by hand and need not cover everything.
        outside_ns: work launched before the first and after the last of those, or outside of the chosen ranges.
        configuration: what ``cs336sys nsys`` ran, as its report says.
        phases_are: what the phases are in a capture without ours where none were chosen, one sentence.
        of_gpus: phases and steps GPU by GPU, in a capture of several: where one waits, another may be busy.
        damage: what the capture lacks, or holds that cannot be, a sentence each.
        is_idle_known: False where work or launches are missing.
    """

    profiler: str
    is_gpu: bool
    phases: tuple[RangeTime, ...]
    step: RangeTime | None
    parts: tuple[RangeTime, ...]
    kernels: tuple[KernelTime, ...]
    part_kernels: tuple[KernelTime, ...]
    attributed_percent: float
    outside_ns: int
    configuration: dict[str, Any] | None = None
    phases_are: str = ""
    of_gpus: tuple[RangeTime, ...] = ()
    damage: tuple[str, ...] = ()
    is_idle_known: bool = True


class _LaunchedWork:
    """The work of a capture with the time and the thread of its launch; -1 where that was not recorded."""

    def __init__(self, capture: Capture):
        self.capture, self.work = capture, capture.work
        self.launched, self.thread = capture.launches()
        self.length = self.work.stop - self.work.start

    def phase(self, ranges: Ranges, *, same_thread: bool = False) -> Times:
        """Return which of some ranges was open when each work was launched; -1 for none.

        Ranges within ranges are gone, so that later ones end later, and if the last to begin has ended, all have.
        """
        result = np.full(len(self.work), -1)
        for group in _groups(ranges, ranges.process, *((ranges.thread,) if same_thread else ())):
            chosen = (self.launched >= 0) & (self.work.process == ranges.process[group[0]])
            if same_thread:
                chosen &= self.thread == ranges.thread[group[0]]
            result[chosen] = _open_at(ranges.select(group), self.launched[chosen], group)
        return result

    def named(self, names: Sequence[str]) -> Ranges:
        """Return the ranges of some names."""
        ranges = self.capture.ranges
        return ranges.select(self.capture.is_named(ranges.name, lambda text: text in names))

    def label(self, name: int) -> str:
        """Return the name of a range; numbers below 0 are those of ranges that are made here."""
        return _MADE[name] if name < 0 else self.capture.texts[name]

    def whole(self) -> Ranges:
        """Return a range around all work of each process; work without a launch is launched when it begins."""
        self.launched = np.where(self.launched < 0, self.work.start, self.launched)
        calls, rows = self.capture.calls, []
        for process in np.unique(self.work.process).tolist():
            starts = calls.start[calls.process == process]
            is_own = self.work.process == process
            first, last = (np.concatenate((starts, times[is_own])) for times in (self.work.start, self.work.stop))
            rows.append((-2, first.min(), last.max(), process, -1))
        return Ranges(*np.array(rows, np.int64).T)


_MADE = {-1: PROFILER_STEP, -2: WHOLE}


def _groups(ranges: Ranges, *keys: Times) -> list[Times]:
    """Numbers of the ranges of each group of equal keys, by begin and then by end, the latest first."""
    if not len(ranges):
        return []
    order = np.lexsort((-ranges.stop, ranges.start, *keys))
    is_new = np.logical_or.reduce([column[order[1:]] != column[order[:-1]] for column in keys])
    return np.split(order, np.flatnonzero(is_new) + 1)


def _outermost(ranges: Ranges, *keys: Times) -> Ranges:
    """Return the ranges without those that lie in another of equal keys."""
    kept = [np.zeros(0, np.int64)]
    for group in _groups(ranges, *keys):
        reached = np.maximum.accumulate(ranges.stop[group])
        kept.append(group[np.append(True, ranges.stop[group[1:]] > reached[:-1])])
    return ranges.select(np.concatenate(kept))


def _open_at(ranges: Ranges, time: Times, numbers: Times) -> Times:
    """Return the number of the last of some ranges to begin before each time, if it is open; -1 for none."""
    place = np.searchsorted(ranges.start, time, side="right") - 1
    is_open = (place >= 0) & (ranges.stop[place] >= time)
    return np.where(is_open, numbers[place], -1)


def _overlap(ranges: Ranges) -> tuple[int, int] | None:
    """Return the names of two ranges of a process that overlap and are called differently."""
    for group in _groups(ranges, ranges.process):
        before, after = group[:-1], group[1:]
        is_overlap = (ranges.start[after] < ranges.stop[before]) & (ranges.name[after] != ranges.name[before])
        for place in np.flatnonzero(is_overlap)[:1].tolist():
            return int(ranges.name[before[place]]), int(ranges.name[after[place]])
    return None


def _choose_phases(work: _LaunchedWork) -> tuple[Ranges, str]:
    """Ranges to sum up in a capture without ours, and a sentence that says which they are.

    Those are torch.profiler's steps, called :data:`PROFILER_STEP` from then on; without any the outermost annotations,
    if they cover the work and those of different names do not overlap; else a range around everything, :data:`WHOLE`.
    """
    ranges = work.capture.ranges
    is_step = work.capture.is_named(ranges.name, NUMBERED_STEP.match)
    steps, others = ranges.select(is_step), ranges.select(~is_step)
    steps = _outermost(replace(steps, name=np.full(len(steps), -1)), steps.process)
    in_steps = work.phase(steps) >= 0
    total = work.length.sum()
    is_known = 100 * work.length[work.launched >= 0].sum() >= _COVERED_PERCENT * total
    if is_known and in_steps.any():
        return steps, f"phases: the steps of torch.profiler, {len(steps)} of them; others are chosen with --range"
    outermost = _outermost(others, others.process)
    annotations = others.select(np.isin(others.name, outermost.name))
    in_ranges = work.length[in_steps | (work.phase(outermost) >= 0)].sum()
    if len(outermost) and 100 * in_ranges >= _COVERED_PERCENT * total and _overlap(annotations) is None:
        sentence = "phases: the program's own annotations, the outermost; others are chosen with --range"
        return _outermost(annotations, annotations.process, annotations.name), sentence
    sentence = "phases: none, the capture as a whole; where it has ranges they are chosen with --range"
    return work.whole(), sentence


def summarize(capture: Capture, chosen: Sequence[str] = ()) -> Profile:
    """Sum up a capture by phase.

    A kernel belongs to the range that is open, on whatever thread of the same process, when the API call that launched
    it begins: the backward pass launches from autograd's thread, and the kernel itself runs later than its launch. The
    call is found by correlation id and process. All kernels of a CUDA graph belong to the graph's launch. Parts of the
    attention are those of the launching thread.

    Args:
        chosen: names of the ranges that are the phases; none for those of ``cs336sys nsys``, or where it has none,
            for torch.profiler's steps, the outermost annotations, or the capture as a whole.

    Raises:
        UsageError: a chosen range is unknown, the chosen ones overlap, or phases have too little of the work.
    """
    names = capture.range_names()
    work = _LaunchedWork(capture)
    phases_are = ""
    if chosen or any(name in names for name in STEP_PHASES):
        phases = _named_phases(work, tuple(dict.fromkeys(chosen)) or [name for name in STEP_PHASES if name in names])
    else:
        phases, phases_are = _choose_phases(work)
    steps = work.named(() if chosen or phases_are else (STEP,))
    steps = _outermost(steps, steps.process)
    parts = work.named(ATTENTION_PARTS)
    parts = _outermost(parts, parts.process, parts.thread, parts.name)
    # A warm-up has attention too.
    for group in _groups(steps, steps.process):
        is_warm_up = _open_at(steps.select(group), parts.start, group) < 0
        parts = parts.select(~(is_warm_up & (parts.process == steps.process[group[0]])))
    phase_of, step_of = work.phase(phases), work.phase(steps)
    attributed_percent, outside_ns = _check_attributed(
        work, phases, steps, phase_of, must_cover=not (chosen or phases_are)
    )
    part_of = work.phase(parts, same_thread=True)
    step = _range_times(work, steps, step_of)
    gpus = np.unique(work.work.gpu).tolist()
    of_gpus = [
        row
        for gpu in (gpus if len(gpus) > 1 else ())
        for ranges, places in ((phases, phase_of), (steps, step_of))
        for row in _range_times(work, ranges, places, gpu)
    ]
    return Profile(
        profiler=capture.profiler,
        is_gpu=capture.is_gpu,
        phases=_range_times(work, phases, phase_of),
        step=step[0] if step else None,
        parts=_range_times(work, parts, part_of),
        kernels=_kernel_times(work, phases, phase_of),
        part_kernels=_kernel_times(work, parts, part_of),
        attributed_percent=attributed_percent,
        outside_ns=outside_ns,
        configuration=capture.configuration(),
        phases_are=phases_are,
        of_gpus=tuple(of_gpus),
        damage=capture.damage.sentences,
        is_idle_known=not capture.damage.hides_times,
    )


def _named_phases(work: _LaunchedWork, phase_names: Sequence[str]) -> Ranges:
    """Return the ranges of these names.

    Raises:
        UsageError: there are none of a name, or two overlap.
    """
    names = work.capture.range_names()
    if not names:
        raise UsageError("the capture holds no ranges, so kernels have no phase: annotate the program with NVTX ranges")
    for name in phase_names:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
            shown = list(dict.fromkeys([*near, *names]))[: max(8, len(near))]
            rest = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
            listed = ", ".join(f"'{choice}'" for choice in shown)
            raise UsageError(f"--range '{name}': the capture has no range of this name; it has {listed}{rest}")
    phases = work.named(phase_names)
    phases = _outermost(phases, phases.process, phases.name)
    if overlap := _overlap(phases):
        both = " and ".join(f"'{work.label(name)}'" for name in overlap)
        raise UsageError(f"ranges {both} overlap, so kernels would count twice: choose ranges that do not")
    return phases


def _check_attributed(
    work: _LaunchedWork, phases: Ranges, steps: Ranges, phase_of: Times, *, must_cover: bool
) -> tuple[float, int]:
    """Share of the work that has a phase, in percent, and the time of work that no phase need have, in ns."""
    # What has no launch (it was recorded before the capture began, or dropped) is placed by when it ran.
    times = np.where(work.launched < 0, work.work.start, work.launched)
    is_outside = np.ones(len(times), bool)
    for process in np.unique(phases.process).tolist():
        first, last = (
            np.concatenate([getattr(ranges, edge)[ranges.process == process] for ranges in (phases, steps)])
            for edge in ("start", "stop")
        )
        is_outside[(work.work.process == process) & (times >= first.min()) & (times <= last.max())] = False
    total, with_phase, without_launch, outside = (
        int(work.length[chosen].sum()) for chosen in (slice(None), phase_of >= 0, work.launched < 0, is_outside)
    )
    if not with_phase:
        raise UsageError("no kernel was launched in these ranges: the kernels belong to other processes or other times")
    if must_cover:
        expected = total - outside
        percent = 100 * with_phase / expected
    else:
        expected, outside = total, total - with_phase - without_launch
        percent = 100 * (total - without_launch) / total
    if percent < MINIMUM_ATTRIBUTED_PERCENT:
        raise UsageError(
            f"only {percent:.1f} % of {expected / 1e6:.3g} ms of work on the GPU could be given to phases, "
            f"{MINIMUM_ATTRIBUTED_PERCENT:g} % is the least: {without_launch / 1e6:.3g} ms have no launch in the "
            "capture, the rest was launched between phases"
        )
    return percent, outside


def _range_times(work: _LaunchedWork, ranges: Ranges, places: Times, gpu: int | None = None) -> tuple[RangeTime, ...]:
    """Sums over some ranges by name, in the order of first begin.

    Args:
        places: the range of each work.
        gpu: count only what ran on this one, in the ranges of processes that use it.
    """
    is_counted = (places >= 0) & (work.work.gpu == gpu if gpu is not None else True)
    chosen = np.flatnonzero(is_counted)
    chosen = chosen[np.lexsort((work.work.stop[chosen], work.work.start[chosen], places[chosen]))]
    owners, firsts = np.unique(places[chosen], return_index=True)
    sums = np.zeros((len(ranges), 4), np.int64)
    for owner, first, last in zip(owners.tolist(), firsts, np.append(firsts[1:], len(chosen)), strict=False):
        start, stop = work.work.start[chosen[first:last]], work.work.stop[chosen[first:last]]
        sums[owner] = last - first, (stop - start).sum(), Cover(start, stop).total, stop.max() - start.min()
    users = np.unique(work.work.process[work.work.gpu == gpu]) if gpu is not None else ranges.process
    is_used = np.isin(ranges.process, users)
    rows = []
    for name in dict.fromkeys(ranges.name[order] for order in np.argsort(ranges.start, kind="stable").tolist()):
        of_name = ranges.name == name
        if np.any(of_name & is_used):
            wall_ns = int((ranges.stop - ranges.start)[of_name & is_used].sum())
            kernels, kernel_ns, busy_ns, span_ns = sums[of_name].sum(axis=0).tolist()
            count = int((of_name & is_used).sum())
            rows.append(RangeTime(work.label(int(name)), count, wall_ns, kernels, kernel_ns, busy_ns, span_ns, gpu))
    return tuple(rows)


def _kernel_times(work: _LaunchedWork, ranges: Ranges, places: Times) -> tuple[KernelTime, ...]:
    chosen = np.flatnonzero(places >= 0)
    pairs = np.column_stack((ranges.name[places[chosen]], work.work.name[chosen]))
    order = np.lexsort((work.length[chosen], pairs[:, 1], pairs[:, 0]))
    groups, firsts = np.unique(pairs[order], axis=0, return_index=True)
    rows = []
    for (name, kernel), times in zip(groups.tolist(), np.split(work.length[chosen][order], firsts[1:]), strict=False):
        statistics = (int(times.sum()), float(np.median(times)), int(times[0]), int(times[-1]))
        rows.append(KernelTime(work.label(name), work.capture.texts[kernel], len(times), *statistics))
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.kernel)))
