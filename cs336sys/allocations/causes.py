"""Causes of full memory, each with its evidence, by the rules in ``docs/memprof.md``.

Where something else could explain the evidence, it only looks like the cause. Where no step ends, a loop around the
model is recognized by what repeats within it, and growth over a loop is never proved.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import median
from typing import Any

from cs336sys.allocations import inference as infer
from cs336sys.allocations.dump import DEFAULT_POOL, ROUNDING, Block, DeviceRecord, FailedAllocation, Frame, Segment
from cs336sys.allocations.timeline import held_bytes
from cs336sys.findings import Finding

# Least parts of the memory: of causes that grow, and of free pieces and logits.
_LEAST_LEAK, _LEAST_SHARE = 0.01, 0.10
# Steps that a line must have grown over. More steps are needed for a single tensor, whose size may also follow the
# batch's, and for an optimizer's state, which is made when a parameter first has a gradient.
_LEAK_STEPS, _SURE_STEPS = 3, 5
_FORWARD_ROLES = (infer.FORWARD, infer.USER)
# Iterations take about equally many events, and at least some: the longest gap in medians, the shortest in events.
_LONGEST_GAP, _LEAST_GAP = 1.5, 3
# Least parts: of the iterations in which a line of the loop runs (some are skipped), of these lines that layers repeat.
_LEAST_ITERATION_SHARE, _LEAST_REPEATED_SHARE = 0.8, 0.4

_LOSS = re.compile(r"loss|cross_entropy|nll|log_softmax")
# Functions of Python and of C++ (at::_ops::addmm::call) that multiply matrices, and that convert.
_PRODUCT = re.compile(r"(?<![a-z])(addmm|bmm|mm|linear|matmul|einsum)(?![a-z])")
_CONVERTING_LIBRARIES = re.compile(r"/(torch|transformers)/")
_CONVERSION = re.compile(r"::_?to(_copy)?(::|\b)")


@dataclass(frozen=True)
class FreePieces:
    """Memory that the allocator has and nobody uses, in bytes."""

    usable: int  # Free for the stream that asked, outside of private pools.
    largest: int  # The largest piece of it.
    elsewhere: int  # Free for other streams, or in private pools.
    reserved: int  # All segments.
    is_expandable: bool  # The segments grow in place already.


@dataclass(frozen=True)
class Moment:
    """A device at one moment, which causes are to explain."""

    record: DeviceRecord
    inference: infer.Inference
    position: int
    failure: FailedAllocation | None
    live: Sequence[int]  # Indices of the blocks that exist,
    size: int  # and their bytes.
    free: FreePieces

    def role(self, block: Block | FailedAllocation) -> str:
        return self.inference.roles[block.stack]

    def innermost(self, stack: int) -> Frame | None:
        """Return the innermost line of Python."""
        return next(filter(infer.is_telling, self.record.stacks[stack]), None)

    def is_loss(self, stack: int) -> bool:
        """Return whether a loss function allocated with this stack."""
        line = self.innermost(stack)
        return line is not None and bool(_LOSS.search(line.name) or line.filename.endswith("/loss.py"))

    def is_library_loss(self, stack: int) -> bool:
        """Return whether a loss function of torch or transformers, which converts logits, allocated with this stack."""
        line = self.innermost(stack)
        return self.is_loss(stack) and line is not None and bool(_CONVERTING_LIBRARIES.search(line.filename))

    def is_product(self, stack: int) -> bool:
        """Return whether a matrix product allocated with this stack, by C++ or by the innermost line of Python."""
        line = self.innermost(stack)
        names = [frame.name for frame in self.record.stacks[stack] if not frame.filename.endswith(".py")]
        if line is not None:
            names.append("linear" if line.filename.endswith("/linear.py") else line.name)  # Its name is forward.
        return any(_PRODUCT.search(name) for name in names)

    def line(self, stack: int) -> tuple[str, str]:
        """Return code and operation of a stack."""
        frames = self.record.stacks[stack]
        return infer.code_of(frames), infer.operation_of(frames)

    def is_leak(self, size: float) -> bool:
        """Return whether so many bytes are enough to name what grows."""
        return size >= max(1, _LEAST_LEAK * self.size)


def find_causes(moment: Moment) -> list[Finding]:
    """Return the causes in the order in which to mend them; fragmentation where no proved cause holds more."""
    if moment.inference.is_recorded:  # One step that memprof recorded on a CPU has nothing to compare it with.
        return []
    causes = [cause for cause in (rule(moment) for rule in _RULES) if cause is not None]
    proved = [finding for finding in causes if finding.certainty == "measured" and finding.cause != "fragmentation"]
    largest = max((finding.amount for finding in proved), default=0)
    return [finding for finding in causes if finding.cause != "fragmentation" or finding.amount > largest]


def memory_cause(name: str, size: int, code: str = "", *, is_proved: bool = True, **facts: Any) -> Finding:
    """Return the finding of a cause that holds so many bytes, most of them made at a line of code."""
    return Finding(name, code, size, "bytes", "measured" if is_proved else "looks like", facts)


def _state_twice(moment: Moment) -> Finding | None:
    """Find lines of an optimizer that made state of the same parameters in two steps, or called from two places."""
    record, inference = moment.record, moment.inference
    parameter_blocks = inference.blocks_of("parameters")
    parameters = Counter(block.requested for block in parameter_blocks)
    gradient_blocks = inference.blocks_of("gradients")
    # By the optimizer's line, and by its calls: the step, and the stack, which names the caller.
    blocks_of_lines: dict[Frame, dict[tuple[int, int], list[Block]]] = defaultdict(lambda: defaultdict(list))
    for index in moment.live:
        block = record.blocks[index]
        if inference.categories[index] == "optimizer state" and moment.role(block) == infer.OPTIMIZER:
            line = next(frame for frame in record.stacks[block.stack] if frame.filename.endswith(".py"))
            blocks_of_lines[line][bisect_right(inference.steps, block.start), block.stack].append(block)
    doubled_bytes, calls = 0, set()
    for blocks_by_call in (blocks_by_call for blocks_by_call in blocks_of_lines.values() if len(blocks_by_call) > 1):
        counts = [Counter(block.requested for block in blocks) for blocks in blocks_by_call.values()]
        starts = [blocks[0].start for blocks in blocks_by_call.values()]
        gradients = [Counter(b.requested for b in gradient_blocks if b.start <= start < b.end) for start in starts]
        # State has the parameters' dtype, as large as they (1), or fp32 for half precision, twice as large (2).
        in_dtype, in_fp32 = (_copied_state_bytes(counts, gradients, parameters, ratio) for ratio in (1, 2))
        if copied_bytes := in_dtype or in_fp32:
            doubled_bytes += copied_bytes
            calls |= {infer.code_of(record.stacks[stack]) for _, stack in blocks_by_call}
    if not moment.is_leak(doubled_bytes):
        return None
    # Parameters without a stack were told by their sizes, which prove nothing.
    is_proved, code = all(block.stack for block in parameter_blocks), " and ".join(sorted(calls)[:2])
    return memory_cause("optimizer state twice", doubled_bytes, code, is_proved=is_proved)


# How many blocks there are of each size.
_Sizes = Counter[int]


def _copied_state_bytes(states: Sequence[_Sizes], gradients: Sequence[_Sizes], parameters: _Sizes, ratio: int) -> int:
    """Return the bytes of the second copy of the state that a line of an optimizer made, 0 if it made one copy.

    ``states`` has what each call made, ``gradients`` what it saw; a state is ``ratio`` times as large as its parameter.
    """
    copied_bytes = 0
    for size, count in sum(states, _Sizes()).items():
        parameter_size = size // ratio
        # States for each gradient that a call saw, two if the line makes both of Adam's moments; 1 if it saw none.
        moments = max(
            math.ceil(state_counts[size] / (gradient_counts[parameter_size] or state_counts[size] or 1))
            for state_counts, gradient_counts in zip(states, gradients, strict=True)
        )
        # If nearly all parameters (1.9 of 2) have a second state, the smaller one of the two largest sets is the copy.
        if parameters[parameter_size] and count >= 1.9 * moments * parameters[parameter_size]:
            copied_bytes += size * sorted(state_counts[size] for state_counts in states)[-2]
    return copied_bytes


@dataclass(frozen=True)
class _GrowingLine:
    """A stack whose live blocks grow; ``is_single``: each is one tensor, larger than the one before."""

    stack: int
    size: int
    steps: int
    is_single: bool


def _growth_over_steps(moment: Moment) -> Finding | None:
    """Find lines that hold more after each step, or without steps after each iteration of a loop, which is no proof."""
    for steps, is_proved in ((moment.inference.steps, True), (_loop_iterations(moment), False)):
        lines = _growing_lines(moment, steps)
        if moment.is_leak(sum(line.size for line in lines)):
            return _growth_cause(moment, lines, is_proved)
    return None


def _growing_lines(moment: Moment, steps: Sequence[int]) -> list[_GrowingLine]:
    """Return the lines that hold more after each step, counted from the first step after which they hold anything."""
    # ``steps`` are the positions of the next steps' first allocations; ``last`` is the last step before the moment.
    ends = [step - 1 for step in steps]
    last = bisect_right(ends, moment.position) - 1
    if last + 1 < _LEAK_STEPS:
        return []
    blocks_of_lines: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in moment.record.blocks:
        # From here on start and end are numbers of steps: the first at whose end the block is there, or no longer.
        first, after = bisect_left(ends, block.start), bisect_left(ends, block.end)
        if block.start and first < after:  # Made within the record (0: before it), and there at a step's end.
            blocks_of_lines[_line_key(block)].append(block._replace(start=first, end=after))
    lines = []
    for (stack, _), blocks in blocks_of_lines.items():
        if len(blocks) < _LEAK_STEPS:
            continue
        sizes = held_bytes(blocks, len(ends) - 1)
        rises = [later - earlier for earlier, later in pairwise([0, *sizes])]
        first_rise = next((step for step, rise in enumerate(rises) if rise > 0), last)
        # If there are as many blocks at the end as after the first rise, larger ones replace them, as by torch.cat.
        live_counts = {sum(block.start <= step < block.end for block in blocks) for step in (first_rise, len(ends) - 1)}
        is_single = len(live_counts) == 1
        is_state = moment.inference.roles[stack] == infer.OPTIMIZER
        if first_rise < last and _is_growing(rises[first_rise:], is_single=is_single, is_state=is_state):
            lines.append(_GrowingLine(stack, sum(rises[first_rise : last + 1]), last - first_rise + 1, is_single))
    # Where batches become longer, so does a tensor of the last one that is kept.
    middle, latest = (_largest_of_lines(moment, *[1, *steps][step : step + 2]) for step in (last // 2, last))
    are_batches_longer = _common_ratio(latest, [middle]) > 1
    lines = [line for line in lines if not (line.is_single and are_batches_longer)]
    return sorted(lines, key=lambda line: -line.size)


def _line_key(block: Block) -> tuple[int, int]:
    """Return what allocations of one line share; those without a stack are told apart by size."""
    return block.stack, 0 if block.stack else block.size


def _is_growing(rises: Sequence[int], *, is_single: bool, is_state: bool) -> bool:
    """Return whether changes from step to step are growth that goes on, and not that of a buffer which is emptied."""
    positive = [step for step, rise in enumerate(rises) if rise > 0]
    if len(positive) < _LEAK_STEPS:
        return False
    # One of the last two steps must rise, or as many as usually pass: an evaluation comes every so many steps.
    gaps = [later - earlier for earlier, later in pairwise(positive)]
    is_periodic = len(positive) >= _SURE_STEPS and max(gaps) <= _LONGEST_GAP * median(gaps) and min(rises) >= 0
    if positive[-1] < len(rises) - (max(2, *gaps) if is_periodic else 2):
        return False
    if is_state:  # Every step must rise, and equally: the states of new parameters do not.
        return len(positive) == len(rises) >= _SURE_STEPS and len(set(rises)) == 1
    if is_single:  # No step may fall: a batch's size rises by chance, too.
        return len(positive) >= max(_SURE_STEPS, len(rises) / 2) and min(rises) >= 0
    # A buffer that is emptied gives back all; growth is in half of the steps or more, and keeps half of it or more.
    fallen, risen = -sum(min(rise, 0) for rise in rises), sum(max(rise, 0) for rise in rises)
    return is_periodic or (2 * len(positive) >= len(rises) and 2 * fallen <= risen)


def _growth_cause(moment: Moment, lines: Sequence[_GrowingLine], is_proved: bool) -> Finding:
    """Return the cause of growing lines: a graph that is kept, if half of what a forward pass saves is among them."""
    inference = moment.inference
    growing = [line.stack for line in lines if inference.roles[line.stack] == infer.FORWARD]
    activations = [block for block in inference.blocks_of("activations") if block.start]  # 0: older than the record.
    saved = {block.stack for block in activations if moment.role(block) == infer.FORWARD}
    kept_lines, saved_lines = ({moment.line(stack) for stack in stacks} for stacks in (growing, saved))
    code = infer.code_of(moment.record.stacks[lines[0].stack])  # The line that holds most.
    name = "growing cache" if lines[0].is_single else "leak"
    # A kept graph keeps what a forward pass saves: half of its lines or more, and not one or two by chance.
    if len(kept_lines) >= 3 and 2 * len(kept_lines & saved_lines) >= len(saved_lines):
        name = "graph kept"  # The line to name is the innermost that all stacks share: it calls the model.
        shared = _common_frames(moment.record.stacks[stack] for stack in growing)
        code = infer.code_of([frame for frame in shared if infer.is_own(frame)]) or code
    size, steps = sum(line.size for line in lines), max(line.steps for line in lines)
    step_bytes = round(sum(line.size / line.steps for line in lines))
    return memory_cause(name, size, code, is_proved=is_proved, step_bytes=step_bytes, steps=steps)


def _common_frames(stacks: Iterable[Sequence[Frame]]) -> list[Frame]:
    """Return the outer frames that all stacks share, innermost first."""
    outward = zip(*(reversed(stack) for stack in stacks), strict=False)
    return [frames[0] for frames in takewhile(lambda frames: len(set(frames)) == 1, outward)][::-1]


def _loop_iterations(moment: Moment) -> list[int]:
    """Return the positions where iterations of a loop around a model begin, if there is one around the moment.

    Unlike a loop over layers, it repeats lines of which many run several times in an iteration, once for each layer.
    """
    runs_of_line = _runs_by_line(moment)
    # The line that runs the fewest times runs once in an iteration; of several such lines the first begins it.
    regular = filter(_is_regular, runs_of_line.values())
    iteration_starts = min(regular, key=lambda positions: (len(positions), positions[0]), default=[])
    return iteration_starts if iteration_starts and _is_around_model(moment, iteration_starts, runs_of_line) else []


def _runs_by_line(moment: Moment) -> dict[tuple[int, int], list[int]]:
    """Return where each line of forward and backward passes allocated in the moment's step, or ever without steps."""
    steps, roles = moment.inference.steps, moment.inference.roles
    step = bisect_right(steps, moment.position)
    bounds = [1, *steps, moment.record.last_position + 1]  # Memory from before the record starts at 0.
    begin, end = bounds[step], bounds[step + 1]
    runs_of_line: dict[tuple[int, int], list[int]] = defaultdict(list)
    for block in sorted(moment.record.blocks, key=lambda block: block.start):
        if begin <= block.start < end and roles[block.stack] not in (infer.INITIAL, infer.OPTIMIZER):
            runs_of_line[_line_key(block)].append(block.start)
    return runs_of_line


