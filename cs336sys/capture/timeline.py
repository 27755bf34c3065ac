"""Timeline of one GPU, as arrays: work in the order of time, with its launch, operator and module, and the steps.

Rows are looked up by number, and -1 stands for none: to a column that is looked up in -1 is appended, where -1 points.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture import capture as captures
from cs336sys.capture.capture import Calls, Capture, Damage, DeviceWork, Ranges, say_capture
from cs336sys.capture.intervals import Nested, Times, containing, first_rows, group_numbers
from cs336sys.capture.range_names import STEP, STEP_PHASES, WARM_UP
from cs336sys.capture.taxonomy import Category, category_of
from cs336sys.errors import UsageError

# Classes of work, in the order in which they take an instant that several run in.
COMPUTING, COMMUNICATING, COPYING = 0, 1, 2

# torch.profiler numbers the steps that a program tells it of by profiler.step().
PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,9})$")
# Calls of CUDA and HIP that wait for the GPU; plain cudaMemcpy returns when the copy is done.
_WAITING_CALL = re.compile(
    r"(Device|Stream|Event|Ctx)Synchronize|cudaMemcpy_|cuMemcpyDtoH_|hipMemcpyWithStream|^(cuda|hip)Memcpy$"
)
# Ranges in which a program waits for its next batch.
_LOADER_NAME = re.compile(r"dataloader|data[ _]load|load(ing)? (data|batch)|next[ _]batch|get_batch", re.IGNORECASE)
# Ranges that name no part of a model.
_NO_MODULE = re.compile(rf"^(ProfilerStep#|cs336sys |nccl:|gloo:|## Call|Torch-Compiled|{STEP}$|{WARM_UP}$)")


@dataclass(frozen=True)
class Steps:
    """The steps of a timeline. A step ends when all that it launched has run."""

    bounds: Times  # (steps, 2) begin and end of each on the GPU, in ns.
    definition: str  # How they were found, to follow "steps: ".
    are_found: bool = True  # False where the capture as a whole replaces steps.
    are_counted: bool = False  # A profiler counted them.
    numbers: tuple[int, ...] = ()  # By the profiler's count, else 0, 1, ...
    # (steps, 2) begin and end on the CPU, in ns; empty for steps that no range marks.
    ranges: Times = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    count: int = 0  # How many there are, including those left out.
    left_out: tuple[str, ...] = ()  # Which steps are left out and why, a sentence each.
    hides_idle_time: bool = False  # Work or launches are missing from all of them.


@dataclass(frozen=True)
class LaunchedWork(DeviceWork):
    """Work with its launch, operator and module; -1 for what is not recorded."""

    launched: Times  # When its API call began.
    thread: Times  # On which thread.
    operator: Times  # Number of a text.
    shape: Times  # Number of a text: the inputs' shapes and dtypes.
    module: Times  # Number among the timeline's modules.
    work_class: Times  # COMPUTING, COMMUNICATING or COPYING

    def launched_in(self, ranges: Ranges, *, same_thread: bool = False) -> Times:
        """Return the row of each work's innermost range, of its process or thread, at its launch; -1 for none."""
        owners = np.concatenate((ranges.process, self.process))
        if same_thread:
            owners = group_numbers(owners, np.concatenate((ranges.thread, self.thread)))
        range_owner, work_owner = np.split(owners, [len(ranges)])
        innermost = Nested(ranges.start, ranges.stop, range_owner).innermost(self.launched, work_owner)
        return np.where(self.launched < 0, -1, innermost)


@dataclass(frozen=True)
class Timeline(LaunchedWork):
    """Work of one GPU, launched by one process, in the order in which it began. Times are in ns."""

    texts: Sequence[str]
    modules: Sequence[str]
    waits: Calls  # Calls that wait for the GPU, in the order in which they began.
    loading: Ranges  # In which the program waits for its next batch, in the order in which they began.
    collectives: DeviceWork  # The work that is a collective.
    collective_records: Sequence[captures.CollectiveRecord]  # Torch's record of each of these.
    steps: Steps = field(default_factory=lambda: Steps(np.zeros((0, 2), np.int64), "", are_found=False))

    @property
    def collective_places(self) -> Times:
        """Return the places of the collectives among the work."""
        return np.flatnonzero(np.isin(self.name, self.collectives.name))

    def step_of(self, times: Times) -> Times:
        """Return the step in which each instant lies; -1 for none."""
        return containing(self.steps.bounds, times)


