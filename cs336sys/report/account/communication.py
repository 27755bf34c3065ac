"""The tables of ``account collectives`` and ``account buckets``."""

from collections.abc import Sequence
from itertools import product

from cs336sys.accounting.answers.communication import bucket_answers, ring_answers, ring_times
from cs336sys.accounting.buckets import bucketing_overhead_s
from cs336sys.accounting.derivation import number_of
from cs336sys.report.account.answers import answers_table
from cs336sys.report.tables import Column, Table


def collectives_tables(messages: Sequence[int], devices: Sequence[int], bytes_per_s: float) -> list[Table]:
    """The formulas at the largest message and number of devices, and the times of every combination."""
    columns = (
        Column("message_bytes", "message", "decimal_bytes"),
        Column("devices", "devices"),
        Column("all_gather_ms", "all-gather", "ms"),
        Column("reduce_scatter_ms", "reduce-scatter", "ms"),
        Column("all_reduce_ms", "all-reduce", "ms"),
        Column("alternate_all_reduce_ms", "alternate all-reduce", "ms"),
        Column("algbw_gbps", "all-reduce algbw", "gbps"),
        Column("busbw_gbps", "all-reduce busbw", "gbps"),
    )
    rows = [
        {"message_bytes": size, "devices": count} | ring_times(size, count, bytes_per_s)
        for count, size in product(devices, messages)
    ]
    notes = ("Assumed: no latency, so small messages take longer than this in truth; allreduce measures both.",)
    answers = ring_answers(max(messages), max(devices), bytes_per_s)
    return [
        answers_table("rings", f"Ring collectives: W {bytes_per_s:g} bytes/s", answers),
        Table("times", "Ring collectives by size and devices", columns, rows, notes),
    ]


def bucket_tables(
    gradient_bytes: float, bucket_bytes: Sequence[float], bytes_per_s: float, call_s: float, title: str
) -> list[Table]:
    """The formulas at the first bucket size, and the overhead of every size.

    Args:
        title: whose gradients they are.
    """
    rows = []
    for size in bucket_bytes:
        buckets = max(1.0, gradient_bytes / size)
        transfer_s = gradient_bytes / (buckets * bytes_per_s)
        overhead_s = number_of(bucketing_overhead_s(gradient_bytes, buckets, bytes_per_s, call_s))
        row = {"bucket_mb": size / 1e6, "buckets": buckets, "transfer_ms": 1e3 * transfer_s}
        rows.append(row | {"calls_ms": 1e3 * (overhead_s - transfer_s), "overhead_ms": 1e3 * overhead_s})
    columns = (
        Column("bucket_mb", "bucket", "MB"),
        Column("buckets", "buckets"),
        Column("transfer_ms", "last transfer", "ms"),
        Column("calls_ms", "calls", "ms"),
        Column("overhead_ms", "overhead", "ms"),
    )
    notes = (
        "Assumed, as the handout does: computing a bucket's gradients takes as long as communicating them.",
        "Buckets need not be a whole number; a bucket cannot be smaller than a gradient, nor larger than all of them.",
    )
    first = max(1, round(gradient_bytes / bucket_bytes[0]))
    answers = bucket_answers(gradient_bytes, first, bytes_per_s, call_s)
    return [
        answers_table("formulas", f"Gradient buckets: {title}", answers),
        Table("buckets", f"Overhead by bucket size: {title}", columns, rows, notes),
    ]
