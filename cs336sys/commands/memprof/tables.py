"""Tables of ``memprof`` and its plans, and its verdict; ``docs/columns.md`` describes columns and formulas."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from cs336sys.accounting.checkpointing import recomputed_flops
from cs336sys.accounting.flops import count_parameters, model_flops
from cs336sys.accounting.memory import GIB, best_group_size
from cs336sys.allocations.diagnosis import MemoryDiagnosis
from cs336sys.allocations.timeline import MEMORY_CATEGORIES
from cs336sys.capture.range_names import STEP_PHASES
from cs336sys.findings import Finding, sentence
from cs336sys.results.model import Cell, Run, configuration_key
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.settings.training import Workload
from cs336sys.tables import titles
from cs336sys.tables.numbers import format_quantity
from cs336sys.tables.saved import measured_cells
from cs336sys.tables.table import Column, Table, fill_row, named_columns, with_rows


def _recomputed_percent(workload: MemoryWorkload) -> float:
    """Return the FLOPs computed again, in percent of the model's; reference attention computes the masked half, too."""
    size, is_causal = workload.training.size, not workload.training.keeps_scores
    recomputed = recomputed_flops(size, workload.checkpointing, causal=is_causal)
    return 100 * recomputed / model_flops(size, causal=is_causal)


# Of models whose memory has formulas.
_PREDICTED = (
    Column("predicted_gib", "predicted peak", "gib", lambda workload: workload.peak.total_gib),
    Column("predicted_moment", "moment of the peak", value=lambda workload: workload.peak.moment),
    Column(
        "predicted_activations_gib",
        "most activations",
        "gib",
        lambda workload: max(moment.activations for moment in workload.moments()) / GIB,
    ),
    Column("recomputed_percent", "recomputed", "percent", _recomputed_percent),
)


def strategies_table(cells: Sequence[Cell], identity: Sequence[Column]) -> Table:
    """Build the table of strategies, if there are several: memory, and time over the first that was measured.

    Of cells that are only planned, it has what formulas predict.
    """
    cells = [cell for cell in cells if cell.configuration["mode"] != "forward"]  # Which has nothing to checkpoint.
    has_several = len({cell.configuration["checkpointing"] for cell in cells}) > 1
    firsts: dict[str, Cell] = {}  # The first measured cell of each configuration, whatever its strategy.
    rows = []
    notes: dict[str, None] = {}  # Keys of a dictionary: each sentence once, in order.
    for cell in cells if has_several else ():
        workload = workload_of(cell)
        row = cell.configuration | {"status": cell.status if cell.samples or cell.status != "ok" else None}
        if cell.samples:
            first = firsts.setdefault(configuration_key(cell.configuration, ignore=("checkpointing",)), cell)
            row |= {"peak_gib": cell.derived["peak_gib"], "step_ms": cell.samples["step"]}
            row["step_ratio"] = cell.samples["step"].median / first.samples["step"].median
        if workload.training.is_ours:
            row |= fill_row(_PREDICTED, workload)
            notes[best_strategy(workload.training)] = None
        rows.append(row)
    columns = (
        *identity,
        *named_columns("peak_gib"),
        *_PREDICTED,
        *named_columns("step_ms", spread="samples"),
        *named_columns(step_ratio="step over the first", status="status"),
    )
    return Table("checkpointing", "what checkpointing holds and costs", columns, rows, notes=tuple(notes))


def best_strategy(training: Workload) -> str:
    """Say which strategy without nesting is predicted to hold the least, by trying all and by the formula."""
    plain = Workload(training.size, training.mode, training.precision, attention=training.attention)
    optimum = best_group_size(plain.size, plain.precision, plain.mode, plain.attention)
    groups = "block" if optimum.best == 1 else f"every={optimum.best}"
    groups_gib, sublayers_gib = (plain.predicted_peak(strategy).total_gib for strategy in (groups, "sublayer"))
    best = "sublayer" if sublayers_gib < groups_gib else groups
    facts = {"training": training, "optimum": optimum, "groups_gib": groups_gib, "sublayers_gib": sublayers_gib}
    return say_memory("best strategy", best=best, **facts)


# Renders a block of ``sentences.jinja``; for a finding ``why`` it is the cause, or its ``remedy``.
say_memory = partial(sentence, __package__, size=partial(format_quantity, unit="bytes"), quantity=format_quantity)


# As tables and pages call them.
CERTAINTIES = {"measured": "proved", "looks like": "looks like"}


