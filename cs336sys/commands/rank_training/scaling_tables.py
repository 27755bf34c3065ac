"""Scaling of ``ddp`` and ``shard``: cells that differ in the number of ranks, as a table and as a picture."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cs336sys.accounting.sharding.cells import memory_of
from cs336sys.commands.rank_training.tables import STEADIER, exposure
from cs336sys.results.model import Cell, configuration_key
from cs336sys.results.statistics import Interval, ratio
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.tables.outputs import Axes, new_axes, write_figure
from cs336sys.tables.saved import Pictures, RunTableBuilder
from cs336sys.tables.table import Column, Table, by_key, named_columns
from cs336sys.tables.titles import RATE_COLUMNS, columns_of, shown_settings

_ALONG = ("world_size", "mesh", "trace")  # Settings that differ along a curve, or that no step depends on.

# Settings of a strategy: on one rank there is nothing that they could change.
_OF_STRATEGIES = ("strategy", "prefetch", "keep_gathered", "bucket_mb")

_SETTING_COLUMNS = columns_of(ParallelWorkload, *_ALONG, "batch_size", "mode") | by_key(
    Column("prefetch", "prefetch"), Column("bucket_mb", "bucket, MB")
)


@dataclass(frozen=True)
class Curve:
    """Measured cells that are alike but for the number of ranks, the fewest first: others are compared with those."""

    scaling: str  # ``strong``: the batch stays the same; ``weak``: the sequences of a rank do.
    cells: tuple[Cell, ...]

    def linear_percent(self, cell: Cell) -> Interval | None:
        """Return the rate of a rank in percent of that on the fewest ranks; None on these."""
        first = self.cells[0]
        if cell is first:
            return None
        faster = ratio(first.samples["step"], cell.samples["step"])
        # A rank's rate is its share of the batch over the step.
        percent = 100 * _share(cell) / _share(first)
        return Interval(percent * faster.estimate, percent * faster.low, percent * faster.high, neutral=100.0)


def _share(cell: Cell) -> float:
    """Return the sequences of a rank."""
    return cell.configuration["batch_size"] / cell.configuration["world_size"]


def scaling_curves(cells: Sequence[Cell]) -> list[Curve]:
    """Return curves of at least two numbers of ranks; where a strategy lacks one rank, ``none`` on one rank will do."""
    measured = [cell for cell in cells if cell.status == "ok"]
    ignored_on_one_rank = (*_ALONG, *_OF_STRATEGIES)
    single_ranks = {
        configuration_key(cell.configuration, ignore=ignored_on_one_rank): cell
        for cell in measured
        if cell.configuration["world_size"] == 1 and cell.configuration["strategy"] == "none"
    }
    # By kind, the settings that all cells share, and the batch on one rank; a curve's cells by their number of ranks.
    curves: dict[tuple[str, str, float], dict[int, Cell]] = {}
    for cell in measured:
        configuration = cell.configuration
        # Each cell is on a curve of either kind: with its name, the settings that differ along it, and the batch on one
        # rank where it begins: the whole batch or the share of a rank.
        starts = (("strong", _ALONG, configuration["batch_size"]), ("weak", (*_ALONG, "batch_size"), _share(cell)))
        for scaling, ignored, batch in starts:
            curve = curves.setdefault((scaling, configuration_key(configuration, ignore=ignored), batch), {})
            one_rank = {**configuration, "batch_size": int(batch)}
            single_rank = single_ranks.get(configuration_key(one_rank, ignore=ignored_on_one_rank))
            if single_rank is not None and batch == int(batch):  # A share may be a fraction, which no rank has.
                curve.setdefault(1, single_rank)  # A cell of the strategy itself on one rank takes its place.
            curve[configuration["world_size"]] = cell
    return [
        Curve(scaling, tuple(curve[ranks] for ranks in sorted(curve)))
        for (scaling, *_), curve in sorted(curves.items(), key=lambda item: item[0][0])  # Strong before weak.
        if len(curve) > 1
    ]


def with_scaling(tables: RunTableBuilder) -> RunTableBuilder:
    """Return a function that builds these tables of cells, and those of :func:`scaling_tables`."""
    return lambda cells, run: [*tables(cells, run), *scaling_tables(cells)]


def scaling_tables(cells: Sequence[Cell]) -> list[Table]:
    """Build the table of the cells of every curve, if cells were measured on several numbers of ranks."""
    curves = scaling_curves(cells)
    rows = [_curve_row(curve, cell) for curve in curves for cell in curve.cells]
    settings = shown_settings([cell for curve in curves for cell in curve.cells], _SETTING_COLUMNS)
    columns = (
        *named_columns("scaling", "size"),
        *settings.values(),
        *named_columns("strategy", world_size="ranks", batch_size="batch"),
        *named_columns("step_ms", spread="samples"),
        *RATE_COLUMNS,
        *named_columns(linear_percent="of linear", exposed_percent="exposed", spread="interval"),
        *named_columns("peak_gib", "predicted_peak_gib"),
    )
    notes = (
        "strong: the same batch on more ranks; weak: as many sequences a rank; of linear: the rate of a rank, of that "
        "on the fewest ranks",
    )
    return [Table("scaling", "speed and memory by ranks", columns, rows, notes, STEADIER)]


def _rate_column(cells: Sequence[Cell]) -> Column:
    """Return the column of tokens per second, or of examples where all cells have these."""
    has_examples = [cell.derived.get("examples_per_s") is not None for cell in cells if cell.status == "ok"]
    tokens, examples = RATE_COLUMNS
    return examples if has_examples and all(has_examples) else tokens


def _curve_row(curve: Curve, cell: Cell) -> dict[str, Any]:
    return {
        **cell.configuration,
        **cell.derived,
        **exposure(cell),
        "scaling": curve.scaling,
        "step_ms": cell.samples["step"],
        "linear_percent": curve.linear_percent(cell),
        "peak_gib": _peak_gib(cell, "measured"),
        "predicted_peak_gib": _peak_gib(cell, "predicted"),
    }


def _peak_gib(cell: Cell, source: str) -> float | None:
    """Return the peak of a rank, ``measured`` or ``predicted``; on a CPU that of ``shard``'s timeline; None without."""
    peaks = [peak for peak in (cell.derived.get("peak_gib"), *cell.derived.get("peaks_gib", ())) if peak is not None]
    if source == "measured" and peaks:
        return max(peaks)
    moments = memory_of(cell)[source] if "memory" in cell.derived else []
    return next((moment.total_gib for moment in moments if moment.moment == "peak"), None)


