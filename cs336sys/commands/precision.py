"""``cs336sys precision``: what low precision does to sums, and which dtypes autocast chooses."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cs336sys.commands.options import FormatOption, OutputOption, check_choice, one_of, split_list
from cs336sys.commands.training_options import DeviceOption
from cs336sys.workload import DEVICES

if TYPE_CHECKING:
    import torch

    from cs336sys.report.tables import Table

AUTOCAST_PRECISIONS = ("fp16", "bf16")

ACCUMULATION_NOTES = (
    "fp16 += fp16: with 10 mantissa bits the fp16 numbers from 8 to 16 are 2^-7 = 0.0078 apart, so adding 0.01 there "
    "adds 0.0078; a sum rounded like this at every step drifts.",
    "fp32 += fp16: 0.01 is no binary fraction, and the nearest fp16 number is 0.01000214. The fp32 sum keeps that "
    "error, 0.02 %, and adds almost none of its own; casting the terms up first changes nothing: += does it anyway.",
)

AUTOCAST_NOTES = (
    "Parameters and gradients stay fp32: autocast casts copies of what goes into matrix products, and their outputs "
    "are low precision. Which operations it keeps in fp32 differs by device and torch version.",
    "Layer norm averages and squares many numbers: in fp16 the square of 256 overflows and small terms vanish, so "
    "autocast runs it in fp32 on CUDA, and since torch 2.12 RMSNorm too. bf16 has the range of fp32, so nothing "
    "overflows, but with 7 mantissa bits its sums are coarser still: the statistics need fp32 all the same, and the "
    "kernels of torch compute them in fp32 inside, whatever dtype goes in and out.",
    "Loss: inside autocast both losses run in fp32. After the context is left, cross-entropy takes the dtype of the "
    "logits, and MSE that of its fp32 targets: answers that disagree have computed it in different places.",
)


def precision(
    precision: Annotated[
        list[str], typer.Option("--precision", help=f"What autocast casts to: {', '.join(AUTOCAST_PRECISIONS)}.")
    ] = ["fp16", "bf16"],
    device: DeviceOption = "auto",
    format: FormatOption = None,
    output: OutputOption = None,
) -> None:
    """Add 1000 times 0.01 in four ways, and show the dtype of each part of the handout's toy model under autocast.

    cs336sys precision --precision bf16 --device cpu
    """
    from cs336sys.report.tables import check_output, emit

    chosen = split_list(precision, "--precision", one_of(AUTOCAST_PRECISIONS))
    check_choice(device, "--device", DEVICES)
    check_output(output, format)

    from cs336sys.measure.device import choose_device

    torch_device = choose_device(device)
    emit([_accumulation_table(torch_device), _autocast_table(chosen, torch_device)], format=format, output=output)


def _accumulation_table(device: "torch.device") -> "Table":
    from cs336sys.measure.mixed_precision import accumulate
    from cs336sys.report.tables import Column, Table

    columns = (
        Column("accumulation", "accumulation"),
        Column("sum", "sum"),
        Column("absolute_error", "absolute error"),
        Column("relative_error_percent", "relative error", "percent"),
    )
    rows: list[dict[str, str | float]] = [
        {
            "accumulation": accumulation.name,
            "sum": accumulation.total,
            "absolute_error": accumulation.absolute_error,
            "relative_error_percent": 100 * accumulation.relative_error,
        }
        for accumulation in accumulate(device)
    ]
    return Table("accumulation", "1000 times 0.01, which is 10", columns, rows, ACCUMULATION_NOTES)


def _autocast_table(precisions: list[str], device: "torch.device") -> "Table":
    import torch

    from cs336sys.measure.mixed_precision import LOSSES, autocast_dtypes
    from cs336sys.measure.system import cpu_model
    from cs336sys.report.tables import Column, Table

    columns = (
        Column("precision", "autocast"),
        Column("loss_function", "loss function"),
        Column("parameters", "parameters"),
        Column("fc1", "fc1 output"),
        Column("layer_norm", "layer norm output"),
        Column("rms_norm", "RMSNorm in its place"),
        Column("logits", "logits"),
        Column("loss", "loss"),
        Column("loss_outside", "loss outside autocast"),
        Column("gradients", "gradients"),
        Column("status", "status"),
        Column("reason", "reason"),
    )
    rows = [asdict(autocast_dtypes(precision, loss, device)) for precision in precisions for loss in LOSSES]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    title = f"Dtypes of the toy model's parts under autocast on {device.type} ({name}) with torch {torch.__version__}"
    return Table("autocast", title, columns, rows, AUTOCAST_NOTES)
