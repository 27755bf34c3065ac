"""The tables of ``account``: derived values with their derivations; ``docs/account.md`` describes the columns."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cs336sys.accounting import parallelism
from cs336sys.accounting.communication import bucket_answers, bucketing_overhead_s
from cs336sys.accounting.derivation import number_of
from cs336sys.accounting.parallelism import PASSES, TP_BACKWARD, Layer, parallelism_answers
from cs336sys.accounting.sharding.partition import Mesh
from cs336sys.accounting.xxl import FeedForwardStack, TpuMesh, batch_answers, memory_answers
from cs336sys.tables.numbers import Value
from cs336sys.tables.outputs import Axes, new_axes, write_figure
from cs336sys.tables.predictions import answers_table
from cs336sys.tables.table import Column, Table, named_columns, sentences


def bucket_tables(
    gradient_bytes: float, bucket_bytes: Sequence[float], bytes_per_s: float, call_s: float, title: str
) -> list[Table]:
    """Return the formulas at the first bucket size, and the overhead of all; ``title`` says of whose gradients."""
    rows = []
    for size in bucket_bytes:
        buckets = max(1.0, gradient_bytes / size)  # A bucket that is larger than all gradients holds them all.
        transfer_s = gradient_bytes / (buckets * bytes_per_s)  # Of one bucket: only the last one's is not hidden.
        overhead_s = number_of(bucketing_overhead_s(gradient_bytes, buckets, bytes_per_s, call_s))
        row = {"bucket_mb": size / 1e6, "buckets": buckets, "transfer_ms": 1e3 * transfer_s}
        rows.append(row | {"calls_ms": 1e3 * (overhead_s - transfer_s), "overhead_ms": 1e3 * overhead_s})
    columns = (
        Column("bucket_mb", "bucket", "MB"),
        *named_columns("buckets", transfer_ms="last transfer", calls_ms="calls", overhead_ms="overhead"),
    )
    first_count = max(1, round(gradient_bytes / bucket_bytes[0]))  # Whole, to be read: "overhead of 4 buckets".
    answers = bucket_answers(gradient_bytes, first_count, bytes_per_s, call_s)
    return [
        answers_table("formulas", f"Gradient buckets: {title}", answers),
        Table("buckets", f"Overhead by bucket size: {title}", columns, rows, sentences(__name__, "buckets")),
    ]


_TITLES = {
    "dp": "Data parallel",
    "fsdp": "Fully sharded data parallel",
    "tp": "Tensor parallel",
    "fsdp-tp": "FSDP and TP on a mesh",
}


def parallel_tables(strategies: Sequence[str], layer: Layer, devices: int, mesh: Mesh | None = None) -> list[Table]:
    """Return a table of answers for each strategy, and one that compares them; ``mesh`` replaces fsdp-tp's fastest."""
    tables, summary_rows = [], []
    for strategy in strategies:
        chosen = _choose_mesh(strategy, layer, devices, mesh)
        answers = parallelism_answers(strategy, layer, chosen)
        shape = f"B {layer.batch}, D {layer.d_model}, D_FF {layer.d_ff}, {_devices_text(strategy, chosen)} devices"
        notes = sentences(__name__, "parallel", element_bytes=layer.element_bytes)
        tables.append(answers_table(strategy, f"{_TITLES[strategy]}: {shape}", answers, notes))
        if strategy == "tp":
            title = "tp_calcs (a): the backward pass of tensor parallelism, on device i, given dy"
            rows = [{"equation": equation, "shape": shape, "reason": why} for equation, shape, why in TP_BACKWARD]
            tables.append(Table("tp_backward", title, _TP_COLUMNS, rows, sentences(__name__, "tp_backward")))
        summary_rows.append(_summary_row(strategy, layer, chosen))
    if len(summary_rows) > 1:
        notes = sentences(__name__, "strategies")
        tables.append(Table("strategies", "The strategies compared", _SUMMARY_COLUMNS, summary_rows, notes))
    return tables


def _devices_text(strategy: str, mesh: Mesh) -> str:
    return f"{mesh.fsdp} x {mesh.tp}" if strategy == "fsdp-tp" else str(mesh.devices)


_TP_COLUMNS = named_columns("equation", "shape", reason="because")
_SUMMARY_COLUMNS = [*named_columns("strategy", "devices")]
for _which in PASSES:
    _SUMMARY_COLUMNS += named_columns(f"{_which}_computing_ms", f"{_which}_communication_ms")
    _SUMMARY_COLUMNS.append(Column(f"{_which}_bound", f"{_which} bound by"))
    _SUMMARY_COLUMNS.append(Column(f"{_which}_most_devices", f"{_which} most devices", "value"))


def _choose_mesh(strategy: str, layer: Layer, devices: int, mesh: Mesh | None) -> Mesh:
    """Return how a strategy arranges the devices; ``mesh`` is the user's choice for fsdp-tp, if there is one."""
    if strategy == "fsdp-tp":
        # Else the mesh with the fastest forward pass, if its axes take turns to use the network.
        return mesh or parallelism.best_whole_mesh(layer, devices, "forward", overlapped=False)
    return Mesh(tp=devices) if strategy == "tp" else Mesh(fsdp=devices)


