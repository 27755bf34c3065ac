"""Check whether a capture is whole: one pass counts and leaves out what cannot be true, before any verdict.

A work's launch is a row of the calls, -1 without one: to a column that is looked up is appended what -1 points at.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.capture import Capture, Damage, DeviceWork, say_capture
from cs336sys.capture.intervals import Times, containing, group_numbers, is_within_another

Flags = NDArray[np.bool_]

# The clocks of CPU and GPU are some microseconds apart; a call that waits returns a while after the work.
_CLOCK_SKEW_NS = 50_000
_LATE_WAIT_NS = 1_000_000
_LONGEST_QUEUE_NS = 10**9
_ROUNDING_NS = 1000  # Of kernels that follow each other.
# Events further apart than this, and than many times what the others span, are not of one session.
_SESSION_GAP_NS = 600 * 10**9
_SESSION_SPANS = 100
_CLOCK_SHARE = 0.2  # Above this share, of two and more, it is not some work that is wrong but a clock.
_NEVER = 1 << 62  # Beyond all times.

# Calls that launch a kernel each, or a graph of them, on CUDA, HIP and XPU.
_SINGLE_LAUNCH = re.compile(r"LaunchKernel|KernelLaunch|LaunchCooperativeKernel(?!Multi)")
_LAUNCH = re.compile(rf"{_SINGLE_LAUNCH.pattern}|GraphLaunch")
# A kernel launched without attributes does not begin before the one before it on its stream ends.
_PLAIN_LAUNCH = re.compile(r"^cu(da)?LaunchKernel(_v\d+|_ptsz)*$")
_BEGIN_GRAPH, _END_GRAPH = re.compile("BeginCapture"), re.compile("EndCapture")
_DEVICE_WAIT = re.compile(r"(Device|Ctx)Synchronize")


def check_capture(capture: Capture) -> Capture:
    """Return the capture with the launches of its work and its damage, without events that cannot be true."""
    sentences: list[str] = []
    if capture.is_cut:
        sentences.append(say_capture("cut"))
    if capture.unreadable:
        sentences.append(say_capture("unreadable", count=capture.unreadable))
    capture = _from_zero(_leave_out_other_sessions(capture, sentences))
    if not capture.is_gpu:  # Operators stand for work, with launches made of them: the checks below are of GPU work.
        return replace(capture, launch=_match_launches(capture, sentences), damage=Damage(tuple(sentences)))
    capture = _leave_out_repetitions(capture, sentences)
    capture = replace(capture, launch=_match_launches(capture, sentences))
    checks: tuple[tuple[Callable[[Capture], Flags], str], ...] = (
        (_begins_early, "begin before their launch"),
        (_begins_late, "begin more than a second after the last call"),
        (_ends_late, "end after a call that waited for them"),
        (_overlaps, "overlap others of their stream"),
    )
    hides_idle_time = False
    lost_launches = []
    for test, fault in checks:
        is_impossible = test(capture)
        count, total = int(is_impossible.sum()), len(is_impossible)
        # A clock must be wrong rather than so much work: all of it stays, but how long the GPU idled is not known.
        # One may be a fault, however few works there are, unless it is all.
        if count > _CLOCK_SHARE * total and (count > 1 or count == total):
            sentences.append(say_capture("wrong clock", count=count, total=total, fault=fault))
            hides_idle_time = True
        elif count:
            sentences.append(say_capture("impossible", count=count, total=total, fault=fault))
            # The work is left out, and is missing at the time of its launch, or if that is not known, at its own start.
            times = np.where(capture.launch >= 0, np.append(capture.calls.start, 0)[capture.launch], capture.work.start)
            lost_launches.append(np.column_stack((capture.work.process, times))[is_impossible])
            capture = replace(capture, work=capture.work.select(~is_impossible), launch=capture.launch[~is_impossible])
    lost_launches.append(_lost_launches(capture, left_out=sum(map(len, lost_launches)), sentences=sentences))
    is_incomplete = np.isin(capture.calls.correlation, list(capture.incomplete_launches))
    lost_launches.append(np.column_stack((capture.calls.process, capture.calls.start))[is_incomplete])
    unlaunched = _lost_work(capture, sentences)
    return replace(capture, damage=Damage(tuple(sentences), np.concatenate(lost_launches), unlaunched, hides_idle_time))


def _leave_out_other_sessions(capture: Capture, sentences: list[str]) -> Capture:
    """Leave out events at 0, and those so far from most that they are of another session."""
    times = np.concatenate([rows.start for rows in (capture.work, capture.calls, capture.ranges)])
    first, last = _longest_session(np.unique(times))
    left_out = int(((times < first) | (times > last)).sum())
    remaining = {}
    for name in ("work", "calls", "ranges", "operations", "modules"):
        rows = getattr(capture, name)
        remaining[name] = rows.select((rows.start >= first) & (rows.start <= last))
    if not left_out or not len(remaining["work"]):  # A session without work is not the one to keep.
        return capture
    sentences.append(say_capture("other session", count=left_out, total=len(times)))
    return replace(capture, **remaining)


def _from_zero(capture: Capture) -> Capture:
    """Return the capture with its times moved so that none is below 0, where -1 stands for no time."""
    tables = {name: getattr(capture, name) for name in ("work", "calls", "ranges", "operations", "modules")}
    first = min(int(rows.start.min(initial=0)) for rows in tables.values())
    moved = {name: replace(rows, start=rows.start - first, stop=rows.stop - first) for name, rows in tables.items()}
    return replace(capture, **moved) if first < 0 else capture


def _leave_out_repetitions(capture: Capture, sentences: list[str]) -> Capture:
    """Leave out work that equals other work in all that identifies it, start and end included.

    Work without length stays: kernels of one graph share their launch, and may be equal by rounding.
    """
    work = capture.work
    columns = (work.start, work.stop, work.process, work.correlation, work.name, work.gpu, work.stream)
    order = np.lexsort(columns)
    is_same = np.logical_and.reduce([column[order[1:]] == column[order[:-1]] for column in columns])
    repeated = order[1:][is_same & (work.stop > work.start)[order[1:]]]
    if not len(repeated):
        return capture
    sentences.append(say_capture("repeated", count=len(repeated), total=len(work)))
    return replace(capture, work=work.select(np.delete(np.arange(len(work)), repeated)))


def _longest_session(times: Times) -> tuple[int, int]:
    """Split times, distinct and ordered, at wide gaps, and return the first and the last of the part with most."""
    # 0 stands for no time, unless the capture goes on within a second of it.
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


def _match_launches(capture: Capture, sentences: list[str]) -> Times:
    """Return for each work the row of its launch in the calls, -1 for none; and say which launch numbers are shared.

    Where a number stands for as many launches as work, and each work begins after its launch, they match in order.
    """
    work, calls = capture.work, capture.calls
    # A key for each launch number of each process.
    keys = group_numbers(np.append(calls.process, work.process), np.append(calls.correlation, work.correlation))
    call_key, work_key = np.split(keys, [len(calls)])
    launches = np.lexsort((calls.start, call_key))
    launches = launches[calls.correlation[launches] >= 0]
    before, after = launches[:-1], launches[1:]
    # A call within another of the same number is the runtime's call of the driver.
    is_inner = (call_key[after] == call_key[before]) & (calls.start[after] < calls.stop[before])
    launches = launches[np.append(True, ~is_inner)[: len(launches)]]  # The first, if there is any, is within no other.
    works = np.lexsort((work.start, work_key))
    works = works[work.correlation[works] >= 0]
    work_keys = work_key[works]  # Both are ordered by key now: a key's launches, and its works, are neighbours.
    first_launch, end_launch = (np.searchsorted(call_key[launches], work_keys, side=side) for side in ("left", "right"))
    first_work, end_work = (np.searchsorted(work_keys, work_keys, side=side) for side in ("left", "right"))
    launch_count = end_launch - first_launch
    is_paired = launch_count == end_work - first_work
    # All work of a single launch, as that of a graph, has the key's first.
    place_in_key = np.where(is_paired, np.arange(len(work_keys)) - first_work, 0)
    call = np.append(launches, -1)[np.where(launch_count > 0, first_launch + place_in_key, -1)]
    is_early = work.start[works] < np.append(calls.start, 0)[call]  # A launch that is missing is at 0.
    # Of several launches that are not as many as the work, or do not all precede theirs, nobody knows which is whose.
    is_ambiguous = np.isin(work_keys, work_keys[(launch_count > 1) & (~is_paired | is_early)])
    launch = np.full(len(work), -1)
    launch[works] = np.where(is_ambiguous, -1, call)
    # Nobody knows whose the launch of a single kernel is that several name.
    users = np.bincount(launch[launch >= 0], minlength=len(calls))
    is_shared = capture.is_named(calls.name, _SINGLE_LAUNCH.search) & (users > 1)
    is_contested = np.append(is_shared, False)[launch]
    launch[is_contested] = -1
    if reused := len(np.unique(work_keys[(launch_count > 1) & ~is_ambiguous])):
        sentences.append(say_capture("reused numbers", count=reused))
    if ambiguous := int(is_ambiguous.sum() + is_contested.sum()):
        sentences.append(say_capture("ambiguous numbers", count=ambiguous))
    return launch


def _begins_early(capture: Capture) -> Flags:
    # The time that stands for no launch is the last, where -1 points.
    return capture.work.start < np.append(capture.calls.start, -_NEVER)[capture.launch] - _CLOCK_SKEW_NS


def _begins_late(capture: Capture) -> Flags:
    """Find work that begins long after all calls, if it is all: so long no GPU is behind with everything."""
    calls_stop = capture.calls.stop.max() if len(capture.calls) else _NEVER
    is_late = capture.work.start > calls_stop + _LONGEST_QUEUE_NS
    return is_late & is_late.all()


def _ends_late(capture: Capture) -> Flags:
    """Find work that still runs when a wait for the whole GPU, begun after the work's launch, has ended."""
    work = capture.work
    launched = np.append(capture.calls.start, _NEVER)[capture.launch]
    waits = capture.rows_named(capture.calls, _DEVICE_WAIT.search)
    waits = waits.select(np.argsort(waits.start, kind="stable"))
    is_late = np.zeros(len(work), bool)
    for process in np.unique(waits.process).tolist():
        of_process = work.process == process
        process_waits = waits.select(waits.process == process)
        # A process with several GPUs waits for one of them.
        if len(np.unique(work.gpu[of_process])) == 1:
            # The earliest end of all waits that begin from each wait on.
            ends = np.append(np.minimum.accumulate(process_waits.stop[::-1])[::-1], _NEVER)
            wait_end = ends[np.searchsorted(process_waits.start, launched, side="right")]
            is_late |= of_process & (work.stop > wait_end + _LATE_WAIT_NS)
    return is_late


