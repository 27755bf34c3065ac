"""The tables of ``nsys``, built from its cells or from one report; columns are described in ``docs/columns.md``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336sys.measure.profile.summary import Profile
from cs336sys.report.profile.attention import attention_table
from cs336sys.report.profile.kernels import kernel_table, share_table, top_kernel_table
from cs336sys.report.profile.measured import Measured
from cs336sys.report.profile.phases import phase_table, precision_table
from cs336sys.report.profile.plots import plot_shares
from cs336sys.report.tables import Column, Table, with_rows
from cs336sys.report.titles import SETTING_COLUMNS, SIZE_COLUMNS, method_notes, shown_settings, title
from cs336sys.results import Cell, Run
from cs336sys.workload import ProfileWorkload, Workload

# Beside the number of kernels that a phase launched.
_MODEL_KERNELS = Column("model_kernels", "kernels of the model")
_SETTINGS = SETTING_COLUMNS | {"kernels": _MODEL_KERNELS, "profiler": Column("profiler", "profiler")}
_ALWAYS_SHOWN = ("context", "precision")


def profile_tables(
    cells: Sequence[Cell], run: Run | None, *, top: int, full_names: bool, compare_precision: bool = False
) -> list[Table]:
    """All tables of a sweep.

    Args:
        top: kernels shown of each phase.
        full_names: show kernels by their whole names.
        compare_precision: add the table of fp32 against bf16.
    """
    shown = shown_settings(cells, _SETTINGS, _ALWAYS_SHOWN)
    measured = _measured(cells)
    failed = [_labels(cell) | {"status": cell.status} for cell in cells if cell.status != "ok"]
    notes = [*method_notes(cells), *_profilers(cells)]
    phases = phase_table(
        measured, failed, (*SIZE_COLUMNS, *shown.values()), title("nsys", cells, run, _SETTINGS, shown), notes
    )
    labels = (SIZE_COLUMNS[0], *shown.values())
    tables = [phases, *_kernel_tables(measured, labels, top, full_names)]
    if compare_precision:
        tables.append(precision_table(measured, [label for label in labels if label.key != "precision"]))
    return tables


def plot_profiles(cells: Sequence[Cell], path: Path) -> None:
    """The picture of a sweep (:func:`plot_shares`)."""
    shown = shown_settings(cells, _SETTINGS, _ALWAYS_SHOWN)
    plot_shares(_measured(cells), (SIZE_COLUMNS[0], *shown.values()), path)


def report_tables(profile: Profile, name: str, *, top: int, full_names: bool) -> list[Table]:
    """All tables of one report.

    Args:
        name: of its file.
        top, full_names: as of :func:`profile_tables`.
    """
    measured, labels = _of_report(profile)
    notes = [profile.phases_are] if profile.phases_are else []
    phases = phase_table(measured, [], labels, f"nsys: {name}, made by {profile.profiler}", notes)
    return [phases, *_kernel_tables(measured, labels, top, full_names)]


def plot_report(profile: Profile, path: Path) -> None:
    """The picture of one report (:func:`plot_shares`)."""
    plot_shares(*_of_report(profile), path)


def _of_report(profile: Profile) -> tuple[list[Measured], tuple[Column, ...]]:
    """The profile, and the columns that say what was run, where the report knows it."""
    values: dict[str, Any] = {}
    labels: tuple[Column, ...] = ()
    if profile.configuration:
        workload = Workload.from_configuration(profile.configuration)
        values = profile.configuration | {"parameters": workload.parameters}
        labels = (SIZE_COLUMNS[0], *(SETTING_COLUMNS[name] for name in (*_ALWAYS_SHOWN, "compile", "mode")))
    return [Measured(values, profile)], labels


def _measured(cells: Sequence[Cell]) -> list[Measured]:
    return [
        Measured(_labels(cell), Profile.from_json(cell.derived["profile"]), cell)
        for cell in cells
        if cell.status == "ok"
    ]


def _labels(cell: Cell) -> dict[str, Any]:
    training = ProfileWorkload.from_configuration(cell.configuration).training
    values = cell.configuration | {"parameters": cell.derived.get("parameters", training.parameters)}
    values[_MODEL_KERNELS.key] = values.pop("kernels", None)
    return values


def _profilers(cells: Sequence[Cell]) -> list[str]:
    used = {cell.derived["profiler"]: cell.derived["profiler_reason"] for cell in cells if cell.status == "ok"}
    return [f"profiled by {name}" + (f", because {reason}" if reason else "") for name, reason in used.items()]


def _kernel_tables(measured: Sequence[Measured], labels: Sequence[Column], top: int, full_names: bool) -> list[Table]:
    if not measured:
        return []
    tables = [
        top_kernel_table(measured, labels),
        kernel_table(measured, labels, top, full_names),
        kernel_table(measured, labels, top, full_names, without_matmul=True),
        share_table(measured, labels),
    ]
    return [*tables, *with_rows(attention_table(measured, labels))]
