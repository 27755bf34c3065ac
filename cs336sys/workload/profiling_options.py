"""A training workload that is watched: its memory recorded, its loss followed, its kernels profiled."""

import hashlib
import math
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cs336sys.accounting.checkpointing import SUBLAYERS, parse_checkpointing
from cs336sys.accounting.memory import PeakMemory, accumulating
from cs336sys.errors import UsageError
from cs336sys.workload.training import Configured, Workload, check_choices

# Kept by a cell of memprof: every allocation worth a look.
LARGEST_ALLOCATIONS = 40


@dataclass(frozen=True)
class MemoryWorkload(Configured):
    """A training workload whose memory is recorded.

    Attributes:
        checkpointing: a strategy of :mod:`cs336sys.accounting.checkpointing`.
        trace: also predict the step on fake tensors.
        snapshot: a directory for the recorded step's pictures and files.
        micro_batches: passes of as many equal parts of the batch, whose gradients add up before the optimizer's step.
    """

    training: Workload
    checkpointing: str = "none"
    trace: bool = True
    snapshot: str | None = None
    micro_batches: int = 1

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "checkpointing", parse_checkpointing(self.checkpointing))
        except UsageError as error:
            raise UsageError(f"--checkpoint '{self.checkpointing}': {error}") from error
        self.training.require_known_memory()
        if self.micro_batches != 1:
            self._check_micro_batches()
        if self.checkpointing != "none" and self.training.is_compiled_whole:
            raise UsageError("--checkpoint puts checkpoints around blocks: with --compile model there are none to see")
        if self.checkpointing in SUBLAYERS:
            self._check_sublayers()

    def configuration(self) -> dict[str, Any]:
        """Return the settings; of whole batches as before there were others."""
        settings = super().configuration()
        if self.micro_batches == 1:
            del settings["micro_batches"]
        return settings

    def _check_micro_batches(self) -> None:
        training, option = self.training, f"--micro-batches {self.micro_batches}"
        batch = training.size.batch_size
        if self.micro_batches < 1 or batch % self.micro_batches:
            raise UsageError(f"{option}: must divide the batch of {batch}")
        if not training.updates_parameters:
            raise UsageError(f"{option} adds gradients up for the optimizer: mode '{training.mode}' has none")
        if training.update != "step":
            raise UsageError(f"{option} updates once all parts are done: choose --update step")
        if training.cuda_graph != "off":
            raise UsageError(f"{option} is launched, not captured: choose --cuda-graph off")

    @property
    def part(self) -> Workload:
        """The training workload with the batch of one pass."""
        size = self.training.size
        return replace(self.training, size=replace(size, batch_size=size.batch_size // self.micro_batches))

    def moments(self) -> list[PeakMemory]:
        """The moments of a step that can be its peak, on paper: with several passes, those of the second."""
        moments = self.part.widest_moments(self.checkpointing)
        if self.micro_batches == 1:
            return moments
        return accumulating(moments, self.training.size, self.training.precision, self.micro_batches)

    def _check_sublayers(self) -> None:
        training, option = self.training, f"--checkpoint {self.checkpointing}"
        if not training.is_ours:
            raise UsageError(f"{option} supports only this project's blocks: choose none or block")
        if training.is_compiled:
            raise UsageError(f"{option} looks into blocks: --compile {training.compile} leaves none to see; choose off")
        if training.fused_kernels:
            raise UsageError(
                f"{option} looks into blocks: --kernels {training.kernels} computes each as a whole; choose reference"
            )

    @property
    def name(self) -> str:
        """A file name without its ending, different for workloads that differ in anything but steps and seed."""
        parts = f"-{self.micro_batches}parts" if self.micro_batches > 1 else ""
        return f"{self.training.name}-{self.checkpointing}{parts}".replace("=", "")

    @property
    def predicted_gib(self) -> float | None:
        """GiB that a step holds at its peak; None where formulas do not know."""
        return self.peak.total_gib if self.training.memory_is_known else None

    @property
    def peak(self) -> PeakMemory:
        """The widest moment."""
        return max(self.moments(), key=lambda moment: moment.total)


@dataclass(frozen=True)
class LossWorkload(Configured):
    """A training workload whose loss is followed while it learns a text.

    Attributes:
        training: ``steps`` of it are taken, each on a batch of its own.
        text: files, separated by commas, whose bytes are the tokens.
        learning_rate, weight_decay: of the optimizer, constant.
        text_digest: of what those files held.
    """

    training: Workload
    text: str
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    text_digest: str | None = None

    def __post_init__(self) -> None:
        if not self.training.updates_parameters:
            raise UsageError(f"mode '{self.training.mode}': a model that learns can only train")
        if self.training.user.batch is not None:
            raise UsageError(f"--batch {self.training.user.batch}: losses takes its batches from --text; leave it out")
        if not 0 < self.learning_rate < math.inf:
            raise UsageError(f"--learning-rate {self.learning_rate:g}: must be a positive number")


PROFILERS = ("auto", "nsys", "torch")


@dataclass(frozen=True)
class ProfileWorkload(Configured):
    """A training workload that is run under a profiler.

    Attributes:
        profiler: ``nsys``, ``torch`` (torch.profiler), or ``auto``: nsys for a GPU where it is installed.
        keep: a directory for the profiler's files.
    """

    training: Workload
    profiler: str = "auto"
    keep: str | None = None

    def __post_init__(self) -> None:
        check_choices(self, {"profiler": PROFILERS})
        if self.profiler == "nsys" and self.training.device == "cpu":
            raise UsageError("profiler 'nsys' traces work on a GPU: with device cpu choose torch")


# A byte is a token: a step of 4 x 512 has read so many after 500,000.
_MOST_BYTES = 10**9

# What counts as text in a folder.
_ENDINGS = (".md", ".txt")


def read_text(paths: str) -> bytes:
    """The bytes of files, separated by commas, one after another; of a folder, those of its text files by name.

    Raises:
        UsageError: a file cannot be read, or all of them are empty.
    """
    content = bytearray()
    for path in map(Path, paths.split(",")):
        try:
            files = sorted(entry for entry in path.iterdir() if entry.suffix in _ENDINGS) if path.is_dir() else [path]
            for file in files:
                # Devices have no end, and a pipe may wait for ever for its writer.
                if not stat.S_ISREG(file.stat().st_mode):
                    raise UsageError(f"--text {file}: is no file of text; give a file or a folder")
                with file.open("rb") as stream:
                    content += stream.read(_MOST_BYTES + 1 - len(content))
                if len(content) > _MOST_BYTES:
                    raise UsageError(
                        f"--text {paths}: holds more than {_MOST_BYTES / 1e9:g} GB, the most that is read into "
                        f"memory; give less text"
                    )
        except OSError as error:
            raise UsageError(f"--text {path}: cannot be read ({error.strerror})") from error
    if not content:
        raise UsageError(
            f"--text {paths}: there is nothing to learn from; of a folder {' and '.join(_ENDINGS)} are read"
        )
    return bytes(content)


def text_digest(paths: str) -> str:
    """Return a digest of what :func:`read_text` reads, as 12 hexadecimal digits.

    Raises:
        UsageError: as there.
    """
    return hashlib.sha256(read_text(paths)).hexdigest()[:12]
