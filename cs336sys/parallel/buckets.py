"""Which gradients are communicated together: plain arithmetic, no torch, no process group."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from cs336sys.accounting.sharding.partition import WHOLE_BLOCKS
from cs336sys.errors import UsageError


@dataclass(frozen=True)
class TensorSpec:
    """What decides which bucket a parameter goes into.

    Attributes:
        identity: equal for tied weights, which are one tensor under several names.
        size_bytes: the size of its gradient.
        kind: dtype and device; tensors of different kinds cannot share a bucket.
        block: the part of the model that it belongs to, see :func:`block_of`.
    """

    identity: Hashable
    size_bytes: int
    kind: Hashable = None
    block: str = ""


# What a bucket of whole blocks holds at least, as those of torch's DDP do; blocks of smaller models share one.
_LEAST_OF_BLOCKS = 25e6


def block_of(name: str) -> str:
    """The numbered part of a model in which a parameter of this name is: ``layers.3``; or the model's child."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


@dataclass(frozen=True)
class BucketRule:
    """When a bucket takes no more tensors.

    Attributes:
        cap_bytes: when it would hold more than this, unless it holds a single larger tensor; None sets no cap.
        whole_blocks: when it holds at least ``cap_bytes`` and the next tensor is of another block.
    """

    cap_bytes: float | None
    whole_blocks: bool = False

    def __str__(self) -> str:
        return f"cap_bytes={self.cap_bytes}" + (" of whole blocks" if self.whole_blocks else "")

    def closes(self, bucket: Sequence[TensorSpec], following: TensorSpec) -> bool:
        """Whether a bucket with these tensors, at least one, must not take another."""
        if self.cap_bytes is None:
            return False
        filled = sum(tensor.size_bytes for tensor in bucket)
        if self.whole_blocks:
            return filled >= self.cap_bytes and bucket[-1].block != following.block
        return filled + following.size_bytes > self.cap_bytes


def bucket_rule(bucket_size: float | str | None) -> BucketRule:
    """The rule for a bucket size: megabytes (1e6 bytes) at most, ``block`` for whole blocks, None for one bucket.

    Raises:
        UsageError: the bucket size is not positive, or another word.
    """
    if bucket_size == WHOLE_BLOCKS:
        return BucketRule(_LEAST_OF_BLOCKS, whole_blocks=True)
    if isinstance(bucket_size, str):
        raise UsageError(f"bucket size '{bucket_size}': choose '{WHOLE_BLOCKS}', or megabytes, or None for one bucket")
    return BucketRule(cap_in_bytes(bucket_size))


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


def assign_buckets(tensors: Sequence[TensorSpec], cap_bytes: float | BucketRule | None) -> list[list[int]]:
    """Put every tensor into a bucket; buckets and their contents are in the order in which gradients become ready.

    Gradients become ready in roughly the reverse order of the parameters, so the last parameter opens the first bucket.
    A bucket holds at most ``cap_bytes`` (the handout's "at most"; torch's DDP closes a bucket once it has crossed the
    cap); a tensor larger than the cap has a bucket to itself. Each kind has one open bucket at a time, and buckets are
    ordered by the last tensor they hold, so that with gradients in reverse order they complete one after the other.

    Args:
        tensors: in parameter order, a tied weight once for every name. It counts where it appears first, because its
            gradient is ready only when the backward pass has reached its first use.
        cap_bytes: ``0`` gives every tensor a bucket of its own; None sets no cap: one bucket for each kind; or a rule
            of another sort.

    Returns:
        Indices into ``tensors``, bucket by bucket.

    Raises:
        UsageError: the cap is negative or not a number.
    """
    rule = cap_bytes if isinstance(cap_bytes, BucketRule) else BucketRule(cap_bytes)
    if rule.cap_bytes is not None and not rule.cap_bytes >= 0:
        raise UsageError(f"bucket cap {rule.cap_bytes} bytes: must be at least 0")
    first_index: dict[Hashable, int] = {}
    for index, tensor in enumerate(tensors):
        first_index.setdefault(tensor.identity, index)

    buckets: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    for index in reversed(first_index.values()):
        tensor = tensors[index]
        open_bucket = filling.get(tensor.kind)
        if open_bucket is None or rule.closes([tensors[other] for other in open_bucket], tensor):
            open_bucket = filling[tensor.kind] = []
            buckets.append(open_bucket)
        open_bucket.append(index)
    return sorted(buckets, key=lambda bucket: bucket[-1], reverse=True)