@dataclass(frozen=True)
class Verdict:
    """The sentences on a snapshot."""

    diagnosis: MemoryDiagnosis
    event: str  # The allocation that failed, and the memory held then; without a cause, why none is known.
    causes: Sequence[Finding]
    advice: str = ""  # What to do where there is no cause.

    @property
    def sentence(self) -> str:
        if not self.causes:
            return f"{self.event} {self.advice}".rstrip()
        text = "; also, ".join(f"{say_memory('why', cause)}: {say_memory('remedy', cause)}" for cause in self.causes)
        return f"{self.event} {text[0].upper()}{text[1:]}."


MEMORY_SETTINGS = titles.columns_of(MemoryWorkload)
_ALWAYS_SHOWN = ("context", "mode", "precision", "compile", "checkpointing")

# A block's largest saved tensors are listed one by one, the others together.
_LISTED_TENSORS = 5

# The allocator rounds sizes up, so its counters and the sum of the sizes asked for differ a little.
_COUNTER_TOLERANCE = 0.05


def memory_tables(cells: Sequence[Cell], run: Run | None, top: int) -> list[Table]:
    """Build the tables of peaks, phases by category, the ``top`` largest allocations, a block, and strategies."""
    identity = identity_columns(cells)
    measured = measured_cells(cells)
    # Checkpoints change nothing inside a block, so one cell speaks for all strategies.
    of_strategies = titles.by_configuration(measured, ignore=("checkpointing",)).values()
    without_strategies = [cells_of_strategies[0] for cells_of_strategies in of_strategies]
    return [
        _peaks(cells, run),
        phases_table(measured, identity),
        allocations_table(measured, identity, top),
        _block_table(without_strategies, identity),
        _saved_tensors(without_strategies, identity),
        strategies_table(cells, identity),
    ]


def identity_columns(cells: Sequence[Cell]) -> tuple[Column, ...]:
    """Return the columns that tell the sweep's cells apart."""
    return *named_columns("size"), *titles.shown_settings(cells, MEMORY_SETTINGS, _ALWAYS_SHOWN).values()


def _peaks(cells: Sequence[Cell], run: Run | None) -> Table:
    """Build the table of each cell's peaks, of its phases and of its step, predicted and measured, and its time."""
    settings = titles.shown_settings(cells, MEMORY_SETTINGS, _ALWAYS_SHOWN)
    columns = (
        *titles.SIZE_COLUMNS,
        *settings.values(),
        *named_columns(*(f"{phase}_gib" for phase in STEP_PHASES), "peak_gib", peak_phase="phase of the peak"),
        *named_columns("reserved_gib", predicted_gib="predicted peak"),
        Column("predicted_over_measured", "predicted / measured", "ratio"),
        *named_columns(traced_gib="traced peak"),
        *named_columns("step_ms", spread="samples"),
        *titles.GRAPH_COLUMNS,
        *named_columns("status"),
    )
    rows = list(map(_peak_row, cells))
    notes = [*titles.method_notes(cells), *titles.package_notes(cells, run), *_warnings(cells)]
    if any(row["status"] == "ok" and row["warmup"] == 0 and row["mode"] == "train" for row in rows):
        notes.append(say_memory("first step measured"))
    # Cells of a CPU have this column, too, but no number in it; cells that were not measured lack it.
    if any(row.get("reserved_gib", 0) is None and row["precision"] != "fp32" for row in rows):
        notes.append(say_memory("half precision on a cpu"))
    return Table("memprof", titles.title("memprof", cells, run, MEMORY_SETTINGS, settings), columns, rows, notes)


def _peak_row(cell: Cell) -> dict:
    """Return a cell's settings and predicted peak and, if it was measured, its peak and those of its phases, in GiB."""
    workload = workload_of(cell)
    row = cell.configuration | {"parameters": workload.training.parameters, "status": cell.status}
    if workload.training.is_ours:
        row["predicted_gib"] = workload.peak.total_gib
    if cell.status != "ok":
        return row
    row |= cell.derived | {"step_ms": cell.samples["step"]}
    for phase in cell.derived["phases"]:
        name = f"{phase['phase']}_gib"
        row[name] = max(row.get(name, 0), phase["allocated"] / GIB)  # Micro-batches repeat their phases.
    if row["predicted_gib"] is not None:  # Measured cells have this column, but no number in it for a user's model.
        row["predicted_over_measured"] = row["predicted_gib"] / row["peak_gib"]
    if traced := cell.derived.get("traced"):
        row["traced_gib"] = max(phase["allocated"] for phase in traced) / GIB
    return row


