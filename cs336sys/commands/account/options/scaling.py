"""``account scaling``: a training step on meshes of many devices, simulated from the time of one."""

from pathlib import Path
from typing import Annotated

import typer

from cs336sys.command_line.options.output import OutputOptions
from cs336sys.command_line.options.reading import choice, is_given, read_memory_limit, reads_file, setting, writes_file
from cs336sys.commands.account import MOST_DEVICES
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import PRECISIONS, SIZES, choose_size
from cs336sys.settings.training import STATE_DTYPES

_DEVICES = [2**power for power in range(3, 13)]
_SCALINGS = ("strong", "weak")
_MESHES = ("any", "ddp", "fsdp", "tp")
_CHECKPOINTING = ("none", "block")


def scaling(
    ctx: typer.Context,
    size: Annotated[str, choice(SIZES, parser=str)] = "10b",
    context: Annotated[int | None, setting(help="Tokens of a sequence. Default: the size's own.")] = None,
    precision: Annotated[str, choice(PRECISIONS, "What is computed in.")] = "bf16",
    gradient_dtype: Annotated[str, choice(PRECISIONS, "What ddp sends gradients in.")] = "fp32",
    state_dtype: Annotated[str, choice(STATE_DTYPES, f"AdamW's state: {', '.join(STATE_DTYPES)}.")] = "fp32",
    devices: Annotated[list[int], setting(help="Numbers of devices.", min=1, max=MOST_DEVICES)] = _DEVICES,
    scaling: Annotated[list[str], choice(_SCALINGS, "strong: one batch; weak: one a device.")] = list(_SCALINGS),
    mesh: Annotated[list[str], choice(_MESHES, "any: the fastest; ddp, fsdp, tp: all devices in one.")] = ["any"],
    batch_size: Annotated[int, setting(help="Sequences of all devices, for strong scaling.", min=1)] = 4096,
    device_batch_size: Annotated[int, setting(help="Sequences of each device, for weak scaling.", min=1)] = 4,
    checkpoint: Annotated[str, choice(_CHECKPOINTING)] = "none",
    measured: Annotated[
        list[Path],
        reads_file(
            help="Results of bench (one device's time), allreduce (bandwidth in a node, calls) and ddp (what "
            "communication costs computing)."
        ),
    ] = [],
    flops: Annotated[float | None, setting(help="FLOP/s of a device, without --measured. Default: 4e+14.")] = None,
    bandwidth: Annotated[
        float | None, setting(help="Bytes/s to devices of the node. Default: as measured, else 4.5e11.", min=1)
    ] = None,
    node_bandwidth: Annotated[
        float, setting(help="Bytes/s that a device sends to other nodes; 400 Gbit/s.", min=1)
    ] = 50e9,
    node_size: Annotated[int, setting(help="Devices of a node.", min=1)] = 8,
    memory_limit: Annotated[str, setting(help="Memory limit of a rank: 130GiB or 140GB.")] = "135GiB",
    plot: Annotated[Path | None, writes_file(help="Also draw tokens/s and memory over the devices.")] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """The fastest mesh of ddp, fsdp and tp for 8 to 4096 devices: step, memory, what limits; a simulation.

    cs336sys account scaling --size 10b --measured bench.jsonl.gz --measured allreduce.jsonl.gz --plot scaling.png

    cs336sys account scaling --size 2.7b --flops 4e14 --node-bandwidth 2.5e10 --devices 64,512
    """
    from cs336sys.accounting.scaling import Dtypes, Simulation
    from cs336sys.commands.account.tables.rates import device_time, read_measured, simulated_cluster
    from cs336sys.commands.account.tables.scaling import plot_simulated_scaling, scaling_table, simulate_scaling

    model = choose_size(size, context=context)
    scalings = _scalings(ctx, scaling, {"strong": batch_size, "weak": device_batch_size})
    if plot is not None and "any" not in mesh:
        raise UsageError(f"--plot {plot} compares the fastest mesh with others: add --mesh any")
    output.check(plot=plot)
    cells = read_measured(measured)
    dtypes = Dtypes(precision, gradient_dtype, state_dtype)
    time, time_note = device_time(cells, model, dtypes, flops)
    limit_bytes = read_memory_limit(memory_limit)
    cluster, cluster_notes = simulated_cluster(cells, bandwidth, node_bandwidth, node_size, limit_bytes)
    simulation = Simulation(model, dtypes, cluster, time, checkpoint)
    simulated = [simulate_scaling(simulation, scalings, devices, None if kind == "any" else kind) for kind in mesh]
    output.emit([scaling_table(simulated, simulation, [time_note, *cluster_notes])])
    if plot is not None:
        plot_simulated_scaling(simulated[mesh.index("any")], simulation, plot)


def _scalings(ctx: typer.Context, scaling: list[str], batches: dict[str, int]) -> dict[str, int]:
    """Return the batch of each requested kind of scaling, and refuse an option that would be ignored."""
    scalings = {name: batches[name] for name in scaling}
    for name, option in {"strong": "batch_size", "weak": "device_batch_size"}.items():
        if name not in scalings and is_given(ctx, option):
            option_text = f"--{option.replace('_', '-')} {batches[name]}"
            raise UsageError(f"{option_text} only affects {name} scaling: add {name} to --scaling, or leave it out")
    return scalings
