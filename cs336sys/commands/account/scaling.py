"""``account scaling``: a training step on meshes of many devices, simulated from the time of one."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cs336sys.commands.account.communication import require_triable
from cs336sys.commands.options.board import is_given, read_memory_limit
from cs336sys.commands.options.output import OutputOptions
from cs336sys.commands.options.reading import among, at_least, check_choice, one_of, split_list
from cs336sys.errors import UsageError
from cs336sys.sizes import PRECISIONS, SIZES, choose_size
from cs336sys.workload import STATE_DTYPES

if TYPE_CHECKING:
    from cs336sys.accounting.hardware import Cluster
    from cs336sys.accounting.scaling import DeviceTime, Dtypes
    from cs336sys.results.model import Cell
    from cs336sys.sizes import ModelSize

_SCALINGS = ("strong", "weak")
_MESHES = ("any", "ddp", "fsdp", "tp")


# An H200 reaches 4.19e14 in a step of xl with fused kernels: docs/results/bench-turn-h200.jsonl.gz.
_FLOPS = 4e14


def scaling(
    ctx: typer.Context,
    size: Annotated[str, typer.Option(help=f"{', '.join(SIZES)}.", autocompletion=among(SIZES))] = "10b",
    context: Annotated[int | None, typer.Option(help="Tokens of a sequence. Default: the size's own.")] = None,
    precision: Annotated[str, typer.Option(help="What is computed in.", autocompletion=among(PRECISIONS))] = "bf16",
    gradient_dtype: Annotated[
        str, typer.Option(help="What ddp sends gradients in.", autocompletion=among(PRECISIONS))
    ] = "fp32",
    state_dtype: Annotated[
        str, typer.Option(help=f"AdamW's state: {', '.join(STATE_DTYPES)}.", autocompletion=among(STATE_DTYPES))
    ] = "fp32",
    devices: Annotated[list[str], typer.Option(help="Numbers of devices.")] = ["8,16,32,64,128,256,512,1024,2048,4096"],
    scaling: Annotated[
        list[str],
        typer.Option(help="strong: one batch; weak: one a device.", autocompletion=among(_SCALINGS)),
    ] = [",".join(_SCALINGS)],
    mesh: Annotated[
        list[str],
        typer.Option(help="any: the fastest; ddp, fsdp, tp: all devices in one.", autocompletion=among(_MESHES)),
    ] = ["any"],
    batch_size: Annotated[int, typer.Option(help="Sequences of all devices, for strong scaling.")] = 4096,
    device_batch_size: Annotated[int, typer.Option(help="Sequences of each device, for weak scaling.")] = 4,
    checkpoint: Annotated[str, typer.Option(help="none, block.", autocompletion=among(("none", "block")))] = "none",
    measured: Annotated[
        list[Path],
        typer.Option(
            help="Results of bench (one device's time), allreduce (bandwidth in a node, calls) and ddp (what "
            "communication costs computing).",
            show_default=False,
        ),
    ] = [],
    flops: Annotated[
        float | None,
        typer.Option(help=f"FLOP/s of a device, without --measured. Default: {_FLOPS:g}.", show_default=False),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Bytes/s to devices of the node. Default: as measured, else 4.5e11.", show_default=False),
    ] = None,
    node_bandwidth: Annotated[
        float, typer.Option(help="Bytes/s that a device sends to other nodes; 400 Gbit/s.")
    ] = 50e9,
    node_size: Annotated[int, typer.Option(help="Devices of a node.")] = 8,
    memory_limit: Annotated[str, typer.Option(help="What a rank may hold: 130GiB or 140GB.")] = "135GiB",
    plot: Annotated[Path | None, typer.Option(help="Also draw tokens/s and memory over the devices.")] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """The fastest mesh of ddp, fsdp and tp for 8 to 4096 devices: step, memory, what limits; a simulation.

    cs336sys account scaling --size 10b --measured bench.jsonl.gz --measured allreduce.jsonl.gz --plot scaling.png

    cs336sys account scaling --size 2.7b --flops 4e14 --node-bandwidth 2.5e10 --devices 64,512
    """
    from cs336sys.accounting.hardware import Cluster
    from cs336sys.accounting.scaling import CHECKPOINTING, Dtypes
    from cs336sys.report.account.rates import measured_ranks, measured_slowdown, read_measured
    from cs336sys.report.account.scaling import plot_scaling, scaling_table, simulate_scaling
    from cs336sys.report.outputs import check_plot

    chosen = choose_size(size, context=context)
    check_choice(precision, "--precision", PRECISIONS)
    check_choice(gradient_dtype, "--gradient-dtype", PRECISIONS)
    check_choice(state_dtype, "--state-dtype", STATE_DTYPES)
    check_choice(checkpoint, "--checkpoint", CHECKPOINTING)
    counts = split_list(devices, "--devices", at_least(1))
    require_triable(max(counts))
    batches = {"strong": batch_size, "weak": device_batch_size}
    _check_positive(
        {"--batch-size": batch_size, "--device-batch-size": device_batch_size, "--node-size": node_size},
        {"--bandwidth": bandwidth, "--node-bandwidth": node_bandwidth},
    )
    scalings = _scalings(ctx, scaling, batches)
    meshes = split_list(mesh, "--mesh", one_of(_MESHES))
    if plot is not None and "any" not in meshes:
        raise UsageError(f"--plot {plot} draws the fastest mesh and others beside it: give --mesh any, too")
    output.check()
    check_plot(plot)
    cells = read_measured(measured)
    dtypes = Dtypes(precision, gradient_dtype, state_dtype)
    time, notes = _device_time(cells, chosen, dtypes, flops)
    in_node, call_s, of_links = _links(cells, bandwidth)
    of_ranks = tuple(measured_ranks(cells).items()) if bandwidth is None else ()
    slowdown, slowdown_source = measured_slowdown(cells)
    memory = read_memory_limit(memory_limit)
    cluster = Cluster(node_size, in_node, node_bandwidth, call_s, memory, of_ranks, slowdown)
    simulated = [
        simulate_scaling(chosen, dtypes, scalings, counts, cluster, time, checkpoint, None if kind == "any" else kind)
        for kind in meshes
    ]
    notes += [*of_links, *_assumptions(cluster, slowdown_source)]
    output.emit([scaling_table(simulated, chosen, dtypes, cluster, time, notes)])
    if plot is not None:
        plot_scaling(simulated[meshes.index("any")], chosen, dtypes, cluster, time, checkpoint, plot)


def _check_positive(counts: dict[str, int], rates: dict[str, float | None]) -> None:
    for name, number in counts.items():
        if number < 1:
            raise UsageError(f"{name} {number}: must be at least 1")
    for name, rate in rates.items():
        if rate is not None and rate <= 0:
            raise UsageError(f"{name} {rate:g}: must be positive")


def _scalings(ctx: typer.Context, scaling: list[str], batches: dict[str, int]) -> dict[str, int]:
    """The batch of each kind of scaling that is asked for; an option of the other kind would be ignored."""
    scalings = {name: batches[name] for name in split_list(scaling, "--scaling", one_of(_SCALINGS))}
    for name, option in {"strong": "batch_size", "weak": "device_batch_size"}.items():
        if name not in scalings and is_given(ctx, option):
            given = f"--{option.replace('_', '-')} {batches[name]}"
            raise UsageError(f"{given}: is of {name} scaling; add that to --scaling, or leave it out")
    return scalings


def _assumptions(cluster: "Cluster", slowdown_source: str) -> list[str]:
    """What is assumed of links between nodes, and of what runs beside what."""
    return [
        f"{cluster.node_bytes_per_s / 1e9:.4g} GB/s a device between nodes of {cluster.node_devices} "
        "(--node-bandwidth, --node-size): assumed; tp ranks share a node, and a ring over several nodes is as fast as "
        "that.",
        f"Beside each other computing has {cluster.slowdown.computing:.3g} of its speed, and communication "
        f"{cluster.slowdown.communication:.3g} ({slowdown_source}).",
        "Assumed: fsdp and ddp communicate beside the computing of their pass, tp beside nothing; tp divides "
        "computing, activations and state without a rest.",
        "passes: parts of a rank's batch, one after the other.",
    ]


def _device_time(
    cells: "Sequence[Cell]", size: "ModelSize", dtypes: "Dtypes", flops: float | None
) -> "tuple[DeviceTime, list[str]]":
    """One device's time, measured or from FLOP/s, and a note that says which."""
    from dataclasses import replace

    from cs336sys.accounting.flops import model_flops
    from cs336sys.accounting.scaling import DeviceTime
    from cs336sys.report.account.rates import measured_device_time

    if flops is not None and cells:
        raise UsageError("--flops and --measured: both say how fast a device is; give one of them")
    if cells:
        time, source = measured_device_time(cells, size, dtypes.computed, dtypes.state)
    else:
        rate = _FLOPS if flops is None else flops
        if rate <= 0:
            raise UsageError(f"--flops {rate:g}: must be positive")
        time = DeviceTime(model_flops(replace(size, batch_size=1)) / rate, 0.0)
        source = f"{rate:g} FLOP/s, {'assumed' if flops is None else '--flops'}; no time for the optimizer"
    return time, [
        f"One device: {1e3 * time.sequence_s:.4g} ms a sequence, {1e3 * time.optimizer_s:.4g} ms for the optimizer "
        f"({source})."
    ]


def _links(cells: "Sequence[Cell]", bandwidth: float | None) -> tuple[float, float, list[str]]:
    """Bandwidth in a node, the time of a call, and notes that say where they come from."""
    from cs336sys.commands.account.communication import NVLINK_BYTES_PER_S
    from cs336sys.report.account.rates import measured_bandwidth, measured_call, measured_ranks

    has_collectives = any(cell.command == "allreduce" for cell in cells)
    call = measured_call(cells)
    note = f"{1e6 * call.value:.4g} us a collective, besides its bytes ({call.source})."
    if bandwidth is not None:
        return bandwidth, call.value, [f"{bandwidth / 1e9:.4g} GB/s in a node (--bandwidth).", note]
    if not has_collectives:
        return NVLINK_BYTES_PER_S, call.value, ["450 GB/s in a node: NVLink 4, assumed (--bandwidth).", note]
    rate, of_ranks = measured_bandwidth(cells), measured_ranks(cells)
    fewer = [f", {of_ranks[ranks] / 1e9:.4g} among {ranks} ranks" for ranks in sorted(of_ranks)[:-1]]
    return rate.value, call.value, [f"{rate.value / 1e9:.4g} GB/s in a node ({rate.source}){''.join(fewer)}.", note]
