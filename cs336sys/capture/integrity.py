"""Check whether a capture is whole: one pass counts and leaves out what cannot be true, before any verdict."""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.capture import Capture, Damage, DeviceWork
from cs336sys.capture.intervals import Times, containing, group_numbers, is_within_another

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
    sentences: list[str] = []
    if capture.is_cut:
        sentences.append("The file ends within its events: what came later is missing.")
    if capture.unreadable:
        events = "event" if capture.unreadable == 1 else "events"
        sentences.append(f"{capture.unreadable:,} {events} left out: no JSON, or without a time that can be.")
    capture = _leave_out_other_sessions(capture, sentences)
    if not capture.is_gpu:
        return replace(capture, launch=_launches(capture, sentences), damage=Damage(tuple(sentences)))
    capture = _leave_out_repetitions(capture, sentences)
    capture = replace(capture, launch=_launches(capture, sentences))
    checks: tuple[tuple[Callable[[Capture], Flags], str], ...] = (
        (_begins_early, "begin before their launch"),
        (_ends_late, "end after a call that waited for them"),
        (_overlaps, "overlap others of their stream"),
    )
    hides_idle_time = False
    lost = []
    for test, fault in checks:
        is_wrong = test(capture)
        count, total = int(is_wrong.sum()), len(is_wrong)
        if count > _MOST * total and count > 1:
            sentences.append(f"{count:,} of {total:,} kernels and copies {fault}: their times cannot be trusted.")
            hides_idle_time = True
        elif count:
            sentences.append(f"{count:,} of {total:,} kernels and copies {fault}: they are left out.")
            # By the time of the launch; where it is not known, by the work's own start.
            times = np.where(capture.launch >= 0, np.append(capture.calls.start, 0)[capture.launch], capture.work.start)
            lost.append(np.column_stack((capture.work.process, times))[is_wrong])
            capture = replace(capture, work=capture.work.select(~is_wrong), launch=capture.launch[~is_wrong])
    lost.append(_lost_launches(capture, sum(map(len, lost)), sentences))
    unlaunched = _lost_work(capture, sentences)
    return replace(capture, damage=Damage(tuple(sentences), np.concatenate(lost), unlaunched, hides_idle_time))


def _leave_out_other_sessions(capture: Capture, sentences: list[str]) -> Capture:
    """Leave out events at 0, and those so far from most that they are of another session."""
    times = np.concatenate([rows.start for rows in (capture.work, capture.calls, capture.ranges)])
    first, last = _longest_session(np.unique(times))
    left_out = int(((times < first) | (times > last)).sum())
    remaining = {}
    for name in ("work", "calls", "ranges", "operations", "modules"):
        rows = getattr(capture, name)
        remaining[name] = rows.select((rows.start >= first) & (rows.start <= last))
    if not left_out or not len(remaining["work"]):
        return capture
    sentence = f"{left_out:,} of {len(times):,} events are at times that are not of this capture: they are left out."
    sentences.append(sentence)
    return replace(capture, **remaining)


def _leave_out_repetitions(capture: Capture, sentences: list[str]) -> Capture:
    work = capture.work
    columns = (work.start, work.stop, work.process, work.correlation, work.name, work.gpu, work.stream)
    order = np.lexsort(columns)
    is_same = np.logical_and.reduce([column[order[1:]] == column[order[:-1]] for column in columns])
    repeated = order[1:][is_same & (work.stop > work.start)[order[1:]]]
    if not len(repeated):
        return capture
    sentences.append(f"{len(repeated):,} of {len(work):,} kernels and copies are recorded twice: they count once.")
    return replace(capture, work=work.select(np.delete(np.arange(len(work)), repeated)))


def _longest_session(times: Times) -> tuple[int, int]:
    """Return the first and last of the session with most times; ``times`` are distinct, in order."""
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


def _launches(capture: Capture, sentences: list[str]) -> Times:
    """Return the call of each work by process and number, -1 for none; and say which numbers several launches share.

    Where as many work as launches have a number, and each begins after its launch, they belong together in order.
    """
    work, calls = capture.work, capture.calls
    keys = group_numbers(
        np.concatenate((calls.process, work.process)), np.concatenate((calls.correlation, work.correlation))
    )
    call_key, work_key = np.split(keys, [len(calls)])
    order = np.lexsort((calls.start, call_key))
    order = order[calls.correlation[order] >= 0]
    # A call within another of the same number is the runtime's call of the driver.
    is_inner = (call_key[order[1:]] == call_key[order[:-1]]) & (calls.start[order[1:]] < calls.stop[order[:-1]])
    order = order[np.append(True, ~is_inner)[: len(order)]]
    works = np.lexsort((work.start, work_key))
    works = works[work.correlation[works] >= 0]
    key = work_key[works]
    first, end = (np.searchsorted(call_key[order], key, side=side) for side in ("left", "right"))
    first_of_key, end_of_key = (np.searchsorted(key, key, side=side) for side in ("left", "right"))
    count = end - first
    # Of several launches of a number, that at the work's own place among those of the number.
    place = np.where(count == end_of_key - first_of_key, np.arange(len(key)) - first_of_key, 0)
    call = np.append(order, -1)[np.where(count > 0, first + place, -1)]
    is_early = work.start[works] < np.append(calls.start, 0)[call]
    is_ambiguous = np.isin(key, key[(count > 1) & ((count != end_of_key - first_of_key) | is_early)])
    launch = np.full(len(work), -1)
    launch[works] = np.where(is_ambiguous, -1, call)
    reused = len(np.unique(key[(count > 1) & ~is_ambiguous]))
    # A launch of one kernel that several name is that of one of them.
    users = np.bincount(launch[launch >= 0], minlength=len(calls))
    is_taken = np.append(capture.is_named(calls.name, _SINGLE_LAUNCH.search) & (users > 1), False)[launch]
    launch[is_taken] = -1
    ambiguous = int(is_ambiguous.sum() + is_taken.sum())
    if reused:
        sentences.append(f"Launch numbers are not unique: {reused:,} stand for several launches, told apart by order.")
    if ambiguous:
        sentences.append(f"Launch numbers are not unique: the launch of {ambiguous:,} kernels and copies is unknown.")
    return launch


