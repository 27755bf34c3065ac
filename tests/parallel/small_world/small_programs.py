"""Every program of a few calls, the options of the classes that it is run with, and one process that it equals.

Programs are words of the letters of ``CALLS``. What is left out, and why nothing is missed by it:

- A word is run only if no longer one begins with it: ranks are compared after each call.
- A backward pass without a forward pass of its own: no object of the package is called, autograd has no graph.
- A second freeze, and one as the last call: ``requires_grad_(False)`` on what is frozen changes nothing, and calls
  nothing of the package either way.
- Calls after a load but for those of ``_LOADS``: new objects have nothing of the old ones but numbers, and no
  class decides by the values of weights.

Steps, clipping and saving come after the gradients are finished where the documentation says so, as in random programs.
"""

import contextlib
import copy
import functools
import gc
import itertools
import math
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lockstep import Lockstep, second_group
from one_process import OneProcess
from program_ranks import DDP_CLASSES, OnRank, Outcome, _attempt, _value_difference
from random_programs import OPTIMIZERS, Program
from torch import Tensor, nn

from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

# Each a method of OneProcess and of OnRank, with its arguments.
CALLS = {
    "F": ("forward",),
    "B": ("backward", "all", True),
    "N": ("backward", "all", False),
    "D": ("finish",),
    "S": ("step",),
    "Z": ("zero_grad",),
    "C": ("clip", 0.05),
    "X": ("freeze", 2),
    "L": ("restart",),
}
# Calls of programs with the first options of a class; with others, and in a condition, they have one call less.
LONGEST = 5

# Conditions, each with calls without which a program does not meet it.
CONDITIONS = {
    "rank 0 skips layers": "F",
    "rank 0 overflows": "F",
    "rank 0 skips backward": "BN",
    "rank 0 clips by inf": "C",
    "nobody finishes": "BN",
}
# Those in which ranks need not equal one process, but launch the same collectives and say the same.
NOT_COMPARED = ("rank 0 clips by inf", "nobody finishes")


class Part(nn.Module):
    """Parameters by name, and what is computed of them and of the input, unless the part is skipped."""

    def __init__(self, compute: Any, **shapes: tuple[int, ...]):
        super().__init__()
        self._compute = compute
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor, is_skipped: bool = False) -> Tensor:
        return x if is_skipped else self._compute(self, x)


