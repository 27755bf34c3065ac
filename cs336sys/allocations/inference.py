"""Infer the purpose of a stranger's memory from stacks and lifetimes.

Every stack has a role, by its innermost telling frame; the roles of allocations in turn say when forward passes,
backward passes and optimizer steps were. CUDA's autograd threads have no Python stack, so where others have one an
allocation without is the backward pass's.

| category | rule |
|---|---|
| graph pools | lies in a private pool |
| optimizer state | made in an optimizer, and outlives that step |
| parameters | made in ``__init__``, ``to`` or ``load_state_dict`` of a module (buffers, too) |
| gradients | made in a backward pass, and outlives it |
| activations | made in a forward pass or a recomputation, and is there when the backward pass goes on |
| temporary | made and freed within a forward pass, a backward pass or an optimizer step |
| unknown | none of these |

A step ends with an optimizer's allocations, or else with a backward pass that freed what the forward pass had left, or
where ``record_function`` or ``user_metadata`` names steps. Without any of these there are no steps.

Memory older than the record has no stack. Blocks as large as the gradients, one for each, are parameters; further
ones in multiples of them are optimizer state; where sizes contradict each other, they are unknown. Snapshots of
``memprof`` on a CPU name their categories and phases.
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

_LIBRARIES = ("/torch/", "/site-packages/", "/dist-packages/", "/lib/python", "<")
# Frames between an operator and who called it: what records, and how torch calls that.
_PASSING = ("/cs336sys/allocations/", "/torch/_ops.py", "/torch/_compile.py", "/torch/_dynamo/eval_frame.py")
_INITIAL_NAMES = {
    "_apply", "convert", "to_empty", "reset_parameters", "_load_from_state_dict", "load_state_dict",
    "from_pretrained", "_initialize_weights", "deepcopy", "__deepcopy__",
}  # fmt: skip
_BACKWARD_NAMES = {"backward", "_engine_run_backward", "unpack_hook", "recompute_fn", "_run_fn_in_backward"}


def role(stack: Sequence[Frame]) -> str:
    """Say which part of training a stack belongs to."""
    if not stack:
        return NOTHING
    inner = ""
    python = False
    for frame in stack:
        name, filename = frame.name, frame.filename
        if name in _BACKWARD_NAMES or "autograd::Engine::" in name:
            return RECOMPUTATION if inner == FORWARD else BACKWARD
        if not is_telling(frame):
            continue
        python = True
        if inner:
            continue
        path = f"/{filename.replace(chr(92), '/')}"
        if "/optim" in path or path.endswith(("optimizer.py", "optimizers.py")):
            return OPTIMIZER
        if name in _INITIAL_NAMES or name == "__init__" or "/torch/nn/init.py" in path:
            inner = INITIAL
        elif name in ("forward", "_call_impl", "_wrapped_call_impl") or "/torch/nn/functional.py" in path:
            inner = FORWARD
    return inner or (USER if python else NOTHING)


def code_of(stack: Sequence[Frame]) -> str:
    """Name the innermost line of the user's own code, else of any: ``src/train.py:88 train_step``."""
    if not stack:
        return ""
    python = [frame for frame in stack if is_telling(frame)]
    frame = next(filter(is_own, python), (python or stack)[0])
    return f"{'/'.join(frame.filename.replace(chr(92), '/').split('/')[-2:])}:{frame.line} {frame.name}"


@lru_cache(maxsize=100_000)
def is_telling(frame: Frame) -> bool:
    """Return whether a line of Python is more than a way from an operator to who called it."""
    return frame.filename.endswith(".py") and not any(part in frame.filename for part in _PASSING)


def is_own(frame: Frame) -> bool:
    """Return whether a line is the user's, and of no library."""
    return frame.filename.endswith(".py") and not any(part in frame.filename for part in _LIBRARIES)


def operation_of(stack: Sequence[Frame]) -> str:
    """Name the innermost Python function, which is torch's where a line of the user's called one."""
    return next((frame.name for frame in stack if is_telling(frame)), "")


