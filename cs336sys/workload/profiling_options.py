"""A training workload that is watched: its memory recorded, its loss followed, its kernels profiled."""

import math
from dataclasses import dataclass

from cs336sys.accounting.checkpointing import SUBLAYERS, parse_checkpointing
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
    """

    training: Workload
    checkpointing: str = "none"
    trace: bool = True
    snapshot: str | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "checkpointing", parse_checkpointing(self.checkpointing))
        except UsageError as error:
            raise UsageError(f"--checkpoint '{self.checkpointing}': {error}") from error
        self.training.require_known_memory()
        if self.checkpointing != "none" and self.training.compile == "model":
            raise UsageError("--checkpoint puts checkpoints around blocks: with --compile model there are none to see")
        if self.checkpointing in SUBLAYERS:
            self._check_sublayers()

    def _check_sublayers(self) -> None:
        training, option = self.training, f"--checkpoint {self.checkpointing}"
        if not training.is_ours:
            raise UsageError(f"{option} knows the layers of this project's blocks alone: choose none or block")
        if training.compile != "off":
            raise UsageError(f"{option} looks into blocks: --compile {training.compile} leaves none to see; choose off")
        if training.kernels != "reference":
            raise UsageError(
                f"{option} looks into blocks: --kernels {training.kernels} computes each as a whole; choose reference"
            )

    @property
    def name(self) -> str:
        """A file name without its ending, different for workloads that differ in anything but steps and seed."""
        return f"{self.training.name}-{self.checkpointing}".replace("=", "")

    @property
    def predicted_gib(self) -> float | None:
        """GiB that a step holds at its peak; None where formulas do not know."""
        training = self.training
        return training.predicted_peak(self.checkpointing).total_gib if training.memory_is_known else None


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
        if self.training.mode != "train":
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
