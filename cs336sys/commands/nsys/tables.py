"""The tables of ``nsys``, built from its cells or from one report; columns are described in ``docs/columns.md``."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336sys.accounting.flops import attention_matmuls, attention_softmax
from cs336sys.capture.range_names import FINAL_MATMUL, SCORES, SOFTMAX, STEP
from cs336sys.capture.reading import AnalysedCaptures
from cs336sys.capture.summary import Profile, RangeTime
from cs336sys.capture.taxonomy import Category, category_of
from cs336sys.commands.trace.kernel_tables import MeasuredProfile, phase_kernel_tables, plot_shares
from cs336sys.commands.trace.tables import part_table, verdict, verdict_table
from cs336sys.results.model import Cell, Run, configuration_key
from cs336sys.settings.profiling import ProfileWorkload
from cs336sys.settings.training import Workload
from cs336sys.tables import titles
from cs336sys.tables.saved import SavedCommand, measured_cells, picture_of_measured
from cs336sys.tables.table import Column, Table, named_columns, sentences, with_rows

_OTHER = "other"


def attention_table(measured: Sequence[MeasuredProfile], labels: Sequence[Column]) -> Table:
    """Build the table of the softmax's time, FLOPs and bytes over those of the matmuls, where attention has parts."""
    with_parts = [run for run in measured if {SCORES, SOFTMAX} <= {part.name for part in run.profile.parts}]
    rows = [{**run.labels, **_attention_row(run)} for run in with_parts]
    columns = (
        *labels,
        *named_columns(scores_ms="Q K^T", final_ms="P V", softmax_ms="softmax", other_ms="scale, mask, copies"),
        *named_columns(time_ratio="softmax / matmuls: time", flops_ratio="FLOPs", bytes_ratio="bytes"),
        *named_columns(matmul_tflops="matmuls", softmax_tflops="softmax"),
        *named_columns(matmul_gbps="matmuls", softmax_gbps="softmax"),
    )
    title, notes = "nsys: softmax against the matmuls inside attention", sentences(__name__, "attention")
    return Table("attention", title, columns, rows, notes=notes)


def _attention_row(measured: MeasuredProfile) -> dict[str, Any]:
    """Return times of a step's attention, and where counts are known what they are over FLOPs and bytes."""
    total_ns: Counter[str] = Counter()
    for kernel in measured.profile.part_kernels:
        # Kernels around the products, which scale, mask and copy, are no part of these.
        is_of_part = kernel.range == SOFTMAX or category_of(kernel.kernel) == Category.MATMUL
        total_ns[kernel.range if is_of_part else _OTHER] += kernel.total_ns
    keys = {SCORES: "scores_ms", FINAL_MATMUL: "final_ms", SOFTMAX: "softmax_ms", _OTHER: "other_ms"}
    row = {key: total_ns[part] / measured.steps / 1e6 for part, key in keys.items()}  # In ms of a step.
    matmul_ms, softmax_ms = row["scores_ms"] + row["final_ms"], row["softmax_ms"]
    if not matmul_ms or not softmax_ms:
        return row
    row["time_ratio"] = softmax_ms / matmul_ms
    configuration = measured.profile.configuration
    if configuration and (workload := Workload.from_configuration(configuration)).is_ours:
        matmuls = attention_matmuls(workload.size, workload.precision)
        softmax = attention_softmax(workload.size, workload.precision)
        row |= {
            "flops_ratio": softmax.flops / matmuls.flops,
            "bytes_ratio": softmax.bytes / matmuls.bytes,
            "matmul_tflops": matmuls.flops / matmul_ms / 1e9,  # From FLOPs a ms.
            "softmax_tflops": softmax.flops / softmax_ms / 1e9,
            "matmul_gbps": matmuls.bytes / matmul_ms / 1e6,  # From bytes a ms.
            "softmax_gbps": softmax.bytes / softmax_ms / 1e6,
        }
    return row


def phase_table(
    measured: Sequence[MeasuredProfile],
    failed: Sequence[dict[str, Any]],
    labels: Sequence[Column],
    title: str,
    notes: Sequence[str],
) -> Table:
    """Build the table of phases: time, how long the GPU was busy, and whether the CPU held it up.

    Args:
        failed: rows of cells without a profile.
        labels: the columns that say what was run.
    """
    on_gpu = all(run.profile.is_gpu for run in measured)
    work, gpu = ("kernels", "GPU ") if on_gpu else ("operations", "")
    columns = (
        *labels,
        *named_columns("phase", gpu="GPU"),
        *named_columns(unprofiled_ms="without profiler", spread="samples"),
        *named_columns("annotated_ms", wall_ms="CPU wall", span_ms=f"{gpu}span", busy_ms=f"{gpu}busy"),
        *named_columns(kernel_ms=f"sum of {work}"),
        *named_columns("idle_percent", launch_bound="launch-bound", kernels=work, status="status"),
    )
    rows = [{**run.labels, **_phase_row(run, row), "status": "ok"} for run in measured for row in run.ranges]
    return Table("phases", title, columns, [*rows, *failed], notes=(*notes, *_profile_notes(measured)))


