"""The division of tensors and sequences among ranks: arithmetic for what `parallel/` computes and `accounting/` counts.

Both import these functions, so memory and traffic predicted on paper are those of the classes themselves.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cs336sys.errors import UsageError, choose_from

# Slices and packed tensors start at multiples of 64 elements, as in Megatron-LM: kernels read 16 aligned bytes at once.
ALIGNMENT = 64

# Every gathered parameter starts at a multiple of so many bytes, as if it had been allocated alone: cudaMalloc aligns
# to at least 256 bytes, and kernels are fastest on aligned addresses.
GATHER_ALIGNMENT_BYTES = 256

# What ShardedOptimizer communicates in one launch. Two H200, 12 blocks of 2.7b, bf16, compiled, ms a step at 100, 250
# and 500 MB: whole parameters 51.9, 47.1, 46.9 (at 100 a weight of the feed-forward network is a bucket of its own,
# which travels in one direction of the link); slices 46.5 and 39.2.
OPTIMIZER_BUCKET_MB = 250.0

# In place of a bucket size: buckets of whole blocks.
WHOLE_BLOCKS = "block"

Shape = Sequence[int]

# By ends of names, where a weight (d_out, d_in) is cut: 0 makes columns of x W^T, 1 its rows; None is held whole.
CUT_DIMENSIONS: dict[str, int | None] = {
    "token_embeddings.weight": 0,
    "attn.q_proj.weight": 0,
    "attn.k_proj.weight": 0,
    "attn.v_proj.weight": 0,
    "attn.output_proj.weight": 1,
    "ffn.w1.weight": 0,
    "ffn.w2.weight": 1,
    "ffn.w3.weight": 0,
    "ln1.weight": None,
    "ln2.weight": None,
    "ln_final.weight": None,
    "lm_head.weight": 0,
}


def greedy_partition(sizes: Sequence[int], held_sizes: Sequence[int]) -> list[int]:
    """Give each tensor to one rank so that ranks hold about equally much, and return the rank of each.

    The largest first, each to the rank that holds least by then: the fullest rank gets at most 4/3 of what it would in
    the best partition (Graham 1969, "Bounds on multiprocessing timing anomalies"); ``held_sizes``: what ranks hold.
    """
    totals = list(held_sizes)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = totals.index(min(totals))
        totals[owners[index]] += sizes[index]
    return owners


@dataclass(frozen=True)
class Piece:
    """Contiguous memory that is cut into equal slices, one a rank, in rank order.

    Attributes:
        starts: for each tensor in it, by index, the element at which it starts.
        slice_size: elements of a slice.
        is_packed: several tensors (or one that does not fill the slices) were copied together, with gaps between.
    """

    starts: dict[int, int]
    slice_size: int
    is_packed: bool

    def owned(self, index: int, size: int, rank: int) -> range:
        """Return the elements of a tensor of this size that lie in a rank's slice; there may be none."""
        first = rank * self.slice_size - self.starts[index]
        return range(min(max(first, 0), size), min(max(first + self.slice_size, 0), size))


