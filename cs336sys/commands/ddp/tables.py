"""The tables of ``ddp``, built from its cells; columns and formulas are described in ``docs/columns.md``."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cs336sys.accounting import communication
from cs336sys.accounting.memory import GIB, training_state
from cs336sys.commands.rank_training import tables as of_steps
from cs336sys.results.model import Cell, Run
from cs336sys.settings.parallel import ParallelWorkload, bucket_name
from cs336sys.tables import titles
from cs336sys.tables.outputs import new_axes, write_figure
from cs336sys.tables.saved import Pictures, Presentation, SavedCommand, measured_cells, of_run
from cs336sys.tables.table import Column, Table, named_columns, sentences

_ALWAYS_SHOWN = ("precision", "compile")

# Settings by which the cells of one comparison differ.
_COMPARED = ("strategy", "bucket_mb", "trace", "rounds")

_STEADIER = f"--rounds 3, {of_steps.STEADIER}"


def _ddp_of_rounds(rounds: Sequence[Cell], pooled: Cell) -> dict[str, Any]:
    """Return the first round's columns, with rates and exposed times of all steps together, and the largest peak."""
    if not pooled.samples:
        return {}
    training = ParallelWorkload.from_configuration(pooled.configuration).training
    return (
        rounds[0].derived
        | of_steps.exposure_columns(pooled.samples, rounds[0].derived)
        | training.throughput(pooled.samples["step"])
        | {"peak_gib": titles.largest_known(rounds, "peak_gib")}
    )


pool_ddp_rounds = partial(titles.pool_cells, combine_derived=_ddp_of_rounds)


def ddp_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Build tables of steps, of their phases, and of bucket sizes next to the model of their overhead."""
    settings = of_steps.PARALLEL_SETTING_COLUMNS | {"rounds": titles.ROUNDS_COLUMN}
    shown = titles.shown_settings(cells, settings, _ALWAYS_SHOWN)
    identity = (*shown.values(), Column("strategy", "mode"), Column("bucket_mb", "bucket, MB"))
    rows = of_steps.step_rows(cells, baseline="naive", compared=_COMPARED)
    heading = titles.title("ddp", cells, run, settings, shown)
    columns = (
        *identity,
        *named_columns("step_ms", unsynchronized_ms="without communication", spread="samples"),
        *named_columns("exposed_ms", exposed_percent="of the step", spread="interval"),
        *named_columns(communication_ms="communication alone", spread="samples"),
        *named_columns(running_ms="as it ran"),
        *named_columns("hidden_percent", speedup="over naive", spread="interval"),
        Column("calls", "calls", "count"),
        Column("communicated_bytes", "communicated", "decimal_bytes"),
        *named_columns("peak_gib"),
    )
    calls = [(cell.derived.get("gradient_calls", 0), cell.derived.get("calls", 0)) for cell in cells]
    notes = sentences(
        __name__,
        "steps",
        is_measured=any(cell.status == "ok" for cell in cells),
        has_call_without_gradients=any(0 < gradient_calls < all_calls for gradient_calls, all_calls in calls),
        has_rounds=any("rounds" in cell.configuration for cell in cells),
    )
    sized_identity = (Column("size", "size"), *identity)  # parallel_step_table() adds the columns of a size itself.
    return [
        of_steps.parallel_step_table("ddp", heading, cells, run, columns, rows, notes, _STEADIER),
        # A note adds " it in the backward pass".
        of_steps.parallel_phase_table(rows, sized_identity, torch_averaging="torch's DDP does"),
        _bucket_table(cells, (Column("size", "size"), *shown.values())),
    ]


def link_of(cell: Cell) -> communication.AlphaBeta:
    """Return latency and bandwidth of all-reduces, measured with a cell of strategy ``bucketed``."""
    return communication.AlphaBeta(cell.derived["link_latency_s"], cell.derived["link_bytes_per_s"])


def bucket_sweeps(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group measured bucketed cells that differ in the bucket size alone, those with the smallest buckets first."""
    bucketed = [cell for cell in cells if cell.status == "ok" and cell.configuration["strategy"] == "bucketed"]
    sweeps = titles.by_configuration(bucketed, ignore=_COMPARED).values()
    return [sorted(sweep, key=lambda cell: -cell.derived["gradient_calls"]) for sweep in sweeps]