class Inference:
    """The category of every block of a device.

    Attributes:
        categories: of the record's blocks, in their order.
        roles: of the record's stacks.
        steps: positions at which a step ended, those of its successor's first allocation.
        is_recorded: the snapshot itself names them.
    """

    def __init__(self, record: DeviceRecord):
        self._record = record
        self.is_recorded = len(record.stacks) > 1 and all(
            stack[0].line == stack[-1].line == 0 and stack[0].filename in MEMORY_CATEGORIES
            for stack in record.stacks[1:]
        )
        if self.is_recorded:
            self.roles = [_PHASES.get(stack[-1].filename, NOTHING) if stack else NOTHING for stack in record.stacks]
        else:
            self.roles = [role(stack) for stack in record.stacks]
            if FORWARD in self.roles and any(block.stack for block in record.blocks if block.start):
                self.roles = [BACKWARD if stack_role == NOTHING else stack_role for stack_role in self.roles]
        self._failures = [failure.position for failure in record.failures]
        allocated = sorted((block.start, self.roles[block.stack]) for block in record.blocks if block.start)
        self._made = [start for start, _ in allocated]
        parts = [BACKWARD if part == RECOMPUTATION else part for _, part in allocated]
        self._backward = [start for start, part in zip(self._made, parts, strict=True) if part == BACKWARD]
        self._backward.append(record.length + 1)
        # Allocations that follow one another in one part of training: the part, and their positions.
        runs = [
            (part, [start for _, start in run])
            for part, run in groupby(zip(parts, self._made, strict=True), itemgetter(0))
        ]
        ends = [starts[0] for _, starts in runs[1:]] + [record.length + 1]
        self._ends_of_runs = [end for (_, starts), end in zip(runs, ends, strict=False) for _ in starts]
        self.steps: Sequence[int] = record.step_marks or self._steps(
            [(part, starts[0], end) for (part, starts), end in zip(runs[:-1], ends, strict=False)]
        )
        if self.is_recorded:
            self.categories = [
                record.stacks[block.stack][0].filename if block.stack else "other" for block in record.blocks
            ]
            return
        self.categories = [self._category(block) for block in record.blocks]
        self._name_what_was_there()

    def blocks_of(self, category: str) -> list[Block]:
        return [block for block, name in zip(self._record.blocks, self.categories, strict=True) if name == category]

    def name_of(self, block: Block) -> tuple[str, str]:
        """Code and operation of a block that ``memprof`` recorded on a CPU."""
        stack = self._record.stacks[block.stack]
        return (code_of(stack[1:-1]) or stack[-1].filename, stack[0].name) if stack else ("", "")

    def _steps(self, runs: Sequence[tuple[str, int, int]]) -> list[int]:
        """Return where optimizers' runs end that follow a backward pass, or else where backward passes end."""
        backward_ends, optimizer_ends = [], []
        computed = sorted(
            (block for block in self._record.blocks if block.start and self.roles[block.stack] in (FORWARD, USER)),
            key=lambda block: block.start,
        )
        starts = [block.start for block in computed]
        since = step = 0
        for part, start, end in runs:
            if part == BACKWARD:
                kept = computed[bisect_left(starts, since) : bisect_left(starts, start)]
                left, after = (sum(block.size for block in kept if block.end > moment) for moment in (start, end - 1))
                since = end
                # Memory without a stack can come from anywhere; a backward pass frees what autograd saved.
                if after <= (1 - _FREED_BY_BACKWARD) * left:
                    backward_ends.append(end)
            elif part == OPTIMIZER and step < since:
                optimizer_ends.append(end)
                step = since
        return optimizer_ends if len(optimizer_ends) > 1 else backward_ends

    def _category(self, block: Block) -> str:
        """Infer what a block holds from what made it and how long it lived."""
        if block.pool != DEFAULT_POOL:
            return "graph pools"
        part = self.roles[block.stack]
        length = self._record.length
        made_by = {OPTIMIZER: "optimizer state", INITIAL: "parameters", FORWARD: "activations"}
        if block.start == 0:
            return made_by.get(part, "unknown") if block.stack else "unknown"
        if part == NOTHING:
            return "unknown"
        run_end = self._ends_of_runs[bisect_left(self._made, block.start)]
        if part in (INITIAL, OPTIMIZER):
            return made_by[part] if block.end > run_end else "temporary"
        goes_on = self._backward[bisect_right(self._backward, block.start)]
        if part in (FORWARD, RECOMPUTATION):
            # A failure can come before the backward pass goes on.
            index = bisect_left(self._failures, block.start)
            needed = min(goes_on, length, *self._failures[index : index + 1])
            return "activations" if block.end > needed else "temporary"
        if part == BACKWARD:
            last = self._backward[bisect_left(self._backward, run_end) - 1]
            return "gradients" if block.end > last + 1 else "temporary"
        # The user's own code: what it computes the loss with, or keeps from step to step.
        following = bisect_right(self.steps, block.start)
        if following < len(self.steps) and block.end > self.steps[following]:
            return "unknown"
        return "activations" if goes_on < block.end else "temporary" if block.end <= length else "unknown"

    def _name_what_was_there(self) -> None:
        """Find parameters and optimizer state in memory older than the record, by the sizes of gradients."""
        blocks = self._record.blocks
        gradients = _one_backward(self.blocks_of("gradients"))
        by_size: dict[int, list[int]] = defaultdict(list)
        for index, block in enumerate(blocks):
            if block.start == 0 and self.categories[index] == "unknown" and block.end > self._record.length:
                by_size[block.requested].append(index)
        # A temporary can be as large as a gradient: most sizes say how many blocks there are for each parameter.
        counts = Counter(len(by_size[size]) // count for size, count in gradients.items() if size in by_size)
        copies = max((number for number in counts if number), key=lambda number: counts[number], default=1)
        for size, count in gradients.items():
            same = by_size.get(size, [])
            if copies == 1 and len(same) > count:
                # As many as most sizes have are there, and others that sizes do not tell from them.
                continue
            if same and len(same) % copies == 0:
                count = len(same) // copies
            for index in same[:count]:
                self.categories[index] = "parameters"
            whole = len(same) // count * count
            for index in same[count:whole]:
                self.categories[index] = "optimizer state"
            if by_size.get(2 * size) and 2 * size not in gradients:
                # Gradients in half precision, moments and master weights in fp32.
                for index in by_size[2 * size][: len(by_size[2 * size]) // count * count]:
                    self.categories[index] = "optimizer state"


def _one_backward(gradients: Sequence[Block]) -> Counter[int]:
    """Return the number of gradients of each size that exist at once."""
    changes = [(block.start, 1, block.requested) for block in gradients]
    changes += [(block.end, -1, block.requested) for block in gradients]
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for _, sign, size in sorted(changes):
        now[size] += sign
        most[size] = max(most[size], now[size])
    return most