def plot_scaling(cells: Sequence[Cell], path: Path, option: str = "--plot-scaling") -> None:
    """Draw tokens/s, exposed communication and a rank's memory over the ranks, for strong and for weak scaling."""
    curves = scaling_curves(cells)
    scalings = list(dict.fromkeys(curve.scaling for curve in curves)) or ["strong"]
    figure, axes = new_axes(width=12, height=0.6 + 3.4 * len(scalings), rows=len(scalings), columns=3)
    rate = _rate_column(cells).header
    settings = shown_settings([curve.cells[-1] for curve in curves], _SETTING_COLUMNS)
    for row, scaling in zip(axes, scalings, strict=True):
        drawn = [curve for curve in curves if curve.scaling == scaling]
        for curve in drawn:
            _draw_curve(row, curve, _curve_name(curve, list(settings)))
        ranks = sorted({cell.configuration["world_size"] for curve in drawn for cell in curve.cells})
        for drawing, quantity in zip(row, (rate, "exposed, % of the step", "peak of a rank, GiB"), strict=True):
            drawing.set_xscale("log", base=2)
            drawing.set_xticks(ranks, [str(count) for count in ranks])
            drawing.minorticks_off()
            drawing.set(xlabel="ranks", ylabel=quantity)
            drawing.set_ylim(bottom=0)
            drawing.grid(alpha=0.3)
        rates, _, peaks = row
        rates.set_title(f"{scaling} scaling; dotted: linear", fontsize=9)
        if any(line.get_linestyle() == "--" for line in peaks.lines):
            peaks.set_title("dashed: predicted", fontsize=9)
        if drawn:
            rates.legend(fontsize=7)
    write_figure(figure, path, option)


def _curve_name(curve: Curve, settings: Sequence[str]) -> str:
    """Name a curve by its strategy, the settings that curves differ in, and its batch."""
    cell = curve.cells[-1]
    configuration = cell.configuration
    batch = f"batch {configuration['batch_size']}" if curve.scaling == "strong" else f"{_share(cell):g} a rank"
    values = {name: configuration[name] for name in settings if configuration.get(name) is not None}
    varied = (  # A number alone would say nothing.
        f"{name.replace('_', ' ')} {value:g}" if isinstance(value, int | float) else str(value)
        for name, value in values.items()
    )
    return ", ".join([configuration["strategy"], *varied, batch])


def _draw_curve(row: Sequence[Axes], curve: Curve, name: str) -> None:
    """Draw a curve into axes of rates, with its line of linear scaling, of exposed communication, and of peaks."""
    rates, exposed, peaks = row
    ranks = [cell.configuration["world_size"] for cell in curve.cells]
    per_s = [_or_nan(cell.derived[_rate_column(curve.cells).key]) for cell in curve.cells]
    (line,) = rates.plot(ranks, per_s, marker="o", label=name)
    color = line.get_color()
    rates.plot(ranks, [per_s[0] * count / ranks[0] for count in ranks], linestyle=":", color=color, alpha=0.6)
    percents = [(count, exposure(cell).get("exposed_percent")) for count, cell in zip(ranks, curve.cells, strict=True)]
    measured = [(count, percent) for count, percent in percents if percent is not None]
    estimates, lows, highs = (
        [max(getattr(percent, end), 0.0) for _, percent in measured] for end in ("estimate", "low", "high")
    )  # The axis begins at 0.
    errors = [list(map(operator.sub, estimates, lows)), list(map(operator.sub, highs, estimates))]  # Below, above.
    exposed.errorbar([count for count, _ in measured], estimates, errors, marker="o", capsize=3, color=color)
    for source, marker, line_style in (("measured", "o", "-"), ("predicted", "_", "--")):
        peak_gib = [_or_nan(_peak_gib(cell, source)) for cell in curve.cells]
        if any(map(math.isfinite, peak_gib)):
            peaks.plot(ranks, peak_gib, marker=marker, linestyle=line_style, color=color)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def scaling_picture(cells: Sequence[Cell]) -> Pictures:
    return {"scaling": partial(plot_scaling, cells, option="--plot")} if scaling_curves(cells) else {}