def _summary_row(strategy: str, layer: Layer, mesh: Mesh) -> dict[str, Value]:
    """Return the row that compares a strategy with others, its axes sharing the network."""
    row: dict[str, Value] = {"strategy": strategy, "devices": _devices_text(strategy, mesh)}
    axes = {"fsdp": mesh.fsdp, "tp": mesh.tp}
    for which in PASSES:
        computing_s = number_of(parallelism.layer_flops(layer, which, **axes) / layer.flops_per_s)
        communication_s = number_of(parallelism.communication_s(strategy, layer, which, **axes, overlapped=False))
        row |= {
            f"{which}_computing_ms": computing_s * 1e3,
            f"{which}_communication_ms": communication_s * 1e3,
            f"{which}_bound": "communication" if communication_s > computing_s else "computing",
            f"{which}_most_devices": number_of(parallelism.most_devices(strategy, layer, which, overlapped=False)),
        }
    return row


_POINTS = 121


def plot_parallel(strategies: Sequence[str], layer: Layer, path: Path) -> None:
    """Draw computing and communication time over the devices, forward above backward, and where they cross."""
    figure, axes = new_axes(1 + 3.6 * len(strategies), 6.5, rows=len(PASSES), columns=len(strategies), sharex="col")
    for column, strategy in enumerate(strategies):
        curves = {which: _curves(strategy, layer, which) for which in PASSES}
        last_crossing = max(crossing for which in PASSES for _, crossing in curves[which].values())
        # From one device to beyond the last crossing, evenly spaced on a logarithmic axis.
        counts = [(8 * last_crossing) ** (point / (_POINTS - 1)) for point in range(_POINTS)]
        for drawing, which in zip(axes[:, column], PASSES, strict=True):
            _draw_pass(drawing, layer, which, curves[which], counts)
        axes[0, column].set_title(strategy)
        axes[-1, column].set_xlabel("devices")
    for drawing, which in zip(axes[:, 0], PASSES, strict=True):
        drawing.set_ylabel(f"{which}, ms")
    rates = f"C {layer.flops_per_s:g} FLOP/s, W {layer.bytes_per_s:g} B/s"
    figure.suptitle(f"B {layer.batch}, D {layer.d_model}, D_FF {layer.d_ff}\n{rates}", fontsize=10)
    write_figure(figure, path)


def _draw_pass(drawing: Axes, layer: Layer, which: str, curves: dict, counts: Sequence[float]) -> None:
    """Draw one strategy's pass: computing, each of ``curves``, and the number of devices where they cross."""

    def computing_ms(devices: float) -> float:
        # The FLOPs of a device are the same whether batch or matrices are split.
        return 1e3 * number_of(parallelism.layer_flops(layer, which, fsdp=devices) / layer.flops_per_s)

    drawing.plot(counts, [computing_ms(n) for n in counts], color="C0", label="computing")
    # A white box, as other curves may cross the number.
    box: dict[str, Any] = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5}
    style: dict[str, Any] = {"fontsize": 9, "textcoords": "offset points", "bbox": box}
    for number, (name, (seconds, crossing)) in enumerate(curves.items(), start=1):
        color = f"C{number}"
        # One device communicates nothing, which a logarithmic axis cannot show.
        drawing.plot(counts[1:], [1e3 * seconds(n) for n in counts[1:]], color=color, label=name)
        drawing.axvline(crossing, color=color, linestyle=":", linewidth=1)
        drawing.annotate(f"{crossing:.4g}", (crossing, computing_ms(crossing)), xytext=(4, 6), color=color, **style)
    drawing.set_xscale("log", base=2)
    drawing.set_yscale("log")
    drawing.grid(alpha=0.3)
    drawing.legend(fontsize=7)


def _curves(strategy: str, layer: Layer, which: str) -> dict[str, tuple[Callable[[float], float], float]]:
    """Return curves by name: the seconds that so many devices communicate, and at how many they compute as long."""

    def seconds(devices: float, overlapped: bool) -> float:
        # For fsdp-tp, which is not among these, the split of the devices that communicates for the shortest time.
        axes = {"dp": (devices, 1), "fsdp": (devices, 1), "tp": (1, devices)}
        fsdp, tp = axes.get(strategy) or parallelism.best_split(layer, devices, which, overlapped=overlapped)
        return number_of(parallelism.communication_s(strategy, layer, which, fsdp=fsdp, tp=tp, overlapped=overlapped))

    if (strategy, which) == ("dp", "forward"):
        return {}  # It does not communicate.
    # By name, whether axes overlap; it makes no difference to a single axis.
    overlaps = {"axes overlapped": True, "axes sharing the network": False}
    overlaps = overlaps if strategy == "fsdp-tp" else {"communication": True}
    most_devices = partial(parallelism.most_devices, strategy, layer, which)
    return {
        name: (partial(seconds, overlapped=overlapped), number_of(most_devices(overlapped=overlapped)))
        for name, overlapped in overlaps.items()
    }


def xxl_tables(
    stack: FeedForwardStack, tokens: int, gpu_bytes: float, device_bytes: float, mesh: TpuMesh, *, weight_copies: bool
) -> list[Table]:
    """Return the two tables of problem ``communication_accounting``: memory, and the batch."""
    shape = f"D {stack.d_model}, F {stack.d_ff}, {stack.num_blocks} blocks"
    memory_notes = sentences(__name__, "xxl_memory", tokens=tokens, weight_copies=weight_copies)
    batch_notes = sentences(__name__, "xxl_batch")
    memory = memory_answers(stack, tokens, gpu_bytes, device_bytes, weight_copies=weight_copies)
    mesh_title = f"X {mesh.x}, Y {mesh.y}, M_X {mesh.m_x}, M_Y {mesh.m_y}"
    return [
        answers_table("memory", f"Memory: {shape}", memory, memory_notes),
        answers_table("batch", f"Compute-bound batch: {mesh_title}", batch_answers(stack, mesh), batch_notes),
    ]