def timelines(capture: Capture, step: str | None = None) -> list[Timeline]:
    """Return a timeline, with whole steps, of each GPU of each process that did more than a little.

    ``step``: name of the ranges that are the steps. A UsageError says that there are none, or that they launched no
    work of a GPU.
    """
    work = capture.work
    owners, owner = np.unique(np.column_stack((work.gpu, work.process)), axis=0, return_inverse=True)
    owner = owner.reshape(-1)  # NumPy 2.0 has places along an axis in two dimensions.
    busy_ns = np.bincount(owner, weights=work.length.astype(float), minlength=len(owners))
    is_used = busy_ns >= 0.02 * busy_ns.max()  # A GPU with less of the work was only touched.
    return [_timeline(capture, np.flatnonzero(owner == number), step) for number in np.flatnonzero(is_used)]


def _timeline(capture: Capture, chosen: Times, step: str | None) -> Timeline:
    """Join a GPU's chosen work with its launches, operators, modules, waits and steps."""
    chosen = chosen[np.lexsort((capture.work.stop[chosen], capture.work.start[chosen]))]
    work = capture.work.select(chosen)
    calls, operations = capture.calls, capture.operations
    launch = capture.launch[chosen]
    launched, thread = np.append(calls.start, -1)[launch], np.append(calls.thread, -1)[launch]
    operator = first_rows(operations.number, work.operation)
    # Where its launch was not recorded, it was launched in its operator.
    is_unrecorded = (launch < 0) & (operator >= 0)
    launched[is_unrecorded] = operations.start[operator[is_unrecorded]]
    thread[is_unrecorded] = operations.thread[operator[is_unrecorded]]
    process = work.process[0]
    waits = capture.rows_named(calls.select(calls.process == process), _WAITING_CALL.search)
    loading = capture.rows_named(capture.ranges.select(capture.ranges.process == process), _LOADER_NAME.search)
    is_copy = capture.is_named(work.name, lambda text: text.startswith(("Memcpy", "Memset")))
    is_communication = capture.is_named(work.name, lambda text: category_of(text) == Category.COMMUNICATION)
    # On a CPU the operators that call Gloo are no collectives.
    is_call = capture.is_named(work.name, lambda text: text.startswith(("c10d::", "record_param")))
    collectives = work.select(is_communication & ~is_copy & ~is_call)
    timeline = Timeline(
        **vars(work),
        launched=launched,
        thread=thread,
        operator=np.append(operations.name, -1)[operator],
        shape=np.append(operations.shape, -1)[operator],
        module=np.full(len(work), -1),
        work_class=np.select([is_copy, is_communication], [COPYING, COMMUNICATING], COMPUTING),
        texts=capture.texts,
        modules=(),
        waits=waits.select(np.argsort(waits.start, kind="stable")),
        loading=loading.select(np.argsort(loading.start, kind="stable")),
        collectives=collectives,
        collective_records=[
            capture.collectives[number]
            if number >= 0
            else captures.CollectiveRecord(captures.collective_kind(capture.texts[name]))
            for number, name in zip(collectives.collective.tolist(), collectives.name.tolist(), strict=True)
        ],
    )
    module, modules = _modules(capture, timeline) if len(capture.modules) else _range_names(capture, timeline)
    timeline = replace(timeline, module=module, modules=modules)
    return replace(timeline, steps=_whole_steps(_find_steps(capture, timeline, step), timeline, capture.damage))