def _phase_row(measured: MeasuredProfile, row: RangeTime) -> dict[str, Any]:
    """Return means of one occurrence of a phase, and whether the GPU waits for the CPU in it."""
    unprofiled = measured.unprofiled(row.name)
    wall_ms, span_ms, busy_ms, kernel_ms = (
        ns / row.count / 1e6 for ns in (row.wall_ns, row.span_ns, row.busy_ns, row.kernel_ns)
    )
    # A profiler slows the CPU down and not the GPU, so the step without one says how long the GPU really waits. The
    # operations of a CPU are themselves slowed down.
    whole_ms = unprofiled.median if unprofiled and measured.profile.is_gpu else wall_ms
    idle_percent = launch_bound = None
    if measured.profile.is_idle_known and whole_ms:
        idle_percent = max(0.0, 100 * (1 - busy_ms / whole_ms))
        if measured.profile.is_gpu:
            launch_bound = "yes" if idle_percent > titles.LAUNCH_BOUND_IDLE_PERCENT else "no"
    return {
        "phase": row.name,
        "gpu": row.gpu,
        "unprofiled_ms": unprofiled,
        "annotated_ms": measured.unprofiled("annotated") if row.name == STEP else None,  # Ranges, no profiler.
        **{"wall_ms": wall_ms, "span_ms": span_ms, "busy_ms": busy_ms, "kernel_ms": kernel_ms},
        "idle_percent": idle_percent,
        "launch_bound": launch_bound,
        "kernels": row.kernels / row.count,
    }


def _profile_notes(measured: Sequence[MeasuredProfile]) -> tuple[str, ...]:
    """Say how much of the work has a phase, and what is unusual."""
    if not measured:
        return ()
    return sentences(
        __name__,
        "profiles",
        measured=measured,
        on_gpu=all(run.profile.is_gpu for run in measured),
        least_percent=min(run.profile.attributed_percent for run in measured),
        has_several_gpus=any(run.profile.of_gpus for run in measured),
        lacks_parts=any(run.profile.configuration and not run.profile.parts for run in measured),
    )


def precision_table(measured: Sequence[MeasuredProfile], labels: Sequence[Column]) -> Table:
    """Build the table of each phase and each part of attention in fp32 and in bf16, all else equal."""
    pairs: dict[str, dict[str, MeasuredProfile]] = {}
    for run in measured:
        all_else = configuration_key(run.labels, ignore=("precision",))
        pairs.setdefault(all_else, {})[run.labels["precision"]] = run
    rows = []
    for pair in pairs.values():
        if set(pair) != {"fp32", "bf16"}:  # One of them has failed.
            continue
        fp32, bf16 = pair["fp32"], pair["bf16"]
        fp32_busy_ms, bf16_busy_ms = (
            {row.name: row.busy_ns / run.steps / 1e6 for row in (*run.ranges, *run.profile.parts)}
            for run in (fp32, bf16)
        )
        for name in filter(bf16_busy_ms.__contains__, fp32_busy_ms):
            before_ms, after_ms = fp32_busy_ms[name], bf16_busy_ms[name]
            row = {**fp32.labels, "phase": name, "fp32_busy_ms": before_ms, "bf16_busy_ms": after_ms}
            row["busy_speedup"] = before_ms / after_ms if after_ms else None
            before, after = fp32.unprofiled(name), bf16.unprofiled(name)
            if before and after:
                row |= {"fp32_ms": before, "bf16_ms": after, "speedup": before.median / after.median}
            rows.append(row)
    columns = (
        *labels,
        *named_columns("phase", fp32_busy_ms="busy in fp32", bf16_busy_ms="busy in bf16", busy_speedup="busy speed-up"),
        *named_columns(fp32_ms="without profiler in fp32", bf16_ms="without profiler in bf16", speedup="speed-up"),
    )
    return Table("precisions", "nsys: fp32 against bf16", columns, rows, notes=sentences(__name__, "precisions"))


