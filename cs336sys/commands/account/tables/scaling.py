"""The table and the picture of ``account scaling``."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.scaling import SimulatedStep, Simulation
from cs336sys.accounting.sharding.partition import Mesh
from cs336sys.errors import UsageError
from cs336sys.tables.numbers import Value
from cs336sys.tables.outputs import new_axes, write_figure
from cs336sys.tables.table import Column, Table, fill_row, named_columns, sentences

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
    rows = [_scaling_row(*setting, steps, simulation) for of_mesh in simulated for setting, steps in of_mesh.items()]
    size = simulation.size
    billions = count_parameters(size) / 1e9
    title = f"Simulated training of {size.name} ({billions:.2f} B parameters), context {size.context}"
    assumptions = sentences(__name__, "assumptions")
    return Table("scaling", f"{title}, {simulation.dtypes.text}", _COLUMNS, rows, [*notes, *assumptions])


def _scaling_row(
    scaling: str, count: int, fastest_steps: tuple[SimulatedStep, SimulatedStep] | None, simulation: Simulation
) -> dict[str, Value]:
    """Return the row of a step, the fastest that fits or else the smallest; the second, at once, may not fit."""
    row: dict[str, Value] = {"scaling": scaling, "devices": count}
    if fastest_steps is None:
        return row | {"limit": "no mesh of so many devices divides the batch, and the heads inside a node"}
    step, ignoring_memory = fastest_steps
    context, capacity = simulation.size.context, simulation.cluster.memory_bytes
    tokens_per_s = step.batch_size * context / step.step_s
    # If each device computed at the rate of one alone, without optimizer and communication.
    ideal_tokens_per_s = context / simulation.device.sequence_s * count
    limit = step.longest_part  # Unless memory limits it.
    if step.memory > capacity:
        limit = f"memory: no mesh fits into {capacity / GIB:.4g} GiB"
    elif ignoring_memory.step_s < step.step_s:
        time_and_memory = f"{1e3 * ignoring_memory.step_s:.4g} ms, {ignoring_memory.memory_gib:.4g} GiB"
        limit = f"memory: {ignoring_memory.mesh.text} at once: {time_and_memory}"
    row |= {"tokens_per_s": tokens_per_s, "efficiency_percent": 100 * tokens_per_s / ideal_tokens_per_s, "limit": limit}
    return row | fill_row(_COLUMNS, step) | {"tflops": simulation.flops_per_s(step) / 1e12}


def plot_simulated_scaling(simulated: Simulated, simulation: Simulation, path: Path) -> None:
    """Draw tokens/s of a device over the devices, by strategy and by the fastest mesh, above a rank's memory."""
    size, capacity = simulation.size, simulation.cluster.memory_bytes
    scalings = list(dict.fromkeys(scaling for scaling, _ in simulated))
    figure, axes = new_axes(1 + 5.5 * len(scalings), 7.5, rows=2, columns=len(scalings), sharex="col")
    for column, scaling in enumerate(scalings):
        pairs = [(count, pair) for (name, count), pair in simulated.items() if name == scaling and pair is not None]
        steps = {count: fastest_that_fits for count, (fastest_that_fits, _at_once) in pairs}
        rates, memories = axes[0, column], axes[1, column]
        for name, curve in _scaling_curves(steps, simulation).items():
            style = {"marker": "o", "color": "black"} if name == "fastest that fits" else {"marker": ".", "alpha": 0.8}
            tokens = [step.batch_size * size.context / step.step_s / count for count, step in curve.items()]
            rates.plot(list(curve), tokens, label=name, **style)
            memories.plot(list(curve), [step.memory_gib for step in curve.values()], label=name, **style)
        one_device = size.context / simulation.device.sequence_s
        rates.axhline(one_device, linestyle=":", color="grey", label="one device, passes alone")
        memories.axhline(capacity / GIB, linestyle=":", color="grey", label="a device's memory")
        rates.set_title(f"{scaling} scaling")
        for drawing in (rates, memories):
            drawing.set_xscale("log", base=2)
            drawing.set_xticks(list(steps), [str(count) for count in steps])
            drawing.grid(alpha=0.3)
            drawing.legend(fontsize=7)
        rates.set_ylim(bottom=0)
        memories.set(yscale="log", xlabel="devices")
    axes[0, 0].set_ylabel("tokens/s of a device")
    axes[1, 0].set_ylabel("peak of a rank, GiB")
    title = f"{size.name}, context {size.context}, {simulation.dtypes.text}: a simulation"
    figure.suptitle(title, fontsize=10)
    write_figure(figure, path)


def _scaling_curves(steps: Mapping[int, SimulatedStep], simulation: Simulation) -> dict[str, dict[int, SimulatedStep]]:
    """Return, by name, steps by number of devices: the fastest that fits, and single strategies where they can."""
    # The fewest devices that share layers, and the most.
    widths = [tp for tp in (2, simulation.cluster.node_devices) if tp > 1]
    curves: dict[str, dict[int, SimulatedStep]] = {"fastest that fits": dict(steps), "ddp": {}, "fsdp": {}}
    curves |= {f"fsdp, tp={tp}": {} for tp in widths}
    for count, step in steps.items():
        meshes = {"ddp": Mesh(ddp=count), "fsdp": Mesh(fsdp=count)}
        meshes |= {f"fsdp, tp={tp}": Mesh(fsdp=count // tp, tp=tp) for tp in widths if count % tp == 0}
        for name, mesh in meshes.items():
            # A mesh may not divide the batch or the heads.
            with contextlib.suppress(UsageError):
                curves[name][count] = simulation.with_batch(step.batch_size).with_least_accumulation(mesh)
    return {name: curve for name, curve in curves.items() if curve}
