"""Timeline of one GPU, as arrays: work in the order of time, with its launch, operator and module, and the steps."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.capture import Calls, Capture, CollectiveRecord, Damage, DeviceWork, Ranges, collective_kind
from cs336sys.capture.intervals import Nested, Times, containing, first_rows, group_numbers
from cs336sys.capture.range_names import STEP, STEP_PHASES, WARM_UP
from cs336sys.capture.taxonomy import Category, category_of
from cs336sys.errors import UsageError

Indices = NDArray[np.int64]

# Classes of work, in the order in which they take an instant that several run in.
COMPUTING, COMMUNICATING, COPYING = 0, 1, 2

# torch.profiler numbers the steps that a program tells it of by profiler.step().
PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,9})$")
# Calls that wait for the GPU, of CUDA and HIP; plain cudaMemcpy returns when the copy is done.
_WAITING_CALL = re.compile(
    r"(Device|Stream|Event|Ctx)Synchronize|cudaMemcpy_|cuMemcpyDtoH_|hipMemcpyWithStream|^(cuda|hip)Memcpy$"
)
# Ranges in which a program waits for its next batch.
_LOADER_NAME = re.compile(r"dataloader|data[ _]load|load(ing)? (data|batch)|next[ _]batch|get_batch", re.IGNORECASE)
_NO_MODULE = re.compile(rf"^(ProfilerStep#|cs336sys |nccl:|gloo:|## Call|Torch-Compiled|{STEP}$|{WARM_UP}$)")
# torch numbers the instances of a module's class.
_INSTANCE = re.compile(r"_\d+$")


@dataclass(frozen=True)
class Steps:
    """The steps of a timeline.

    Attributes:
        bounds: (steps, 2) begin and end of each on the GPU, in ns. A step ends when all that it launched has run.
        definition: how they were found, to follow "steps: ".
        are_found: False where the capture as a whole replaces steps.
        are_counted: a profiler counted them.
        numbers: by the profiler's count, else their places.
        ranges: (steps, 2) begin and end on the CPU; empty for steps that no range marks.
        count: how many there are with those that are left out.
        left_out: which steps are left out and why, a sentence each.
        hides_idle_time: work or launches are missing from all of them.
    """

    bounds: Times
    definition: str
    are_found: bool = True
    are_counted: bool = False
    numbers: tuple[int, ...] = ()
    ranges: Times = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    count: int = 0
    left_out: tuple[str, ...] = ()
    hides_idle_time: bool = False


@dataclass(frozen=True)
class LaunchedWork(DeviceWork):
    """Work with its launch: when and on which thread its API call began, -1 where that was not recorded.

    ``operator`` and ``shape`` are numbers of texts, ``module`` of a timeline's modules; -1 for none. ``work_class`` is
    COMPUTING, COMMUNICATING or COPYING.
    """

    launched: Times
    thread: Times
    operator: Times
    shape: Times
    module: Times
    work_class: Times

    def launched_in(self, ranges: Ranges, *, same_thread: bool = False) -> Indices:
        """Return the number of the innermost range that was open when each work was launched; -1 for none.

        Ranges of other processes count for nothing, and with ``same_thread`` neither do those of other threads.
        """
        both = np.concatenate((ranges.process, self.process))
        if same_thread:
            both = group_numbers(both, np.concatenate((ranges.thread, self.thread)))
        around, inside = np.split(both, [len(ranges)])
        innermost = Nested(ranges.start, ranges.stop, around).innermost(self.launched, inside)
        return np.where(self.launched < 0, -1, innermost)


@dataclass(frozen=True)
class Timeline(LaunchedWork):
    """Work of one GPU, launched by one process, in the order in which it began. Times are in ns.

    Attributes:
        collectives: the work that is a collective, and ``collective_records`` torch's records of it.
        waits: calls that wait for the GPU, in the order in which they began.
        loading: ranges in which the program waits for its next batch, in the order in which they began.
    """

    texts: Sequence[str]
    modules: Sequence[str]
    waits: Calls
    loading: Ranges
    collectives: DeviceWork
    collective_records: Sequence[CollectiveRecord]
    steps: Steps = field(default_factory=lambda: Steps(np.zeros((0, 2), np.int64), "", are_found=False))

    @property
    def collective_places(self) -> Indices:
        """The places of the collectives among the work."""
        return np.flatnonzero(np.isin(self.name, self.collectives.name))

    def step_of(self, times: Times) -> Indices:
        """Return the step in which each instant lies; -1 for none."""
        return containing(self.steps.bounds, times)


def timelines(capture: Capture, step: str | None = None) -> list[Timeline]:
    """Return each GPU of each process of a capture that did more than a little, with its whole steps.

    Args:
        step: name of the ranges that are the steps.

    Raises:
        UsageError: there are no ranges of that name, or they launched no work of a GPU.
    """
    work = capture.work
    owners, place = np.unique(np.column_stack((work.gpu, work.process)), axis=0, return_inverse=True)
    place = place.reshape(-1)
    total = np.bincount(place, weights=work.length.astype(float), minlength=len(owners))
    return [
        _timeline(capture, np.flatnonzero(place == number), step)
        for number in range(len(owners))
        # A GPU with less of the work was only touched.
        if total[number] >= 0.02 * total.max()
    ]


def _timeline(capture: Capture, chosen: Indices, step: str | None) -> Timeline:
    """Join a GPU's chosen work with its launches, operators, modules, waits and steps."""
    chosen = chosen[np.lexsort((capture.work.stop[chosen], capture.work.start[chosen]))]
    work = capture.work.select(chosen)
    calls, operations = capture.calls, capture.operations
    launch = capture.launch[chosen]
    launched, thread = np.append(calls.start, -1)[launch], np.append(calls.thread, -1)[launch]
    operator = first_rows(operations.number, work.operation)
    # Where its launch was not recorded, it was launched in its operator.
    is_lost = (launch < 0) & (operator >= 0)
    launched[is_lost], thread[is_lost] = operations.start[operator[is_lost]], operations.thread[operator[is_lost]]
    process = work.process[0]
    waits = capture.named(calls.select(calls.process == process), _WAITING_CALL.search)
    loading = capture.named(capture.ranges.select(capture.ranges.process == process), _LOADER_NAME.search)
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
            capture.collectives[number] if number >= 0 else CollectiveRecord(collective_kind(capture.texts[name]))
            for number, name in zip(collectives.collective.tolist(), collectives.name.tolist(), strict=True)
        ],
    )
    module, modules = _modules(capture, timeline) if len(capture.modules) else _range_names(capture, timeline)
    timeline = replace(timeline, module=module, modules=modules)
    return replace(timeline, steps=whole_steps(_find_steps(capture, timeline, step), timeline, capture.damage))


