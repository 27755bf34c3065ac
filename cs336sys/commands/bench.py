"""``cs336sys bench``: how long forward pass, backward pass and optimizer step take."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cs336sys.commands.faults import say
from cs336sys.commands.options import training as options
from cs336sys.commands.options.effects import setting, writes_file
from cs336sys.commands.options.output import OutputOptions, SweepOptions
from cs336sys.commands.options.reading import MEASURING, OUTPUT, choice
from cs336sys.commands.sweep.run import run_sweep, show_plan, tell_what_does_not_fit
from cs336sys.errors import UsageError, choose_from
from cs336sys.results.model import Cell, configuration_key
from cs336sys.workload import COMPARED_SETTINGS, Workload

_COMPARED = tuple(setting.replace("_", "-") for setting in COMPARED_SETTINGS)


def bench(
    model: options.TrainedModelOptions = options.TrainedModelOptions(),
    mode: options.ModesOption = ["train"],
    precision: options.PrecisionOptions = options.PrecisionOptions(),
    implementation: options.ImplementationOptions = options.ImplementationOptions(),
    steps: options.StepsOptions = options.StepsOptions(warmup=[5], steps=10),
    rounds: Annotated[int, setting(help="Repeat the sweep so often.", min=1, rich_help_panel=MEASURING)] = 1,
    interleave: Annotated[
        str | None, choice(_COMPARED, "Alternate steps of its values: attention.", rich_help_panel=MEASURING)
    ] = None,
    percentiles: Annotated[
        list[float],
        setting(help="Also these percentiles of steps: 50,90.", min=0, max=100, rich_help_panel=OUTPUT),
    ] = [],
    baseline: Annotated[
        str | None,
        setting(
            metavar="SETTING=VALUE",
            help="Speed-ups are over these: cuda-graph=on. Default: the settings' defaults, or else the first values.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None, writes_file(help="Draw times by phase, and speed-ups.", rich_help_panel=OUTPUT)
    ] = None,
    run: options.RunOptions = options.RunOptions(),
    dry_run: options.DryRunOption = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Time the phases of a training step, for every combination of the lists.

    cs336sys bench --size small,medium --precision fp32,bf16 --compile off,block
    """
    from cs336sys.report.bench import bench_plan, bench_tables, plot_bench, pool_bench_rounds
    from cs336sys.report.comparison import gate_warning

    workloads = options.expand_workloads(model, mode, precision, implementation, steps, run)
    over = baseline or ""
    _check_baseline(over, workloads)
    output.check(plot=plot)
    plan_notes: tuple[str, ...] = ()
    if interleave is None:
        measure = "cs336sys.experiments.bench:measure_training"
        configurations = [workload.configuration() for workload in workloads]
    else:
        measure = "cs336sys.experiments.bench:measure_interleaved"
        configurations = _interleaved_configurations(workloads, interleave)
        plan_notes = (
            f"Parameters and optimizer states of all values of {interleave} are in memory together: add the other "
            f"rows'.",
        )
    if dry_run:
        plan = partial(bench_plan, workloads, notes=plan_notes)
        show_plan(lambda capacity: plan(capacity=capacity), sweeping, output, run.device, plot=plot)
        return
    tell_what_does_not_fit(workloads, run.device)
    if rounds > 1:
        # A round goes through all of them, so that what is compared is measured side by side.
        configurations = [
            configuration | {"round": number} for number in range(1, rounds + 1) for configuration in configurations
        ]
    is_study = len({workload.warmup for workload in workloads}) > 1
    is_wanted = None if interleave == "attention" else _is_other_attention
    sweep = run_sweep("bench", measure, configurations, sweeping, fresh_worker=is_study, is_wanted=is_wanted)
    if sweeping.save is not None and sweep.is_reported_here and sweep.interruption is None:
        warning = gate_warning(sweep.cells)
        if warning is not None:
            say(f"warning: {warning}")
    sweep.report(
        lambda cells, run: bench_tables(cells, run, percentiles, over),
        output,
        (plot, partial(plot_bench, baseline=over)),
        pooled=pool_bench_rounds,
    )


def _check_baseline(baseline: str, workloads: Sequence[Workload]) -> None:
    """Refuse a baseline that no cell has.

    Raises:
        UsageError: a part is no ``SETTING=VALUE``, of no setting that is compared, or of a value that is not measured.
    """
    from cs336sys.report.bench import baseline_values

    for part in filter(None, baseline.split(",")):
        option = f"--baseline '{part}'"
        if "=" not in part:
            raise UsageError(f"{option}: must be SETTING=VALUE, such as cuda-graph=off")
        ((setting, value),) = baseline_values(part).items()
        if setting not in COMPARED_SETTINGS:
            raise UsageError(f"{option}: {choose_from(setting.replace('_', '-'), _COMPARED)}")
        values = list(dict.fromkeys(str(getattr(workload, setting)) for workload in workloads))
        if value not in values:
            raise UsageError(f"{option}: is not measured: {choose_from(value, values)}")


def _is_other_attention(configuration: Mapping[str, Any], cells: Sequence[Cell]) -> bool:
    """Return whether a cell's attention is another than that of a cell that was measured: not the model's own again."""
    attention = configuration["attention"]
    key = configuration_key(configuration, ignore=("attention",))
    for cell in cells:
        own = cell.derived.get("own_attention", ())
        measured = cell.configuration["attention"]
        is_same = measured != attention and {measured, attention} <= set(own)
        if is_same and configuration_key(cell.configuration, ignore=("attention",)) == key:
            say(f"--attention {attention} is the model's own attention, as {measured} is: measured once")
            return False
    return True


def _interleaved_configurations(workloads: Sequence[Workload], option: str) -> list[dict[str, Any]]:
    """The workloads' configurations with what ``measure_interleaved`` needs, those measured together side by side."""
    setting = option.replace("-", "_")
    if len({workload.warmup for workload in workloads}) > 1:
        raise UsageError("--interleave takes one value of --warmup: a warm-up study needs a process for every cell")
    if workloads[0].warmup < 1:
        raise UsageError(
            "--interleave needs at least one warm-up step, so that one-time work is not timed: use --warmup 1"
        )
    if workloads[0].synchronize != "step":
        raise UsageError(
            f"--interleave: --synchronize {workloads[0].synchronize} lets alternating steps overlap: use "
            f"--synchronize step"
        )
    together: dict[str, list[dict[str, Any]]] = {}
    for configuration in (workload.configuration() for workload in workloads):
        together.setdefault(configuration_key(configuration, ignore=(setting,)), []).append(configuration)
    if any(len(group) < 2 for group in together.values()):
        raise UsageError(f"--interleave {option}: give --{option} two values or more")
    return [
        configuration | {"interleave": setting, "interleaved": ",".join(member[setting] for member in group)}
        for group in together.values()
        for configuration in group
    ]
