"""A training workload that is watched: its memory recorded, its loss followed, its kernels profiled."""

import hashlib
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cs336sys.accounting.checkpointing import SUBLAYERS, parse_checkpointing
from cs336sys.accounting.memory import PeakMemory, accumulating
from cs336sys.errors import UsageError
from cs336sys.settings.fields import Configured, Needs, setting
from cs336sys.settings.training import BLOCK_NEEDS, Workload

LARGEST_ALLOCATIONS = 40  # Kept by a cell of memprof: every allocation worth a look.


@dataclass(frozen=True)
class MemoryWorkload(Configured):
    """A training workload whose memory is recorded, with pictures and files of its step in the folder ``snapshot``.

    ``checkpointing`` is a strategy of :mod:`cs336sys.accounting.checkpointing`.
    """

    training: Workload
    checkpointing: str = setting(
        "none",
        "none; block: every block; every=K: K blocks; sublayer: attention and feed-forward each, or attention, "
        "ffn alone; nested: halves within halves.",
        choices=("none", "block", "every=", "sublayer", "attention", "ffn", "nested"),
        parse=parse_checkpointing,
        several=True,
        option="checkpoint",
        in_titles=True,
        needs=(
            *BLOCK_NEEDS,
            Needs("compile", ("off",), "--compile {} leaves no blocks to look into; choose off", SUBLAYERS),
            Needs("kernels", ("reference",), "--kernels {} computes a block as a whole; choose reference", SUBLAYERS),
            Needs("model", (None,), "supports only this project's blocks; choose none or block", SUBLAYERS),
        ),
    )
    trace: bool = setting(True, "Also predict by fake tensors.", option="predict", header=None)
    snapshot: str | None = setting(None, header=None)
    micro_batches: int = setting(
        1,
        "Split the batch into this many parts and add up their gradients.",
        minimum=1,
        several=True,
        header="micro-batches",
        needs=(
            Needs("mode", ("train",), "adds gradients up for the optimizer, and mode '{}' has none; choose train"),
            Needs("update", ("step",), "updates once all parts are done; choose --update step"),
            Needs("cuda_graph", ("off",), "is launched, not captured; choose --cuda-graph off"),
        ),
    )

    def __post_init__(self) -> None:
        self.check_settings()
        self.training.require_known_memory()
        if self.training.size.batch_size % self.micro_batches:
            batch = self.training.size.batch_size
            raise UsageError(f"--micro-batches {self.micro_batches}: must divide the batch of {batch}")

    def configuration(self) -> dict[str, Any]:
        """Return the settings, without ``micro_batches`` for whole batches: older cells are found again."""
        settings = super().configuration()
        if self.micro_batches == 1:
            del settings["micro_batches"]
        return settings

    @property
    def part(self) -> Workload:
        """Return the training workload of one pass, with one micro-batch as its batch."""
        size = self.training.size
        return replace(self.training, size=replace(size, batch_size=size.batch_size // self.micro_batches))

    def moments(self) -> list[PeakMemory]:
        """Return the moments of a step that can be its peak, on paper; of several passes the second, with gradients."""
        moments = self.part.widest_moments(self.checkpointing)
        if self.micro_batches == 1:
            return moments
        return accumulating(moments, self.training.size, self.training.precision, self.micro_batches)

    @property
    def name(self) -> str:
        """Return a file name without ending: workloads that differ in more than steps and seed have others."""
        parts = f"-{self.micro_batches}parts" if self.micro_batches > 1 else ""
        return f"{self.training.name}-{self.checkpointing}{parts}".replace("=", "")

    @property
    def predicted_gib(self) -> float | None:
        """Return the GiB that a step holds at its peak; None where formulas do not know."""
        return self.peak.total_gib if self.training.memory_is_known else None

    @property
    def peak(self) -> PeakMemory:
        return max(self.moments(), key=lambda moment: moment.total)


@dataclass(frozen=True)
class LossWorkload(Configured):
    """A training workload whose loss is followed while it learns the bytes of files, a new batch for each step."""

    training: Workload
    text: str = setting(in_titles=True)
    learning_rate: float = setting(3e-4, "Learning rate, constant.", minimum=1e-12, maximum=1e6, in_titles=True)
    weight_decay: float = setting(0.1, "Weight decay.", minimum=0, in_titles=True)
    text_digest: str | None = setting(None, header="its digest")

    def __post_init__(self) -> None:
        self.check_settings()
        if not self.training.updates_parameters:
            raise UsageError(f"mode '{self.training.mode}': a model that learns can only train")
        if self.training.user.batch is not None:
            raise UsageError(f"--batch {self.training.user.batch}: losses takes its batches from --text; leave it out")


@dataclass(frozen=True)
class ProfileWorkload(Configured):
    """A training workload that is run under a profiler, whose files are kept in the folder ``keep``."""

    training: Workload
    profiler: str = setting(
        "auto",
        "nsys, torch; auto: nsys if it is there.",
        choices=("auto", "nsys", "torch"),
        several=True,
        in_titles=True,
        needs=(Needs("device", ("auto", "cuda"), "traces a GPU, and device {} is none; choose torch", ("nsys",)),),
    )
    keep: str | None = setting(None, header=None)

    def __post_init__(self) -> None:
        self.check_settings()


_MOST_BYTES = 10**9  # A byte is a token: 500,000 steps of 4 x 512 tokens read so many.

_ENDINGS = (".md", ".txt")  # What counts as text in a folder.


def read_text(paths: str) -> bytes:
    """Read comma-separated files, of a folder its text files in the order of their names; or raise a UsageError."""
    content = bytearray()
    for path in map(Path, paths.split(",")):
        try:
            files = sorted(entry for entry in path.iterdir() if entry.suffix in _ENDINGS) if path.is_dir() else [path]
            for file in files:
                # Devices have no end, and a pipe may wait for ever for its writer.
                if not stat.S_ISREG(file.stat().st_mode):
                    raise UsageError(f"--text {file}: is no file of text; give a file or a folder")
                with file.open("rb") as stream:
                    content += stream.read(_MOST_BYTES + 1 - len(content))  # One byte too many is refused below.
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
    """Return a digest of what :func:`read_text` reads, with its errors, as 12 hexadecimal digits."""
    return hashlib.sha256(read_text(paths)).hexdigest()[:12]
