"""Infer the purpose of a stranger's memory from stacks and lifetimes, by the rules in ``docs/memprof.md``.

Every stack has a role, by its innermost telling frame; the roles of allocations say when forward passes, backward
passes and optimizer steps were. Autograd's threads have no Python stack, so that where others have one an allocation
without is the backward pass's. Snapshots of ``memprof`` on a CPU name their categories and phases.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from cs336sys.allocations.dump import DEFAULT_POOL, Block, DeviceRecord, Frame
from cs336sys.allocations.timeline import MEMORY_CATEGORIES

FOREIGN_CATEGORIES = (*MEMORY_CATEGORIES[:-1], "graph pools", "other", "unknown")

INITIAL, FORWARD, BACKWARD, RECOMPUTATION, OPTIMIZER, USER, NOTHING = (
    "initial", "forward", "backward", "recomputation", "optimizer", "user", "none",
)  # fmt: skip

# What memprof's outermost frames name, on a CPU.
_PHASES = dict.fromkeys(("forward", "loss"), FORWARD) | {
    "backward": BACKWARD, "optimizer": OPTIMIZER, "before the step": INITIAL,
}  # fmt: skip

# The least part of the forward pass's memory that is freed while a backward pass runs.
_FREED_BY_BACKWARD = 0.3

_LIBRARIES = ("/torch/", "/site-packages/", "/dist-packages/", "/lib/python", "/Lib/", "<")
# Frames between an operator and who called it: what records, and how torch calls that.
_PASSING = ("/cs336sys/allocations/", "/torch/_ops.py", "/torch/_compile.py", "/torch/_dynamo/eval_frame.py")
_INITIAL_NAMES = {
    "_apply", "convert", "to_empty", "reset_parameters", "_load_from_state_dict", "load_state_dict",
    "from_pretrained", "_initialize_weights", "deepcopy", "__deepcopy__",
}  # fmt: skip
_BACKWARD_NAMES = {"backward", "_engine_run_backward", "unpack_hook", "recompute_fn", "_run_fn_in_backward"}


def role(stack: Sequence[Frame]) -> str:
    """Return the part of training that a stack belongs to, by its innermost telling frame."""
    inner_role = ""
    for frame in stack:
        name, path = frame.name, "/" + frame.filename
        if name in _BACKWARD_NAMES or "autograd::Engine::" in name:
            return RECOMPUTATION if inner_role == FORWARD else BACKWARD
        # Only a backward pass further out changes what an inner frame has told.
        if inner_role or not is_telling(frame):
            continue
        if "/optim" in path or path.endswith(("optimizer.py", "optimizers.py")):
            return OPTIMIZER  # Also in a backward pass, whose hooks may step one.
        if name in _INITIAL_NAMES or name == "__init__" or "/torch/nn/init.py" in path:
            inner_role = INITIAL
        elif name in ("forward", "_call_impl", "_wrapped_call_impl") or "/torch/nn/functional.py" in path:
            inner_role = FORWARD
    return inner_role or (USER if any(map(is_telling, stack)) else NOTHING)


def code_of(stack: Sequence[Frame]) -> str:
    """Return the innermost line of the user's own code, else of any: ``src/train.py:88 train_step``; "" for none."""
    if not stack:
        return ""
    telling = [frame for frame in stack if is_telling(frame)]
    frame = next(filter(is_own, telling), (telling or stack)[0])
    folder_and_file = frame.filename.split("/")[-2:]
    return f"{'/'.join(folder_and_file)}:{frame.line} {frame.name}"


@lru_cache(maxsize=100_000)
def is_telling(frame: Frame) -> bool:
    """Return whether a frame is a line of Python, and more than a way from an operator to its caller."""
    return frame.filename.endswith(".py") and not any(part in frame.filename for part in _PASSING)


def is_own(frame: Frame) -> bool:
    """Return whether a line is the user's, and of no library."""
    return frame.filename.endswith(".py") and not any(part in frame.filename for part in _LIBRARIES)


def operation_of(stack: Sequence[Frame]) -> str:
    """Return the name of the innermost Python function, torch's where the user's line called one."""
    return next((frame.name for frame in stack if is_telling(frame)), "")