def _range_names(capture: Capture, timeline: Timeline) -> tuple[Indices, Sequence[str]]:
    """Return the innermost range of the launching thread of each kernel, else its phase, which any thread is in."""
    ranges = capture.named(capture.ranges, lambda text: not (_NO_MODULE.match(text) or _LOADER_NAME.search(text)))
    phases = capture.named(ranges, STEP_PHASES.__contains__)
    name = np.append(ranges.name, -1)[timeline.launched_in(ranges, same_thread=True)]
    return np.where(name >= 0, name, np.append(phases.name, -1)[timeline.launched_in(phases)]), capture.texts


def _modules(capture: Capture, timeline: Timeline) -> tuple[Indices, Sequence[str]]:
    """Return the module that launched each kernel, in the backward pass the one of its forward operator."""
    rows = capture.modules
    nested = Nested(rows.start, rows.stop, rows.thread)
    innermost = nested.innermost(timeline.launched, timeline.thread)
    forward = _forward_operations(capture, timeline)
    is_backward = (innermost < 0) & (forward >= 0)
    operations = capture.operations.select(forward[is_backward])
    innermost[is_backward] = nested.innermost(operations.start, operations.thread)
    labels: dict[str, int] = {}
    label_of = np.full(len(rows) + 1, -1)
    for number in np.unique(innermost[innermost >= 0]).tolist():
        names = [capture.texts[rows.name[call]] for call in (nested.parent[number], number) if call >= 0]
        label = ".".join(_INSTANCE.sub("", name.removeprefix("nn.Module: ")) for name in names)
        label_of[number] = labels.setdefault(label, len(labels))
    return label_of[innermost], list(labels)


