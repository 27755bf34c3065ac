"""``cs336sys losses``: do ways of training the same model learn alike."""

from pathlib import Path
from typing import Annotated

from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import reads_file, setting, writes_file
from cs336sys.errors import UsageError
from cs336sys.run.sweep import refuse_what_does_not_fit, run_sweep
from cs336sys.settings.profiling import LossWorkload, text_digest


def losses(
    text: Annotated[
        list[Path], reads_file(help="A file to learn from, or a folder with .md and .txt: bytes are tokens.")
    ] = [],
    training: options.UntimedTrainingOptions = options.UntimedTrainingOptions(),
    steps: Annotated[int, setting(help="Steps, each on a batch of its own.", min=1)] = 300,
    learning_rate: Annotated[float, options.option_of(LossWorkload, "learning_rate")] = 3e-4,
    weight_decay: Annotated[float, options.option_of(LossWorkload, "weight_decay")] = 0.1,
    force: options.ForceOption = False,
    plot: Annotated[Path | None, writes_file(help="Draw the curves to this picture file.")] = None,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Train on text in every combination of the lists, on the same batches, and compare the losses.

    cs336sys losses --size small --bf16 --kernels reference,fused --text docs --plot losses.png
    """
    from cs336sys.commands.losses.tables import loss_tables, plot_losses

    output.check(plot=plot)
    if not text:
        raise UsageError("--text: give a file to learn from, or a folder of them; several with --text again")
    for path in text:
        if "," in str(path):
            raise UsageError(f"--text {path}: the results file separates files by commas; rename this one")
    workloads = training.workloads(warmup=[0], steps=steps)  # Every loss is kept, from the first step.
    paths = ",".join(map(str, text))
    refuse_what_does_not_fit(workloads, training.device, force=force)
    digest = text_digest(paths)
    configurations = [
        LossWorkload(workload, paths, learning_rate, weight_decay, digest).configuration() for workload in workloads
    ]
    measure = "cs336sys.commands.losses.measure:measure_losses"
    output.check_selection("losses", loss_tables)
    run_sweep("losses", measure, configurations, sweeping).report(loss_tables, output, (plot, plot_losses))