def _range_names(capture: Capture, timeline: Timeline) -> tuple[Times, Sequence[str]]:
    """Return for each kernel the number of its innermost range's name, else of its phase's, and all names."""
    ranges = capture.rows_named(capture.ranges, lambda text: not (_NO_MODULE.match(text) or _LOADER_NAME.search(text)))
    # All threads of a process are in the phase that one of them opened, but in no other range that another opened.
    phases = capture.rows_named(ranges, STEP_PHASES.__contains__)
    name = np.append(ranges.name, -1)[timeline.launched_in(ranges, same_thread=True)]
    return np.where(name >= 0, name, np.append(phases.name, -1)[timeline.launched_in(phases)]), capture.texts


def _modules(capture: Capture, timeline: Timeline) -> tuple[Times, Sequence[str]]:
    """Return for each kernel the number of its module, in the backward pass its forward operator's, and all names."""
    calls = capture.modules
    nested = Nested(calls.start, calls.stop, calls.thread)
    innermost = nested.innermost(timeline.launched, timeline.thread)
    forward = _forward_operations(capture, timeline)
    is_backward = (innermost < 0) & (forward >= 0)
    operations = capture.operations.select(forward[is_backward])
    innermost[is_backward] = nested.innermost(operations.start, operations.thread)
    # A module's label names it and the module around it, without the number that torch gives instances of a class.
    number_of_label: dict[str, int] = {}
    label_of_call = np.full(len(calls) + 1, -1)
    for call in np.unique(innermost[innermost >= 0]).tolist():
        names = [capture.texts[calls.name[number]] for number in (nested.parent[call], call) if number >= 0]
        label = ".".join(re.sub(r"_\d+$", "", name.removeprefix("nn.Module: ")) for name in names)
        label_of_call[call] = number_of_label.setdefault(label, len(number_of_label))
    return label_of_call[innermost], list(number_of_label)


def _forward_operations(capture: Capture, timeline: Timeline) -> Times:
    """Return the row of the forward operator of each kernel of the backward pass; -1 for none."""
    operations = capture.operations
    is_backward = capture.is_named(operations.name, lambda text: "backward" in text.lower())
    backward = operations.select(is_backward & (operations.sequence >= 0))
    nested = Nested(backward.start, backward.stop, backward.thread)
    sequence = np.append(backward.sequence, -1)[nested.innermost(timeline.launched, timeline.thread)]
    # An operator and those it calls have one sequence number; the outermost began first.
    forward = np.flatnonzero(~is_backward)
    forward = forward[np.argsort(operations.start[forward], kind="stable")]
    return np.append(forward, -1)[first_rows(operations.sequence[forward], sequence)]


def _find_steps(capture: Capture, timeline: Timeline, range_name: str | None) -> Steps:
    """Return the steps that ranges mark, else those found by repetition, else the whole capture as one."""
    tests: dict[str, Callable[[str], Any]] = {
        "the ranges 'step'": STEP.__eq__,
        "those that torch.profiler was told of": PROFILER_STEP.match,
    }
    if range_name is not None:
        capture.require_range(range_name, "--step")
        tests = {f"the ranges '{range_name}'": range_name.__eq__}
    for definition, is_step in tests.items():
        if steps := _by_ranges(capture, timeline, is_step, definition):
            return steps
    if range_name is not None:
        nothing = f"GPU {timeline.gpu[0]} ran nothing that these ranges launched"
        raise UsageError(f"--step '{range_name}': {nothing}: choose others, or leave --step out")
    whole = np.array([[timeline.start[0], timeline.stop.max()]])
    definition = "none was found, the capture as a whole; --step NAME chooses ranges"
    return _by_repetition(timeline) or Steps(whole, definition, are_found=False)