def _forward_operations(capture: Capture, timeline: Timeline) -> Indices:
    """Return the number of the forward operator of each kernel of the backward pass; -1 for none."""
    operations = capture.operations
    is_backward = capture.is_named(operations.name, lambda text: "backward" in text.lower())
    backward = operations.select(is_backward & (operations.sequence >= 0))
    nested = Nested(backward.start, backward.stop, backward.thread)
    sequence = np.append(backward.sequence, -1)[nested.innermost(timeline.launched, timeline.thread)]
    # Of an operator and those that it calls, all of one number, the outermost began first.
    forward = np.flatnonzero(~is_backward)
    forward = forward[np.argsort(operations.start[forward], kind="stable")]
    return np.append(forward, -1)[first_rows(operations.sequence[forward], sequence)]


def _find_steps(capture: Capture, timeline: Timeline, range_name: str | None) -> Steps:
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
        raise UsageError(
            f"--step '{range_name}': GPU {timeline.gpu[0]} ran nothing that these ranges launched: choose others, or "
            "leave --step out"
        )
    whole = np.array([[timeline.start[0], timeline.stop.max()]])
    definition = "none was found, the capture as a whole; --step NAME chooses ranges"
    return _by_repetition(timeline) or Steps(whole, definition, are_found=False)


def _by_ranges(capture: Capture, timeline: Timeline, is_step: Callable[[str], Any], definition: str) -> Steps | None:
    """Steps that ranges mark, None without work in any; each ends when its work has run and its range has ended.

    The time from one to the next belongs to the next where torch.profiler marked them, for it has nothing between.
    """
    chosen = capture.named(capture.ranges.select(capture.ranges.process == timeline.process[0]), is_step)
    chosen = chosen.select(np.argsort(chosen.start, kind="stable"))
    spans: list[tuple[int, int]] = []
    counted: list[int] = []
    for begin, end, name in np.column_stack((chosen.start, chosen.stop, chosen.name)).tolist():
        # Those within others are left out. Rounding makes neighbours overlap by a nanosecond.
        if not spans or (end > spans[-1][1] and 2 * begin > sum(spans[-1])):
            spans.append((begin, end))
            if match := PROFILER_STEP.match(capture.texts[name]):
                counted.append(int(match[1]))
    if not spans:
        return None
    are_counted = len(set(counted)) == len(spans)
    numbers = counted if are_counted else range(len(spans))
    ranges = np.array(spans, np.int64)
    launched = np.where(timeline.launched < 0, timeline.start, timeline.launched)
    # What ran before anything that was launched in the steps, and has no launch, was launched before the capture.
    starts_of_launched = timeline.start[timeline.launched >= ranges[0, 0]]
    is_earlier = (timeline.launched < 0) & (timeline.start < (starts_of_launched[0] if len(starts_of_launched) else 0))
    launched[is_earlier] = np.minimum(launched[is_earlier], ranges[0, 0] - 1)
    order = np.argsort(launched, kind="stable")
    counts = np.searchsorted(launched[order], ranges)
    if counts[-1, 1] <= counts[0, 0]:
        return None
    # When all work that was launched before each begin and end had run.
    reached = np.append(np.maximum.accumulate(timeline.stop[order]), 0)[counts - 1]
    begins, ends = np.maximum(ranges, np.where(counts > 0, reached, ranges)).T
    before = np.append(begins[0], ends[:-1])
    follows = are_counted & np.append(True, np.diff(numbers) == 1)
    bounds = np.column_stack((np.where(follows, before, np.maximum(begins, before)), ends))
    return Steps(bounds, definition, True, are_counted, tuple(numbers), ranges)


# A step that takes so many times the median holds a pause that no step has, or a time that cannot be.
_MOST_MEDIANS = 100
# Less work than this share may lack its launch.
_LITTLE = 0.05