class SmallModel(nn.Module):
    """Two layers with one weight, the second with a frozen bias; a gate with a parameter that is never used; a scale.

    Of the three rows of the weight two ranks have unequal slices, of the single row of the gate some ranks have none,
    and FSDP replicates the scale.
    """

    raises = None

    def __init__(self):
        super().__init__()
        layers = [Part(lambda part, x: x + torch.tanh(x @ part.weight + part.bias), weight=(3, 3), bias=(3,))] * 2
        gate = Part(lambda part, x: x + x @ part.used.T, used=(1, 3), never=(2, 3))
        scale = Part(lambda part, x: x * part.scale, scale=(3,))
        self.parts = nn.ModuleList([*map(copy.deepcopy, layers), gate, scale]).double()
        self.tie()
        self.parts[1].bias.requires_grad_(False)

    def tie(self) -> None:
        self.parts[1].weight = self.parts[0].weight

    def forward(self, x: Tensor, is_cut: bool, *_: Any) -> Tensor:
        layer, other, gate, scale = self.parts
        return scale(gate(other(layer(x)), is_cut), is_cut).double()

    def auxiliary_loss(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Options:
    """A wrapper of ``random_programs``, and the options of its class and of a sharded optimizer."""

    kind: str
    wrapper: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        values = [f"{name}={value}" for name, value in (self.wrapper | self.optimizer).items()]
        return f"{self.kind}({', '.join(values)})"


_NARROW, _TINY, _SECOND = {"gradient_dtype": torch.float32}, {"bucket_size_mb": 1e-9}, {"group": "second"}
_TABLE = (
    Options("naive"),
    Options("naive", _NARROW),
    Options("flat"),
    Options("flat", _NARROW | _SECOND),
    Options("overlap"),
    Options("overlap", _NARROW),
    Options("overlap", _SECOND),
    Options("bucketed", {"bucket_size_mb": None}),
    Options("bucketed", _TINY),
    Options("bucketed", {"bucket_size_mb": "block"} | _NARROW),
    Options("naive+optimizer", {}, _TINY),
    Options("naive+optimizer", _SECOND, {"bucket_size_mb": None, "module": True}),
    Options("optimizer-flat", {}, {"bucket_size_mb": None}),
    Options("optimizer-flat", {}, _TINY | {"module": True}),
    Options("optimizer-flat", {}, {"bucket_size_mb": 1e-4, "master_dtype": torch.float64}),
    Options("fsdp"),
    Options("fsdp", {"prefetch": 0, "keep_gathered": 1}),
    Options("fsdp", {"prefetch": 2, "keep_gathered": 4} | _NARROW | _SECOND),
    Options("fsdp", {"compute_dtype": torch.float32}),
    Options("fsdp", {"unit_modules": (1, 2)}),
    Options("fsdp", {"initialize": "meta"}),
)
OPTIONS = {str(options): options for options in _TABLE}


@dataclass(frozen=True)
class SmallProgram(Program):
    """The calls of a word, with ``options``, a key of ``OPTIONS``, and a condition."""

    # Parts that a rank may leave out, and that FSDP replicates.
    kinds: tuple[str, ...] = ("Skipped", "Vectors")
    optimizer: str = "adamw"
    word: str = ""
    condition: str = ""
    options: str = ""

    @classmethod
    def of(cls, word: str, condition: str, world_size: int, name: str) -> "SmallProgram":
        waits = "module" in OPTIONS[name].optimizer
        return cls(
            OPTIONS[name].kind, (), world_size, waits_in_module=waits, word=word, condition=condition, options=name
        )

    def __repr__(self) -> str:
        return f"{self.word} with {self.options} on {self.world_size} ranks, {self.condition or 'all alike'}"

    def call(self, index: int, rank: int | None) -> tuple[str, tuple[Any, ...]]:
        """The name and arguments of a call; of one process the rank is None."""
        letter = self.word[index]
        name, *args = CALLS[letter]
        if letter in "FL":
            args = [index if letter == "F" else self.world_size]
        elif letter == "Z":
            # Three ranks zero gradients that others drop.
            args = ["optimizer", self.world_size != 3]
        elif letter in "BN" and self.condition == "rank 0 skips backward":
            args.append(0)
        elif letter == "C" and self.condition == "rank 0 clips by inf" and rank == 0:
            args = [math.inf]
        return name, tuple(args)

    def models(self) -> list[Any]:
        return [copy.deepcopy(_first_model())]

    def data(self, seed: int, rank: int) -> tuple[Tensor, bool, Tensor]:
        x, targets = _data(seed, rank)
        is_odd = rank == 0
        return (
            x,
            is_odd and self.condition == "rank 0 skips layers",
            targets + (math.inf if is_odd and self.condition == "rank 0 overflows" else 0.0),
        )

    @property
    def tolerance(self) -> float:
        return 1e-4 if torch.float32 in OPTIONS[self.options].wrapper.values() else 1e-9


@functools.cache
def _first_model() -> SmallModel:
    torch.manual_seed(0)
    return SmallModel()


@functools.cache
def _data(seed: int, rank: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(2, 2, 3, generator=generator, dtype=torch.float64).unbind()


class SmallProcess(OneProcess):
    """One process, in which a freeze is nothing that wrappers must be told."""

    def _changed(self, is_new: bool = False) -> None:
        self.changes += 1

    def snapshot(self) -> "SmallProcess":
        """A copy as it is now, without passes whose backward pass is yet to come."""
        copied = copy.copy(self)
        copied.passes, copied._inputs = [], []
        copied.models, copied.optimizers = copy.deepcopy((self.models, self.optimizers))
        for parameter, original in zip(copied.models[0].parameters(), self.models[0].parameters(), strict=True):
            # Which deepcopy() leaves out.
            parameter.grad = None if original.grad is None else original.grad.clone()
        return copied


class SmallRank(OnRank):
    """A rank with the options of the program, which leaves to a sharded optimizer what that does in a step."""

    _changed = SmallProcess._changed

    def _wrap(self, synchronizer: str, model: SmallModel) -> nn.Module:
        options = dict(OPTIONS[self.program.options].wrapper)
        if self._is_flat:
            return model
        if "group" in options:
            options["group"] = second_group()
        if "unit_modules" in options:
            options["unit_modules"] = [model.parts[index] for index in options["unit_modules"]]
        if "initialize" in options:
            values = {part: [one.detach() for one in part.parameters(recurse=False)] for part in model.modules()}
            model.to("meta").tie()
            options["initialize"] = lambda part: [
                one.data.copy_(value) for one, value in zip(part.parameters(recurse=False), values[part], strict=True)
            ]
        return (FSDP if self.is_fsdp else DDP_CLASSES[synchronizer])(model, **options)

    def _optimizer(self, number: int, parameters: list[nn.Parameter]) -> Any:
        if not self._has_sharded_optimizer:
            return OneProcess._optimizer(self, number, parameters)
        kind, settings = OPTIMIZERS[self.program.optimizer]
        options = settings | OPTIONS[self.program.options].optimizer
        if "module" in options:
            options["module"] = self.models[number]
        return ShardedOptimizer(parameters, kind, flat=self._is_flat, **options)

    def _settle(self) -> None:
        if self._is_flat or self.program.condition == "nobody finishes":
            OneProcess.finish(self)
        else:
            super()._settle()

    def step(self) -> None:
        super().step()
        if self.passes:
            # Their backward passes use weights outside of the forward pass of a module.
            self.wait()

    def restarted(self, process: SmallProcess, folder: Path) -> "SmallRank":
        """Another rank that goes on from what this one saves."""
        if self.rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        self.restart(self.world_size)
        self.write(folder)
        process = copy.copy(process)
        process.program = self.program
        return SmallRank.read(folder, process)

    def mistake(self, process: SmallProcess, value: Any, expected: Any, is_last: bool) -> str | None:
        """How what a call has returned, or this rank after it, differs from one process."""
        expected = expected[self.rank] if isinstance(expected, list) else expected
        value = value[0] if isinstance(value, list) else value
        if not (isinstance(value, float) and not math.isfinite(value) and not math.isfinite(expected)):
            text = _value_difference(value, expected, self.program)
            if text is not None:
                return text
        process = copy.copy(process)
        process.is_unfinished = self.is_unfinished
        return self.difference(process, is_last)

    def _wrong(self, value: Tensor | None, expected: Tensor | None, tolerance: float = 0.0) -> str | None:
        if value is not None and expected is not None and value.shape == expected.shape:
            value, expected = value.detach().double(), expected.detach().double()
            if torch.allclose(value, expected, 0.0, max(self.program.tolerance, tolerance), equal_nan=True):
                return None
            # Of overflow, which sums in another order make NaN or infinite, only the places count.
            if not torch.equal(value.isfinite(), expected.isfinite()):
                return f"is finite in {value.isfinite().sum()} elements and not in {expected.isfinite().sum()}"
            value, expected = (one.where(one.isfinite(), 0.0) for one in (value, expected))
        return super()._wrong(value, expected, tolerance)


# Left out: a second freeze or a last one, and a backward pass without a forward pass. What is loaded has no passes.
_WITHOUT_EFFECT = re.compile(r"X.*X|X$|(^|[BNL])[DSZCX]*[BN]")
# Loading is the last call, or what is loaded has a state, a frozen parameter, both or none.
_LOADS = re.compile(r"[^L]*L?|X?(FBS)?L[^L]*")


def words(length: int) -> list[str]:
    """The words of so many letters, in the order of the alphabet of ``CALLS``."""
    every = map("".join, itertools.product(CALLS, repeat=length))
    return [word for word in every if not _WITHOUT_EFFECT.search(word) and _LOADS.fullmatch(word)]


def groups() -> list[tuple[str, str, int, tuple[str, ...]]]:
    """Words, each with a condition, a number of ranks and the options that it is run with."""
    first = {options.kind: name for name, options in reversed(OPTIONS.items())}
    others = tuple(name for name in OPTIONS if name not in first.values())
    # FSDP's backward passes communicate: every rank must run them.
    without_fsdp = tuple(name for name in OPTIONS if OPTIONS[name].kind != "fsdp")
    sizes, shorter = (1, 2, 3), words(LONGEST - 1)
    return [
        *((word, "", size, tuple(first.values())) for word in words(LONGEST) for size in sizes),
        *((word, "", size, others) for word in shorter for size in sizes),
        *(
            (word, condition, size, without_fsdp if condition == "rank 0 skips backward" else tuple(OPTIONS))
            for condition, needed in CONDITIONS.items()
            for word in shorter
            for size in sizes[1:]
            if set(needed) & set(word)
        ),
    ]


def is_promised(kind: str, word: str) -> bool:
    """Whether the documentation promises every call of a word: else it may be refused."""
    return all(_is_last_promised(kind, word[:end]) for end in range(1, len(word) + 1))


def _is_last_promised(kind: str, word: str) -> bool:
    is_flat, is_fsdp = kind == "optimizer-flat", kind == "fsdp"
    passes = 0
    # Of gradients: there are some to finish, synchronized ones among them, finished ones, and those of a last step.
    unfinished = launched = complete = stepped = False
    for letter in word[:-1]:
        if letter == "X" and (passes > 0 or unfinished or complete or stepped):
            # Parameters are frozen between two steps.
            return False
        settles = letter in "DSCL" or (letter == "Z" and not (is_flat or is_fsdp))
        complete = (complete or (unfinished and settles)) and letter not in "SZL"
        unfinished, launched = (
            (unfinished and not settles) or letter in "BN",
            (launched and not settles) or letter == "B",
        )
        passes = passes + 1 if letter == "F" else 0 if letter in "BNL" else passes
        stepped = (stepped or letter == "S") and letter not in "ZL"
    last = word[-1]
    if last in "BN":
        return passes == 1 and (is_fsdp or not launched) and not (is_flat and (complete or stepped))
    return not (is_flat and stepped and last in "CDSL") and not (last == "S" and passes > 0)


@functools.lru_cache(8)
def reference(word: str, world_size: int, condition: str) -> list[tuple[SmallProcess | None, Any]]:
    """One process after each call, and what the call returned; a call that raises is the last, and leaves None."""
    program = SmallProgram.of(word, condition, world_size, "naive()")
    process = SmallProcess(program, program.models(), world_size)
    process.build_optimizers([[list(dict(process.models[0].named_parameters()))]])
    states: list[tuple[SmallProcess | None, Any]] = []
    for index in range(len(word)):
        name, args = program.call(index, rank=None)
        try:
            value = getattr(process, name)(*args)
        except Exception as error:
            return [*states, (None, error)]
        states.append((process.snapshot(), value))
    return states


def run(world: Lockstep, program: SmallProgram, folder: Path) -> tuple[str, str | None]:
    """Run a program on all ranks, and say how it ends and, if it should not, why; ``folder`` is for what it saves."""
    of_process = reference(program.word, program.world_size, program.condition)
    ended = world.run(lambda rank: _run_on_rank(program, of_process, folder / "saved", rank))
    shutil.rmtree(folder / "saved", ignore_errors=True)
    (count, outcome, text), wrong = ended[0][:3], [f"rank {rank}: {one[3]}" for rank, one in enumerate(ended) if one[3]]
    done = program.word[:count]
    if world.problem is not None:
        return "hangs", f"{world.problem}; ranks come to {[one[:3] for one in ended]}"
    if any(log != world.logs[0] for log in world.logs):
        return "ranks launch different collectives", str(world.logs)
    if len({one[:3] for one in ended}) > 1:
        return "ranks end differently", str([one[:3] for one in ended])
    if wrong:
        return "differs from one process", "; ".join(wrong)
    if outcome == Outcome.REFUSED:
        if program.condition == "rank 0 skips backward":
            # After each, ranks finish.
            done = done.replace("B", "BD").replace("N", "ND")
        is_wrong = program.condition not in NOT_COMPARED and is_promised(program.wrapper, done)
        return f"refused: {text}", f"{done} is promised" if is_wrong else None
    if outcome == Outcome.RAISED:
        return "raises", None if of_process[count - 1][0] is None else f"{done}: {text}"
    return "equal", None


def _run_on_rank(
    program: SmallProgram, of_process: list[tuple[SmallProcess | None, Any]], folder: Path, number: int
) -> tuple[int, Outcome, str | None, str | None]:
    """How many calls were made, what the last came to with which words, and the first difference from one process."""
    outcome, text, rank = _attempt(lambda: SmallRank(program, program.models()))
    count, wrong = 0, None
    for process, expected in of_process:
        if outcome != Outcome.DONE:
            break
        name, args = program.call(count, number)
        count += 1
        if name == "restart":
            outcome, text, rank = _attempt(functools.partial(rank.restarted, process, folder / str(count)))
            value = expected
        else:
            outcome, text, value = _attempt(functools.partial(getattr(rank, name), *args))
        if outcome == Outcome.DONE and wrong is None and program.condition not in NOT_COMPARED:
            wrong = f"one process raises {expected!r}"
            if process is not None:
                wrong = rank.mistake(process, value, expected, count == len(program.word))
            wrong = wrong and f"{program.word[:count]}: {wrong}"
    return count, outcome, text, wrong


def run_programs(programs: list[SmallProgram], stops: bool = False) -> tuple[Counter, dict[str, str]]:
    """How many programs end in which way, and what is wrong by program: this process's share of them.

    Args:
        stops: after the first that is wrong.
    """
    counts, wrong = Counter(), {}
    share = -(-len(programs) // dist.get_world_size())
    programs = programs[share * dist.get_rank() :][:share]
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        worlds = {size: stack.enter_context(Lockstep(size)) for size in (1, 2, 3)}
        for number, program in enumerate(programs):
            end, text = run(worlds[program.world_size], program, Path(folder))
            counts[end] += 1
            if text is not None:
                wrong[repr(program)] = f"{end}: {text}"
                if stops:
                    break
            if number % 10 == 0:
                # Wrappers are parts of cycles.
                gc.collect()
    return counts, wrong
