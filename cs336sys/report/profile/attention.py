"""Softmax against the matrix products inside attention, on the forward pass."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cs336sys.accounting.flops import attention_matmuls, attention_softmax
from cs336sys.measure.profile.taxonomy import MATMUL, category_of
from cs336sys.measure.range_names import FINAL_MATMUL, SCORES, SOFTMAX
from cs336sys.report.profile.measured import Measured
from cs336sys.report.tables import Column, Table
from cs336sys.workload import Workload

_OTHER = "other"


def attention_table(measured: Sequence[Measured], labels: Sequence[Column]) -> Table | None:
    """Time, FLOPs and bytes of both; None where no profile shows the parts of attention."""
    rows = [{**m.labels, **_row(m)} for m in measured if {SCORES, SOFTMAX} <= {part.name for part in m.profile.parts}]
    if not rows:
        return None
    columns = (
        *labels,
        Column("scores_ms", "Q K^T", "ms"),
        Column("final_ms", "P V", "ms"),
        Column("softmax_ms", "softmax", "ms"),
        Column("other_ms", "scale, mask, copies", "ms"),
        Column("time_ratio", "softmax / matmuls: time", "ratio"),
        Column("flops_ratio", "FLOPs", "ratio"),
        Column("bytes_ratio", "bytes", "ratio"),
        Column("matmul_tflops", "matmuls", "tflops"),
        Column("softmax_tflops", "softmax", "tflops"),
        Column("matmul_gbps", "matmuls", "gbps"),
        Column("softmax_gbps", "softmax", "gbps"),
    )
    notes = (
        "kernel time of all layers in a forward pass; FLOPs: 4 B H S^2 D for the matmuls, 5 B H S^2 for the softmax; "
        "bytes: the least that must be moved, each matrix read or written once",
        "The ratio of FLOPs is what arithmetic alone would make of the time. A time ratio far above it says that the "
        "softmax spends its time on moving the scores, one above the ratio of bytes that it moves them several times.",
    )
    return Table("attention", "nsys: softmax against the matmuls inside attention", columns, rows, notes=notes)


def _row(measured: Measured) -> dict[str, Any]:
    totals: Counter[str] = Counter()
    for kernel in measured.profile.part_kernels:
        is_meant = kernel.range == SOFTMAX or category_of(kernel.kernel) == MATMUL
        totals[kernel.range if is_meant else _OTHER] += kernel.total_ns
    # A step has one forward pass.
    ms = {part: totals[part] / measured.steps / 1e6 for part in (SCORES, FINAL_MATMUL, SOFTMAX, _OTHER)}
    row = {"scores_ms": ms[SCORES], "final_ms": ms[FINAL_MATMUL], "softmax_ms": ms[SOFTMAX], "other_ms": ms[_OTHER]}
    matmul_ms, softmax_ms = ms[SCORES] + ms[FINAL_MATMUL], ms[SOFTMAX]
    if not matmul_ms or not softmax_ms:
        return row
    row["time_ratio"] = softmax_ms / matmul_ms
    if measured.profile.configuration:
        workload = Workload.from_configuration(measured.profile.configuration)
        if not workload.is_ours:
            return row
        matmuls = attention_matmuls(workload.size, workload.precision)
        softmax = attention_softmax(workload.size, workload.precision)
        row |= {
            "flops_ratio": softmax.flops / matmuls.flops,
            "bytes_ratio": softmax.bytes / matmuls.bytes,
            "matmul_tflops": matmuls.flops / matmul_ms / 1e9,
            "softmax_tflops": softmax.flops / softmax_ms / 1e9,
            "matmul_gbps": matmuls.bytes / matmul_ms / 1e6,
            "softmax_gbps": softmax.bytes / softmax_ms / 1e6,
        }
    return row
