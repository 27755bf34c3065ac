"""Who holds what when training state is shared out over ranks, and how many bytes that is: arithmetic, no torch.

``parallel.sharded_optimizer`` shares out by these very functions, so what is said here on
paper is what they hold. Optimizer-state sharding is ZeRO stage 1 (https://arxiv.org/abs/1910.02054, section 5.1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cs336sys.accounting.memory import TrainingState
from cs336sys.errors import UsageError

# Slices and packed tensors start at multiples of 64 elements, as in Megatron-LM: kernels that read 16 bytes at a time
# need aligned addresses.
ALIGNMENT = 64


def greedy_partition(sizes: Sequence[int], held: Sequence[int]) -> list[int]:
    """Give each of some tensors to one rank so that ranks hold about equally much.

    The largest first, each to the rank that holds least by then: the fullest rank gets at most 4/3 of what it would in
    the best partition (Graham 1969, "Bounds on multiprocessing timing anomalies").

    Args:
        sizes: of the tensors, in any unit.
        held: what each rank holds already.

    Returns:
        for each tensor, its rank.
    """
    totals = list(held)
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
        """The elements of a tensor of this size that lie in a rank's slice; may be empty."""
        first = rank * self.slice_size - self.starts[index]
        return range(min(max(first, 0), size), min(max(first + self.slice_size, 0), size))


def flat_pieces(sizes: Sequence[int], world_size: int) -> list[Piece]:
    """Cut tensors that are communicated together into one slice a rank.

    A tensor that divides into aligned slices is cut where it lies, which saves the copies that packing costs. All
    others are packed together, padded at the end.

    Args:
        sizes: elements of each tensor.
    """
    pieces, packed, end = [], {}, 0
    for index, size in enumerate(sizes):
        if size and size % (world_size * ALIGNMENT) == 0:
            pieces.append(Piece({index: 0}, size // world_size, is_packed=False))
        else:
            packed[index] = end
            end += _aligned(size, ALIGNMENT)
    if end:
        pieces.append(Piece(packed, _aligned(end, world_size * ALIGNMENT) // world_size, is_packed=True))
    return pieces


def sharded_optimizer_state(
    sizes: Sequence[int], world_size: int, *, element_bytes: int = 4, master_bytes: int = 0, moments: int = 2
) -> list[TrainingState]:
    """Bytes that each rank holds between backward pass and step if every parameter's state lies on one rank.

    Parameters and gradients are whole on every rank; moments are of the dtype that is stepped. torch's AdamW keeps a
    counter of 4 bytes for each parameter that a rank updates beside them, which is not counted.

    Args:
        sizes: elements of each parameter.
        element_bytes: of parameters and gradients.
        master_bytes: of a master parameter's element, 0 without master parameters.
        moments: state tensors of a parameter's size: AdamW's are two.

    Raises:
        UsageError: the world size is not positive.
    """
    _check_world_size(world_size)
    held = [0] * world_size
    for size, owner in zip(sizes, greedy_partition(sizes, held), strict=True):
        held[owner] += size
    whole = element_bytes * sum(sizes)
    stepped_bytes = master_bytes or element_bytes
    return [TrainingState(whole, whole, moments * stepped_bytes * own, master_bytes * own) for own in held]


def flat_optimizer_state(
    buckets: Sequence[Sequence[int]],
    world_size: int,
    *,
    element_bytes: int = 4,
    master_bytes: int = 0,
    moments: int = 2,
) -> list[TrainingState]:
    """Bytes that each rank holds between backward pass and step if every parameter is cut into slices.

    Parameters are whole on every rank, packed ones with their padding. Of the gradients a rank has its slices of every
    bucket in which it owns anything. They and moments are of the dtype that is stepped.

    Args:
        buckets: elements of each parameter, bucket by bucket.
        element_bytes, master_bytes, moments: as in :func:`sharded_optimizer_state`.

    Raises:
        UsageError: the world size is not positive.
    """
    _check_world_size(world_size)
    stepped_bytes = master_bytes or element_bytes
    parameters = 0
    gradients, held = [0] * world_size, [0] * world_size
    for sizes in buckets:
        pieces = flat_pieces(sizes, world_size)
        slices = sum(piece.slice_size for piece in pieces)
        parameters += element_bytes * world_size * slices
        for rank in range(world_size):
            own = sum(len(piece.owned(index, sizes[index], rank)) for piece in pieces for index in piece.starts)
            held[rank] += own
            gradients[rank] += stepped_bytes * slices if own else 0
    return [
        TrainingState(parameters, gradients[rank], moments * stepped_bytes * held[rank], master_bytes * held[rank])
        for rank in range(world_size)
    ]


def _aligned(size: int, alignment: int) -> int:
    return math.ceil(size / alignment) * alignment


def _check_world_size(world_size: int) -> None:
    if world_size < 1:
        raise UsageError(f"world size {world_size}: must be at least 1")