def _bucket_table(cells: Sequence[Cell], identity: tuple[Column, ...]) -> Table:
    """Build the table of bucket sizes, with the overhead that the model predicts, and a note on each sweep's best."""
    rows, notes = [], sentences(__name__, "buckets")
    sweeps = bucket_sweeps(cells)  # Cells of one sweep differ in buckets alone: the first stands for all in settings.
    differing = [column for column in identity if len({sweep[0].configuration.get(column.key) for sweep in sweeps}) > 1]
    for sweep in sweeps:
        for cell in sweep:
            link, sent_bytes, count = link_of(cell), cell.derived["communicated_bytes"], cell.derived["gradient_calls"]
            row = cell.configuration | {"buckets": count, "mean_bucket_bytes": sent_bytes / count, "predicted_ms": None}
            if link.has_bandwidth:  # Else larger messages took no longer, and the model has no bandwidth to go by.
                overhead_s = communication.bucketing_overhead_s(sent_bytes, count, link.bytes_per_s, link.latency_s)
                row["predicted_ms"] = 1e3 * overhead_s
            rows.append(row | {"exposed_ms": of_steps.exposure(cell)["exposed_ms"], "step_ms": cell.samples["step"]})
        settings = ", ".join(f"{column.header} {sweep[0].configuration.get(column.key)}" for column in differing)
        # Which buckets the model would choose, by the link's bandwidth and latency.
        link, sent_bytes = link_of(sweep[0]), sweep[0].derived["communicated_bytes"]
        best_bytes = float(communication.optimal_bucket_on_link_bytes(sent_bytes, link)) if link.has_bandwidth else 0.0
        overhead_ms = 1e3 * communication.overhead_on_link_s(sent_bytes, best_bytes, link) if best_bytes else 0.0
        facts = {"settings": settings, "link": link, "best_bytes": best_bytes, "overhead_ms": overhead_ms}
        notes += sentences(__name__, "optimum", **facts)
    columns = (
        *identity,
        Column("bucket_mb", "bucket, MB"),
        Column("buckets", "buckets", "count"),
        Column("mean_bucket_bytes", "mean bucket", "decimal_bytes"),
        *named_columns(predicted_ms="predicted overhead"),
        *named_columns("exposed_ms", spread="interval"),
        *named_columns("step_ms", spread="samples"),
    )
    heading = "bucket sizes and the model of their overhead"
    return Table("buckets", heading, columns, rows, tuple(dict.fromkeys(notes)), of_steps.STEADIER)


def ddp_plan(workloads: Sequence[ParallelWorkload]) -> Table:
    """Build the table of ``--dry-run``: each cell with the memory of a rank's training state."""
    columns = (
        *named_columns(strategy="mode", bucket_mb="bucket, MB", share="sequences a rank"),
        *named_columns(state_gib="parameters, gradients and optimizer of a rank", gradients_gib="gradients to average"),
    )

    def memory(workload: ParallelWorkload) -> dict[str, Any]:
        state = training_state(workload.training.size, workload.training.precision)
        return {"state_gib": state.total / GIB, "gradients_gib": state.gradients / GIB}

    return of_steps.parallel_plan(
        "ddp: cells and the memory of their state", workloads, of_steps.PARALLEL_SETTING_COLUMNS, columns, memory
    )


def plot_buckets(cells: Sequence[Cell], path: Path, option: str = "--plot-buckets") -> None:
    """Draw, for each sweep, overhead over the mean size of a bucket: exposed times as points, the model as a curve."""
    import numpy as np

    sweeps = bucket_sweeps(cells)
    count = max(1, len(sweeps))
    figure, axes = new_axes(0.5 + 4.2 * count, 4, rows=1, columns=count)
    settings = titles.shown_settings(cells, of_steps.PARALLEL_SETTING_COLUMNS)
    for drawing, sweep in zip(axes.flat, sweeps, strict=False):  # Without a sweep the picture has empty axes.
        total_bytes, link = sweep[0].derived["communicated_bytes"], link_of(sweep[0])
        sizes_mb = [total_bytes / cell.derived["gradient_calls"] / 1e6 for cell in sweep]
        if link.has_bandwidth:
            # From a quarter of the smallest to one bucket of all.
            curve_bytes = np.geomspace(min(sizes_mb) / 4 * 1e6, total_bytes, 61).tolist()
            predicted_ms = [1e3 * communication.overhead_on_link_s(total_bytes, size, link) for size in curve_bytes]
            # The handout's names: s bytes in n buckets at a bandwidth of w, and a cost of o for each call.
            drawing.plot([size / 1e6 for size in curve_bytes], predicted_ms, color="C7", label="model: s / (n w) + n o")
        exposed_ms = [cell.derived["exposed_ms"] for cell in sweep]
        drawing.plot(sizes_mb, exposed_ms, "o", color="C1", label="measured: exposed")
        for size_mb, value_ms, cell in zip(sizes_mb, exposed_ms, sweep, strict=True):
            label, point = bucket_name(cell.configuration["bucket_mb"]), (size_mb, value_ms)
            drawing.annotate(label, point, textcoords="offset points", xytext=(0, 6), ha="center", fontsize=7)
        drawing.set_xscale("log")
        drawing.margins(x=0.08, y=0.08)  # Room for half a label next to the curve's end, and for its height.
        drawing.set_ylim(bottom=min(0.0, *exposed_ms))
        drawing.set(xlabel="mean bucket, MB", ylabel="overhead, ms")
        names = (str(sweep[0].configuration[name]) for name in ("size", *settings))
        drawing.set_title(" ".join(names), fontsize=9)
        drawing.grid(alpha=0.3)
        drawing.legend(fontsize=7)
    write_figure(figure, path, option)


def _ddp_pictures(cells: Sequence[Cell], run: Run | None, options: Presentation) -> Pictures:
    pictures: dict[str, Callable[[Path], None]] = {}
    if any(cell.derived["timeline"] is not None for cell in measured_cells(cells)):
        pictures["timelines"] = partial(of_steps.plot_timelines, cells)
    if bucket_sweeps(cells):
        pictures["buckets"] = partial(plot_buckets, cells, option="--plot")
    return {**pictures, **of_steps.scaling_picture(cells)}


SAVED = SavedCommand(of_run(of_steps.with_scaling(ddp_tables)), _ddp_pictures, pool_ddp_rounds)
