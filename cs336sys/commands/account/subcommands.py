"""``cs336sys account``: the functions of its subcommands, which :mod:`cs336sys.commands.account` groups."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.hardware import H200_FLOPS_PER_S, NVLINK_BYTES_PER_S
from cs336sys.accounting.parallelism import PARALLELISMS, Layer, Mesh
from cs336sys.accounting.sharding.step import OWN_SHARDING_STRATEGIES, ShardedStep
from cs336sys.accounting.step_time.prediction import PREDICTED_STRATEGIES, StepConfiguration
from cs336sys.accounting.step_time.rates import GPUS, h200_rates, rates_of, read_rates
from cs336sys.accounting.xxl import XXL, FeedForwardStack, TpuMesh
from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions
from cs336sys.command_line.options.reading import (
    among,
    byte_count,
    choice,
    is_given,
    read_memory_limit,
    read_value,
    reads_file,
    setting,
    writes_file,
)
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import ELEMENT_BYTES, MOST_RANKS, PRECISIONS, SIZES, choose_size
from cs336sys.settings.strategies import STRATEGIES
from cs336sys.settings.training import ATTENTION, MODES, STATE_DTYPES, Workload

MOST_DEVICES = 1_000_000  # All meshes of a number of devices are tried: at 10^12 that goes on for hours.

_IMPLEMENTATIONS = ("eager", "flash")


def memory(
    model: options.SizeOptions = options.SizeOptions(["xl"]),
    world_size: Annotated[list[int], setting(help="Numbers of ranks.", min=1, max=MOST_RANKS)] = [2],
    strategy: Annotated[list[str], choice(OWN_SHARDING_STRATEGIES)] = list(OWN_SHARDING_STRATEGIES),
    mode: Annotated[list[str], choice(MODES)] = ["train"],
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    parameter_dtype: Annotated[
        str, choice(PRECISIONS, "Of parameters and gradients; bf16 and fp16 have fp32 masters.")
    ] = "fp32",
    attention: Annotated[str, choice(ATTENTION)] = "reference",
    plot: Annotated[Path | None, writes_file(help="Also draw the peaks to this picture file.")] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Count the memory of a rank by component, at the handout's three times and its peak, for each sharing of state.

    cs336sys account memory --size xl,2.7b --world-size 2 --strategy none,optimizer,optimizer-flat,fsdp

    cs336sys account memory --size 2.7b --context 128,2048 --world-size 1 --strategy none --mode forward,train
    """
    from cs336sys.commands.account.model_tables import plot_rank_memory, rank_memory_tables

    parameter_bytes = ELEMENT_BYTES[parameter_dtype]
    output.check(plot=plot)
    steps = []
    for size, dtype, passes, ranks, name in product(model.sizes(), precision.precisions(), mode, world_size, strategy):
        computed = dtype or size.precision  # The size's own, unless another is asked for.
        steps.append(ShardedStep(name, size, ranks, computed, attention, mode=passes, parameter_bytes=parameter_bytes))
    output.emit(rank_memory_tables(steps))
    if plot is not None:
        plot_rank_memory(steps, plot)


def activations(
    model: options.SizeOptions = options.SizeOptions(["2.7b"]),
    precision: Annotated[str, choice(PRECISIONS, f"{', '.join(PRECISIONS)} (autocast).")] = "fp32",
    attention: Annotated[str, choice(ATTENTION)] = "reference",
    output: OutputOptions = OutputOptions(),
) -> None:
    """List the largest tensors of a forward pass, what one block saves for backward, and the gradients it makes there.

    cs336sys account activations --size 2.7b --context 128,512,2048
    """
    from cs336sys.commands.account.model_tables import activations_tables

    output.check()
    output.emit(activations_tables(model.sizes(), precision, attention))


def flops(model: options.SizeOptions = options.SizeOptions(["2.7b"]), output: OutputOptions = OutputOptions()) -> None:
    """Count FLOPs of a forward pass by component, softmax against the products of attention, and what AdamW moves.

    cs336sys account flops --size small,2.7b --context 1024
    """
    from cs336sys.commands.account.model_tables import flops_tables

    output.check()
    output.emit(flops_tables(model.sizes()))


