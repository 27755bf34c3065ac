"""One case of ``verify``: a user's way of training in parallel, and what it is put through."""

import math
from dataclasses import dataclass

from cs336sys.errors import UsageError, choose_from
from cs336sys.settings.fields import Configured, same_setting, setting
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.training import Workload
from cs336sys.settings.user_code import is_user_code


@dataclass(frozen=True)
class Program:
    """Actions of a case: what is done to the model and in its steps, the same in one process and on ranks."""

    meaning: str = ""  # What happens, in words.
    steps: int = 3  # Each on a batch of its own.
    micro_batches: int = 1  # Of a step.
    no_sync: bool = False  # All but the last micro-batch of a step are run under ``no_sync``.
    clips: bool = False  # Gradients are clipped to half of the first step's norm.
    scales: bool = False  # The loss is scaled, and infinite on one rank in a step that all ranks have to skip.
    uneven: bool = False  # The last rank has one sequence fewer.
    unused: bool = False  # A layer's parameters are unused on the last rank.
    # Changes of the model before it is wrapped.
    frozen: bool = False
    tied: bool = False
    checkpoints: bool = False
    compiles: bool = False
    evaluates: bool = False  # After every step but the last.
    late_rank: int | None = None  # It sleeps before each of its collectives.
    other_starts: bool = False  # Ranks other than the first begin with other weights.
    masks: bool = False  # Dropout masks are recorded, and nothing is trained.
    # After two steps everything is saved and loaded into new objects: by their ``own`` state dicts, by ``dcp``
    # (torch.distributed.checkpoint), or by another number of ``ranks``.
    resume: str | None = None

    @property
    def in_one_process(self) -> "Program":
        """Return the same training without changes that must not matter."""
        kept = ("steps", "clips", "scales", "uneven", "unused", "frozen", "tied", "evaluates")
        return Program(**{name: getattr(self, name) for name in kept})

    def overflows(self, step: int) -> bool:
        """Return whether the loss of one rank is infinite in a step, from 1: all ranks have to skip it."""
        return self.scales and step == 2


SAVED_AFTER = 2  # Steps before everything is saved.


# The programs that a wrap is put through, by case, in the order of the table.
CASES = {
    "step": Program("three steps, each on a batch of its own"),
    "accumulation": Program("two micro-batches a step, gradients synchronized after each", micro_batches=2),
    "no-sync": Program("two micro-batches a step, the first under no_sync", micro_batches=2, no_sync=True),
    "clipping": Program("gradients clipped to half of their norm", clips=True),
    "scaling": Program("loss scaled, overflow on one rank in the second step", scales=True),
    "uneven": Program("the last rank has fewer sequences", uneven=True),
    "unused": Program("a parameter is unused on one rank", unused=True),
    "frozen": Program("a parameter is frozen before the model is wrapped", frozen=True),
    "tied": Program("two weights are one parameter", tied=True),
    "evaluation": Program("an evaluation between steps", evaluates=True),
    "checkpoint": Program("activation checkpoints around blocks", checkpoints=True),
    "compile": Program("compiled blocks", compiles=True, steps=2),
    "late": Program("one rank is late by 100 ms before its collectives, then another", late_rank=0, steps=2),
    "start": Program("the ranks start with different weights", other_starts=True),
    "dropout": Program("dropout masks of the ranks", masks=True),
    "groups": Program("the optimizer's groups, and the shapes that it sees", steps=0),
    "order": Program("every rank's collectives where one rank alone meets a condition", steps=2),
    "save": Program("state dicts saved and loaded after two steps", resume="own"),
    "save-dcp": Program("torch.distributed.checkpoint, saved and loaded after two steps", resume="dcp"),
    "save-ranks": Program("saved, and loaded by another number of ranks", resume="ranks"),
    "run": Program("twenty steps", steps=20),
}

# Programs of which one rank alone meets a condition, and what that is.
CONDITIONS = {
    "no condition": Program(steps=2),
    "a parameter that one rank does not use": Program(steps=2, unused=True),
    "an overflow on one rank": Program(steps=2, scales=True),
    "fewer sequences on one rank": Program(steps=2, uneven=True),
}

