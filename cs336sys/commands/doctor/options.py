"""``cs336sys doctor``: what this machine has and lacks."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cs336sys.accounting.hardware import Ceilings, datasheet, peak_tflops
from cs336sys.command_line.faults import say
from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions
from cs336sys.command_line.options.reading import writes_file
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.settings.training import Workload
from cs336sys.tables.table import Column, Table, named_columns

if TYPE_CHECKING:
    from cs336sys.machine.diagnosis import Check


def doctor(
    code: options.UserCodeOptions = options.UserCodeOptions(),
    optimizer: Annotated[str, options.option_of(Workload, "optimizer", help="Optimizer, as in bench.")] = "course",
    ceilings: Annotated[
        Path | None,
        writes_file(help="Measure products, copies, launches and links of this GPU, and write them to this file."),
    ] = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Check GPU, driver, versions, links, clocks, profilers and disk, and say how to fix what is wrong.

    With --model it checks a model of yours instead, small and on the CPU: imports, builds, trains, blocks, attention.

    Exits with 3 when something is missing that cs336sys cannot do without. A machine without a GPU is no such case.

    cs336sys doctor --format json

    cs336sys doctor --model mine.py:build

    cs336sys doctor --ceilings ceilings.json
    """
    output.check()
    if ceilings is not None:
        if code.model is not None:
            raise UsageError("--ceilings are those of a GPU, not of a model: leave out --model, or --ceilings")
        output.emit([_measured_ceilings(ceilings)])
        return
    if code.model is None:
        model_options = {"--loss": code.loss, "--batch": code.batch, "--blocks": code.blocks}
        model_options["--optimizer"] = None if optimizer == "course" else optimizer
        for option, value in model_options.items():
            if value is not None:
                raise UsageError(f"{option} {value} only applies to --model: add --model, or leave it out")
        from cs336sys.machine.diagnosis import diagnose

        checks, subject = diagnose(), "here"
    else:
        checks, subject = _check_user_model(code, optimizer), f"in {code.model}"
    verdicts = [check.verdict for check in checks]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "warn", "missing"))
    columns = (Column("name", "check"), *named_columns("verdict", "found", "fix"))
    title = f"What cs336sys finds {subject}: {counts}"
    output.emit([Table("doctor", title, columns, list(map(asdict, checks)))])
    if "missing" in verdicts:
        raise typer.Exit(CapabilityError.exit_code)


def _check_user_model(code: options.UserCodeOptions, optimizer: str) -> list["Check"]:
    from cs336sys.commands.doctor.user_model import check_model

    size = {"size": ["tiny"], "context": [32], "batch_size": [2], "precision": ["fp32"]}
    steps = {"optimizer": [optimizer], "warmup": [0], "steps": 1, "device": "cpu"}
    (workload,) = options.TrainingOptions(**size, **steps, **asdict(code)).workloads()
    return check_model(workload)


def _measured_ceilings(path: Path) -> Table:
    from cs336sys.commands.doctor.measure import measure_ceilings
    from cs336sys.machine.device import choose_device

    device = choose_device("auto")
    if device.type != "cuda":
        raise CapabilityError(f"--ceilings {path}: torch sees no CUDA GPU here; see why by doctor without --ceilings")
    measured = measure_ceilings(device, lambda text: say(f"measuring {text}"))
    measured.write(path)
    return ceilings_table(measured)


def ceilings_table(ceilings: Ceilings) -> Table:
    """Build the table of ``--ceilings``: what was measured, next to the datasheet."""
    rows = []
    for precision, tflops in ceilings.tflops.items():
        peak = peak_tflops(ceilings.gpu, precision)
        rows.append({"what": f"product of matrices in {precision}", **_pair(tflops, peak), "unit": "TFLOP/s"})
    sheet = datasheet(ceilings.gpu)
    copy = _pair(ceilings.copy_gbps, None if sheet is None else sheet.memory_bytes_per_s / 1e9)
    rows.append({"what": "copy in memory, bytes read and written", **copy, "unit": "GB/s"})
    rows.append({"what": "launch of a small kernel, CPU time", "measured": ceilings.launch_us, "unit": "us"})
    rows.append({"what": "copy to another GPU, one way", "measured": ceilings.link_gbps, "unit": "GB/s"})
    columns = (
        *named_columns("what"),
        Column("measured", "measured", "value"),
        Column("datasheet", "datasheet", "value"),
        *named_columns(datasheet_percent="of the datasheet", unit="unit"),
    )
    notes = ("medians of repetitions, of random numbers; products: the faster of squares of 4096 and 8192",)
    return Table("ceilings", f"doctor: what {ceilings.gpu} reaches at most", columns, rows, notes)


def _pair(measured: float, datasheet: float | None) -> dict[str, float | None]:
    percent = None if datasheet is None else 100 * measured / datasheet
    return {"measured": measured, "datasheet": datasheet, "datasheet_percent": percent}
