"""``account collectives`` and ``account buckets``: rings, and gradients in buckets."""

from typing import Annotated

import typer

from cs336sys.accounting.parameters import count_parameters
from cs336sys.commands.options.completion import among
from cs336sys.commands.options.output import OutputOptions
from cs336sys.commands.options.reading import at_least, between, byte_count, check_choice, read_value, split_list
from cs336sys.errors import UsageError
from cs336sys.sizes import ELEMENT_BYTES, PRECISIONS, SIZES, choose_size

# NVLink 4: 18 links of 25 GB/s each way.
NVLINK_BYTES_PER_S = 450e9


def collectives(
    message: Annotated[list[str], typer.Option(help="Sizes of the whole tensor, S: 1MB (1e6 bytes).")] = [
        "1MB,10MB,100MB,1GB"
    ],
    devices: Annotated[list[str], typer.Option(help="Numbers of devices, N.")] = ["2,4,6"],
    bandwidth: Annotated[float, typer.Option(help="Bytes/s that a device sends, W.")] = NVLINK_BYTES_PER_S,
    output: OutputOptions = OutputOptions(),
) -> None:
    """How long ring collectives take, and the handout's alternate ring all-reduce beside them.

    cs336sys account collectives --message 1GB --devices 2,4,8 --bandwidth 9e10
    """
    from cs336sys.report.account.communication import collectives_tables

    sizes = split_list(message, "--message", byte_count)
    counts = split_list(devices, "--devices", at_least(1))
    _check_positive(bandwidth, "--bandwidth")
    output.check()
    output.emit(collectives_tables(sizes, counts, bandwidth))


def buckets(
    size: Annotated[
        str, typer.Option(help=f"Whose gradients: {', '.join(SIZES)}.", autocompletion=among(SIZES))
    ] = "xl",
    gradients: Annotated[
        str | None, typer.Option(help="All gradients, s, in the place of the size's: 8GB.", show_default=False)
    ] = None,
    gradient_dtype: Annotated[
        str, typer.Option(help="What gradients are sent in.", autocompletion=among(PRECISIONS))
    ] = "fp32",
    bucket_mb: Annotated[list[str], typer.Option(help="Bucket sizes, 1e6 bytes.")] = ["1,10,100,1000"],
    bandwidth: Annotated[float, typer.Option(help="Algorithm bandwidth of the all-reduce in bytes/s, w.")] = 320e9,
    call_us: Annotated[float, typer.Option(help="Cost of a communication call in microseconds, o.")] = 20.0,
    output: OutputOptions = OutputOptions(),
) -> None:
    """What data parallel training waits for after its backward pass, and the bucket size that makes it least.

    cs336sys account buckets --size xl --bandwidth 19.7e9 --call-us 30
    """
    from cs336sys.report.account.communication import bucket_tables

    element_bytes = ELEMENT_BYTES[check_choice(gradient_dtype, "--gradient-dtype", PRECISIONS)]
    if gradients is None:
        total, title = float(element_bytes * count_parameters(choose_size(size))), f"{size}, {gradient_dtype}"
    else:
        total = float(read_value(gradients, "--gradients", byte_count))
        title = gradients
    megabytes = split_list(bucket_mb, "--bucket-mb", between(1e-6, 1e6))
    _check_positive(bandwidth, "--bandwidth")
    _check_positive(call_us, "--call-us")
    output.check()
    tables = bucket_tables(total, [1e6 * value for value in megabytes], bandwidth, 1e-6 * call_us, title)
    output.emit(tables)


def _check_positive(value: float, option: str) -> None:
    if value <= 0:
        raise UsageError(f"{option} {value:g}: must be positive")