def _warnings(cells: Sequence[Cell]) -> list[str]:
    """Say which cells' histories are incomplete, or do not add up to the allocator's counters."""
    notes = []
    for cell in measured_cells(cells):
        lost, phases = cell.derived["lost_events"], cell.derived["phases"]
        listed_bytes = max(sum(phase[category] for category in MEMORY_CATEGORIES) for phase in phases)
        counter_bytes = max(phase["allocated"] for phase in phases)
        if lost or abs(listed_bytes / counter_bytes - 1) > _COUNTER_TOLERANCE:
            facts = {"listed_gib": listed_bytes / GIB, "counter_gib": counter_bytes / GIB}
            notes.append(say_memory("incomplete record", workload=workload_of(cell).name, lost=lost, **facts))
    return notes


def phases_table(cells: Sequence[Cell], identity: Sequence[Column]) -> Table:
    """Build the table of each phase's fullest moment, by category."""
    columns = (
        *identity,
        *named_columns("phase", "allocated_gib", "reserved_gib", traced_gib="traced peak"),
        *named_columns(*(f"{category.replace(' ', '_')}_gib" for category in MEMORY_CATEGORIES)),
    )
    rows = []
    for cell in cells:
        traced = {peak["phase"]: peak["allocated"] for peak in cell.derived.get("traced", ())}
        for phase in cell.derived["phases"]:
            sizes = {name: phase[name] for name in ("allocated", "reserved", *MEMORY_CATEGORIES)}
            sizes["traced"] = traced[phase["phase"]] if traced else None
            in_gib = {f"{n.replace(' ', '_')}_gib": size / GIB for n, size in sizes.items() if size is not None}
            rows.append(cell.configuration | {"phase": phase["phase"]} | in_gib)
    note = "Each category where the phase holds the most. Activations: tensors kept for the backward pass."
    return Table("phases", "where memory goes: the widest moment of each phase", columns, rows, notes=(note,))


def allocations_table(cells: Sequence[Cell], identity: Sequence[Column], top: int) -> Table:
    """Build the table of the largest allocations; those of the same code in all blocks are one row."""
    columns = (
        *identity,
        Column("size_bytes", "size of one", "bytes"),
        Column("count", "made", "count"),
        Column("peak_count", "alive at the peak", "count"),
        *named_columns("phase", "category", "module", "operation", "code"),
    )
    rows = [
        group | {"size_bytes": group["size"]} | cell.configuration
        for cell in cells
        for group in cell.derived["largest"][:top]
    ]
    return Table("allocations", f"the {top} largest kinds of allocations of a step", columns, rows)


def _block_table(cells: Sequence[Cell], identity: Sequence[Column]) -> Table:
    """Build the table of one residual-stream activation, and of what a block in the middle saves, frees and emits."""
    columns = (
        *identity,
        *named_columns(stream_bytes="residual stream", stream_derivation="batch x context x d_model x bytes"),
        *named_columns(saved_bytes="a block saves", saved_predicted_bytes="predicted"),
        *named_columns(forward_growth_bytes="forward adds", backward_change_bytes="backward changes"),
        *named_columns(gradients_by_difference_bytes="forward + backward", gradients_bytes="gradients emitted"),
        *named_columns(gradients_expected_bytes="4 x parameters"),
    )
    rows = []
    for cell in cells:
        training = workload_of(cell).training
        size = training.size
        row = dict(cell.configuration)
        if training.is_ours:
            # In single precision, as the handout asks.
            row["stream_bytes"] = 4 * size.batch_size * size.context * size.d_model
            row["stream_derivation"] = f"{size.batch_size} x {size.context} x {size.d_model} x 4"
        if training.has_backward:
            row["saved_bytes"] = sum(tensor["size"] for tensor in cell.derived["saved_tensors"])  # Of one block.
            if not training.is_compiled and training.is_ours:
                row["saved_predicted_bytes"] = training.block_activations
        changes = cell.derived["block"]  # forward_growth, backward_change, gradients; None with checkpoints.
        if changes is not None:
            row |= {f"{name}_bytes": value for name, value in changes.items()}
            if training.is_ours:
                with_block, without = (count_parameters(replace(size, num_layers=layers)) for layers in (1, 0))
                row["gradients_expected_bytes"] = 4 * (with_block - without)
            # Forward adds what the block saves, backward frees that and adds gradients: the gradients remain.
            if changes["backward_change"] is not None:
                row["gradients_by_difference_bytes"] = changes["backward_change"] + changes["forward_growth"]
        rows.append(row)
    return Table("block", "one residual-stream activation, and one block", columns, rows)