def _begins_early(capture: Capture) -> Flags:
    return capture.work.start < np.append(capture.calls.start, -_NEVER)[capture.launch] - _CLOCKS_NS


def _ends_late(capture: Capture) -> Flags:
    """Find work that ends after a wait for the whole GPU that began after its launch."""
    work = capture.work
    launched = np.append(capture.calls.start, _NEVER)[capture.launch]
    waits = capture.named(capture.calls, _DEVICE_WAIT.search)
    waits = waits.select(np.argsort(waits.start, kind="stable"))
    is_wrong = np.zeros(len(work), bool)
    for process in np.unique(waits.process).tolist():
        of_process, chosen = work.process == process, waits.process == process
        # A process with several GPUs waits for one of them.
        if len(np.unique(work.gpu[of_process])) == 1:
            # The earliest end of all waits that begin from here on.
            ends = np.append(np.minimum.accumulate(waits.stop[chosen][::-1])[::-1], _NEVER)
            end = ends[np.searchsorted(waits.start[chosen], launched, side="right")]
            is_wrong |= of_process & (work.stop > end + _LATE_WAIT_NS)
    return is_wrong


def _overlaps(capture: Capture) -> Flags:
    """Find work that runs into the next of its stream: of two, the one whose duration is less usual for its name.

    Kernels of a graph may run side by side, and so may one that was launched to begin early (programmatic dependent
    launch), which ends after the one before.
    """
    work = capture.work
    is_wrong = np.zeros(len(work), bool)
    is_plain = np.append(capture.is_named(capture.calls.name, _PLAIN_LAUNCH.search), False)[capture.launch]
    unusual = _unusual(work)
    order = np.lexsort((work.stop, work.start, work.stream, work.gpu, work.process))
    for _ in range(50):
        before, after = order[:-1], order[1:]
        is_pair = (work.correlation[before] != work.correlation[after]) | (work.correlation[after] < 0)
        for column in (work.stream, work.gpu, work.process):
            is_pair &= column[before] == column[after]
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


def _lost_launches(capture: Capture, left_out: int, sentences: list[str]) -> Times:
    """Process and time of launches that have no work, but for the work that was left out."""
    calls = capture.calls
    is_launch = capture.is_named(calls.name, _LAUNCH.search) & (calls.correlation >= 0)
    # A trace of several GPUs may lack those of others: only processes that have work.
    is_launch &= np.isin(calls.process, capture.work.process) & ~_is_recording_graph(capture)
    launches = calls.select(is_launch)
    # A runtime calls the driver.
    is_inner = is_within_another(launches.start, launches.stop, launches.process, launches.thread)
    is_launch[np.flatnonzero(is_launch)[is_inner]] = False
    has_work = np.zeros(len(calls), bool)
    has_work[capture.launch[capture.launch >= 0]] = True
    lost = np.flatnonzero(is_launch & ~has_work)
    # Work that several launches may have launched has none for certain.
    uncertain = np.unique(capture.work.correlation[capture.launch < 0])
    lost = lost[~np.isin(calls.correlation[lost], uncertain)]
    if (count := len(lost) - left_out) > 0:
        sentences.append(f"{count:,} of {int(is_launch.sum()):,} launches have no kernel: the profiler lost them.")
    return np.column_stack((calls.process[lost], calls.start[lost]))


def _is_recording_graph(capture: Capture) -> Flags:
    calls = capture.calls
    begins = np.sort(capture.named(calls, _BEGIN_GRAPH.search).start)
    ends = np.append(np.sort(capture.named(calls, _END_GRAPH.search).stop), _NEVER)
    return containing(np.column_stack((begins, ends[np.searchsorted(ends, begins)])), calls.start) >= 0


def _lost_work(capture: Capture, sentences: list[str]) -> Times:
    """Process and start of work without a launch that began after some that has one."""
    work = capture.work
    has_launch = capture.launch >= 0
    is_lost = np.zeros(len(work), bool)
    for process in np.unique(work.process[has_launch]).tolist():
        of_process = work.process == process
        is_lost |= of_process & ~has_launch & (work.start > work.start[of_process & has_launch].min())
    if is_lost.any():
        sentences.append(
            f"{int(is_lost.sum()):,} of {len(work):,} kernels and copies have no launch: the profiler lost them."
        )
    return np.column_stack((work.process, work.start))[is_lost]
