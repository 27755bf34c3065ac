"""``cs336sys nsys``: which kernels take the time in each phase of a training step."""

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import reads_file, refuse_given, setting, split_list, writes_file
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.run.sweep import refuse_what_does_not_fit, run_sweep, show_plan
from cs336sys.settings.profiling import ProfileWorkload
from cs336sys.settings.training import Workload

# The options that --from takes; all others say what to run.
_OF_REPORTS = ("source", "range_names", "top", "full_names", "plot", *(field.name for field in fields(OutputOptions)))
# Options without use in a process that runs under nsys, and leaves reading the report to another.
_NOT_UNDER_NSYS = (
    *("compare_precision", "keep", "top", "full_names", "plot"),
    *(field.name for group in (SweepOptions, OutputOptions) for field in fields(group)),
)


@options.setting_options(ProfileWorkload, "profiler")
class ProfilerOptions(options.OptionGroup):
    """The profiler, its files, and what is shown of them."""

    keep: Annotated[Path | None, writes_file(help="Keep the profiler's files in this folder.")] = None
    top: Annotated[int, setting(help="Show this many kernels of each phase.", min=1)] = 5
    full_names: Annotated[bool, setting("--full-names", help="Show the whole names of kernels.")] = False
    plot: Annotated[Path | None, writes_file(help="Draw shares of kinds of kernels.")] = None


def nsys(
    ctx: typer.Context,
    source: Annotated[list[Path], reads_file("--from", help="Read this: .nsys-rep, .sqlite, torch's .json.")] = [],
    range_names: Annotated[list[str], setting("--range", help="Ranges that are the phases of that report.")] = [],
    training: options.TrainingOptions = options.TrainingOptions(steps=5),
    mode: options.ModesOption = ["train"],
    compare_precision: Annotated[
        bool, setting("--compare-precision", help="Run fp32 and bf16, and compare phases.")
    ] = False,
    profiling: ProfilerOptions = ProfilerOptions(),
    dry_run: options.DryRunOption = False,
    force: options.ForceOption = False,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Show which kernels take the time in each phase of a training step, and how much of it is matrix multiplication.

    cs336sys nsys --size small,medium --context 128,256,512

    nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi -o report cs336sys nsys --size small

    cs336sys nsys --from report.nsys-rep
    """
    from cs336sys.capture.nsys import is_profiled
    from cs336sys.tables.titles import training_plan

    output.check(plot=profiling.plot)
    if source:
        refuse_given(ctx, [name for name in ctx.params if name not in _OF_REPORTS], "--from reads a report")
        _show_report(source, range_names, profiling, output)
        return
    refuse_given(ctx, ["range_names"], "a run has its own phases, other ranges are chosen with --from")
    if compare_precision:
        if training.precisions() != [None]:
            raise UsageError("--compare-precision runs fp32 and bf16: leave --precision, --bf16 and --fp16 out")
        training = replace(training, precision=["fp32", "bf16"])
    workloads = training.workloads(mode)
    if dry_run:
        plan = partial(training_plan, workloads, "nsys", ())
        show_plan("nsys", plan, sweeping, output, training.device, plot=profiling.plot, keep=profiling.keep)
    elif is_profiled():
        refuse_given(ctx, _NOT_UNDER_NSYS, "this process runs under nsys, which writes a report for --from to read")
        _run_under_nsys(workloads, profiling.profiler)
    else:
        refuse_what_does_not_fit(workloads, training.device, force=force)
        _profile(workloads, profiling, sweeping, output, compare_precision=compare_precision)


def _profile(
    workloads: Sequence[Workload],
    profiling: ProfilerOptions,
    sweeping: SweepOptions,
    output: OutputOptions,
    *,
    compare_precision: bool,
) -> None:
    from cs336sys.commands.nsys.tables import plot_profiles, profile_tables
    from cs336sys.tables.outputs import check_writable

    keep = profiling.keep
    if keep is not None:
        check_writable(keep / "trace.json.gz", "--keep")  # A name like those of the files that will be there.
    configurations = [
        ProfileWorkload(workload, name, keep=str(keep) if keep else None).configuration()
        for workload in workloads
        for name in profiling.profiler
    ]
    top, full_names = profiling.top, profiling.full_names
    tables = partial(profile_tables, top=top, full_names=full_names, compare_precision=compare_precision)
    output.check_selection("nsys", tables)
    sweep = run_sweep("nsys", "cs336sys.commands.nsys.measure:measure_profile", configurations, sweeping)
    sweep.report(tables, output, (profiling.plot, plot_profiles))


def _show_report(source: list[Path], range_names: list[str], profiling: ProfilerOptions, output: OutputOptions) -> None:
    from cs336sys.capture.reading import read_captures
    from cs336sys.capture.summary import summarize
    from cs336sys.commands.nsys.tables import plot_report, report_tables

    report = read_captures(source, single=True)
    recorded_names = report.capture.range_names()
    names = []
    for text in range_names:
        names += [text] if text in recorded_names else split_list([text], "--range", str)  # Names may hold commas.
    try:
        profile = summarize(report.capture, names, report.timelines)
    except UsageError as error:
        raise UsageError(f"{report.path}: {error}") from error
    output.emit(report_tables(report, profile, top=profiling.top, full_names=profiling.full_names))
    if profiling.plot is not None:
        plot_report(profile, profiling.plot)


def _run_under_nsys(workloads: Sequence[Workload], profilers: Sequence[str]) -> None:
    """Run the one workload in this process, which nsys profiles."""
    if len(workloads) > 1:
        raise UsageError(f"one report can hold one run, not {len(workloads)}: give each list option one value")
    if "torch" in profilers:
        raise UsageError("--profiler torch: this process runs under nsys, and a GPU takes one profiler at a time")
    from cs336sys.commands.nsys.measure import run_checked_for_nsys
    from cs336sys.run.cells import guarded

    outcome = guarded(run_checked_for_nsys, workloads[0].configuration(), send=lambda stage: None)
    if outcome.status == "unsupported":
        raise CapabilityError(outcome.reason)
    if outcome.status != "ok":
        typer.echo(f"{outcome.status}: {outcome.reason}", err=True)
        raise typer.Exit(1)
    print("done: read the report that nsys writes now with `cs336sys nsys --from REPORT`", file=sys.stderr)
