"""A handout's question and its answer: the data that documents and plans are made of."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.accounting.flops import model_flops
from cs336sys.accounting.memory import GIB, training_state
from cs336sys.sizes import SIZES, choose_size

# Seconds, as measured on a machine with one H200 and on one with two CPU cores: a worker imports torch and starts CUDA;
# a cell builds its model; torch.compile; nsys exports what it has recorded.
_START_S = 8.0
_CELL_S = 2.0
_COMPILE_S = 20.0

# Part of its peak that a GPU reaches in plain fp32 steps, which is what most of the problems measure.
_REACHED = 0.4


@dataclass(frozen=True)
class Handout:
    """A year's handout, and its names of sizes.

    Attributes:
        sizes: of its table of models, by this project's names.
        xl: what it calls xl.
        profile_sizes, profile_contexts: for nsys; the year 2026 leaves the choice.
        memory_contexts: for the memory of ``2.7b``, the first where one is enough.
    """

    year: int
    sizes: tuple[str, ...]
    xl: str
    profile_sizes: tuple[str, ...]
    profile_contexts: tuple[int, ...]
    memory_contexts: tuple[int, ...]

    def called(self, size: str) -> str:
        """A size with the handout's own name, where that is another."""
        return f"{size} (the handout's xl)" if size == self.xl != "xl" else size


HANDOUTS = {
    2025: Handout(
        2025,
        ("small", "medium", "large", "xl", "2.7b"),
        "xl",
        ("small", "medium", "large", "xl", "2.7b"),
        (128, 256, 512, 1024),
        (512, 256, 128),
    ),
    2026: Handout(
        2026, ("small", "medium", "large", "2.7b", "10b"), "2.7b", ("small", "2.7b"), (256, 512, 1024), (2048, 128)
    ),
}


@dataclass(frozen=True)
class Target:
    """The machine that a write-up is measured on.

    Attributes:
        size: instead of all sizes of the handout; contexts and grids are then small, too.
        device: ``auto``, ``cuda`` or ``cpu``.
        gpus: how many there are; without any, ranks share the CPU.
        tflops: what it computes in fp32.
        memory_gib: of a GPU, or the machine's own; None where it is unknown.
    """

    handout: Handout
    size: str | None = None
    device: str = "auto"
    gpus: int = 1
    tflops: float = 50.0
    memory_gib: float | None = None

    @property
    def is_small(self) -> bool:
        return self.size is not None

    def sizes(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(names) if self.size is None else (self.size,)

    def contexts(self, contexts: Sequence[int]) -> tuple[int, ...]:
        """The handout's contexts, an eighth of them for a small model."""
        return tuple(context // 8 for context in contexts) if self.is_small else tuple(contexts)

    @property
    def device_options(self) -> tuple[str, ...]:
        return () if self.device == "auto" else ("--device", self.device)


@dataclass(frozen=True)
class Command:
    """A command line of the write-up.

    Attributes:
        arguments: after ``cs336sys``, without ``--save``.
        seconds: about how long it takes on the machine it was planned for.
        memory_gib: about the most that a GPU (or the CPU) must hold; None where that is little.
        gpus: how many it needs.
        is_saved: it has ``--save`` and measures; the others are arithmetic.
    """

    arguments: tuple[str, ...]
    seconds: float = 0.0
    memory_gib: float | None = None
    gpus: int = 1
    is_saved: bool = True

    @property
    def line(self) -> str:
        return shlex.join(("cs336sys", *self.arguments))


def arithmetic(line: str) -> Callable[["Target"], list[Command]]:
    """A command that measures nothing; ``{xl}`` is what the handout calls so."""
    return lambda target: [Command(tuple(line.format(xl=target.handout.xl).split()), is_saved=False)]


@dataclass(frozen=True)
class TrainingSweep:
    """Training steps to measure, as options of a command that trains; the cells are the product of the lists.

    Attributes:
        options: lists of values by option, ``{"compile": ("off", "model")}``.
        flags: other options, as typed.
        steps: of a cell, warm-up among them.
        ranks: that hold a model each.
    """

    command: str
    sizes: tuple[str, ...]
    contexts: tuple[int, ...] = ()
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    steps: int = 15
    ranks: int = 1

    def on(self, target: Target) -> Command:
        """The command line, with what it is expected to need there."""
        arguments = [self.command, "--size", ",".join(self.sizes)]
        contexts = self.contexts or (() if not target.is_small else target.contexts((512,)))
        if contexts:
            arguments += ["--context", ",".join(map(str, contexts))]
        for name, values in self.options.items():
            arguments += [f"--{name}", ",".join(values)]
        arguments += [*self.flags, *target.device_options]
        seconds, most = self._needs(contexts or (512,), target)
        return Command(tuple(arguments), seconds, most, self.ranks)

    def _needs(self, contexts: Sequence[int], target: Target) -> tuple[float, float]:
        flops, cells, most = 0, 0, 0.0
        values = {name: self.options.get(name, (default,)) for name, default in _DEFAULTS.items()}
        others = math.prod(len(choices) for name, choices in self.options.items() if name not in _DEFAULTS)
        for name, context, mode, precision in product(self.sizes, contexts, values["mode"], values["precision"]):
            size = choose_size(name, context=context)
            alike = others * len(values["compile"])
            cells += alike
            flops += alike * model_flops(size, backward=mode != "forward", causal=False)
            most = max(most, predicted_peak(size, precision, mode, "reference").total_gib)
        seconds = self.steps * flops / (target.tflops * 1e12 * _REACHED) + _START_S + _CELL_S * cells * self.ranks
        compiled = sum(mode != "off" for mode in values["compile"])
        return seconds + _COMPILE_S * compiled * len(self.sizes), most


_DEFAULTS = {"mode": "train", "precision": "fp32", "compile": "off"}


def state_gib(size: str) -> float:
    """Parameters, gradients and AdamW's moments of a size in fp32."""
    return training_state(SIZES[size], "fp32").total / GIB


def simple(target: Target, *arguments: str, seconds: float, gpus: int = 1, on_device: bool = True) -> Command:
    """A command whose time hardly depends on the machine."""
    return Command((*arguments, *(target.device_options if on_device else ())), seconds + _START_S, None, gpus)


@dataclass(frozen=True)
class Part:
    """One lettered question.

    Attributes:
        letter: ``a``; empty where the problem is one question.
        answer: writes into an :class:`~cs336sys.report.course.answer.Answer` what the cells of one machine say.
        commands: that give what the answer is computed from.
    """

    letter: str
    answer: Callable[[Any], None]
    commands: Callable[[Target], Sequence[Command]] = lambda target: ()


@dataclass(frozen=True)
class Problem:
    """A problem by the handout's name.

    Attributes:
        name: ``nsys_profile``.
        title: in words.
    """

    name: str
    title: str
    parts: Sequence[Part]