def _is_regular(positions: Sequence[int]) -> bool:
    """Return whether a line ran as one of a loop does: often enough, and at about equal distances of some events."""
    gaps = [later - earlier for earlier, later in pairwise(positions)]
    return len(positions) > _LEAK_STEPS and max(gaps) <= _LONGEST_GAP * median(gaps) and min(gaps) >= _LEAST_GAP


def _is_around_model(
    moment: Moment, iteration_starts: Sequence[int], runs_of_line: Mapping[tuple[int, int], Sequence[int]]
) -> bool:
    """Return whether iterations repeat many lines for every layer, and are not layers of one forward pass."""
    first, last = iteration_starts[0], iteration_starts[-1]
    # How often each line runs in each iteration but the last, which may not be complete.
    runs_per_iteration = {
        key: Counter(bisect_right(iteration_starts, start) for start in positions if first <= start < last)
        for key, positions in runs_of_line.items()
    }
    least = _LEAST_ITERATION_SHARE * (len(iteration_starts) - 1)  # A line that fewer run is none of the loop's.
    typical_runs = {key: median(runs.values()) for key, runs in runs_per_iteration.items() if len(runs) >= least}
    stacks = [moment.record.stacks[stack] for stack, _ in typical_runs if stack]
    # A loss ends a model, so lines that run twice are those of two layers; without it they may be a layer's two norms.
    has_loss = any(_LOSS.search(frame.name) for stack in stacks for frame in stack if infer.is_telling(frame))
    repeated_lines = [key for key, runs in typical_runs.items() if runs >= (2 if has_loss else 3)]
    shared = next((frame for frame in _common_frames(stacks) if infer.is_own(frame)), None)
    is_in_model = shared is not None and shared.name in ("forward", "__call__")  # Then the loop is over layers.
    return not is_in_model and len(repeated_lines) >= max(_LEAST_REPEATED_SHARE * len(typical_runs), 1)


