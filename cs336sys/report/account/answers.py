"""The tables of ``account``: derived values with their derivations; ``docs/account.md`` describes the columns."""

from collections.abc import Sequence
from itertools import product

from cs336sys.accounting.communication import bucket_answers, bucketing_overhead_s, ring_answers, ring_times
from cs336sys.accounting.derivation import Derived, number_of
from cs336sys.accounting.parallelism import (
    PASSES,
    TP_BACKWARD,
    Layer,
    Mesh,
    best_whole_mesh,
    communication_s,
    layer_flops,
    most_devices,
    parallelism_answers,
)
from cs336sys.accounting.xxl import FeedForwardStack, TpuMesh, batch_answers, memory_answers
from cs336sys.report.numbers import Value, format_operand, in_shown_unit
from cs336sys.report.table import Column, Table

_COLUMNS = (
    Column("question", "question"),
    Column("quantity", "quantity"),
    Column("value", "value", "value", exact="exact", kind="kind"),
    Column("unit", "unit"),
    Column("derivation", "derivation"),
    Column("reason", "because"),
    Column("source", "source"),
)

# Units that count the same.
_KINDS = {"decimal_bytes": "bytes"}


def answers_table(name: str, title: str, answers: Sequence[Derived], notes: Sequence[str] = ()) -> Table:
    """One row for each derived value; ``notes`` say what is assumed."""
    rows: list[dict[str, Value]] = []
    for answer in answers:
        value, unit = in_shown_unit(answer.value, answer.unit)
        row: dict[str, Value] = {"quantity": answer.quantity, "value": value, "unit": unit, "source": answer.source}
        row |= {"exact": answer.value, "kind": _KINDS.get(answer.unit, answer.unit)}
        row |= {"question": answer.question or None, "reason": answer.reason or None}
        rows.append(row | {"derivation": answer.derivation(format_operand)})
    return Table(name, title, _COLUMNS, rows, notes)


# The tables of ``account collectives`` and ``account buckets``.


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


# The tables of ``account parallel`` and ``account xxl``.


_TITLES = {
    "dp": "Data parallel",
    "fsdp": "Fully sharded data parallel",
    "tp": "Tensor parallel",
    "fsdp-tp": "FSDP and TP on a mesh",
}
_SETTING = (
    "Assumed: one SwiGLU layer, matrix products alone; ring collectives without latency; B counts tokens, and weights, "
    "gradients and activations all have {bytes} bytes an element (--dtype)."
)
_OVERLAP = (
    "Assumed: communication overlaps with computing, so the layer is communication-bound where K > T; the largest "
    "numbers of devices need not be whole."
)


def parallel_tables(strategies: Sequence[str], layer: Layer, devices: int, mesh: Mesh | None = None) -> list[Table]:
    """A table of answers for each strategy, and one that compares them.

    Args:
        devices: of dp, fsdp and tp, and of the fastest mesh.
        mesh: of fsdp-tp in the place of the fastest one.
    """
    tables, summary = [], []
    for strategy in strategies:
        chosen = _mesh(strategy, layer, devices, mesh)
        answers = parallelism_answers(strategy, layer, chosen)
        count = f"{chosen.fsdp} x {chosen.tp} devices" if strategy == "fsdp-tp" else f"{chosen.devices} devices"
        title = f"{_TITLES[strategy]}: B {layer.batch}, D {layer.d_model}, D_FF {layer.d_ff}, {count}"
        notes = (_SETTING.format(bytes=layer.element_bytes), _OVERLAP)
        tables.append(answers_table(strategy, title, answers, notes))
        if strategy == "tp":
            tables.append(_tp_backward())
        summary.append(_summary_row(strategy, layer, chosen))
    return [*tables, _summary(summary)] if len(summary) > 1 else tables


