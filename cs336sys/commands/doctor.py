"""``cs336sys doctor``: what this machine has and lacks."""

from dataclasses import asdict
from typing import Annotated

import typer

from cs336sys.commands.options.output import OutputOptions
from cs336sys.commands.options.reading import choice
from cs336sys.commands.options.training import (
    BatchOption,
    BlocksOption,
    DebugOption,
    ImplementationOptions,
    LossOption,
    ModelOption,
    ModelOptions,
    PrecisionOptions,
    RunOptions,
    StepsOptions,
    expand_workloads,
    read_optimizer,
)
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.workload import OPTIMIZERS


def doctor(
    model: ModelOption = None,
    loss: LossOption = None,
    batch: BatchOption = None,
    optimizer: Annotated[str, choice(OPTIMIZERS, "As of bench.", parser=read_optimizer)] = "course",
    blocks: BlocksOption = None,
    debug: DebugOption = False,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Check GPU, driver, versions, links, clocks, profilers and disk, and say how to fix what is wrong.

    With --model it checks a model of yours instead, small and on the CPU: imports, builds, trains, blocks, attention.

    Exits with 3 when something is missing that cs336sys cannot do without. A machine without a GPU is no such case.

    cs336sys doctor --format json

    cs336sys doctor --model mine.py:build
    """
    from cs336sys.report.table import Column, Table

    output.check()
    if model is None:
        of_models = {"--loss": loss, "--batch": batch, "--blocks": blocks}
        of_models["--optimizer"] = None if optimizer == "course" else optimizer
        for option, value in of_models.items():
            if value is not None:
                raise UsageError(f"{option} {value} only applies to --model: add --model, or leave it out")
        from cs336sys.measure.diagnosis import diagnose

        checks, subject = diagnose(), "here"
    else:
        given = ModelOptions(["tiny"], [32], [2], model=model, loss=loss, batch=batch, blocks=blocks, debug=debug)
        (workload,) = expand_workloads(
            given,
            ["train"],
            PrecisionOptions(["fp32"]),
            ImplementationOptions(optimizer=[optimizer]),
            StepsOptions([0], 1),
            RunOptions(device="cpu"),
        )
        from cs336sys.experiments.checks.user_model import check_model

        checks, subject = check_model(workload), f"in {model}"
    verdicts = [check.verdict for check in checks]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "warn", "missing"))
    columns = (
        Column("name", "check"),
        Column("verdict", "verdict"),
        Column("found", "found"),
        Column("fix", "fix"),
    )
    table = Table("doctor", f"What cs336sys finds {subject}: {counts}", columns, [asdict(check) for check in checks])
    output.emit([table])
    if "missing" in verdicts:
        raise typer.Exit(CapabilityError.exit_code)