def _longer_than_before(moment: Moment) -> Finding | None:
    """Find a failed step whose forward pass made larger memory by the same lines than each step before."""
    steps = moment.inference.steps
    current = bisect_right(steps, moment.position)
    if moment.failure is None or current < 2:  # One step before says little: the record may begin within it.
        return None
    start = steps[current - 1]
    present, before = _largest_of_lines(moment, start), _largest_of_lines(moment, end=start)
    ratio = _common_ratio(present, [before])  # 1 if they are not larger: then ``size`` is 0.
    blocks = [moment.record.blocks[index] for index in moment.live]
    activations = sum(block.size for block in blocks if block.start >= start and moment.role(block) in _FORWARD_ROLES)
    size = int(activations * (1 - 1 / ratio))  # By so much a batch like those before would have been smaller.
    return memory_cause("longer batch", size, ratio=ratio, is_among_ranks=False) if moment.is_leak(size) else None


def longer_ratio(moment: Moment, others: Sequence[Moment]) -> float:
    """Return by what ratio the forward pass of a rank makes more memory than that of the others, 1 if it does not."""
    return _common_ratio(_largest_of_lines(moment), list(map(_largest_of_lines, others)))


def _common_ratio(sizes: Mapping[tuple[str, str], int], others: Sequence[Mapping[tuple[str, str], int]]) -> float:
    """Return by what ratio lines of code allocate more than the median of others; 1 if most have no ratio in common.

    Sizes are of each line's largest allocation; ``others`` are those of other ranks, or of earlier steps.
    """
    ratios = []
    for line, size in sizes.items():
        if other_sizes := [sizes_elsewhere[line] for sizes_elsewhere in others if line in sizes_elsewhere]:
            ratios.append(size / median(other_sizes))
    middle = median(ratios) if len(ratios) >= 3 else 1.0  # Fewer lines could agree by chance.
    # A longer batch scales activations alike: half of the ratios at least are equal, to 2 %. 5 % more fill no device.
    equal = sum(abs(ratio / middle - 1) < 0.02 for ratio in ratios)
    return middle if middle > 1.05 and 2 * equal >= len(ratios) else 1.0


