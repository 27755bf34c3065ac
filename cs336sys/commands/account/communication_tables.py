"""The tables and pictures of ``account buckets``, ``parallel``, ``xxl`` and ``scaling``: what several devices need."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cs336sys.accounting import parallelism
from cs336sys.accounting.communication import bucket_answers, bucketing_overhead_s
from cs336sys.accounting.derivation import number_of
from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.parallelism import PARALLELISMS, PASSES, TP_BACKWARD, Layer, parallelism_answers
from cs336sys.accounting.scaling import SimulatedStep, Simulation
from cs336sys.accounting.sharding.partition import Mesh
from cs336sys.accounting.xxl import FeedForwardStack, TpuMesh, batch_answers, memory_answers
from cs336sys.tables.numbers import Value
from cs336sys.tables.outputs import Axes, new_axes, write_figure
from cs336sys.tables.predictions import answers_table
from cs336sys.tables.table import Column, Table, fill_row, named_columns, sentences


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


def parallel_tables(strategies: Sequence[str], layer: Layer, devices: int, mesh: Mesh | None = None) -> list[Table]:
    """Return a table of answers for each strategy, and one that compares them; ``mesh`` replaces fsdp-tp's fastest."""
    tables, summary_rows = [], []
    for strategy in strategies:
        record = PARALLELISMS[strategy]
        chosen, devices_text = Mesh(**dict.fromkeys(record.axes, devices)), str(devices)
        if record.has_two_axes:
            chosen = mesh or parallelism.fastest_mesh(layer, devices)
            devices_text = f"{chosen.fsdp} x {chosen.tp}"
        answers = parallelism_answers(strategy, layer, chosen)
        shape = f"B {layer.batch}, D {layer.d_model}, D_FF {layer.d_ff}, {devices_text} devices"
        notes = sentences(__name__, "parallel", element_bytes=layer.element_bytes)
        tables.append(answers_table(strategy, f"{record.title}: {shape}", answers, notes))
        if strategy == "tp":
            title = "tp_calcs (a): the backward pass of tensor parallelism, on device i, given dy"
            rows = [{"equation": equation, "shape": shape, "reason": why} for equation, shape, why in TP_BACKWARD]
            tables.append(Table("tp_backward", title, _TP_COLUMNS, rows, sentences(__name__, "tp_backward")))
        # The row that compares a strategy with others, its axes sharing the network.
        row: dict[str, Value] = {"strategy": strategy, "devices": devices_text}
        axes = {"fsdp": chosen.fsdp, "tp": chosen.tp}
        for which in PASSES:
            computing_s = number_of(parallelism.layer_flops(layer, which, **axes) / layer.flops_per_s)
            communication_s = number_of(parallelism.communication_s(strategy, layer, which, **axes, overlapped=False))
            row |= {
                f"{which}_computing_ms": computing_s * 1e3,
                f"{which}_communication_ms": communication_s * 1e3,
                f"{which}_bound": "communication" if communication_s > computing_s else "computing",
                f"{which}_most_devices": number_of(parallelism.most_devices(strategy, layer, which, overlapped=False)),
            }
        summary_rows.append(row)
    if len(summary_rows) > 1:
        notes = sentences(__name__, "strategies")
        tables.append(Table("strategies", "The strategies compared", _SUMMARY_COLUMNS, summary_rows, notes))
    return tables


_TP_COLUMNS = named_columns("equation", "shape", reason="because")
_SUMMARY_COLUMNS = [*named_columns("strategy", "devices")]
for _which in PASSES:
    _SUMMARY_COLUMNS += named_columns(f"{_which}_computing_ms", f"{_which}_communication_ms")
    _SUMMARY_COLUMNS.append(Column(f"{_which}_bound", f"{_which} bound by"))
    _SUMMARY_COLUMNS.append(Column(f"{_which}_most_devices", f"{_which} most devices", "value"))

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
        # Two axes split the devices so that they communicate for the shortest time.
        fsdp, tp = parallelism.best_split(layer, devices, which, overlapped=overlapped)
        axes = {"fsdp": fsdp, "tp": tp} if record.has_two_axes else dict.fromkeys(record.axes, devices)
        return number_of(parallelism.communication_s(strategy, layer, which, **axes, overlapped=overlapped))

    record = PARALLELISMS[strategy]
    if which not in record.communicates:
        return {}
    # By name, whether axes overlap; it makes no difference to a single axis.
    overlaps = {"axes overlapped": True, "axes sharing the network": False}
    overlaps = overlaps if record.has_two_axes else {"communication": True}
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


# The fastest step that fits, else the smallest; and the fastest without accumulation ("at once"), if memory were no
# matter. None where no mesh divides batch and heads.
Simulated = Mapping[tuple[str, int], tuple[SimulatedStep, SimulatedStep] | None]