def flat_pieces(sizes: Sequence[int], world_size: int) -> list[Piece]:
    """Cut tensors of so many elements, which are communicated together, into one slice a rank.

    A tensor of aligned slices is cut where it lies, without the copies of packing; others are packed, with padding.
    """
    pieces, packed, end = [], {}, 0
    for index, size in enumerate(sizes):
        if size and size % (world_size * ALIGNMENT) == 0:
            pieces.append(Piece({index: 0}, size // world_size, is_packed=False))
        else:
            packed[index] = end
            end += _round_up_to(size, ALIGNMENT)
    if end:
        pieces.append(Piece(packed, _round_up_to(end, world_size * ALIGNMENT) // world_size, is_packed=True))
    return pieces


def rows_per_rank(rows: int, world_size: int) -> int:
    """Count rows of a parameter that each rank has room for: equally many, so the last ranks may hold fewer or none."""
    return math.ceil(rows / world_size)


def own_rows(rows: int, rank: int, world_size: int) -> range:
    """Return the rows of a parameter that a rank holds, as ``torch.chunk`` cuts them."""
    row_count = rows_per_rank(rows, world_size)
    return range(min(rank * row_count, rows), min((rank + 1) * row_count, rows))


def padded_bytes(shape: Shape, element_bytes: int, world_size: int) -> int:
    """Return the bytes of a gathered parameter, which has room for equally many rows of each rank."""
    return world_size * rows_per_rank(shape[0], world_size) * math.prod(shape[1:]) * element_bytes


def gathered_layout(parameters: Sequence[tuple[Shape, int]], world_size: int) -> tuple[list[int], int]:
    """Return at which byte of a unit's memory each gathered parameter (shape, element bytes) starts, and the total."""
    starts, end = [], 0
    for shape, element_bytes in parameters:
        starts.append(end)
        end += _round_up_to(padded_bytes(shape, element_bytes, world_size), GATHER_ALIGNMENT_BYTES)
    return starts, end


def cut_dimension(name: str) -> int | None:
    """Return the dimension along which the parameter of this name in the state dict is cut; None if no rank cuts it."""
    parts = name.split(".")
    inner = ".".join(parts[2:]) if parts[0] == "layers" and len(parts) > 2 else name
    if inner not in CUT_DIMENSIONS:
        raise UsageError(
            f"parameter {name}: tensor parallelism can only cut parameters of cs336_basics, "
            f"layers.N.*, token_embeddings.weight, ln_final.weight and lm_head.weight"
        )
    return CUT_DIMENSIONS[inner]


def own_part(length: int, rank: int, world_size: int) -> range:
    """Return the rows or columns that a rank holds: as ``torch.chunk`` and DTensors cut them.

    Where that would leave none for the last rank, the first ranks hold one more.
    """
    if length > rows_per_rank(length, world_size) * (world_size - 1):
        return own_rows(length, rank, world_size)
    smallest, larger_parts = divmod(length, world_size)
    first = rank * smallest + min(rank, larger_parts)
    return range(first, first + smallest + (rank < larger_parts))


def check_bucket_size(bucket_size: float | str | None) -> None:
    """Refuse a size of buckets that is neither :data:`WHOLE_BLOCKS` nor a positive number of megabytes nor None."""
    is_positive = not isinstance(bucket_size, str | None) and hasattr(bucket_size, "__float__") and bucket_size > 0
    if not is_positive and bucket_size not in (WHOLE_BLOCKS, None):
        raise UsageError(f"bucket size {bucket_size!r}: choose megabytes, '{WHOLE_BLOCKS}', or None for one bucket")


def check_batch(batch_size: int, ranks: int, sharing: str = "ranks") -> None:
    """Refuse ranks, or groups of them (``sharing``, in the plural), whose number does not divide the batch."""
    if ranks < 1:
        raise UsageError(f"--world-size {ranks}: must be at least 1")
    if batch_size % ranks:
        raise UsageError(
            f"--batch-size {batch_size}: {ranks} {sharing} cannot share it equally; choose a multiple of {ranks}"
        )


def heads_refusal(num_heads: int, world_size: int) -> str | None:
    """Return why ranks cannot share attention heads; None if they can."""
    if num_heads % world_size == 0:
        return None
    heads = "1 attention head" if num_heads == 1 else f"{num_heads} attention heads"
    return f"{heads} cannot be shared by {world_size} tensor parallel ranks: choose {_rank_choices(num_heads)}"


def _rank_choices(heads: int) -> str:
    """List the numbers of ranks that can share so many heads, for messages."""
    divisors = [str(ranks) for ranks in range(1, heads + 1) if heads % ranks == 0]
    return f"{', '.join(divisors[:-1])} or {divisors[-1]} ranks" if len(divisors) > 1 else "1 rank"


@dataclass(frozen=True)
class SequenceSplit:
    """The tokens of a sequence that each rank holds, at least one; lengths differ by at most one.

    Attributes:
        length: tokens of the sequence.
        world_size: ranks.
        is_zigzag: two chunks a rank, the ``r``-th from either end; else one, in rank order.
    """

    length: int
    world_size: int
    is_zigzag: bool = True

    def __post_init__(self) -> None:
        is_whole = all(hasattr(number, "__index__") for number in (self.length, self.world_size))  # Numpy's are, too.
        if not (is_whole and self.length >= self.world_size > 0):
            raise UsageError(
                f"a sequence of {self.length} tokens cannot be split over {self.world_size} ranks: choose at least one "
                "token a rank, in whole numbers"
            )

    @cached_property
    def chunks(self) -> tuple[tuple[range, ...], ...]:
        """Return the positions that each rank holds, in order."""
        count = 2 * self.world_size if self.is_zigzag else self.world_size
        short, longer = divmod(self.length, count)
        starts = [number * short + min(number, longer) for number in range(count + 1)]
        chunks = [range(start, end) for start, end in itertools.pairwise(starts)]
        sides = (chunks[: self.world_size], chunks[: self.world_size - 1 : -1]) if self.is_zigzag else (chunks,)
        return tuple(zip(*sides, strict=True))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Count the tokens of each rank."""
        return tuple(sum(map(len, chunks)) for chunks in self.chunks)


def require_heads(heads: int, world_size: int) -> None:
    """Refuse heads that ranks of all-to-all attention cannot share equally."""
    if heads % world_size:
        raise UsageError(
            f"all-to-all attention: {world_size} ranks do not divide {heads} head{'s' * (heads != 1)}; choose "
            f"{_rank_choices(heads)}, or ring attention"
        )


def _round_up_to(size: int, alignment: int) -> int:
    return math.ceil(size / alignment) * alignment


# From the outermost to the innermost: ranks of the last are neighbours, on one node where they fit there.
DIMENSIONS = ("ddp", "fsdp", "cp", "tp")


def read_mesh(text: str) -> dict[str, int]:
    """Return the sizes of ``fsdp=2,tp=4`` by dimension, the outermost first, in whatever order they are written."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"--mesh {text}: write dimensions and their numbers of ranks, as in fsdp=2,tp=2")
        if name not in DIMENSIONS:
            raise UsageError(f"--mesh {text}: unknown dimension '{name}': {choose_from(name, DIMENSIONS)}")
        if name in sizes:
            raise UsageError(f"--mesh {text}: {name} is given twice")
        sizes[name] = int(size)
    return {name: sizes[name] for name in DIMENSIONS if name in sizes}


def mesh_text(sizes: dict[str, int]) -> str:
    """Write a mesh as :func:`read_mesh` reads it."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


@dataclass(frozen=True)
class Mesh:
    """Devices by dimension, at least 1 in each."""

    ddp: int = 1
    fsdp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.ddp, self.fsdp, self.tp) < 1:
            raise UsageError(f"mesh {self.fsdp}x{self.tp}: every axis needs at least 1 device")

    @property
    def devices(self) -> int:
        return self.ddp * self.fsdp * self.tp

    @property
    def text(self) -> str:
        """Write the mesh as ``--mesh`` takes it, without dimensions of one rank."""
        return mesh_text({name: ranks for name, ranks in vars(self).items() if ranks > 1}) or "one device"


def strategy_of_mesh(mesh: str) -> str:
    """Return the strategy that has the dimensions of a mesh; of those that share sequences, the ring."""
    names = "+".join(read_mesh(mesh))
    strategies = {
        "tp": "tensor",
        "ddp+tp": "ddp+tensor",
        "fsdp+tp": "fsdp+tensor",
        "cp": "context-ring",
        "fsdp+cp": "fsdp+context-ring",
    }
    if names not in strategies:
        raise UsageError(f"--mesh {mesh}: choose tp=N, ddp=M,tp=N, fsdp=M,tp=N, cp=N or fsdp=M,cp=N")
    return strategies[names]