def _saved_tensors(cells: Sequence[Cell], identity: Sequence[Column]) -> Table:
    """Build the table of the largest tensors that a block saves, the others together, and all."""
    columns = (
        *identity,
        *named_columns("tensor", "shape", "dtype", size_bytes="saved", share_percent="share", operation="operation"),
        *named_columns("module", "code"),
    )
    rows = []
    for cell in cells:
        tensors = cell.derived.get("saved_tensors", ())
        total, others = sum(tensor["size"] for tensor in tensors), tensors[_LISTED_TENSORS:]
        listed = [
            tensor | {"tensor": str(number), "shape": " x ".join(map(str, tensor["shape"]))}
            for number, tensor in enumerate(tensors[:_LISTED_TENSORS], 1)
        ]
        listed.append({"tensor": f"{len(others)} others", "size": sum(tensor["size"] for tensor in others)})
        listed.append({"tensor": "all", "size": total})
        for tensor in listed if total else ():
            share = {"size_bytes": tensor["size"], "share_percent": 100 * tensor["size"] / total}
            rows.append(tensor | share | cell.configuration)
    notes = (say_memory("saved tensors"),)
    return Table("saved_tensors", "what a block saves for its backward pass", columns, rows, notes=notes)


def workload_of(cell: Cell) -> MemoryWorkload:
    return MemoryWorkload.from_configuration(cell.configuration)


def plan_tables(cells: Sequence[Cell], top: int) -> list[Table]:
    """Build the tables of what each cell would hold; traced ones only where something was traced."""
    traced = [cell for cell in cells if cell.derived]
    identity = identity_columns(cells)
    details = with_rows(
        phases_table(traced, identity),
        allocations_table(traced, identity, top),
        strategies_table(cells, identity),
    )
    return [_plan_table(cells), *details]


def _plan_table(cells: Sequence[Cell]) -> Table:
    """Build the table of the peaks that formulas and traces predict for each cell."""
    workloads = [workload_of(cell) for cell in cells]
    trainings = [workload.training for workload in workloads]
    columns = (
        *titles.SIZE_COLUMNS,
        *titles.plan_settings(trainings, MEMORY_SETTINGS),
        *titles.PEAK_COLUMNS,
        *named_columns("traced_peak_gib", traced_phase="phase of the traced peak", status="status"),
    )
    rows = []
    for cell, workload in zip(cells, workloads, strict=True):
        row = cell.configuration | {"status": None if cell.status == "ok" else cell.status}
        row["parameters"] = cell.derived.get("parameters", workload.training.parameters)
        if workload.training.is_ours:
            row |= fill_row(titles.PEAK_COLUMNS, workload.peak)
        if cell.derived:
            row |= {"traced_peak_gib": cell.derived["peak_gib"], "traced_phase": cell.derived["peak_phase"]}
        rows.append(row)
    notes = [
        say_memory("predicted peaks", is_traced=any(cell.derived for cell in cells)),
        *titles.found_in_user_code(cells),
        *titles.failure_notes(cells),
        *titles.planned_package_notes(trainings),
    ]
    return Table("plan", "memprof: cells and predicted memory (nothing was computed)", columns, rows, notes=notes)


def memory_plan_tables(cells: Sequence[Cell]) -> list[Table]:
    """Build the tables of the answer, of the plan step by step, and of each change by itself."""
    identity = identity_columns(cells)
    planned = measured_cells(cells)
    answers = []
    for cell in cells:
        row = cell.configuration | {"status": None if cell.status == "ok" else cell.status}
        if cell.status == "ok":
            row |= {"answer": say_memory("plan answer", **cell.derived), "command": cell.derived.get("command")}
        answers.append(row)
    columns = (*identity, *named_columns("answer", "command", "status"))
    facts = {"is_formula": all(cell.derived["by_formula"] for cell in planned)}
    notes = [say_memory("plan origin", **facts), say_memory("plan order"), say_memory("no offloading")]
    if any("model" in cell.configuration for cell in planned):
        notes.append(say_memory("no fsdp"))
    notes += titles.failure_notes(cells)
    steps = [cell.configuration | step for cell in planned for step in cell.derived["plan"] or ()]
    changes = [cell.configuration | change for cell in planned for change in cell.derived["changes"]]
    option, common = Column("option", "change"), named_columns(peak_bytes="then holds", cost="cost")
    step_columns = (*identity, option, *common, Column("pytorch", "in PyTorch"))
    change_columns = (*identity, option, *named_columns(saved_bytes="saves"), *common)
    return [
        Table("answer", "what would fit", columns, answers, notes=notes),
        *with_rows(
            Table("steps", "the plan, one change after another", step_columns, steps),
            Table("changes", "what each change alone would save", change_columns, changes),
        ),
    ]