def whole_steps(steps: Steps, timeline: Timeline, damage: Damage) -> Steps:
    """Return the steps without those that lack work, or that take far longer than the others; all where all do.

    A step after one that lacks work begins at an unknown time, and is left out, too.
    """
    count = len(steps.bounds)
    steps = replace(steps, count=count, numbers=steps.numbers or tuple(range(count)))
    lost, unlaunched = (marks[marks[:, 0] == timeline.process[0]][:, 1] for marks in (damage.lost, damage.unlaunched))
    # The time before work without a launch is of an unknown cause, and nothing else.
    is_little = len(unlaunched) <= _LITTLE * len(timeline.start)
    if not steps.are_found:
        return replace(steps, hides_idle_time=damage.hides_times or not is_little)
    if len(steps.ranges):
        # What is launched between two ranges delays the next.
        begins, ends = np.append(steps.ranges[0, 0], steps.ranges[:-1, 1]), steps.ranges[:, 1]
    else:
        launches = [timeline.launched[slice(*np.searchsorted(timeline.start, step))] for step in steps.bounds]
        firsts = zip(launches, steps.bounds[:, 1].tolist(), strict=True)
        begins = np.array([launched[launched >= 0].min(initial=end) for launched, end in firsts])
        ends = np.append(begins[1:], steps.bounds[-1, 1])
    places = np.arange(count)
    is_lossy = np.isin(places, containing(np.column_stack((begins, ends)), lost))
    is_unlaunched = np.isin(places, containing(steps.bounds, unlaunched))
    if not is_little or not np.all(is_unlaunched | np.append(False, is_unlaunched[:-1])):
        is_lossy |= is_unlaunched
    inside = np.searchsorted(timeline.start, steps.bounds)
    is_empty = inside[:, 1] <= inside[:, 0]
    is_lossy |= is_empty
    is_left_out = is_lossy | np.append(False, is_lossy[:-1])
    length = steps.bounds[:, 1] - steps.bounds[:, 0]
    remaining = length[~is_left_out] if not is_left_out.all() else length
    median = float(np.median(remaining))
    is_long = (length > _MOST_MEDIANS * median) & (count > 2)
    sentences = [
        f"Step {steps.numbers[place]} takes {length[place] / 1e6:,.4g} ms, {length[place] / median:,.0f} times the "
        "median, and is left out."
        for place in np.flatnonzero(is_long & ~is_left_out)[:3].tolist()
    ]
    is_kept = ~is_left_out & ~is_long
    if not is_kept.any() or damage.hides_idle_time:
        return replace(steps, hides_idle_time=True)
    for chosen, reason in (
        (is_left_out & ~is_empty, "for their idle time cannot be told"),
        (is_left_out & is_empty, "for no work of theirs is recorded"),
    ):
        if chosen.any():
            listed = _step_list(list(itertools.compress(steps.numbers, chosen)))
            sentences.append(f"{int(chosen.sum()):,} of {count:,} steps are left out, {reason}: {listed}.")
    numbers = tuple(itertools.compress(steps.numbers, is_kept))
    ranges = steps.ranges[is_kept] if len(steps.ranges) else steps.ranges
    return replace(steps, bounds=steps.bounds[is_kept], numbers=numbers, ranges=ranges, left_out=tuple(sentences))


def _step_list(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


def _by_repetition(timeline: Timeline) -> Steps | None:
    """Steps by the shortest period in which kernels repeat that has every name in every period.

    A layer repeats, too, but what stands once a step (the loss, an embedding) is not in every layer.
    """
    order = np.argsort(np.where(timeline.launched < 0, timeline.start, timeline.launched), kind="stable")
    order = order[timeline.work_class[order] == COMPUTING]
    sequence = timeline.name[order]
    counts = np.bincount(sequence)
    rarest = np.argsort(np.where(counts > 1, counts, np.iinfo(np.int64).max), kind="stable")
    names_in_step = (counts > 0).sum()
    tried: set[int] = set()
    for name in rarest[:40].tolist():
        if counts[name] < 2:
            break
        places = np.flatnonzero(sequence == name)
        period = int(np.median(np.diff(places)))
        # A step has four kernels at least.
        if period in tried or period < 4 or 2 * period > len(sequence):
            continue
        tried.add(period)
        if np.mean(sequence[period:] == sequence[:-period]) < 0.97:
            continue
        # From the first place on which everything repeats.
        first = int(places[0])
        whole = (len(sequence) - first) // period
        after = first + whole * period
        if whole < 2 or any(
            len(np.unique(names)) < names_in_step for names in sequence[first:after].reshape(whole, -1)
        ):
            continue
        begins = timeline.start[order[first:after:period]]
        end = timeline.start[order[after]] if after < len(order) else timeline.stop[order[first:after]].max()
        edges = np.append(begins, max(end, begins[-1] + 1))
        if np.any(np.diff(edges) <= 0):
            continue
        return Steps(
            np.column_stack((edges[:-1], edges[1:])), f"by repetition, the same {period:,} kernels {whole} times"
        )
    return None
