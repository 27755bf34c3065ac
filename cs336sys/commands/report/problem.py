"""A handout's question and its answer: the data that documents and plans are made of."""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.accounting.flops import model_flops
from cs336sys.settings.choices import MODES
from cs336sys.settings.sizes import choose_size

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


_SIZES_2025 = ("small", "medium", "large", "xl", "2.7b")
_SIZES_2026 = ("small", "medium", "large", "2.7b", "10b")
HANDOUTS = {
    2025: Handout(2025, _SIZES_2025, "xl", _SIZES_2025, (128, 256, 512, 1024), (512, 256, 128)),
    2026: Handout(2026, _SIZES_2026, "2.7b", ("small", "2.7b"), (256, 512, 1024), (2048, 128)),
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
        is_saved: it has ``--save`` and measures; the others are arithmetic.
        note: why it stands for another command.
    """

    arguments: tuple[str, ...]
    seconds: float = 0.0
    memory_gib: float | None = None
    gpus: int = 1
    is_saved: bool = True
    note: str | None = None

    @property
    def line(self) -> str:
        return shlex.join(("cs336sys", *self.arguments))


Commands = Callable[[Target], Sequence[Command]]


def arithmetic(line: str) -> Commands:
    """A command that measures nothing; ``{xl}`` is what the handout calls so."""
    return lambda target: [Command(tuple(line.format(xl=target.handout.xl).split()), is_saved=False)]


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
    """Training steps to measure, with what they are expected to need; the cells are the product of the lists.

    Args:
        names: of sizes, of which a small write-up has its own.
        flags: other options, as typed.
        steps: of a cell, warm-up among them.
        ranks: that hold a model each.
        options: lists of values by option, ``compile=("off", "model")``.
    """
    contexts = target.contexts(contexts or ((512,) if target.is_small else ()))
    lists: dict[str, Sequence[Any]] = {"size": target.sizes(names), "context": contexts, **options}
    typed = [part for name, values in lists.items() if values for part in (f"--{name}", ",".join(map(str, values)))]
    lists = {"mode": ("train",), "precision": ("fp32",), "compile": ("off",), **lists, "context": contexts or (512,)}
    cells = math.prod(map(len, lists.values()))
    # The settings that FLOPs and memory depend on; the others repeat these cells.
    counted_cells = [*product(*(lists[name] for name in ("size", "context", "mode", "precision")))]
    flops, peaks_gib = 0.0, []
    for name, context, mode, precision in counted_cells:
        size = choose_size(name, context=context)
        flops += cells / len(counted_cells) * model_flops(size, backward=MODES[mode].has_backward, causal=False)
        peaks_gib.append(predicted_peak(size, precision, mode, "reference").total_gib)
    compiled = sum(mode != "off" for mode in lists["compile"]) * len(lists["size"])
    seconds = steps * flops / (target.tflops * 1e12 * _REACHED) + _START_S + _CELL_S * cells * ranks
    arguments = (command, *typed, *flags, *target.device_options)
    return Command(arguments, seconds + _COMPILE_S * compiled, max(peaks_gib), ranks)


def measurement(line: str, seconds: float, gpus: int = 1) -> Commands:
    """A command whose time hardly depends on the machine."""
    return lambda target: [Command((*line.split(), *target.device_options), seconds + _START_S, None, gpus)]


def sized(large: Commands, small: Commands = lambda target: ()) -> Commands:
    """Other commands, or none, for a small write-up."""
    return lambda target: (small if target.is_small else large)(target)


@dataclass(frozen=True)
class Part:
    """One lettered question, and the commands that its answer is computed from.

    Attributes:
        letter: ``a``; empty where the problem is one question.
        answer: writes into an :class:`~cs336sys.commands.report.answer.Answer` what the cells of one machine say.
    """

    letter: str
    answer: Callable[[Any], None]
    commands: Commands = lambda target: ()


@dataclass(frozen=True)
class Problem:
    """A problem by the handout's name, ``nsys_profile``."""

    name: str
    parts: Sequence[Part]