# The default model, so small that all cases take seconds on a CPU, and how many sequences each rank has.
SMALL = {"context": 16, "vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4}
SEQUENCES = 4

# Ready wraps by name, with how their ranks share the work.
WRAPS = {
    # torch's.
    **dict.fromkeys(("ddp", "fsdp2", "zero"), "data"),
    "tensor-parallel": "tensor",
    # Ours.
    **dict.fromkeys(("naive", "flat", "overlap", "bucketed", "optimizer", "optimizer-flat", "fsdp"), "data"),
    "tensor": "tensor",
    # Other libraries'.
    **dict.fromkeys(("accelerate", "deepspeed"), "data"),
}

# What the ranks along a dimension of the mesh share: sequences of the batch, tokens of each sequence, or the model.
DIMENSIONS = ("data", "context", "tensor", "pipeline")


def parse_mesh(text: str, world_size: int) -> dict[str, int]:
    """Return the dimensions' sizes of ``data=2,tensor=2``, one of which may lack its size, or raise a UsageError."""
    sizes: dict[str, int] = {}
    unsized = ""
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if name not in DIMENSIONS:
            raise UsageError(f"--mesh {text}: unknown dimension '{name}': {choose_from(name, DIMENSIONS)}")
        is_size = size.isdecimal() and int(size) > 0
        is_refused = not is_size if equals else bool(unsized)  # Only one dimension may lack its size.
        if name in sizes or is_refused:
            raise UsageError(
                f"--mesh {text}: write each dimension once, with its size, at least 1 (one may be without): "
                "data=2,tensor=2"
            )
        unsized = unsized if equals else name
        sizes[name] = int(size) if equals else 1
    sized_ranks = math.prod(sizes.values())
    if unsized and world_size % sized_ranks == 0:
        sizes[unsized] = world_size // sized_ranks
    if math.prod(sizes.values()) != world_size:
        raise UsageError(f"--mesh {text}: its sizes multiply to {sized_ranks}, not to {world_size} ranks")
    return sizes


@dataclass(frozen=True)
class Share:
    """A part of a batch: a micro-batch of one of the ranks that share the batch."""

    data_rank: int
    micro_batch: int
    weight: float  # Its sequences over all of the batch.
    sequences: slice  # Of the batch.


@dataclass(frozen=True)
class VerifiedWorkload(Configured):
    """A way of wrapping a model for ranks, and one case in which its training is compared with one process.

    Attributes:
        training: its batch is that of all ranks together.
        wrap: one of :data:`WRAPS`, or a function of the user.
        mesh: see :func:`parse_mesh`.
        finish: None: ``finish_gradient_synchronization`` where there is one.
        wrap_digest: of the files of the wrap.
    """

    training: Workload
    wrap: str = setting(several=True)
    world_size: int = same_setting(ParallelWorkload, "world_size")
    case: str = setting("step", f"{', '.join(CASES)}.", choices=CASES, several=True)
    mesh: str = setting("data", "What ranks share: data, context, tensor, pipeline; data=2,tensor=2.")
    backend: str = same_setting(ParallelWorkload, "backend")
    finish: str | None = setting(None, "Method that completes gradients. Default: detected.", takes_code=True)
    gradients: str = setting("mean", "How ranks combine their gradients: mean, sum.", choices=("mean", "sum"))
    timeout_s: float = setting(
        20.0, "Seconds after which ranks that wait count as hanging.", minimum=1, option="timeout"
    )
    wrap_digest: str | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown wrap, and batches and sequences that the mesh cannot share equally."""
        self.check_settings()
        if not is_user_code(self.wrap) and self.wrap not in WRAPS:
            raise UsageError(
                f"--wrap {self.wrap}: {choose_from(self.wrap, WRAPS)}; or yours: FILE.py:NAME, package.module:NAME"
            )
        batch_size, context, data_ranks = self.training.size.batch_size, self.training.size.context, self.data_ranks
        context_ranks = self.dimensions.get("context", 1)
        if context % context_ranks:
            raise UsageError(f"--context {context}: must be a multiple of the {context_ranks} ranks")
        if batch_size < 4 * data_ranks:
            raise UsageError(
                f"--batch-size {batch_size}: must be at least {4 * data_ranks}, so that each of {data_ranks} ranks has "
                "several sequences in each of two micro-batches"
            )
        if batch_size % (2 * data_ranks):
            raise UsageError(
                f"--batch-size {batch_size}: must be a multiple of {2 * data_ranks}, so that {data_ranks} ranks have "
                "equal micro-batches"
            )

    @property
    def program(self) -> Program:
        return CASES[self.case]

    @property
    def dimensions(self) -> dict[str, int]:
        """Return the sizes of the mesh by the names of its dimensions."""
        return parse_mesh(self.mesh, self.world_size)

    @property
    def data_ranks(self) -> int:
        return self.dimensions.get("data", 1)

    def data_place(self, rank: int) -> int:
        """Return which share of the batch a rank has; the last dimension of the mesh changes fastest with the rank."""
        for name, size in reversed(self.dimensions.items()):
            if name == "data":
                return rank % size
            rank //= size
        return 0

    @property
    def groups(self) -> list[list[int]]:
        """Return ranks that may hold slices of one tensor: those along each dimension of the mesh, then all."""
        groups, stride = [], 1
        for size in reversed(self.dimensions.values()):  # The last dimension changes fastest with the rank.
            if size > 1:
                firsts = [rank for rank in range(self.world_size) if rank // stride % size == 0]  # Of each group.
                groups += [list(range(first, first + stride * size, stride)) for first in firsts]
            stride *= size
        return [*groups, list(range(self.world_size))]

    def shares(self, program: Program, micro_batches: int, *, whole: bool = False) -> list[Share]:
        """Cut a batch into micro-batches of data ranks, in the order of the ranks; or leave it ``whole``."""
        batch_size = self.training.size.batch_size
        share_size = batch_size if whole else batch_size // self.data_ranks // micro_batches
        # Of uneven shares, the last is one sequence shorter.
        total = batch_size - 1 if program.uneven else batch_size
        shares = []
        for first in range(0, batch_size, share_size):
            data_rank, micro_batch = divmod(first // share_size, micro_batches)
            last = min(first + share_size, total)
            shares.append(Share(data_rank, micro_batch, weight=(last - first) / total, sequences=slice(first, last)))
        return shares