_COLUMNS = (
    *named_columns("scaling", "devices"),
    Column("mesh", "mesh", value=lambda step: step.mesh.text),
    Column("batch_size", "batch", value=lambda step: step.batch_size),
    Column("accumulation", "passes", value=lambda step: step.accumulation),
    Column("step_ms", "step", "ms", lambda step: 1e3 * step.step_s),
    Column("computing_ms", "computing", "ms", lambda step: 1e3 * step.parts_s["computing"]),
    Column("exposed_fsdp_ms", "fsdp, exposed", "ms", lambda step: 1e3 * step.parts_s["fsdp"]),
    Column("exposed_ddp_ms", "ddp, exposed", "ms", lambda step: 1e3 * step.parts_s["ddp"]),
    Column("tensor_ms", "tp", "ms", lambda step: 1e3 * step.parts_s["tp"]),
    Column("optimizer_ms", "optimizer", "ms", lambda step: 1e3 * step.parts_s["optimizer"]),
    Column("tokens_per_s", "tokens/s", "count"),
    *named_columns(efficiency_percent="of one device's rate", tflops="a device"),
    Column("memory_gib", "peak of a rank", "gib", lambda step: step.memory_gib),
    Column("limit", "what limits"),
)


def simulate_scaling(
    simulation: Simulation, scalings: Mapping[str, int], devices: Sequence[int], dimension: str | None = None
) -> Simulated:
    """Find the fastest mesh for each kind of scaling and number of devices.

    Args:
        scalings: ``strong`` with the batch of all devices, ``weak`` with that of each.
        dimension: ``ddp``, ``fsdp`` or ``tp``, for meshes with all devices in that one.
    """
    return {
        (scaling, count): simulation.with_batch(batch * count if scaling == "weak" else batch).fastest(count, dimension)
        for scaling, batch in scalings.items()
        for count in devices
    }


def scaling_table(simulated: Sequence[Simulated], simulation: Simulation, notes: Sequence[str]) -> Table:
    """Return a row for each kind of mesh, scaling and number of devices; ``notes`` say where its rates come from."""
    size, capacity = simulation.size, simulation.cluster.memory_bytes
    rows: list[dict[str, Value]] = []
    for (scaling, count), fastest_steps in (item for of_mesh in simulated for item in of_mesh.items()):
        row: dict[str, Value] = {"scaling": scaling, "devices": count}
        rows.append(row)
        if fastest_steps is None:
            row["limit"] = "no mesh of so many devices divides the batch, and the heads inside a node"
            continue
        step, ignoring_memory = fastest_steps
        tokens_per_s = step.batch_size * size.context / step.step_s
        # If each device computed at the rate of one alone, without optimizer and communication.
        ideal_tokens_per_s = size.context / simulation.device.sequence_s * count
        limit = step.longest_part  # Unless memory limits it.
        if step.memory > capacity:
            limit = f"memory: no mesh fits into {capacity / GIB:.4g} GiB"
        elif ignoring_memory.step_s < step.step_s:
            time_and_memory = f"{1e3 * ignoring_memory.step_s:.4g} ms, {ignoring_memory.memory_gib:.4g} GiB"
            limit = f"memory: {ignoring_memory.mesh.text} at once: {time_and_memory}"
        row |= {"tokens_per_s": tokens_per_s, "efficiency_percent": 100 * tokens_per_s / ideal_tokens_per_s}
        row |= {"limit": limit, **fill_row(_COLUMNS, step), "tflops": simulation.flops_per_s(step) / 1e12}
    billions = count_parameters(size) / 1e9
    title = f"Simulated training of {size.name} ({billions:.2f} B parameters), context {size.context}"
    assumptions = sentences(__name__, "assumptions")
    return Table("scaling", f"{title}, {simulation.dtypes.text}", _COLUMNS, rows, [*notes, *assumptions])


def plot_simulated_scaling(simulated: Mapping[str, Simulated], simulation: Simulation, path: Path) -> None:
    """Draw tokens/s of a device over the devices, above a rank's memory, with a curve for each kind of mesh by name."""
    size, capacity = simulation.size, simulation.cluster.memory_bytes
    scalings = dict.fromkeys(scaling for of_mesh in simulated.values() for scaling, _ in of_mesh)
    figure, axes = new_axes(1 + 5.5 * len(scalings), 7.5, rows=2, columns=len(scalings), sharex="col")
    for (rates, memories), scaling in zip(axes.T, scalings, strict=True):
        for name, of_mesh in simulated.items():
            steps = {count: pair[0] for (kind, count), pair in of_mesh.items() if kind == scaling and pair is not None}
            style = {"marker": "o", "color": "black"} if name == "any" else {"marker": ".", "alpha": 0.8}
            tokens = [step.batch_size * size.context / step.step_s / count for count, step in steps.items()]
            label = "fastest that fits" if name == "any" else name
            rates.plot(list(steps), tokens, label=label, **style)
            memories.plot(list(steps), [step.memory_gib for step in steps.values()], label=label, **style)
        one_device = size.context / simulation.device.sequence_s
        rates.axhline(one_device, linestyle=":", color="grey", label="one device, passes alone")
        memories.axhline(capacity / GIB, linestyle=":", color="grey", label="a device's memory")
        rates.set_title(f"{scaling} scaling")
        counts = dict.fromkeys(count for of_mesh in simulated.values() for _, count in of_mesh)
        for drawing in (rates, memories):
            drawing.set_xscale("log", base=2)
            drawing.set_xticks(list(counts), [str(count) for count in counts])
            drawing.grid(alpha=0.3)
            drawing.legend(fontsize=7)
        rates.set_ylim(bottom=0)
        memories.set(yscale="log", xlabel="devices")
    axes[0, 0].set_ylabel("tokens/s of a device")
    axes[1, 0].set_ylabel("peak of a rank, GiB")
    title = f"{size.name}, context {size.context}, {simulation.dtypes.text}: a simulation"
    figure.suptitle(title, fontsize=10)
    write_figure(figure, path)