def _largest_of_lines(moment: Moment, start: int = 1, end: int | None = None) -> dict[tuple[str, str], int]:
    """Return the largest allocation of each line in forward passes; from 1, as position 0 is of older memory."""
    largest: dict[int, int] = defaultdict(int)
    for block in moment.record.blocks:
        if start <= block.start < (end or moment.record.last_position + 1) and moment.role(block) in _FORWARD_ROLES:
            largest[block.stack] = max(largest[block.stack], block.size)
    lines: dict[tuple[str, str], int] = defaultdict(int)  # Several stacks lead to a line.
    for stack, size in largest.items():
        lines[moment.line(stack)] = max(lines[moment.line(stack)], size)
    return lines


def _fragmentation(moment: Moment) -> Finding | None:
    """Find a failure that the free pieces together, but no single piece and not the device, would have satisfied."""
    free, failure = moment.free, moment.failure
    if failure is None or not max(free.largest, failure.device_free) < failure.size <= free.usable:
        return None
    if free.usable < _LEAST_SHARE * free.reserved:  # Too little to be what filled the device.
        return None
    facts: dict[str, Any] = {"largest": free.largest, "requested": failure.size, "is_expandable": free.is_expandable}
    return memory_cause("fragmentation", free.usable, **facts)


def free_pieces(blocks: Sequence[Block], segments: Sequence[Segment], stream: int | None) -> FreePieces:
    """Subtract the blocks, rounded up as by the allocator, from the segments; ``stream`` None: all are usable."""
    ordered = sorted((block.address, block.address + _round_up(block.size)) for block in blocks)
    usable, elsewhere, largest = 0, 0, 0
    next_block = 0
    for segment in sorted(segments):
        pieces, piece_start = [], segment.address  # Free before each of its blocks, and after the last.
        while next_block < len(ordered) and ordered[next_block][0] < segment.end:
            start, stop = ordered[next_block]
            next_block += 1
            pieces.append(start - piece_start)
            piece_start = max(piece_start, min(stop, segment.end))
        pieces = [max(0, piece) for piece in (*pieces, segment.end - piece_start)]  # Below 0 where blocks overlap.
        if segment.pool == DEFAULT_POOL and stream in (None, segment.stream):
            usable += sum(pieces)
            largest = max(largest, *pieces)
        else:
            elsewhere += sum(pieces)
    reserved = sum(segment.size for segment in segments)
    return FreePieces(usable, largest, elsewhere, reserved, any(segment.is_expandable for segment in segments))