def _mesh(strategy: str, layer: Layer, devices: int, mesh: Mesh | None) -> Mesh:
    if strategy == "fsdp-tp":
        # The fastest forward pass, axes sharing the network as they do on one kind of links.
        return mesh or Mesh(*best_whole_mesh(layer, devices, "forward", overlapped=False))
    return Mesh(tp=devices) if strategy == "tp" else Mesh(fsdp=devices)


def _tp_backward() -> Table:
    columns = (Column("equation", "equation"), Column("shape", "shape"), Column("reason", "because"))
    rows = [dict(zip(("equation", "shape", "reason"), row, strict=True)) for row in TP_BACKWARD]
    title = "tp_calcs (a): the backward pass of tensor parallelism, on device i, given dy"
    return Table(
        "tp_backward", title, columns, rows, ("* multiplies element by element; everything else by matrices.",)
    )


def _summary_row(strategy: str, layer: Layer, mesh: Mesh) -> dict[str, Value]:
    devices = f"{mesh.fsdp} x {mesh.tp}" if strategy == "fsdp-tp" else str(mesh.devices)
    row: dict[str, Value] = {"strategy": strategy, "devices": devices}
    for which in PASSES:
        computing_s = number_of(layer_flops(layer, which, fsdp=mesh.fsdp, tp=mesh.tp) / layer.flops_per_s)
        seconds = number_of(communication_s(strategy, layer, which, fsdp=mesh.fsdp, tp=mesh.tp, overlapped=False))
        row |= {
            f"{which}_computing_ms": computing_s * 1e3,
            f"{which}_communication_ms": seconds * 1e3,
            f"{which}_bound": "communication" if seconds > computing_s else "computing",
            f"{which}_most_devices": number_of(most_devices(strategy, layer, which, overlapped=False)),
        }
    return row


def _summary(rows: Sequence[dict[str, Value]]) -> Table:
    columns = [Column("strategy", "strategy"), Column("devices", "devices")]
    for which in PASSES:
        columns += [
            Column(f"{which}_computing_ms", f"{which} computing", "ms"),
            Column(f"{which}_communication_ms", f"{which} communication", "ms"),
            Column(f"{which}_bound", f"{which} bound by"),
            Column(f"{which}_most_devices", f"{which} most devices", "value"),
        ]
    notes = ("fsdp-tp: its axes share the network. dp communicates in the backward pass alone.",)
    return Table("strategies", "The strategies beside each other", columns, rows, notes)


def xxl_tables(
    stack: FeedForwardStack,
    tokens: int,
    gpu_bytes: float,
    device_bytes: float,
    mesh: TpuMesh,
    *,
    weight_copies: bool = False,
) -> list[Table]:
    """The two tables of problem ``communication_accounting``: memory, and the batch."""
    shape = f"D {stack.d_model}, F {stack.d_ff}, {stack.num_blocks} blocks"
    copies = (
        "a bf16 copy of every weight is counted too (--weight-copies)"
        if weight_copies
        else "bf16 copies of the weights are not counted (--weight-copies counts them)"
    )
    memory_notes = (
        f"Assumed: the handout names no batch for (a) and (b); here it is {tokens} tokens on each device (--tokens).",
        f"Assumed: saved for backward is the input of each linear layer; {copies}. Buffers for bf16 gradients on their "
        "way are not counted.",
        "1 GB is 1e9 bytes.",
    )
    batch_notes = (
        "Assumed: a batch counts tokens; the forward pass alone; collectives take their bytes over the bandwidth, "
        "without the factor (n - 1) / n, as in the book.",
        "The backward pass communicates and computes twice as much along FSDP, and has the same bound.",
    )
    memory = memory_answers(stack, tokens, gpu_bytes, device_bytes, weight_copies=weight_copies)
    mesh_title = f"X {mesh.x}, Y {mesh.y}, M_X {mesh.m_x}, M_Y {mesh.m_y}"
    return [
        answers_table("memory", f"Memory: {shape}", memory, memory_notes),
        answers_table("batch", f"Compute-bound batch: {mesh_title}", batch_answers(stack, mesh), batch_notes),
    ]
