"""Titles and notes of tables, the settings that they show, the pooling of a sweep's rounds, and the plan of a sweep."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cs336sys.accounting.memory import GIB
from cs336sys.results.model import Cell, Run, Samples, configuration_key
from cs336sys.settings.course_package import course_package
from cs336sys.settings.fields import Configured
from cs336sys.settings.training import UserCode, Workload
from cs336sys.tables.table import Column, Table, fill_row, named_columns, sentences

if TYPE_CHECKING:
    from cs336sys.machine.system import Capacity  # It loads multiprocessing, for which a table has no use.

SIZE_COLUMNS = (Column("size", "size"), Column("parameters", "parameters", "parameters"))

# These columns come before those of other settings, in this order.
_FIRST_COLUMNS = ("world_size", "mesh", *UserCode.settings(), "mode")
_FIRST_COLUMNS += ("batch_size", "heads", "kv_heads", "vocab_size", "context")


def columns_of(kind: type[Configured], *omitted: str) -> dict[str, Column]:
    """Return the columns of settings for people, in their order, without those that are ``omitted``."""
    settings = kind.settings()
    first = _FIRST_COLUMNS if "context" in settings else ()  # Those of kernels and collectives keep their own order.
    columns = {}
    for name in dict.fromkeys((*first, *settings)):
        if name in settings and name not in omitted and settings[name].header is not None:
            # A title names a setting that has no column, unless it has its default, which most titles leave out.
            usual = () if settings[name].in_titles else (settings[name].default,)
            columns[name] = Column(name, settings[name].header or name.replace("_", " "), usual=usual)
    return columns


# Settings that get a column only where the sweep varies them; the others stand in the title.
SETTING_COLUMNS = columns_of(Workload)


def setting_columns(names: Iterable[str]) -> list[Column]:
    """Return the columns of settings for programs."""
    return [SETTING_COLUMNS.get(name, Column(name, name.replace("_", " "))) for name in names]


# The costs of steps in CUDA graphs.
GRAPH_COLUMNS = (Column("capture_s", "capture", "s"), Column("graph_pool_gib", "graphs' memory", "gib"))

# A user's batches need not be tokens: their examples are counted.
RATE_COLUMNS = named_columns(tokens_per_s="tokens/s", examples_per_s="examples/s")

WALL_COLUMN = Column("wall_ms", "CPU wall", "ms", spread="samples")


def plan_settings(workloads: Sequence[Workload], settings: Mapping[str, Column]) -> list[Column]:
    """Return the columns of a plan: settings that memory depends on, without those of user code that nobody gave."""
    unset = UserCode.settings().keys() - {name for workload in workloads for name in workload.user.configuration()}
    # Memory does not depend on the last three.
    return [column for name, column in settings.items() if name not in (*unset, "tf32", "synchronize", "seed")]


def unknown_memory(workloads: Sequence[Workload]) -> tuple[str, ...]:
    """Return a plan's notes on models whose memory has no formula."""
    names = dict.fromkeys(workload.user.model for workload in workloads if workload.user.model is not None)
    is_unknown = any(workload.is_ours and not workload.memory_is_known for workload in workloads)
    notes = sentences(__name__, "memory", models=names, is_unknown=is_unknown)
    return planned_package_notes(workloads) + notes


def planned_package_notes(workloads: Sequence[Workload]) -> tuple[str, ...]:
    """Return the note of a plan if the ``cs336_basics`` that would be trained is not ours, for which formulas are."""
    package = course_package() if any(workload.is_ours for workload in workloads) else None
    return () if package is None or package.is_ours else sentences(__name__, "package", package=package.name)


def package_notes(cells: Sequence[Cell], run: Run | None) -> tuple[str, ...]:
    """Return the note of measured cells if the ``cs336_basics`` that was trained is not ours."""
    theirs = None if run is None else run.environment.get("cs336_basics")
    # Cells of attention alone have no width of a model, cells of a user's model name it.
    is_trained = any("d_model" in cell.configuration and "model" not in cell.configuration for cell in cells)
    return () if theirs is None or not is_trained else sentences(__name__, "package", package=theirs)


def notes_of_run(cells: Sequence[Cell], run: Run | None) -> tuple[str, ...]:
    """Return what a run's machine and packages say about all its numbers."""
    return (*interpreted_notes(cells, run), *package_notes(cells, run))


def machine_words(run: Run | None) -> list[str]:
    """Name the GPU or CPU and the versions of a run, for titles."""
    if run is None:
        return []
    device = run.machine.get("gpu") or run.machine.get("cpu") or "unknown CPU"
    theirs = run.environment.get("cs336_basics")  # recorded only of a package that is not ours
    parts = [str(device), f"torch {run.machine.get('torch')}"]
    return parts if theirs is None else [*parts, f"cs336_basics of {theirs}"]


def shown_settings(
    cells: Sequence[Cell], settings: Mapping[str, Column], always: Sequence[str] = ()
) -> dict[str, Column]:
    """Return the columns of settings that the sweep varies, and those that are always shown."""
    return {
        name: column
        for name, column in settings.items()
        if name in always or len({cell.configuration.get(name) for cell in cells}) > 1
    }