def _overlaps(capture: Capture) -> Flags:
    """Find work that runs into the next of its stream: of both, the one whose duration is less usual for its name.

    Kernels of a graph may run side by side, and so may one that was launched to begin early (programmatic dependent
    launch): this overlaps the one before rightly unless it ends first.
    """
    work = capture.work
    is_wrong = np.zeros(len(work), bool)
    is_plain = np.append(capture.is_named(capture.calls.name, _PLAIN_LAUNCH.search), False)[capture.launch]
    unusualness = _unusualness(work)
    order = np.lexsort((work.stop, work.start, work.stream, work.gpu, work.process))
    # Each round leaves out one of each pair of neighbours, until none overlap. In few captures that takes many rounds:
    # work that contains much other work may lose one neighbour a round.
    for _ in range(50):
        before, after = order[:-1], order[1:]
        # Work of one launch is that of a graph, which may run side by side.
        is_pair = (work.correlation[before] != work.correlation[after]) | (work.correlation[after] < 0)
        for column in (work.stream, work.gpu, work.process):
            is_pair &= column[before] == column[after]
        overlap_ns = np.minimum(work.stop[before], work.stop[after]) - work.start[after]
        # Work that ends within other work; work without length may lie there by rounding.
        contains = (work.stop[after] < work.stop[before]) & (work.stop[after] > work.start[after])
        pairs = np.flatnonzero(is_pair & (overlap_ns > _ROUNDING_NS) & (contains | is_plain[after]))
        if not len(pairs):
            break
        is_first = unusualness[before[pairs]] >= unusualness[after[pairs]]
        is_wrong[np.where(is_first, before[pairs], after[pairs])] = True
        order = order[~is_wrong[order]]
    return is_wrong


