"""Bytes of training state that each rank holds when the optimizer's state is sharded: arithmetic, no torch.

``parallel.sharded_optimizer`` shards by the same functions of ``partition``. Optimizer-state sharding is ZeRO stage 1
(https://arxiv.org/abs/1910.02054, section 5.1).
"""

from collections.abc import Sequence

from cs336sys.accounting.memory import TrainingState
from cs336sys.accounting.sharding.partition import flat_pieces, greedy_partition
from cs336sys.errors import UsageError


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
        # Whole slices of what is not packed: rank by rank, thousands of ranks would take seconds.
        own = [sum(piece.slice_size for piece in pieces if not piece.is_packed)] * world_size
        for piece in pieces:
            for index, start in piece.starts.items() if piece.is_packed else ():
                for rank in range(start // piece.slice_size, (start + sizes[index] - 1) // piece.slice_size + 1):
                    own[rank] += len(piece.owned(index, sizes[index], rank))
        for rank, elements in enumerate(own):
            held[rank] += elements
            gradients[rank] += stepped_bytes * slices if elements else 0
    return [
        TrainingState(parameters, gradients[rank], moments * stepped_bytes * held[rank], master_bytes * held[rank])
        for rank in range(world_size)
    ]


def _check_world_size(world_size: int) -> None:
    if world_size < 1:
        raise UsageError(f"world size {world_size}: must be at least 1")