def _round_up(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING


def _fp32_logits(moment: Moment) -> Finding | None:
    """Find fp32 copies of half-precision logits that a loss, or a conversion before it, makes: twice as large."""
    results = [block for block in moment.record.blocks if block.start and moment.role(block) in _FORWARD_ROLES]
    failure, failed_at = moment.failure, moment.position + 1  # The allocation that failed would have been the next.
    if failure is not None and moment.role(failure) in _FORWARD_ROLES:
        results = [block for block in results if block.start < failed_at]
        failed = Block(0, failure.size, failed_at, failed_at, failure.stack, 0, DEFAULT_POOL, requested=failure.size)
        results.append(failed)  # As if it had been made, at address 0 on stream 0: it may be the copy.
    # Without masks and scalars, which lie between logits and their copies.
    results = [block for block in results if block.size >= _LEAST_LEAK * moment.size]
    results.sort(key=lambda block: block.start)
    is_proved = _copies_of_halves(moment, results)
    copies = [b for b in results if b.stack in is_proved and (b.start == failed_at or b.end > moment.position)]
    size = sum(block.size for block in copies if block.start <= failed_at)
    if not copies or size < _LEAST_SHARE * moment.size:
        return None
    is_certain = all(is_proved[block.stack] for block in copies)
    return memory_cause("fp32 logits", size, infer.code_of(moment.record.stacks[copies[0].stack]), is_proved=is_certain)


def _copies_of_halves(moment: Moment, results: Sequence[Block]) -> dict[int, bool]:
    """Return which stacks copied the result before theirs, in order, in fp32: whether only logits explain that."""
    is_proved: dict[int, bool] = {}
    for index, (half, copy) in enumerate(pairwise(results)):
        is_loss, line = moment.is_loss(copy.stack), moment.innermost(copy.stack)
        if is_loss and copy.size == half.size and half.stack in is_proved:  # It copies an fp32 copy.
            is_proved[copy.stack] = is_proved[half.stack]
        # The source of a copy lives until it is made (to the position before its start), and is half as large.
        if half.end <= copy.start - 1 or _round_up(2 * half.size) != _round_up(copy.size):
            continue
        # Proved: a library's loss made the copy; or it copies a product, and a conversion made it, or a library's loss
        # makes as much right after it. Only possible: the user's loss made it, which may as well join two tensors, or a
        # line of the user's, and nothing comes after.
        if moment.is_library_loss(copy.stack):
            is_proved[copy.stack] = True
        elif moment.is_product(half.stack) and not moment.is_product(copy.stack):
            is_converted = any(_CONVERSION.search(frame.name) for frame in moment.record.stacks[copy.stack])
            following = results[index + 2 : index + 5]  # Right after the copy.
            of_loss = [block for block in following if moment.is_library_loss(block.stack) and block.size == copy.size]
            if is_converted or of_loss:
                is_proved[copy.stack] = True
            elif is_loss or (not following and line is not None and infer.is_own(line)):
                is_proved.setdefault(copy.stack, False)  # Unless another copy of this stack proves it.
    return is_proved


# What to mend first comes first.
_RULES: tuple[Callable[[Moment], Finding | None], ...] = (
    _state_twice,
    _growth_over_steps,
    _longer_than_before,
    _fragmentation,
    _fp32_logits,
)
