"""What bucket size data parallel training should use, on paper: the handout's model of bucketed communication.

Source: CS336 assignment 2 (2025), problem ``ddp_bucketed_benchmarking`` (b). Gradients of ``s`` bytes in ``n_b`` equal
buckets are all-reduced during the backward pass at ``w`` bytes/s, and every call costs ``o`` seconds besides. The model
assumes that a bucket's gradients take as long to compute as to communicate. Then bucket ``i`` travels while bucket
``i + 1`` is computed, and only the last bucket's transfer, ``s / (n_b w)``, and the cost of the calls, ``n_b o``,
remain after the backward pass::

    overhead = s / (n_b w) + n_b o

Its derivative by ``n_b``, ``o - s / (n_b^2 w)``, is zero at ``n_b = sqrt(s / (w o))``, that is at buckets of
``b = s / n_b = sqrt(s w o)`` bytes, where both terms are equal: ``overhead = 2 sqrt(s o / w)``.
"""

from cs336sys.accounting.collectives import AlphaBeta
from cs336sys.accounting.derivation import Number, minimum, number_of
from cs336sys.errors import UsageError


def bucketing_overhead_s(gradient_bytes: Number, buckets: Number, bytes_per_s: Number, call_s: Number) -> Number:
    """Seconds that a step takes beyond its backward pass: ``s / (n_b w) + n_b o``; arguments may be symbols.

    Args:
        gradient_bytes: all gradients of one rank, ``s``.
        buckets: their number, ``n_b``; the model holds for fractions too.
        bytes_per_s: algorithm bandwidth of the all-reduce, ``w``: one rank's bytes over the time of the call.
        call_s: cost of one call besides the transfer, ``o``.

    Raises:
        UsageError: a value is not positive (``call_s`` may be zero).
    """
    _check_positive(gradient_bytes=gradient_bytes, buckets=buckets, bytes_per_s=bytes_per_s)
    if not call_s >= 0:
        raise UsageError(f"call_s {call_s}: must be at least 0")
    return gradient_bytes / (buckets * bytes_per_s) + buckets * call_s


def optimal_bucket_bytes(gradient_bytes: Number, bytes_per_s: Number, call_s: Number) -> Number:
    """The bucket size with the least overhead, ``sqrt(s w o)`` bytes.

    It is never more than all gradients (one bucket) and approaches 0 as calls become free. Arguments as in
    :func:`bucketing_overhead_s`.

    Raises:
        UsageError: a value is not positive.
    """
    _check_positive(gradient_bytes=gradient_bytes, bytes_per_s=bytes_per_s, call_s=call_s)
    return minimum(gradient_bytes, (gradient_bytes * bytes_per_s * call_s) ** 0.5)


def overhead_on_link_s(gradient_bytes: float, bucket_bytes: float, link: AlphaBeta) -> float:
    """:func:`bucketing_overhead_s` with a measured link: a call costs its latency, the transfer its bandwidth.

    Args:
        bucket_bytes: the size of a bucket; one larger than all gradients holds them all.

    Raises:
        UsageError: a size is not positive.
    """
    _check_positive(bucket_bytes=bucket_bytes)
    buckets = max(1.0, gradient_bytes / bucket_bytes)
    return number_of(bucketing_overhead_s(gradient_bytes, buckets, link.bytes_per_s, link.latency_s))


def optimal_bucket_on_link_bytes(gradient_bytes: float, link: AlphaBeta) -> float:
    """:func:`optimal_bucket_bytes` with a measured link; 0 where calls are free: the smaller the better.

    Raises:
        UsageError: ``gradient_bytes`` is not positive.
    """
    if link.latency_s == 0:
        _check_positive(gradient_bytes=gradient_bytes)
        return 0.0
    return number_of(optimal_bucket_bytes(gradient_bytes, link.bytes_per_s, link.latency_s))


def _check_positive(**values: Number) -> None:
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{name} {value}: must be positive")