def attention(
    batch_size: Annotated[int, setting(help="Batch size times heads.", min=1)] = 8,
    head_dim: Annotated[list[int], setting(help="Head dimensions.", min=1)] = [16, 32, 64, 128],
    context: Annotated[list[int], setting(help="Sequence lengths.", min=1)] = [256, 1024, 4096, 8192, 16384],
    dtype: Annotated[str, choice(PRECISIONS)] = "fp32",
    causal: Annotated[bool, setting("--causal/--full", help="Causal mask, or none.")] = False,
    implementation: Annotated[list[str], choice(_IMPLEMENTATIONS)] = list(_IMPLEMENTATIONS),
    capacity_gib: Annotated[float, setting(help="Memory of the GPU.", min=1e-3, max=1e6)] = 80.0,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Count memory of attention alone over the handout's grid, its growth, and the smallest shape that does not fit.

    cs336sys account attention --capacity-gib 24 --causal
    """
    from cs336sys.commands.account.model_tables import attention_tables

    output.check()
    capacity = capacity_gib * 2**30
    output.emit(attention_tables(batch_size, context, head_dim, dtype, implementation, capacity, causal=causal))


def step(
    model: options.SizeOptions = options.SizeOptions(["2.7b"]),
    precision: options.PrecisionOptions = options.PrecisionOptions(["bf16"]),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    checkpoint: Annotated[
        str,
        setting(
            help="none, block, every=K, nested, keep=N (fused kernels).",
            autocompletion=among(("none", "block", "every=", "nested", "keep=")),
        ),
    ] = "none",
    accumulation: Annotated[int, setting(help="Micro-batches of a step.", min=1)] = 1,
    world_size: Annotated[int, setting(help="Ranks, each with a batch of its own.", min=1)] = 1,
    strategy: Annotated[
        str | None,
        choice(
            PREDICTED_STRATEGIES, "bucketed, optimizer, optimizer-flat, fsdp, ... Default: bucketed with several ranks."
        ),
    ] = None,
    gradient_dtype: Annotated[str, choice(PRECISIONS, "What buckets are sent in.")] = "fp32",
    gpu: Annotated[
        str | None, choice(GPUS, f"{', '.join(GPUS)}, or as torch names it. Default: --rates', or h200.", parser=str)
    ] = None,
    rates: Annotated[Path | None, reads_file(help="Rates of your GPU, from doctor --ceilings.")] = None,
    launch_us: Annotated[
        float | None, setting(help="CPU microseconds of a kernel launch. Default: usual.", min=0, max=1e4)
    ] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Predict a training step term by term: work over measured rates, launches, exposed communication; and the error.

    cs336sys account step --size 2.7b --gpu h100 --world-size 8

    cs336sys account step --size xl --compile off,block --attention flash --optimizer fused --cuda-graph off,on
    """
    from cs336sys.accounting.step_time.choice import refusal
    from cs336sys.commands.account.model_tables import step_tables

    if strategy is not None and world_size == 1:
        raise UsageError(f"--strategy {strategy}: one rank shares nothing; add --world-size")
    measured = h200_rates() if rates is None else read_rates(rates)
    gpu_rates = measured if gpu is None else rates_of(gpu, measured)
    output.check()
    sharing = strategy or ("bucketed" if world_size > 1 else None)  # Among ranks; as the option's default says.
    if gradient_dtype != "fp32" and (sharing is None or STRATEGIES[sharing].shares_updates):
        raise UsageError(f"--gradient-dtype {gradient_dtype}: {sharing or 'one rank'} has no choice; choose bucketed")
    configurations = []
    for size, dtype, settings in product(model.sizes(), precision.precisions(), implementation.combinations(Workload)):
        training = Workload(size, "train", dtype or size.precision, **settings)  # None: the size's.
        configuration = StepConfiguration(training, checkpoint, accumulation, sharing, world_size, gradient_dtype)
        if (reason := refusal(configuration)) is not None:
            raise UsageError(reason)
        configurations.append(configuration)
    output.emit(step_tables(configurations, gpu_rates, None if launch_us is None else launch_us / 1e6))


def buckets(
    size: Annotated[str, choice(SIZES, f"Whose gradients: {', '.join(SIZES)}.", parser=str)] = "xl",
    gradients: Annotated[str | None, setting(help="All gradients, s, instead of the size's: 8GB.")] = None,
    gradient_dtype: Annotated[str, choice(PRECISIONS, "What gradients are sent in.")] = "fp32",
    bucket_mb: Annotated[list[float], setting(help="Bucket sizes, 1e6 bytes.", min=1e-6, max=1e6)] = [1, 10, 100, 1000],
    bandwidth: Annotated[float, setting(help="Algorithm bandwidth of the all-reduce in bytes/s, w.", min=1)] = 320e9,
    call_us: Annotated[float, setting(help="Cost of a communication call in microseconds, o.", min=1e-3)] = 20.0,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Find the bucket size with the least wait after the backward pass of data parallel training, and that wait.

    cs336sys account buckets --size xl --bandwidth 19.7e9 --call-us 30
    """
    from cs336sys.commands.account.communication_tables import bucket_tables

    element_bytes = ELEMENT_BYTES[gradient_dtype]
    if gradients is None:
        total, title = float(element_bytes * count_parameters(choose_size(size))), f"{size}, {gradient_dtype}"
    else:
        total, title = float(read_value(gradients, "--gradients", byte_count)), gradients
    output.check()
    output.emit(bucket_tables(total, [1e6 * value for value in bucket_mb], bandwidth, 1e-6 * call_us, title))


def parallel(
    strategy: Annotated[list[str], choice(PARALLELISMS)] = list(PARALLELISMS),
    tokens: Annotated[int, setting(help="Tokens of the whole batch, B.", min=1)] = 131072,
    d_model: Annotated[int, setting(help="Model width, D.", min=1)] = SIZES["2.7b"].d_model,
    d_ff: Annotated[int, setting(help="Feed-forward width, D_FF.", min=1)] = SIZES["2.7b"].d_ff,
    flops: Annotated[
        float | None, setting(help=f"FLOP/s of a device, C. Default: as measured, else {H200_FLOPS_PER_S:g}.")
    ] = None,
    bandwidth: Annotated[
        float | None,
        setting(help=f"Bytes/s that a device sends, W. Default: as measured, else {NVLINK_BYTES_PER_S:g}."),
    ] = None,
    measured: Annotated[
        list[Path],
        reads_file(help="Results of bench and allreduce, for C and W, and of ddp and shard, to compare their steps."),
    ] = [],
    dtype: Annotated[str, choice(PRECISIONS, "Of weights, gradients and activations.")] = "fp16",
    devices: Annotated[
        int | None, setting(help="Devices, N. Default: the mesh's, or 8.", min=1, max=MOST_DEVICES)
    ] = None,
    mesh: Annotated[str | None, setting(help="N_FSDPxN_TP of fsdp-tp, such as 4x2. Default: the fastest one.")] = None,
    plot: Annotated[Path | None, writes_file(help="Also draw the times over the devices to this picture file.")] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Derive FLOPs and communication of a feed-forward layer, and how many devices make it communication-bound.

    cs336sys account parallel --strategy dp,fsdp --tokens 65536 --flops 4.6e14 --bandwidth 1.8e11

    cs336sys account parallel --strategy fsdp-tp --mesh 4x2

    cs336sys account parallel --measured bench.jsonl.gz --measured allreduce.jsonl.gz --measured shard.jsonl.gz
    """
    from cs336sys.commands.account.communication_tables import parallel_tables, plot_parallel
    from cs336sys.commands.account.rates import compare_with_measured, read_measured

    cells = read_measured(measured)
    # C and W.
    assumed = H200_FLOPS_PER_S if flops is None else flops, NVLINK_BYTES_PER_S if bandwidth is None else bandwidth
    rates, compared = compare_with_measured(cells, flops, bandwidth) if cells else (assumed, [])
    layer = Layer(tokens, d_model, d_ff, *rates, ELEMENT_BYTES[dtype])
    fixed_mesh = None if mesh is None else _read_mesh(mesh, devices)
    count = devices or (fixed_mesh.devices if fixed_mesh else 8)
    output.check(plot=plot)
    output.emit([*parallel_tables(strategy, layer, count, fixed_mesh), *compared])
    if plot is not None:
        plot_parallel(strategy, layer, plot)


def _read_mesh(text: str, devices: int | None) -> Mesh:
    """Read ``4x2`` as 4 devices of FSDP by 2 of TP, and refuse another number of devices than that of --devices."""
    fsdp, _, tp = text.partition("x")
    if not (fsdp.isdecimal() and tp.isdecimal()):
        raise UsageError(f"--mesh '{text}': must be N_FSDPxN_TP, such as 4x2")
    mesh = Mesh(fsdp=int(fsdp), tp=int(tp))
    if mesh.devices > MOST_DEVICES:
        raise UsageError(f"--mesh {text}: must have at most {MOST_DEVICES} devices, whose meshes take seconds to try")
    if devices not in (None, mesh.devices):
        raise UsageError(f"--mesh {text} is {mesh.devices} devices: its axes must multiply to --devices {devices}")
    return mesh


def xxl(
    d_model: Annotated[int, setting(help="Width, D.", min=1)] = XXL.d_model,
    d_ff: Annotated[int, setting(help="Feed-forward width, F.", min=1)] = XXL.d_ff,
    num_blocks: Annotated[int, setting(help="Blocks of two linear layers, L.", min=1)] = XXL.num_blocks,
    tokens: Annotated[int, setting(help="Tokens whose activations are saved, T.", min=1)] = 4 * 512,
    weight_copies: Annotated[
        bool, setting("--weight-copies", help="Also count bf16 copies of the weights, saved for backward.")
    ] = False,
    gpu_gb: Annotated[float, setting(help="Memory of a GPU, 1e9 bytes, in (a).", min=1e-9)] = 80.0,
    device_gb: Annotated[float, setting(help="Memory of a device, 1e9 bytes, in (b).", min=1e-9)] = 95.0,
    flops: Annotated[float, setting(help="FLOP/s of a device, C.")] = 4.6e14,
    bandwidth: Annotated[float, setting(help="Bytes/s of an axis of links, W_ici.")] = 2 * 9e10,
    x: Annotated[int, setting(help="Devices for FSDP, X.", min=1)] = 16,
    y: Annotated[int, setting(help="Devices for TP, Y.", min=1)] = 4,
    m_x: Annotated[int, setting(help="Axes of links for FSDP, M_X.", min=1)] = 2,
    m_y: Annotated[int, setting(help="Axes of links for TP, M_Y.", min=1)] = 1,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Derive memory, sharding and batch of a stack of feed-forward layers too large for any device; the handout's XXL.

    cs336sys account xxl

    cs336sys account xxl --tokens 320 --device-gb 80 --x 32 --y 8
    """
    from cs336sys.commands.account.communication_tables import xxl_tables

    mesh = TpuMesh(x, y, m_x, m_y, flops, bandwidth)
    output.check()
    stack = FeedForwardStack(d_model, d_ff, num_blocks)
    tables = xxl_tables(stack, tokens, gpu_gb * 1e9, device_gb * 1e9, mesh, weight_copies=weight_copies)
    output.emit(tables)


_DEVICES = [2**power for power in range(3, 13)]
_SCALINGS = ("strong", "weak")
_MESHES = ("any", "ddp", "fsdp", "tp")


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
    checkpoint: Annotated[str, choice(("none", "block"))] = "none",
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
    """Simulate the fastest mesh of ddp, fsdp and tp for 8 to 4096 devices: step, memory, and what limits.

    cs336sys account scaling --size 10b --measured bench.jsonl.gz --measured allreduce.jsonl.gz --plot scaling.png

    cs336sys account scaling --size 2.7b --flops 4e14 --node-bandwidth 2.5e10 --devices 64,512
    """
    from cs336sys.accounting.scaling import Dtypes, Simulation
    from cs336sys.commands.account.communication_tables import plot_simulated_scaling, scaling_table, simulate_scaling
    from cs336sys.commands.account.rates import device_time, read_measured, simulated_cluster

    model = choose_size(size, context=context)
    scalings = _scalings(ctx, scaling, {"strong": batch_size, "weak": device_batch_size})
    output.check(plot=plot)
    cells = read_measured(measured)
    dtypes = Dtypes(precision, gradient_dtype, state_dtype)
    time, time_note = device_time(cells, model, dtypes, flops)
    limit_bytes = read_memory_limit(memory_limit)
    cluster, cluster_notes = simulated_cluster(cells, bandwidth, node_bandwidth, node_size, limit_bytes)
    simulation = Simulation(model, dtypes, cluster, time, checkpoint)
    simulated = {
        kind: simulate_scaling(simulation, scalings, devices, None if kind == "any" else kind) for kind in mesh
    }
    output.emit([scaling_table(list(simulated.values()), simulation, [time_note, *cluster_notes])])
    if plot is not None:
        plot_simulated_scaling(simulated, simulation, plot)


def _scalings(ctx: typer.Context, scaling: list[str], batches: dict[str, int]) -> dict[str, int]:
    """Return the batch of each requested kind of scaling, and refuse an option that would be ignored."""
    scalings = {name: batches[name] for name in scaling}
    for name, option in {"strong": "batch_size", "weak": "device_batch_size"}.items():
        if name not in scalings and is_given(ctx, option):
            option_text = f"--{option.replace('_', '-')} {batches[name]}"
            raise UsageError(f"{option_text} only affects {name} scaling: add {name} to --scaling, or leave it out")
    return scalings
