"""``cs336sys verify``: is my parallel training the same training as that of one process."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import choice, name_or_code, writes_file
from cs336sys.errors import UsageError
from cs336sys.processes import is_first_rank
from cs336sys.results.model import Cell, Run
from cs336sys.run.ranks import choose_world_sizes
from cs336sys.run.sweep import run_sweep
from cs336sys.settings.fields import MODEL
from cs336sys.settings.sizes import SIZES, ModelSize
from cs336sys.settings.training import Workload
from cs336sys.settings.user_code import digest, is_user_code
from cs336sys.settings.verification import CASES, SEQUENCES, SMALL, WRAPS, VerifiedWorkload
from cs336sys.tables.outputs import write_file


@options.setting_options(ModelSize, "size")
class VerifiedModelOptions(options.RunOptions, options.UserCodeOptions, options.SizeOptions):
    """Options for the model whose training is compared, and for the device."""

    size: Annotated[
        Sequence[str],
        choice(SIZES, "Sizes of bench, on short texts. Default: 2 blocks of width 32.", rich_help_panel=MODEL),
    ] = ()


@options.setting_options(
    VerifiedWorkload, *("wrap", "world_size", "case", "mesh", "gradients", "finish", "backend", "timeout_s")
)
class VerificationOptions(options.OptionGroup):
    """Options for the wrap that makes the model parallel, its ranks, and the cases that are compared."""

    wrap: Annotated[
        Sequence[str], name_or_code(WRAPS, f"Yours: FILE.py:NAME, module:NAME. Ready: {', '.join(WRAPS)}.")
    ] = ()
    world_size, mesh = (), None
    case: Annotated[Sequence[str], choice(CASES, f"{', '.join(CASES)}.", show_default=False)] = tuple(CASES)

    def workloads(self, model: VerifiedModelOptions) -> list[VerifiedWorkload]:
        """Return a workload for every case of every number of ranks of every wrap, or raise a UsageError."""
        if not self.wrap:
            raise UsageError(f"--wrap: name what makes a model parallel: FILE.py:NAME, or {', '.join(WRAPS)}")
        world_sizes = choose_world_sizes(self.world_size)
        trainings = {ranks: _training(model, ranks) for ranks in world_sizes}
        digests = {name: digest([name]) if is_user_code(name) else None for name in self.wrap}  # Compared on --resume.
        cells = self.combinations(VerifiedWorkload, "wrap", "world_size", "case", world_size=world_sizes)
        return [
            VerifiedWorkload(
                trainings[cell["world_size"]],
                **cell | {"mesh": self.mesh or WRAPS.get(cell["wrap"], "data"), "wrap_digest": digests[cell["wrap"]]},
            )
            for cell in cells
        ]


def _training(model: VerifiedModelOptions, ranks: int) -> Workload:
    """Return the model's workload, with sequences for every rank; what is not given is small, but for a size."""
    defaults = SMALL | {"size": ["tiny"], "context": [SMALL["context"]], "batch_size": [SEQUENCES * ranks]}
    # With --size, only context, vocabulary and batch still are small: a wrap's mistakes show in short texts, too.
    names = ("context", "vocab_size", "batch_size") if model.size else tuple(defaults)
    settings = asdict(model)
    settings |= {name: settings[name] or defaults[name] for name in names}
    (training,) = options.UntimedTrainingOptions(**settings, precision=["fp32"]).workloads(warmup=[0], steps=1)
    return training


def verify(
    verification: VerificationOptions = VerificationOptions(),
    model: VerifiedModelOptions = VerifiedModelOptions(),
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
    from cs336sys.commands.verify.tables import verify_tables
    from cs336sys.tables.page import check_page_writable, html_page, html_table
    from cs336sys.tables.table import Table, with_rows

    if is_first_rank():
        output.check()
        check_page_writable(html)
    configurations = [workload.configuration() for workload in verification.workloads(model)]

    def tables(cells: Sequence[Cell], machine: Run | None) -> list[Table]:
        built = with_rows(*verify_tables(cells, machine))
        if html is not None:
            page = html_page(f"cs336sys verify: {', '.join(verification.wrap)}", [html_table(table) for table in built])
            write_file(html, page.encode(), "--html")
        return built

    measure = "cs336sys.commands.verify.measure:measure_case"
    output.check_selection("verify", verify_tables)
    run_sweep("verify", measure, configurations, sweeping, across_ranks=True).report(tables, output)