def _by_ranges(capture: Capture, timeline: Timeline, is_step: Callable[[str], Any], definition: str) -> Steps | None:
    """Return the steps that ranges mark, None without work in any; each ends when its work and its range have ended.

    Where torch.profiler counted the steps, the time between two belongs to the second.
    """
    chosen = capture.rows_named(capture.ranges.select(capture.ranges.process == timeline.process[0]), is_step)
    chosen = chosen.select(np.argsort(chosen.start, kind="stable"))
    spans: list[tuple[int, int]] = []
    counted: list[int] = []
    for begin, end, name in np.column_stack((chosen.start, chosen.stop, chosen.name)).tolist():
        # Ranges within others are left out. Rounding makes neighbours overlap a little: so one that begins in the first
        # half of the range before it (before the mean of its begin and end) is taken to be within that, too.
        if not spans or (end > spans[-1][1] and 2 * begin > sum(spans[-1])):
            spans.append((begin, end))
            if match := PROFILER_STEP.match(capture.texts[name]):
                counted.append(int(match[1]))
    are_counted = len(set(counted)) == len(spans)
    # Where no launch is known, only steps that follow each other without a gap have work: the GPU lags behind ranges.
    if not spans or not (are_counted or (timeline.launched >= 0).any()):
        return None
    numbers = counted if are_counted else range(len(spans))
    ranges = np.array(spans, np.int64)
    launched = np.where(timeline.launched < 0, timeline.start, timeline.launched)
    # What ran before anything that was launched in the steps, and has no launch, was launched before the capture: it
    # counts as launched just before the first step, so that it is of none.
    starts_of_launched = timeline.start[timeline.launched >= ranges[0, 0]]
    is_earlier = (timeline.launched < 0) & (timeline.start < (starts_of_launched[0] if len(starts_of_launched) else 0))
    launched[is_earlier] = np.minimum(launched[is_earlier], ranges[0, 0] - 1)
    order = np.argsort(launched, kind="stable")
    # (steps, 2): how much work was launched before each begin and end.
    counts = np.searchsorted(launched[order], ranges)
    if counts[-1, 1] <= counts[0, 0]:
        return None
    # A step begins and ends with its range, but not before all work that was launched until then, ``counts``, has run.
    finished = np.maximum.accumulate(timeline.stop[order])[counts - 1]
    begins, ends = np.maximum(ranges, np.where(counts > 0, finished, ranges)).T  # Without earlier work its range.
    previous_ends = np.append(begins[0], ends[:-1])
    follows = are_counted & np.append(True, np.diff(numbers) == 1)
    bounds = np.column_stack((np.where(follows, previous_ends, np.maximum(begins, previous_ends)), ends))
    return Steps(bounds, definition, are_counted=are_counted, numbers=tuple(numbers), ranges=ranges)


# A step that takes so many times the median holds a pause that no step has, or an impossible time.
_MOST_MEDIANS = 100
_LEAST_UNLAUNCHED = 0.05  # The share of the work that may lack its launch without hiding idle time.


def _whole_steps(steps: Steps, timeline: Timeline, damage: Damage) -> Steps:
    """Return the steps without those that lack work or take far longer than the others; all if none would remain.

    A step after one that lacks work begins at an unknown time, and is left out, too.
    """
    count = len(steps.bounds)
    steps = replace(steps, count=count, numbers=steps.numbers or tuple(range(count)))
    # Of both kinds of marks, columns are the process and a time.
    lost, unlaunched = (marks[marks[:, 0] == timeline.process[0]][:, 1] for marks in (damage.lost, damage.unlaunched))
    # The idle time before work without a launch has an unknown cause, which matters where there is much such work.
    has_few_unlaunched = len(unlaunched) <= _LEAST_UNLAUNCHED * len(timeline.start)
    if not steps.are_found:  # The capture as a whole is one step: lost launches hide its idle time, too.
        return replace(steps, hides_idle_time=damage.hides_times or not has_few_unlaunched)
    places = np.arange(count)
    is_lossy = np.isin(places, containing(_launch_windows(steps, timeline), lost))
    is_unlaunched = np.isin(places, containing(steps.bounds, unlaunched))
    # Steps with such work are left out; but a little of it is overlooked where that would leave no step.
    if not has_few_unlaunched or not np.all(_or_previous(is_unlaunched)):
        is_lossy |= is_unlaunched
    first, end = np.searchsorted(timeline.start, steps.bounds).T
    is_empty = end <= first
    is_left_out = _or_previous(is_lossy | is_empty)
    length = steps.bounds[:, 1] - steps.bounds[:, 0]
    median = float(np.median(length if is_left_out.all() else length[~is_left_out]))
    is_long = (length > _MOST_MEDIANS * median) & (count > 2)  # Of two steps, nobody knows which is unusual.
    is_kept = ~is_left_out & ~is_long
    if not is_kept.any() or damage.hides_idle_time:  # Leaving steps out would not make idle time known.
        return replace(steps, hides_idle_time=True)
    sentences = [
        say_capture("long step", step=steps.numbers[place], ms=length[place] / 1e6, ratio=length[place] / median)
        for place in np.flatnonzero(is_long & ~is_left_out)[:3].tolist()
    ]
    for name, chosen in (("unknown idle time", is_left_out & ~is_empty), ("empty steps", is_left_out & is_empty)):
        if chosen.any():
            listed = _step_list(list(itertools.compress(steps.numbers, chosen)))
            sentences.append(say_capture(name, count=int(chosen.sum()), total=count, steps=listed))
    numbers = tuple(itertools.compress(steps.numbers, is_kept))
    ranges = steps.ranges[is_kept] if len(steps.ranges) else steps.ranges
    return replace(steps, bounds=steps.bounds[is_kept], numbers=numbers, ranges=ranges, left_out=tuple(sentences))


