"""``cs336sys verify``: is my parallel training the same training as that of one process."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

from cs336sys.commands.options import training as options
from cs336sys.commands.options.effects import runs_code, setting, writes_file
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import choice, name_or_code
from cs336sys.commands.sweep.ranks import BackendOption, WorldSizeOption, choose_world_sizes, is_first_rank
from cs336sys.commands.sweep.run import run_sweep
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Run
from cs336sys.user_code import digest, is_user_code
from cs336sys.workload.verification import CASES, GRADIENTS, SEQUENCES, SMALL, WRAPS, VerifiedWorkload


@dataclass(frozen=True)
class VerifiedModelOptions(options.SharedModelOptions):
    """Options for the model whose training is compared."""

    size: Annotated[Sequence[str], choice(options.SIZES, "As of bench. Default: 2 blocks of width 32.")] = ()


def verify(
    wrap: Annotated[
        list[str],
        name_or_code(WRAPS, f"Yours: FILE.py:NAME, module:NAME. Ready: {', '.join(WRAPS)}."),
    ] = [],
    world_size: WorldSizeOption = [],
    case: Annotated[list[str], choice(CASES, f"{', '.join(CASES)}.", show_default=False)] = list(CASES),
    mesh: Annotated[
        str | None, setting(help="What ranks share: data, context, tensor, pipeline; data=2,tensor=2.")
    ] = None,
    gradients: Annotated[str, choice(GRADIENTS, "Ranks' gradients become their mean, or sum.")] = "mean",
    finish: Annotated[str | None, runs_code(help="Method that finishes gradients. Default: found.")] = None,
    backend: BackendOption = "auto",
    model: VerifiedModelOptions = VerifiedModelOptions(),
    run: options.RunOptions = options.RunOptions(),
    timeout: Annotated[float, setting(help="Seconds after which ranks that wait count as hanging.", min=1)] = 20.0,
    html: Annotated[Path | None, writes_file("--html", help="Write the tables to this page, too.")] = None,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Train in parallel and in one process, compare everything, and say what a difference means.

    Exits with 1 if anything is wrong.

    cs336sys verify --model mine.py:build --wrap mine.py:parallelize --world-size 2,4

    cs336sys verify --wrap torch.distributed.fsdp:fully_shard

    torchrun --nproc-per-node 8 -m cs336sys verify --model mine.py:build --wrap mine.py:parallelize
    """
    from cs336sys.report.page import check_page, html_page, html_table
    from cs336sys.report.table import Table
    from cs336sys.report.verify import verify_tables

    if not wrap:
        raise UsageError(f"--wrap: name what makes a model parallel: FILE.py:NAME, or {', '.join(WRAPS)}")
    if is_first_rank():
        output.check()
        check_page(html)
    configurations = [
        workload.configuration()
        for workload in verified_workloads(
            wrap, choose_world_sizes(world_size), case, mesh, gradients, finish, backend, model, run, timeout
        )
    ]

    def tables(cells: Sequence[Cell], machine: Run | None) -> list[Table]:
        built = verify_tables(cells, machine)
        if html is not None:
            from cs336sys.report.outputs import write_file

            page = html_page(f"cs336sys verify: {', '.join(wrap)}", [html_table(table) for table in built])
            write_file(html, page.encode(), "--html")
        return built

    measure = "cs336sys.experiments.verify.measurement:measure_case"
    run_sweep("verify", measure, configurations, sweeping, across_ranks=True).report(tables, output)


def verified_workloads(
    wraps: Sequence[str],
    world_sizes: Sequence[int],
    cases: Sequence[str],
    mesh: str | None,
    gradients: str,
    finish: str | None,
    backend: str,
    model: VerifiedModelOptions,
    run: options.RunOptions,
    timeout: float,
) -> list[VerifiedWorkload]:
    """Every case of every wrap and number of ranks, the cases of one after another.

    Raises:
        UsageError: settings do not go together.
    """
    workloads = []
    for name, ranks in product(wraps, world_sizes):
        model_settings = asdict(model)
        if not model.size:
            model_settings["size"] = ["tiny"]
            for setting, value in SMALL.items():
                model_settings[setting] = model_settings[setting] or ([value] if setting == "context" else value)
        model_settings["batch_size"] = model_settings["batch_size"] or [SEQUENCES * ranks]
        (training,) = options.expand_workloads(
            replace(model, **model_settings),
            ["train"],
            options.PrecisionOptions(["fp32"]),
            options.ImplementationOptions(),
            options.StepsOptions([0], 1),
            run,
        )
        for case in cases:
            workloads.append(
                VerifiedWorkload(
                    training,
                    name,
                    ranks,
                    case,
                    mesh or WRAPS.get(name, "data"),
                    backend,
                    finish,
                    gradients,
                    timeout,
                    digest([name]) if is_user_code(name) else None,
                )
            )
    return workloads
