"""``cs336sys losses``: do ways of training the same model learn alike."""

from pathlib import Path
from typing import Annotated

from cs336sys.commands.options import training as options
from cs336sys.commands.options.effects import reads_file, setting, writes_file
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.sweep.run import run_sweep, tell_what_does_not_fit
from cs336sys.errors import UsageError
from cs336sys.workload import LossWorkload
from cs336sys.workload.profiling_options import text_digest


def losses(
    text: Annotated[
        list[Path], reads_file(help="A file to learn from, or a folder with .md and .txt: bytes are tokens.")
    ] = [],
    model: options.TrainedModelOptions = options.TrainedModelOptions(),
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    steps: Annotated[int, setting(help="Steps, each on a batch of its own.", min=1)] = 300,
    learning_rate: Annotated[float, setting(help="Learning rate, constant.")] = 3e-4,
    weight_decay: Annotated[float, setting(help="Weight decay.", min=0)] = 0.1,
    plot: Annotated[Path | None, writes_file(help="Draw the curves to this picture file.")] = None,
    run: options.RunOptions = options.RunOptions(),
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Train on text in every combination of the lists, on the same batches, and compare the losses.

    cs336sys losses --size small --bf16 --kernels reference,fused --text docs --plot losses.png
    """
    from cs336sys.report.losses import loss_tables, plot_losses

    output.check(plot=plot)
    if not text:
        raise UsageError("--text: give a file to learn from, or a folder of them; several with --text again")
    for path in text:
        if not path.exists():
            raise UsageError(f"--text {path}: there is no such file or folder")
        if "," in str(path):
            raise UsageError(f"--text {path}: the results file separates files by commas; rename this one")
    workloads = options.expand_workloads(
        model, ["train"], precision, implementation, options.StepsOptions(warmup=[0], steps=steps), run
    )
    paths = ",".join(map(str, text))
    tell_what_does_not_fit(workloads, run.device)
    digest = text_digest(paths)
    configurations = [
        LossWorkload(workload, paths, learning_rate, weight_decay, digest).configuration() for workload in workloads
    ]
    measure = "cs336sys.experiments.losses:measure_losses"
    output.check_selection("losses", loss_tables)
    run_sweep("losses", measure, configurations, sweeping).report(loss_tables, output, (plot, plot_losses))
