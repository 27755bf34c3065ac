"""A handout's question and its answer: the data that documents and plans are made of."""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from cs336sys.accounting.flops import model_flops
from cs336sys.settings.choices import MODES
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload

# As measured on a machine with one H200 and on one with two CPU cores: a worker imports torch and starts CUDA; a cell
# builds its model; torch.compile compiles a size.
_START_S = 8.0
_CELL_S = 2.0
_COMPILE_S = 20.0

_DEFAULT_CONTEXTS = (512,)

_REACHED = 0.4  # Share of its peak that a GPU reaches in plain fp32 steps, which most of the problems measure.


@dataclass(frozen=True)
class Handout:
    """A year's handout, and its names of sizes."""

    year: int
    sizes: tuple[str, ...]  # The sizes in its table of models, by this project's names.
    xl: str  # This project's name of the size that it calls xl.
    profile_sizes: tuple[str, ...]  # Profiled by nsys, at the next; the handout of 2026 leaves the choice.
    profile_contexts: tuple[int, ...]
    memory_contexts: tuple[int, ...]  # Measured for the memory of ``2.7b``; the first where one is enough.

    def called(self, size: str) -> str:
        """Return a size's name, with the handout's own where that is another."""
        return f"{size} (the handout's xl)" if size == self.xl != "xl" else size


_SIZES_2025 = ("small", "medium", "large", "xl", "2.7b")
_SIZES_2026 = ("small", "medium", "large", "2.7b", "10b")
HANDOUTS = {
    2025: Handout(2025, _SIZES_2025, "xl", _SIZES_2025, (128, 256, 512, 1024), (512, 256, 128)),
    2026: Handout(2026, _SIZES_2026, "2.7b", ("small", "2.7b"), (256, 512, 1024), (2048, 128)),
}


@dataclass(frozen=True)
class Target:
    """The machine that a write-up is measured on."""

    handout: Handout
    size: str | None = None  # Measured instead of all sizes of the handout; contexts and grids are then small, too.
    device: str = "auto"  # ``auto``, ``cuda`` or ``cpu``.
    gpus: int = 1  # Number of GPUs; without any, ranks share the CPU.
    tflops: float = 50.0  # Peak of a GPU, or of the CPU, in fp32.
    memory_gib: float | None = None  # Memory of a GPU, or of the machine without one; None where it is unknown.
    unknown_gpu: str | None = None  # The GPU whose peak ``tflops`` stands for, as it is in no table.

    @property
    def is_small(self) -> bool:
        return self.size is not None

    def sizes(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(names) if self.size is None else (self.size,)

    def contexts(self, contexts: Sequence[int]) -> tuple[int, ...]:
        """Return the handout's contexts, each an eighth as long for a small model."""
        return tuple(context // 8 for context in contexts) if self.is_small else tuple(contexts)

    @property
    def device_options(self) -> tuple[str, ...]:
        return () if self.device == "auto" else ("--device", self.device)


@dataclass(frozen=True)
class Command:
    """A command line of the write-up."""

    arguments: tuple[str, ...]  # What follows ``cs336sys``, without ``--save``.
    seconds: float = 0.0  # About how long it takes on the machine it was planned for.
    memory_gib: float | None = None  # About the most that a GPU (or the CPU) must hold; None where that is little.
    gpus: int = 1
    is_saved: bool = True  # The command measures, and has ``--save``; others are arithmetic.
    note: str | None = None  # Why it replaces another command.

    @property
    def line(self) -> str:
        return shlex.join(("cs336sys", *self.arguments))


Commands = Callable[[Target], Sequence[Command]]


def arithmetic(line: str) -> Commands:
    """Plan a command that measures nothing; ``{xl}`` in its line is the handout's xl."""
    return lambda target: [Command(tuple(line.format(xl=target.handout.xl).split()), is_saved=False)]


def plain_peak_gib(size: str, context: int, precision: str = "fp32", mode: str = "train") -> float:
    """Predict the memory of a plain step, in GiB."""
    return Workload(choose_size(size, context=context), mode, precision).predicted_peak().total_gib


def training_sweep(
    target: Target,
    command: str,
    names: Sequence[str],
    contexts: Sequence[int] = (),
    flags: Sequence[str] = (),
    steps: int = 15,
    ranks: int = 1,
    **options: Sequence[str],
) -> Command:
    """Plan a command that measures training steps, with the time and memory it is expected to need.

    Args:
        names: sizes; a small write-up has its own one instead.
        flags: other options, as typed.
        steps: steps of a cell, warm-up included; by default 5 and 10, as the commands have.
        ranks: number of ranks, each of which holds a model.
        options: lists of values by option, ``compile=("off", "model")``; cells are the product of all lists.
    """
    # Without contexts the command takes its default; a small write-up has an eighth of that, too.
    contexts = target.contexts(contexts or (_DEFAULT_CONTEXTS if target.is_small else ()))
    lists: dict[str, Sequence[Any]] = {"size": target.sizes(names), "context": contexts, **options}
    typed = [part for name, values in lists.items() if values for part in (f"--{name}", ",".join(map(str, values)))]
    defaults = {"mode": ("train",), "precision": ("fp32",), "compile": ("off",)}
    lists = {**defaults, **lists, "context": contexts or _DEFAULT_CONTEXTS}  # With the lists that are not typed.
    cells = math.prod(map(len, lists.values()))
    # FLOPs and memory depend on these settings alone; the other lists repeat their combinations.
    combinations = [*product(*(lists[name] for name in ("size", "context", "mode", "precision")))]
    repetitions = cells / len(combinations)
    flops, peaks_gib = 0.0, []
    for name, context, mode, precision in combinations:
        size = choose_size(name, context=context)
        # The course's attention, which the handouts time, computes the masked half of the scores, too.
        flops += repetitions * model_flops(size, backward=MODES[mode].has_backward, causal=False)
        peaks_gib.append(plain_peak_gib(name, context, precision, mode))
    compilations = sum(compiled != "off" for compiled in lists["compile"]) * len(lists["size"])
    # Each rank builds the model of each cell.
    seconds = steps * flops / (target.tflops * 1e12 * _REACHED) + _START_S + _CELL_S * cells * ranks
    arguments = (command, *typed, *flags, *target.device_options)
    return Command(arguments, seconds + _COMPILE_S * compilations, max(peaks_gib), gpus=ranks)


def measurement(line: str, seconds: float, gpus: int = 1) -> Commands:
    """Plan a command whose time hardly depends on the machine."""
    return lambda target: [Command((*line.split(), *target.device_options), seconds + _START_S, gpus=gpus)]


def sized(large: Commands, small: Commands = lambda target: ()) -> Commands:
    """Plan other commands, or none, for a small write-up."""
    return lambda target: (small if target.is_small else large)(target)


@dataclass(frozen=True)
class Part:
    """One lettered question, and the commands that its answer is computed from."""

    letter: str  # ``a``; empty where the problem is one question.
    answer: Callable[[Any], None]  # Fills an ``answer.Answer`` from the cells of one machine.
    commands: Commands = lambda target: ()


@dataclass(frozen=True)
class Problem:
    """A problem by the handout's name, ``nsys_profile``."""

    name: str
    parts: Sequence[Part]
