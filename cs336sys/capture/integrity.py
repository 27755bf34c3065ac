"""Check whether a capture is whole: one pass counts and leaves out what cannot be true, before any verdict."""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.capture import Calls, Capture, Damage, DeviceWork
from cs336sys.capture.intervals import Times

Flags = NDArray[np.bool_]

# The clocks of CPU and GPU are some microseconds apart; a call that waits returns a while after the work.
_CLOCKS_NS = 50_000
_LATE_WAIT_NS = 1_000_000
# Rounding of kernels that follow each other.
_ROUNDING_NS = 1000
# Events further apart than this, and than many times what the others span, are not of one session.
_SESSION_GAP_NS = 600 * 10**9
_SESSION_SPANS = 100
# From this share on it is not some work that is wrong but a clock.
_MOST = 0.2

# Beyond all times.
_NEVER = 1 << 62

# Calls that launch a kernel each, or a graph of them, on CUDA, HIP and XPU.
_SINGLE_LAUNCH = re.compile(r"LaunchKernel|KernelLaunch|LaunchCooperativeKernel(?!Multi)")
_LAUNCH = re.compile(rf"{_SINGLE_LAUNCH.pattern}|GraphLaunch")
# A kernel launched without attributes does not begin before the one before it on its stream ends.
_PLAIN_LAUNCH = re.compile(r"^cu(da)?LaunchKernel(_v\d+|_ptsz)*$")
_BEGIN_GRAPH, _END_GRAPH = re.compile("BeginCapture"), re.compile("EndCapture")
_DEVICE_WAIT = re.compile(r"(Device|Ctx)Synchronize")


def check_capture(capture: Capture) -> Capture:
    """Return the capture with the launches of its work, without what cannot be true, and with what that was."""
    sentences = []
    if capture.is_cut:
        sentences.append("The file ends within its events: what came later is missing.")
    if capture.unreadable:
        events = "event" if capture.unreadable == 1 else "events"
        sentences.append(f"{capture.unreadable:,} {events} left out: no JSON, or without a time that can be.")
    for leave_out in (_within_session, _once):
        capture, sentence = leave_out(capture)
        sentences += sentence
    launch, sentence = _launches(capture)
    sentences += sentence
    capture = replace(capture, launch=launch)
    empty = np.zeros((0, 2), np.int64)
    if not capture.is_gpu:
        return replace(capture, damage=Damage(tuple(sentences)))
    checks: tuple[tuple[Callable[[Capture], Flags], str], ...] = (
        (_begins_early, "begin before their launch"),
        (_ends_late, "end after a call that waited for them"),
        (_overlaps, "overlap others of their stream"),
    )
    hides_idle_time = False
    lost = [empty]
    for test, fault in checks:
        is_wrong = test(capture)
        count, total = int(is_wrong.sum()), len(is_wrong)
        if not count:
            continue
        if count > _MOST * total and count > 1:
            sentences.append(f"{count:,} of {total:,} kernels and copies {fault}: their times cannot be trusted.")
            hides_idle_time = True
            continue
        sentences.append(f"{count:,} of {total:,} kernels and copies {fault}: they are left out.")
        lost.append(_marks(capture, is_wrong))
        capture = replace(capture, work=capture.work.select(~is_wrong), launch=capture.launch[~is_wrong])
    left_out = sum(map(len, lost))
    of_launches, sentence = _lost_launches(capture, left_out)
    sentences += sentence
    unlaunched, sentence = _lost_work(capture)
    sentences += sentence
    damage = Damage(tuple(sentences), np.concatenate([*lost, of_launches]), unlaunched, hides_idle_time)
    return replace(capture, damage=damage)


def _marks(capture: Capture, chosen: Flags) -> Times:
    """Process and time of the launches of some work; where they are not known, the work's own start."""
    times = np.where(capture.launch >= 0, capture.launches()[0], capture.work.start)
    return np.column_stack((capture.work.process, times))[chosen]


def _within_session(capture: Capture) -> tuple[Capture, list[str]]:
    """Leave out events at 0, and those so far from most that they are of another session."""
    names = ("work", "calls", "ranges", "operations", "modules")
    times = np.concatenate([getattr(capture, name).start for name in ("work", "calls", "ranges")])
    first, last = _session(np.unique(times))
    left_out = 0
    kept = {}
    for name in names:
        rows = getattr(capture, name)
        is_inside = (rows.start >= first) & (rows.start <= last)
        kept[name] = rows if is_inside.all() else rows.select(is_inside)
        left_out += int((~is_inside).sum()) if name not in ("operations", "modules") else 0
    if not left_out or not len(kept["work"]):
        return capture, []
    sentence = f"{left_out:,} of {len(times):,} events are at times that are not of this capture: they are left out."
    return replace(capture, **kept), [sentence]


