"""``account buckets``, ``parallel`` and ``xxl``: how many devices, and what they say to each other."""

from pathlib import Path
from typing import Annotated

from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.hardware import NVLINK_BYTES_PER_S, peak_tflops
from cs336sys.accounting.parallelism import PARALLELISMS, Layer, Mesh
from cs336sys.accounting.xxl import XXL, FeedForwardStack, TpuMesh
from cs336sys.command_line.options.output import OutputOptions
from cs336sys.command_line.options.reading import byte_count, choice, read_value, reads_file, setting, writes_file
from cs336sys.commands.account import MOST_DEVICES
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import ELEMENT_BYTES, PRECISIONS, SIZES, choose_size

_TFLOPS = peak_tflops("NVIDIA H200", "bf16")  # The dense bf16 peak of an H100 or H200.
assert _TFLOPS is not None
_FLOPS = _TFLOPS * 1e12


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
    from cs336sys.commands.account.tables.communication import bucket_tables

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
        float | None, setting(help=f"FLOP/s of a device, C. Default: as measured, else {_FLOPS:g}.")
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
    """FLOPs and communication of a feed-forward layer, and how many devices it takes to become communication-bound.

    cs336sys account parallel --strategy dp,fsdp --tokens 65536 --flops 4.6e14 --bandwidth 1.8e11

    cs336sys account parallel --strategy fsdp-tp --mesh 4x2

    cs336sys account parallel --measured bench.jsonl.gz --measured allreduce.jsonl.gz --measured shard.jsonl.gz
    """
    from cs336sys.commands.account.tables.communication import parallel_tables, plot_parallel
    from cs336sys.commands.account.tables.rates import compare_with_measured, read_measured

    cells = read_measured(measured)
    assumed = _FLOPS if flops is None else flops, NVLINK_BYTES_PER_S if bandwidth is None else bandwidth  # C and W.
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
    devices: Annotated[int | None, setting(help="All devices: checks that X Y is that.")] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Memory, sharding and batch of a stack of feed-forward layers too large for any device; the handout's XXL.

    cs336sys account xxl

    cs336sys account xxl --tokens 320 --device-gb 80 --x 32 --y 8
    """
    from cs336sys.commands.account.tables.communication import xxl_tables

    mesh = TpuMesh(x, y, m_x, m_y, flops, bandwidth)
    if devices not in (None, x * y):
        raise UsageError(f"--x {x} and --y {y} multiply to {x * y}, not to --devices {devices}")
    output.check()
    stack = FeedForwardStack(d_model, d_ff, num_blocks)
    tables = xxl_tables(stack, tokens, gpu_gb * 1e9, device_gb * 1e9, mesh, weight_copies=weight_copies)
    output.emit(tables)