# The setting "kernels", whose name in these tables is that of the number of launched kernels.
_MODEL_KERNELS = Column("model_kernels", "kernels of the model", usual=("reference",))
_SETTINGS = titles.columns_of(ProfileWorkload) | {"kernels": _MODEL_KERNELS}
_ALWAYS_SHOWN = ("context", "precision")
_SIZE = titles.SIZE_COLUMNS[0]  # Its name alone labels rows.


def profile_tables(
    cells: Sequence[Cell], run: Run | None, *, top: int, full_names: bool, compare_precision: bool = False
) -> list[Table]:
    """Build all tables of a sweep, with the ``top`` kernels of each phase, and fp32 against bf16 if asked for."""
    shown = titles.shown_settings(cells, _SETTINGS, _ALWAYS_SHOWN)
    measured = _measured_profiles(cells)
    failed = [_profile_labels(cell) | {"status": cell.status} for cell in cells if cell.status != "ok"]
    # Each profiler with the reason why it is not nsys, None where nobody expects that.
    profilers = {cell.derived["profiler"]: cell.derived["profiler_reason"] for cell in measured_cells(cells)}
    notes = [*titles.method_notes(cells)]
    notes += [f"profiled by {name}" + (f", because {reason}" if reason else "") for name, reason in profilers.items()]
    heading = titles.title("nsys", cells, run, _SETTINGS, shown)
    phases = phase_table(measured, failed, (*titles.SIZE_COLUMNS, *shown.values()), heading, notes)
    labels = (_SIZE, *shown.values())  # Without the number of parameters, which SIZE_COLUMNS have, too.
    tables = [phases, *phase_kernel_tables(measured, labels, top, full_names), attention_table(measured, labels)]
    if compare_precision:
        tables.append(precision_table(measured, [label for label in labels if label.key != "precision"]))
    return tables


def plot_profiles(cells: Sequence[Cell], path: Path) -> None:
    shown = titles.shown_settings(cells, _SETTINGS, _ALWAYS_SHOWN)
    plot_shares(_measured_profiles(cells), (_SIZE, *shown.values()), path)


def report_tables(report: AnalysedCaptures, profile: Profile, *, top: int, full_names: bool) -> list[Table]:
    """Build all tables of one report: its phases, and where its step goes, as ``trace`` has it."""
    measured, labels = _labelled_report(profile)
    notes = [profile.phases_are] if profile.phases_are else []
    title = f"nsys: {report.analyses[0].file}, made by {profile.profiler}"
    phases = phase_table(measured, failed=[], labels=labels, title=title, notes=notes)
    sentences = verdict(report.analyses, report.ranks.matching if report.ranks else None)
    others = attention_table(measured, labels), verdict_table(sentences, "nsys: verdict"), part_table(report.analyses)
    return with_rows(phases, *phase_kernel_tables(measured, labels, top, full_names), *others)


def plot_report(profile: Profile, path: Path) -> None:
    plot_shares(*_labelled_report(profile), path)


def _labelled_report(profile: Profile) -> tuple[list[MeasuredProfile], tuple[Column, ...]]:
    """Return the profile, and the columns that say what was run, none where the report does not know it."""
    values: dict[str, Any] = {}
    labels: tuple[Column, ...] = ()
    if profile.configuration:
        workload = Workload.from_configuration(profile.configuration)
        values = profile.configuration | {"parameters": workload.parameters}
        settings = [titles.SETTING_COLUMNS[name] for name in (*_ALWAYS_SHOWN, "compile", "mode")]
        labels = (_SIZE, *settings)
    return [MeasuredProfile(values, profile)], labels


def _measured_profiles(cells: Sequence[Cell]) -> list[MeasuredProfile]:
    return [
        MeasuredProfile(_profile_labels(cell), Profile.from_json(cell.derived["profile"]), cell)
        for cell in measured_cells(cells)
    ]


def _profile_labels(cell: Cell) -> dict[str, Any]:
    """Return what the label columns of a cell show: its settings and its model's number of parameters."""
    training = ProfileWorkload.from_configuration(cell.configuration).training
    values = cell.configuration | {"parameters": cell.derived.get("parameters", training.parameters)}
    values[_MODEL_KERNELS.key] = values.pop("kernels", None)  # "kernels" is the number of launched ones here.
    return values


SAVED = SavedCommand(
    lambda cells, run, options: profile_tables(
        cells, run, top=options.top, full_names=options.full_names, compare_precision=options.compare_precision
    ),
    picture_of_measured("shares", plot_profiles),
)
