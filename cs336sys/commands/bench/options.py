"""``cs336sys bench``: how long forward pass, backward pass and optimizer step take."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cs336sys.command_line.faults import say
from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import choice, setting, writes_file
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, configuration_key
from cs336sys.run.sweep import refuse_what_does_not_fit, run_sweep, show_plan
from cs336sys.settings.fields import MEASURING, OUTPUT
from cs336sys.settings.training import COMPARED_SETTINGS, Workload

_COMPARED = tuple(name.replace("_", "-") for name in COMPARED_SETTINGS)


def bench(
    training: options.TrainingOptions = options.TrainingOptions(),
    mode: options.ModesOption = ["train"],
    rounds: Annotated[int, setting(help="Repeat the sweep this many times.", min=1, rich_help_panel=MEASURING)] = 1,
    interleave: Annotated[
        str | None, choice(_COMPARED, "Alternate steps of this option's values: attention.", rich_help_panel=MEASURING)
    ] = None,
    percentiles: Annotated[
        list[float], setting(help="Show these percentiles of steps: 50,90.", min=0, max=100, rich_help_panel=OUTPUT)
    ] = [],
    baseline: Annotated[
        str | None,
        setting(metavar="SETTING=VALUE", help="Base of speed-ups. Default: default settings.", rich_help_panel=OUTPUT),
    ] = None,
    plot: Annotated[
        Path | None, writes_file(help="Draw times by phase, and speed-ups.", rich_help_panel=OUTPUT)
    ] = None,
    dry_run: options.DryRunOption = False,
    force: options.ForceOption = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Time the phases of a training step, for every combination of the lists.

    cs336sys bench --size small,medium --precision fp32,bf16 --compile off,block
    """
    from cs336sys.commands.bench import tables
    from cs336sys.tables.titles import training_plan

    workloads = training.workloads(mode)
    baseline = baseline or ""
    tables.baseline_values(baseline, [workload.configuration() for workload in workloads])  # Refuses a wrong one.
    output.check(plot=plot)
    if interleave is None:
        measure, notes = "measure_training", []
        configurations = [workload.configuration() for workload in workloads]
    else:
        measure, configurations = "measure_interleaved", _interleaved_configurations(workloads, interleave)
        notes = [f"All values of {interleave} hold parameters and optimizer states together: add the other rows'."]
    if dry_run:
        plan = partial(training_plan, workloads, "bench", notes)
        show_plan("bench", plan, sweeping, output, training.device, plot=plot)
        return
    refuse_what_does_not_fit(workloads, training.device, force=force)
    if rounds > 1:
        # A round goes through all cells, so that cells to compare are measured close to each other.
        configurations = [
            configuration | {"round": number} for number in range(1, rounds + 1) for configuration in configurations
        ]
    build = partial(tables.bench_tables, percentiles=percentiles, baseline=baseline)
    output.check_selection("bench", build)
    is_warmup_study = len({workload.warmup for workload in workloads}) > 1  # Each then warms up its own process.
    # Values of --attention that a model ignores are measured once; measure_interleaved sees to that itself.
    skips = {} if interleave == "attention" else {"is_wanted": _is_other_attention}
    function = f"cs336sys.commands.bench.measure:{measure}"
    sweep = run_sweep("bench", function, configurations, sweeping, fresh_worker=is_warmup_study, **skips)
    if sweeping.save and sweep.interruption is None:
        for warning in tables.gate_warnings(sweep.cells):  # Only saved cells can be compared.
            say(f"warning: {warning}")
    sweep.report(build, output, (plot, partial(tables.plot_bench, baseline=baseline)), pooled=tables.pool_bench_rounds)


def _is_other_attention(configuration: Mapping[str, Any], cells: Sequence[Cell]) -> bool:
    """Return False, and say so, where a measured cell differs in ``--attention`` alone and found both the same."""
    key = configuration_key(configuration, ignore=("attention",))
    for cell in cells:
        attentions = {configuration["attention"], cell.configuration["attention"]}
        is_same = len(attentions) > 1 and attentions <= set(cell.derived.get("same_attention", ()))
        if is_same and configuration_key(cell.configuration, ignore=("attention",)) == key:
            say(f"--attention {' and '.join(sorted(attentions))} are the model's own here: measured once")
            return False
    return True


def _interleaved_configurations(workloads: Sequence[Workload], option: str) -> list[dict[str, Any]]:
    """Return the configurations for ``measure_interleaved``, those that are measured together next to each other."""
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
    groups: dict[str, list[dict[str, Any]]] = {}
    for configuration in (workload.configuration() for workload in workloads):
        groups.setdefault(configuration_key(configuration, ignore=(setting,)), []).append(configuration)
    if any(len(group) < 2 for group in groups.values()):
        raise UsageError(f"--interleave {option}: give --{option} two values or more")
    return [
        configuration | {"interleave": setting, "interleaved": ",".join(str(member[setting]) for member in group)}
        for group in groups.values()
        for configuration in group
    ]