def _or_previous(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for each step whether it has the flag, or the step before it."""
    return flags | np.append(False, flags[:-1])


def _launch_windows(steps: Steps, timeline: Timeline) -> Times:
    """Return (steps, 2) from when to when, on the CPU, the work of each step is launched."""
    if len(steps.ranges):
        # What is launched between two ranges counts to the later one, which it delays.
        return np.column_stack((np.append(steps.ranges[0, 0], steps.ranges[:-1, 1]), steps.ranges[:, 1]))
    begins = []
    for begin, end in steps.bounds.tolist():
        launched = timeline.launched[slice(*np.searchsorted(timeline.start, (begin, end)))]
        begins.append(launched[launched >= 0].min(initial=end))  # Its end, if no launch is known.
    return np.column_stack((begins, [*begins[1:], steps.bounds[-1, 1]]))


def _step_list(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


def _by_repetition(timeline: Timeline) -> Steps | None:
    """Return as steps the shortest sequence of kernels that repeats and has every kernel's name; None without any.

    A layer repeats, too, but what runs once a step (the loss, an embedding) is not in every layer. So the distances
    between kernels of one name, of the rarest first, are tried as the length of a step.
    """
    order = np.argsort(np.where(timeline.launched < 0, timeline.start, timeline.launched), kind="stable")
    order = order[timeline.work_class[order] == COMPUTING]
    sequence = timeline.name[order]
    counts = np.bincount(sequence)
    rarest = np.argsort(np.where(counts > 1, counts, np.iinfo(np.int64).max), kind="stable")  # Single ones last.
    rarest = rarest[: min(40, (counts > 1).sum())]  # So few that trying them takes no time.
    names_in_step = (counts > 0).sum()
    tried: set[int] = set()
    for name in rarest.tolist():
        places = np.flatnonzero(sequence == name)
        period = int(np.median(np.diff(places)))
        # A step has four kernels at least.
        if period in tried or period < 4 or 2 * period > len(sequence):
            continue
        tried.add(period)
        # Nearly all: what precedes the first step need not repeat.
        if np.mean(sequence[period:] == sequence[:-period]) < 0.97:
            continue
        first = int(places[0])  # From the first place on which everything repeats.
        repeats = (len(sequence) - first) // period
        after = first + repeats * period
        names_of_repeats = sequence[first:after].reshape(repeats, period)
        if repeats < 2 or any(len(np.unique(names)) < names_in_step for names in names_of_repeats):
            continue
        begins = timeline.start[order[first:after:period]]
        end = timeline.start[order[after]] if after < len(order) else timeline.stop[order[first:after]].max()
        edges = np.append(begins, max(end, begins[-1] + 1))
        if np.all(np.diff(edges) > 0):  # On several streams, what is launched first need not begin first.
            definition = f"by repetition, the same {period:,} kernels {repeats} times"
            return Steps(np.column_stack((edges[:-1], edges[1:])), definition)
    return None
