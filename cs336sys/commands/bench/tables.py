"""The tables of ``bench``, built from its cells; columns and formulas are described in ``docs/columns.md``."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cs336sys.errors import UsageError, choose_from
from cs336sys.machine.system import SLOWDOWNS
from cs336sys.results.model import Cell, Run
from cs336sys.results.statistics import SAME_PERCENT, Interval, compare_sides, ratio_of_pairs
from cs336sys.results.statistics import ratio as ratio_of_medians
from cs336sys.settings.choices import MODES
from cs336sys.settings.training import COMPARED_SETTINGS, Workload
from cs336sys.tables import titles
from cs336sys.tables.numbers import format_number
from cs336sys.tables.outputs import Axes, new_axes, write_figure
from cs336sys.tables.saved import SavedCommand, measured_cells
from cs336sys.tables.table import Column, Table, named_columns, sentences


def median_clock(cell: Cell) -> float | None:
    """Return the clock of the multiprocessors in MHz while the cell was measured; None where it is not known."""
    clocks = _known(cell.derived.get("gpu_readings") or {}, "sm_clock_mhz")
    return statistics.median(clocks) if clocks else None


def joined_readings(cells: Sequence[Cell]) -> dict[str, list[Any]] | None:
    """Return the readings of rounds, one after another; None without any."""
    rounds = [cell.derived["gpu_readings"] for cell in cells if cell.derived.get("gpu_readings")]
    return {name: [value for readings in rounds for value in readings[name]] for name in rounds[0]} if rounds else None


def clock_notes(cells: Sequence[Cell], run: Run | None = None) -> tuple[str, ...]:
    """Say in one sentence where clocks fell during a cell, or what held them down; none where neither was."""
    highest_mhz = None if run is None else run.environment.get("gpu0_max_sm_clock_mhz")
    # By the cause that held clocks down, a value a cell: the share of its readings with it, and their median clock.
    shares: dict[str, list[float]] = {}
    medians_mhz: dict[str, list[float]] = {}
    falls: list[tuple[float, float]] = []  # Of each cell with a fall: its highest clock, and the lowest after it.
    temperatures_c: list[float] = []
    for cell in cells:
        readings = cell.derived.get("gpu_readings") or {}
        causes = [set(text.split(", ")) & SLOWDOWNS for text in readings.get("clock_limits", [])]
        for cause in set().union(*causes):
            clocks = [clock for clock, names in zip(readings["sm_clock_mhz"], causes, strict=True) if cause in names]
            shares.setdefault(cause, []).append(len(clocks) / len(causes))
            # Infinite where no clock was read: the minimum over cells ignores it, and without any, nothing is lost.
            medians_mhz.setdefault(cause, []).append(statistics.median([*filter(None, clocks)] or [math.inf]))
        fall = _fall(_known(readings, "sm_clock_mhz"))
        falls += [fall] if fall else []
        if fall or any(causes):
            temperatures_c += _known(readings, "temperature_c")
    if not shares and not falls:
        return ()
    slowdowns = []
    for cause, shares_of_cells in sorted(shares.items()):
        lost_share = 1 - min(medians_mhz[cause]) / highest_mhz if highest_mhz else 0.0
        count, largest = len(shares_of_cells), max(shares_of_cells)
        slowdowns.append({"name": cause, "count": count, "share": largest, "lost": lost_share})
    deepest = min(falls, key=lambda fall: fall[1] / fall[0], default=None)  # By the lowest clock over the highest.
    facts = {"limits": slowdowns, "falls": falls, "deepest": deepest, "hottest_c": max(temperatures_c, default=None)}
    return sentences(__name__, "clocks", cells=len(cells), **facts)


def _known(readings: Mapping[str, Any], name: str) -> list[float]:
    """Return the values of a column of readings that the GPU told."""
    return [value for value in readings.get(name, ()) if value is not None]


def _fall(clocks: Sequence[float]) -> tuple[float, float] | None:
    """Return the highest clock and the lowest after it (an idle GPU's first clocks are low), or None without a fall."""
    highest = max(clocks, default=0.0)
    after = min(clocks[clocks.index(highest) :]) if clocks else highest
    # Where it falls by more than 3 %, steps that computing limits slow down by more than they spread.
    return (highest, after) if after < 0.97 * highest else None


_ALWAYS_SHOWN = ("context", "precision", "compile")
_PHASES = MODES["train"].phases

_STEADIER = "--interleave SETTING, --rounds 5 or more --steps"


def _bench_of_rounds(rounds: Sequence[Cell], pooled: Cell) -> dict[str, Any]:
    """Return derived columns: rates of the mean step, the largest peaks, the median busy time, others the first's."""
    if not pooled.samples:
        return {}
    first = rounds[0].derived
    mfu_percent = first["mfu_percent"]  # The GPU's peak is not saved; MFU is the TFLOP/s over it.
    peak_tflops = None if mfu_percent is None else 100 * first["tflops"] / mfu_percent
    busy_ms = titles.known_values(rounds, "gpu_busy_ms")
    energies_j = titles.known_values(rounds, "step_energy_j")
    of_all_rounds = {
        "peak_gib": titles.largest_known(rounds, "peak_gib"),
        "gpu_busy_ms": statistics.median(busy_ms) if busy_ms else None,
        "peak_resident_gib": titles.largest_known(rounds, "peak_resident_gib"),
        "gpu_readings": joined_readings(rounds),
        "step_energy_j": statistics.mean(energies_j) if energies_j else None,
    }
    workload = Workload.from_configuration(pooled.configuration)
    rates = workload.rates(pooled.samples["step"], peak_tflops, first.get("flops"))
    # No columns that the rounds lack: cells of a GPU have no resident memory.
    return first | rates | {name: value for name, value in of_all_rounds.items() if name in first}


pool_bench_rounds = partial(titles.pool_cells, combine_derived=_bench_of_rounds)


def bench_tables(
    cells: Sequence[Cell], run: Run | None, percentiles: Sequence[float] = (), baseline: str = ""
) -> list[Table]:
    """Build the table of step times, and that of speed-ups, which is empty where the sweep has nothing to compare.

    Args:
        baseline: settings of the cells that speed-ups are over, as :func:`baseline_values` reads them.
    """
    settings = titles.SETTING_COLUMNS | {"rounds": titles.ROUNDS_COLUMN}
    # Also where all cells have one --attention: the column says that it changed nothing ("the model's own").
    always = (*_ALWAYS_SHOWN, "attention") if any(map(_keeps_attention, cells)) else _ALWAYS_SHOWN
    shown = titles.shown_settings(cells, settings, always)
    title = titles.title("bench", cells, run, settings, shown)
    return [_time_table(cells, run, title, shown, percentiles), _speedups(cells, shown, baseline)]


def _time_table(
    cells: Sequence[Cell], run: Run | None, title: str, settings: dict[str, Column], percentiles: Sequence[float]
) -> Table:
    columns = [
        *titles.SIZE_COLUMNS,
        *settings.values(),
        *named_columns(*(f"{phase}_ms" for phase in _PHASES), "step_ms", spread="samples"),
        *(Column(f"step_ms_p{percent:g}", f"step p{percent:g}", "ms") for percent in percentiles),
        Column("first_measured_ms", "first measured step", "ms"),
        titles.WALL_COLUMN,
        *named_columns(gpu_busy_ms="GPU busy", launch_bound="launch-bound", first_step_s="first step ready"),
        *titles.RATE_COLUMNS,
        *named_columns(tflops="TFLOP/s", mfu_percent="MFU"),
        Column("step_energy_j", "energy", "joules"),
        Column("tokens_per_j", "tokens/J", "tokens_per_j"),
        *named_columns("peak_gib", "peak_resident_gib"),
        Column("sm_clock_mhz", "SM clock", "mhz"),
        *titles.GRAPH_COLUMNS,
        *named_columns(relative_difference_percent="off eager", replayed_difference_percent="replays off"),
        *named_columns(repeated_difference_percent="launched again off", status="status"),
    ]
    hidden = [] if "warmup" in settings else ["first_measured_ms"]  # It shows whether warm-up was too short.
    hidden += titles.redundant_wall_column(cell.samples["step"] for cell in cells if cell.status == "ok")
    rows = [_bench_row(cell, percentiles) for cell in cells]
    notes = [
        *titles.method_notes(cells),
        *titles.notes_of_run(cells, run),
        *_resident_notes(cells),
        *clock_notes(cells, run),
    ]
    notes += sentences(
        __name__,
        "times",
        is_checked=any("relative_difference_percent" in cell.derived for cell in cells),
        is_replayed=any("replayed_difference_percent" in cell.derived for cell in cells),
        has_rounds=any("rounds" in cell.configuration for cell in cells),
        interleaved=[(titles.SETTING_COLUMNS[name].header, values) for name, values in sorted(_interleaved(cells))],
    )
    return Table("bench", title, columns, rows, tuple(notes), steadier=_STEADIER, hidden=hidden)


def _bench_row(cell: Cell, percentiles: Sequence[float]) -> dict[str, Any]:
    """Return a cell's settings and columns by key; a cell that is not ``ok`` lacks most columns."""
    workload = Workload.from_configuration(cell.configuration)
    row = _settings_row(cell) | {"parameters": workload.parameters, "status": cell.status}
    if cell.status != "ok":
        return row | cell.derived
    step = cell.samples["step"]
    row |= {f"{name}_ms": samples for name, samples in cell.samples.items()}
    row |= {f"step_ms_p{percent:g}": step.percentile(percent) for percent in percentiles}
    row |= cell.derived | {"first_measured_ms": step.measured[0], "sm_clock_mhz": median_clock(cell)}
    energy_j = cell.derived.get("step_energy_j")
    if energy_j is not None and workload.user.batch is None:  # A user's batch may be no tokens.
        row["tokens_per_j"] = workload.tokens / energy_j
    busy_ms = cell.derived["gpu_busy_ms"]
    if busy_ms is not None:
        idle_percent = 100 * (1 - busy_ms / step.median)
        row["launch_bound"] = "yes" if idle_percent > titles.LAUNCH_BOUND_IDLE_PERCENT else "no"
    return row


def _keeps_attention(cell: Cell) -> bool:
    """Return whether ``--attention`` left a user's model as it is."""
    return cell.configuration.get("attention") in cell.derived.get("same_attention", ())


def _settings_row(cell: Cell) -> dict[str, Any]:
    return cell.configuration | ({"attention": "the model's own"} if _keeps_attention(cell) else {})


def _resident_notes(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Say that peaks of main memory count what was there before, the least to the most GiB, where it was measured."""
    before_gib = titles.known_values(cells, "resident_before_gib")
    ends = dict.fromkeys(f"{gib:.2f}" for gib in (min(before_gib), max(before_gib))) if before_gib else ()
    return sentences(__name__, "resident", gib=ends) if ends else ()


def gate_warnings(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Warn of cells whose few or noisy steps could not pass ``compare --fail-above``, the gate, against themselves."""
    sides = [  # A side of compare is a list of runs, here one, each a list of rounds.
        [[cell.samples["step"].measured for cell in rounds]]
        for rounds in titles.by_configuration(cells).values()
        if all(cell.status == "ok" for cell in rounds)
    ]
    # ``to_decide``: how many steps or rounds would decide; None where these do.
    undecided = [result for side in sides if (result := compare_sides(side, side)).to_decide is not None]
    if not undecided:
        return ()
    most = max(undecided, key=lambda result: result.to_decide or 0)
    facts = {"undecided": len(undecided), "cells": len(sides), "same_percent": SAME_PERCENT, "most": most}
    return sentences(__name__, "gate", **facts)


def baseline_values(baseline: str, cells: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    """Read the value of each setting that speed-ups are over: ``cuda-graph=off,precision=fp32``.

    Raises:
        UsageError: there are configurations, and none of them has such a setting and value.
    """
    choices = list(dict.fromkeys(f"{setting}={cell[setting]}" for cell in cells for setting in COMPARED_SETTINGS))
    values = {}
    for part in filter(None, baseline.split(",")):
        name, _, value = part.partition("=")
        name, value = name.strip().replace("-", "_"), value.strip()
        if choices and f"{name}={value}" not in choices:
            raise UsageError(f"--baseline '{part}': {choose_from(f'{name}={value}', choices)}")
        values[name] = value
    return values


def speedup_pairs(
    cells: Sequence[Cell], settings: Collection[str], baseline: str = ""
) -> tuple[list[str], list[tuple[Cell, Cell]]]:
    """Return the settings that are compared, and each measured cell with the baseline that its speed-up is over.

    Both differ in nothing but these: the interleaved setting, or else all of how a model is trained that vary. The
    baseline has the value that ``baseline`` asks for, or the default, or, where none measured that, the first cell's.
    """
    names = {setting for setting, _ in _interleaved(cells)} or COMPARED_SETTINGS
    varied = [name for name in names if name in settings and len({cell.configuration.get(name) for cell in cells}) > 1]
    if not varied:
        return [], []
    preferred = {name: Workload.settings()[name].default for name in varied} | baseline_values(baseline)
    values = {name: [cell.configuration.get(name) for cell in cells] for name in varied}
    expected = {name: preferred[name] if preferred[name] in values[name] else values[name][0] for name in varied}

    def unexpected_settings(cell: Cell) -> int:
        return sum(cell.configuration.get(name) != value for name, value in expected.items())

    # Rounds may differ: an interrupted sweep went through some configurations once more than through others.
    groups = titles.by_configuration(cells, ignore=(*varied, "rounds")).values()
    baselines = {id(cell): min(group, key=unexpected_settings) for group in groups for cell in group}
    pairs = [(cell, baselines[id(cell)]) for cell in cells]
    return varied, [(cell, base) for cell, base in pairs if cell is not base and cell.status == base.status == "ok"]


def speedup(cell: Cell, baseline: Cell, name: str) -> Interval:
    """Return how many times as fast as the baseline a phase, or the step, is."""
    ratio = ratio_of_pairs if "interleave" in cell.configuration else ratio_of_medians  # Alternating steps make pairs.
    return ratio(baseline.samples[name], cell.samples[name])


def _speedups(cells: Sequence[Cell], settings: dict[str, Column], baseline: str) -> Table:
    """Build the table of speed-ups, with these columns of settings; it has no rows where nothing can be compared."""
    varied, pairs = speedup_pairs(cells, settings, baseline)
    series = (*_PHASES, "step")
    rows = []
    for cell, base in pairs:
        row = _settings_row(cell) | {"over": ", ".join(str(_settings_row(base).get(name)) for name in varied)}
        shared_series = [name for name in series if name in cell.samples and name in base.samples]
        rows.append(row | {f"{name}_speedup": speedup(cell, base, name) for name in shared_series})
    columns = (
        Column("size", "size"),
        *settings.values(),
        Column("over", "over"),
        *(Column(f"{name}_speedup", name, "ratio", spread="interval") for name in series),
    )
    method = "median ratio of alternating steps" if _interleaved(cells) else "ratio of medians within this run"
    return Table("speedup", f"speed-up: {method}", columns, rows, steadier=_STEADIER)


def _interleaved(cells: Sequence[Cell]) -> set[tuple[str, str]]:
    """Return the settings whose values were measured in turn, each with its values, separated by commas."""
    configurations = [cell.configuration for cell in cells if "interleave" in cell.configuration]
    return {(configuration["interleave"], configuration["interleaved"]) for configuration in configurations}


_COLORS = {"forward": "#1f4e96", "backward": "#c23b22", "optimizer": "#f2c14e"}

# Settings besides the size of which each combination has axes of its own, because times differ too much for one scale.
_SETTINGS_OF_AXES = ("mode", "batch_size", "vocab_size", "context")

_BAR_HEIGHT = 0.75  # Of the distance between bars.
_INCHES_PER_BAR = 0.27
_INCHES_BETWEEN = 0.66  # Title, ticks and the distance to the next axes.

_LABEL_ROOM = 0.22  # Share of an axis that the label of the longest bar takes.


def plot_bench(cells: Sequence[Cell], path: Path, baseline: str = "") -> None:
    """Draw axes for each model: a bar of phases for each way of training it, and next to it the step's speed-up."""
    from matplotlib.patches import Patch

    settings = titles.shown_settings(cells, titles.SETTING_COLUMNS | {"rounds": titles.ROUNDS_COLUMN})
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_model_text(cell), []).append(cell)
    # Bars that differ in no setting still need a label.
    label_settings = [name for name in settings if name not in _SETTINGS_OF_AXES] or ["precision", "compile"]
    _, pairs = speedup_pairs(cells, settings, baseline)
    baselines = {id(cell): base for cell, base in pairs}
    bar_counts = [len(group) for group in groups.values()] or [1]  # Without cells the picture has empty axes.
    height = 0.5 + sum(bar_counts) * _INCHES_PER_BAR + len(bar_counts) * _INCHES_BETWEEN
    columns = 2 if pairs else 1
    figure, axes = new_axes(10, height, len(bar_counts), columns, gridspec_kw={"height_ratios": bar_counts})
    largest_speedup = max((speedup(*pair, "step").estimate for pair in pairs), default=1.0)
    for drawings, (model, group) in zip(axes, groups.items(), strict=False):  # The empty axes have no group.
        drawings[0].set_title(model, fontsize=10, loc="left")
        _draw_times(drawings[0], group)
        drawings[0].set_yticks(range(len(group)), [_training_label(cell, label_settings) for cell in group], fontsize=8)
        if pairs:
            _draw_speedups(drawings[1], group, baselines, largest_speedup)
            drawings[1].set_yticks([])  # Its bars stand in line with the labelled ones.
        for drawing in drawings:
            drawing.set_ylim(len(group) - 0.5, -0.5)  # The first bar on top.
            drawing.grid(axis="x", alpha=0.3)
            drawing.set_axisbelow(True)
            drawing.tick_params(axis="x", labelsize=8)
            drawing.spines[["top", "right"]].set_visible(False)
    axes[-1][0].set_xlabel("step, ms")
    if pairs:
        axes[-1][1].set_xlabel("speed-up of the step over the bar in outline")
    phases = [phase for phase in _COLORS if any(phase in cell.samples for cell in cells)]
    if phases:
        handles = [Patch(color=_COLORS[phase], label=phase) for phase in phases]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9)
    write_figure(figure, path)


def _model_text(cell: Cell) -> str:
    workload = Workload.from_configuration(cell.configuration)
    size, parameters = workload.size, workload.parameters
    # No formula counts a user's model, and a cell that failed has not counted it.
    model = workload.user.model if parameters is None else f"{format_number(parameters, 'parameters')} parameters"
    mode = [] if workload.is_default("mode") else [workload.mode]
    return ", ".join([f"{size.name}, {model}, batch {size.batch_size} x context {size.context}", *mode])


def _training_label(cell: Cell, settings: Sequence[str]) -> str:
    labels = {name: str(cell.configuration.get(name)) for name in settings}
    for name in labels.keys() & {"cuda_graph", "warmup"}:
        labels[name] = f"{titles.SETTING_COLUMNS[name].header} {labels[name]}"
    if "compile" in labels:
        compilations = {"off": "eager", "block": "compiled by block", "model": "compiled whole"}
        labels["compile"] = compilations[labels["compile"]]
    return ", ".join(labels.values())


def _draw_times(drawing: Axes, group: Sequence[Cell]) -> None:
    """Draw each cell's mean times of phases, one after another, and label the bar with the mean step."""
    longest = 0.0
    for row, cell in enumerate(group):
        if cell.status != "ok":
            drawing.text(0, row, f" {cell.status}", fontsize=8, va="center", color="#c23b22")
            continue
        left = 0.0
        for phase in MODES[cell.configuration["mode"]].phases:
            mean = cell.samples[phase].mean
            drawing.barh(row, mean, height=_BAR_HEIGHT, left=left, color=_COLORS[phase])
            left += mean
        drawing.text(left, row, f" {format_number(cell.samples['step'].mean, 'ms')} ms", fontsize=8, va="center")
        longest = max(longest, left)
    drawing.set_xlim(0, longest * (1 + _LABEL_ROOM) or 1)  # Without any bar, axes of some width.


def _draw_speedups(drawing: Axes, group: Sequence[Cell], baselines: dict[int, Cell], largest: float) -> None:
    """Draw the speed-ups of the group's cells, and baselines in outline; all groups' axes end at the largest one."""
    baseline_ids = {id(baseline) for baseline in baselines.values()}
    for row, cell in enumerate(group):
        if id(cell) in baselines:
            ratio = speedup(cell, baselines[id(cell)], "step").estimate
            drawing.barh(row, ratio, height=_BAR_HEIGHT, color="#8c8c8c")
            drawing.text(ratio, row, f" {ratio:.2f} x", fontsize=8, va="center")
        elif id(cell) in baseline_ids:
            drawing.barh(row, 1.0, height=_BAR_HEIGHT, facecolor="none", edgecolor="#8c8c8c", linewidth=0.8)
    drawing.axvline(1, color="black", linewidth=0.6)
    drawing.set_xlim(0, largest * (1 + _LABEL_ROOM))


SAVED = SavedCommand(
    lambda cells, run, options: bench_tables(cells, run, options.percentiles, options.baseline),
    lambda cells, run, options: (
        {"bench": partial(plot_bench, cells, baseline=options.baseline)} if measured_cells(cells) else {}
    ),
    pool_bench_rounds,
)