def _once(capture: Capture) -> tuple[Capture, list[str]]:
    """Leave out work that is recorded twice."""
    work = capture.work
    columns = (work.start, work.stop, work.process, work.correlation, work.name, work.gpu, work.stream)
    order = np.lexsort(columns)
    is_same = np.logical_and.reduce([column[order[1:]] == column[order[:-1]] for column in columns])
    repeated = order[1:][is_same & (work.stop > work.start)[order[1:]]]
    if not capture.is_gpu or not len(repeated):
        return capture, []
    sentence = f"{len(repeated):,} of {len(work):,} kernels and copies are recorded twice: they count once."
    return replace(capture, work=work.select(np.delete(np.arange(len(work)), repeated))), [sentence]


def _session(times: Times) -> tuple[int, int]:
    """The first and the last of some distinct times that are of one session, in order."""
    if len(times) > 1 and times[0] == 0 and times[1] > 10**9:
        times = times[1:]
    while len(times) > 1:
        gaps = np.diff(times)
        widest = int(gaps.argmax())
        larger = max(times[: widest + 1], times[widest + 1 :], key=len)
        if gaps[widest] < max(_SESSION_GAP_NS, _SESSION_SPANS * int(larger[-1] - larger[0])):
            break
        times = larger
    return (int(times[0]), int(times[-1])) if len(times) else (0, 0)


def _launches(capture: Capture) -> tuple[Times, list[str]]:
    """Return the call of each work by process and number, -1 for none; and say which numbers several launches share.

    Where as many work as launches have a number, and each begins after its launch, they belong together in order.
    """
    work, calls = capture.work, capture.calls
    launch = np.full(len(work), -1)
    reused = ambiguous = 0
    for process in np.unique(work.process).tolist():
        chosen = np.flatnonzero((work.process == process) & (work.correlation >= 0))
        own_calls = np.flatnonzero((calls.process == process) & (calls.correlation >= 0))
        if not len(own_calls) or not len(chosen):
            continue
        own_calls = own_calls[np.lexsort((calls.start[own_calls], calls.correlation[own_calls]))]
        numbers = calls.correlation[own_calls]
        # A call within another of the same number is the runtime's call of the driver.
        same = np.append(
            False, (numbers[1:] == numbers[:-1]) & (calls.start[own_calls[1:]] < calls.stop[own_calls[:-1]])
        )
        own_calls, numbers = own_calls[~same], numbers[~same]
        low, high = (np.searchsorted(numbers, work.correlation[chosen], side=side) for side in ("left", "right"))
        launch[chosen] = np.where(high > low, own_calls[np.minimum(low, len(own_calls) - 1)], -1)
        is_shared = high - low > 1
        for number in np.unique(work.correlation[chosen[is_shared]]).tolist():
            first, last = np.searchsorted(numbers, [number, number + 1])
            of_number = chosen[work.correlation[chosen] == number]
            of_number = of_number[np.argsort(work.start[of_number], kind="stable")]
            candidates = own_calls[first:last]
            if len(candidates) == len(of_number) and np.all(work.start[of_number] >= calls.start[candidates]):
                launch[of_number] = candidates
                reused += 1
            else:
                launch[of_number] = -1
                ambiguous += len(of_number)
    # A launch of one kernel that several name is that of one of them.
    users = np.bincount(launch[launch >= 0], minlength=len(calls))
    is_single = capture.is_named(calls.name, _SINGLE_LAUNCH.search) & (users > 1)
    is_taken = np.where(launch >= 0, is_single[launch] if len(calls) else False, False)
    launch[is_taken] = -1
    ambiguous += int(is_taken.sum())
    sentences = []
    if reused:
        sentences.append(f"Launch numbers are not unique: {reused:,} stand for several launches, told apart by order.")
    if ambiguous:
        sentences.append(f"Launch numbers are not unique: the launch of {ambiguous:,} kernels and copies is unknown.")
    return launch, sentences


def _launched(capture: Capture) -> Times:
    """Return when each work was launched; a time before all where that is not known."""
    return np.where(capture.launch >= 0, capture.launches()[0], -_NEVER)


def _begins_early(capture: Capture) -> Flags:
    return capture.work.start < _launched(capture) - _CLOCKS_NS


def _ends_late(capture: Capture) -> Flags:
    """Find work that ends after a wait for the whole GPU that began after its launch."""
    calls, work = capture.calls, capture.work
    is_wrong = np.zeros(len(work), bool)
    is_wait = capture.is_named(calls.name, _DEVICE_WAIT.search)
    # A process with several GPUs waits for one of them.
    processes = [
        process for process in np.unique(work.process) if len(np.unique(work.gpu[work.process == process])) == 1
    ]
    for process in processes:
        waits = calls.select(is_wait & (calls.process == process))
        if not len(waits):
            continue
        order = np.argsort(waits.start, kind="stable")
        # The earliest end of all waits that begin from here on.
        ends = np.minimum.accumulate(waits.stop[order][::-1])[::-1]
        following = np.searchsorted(waits.start[order], _launched(capture), side="right")
        is_followed = (following < len(ends)) & (capture.launch >= 0) & (work.process == process)
        end = ends[np.minimum(following, len(ends) - 1)]
        is_wrong |= is_followed & (work.stop > end + _LATE_WAIT_NS)
    return is_wrong


