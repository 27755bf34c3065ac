"""Which gradients are communicated together: plain arithmetic, no torch, no process group."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from cs336sys.errors import UsageError


@dataclass(frozen=True)
class TensorSpec:
    """What decides which bucket a parameter goes into.

    Attributes:
        identity: equal for tied weights, which are one tensor under several names.
        size_bytes: the size of its gradient.
        kind: dtype and device; tensors of different kinds cannot share a bucket.
    """

    identity: Hashable
    size_bytes: int
    kind: Hashable = None


def cap_in_bytes(bucket_size_mb: float | None) -> float | None:
    """A bucket size in megabytes (1e6 bytes) as a cap in bytes; None stays None: no cap.

    Raises:
        UsageError: the bucket size is not positive.
    """
    if bucket_size_mb is None:
        return None
    if not bucket_size_mb > 0:
        raise UsageError(f"bucket size {bucket_size_mb} MB: must be positive, or None for one bucket")
    return bucket_size_mb * 1e6


def assign_buckets(tensors: Sequence[TensorSpec], cap_bytes: float | None) -> list[list[int]]:
    """Put every tensor into a bucket; buckets and their contents are in the order in which gradients become ready.

    Gradients become ready in roughly the reverse order of the parameters, so the last parameter opens the first bucket.
    A bucket holds at most ``cap_bytes`` (the handout's "at most"; torch's DDP closes a bucket once it has crossed the
    cap); a tensor larger than the cap has a bucket to itself. Each kind has one open bucket at a time, and buckets are
    ordered by the last tensor they hold, so that with gradients in reverse order they complete one after the other.

    Args:
        tensors: in parameter order, a tied weight once for every name. It counts where it appears first, because its
            gradient is ready only when the backward pass has reached its first use.
        cap_bytes: ``0`` gives every tensor a bucket of its own; None sets no cap: one bucket for each kind.

    Returns:
        Indices into ``tensors``, bucket by bucket.

    Raises:
        UsageError: the cap is negative or not a number.
    """
    if cap_bytes is not None and not cap_bytes >= 0:
        raise UsageError(f"bucket cap {cap_bytes} bytes: must be at least 0")
    first_index: dict[Hashable, int] = {}
    for index, tensor in enumerate(tensors):
        first_index.setdefault(tensor.identity, index)

    buckets: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    for index in reversed(first_index.values()):
        tensor = tensors[index]
        full = cap_bytes is not None and filled_bytes.get(tensor.kind, 0) + tensor.size_bytes > cap_bytes
        if full or tensor.kind not in filling:
            filling[tensor.kind] = []
            filled_bytes[tensor.kind] = 0
            buckets.append(filling[tensor.kind])
        filling[tensor.kind].append(index)
        filled_bytes[tensor.kind] += tensor.size_bytes
    return sorted(buckets, key=lambda bucket: bucket[-1], reverse=True)