def title(
    command: str,
    cells: Sequence[Cell],
    run: Run | None,
    settings: Mapping[str, Column],
    shown: Mapping[str, Column],
    *phrases: str,
) -> str:
    """Return the command, ``phrases``, the settings that have no column and not their usual value, and the machine."""
    if not cells:
        return f"{command}: nothing measured"
    configuration = cells[0].configuration  # Settings without a column are the same in all cells.
    constant = [
        f"{column.header} {configuration[name]}"
        for name, column in settings.items()
        if name not in shown and name in configuration and configuration[name] not in column.usual
    ]
    return f"{command}: {', '.join([*phrases, *constant, *machine_words(run)])}"


def redundant_wall_column(steps: Iterable[Samples]) -> tuple[str, ...]:
    """Return the key of :data:`WALL_COLUMN` where the CPU's clock timed all steps, so that it repeats the step."""
    return (WALL_COLUMN.key,) if all(samples.method.startswith("cpu clock") for samples in steps) else ()


def method_notes(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Say how the steps were counted and timed, and the :func:`failure_notes`."""
    methods = {cell.samples["step"].method for cell in cells if "step" in cell.samples}
    method = (f"{steps_words(cells)}, by {' and '.join(sorted(methods))}",) if methods else ()
    return (*method, *found_in_user_code(cells), *failure_notes(cells))


# The settings under which kernels written in Triton run.
_IN_TRITON = {
    "implementation": ("auto", "triton", "deterministic", "ours"),
    "attention": ("flash",),
    "optimizer": ("adamw",),
}

# The settings under which attention on a CPU is computed by tiles in PyTorch.
_TILED_ON_CPU = {"implementation": ("auto", "deterministic"), "attention": ("flash",)}


def interpreted_notes(cells: Sequence[Cell], run: Run | None) -> tuple[str, ...]:
    """Name the timed kernels that ran in Triton's interpreter, or as tiles in PyTorch, without a GPU."""
    if run is None:
        return ()
    is_interpreted = run.environment.get("TRITON_INTERPRET") == "1"
    interpreted, tiled = set(), set()
    for configuration in (cell.configuration for cell in cells if cell.status == "ok"):
        # A run that does not say its GPU may have had one; None says that it had none.
        on_cpu = configuration.get("device") == "cpu" or run.machine.get("gpu", "") is None
        for name, values in _IN_TRITON.items():
            # Only training steps run an optimizer.
            if configuration.get(name) not in values or (name == "optimizer" and configuration.get("mode") != "train"):
                continue
            if on_cpu and configuration[name] in _TILED_ON_CPU.get(name, ()):
                tiled.add(f"{name} {configuration[name]}")
            elif is_interpreted:
                interpreted.add(f"{name} {configuration[name]}")
        if is_interpreted and configuration.get("kernels", "reference") != "reference":
            interpreted.add(f"kernels {configuration['kernels']}")
    places = {"in Triton's interpreter": interpreted, "on a CPU FlashAttention-2 by tiles in PyTorch": tiled}
    return sentences(__name__, "without_gpu", places=places)


def steps_words(cells: Sequence[Cell]) -> str:
    """Say how many steps were measured, after how many warm-up steps."""
    counts = sorted({(cell.configuration["warmup"], cell.configuration["steps"]) for cell in cells})
    steps = ", ".join(f"{steps} step{'' if steps == 1 else 's'} after {warmup} warm-up" for warmup, steps in counts)
    return f"mean ± standard deviation of {steps}"


# Settings in which an implementation may differ from the one that its speed-up is over.
OF_IMPLEMENTATION = ("implementation", "code", "keep_settings", "rounds")

ERROR_NOTE = "medians; error is the relative difference from a float64 reference, ||x - reference|| / ||reference||"


def find_baselines(
    cells: Sequence[Cell], setting: str, value: str, ignore: tuple[str, ...]
) -> tuple[list[Cell | None], list[str]]:
    """Return each cell's baseline, or None, and a note where there is none at all.

    The baseline is ok, has ``value`` for ``setting``, and differs in nothing but the settings to ``ignore``.
    """
    measured = [cell for cell in cells if cell.status == "ok"]
    baselines = [cell for cell in measured if cell.configuration[setting] == value]
    by_key = {configuration_key(cell.configuration, ignore=ignore): cell for cell in baselines}
    is_missed = bool(measured) and not baselines
    notes = [f"no speed-ups: {value} has no time to compare with; see --baseline"] if is_missed else []
    return [by_key.get(configuration_key(cell.configuration, ignore=ignore)) for cell in cells], notes


def found_in_user_code(cells: Sequence[Cell]) -> tuple[str, ...]:
    """List what was found in users' models and kernels, each sentence once."""
    return tuple(dict.fromkeys(note for cell in cells for note in cell.derived.get("notes", ())))


def failure_notes(cells: Sequence[Cell], of: str | None = None) -> tuple[str, ...]:
    """List why cells have no numbers, each reason once, with the value of the setting ``of``."""
    failed = [cell for cell in cells if cell.reason]
    names = ["" if of is None else f"{cell.configuration[of]} " for cell in failed]
    return tuple(dict.fromkeys(f"{name}{cell.status}: {cell.reason}" for name, cell in zip(names, failed, strict=True)))


ROUNDS_COLUMN = Column("rounds", "rounds")

# Derives columns of pooled rounds from their cells, and from the pooled cell with the joined samples (if all are ok).
CombineDerived = Callable[[Sequence[Cell], Cell], dict[str, Any]]


def pool_cells(cells: Sequence[Cell], combine_derived: CombineDerived) -> list[Cell]:
    """Join cells that differ in nothing but ``round``, in whose place the number of ``rounds`` comes.

    Samples are joined, measured and warm-up ones apart, in the order of ``cells``. Unless all rounds are ``ok``, there
    are none, and status and reason are those of the first round that is not. Cells without a round stay as they are.
    """
    return [
        _pooled(rounds, combine_derived) if "round" in rounds[0].configuration else rounds[0]
        for rounds in by_configuration(cells).values()
    ]


def by_configuration(cells: Sequence[Cell], ignore: tuple[str, ...] = ("round",)) -> dict[str, list[Cell]]:
    """Group cells that differ in nothing but the settings to ``ignore``: the rounds of each configuration."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(configuration_key(cell.configuration, ignore=ignore), []).append(cell)
    return groups


def largest_known(rounds: Sequence[Cell], name: str) -> float | None:
    """Return the largest of a derived column's values, NaN before all others; None where no round has any."""
    # max alone would find NaN or not by its place.
    return max(known_values(rounds, name), key=lambda value: (math.isnan(value), value), default=None)


def known_values(rounds: Sequence[Cell], name: str) -> list[float]:
    """Return a derived column's values in the rounds that have one."""
    return [cell.derived[name] for cell in rounds if cell.derived.get(name) is not None]


def _pooled(rounds: Sequence[Cell], combine_derived: CombineDerived) -> Cell:
    """Join the rounds of one configuration; where one is not ok, take its status and reason, and no samples."""
    representative = next((cell for cell in rounds if cell.status != "ok"), rounds[0])
    configuration = {name: value for name, value in representative.configuration.items() if name != "round"}
    samples: dict[str, Samples] = {}
    if representative.status == "ok":
        for name, first in representative.samples.items():
            series = [cell.samples[name] for cell in rounds]
            measured = tuple(value for part in series for value in part.measured)
            warmup = tuple(value for part in series for value in part.warmup)
            samples[name] = replace(first, measured=measured, warmup=warmup)
    pooled = replace(representative, configuration=configuration | {"rounds": len(rounds)}, samples=samples)
    return replace(pooled, derived=combine_derived(rounds, pooled))


# A GPU that idles for more of the step than this is waiting for the CPU to launch its kernels.
LAUNCH_BOUND_IDLE_PERCENT = 20.0


# Of a PeakMemory: the memory at the moment when most is held, on paper.
PEAK_COLUMNS = (
    Column("parameters_gib", "parameters", "gib", lambda peak: peak.parameters / GIB),
    Column("gradients_gib", "gradients", "gib", lambda peak: peak.gradients / GIB),
    Column("optimizer_state_gib", "optimizer state", "gib", lambda peak: peak.optimizer_state / GIB),
    Column("activations_gib", "activations", "gib", lambda peak: peak.activations / GIB),
    Column("predicted_peak_gib", "predicted peak", "gib", lambda peak: peak.total_gib),
    Column("moment", "moment of the peak", value=lambda peak: peak.moment),
)

# Of a device's memory: above it the allocator's rounding and gaps, CUDA's context and libraries may be too much.
_TIGHT_PART = 0.9


def training_plan(
    workloads: Sequence[Workload], command: str = "bench", notes: Sequence[str] = (), capacity: "Capacity | None" = None
) -> Table:
    """Build the table of ``--dry-run``: each cell with its predicted memory, whether it fits, and ``notes`` below."""
    rows = []
    for workload in workloads:
        row = workload.configuration() | {"parameters": workload.parameters}
        if workload.memory_is_known:
            peak = workload.predicted_peak()
            row |= fill_row(PEAK_COLUMNS, peak)
            if capacity is not None:  # Else the device's memory is not known.
                part = peak.total_gib / capacity.memory_gib
                fits = "no" if part > 1 else "tight" if part > _TIGHT_PART else "yes"
                row |= {"capacity_percent": 100 * part, "fits": fits}
        rows.append(row)
    settings = plan_settings(workloads, SETTING_COLUMNS)
    fitting = (Column("capacity_percent", "of the memory", "percent"), Column("fits", "fits"))
    columns = (*SIZE_COLUMNS, *settings, *PEAK_COLUMNS, *fitting)
    assumptions = sentences(__name__, "plan", capacity=capacity, tight_percent=100 * _TIGHT_PART)
    heading = f"{command}: cells and predicted memory (nothing was run)"
    return Table("plan", heading, columns, rows, (*assumptions, *unknown_memory(workloads), *notes))