class Inference:
    """The category of every block of a device.

    Attributes:
        categories: of the record's blocks, in their order.
        roles: of the record's stacks.
        steps: positions at which steps ended: of the next step's first allocation.
        is_recorded: the snapshot itself names categories and phases.
    """

    def __init__(self, record: DeviceRecord):
        self._record = record
        # Outermost and innermost frames of memprof's snapshots name phases and categories, in no line of code.
        self.is_recorded = len(record.stacks) > 1 and all(
            stack[0].line == stack[-1].line == 0 and stack[0].filename in MEMORY_CATEGORIES
            for stack in record.stacks[1:]  # The first is empty.
        )
        if self.is_recorded:
            self.roles = [_PHASES.get(stack[-1].filename, NOTHING) if stack else NOTHING for stack in record.stacks]
        else:
            self.roles = [role(stack) for stack in record.stacks]
            # Where forward passes have stacks, an allocation without one is of a thread of autograd.
            if FORWARD in self.roles and any(block.stack for block in record.blocks if block.start):
                self.roles = [BACKWARD if stack_role == NOTHING else stack_role for stack_role in self.roles]
        self._failure_positions = [failure.position for failure in record.failures]
        allocated = sorted((block.start, self.roles[block.stack]) for block in record.blocks if block.start)
        # (A start of 0 is before the record.) Recomputations belong to the backward pass that waits for them.
        parts = [(start, BACKWARD if part == RECOMPUTATION else part) for start, part in allocated]
        self._starts = [start for start, _ in parts]
        self._backward_allocations = [start for start, part in parts if part == BACKWARD] + [record.last_position + 1]
        # Allocations that follow one another in one part of training: the part, and their positions.
        runs = [(part, [start for start, _ in run]) for part, run in groupby(parts, itemgetter(1))]
        ends = [starts[0] for _, starts in runs[1:]] + [record.last_position + 1]  # Where the next run begins.
        # For each of ``_starts``, where its run ends.
        self._run_ends = [end for (_, starts), end in zip(runs, ends, strict=False) for _ in starts]
        # Without the last run, which may go on after the record.
        self.steps: Sequence[int] = record.step_marks or self._find_steps(
            [(part, starts[0], end) for (part, starts), end in zip(runs[:-1], ends, strict=False)]
        )
        if self.is_recorded:
            self.categories = [record.stacks[b.stack][0].filename if b.stack else "other" for b in record.blocks]
            return
        self.categories = [self._category(block) for block in record.blocks]
        self._name_older_blocks()

    def blocks_of(self, category: str) -> list[Block]:
        return [block for block, name in zip(self._record.blocks, self.categories, strict=True) if name == category]

    def recorded_line(self, block: Block) -> tuple[str, str]:
        """Return code and operation of a block that ``memprof`` recorded on a CPU."""
        stack = self._record.stacks[block.stack]  # Category and purpose, perhaps a line of code, and the phase.
        return (code_of(stack[1:-1]) or stack[-1].filename, stack[0].name) if stack else ("", "")

    def _find_steps(self, runs: Sequence[tuple[str, int, int]]) -> list[int]:
        """Return where steps end: with an optimizer's first run after a backward pass, or else with backward passes.

        A run (part, start, end) is of allocations that follow one another in one part of training.
        """
        backward_ends, optimizer_ends = [], []
        computed = [b for b in self._record.blocks if b.start and self.roles[b.stack] in (FORWARD, USER)]
        computed.sort(key=lambda block: block.start)  # USER: what computes the loss.
        starts = [block.start for block in computed]
        last_backward_end = backward_end_of_step = 0
        for part, start, end in runs:
            if part == BACKWARD:
                of_forward = computed[bisect_left(starts, last_backward_end) : bisect_left(starts, start)]
                before_bytes, after_bytes = (
                    sum(block.size for block in of_forward if block.end > position) for position in (start, end - 1)
                )  # When the run begins, and before the next one does.
                last_backward_end = end
                # Memory without a stack can come from anywhere; a backward pass frees what autograd saved.
                if after_bytes <= (1 - _FREED_BY_BACKWARD) * before_bytes:
                    backward_ends.append(end)
            # One step for each backward pass, however many runs its optimizers have: only the first after it ends one.
            elif part == OPTIMIZER and backward_end_of_step < last_backward_end:
                optimizer_ends.append(end)
                backward_end_of_step = last_backward_end
        # An optimizer that allocates in a single step makes its state there, and later updates in place.
        return optimizer_ends if len(optimizer_ends) > 1 else backward_ends

    def _category(self, block: Block) -> str:
        """Infer a block's purpose from what allocated it and how long it lived."""
        if block.pool != DEFAULT_POOL:
            return "graph pools"
        part = self.roles[block.stack]
        last_position = self._record.last_position  # A block that is never freed ends after it.
        # What memory is for that outlives the run of the part of training which made it.
        lasting = {OPTIMIZER: "optimizer state", INITIAL: "parameters", FORWARD: "activations"}
        if block.start == 0:
            return lasting.get(part, "unknown")
        if part == NOTHING:
            return "unknown"
        run_end = self._run_ends[bisect_left(self._starts, block.start)]
        if part in (INITIAL, OPTIMIZER):
            # The run of an unfinished model goes on to the end of the record.
            is_lasting = block.end > run_end or (part == INITIAL and block.end > last_position)
            return lasting[part] if is_lasting else "temporary"
        next_backward = self._backward_allocations[bisect_right(self._backward_allocations, block.start)]
        if part in (FORWARD, RECOMPUTATION):
            # What the next backward pass still finds was saved for it; a failure can come before that pass goes on.
            index = bisect_left(self._failure_positions, block.start)
            needed_until = min(next_backward, last_position, *self._failure_positions[index : index + 1])
            return "activations" if block.end > needed_until else "temporary"
        if part == BACKWARD:
            # The last allocation of the run; what the event right after it frees was needed for it alone.
            last_backward = self._backward_allocations[bisect_left(self._backward_allocations, run_end) - 1]
            return "gradients" if block.end > last_backward + 1 else "temporary"
        # The user's own code: it may keep state from step to step; what lives into the backward pass is saved for it.
        next_step = bisect_right(self.steps, block.start)
        if next_step < len(self.steps) and block.end > self.steps[next_step]:
            return "unknown"
        if next_backward < block.end:
            return "activations"
        return "temporary" if block.end <= last_position else "unknown"

    def _name_older_blocks(self) -> None:
        """Name older memory by size: as large as a gradient is a parameter, or beyond their number optimizer state."""
        gradients = _most_at_once(self.blocks_of("gradients"))
        # Blocks of one size cannot be told apart: so many of them are parameters, whichever these are.
        by_size: dict[int, list[int]] = defaultdict(list)
        for index, block in enumerate(self._record.blocks):
            if block.start == 0 and self.categories[index] == "unknown" and block.end > self._record.last_position:
                by_size[block.requested].append(index)
        # A temporary can be as large as a gradient: most sizes say how many blocks a parameter has: three with AdamW.
        counts = Counter(len(by_size[size]) // count for size, count in gradients.items() if size in by_size)
        blocks_per_gradient = max((ratio for ratio in counts if ratio), key=lambda ratio: counts[ratio], default=1)
        for size, count in gradients.items():
            of_size = by_size.get(size, [])
            if blocks_per_gradient == 1 and len(of_size) > count:
                continue  # Some of them are parameters, and sizes do not tell which.
            if of_size and len(of_size) % blocks_per_gradient == 0:
                count = len(of_size) // blocks_per_gradient  # Parameters without a gradient are among them.
            # Gradients in half precision have moments and master weights in fp32.
            of_double_size = by_size.get(2 * size, []) if 2 * size not in gradients else []
            states = of_size[count : len(of_size) // count * count]  # Whole sets: the rest is no state.
            states += of_double_size[: len(of_double_size) // count * count]
            for category, indices in (("parameters", of_size[:count]), ("optimizer state", states)):
                for index in indices:
                    self.categories[index] = category


def _most_at_once(blocks: Sequence[Block]) -> Counter[int]:
    """Return by size how many of the blocks exist at once, at most."""
    changes = [(block.start, 1, block.requested) for block in blocks]
    changes += [(block.end, -1, block.requested) for block in blocks]
    existing: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for _, sign, size in sorted(changes):
        existing[size] += sign
        most[size] = max(most[size], existing[size])
    return most