def _unusualness(work: DeviceWork) -> NDArray[np.float64]:
    """Return for each work the absolute logarithm of its duration over the median duration of its name."""
    length = np.maximum(work.length, 1).astype(float)
    order = np.lexsort((length, work.name))  # By name, and of a name by length: the median is in the middle.
    _, first, group, counts = np.unique(work.name[order], return_index=True, return_inverse=True, return_counts=True)
    medians = length[order][first + counts // 2]
    unusualness = np.empty(len(length))
    unusualness[order] = np.abs(np.log(length[order] / medians[group]))
    return unusualness


def _lost_launches(capture: Capture, left_out: int, sentences: list[str]) -> Times:
    """Return (launches, 2) process and time of launches without work, and append a sentence on how many.

    ``left_out`` of them lack their work because a check has left it out: they do not count in the sentence.
    """
    calls = capture.calls
    is_launch = capture.is_named(calls.name, _LAUNCH.search) & (calls.correlation >= 0)
    # Of processes that have work: of others, a trace may lack the GPU.
    is_launch &= np.isin(calls.process, capture.work.process)
    # While a CUDA graph is captured, launches run nothing; each capture lasts to the next end, or for ever.
    begins = np.sort(capture.rows_named(calls, _BEGIN_GRAPH.search).start)
    ends = np.append(np.sort(capture.rows_named(calls, _END_GRAPH.search).stop), _NEVER)
    graph_captures = np.column_stack((begins, ends[np.searchsorted(ends, begins)]))
    is_launch &= containing(graph_captures, calls.start) < 0
    launches = calls.select(is_launch)
    # The runtime's launch calls the driver's.
    is_inner = is_within_another(launches.start, launches.stop, launches.process, launches.thread)
    is_launch[np.flatnonzero(is_launch)[is_inner]] = False
    has_work = np.zeros(len(calls), bool)
    has_work[capture.launch[capture.launch >= 0]] = True
    lost = np.flatnonzero(is_launch & ~has_work)
    # The launch of work with a shared launch number is unknown, not lost; unreadable work is counted as such.
    uncertain = [*np.unique(capture.work.correlation[capture.launch < 0]), *capture.incomplete_launches]
    lost = lost[~np.isin(calls.correlation[lost], uncertain)]
    if unnumbered := int((capture.work.correlation < 0).sum()):  # Some of the launches are theirs.
        sentences.append(say_capture("unnumbered work", count=unnumbered, total=len(capture.work)))
    if (count := len(lost) - left_out - unnumbered) > 0:
        flags = {"is_cut": capture.is_cut, "is_unreadable": capture.unreadable > len(capture.incomplete_launches)}
        sentences.append(say_capture("lost kernels", count=count, total=int(is_launch.sum()), **flags))
    return np.column_stack((calls.process[lost], calls.start[lost]))


def _lost_work(capture: Capture, sentences: list[str]) -> Times:
    """Return (works, 2) process and start of work whose launch the profiler lost; append a sentence on how many."""
    work = capture.work
    has_launch = capture.launch >= 0
    is_lost = np.zeros(len(work), bool)
    for process in np.unique(work.process[has_launch]).tolist():
        of_process = work.process == process
        # Work before the first that has a launch may have been launched before the capture began.
        is_lost |= of_process & ~has_launch & (work.start > work.start[of_process & has_launch].min())
    if count := int((is_lost & (work.correlation >= 0)).sum()):  # Of the others their numbers are missing.
        sentences.append(say_capture("lost launches", count=count, total=len(work), is_cut=capture.is_cut))
    return np.column_stack((work.process, work.start))[is_lost]