def _overlaps(capture: Capture) -> Flags:
    """Find work that runs into the next of its stream: of two, the one whose duration is less usual for its name.

    Kernels of a graph may run side by side, and so may one that was launched to begin early (programmatic dependent
    launch), which ends after the one before.
    """
    work = capture.work
    is_wrong = np.zeros(len(work), bool)
    plain_calls = capture.is_named(capture.calls.name, _PLAIN_LAUNCH.search)
    is_plain = np.where(capture.launch >= 0, plain_calls[capture.launch] if len(plain_calls) else False, False)
    unusual = _unusual(work)
    order = np.lexsort((work.stop, work.start, work.stream, work.gpu, work.process))
    for _ in range(50):
        before, after = order[:-1], order[1:]
        is_pair = (
            (work.stream[before] == work.stream[after])
            & (work.gpu[before] == work.gpu[after])
            & (work.process[before] == work.process[after])
            & ((work.correlation[before] != work.correlation[after]) | (work.correlation[after] < 0))
        )
        shared = np.minimum(work.stop[before], work.stop[after]) - work.start[after]
        contains = (work.stop[after] < work.stop[before]) & (work.stop[after] > work.start[after])
        pairs = np.flatnonzero(is_pair & (shared > _ROUNDING_NS) & (contains | is_plain[after]))
        if not len(pairs):
            break
        is_first = unusual[before[pairs]] >= unusual[after[pairs]]
        is_wrong[np.where(is_first, before[pairs], after[pairs])] = True
        order = order[~is_wrong[order]]
    return is_wrong


def _unusual(work: DeviceWork) -> NDArray[np.float64]:
    """How far the duration of each work is from the median of those of its name, as the logarithm of their ratio."""
    length = np.maximum(work.stop - work.start, 1).astype(float)
    order = np.lexsort((length, work.name))
    _, first, group, counts = np.unique(work.name[order], return_index=True, return_inverse=True, return_counts=True)
    medians = length[order][first + counts // 2]
    unusual = np.empty(len(length))
    unusual[order] = np.abs(np.log(length[order] / medians[group]))
    return unusual


def _lost_launches(capture: Capture, left_out: int) -> tuple[Times, list[str]]:
    """Process and time of launches that have no work, but for the work that was left out."""
    calls = capture.calls
    is_launch = capture.is_named(calls.name, _LAUNCH.search) & (calls.correlation >= 0)
    # A trace of several GPUs may lack those of others: only processes that have work.
    is_launch &= np.isin(calls.process, capture.work.process)
    is_launch &= ~_within_calls(calls, is_launch) & ~_while_capturing(capture)
    has_work = np.zeros(len(calls), bool)
    has_work[capture.launch[capture.launch >= 0]] = True
    lost = np.flatnonzero(is_launch & ~has_work)
    # Work that several launches may have launched has none for certain.
    uncertain = np.unique(capture.work.correlation[capture.launch < 0])
    lost = lost[~np.isin(calls.correlation[lost], uncertain)]
    count = len(lost) - left_out
    sentences = []
    if count > 0:
        sentences.append(f"{count:,} of {int(is_launch.sum()):,} launches have no kernel: the profiler lost them.")
    return np.column_stack((calls.process[lost], calls.start[lost])), sentences


def _within_calls(calls: Calls, is_launch: Flags) -> Flags:
    """Find launches that are calls of another launch: a runtime calls the driver."""
    chosen = np.flatnonzero(is_launch)
    chosen = chosen[np.lexsort((-calls.stop[chosen], calls.start[chosen], calls.thread[chosen], calls.process[chosen]))]
    before, after = chosen[:-1], chosen[1:]
    is_inner = (
        (calls.thread[before] == calls.thread[after])
        & (calls.process[before] == calls.process[after])
        & (calls.stop[after] <= calls.stop[before])
        & (calls.start[after] < calls.stop[before])
    )
    result = np.zeros(len(calls), bool)
    result[after[is_inner]] = True
    return result


def _while_capturing(capture: Capture) -> Flags:
    """Find calls that only record a CUDA graph."""
    calls = capture.calls
    result = np.zeros(len(calls), bool)
    begins = calls.start[capture.is_named(calls.name, _BEGIN_GRAPH.search)]
    ends = np.sort(calls.stop[capture.is_named(calls.name, _END_GRAPH.search)])
    for begin in begins.tolist():
        following = np.searchsorted(ends, begin)
        end = ends[following] if following < len(ends) else _NEVER
        result |= (calls.start >= begin) & (calls.start <= end)
    return result


def _lost_work(capture: Capture) -> tuple[Times, list[str]]:
    """Process and start of work without a launch that began after some that has one."""
    work = capture.work
    has_launch = capture.launch >= 0
    is_lost = np.zeros(len(work), bool)
    for process in np.unique(work.process[has_launch]).tolist():
        is_own = work.process == process
        first = work.start[is_own & has_launch].min()
        is_lost |= is_own & ~has_launch & (work.start > first)
    if not is_lost.any():
        return np.zeros((0, 2), np.int64), []
    sentence = f"{int(is_lost.sum()):,} of {len(work):,} kernels and copies have no launch: the profiler lost them."
    return np.column_stack((work.process[is_lost], work.start[is_lost])), [sentence]
