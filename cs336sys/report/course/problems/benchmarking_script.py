"""``benchmarking_script``: how long forward, backward and optimizer take, and what warm-up changes."""

from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.accounting.parameters import count_parameters
from cs336sys.report.course.evidence import PLAIN, Evidence, Found
from cs336sys.report.course.problem import Answer, Command, Handout, Part, Problem, Sweep, Target, arithmetic, runs_of
from cs336sys.report.course.words import as_long, change, failures, gib, joined, ms, percent, spread, times
from cs336sys.results.model import Cell
from cs336sys.sizes import SIZES
from cs336sys.workload import Workload

_WARMUPS = ("0", "1", "2", "5")

# Below this part of the mean a standard deviation is called small.
_SMALL_SPREAD = 0.05

# A first step this much longer than the median was not like the others.
_SLOW_FIRST = 1.1


def script(evidence: Evidence, handout: Handout) -> Answer:
    found = evidence.find("bench")
    cells = [cell for group in found for cell in group.cells]
    sentences = [
        "The script is `cs336sys bench`: it builds the model from its hyperparameters (`--size`, or `--d-model`, "
        "`--d-ff`, `--num-layers`, `--num-heads`), makes a random batch, runs `--warmup` steps, times `--steps` more "
        "in `--mode forward`, `forward-backward` or `train`, and waits for the device after each."
    ]
    if cells:
        modes = joined(dict.fromkeys(cell.configuration["mode"] for cell in cells))
        sentences.append(f"The results here hold {len(cells)} cell{'s' * (len(cells) != 1)} of it, of mode {modes}.")
    return Answer(sentences)


def timings(evidence: Evidence, handout: Handout) -> Answer | None:
    found = evidence.find(
        "bench",
        {"size": handout.sizes, "context": (512,), "precision": ("fp32",), "warmup": (5,), "batch_size": (4,)},
        **PLAIN,
    )
    if not found:
        return None
    measured = sorted((cell for group in found for cell in group.measured), key=_parameters)
    sentences = []
    if measured:
        passes = [
            f"{handout.called(cell.configuration['size'])} {ms(cell.samples['forward'].mean)} and "
            f"{ms(cell.samples['backward'].mean)}"
            for cell in measured
        ]
        sentences.append(f"The forward and the backward pass take on average: {joined(passes)}.")
        backward = [cell.samples["backward"].mean / cell.samples["forward"].mean for cell in measured]
        sentences.append(
            f"The backward pass takes {spread(backward)} as long as the forward pass (twice its products), and the "
            "optimizer step " + joined(f"{ms(cell.samples['optimizer'].mean)}" for cell in measured) + "."
        )
        sentences += [*_growth(measured), *_variability(measured), *_launch_bound(measured)]
    every = [cell for group in found for cell in group.cells]
    sentences += failures(every, lambda cell: handout.called(cell.configuration["size"]))
    sentences += [
        f"By the accounting {handout.called(cell.configuration['size'])} needs {gib(_need_gib(cell))}."
        for cell in every
        if cell.status == "oom"
    ]
    tables = [
        table
        for group in found
        for table in group.table(
            "bench",
            *("size", "parameters", "forward_ms", "backward_ms", "optimizer_ms", "step_ms", "gpu_busy_ms"),
            *("peak_gib", "status"),
        )
    ]
    return Answer(sentences, tables, {}, runs_of(found), _missing_sizes(every, handout))


def _parameters(cell: Cell) -> int:
    return count_parameters(Workload.from_configuration(cell.configuration).size)


def _need_gib(cell: Cell) -> float:
    return Workload.from_configuration(cell.configuration).predicted_peak().total_gib


def _growth(measured: list[Cell]) -> list[str]:
    first, last = measured[0], measured[-1]
    if first is last:
        return []
    parameters = _parameters(last) / _parameters(first)
    step = last.samples["step"].mean / first.samples["step"].mean
    than = "less than" if step < parameters else "more than"
    return [
        f"From {first.configuration['size']} to {last.configuration['size']} the whole step grows {times(step)}, "
        f"from {ms(first.samples['step'].mean)} to {ms(last.samples['step'].mean)}, {than} the parameters "
        f"({times(parameters)})."
    ]


def _variability(measured: list[Cell]) -> list[str]:
    # Of a size there may be several cells, of several contexts for one.
    relative = [(cell.samples["step"].std / cell.samples["step"].mean, cell.configuration["size"]) for cell in measured]
    most, size = max(relative)
    steps = joined(dict.fromkeys(str(len(cell.samples["step"].measured)) for cell in measured), "or")
    verdict = "is small" if most <= _SMALL_SPREAD else "is not small"
    return [
        f"The standard deviation over {steps} steps {verdict}: at most {percent(100 * most)} of the mean step ({size})."
    ]


def _launch_bound(measured: list[Cell]) -> list[str]:
    waiting = [
        f"{cell.configuration['size']} ({percent(100 * (1 - busy / cell.samples['step'].median))} idle)"
        for cell in measured
        if (busy := cell.derived.get("gpu_busy_ms")) is not None and busy < 0.8 * cell.samples["step"].median
    ]
    if not waiting:
        return []
    return [f"The GPU waits for the CPU to launch its kernels in {joined(waiting)}: these times are the CPU's."]


def _missing_sizes(cells: list[Cell], handout: Handout) -> list[str]:
    there = {cell.configuration["size"] for cell in cells}
    return [
        f"{handout.called(size)}, of which plain fp32 training needs about "
        f"{gib(predicted_peak(SIZES[size], 'fp32', 'train', 'reference').total_gib)}"
        for size in handout.sizes
        if size not in there
    ]


def timing_commands(target: Target) -> list[Command]:
    """In both precisions, so that ``benchmarking_mixed_precision`` needs no run of its own."""
    options = {"precision": ("fp32", "bf16")}
    return [Sweep("bench", target.sizes(target.handout.sizes), options=options).on(target)]


def warmup(evidence: Evidence, handout: Handout) -> Answer | None:
    plain = {name: values for name, values in PLAIN.items() if name != "mode"}
    groups = [
        Found(group.invocation, list(rows.values()))
        for group in _by_warmup(evidence, plain)
        if len(rows := {cell.configuration["warmup"]: cell for cell in group.cells}) > 1 and 0 in rows
    ]
    if not groups:
        return None
    group = groups[0]
    cells = sorted(group.measured, key=lambda cell: cell.configuration["warmup"])
    warm = cells[-1]
    sentences = []
    for cell in cells[:-1]:
        step, count = cell.samples["step"], cell.configuration["warmup"]
        first = step.measured[0] / step.median
        changed = change(warm.samples["step"].mean, step.mean)
        sentences.append(
            f"With {count} warm-up step{'s' * (count != 1)} the mean of {len(step.measured)} steps {changed} "
            f"({ms(step.mean)} against {ms(warm.samples['step'].mean)} after {warm.configuration['warmup']}), its "
            f"standard deviation is {ms(step.std)} against {ms(warm.samples['step'].std)}, and the first measured "
            f"step takes {as_long(first)} the median."
        )
    slow = [
        cell.configuration["warmup"]
        for cell in cells
        if cell.samples["step"].measured[0] > _SLOW_FIRST * cell.samples["step"].median
    ]
    if 0 in slow:
        sentences.append(
            "The first step pays for what happens once: kernels are loaded and chosen, libraries make their handles "
            "and workspaces, the allocator asks for memory, and the optimizer makes its state."
        )
        later = [count for count in slow if 0 < count < warm.configuration["warmup"]]
        if later:
            sentences.append(
                f"After {joined(map(str, later), 'or')} warm-up step{'s' * (later != [1])} some of that is still to be "
                "done, so the result is still another."
            )
        elif any(cell.configuration["warmup"] == 1 for cell in cells):
            sentences.append(
                "One warm-up step already does all of that here: the first measured step after it is like the others. "
                "Where one or two are not enough, the clock, the allocator's blocks and what tunes itself settle over "
                "several steps."
            )
    columns = ("size", "warmup", "forward_ms", "backward_ms", "optimizer_ms", "step_ms", "first_measured_ms")
    return Answer(sentences, group.table("bench", *columns), {}, runs_of([group]))


def _by_warmup(evidence: Evidence, plain) -> list[Found]:
    """The cells of each invocation with several warm-ups; what only differs in these is one thing to ``find``."""
    groups = []
    for invocation, cells in evidence.shown:
        found = Evidence(shown=[(invocation, cells)])
        counts = {cell.configuration.get("warmup") for cell in cells}
        parts = [found.find("bench", warmup=(count,), **plain) for count in counts]
        chosen = [cell for part in parts for group in part for cell in group.measured]
        first = next((cell.configuration["size"] for cell in chosen), None)
        groups.append(Found(invocation, [cell for cell in chosen if cell.configuration["size"] == first]))
    return [group for group in groups if group.cells]


def warmup_commands(target: Target) -> list[Command]:
    return [Sweep("bench", target.sizes(("small",)), options={"warmup": _WARMUPS}).on(target)]


BENCHMARKING_SCRIPT = Problem(
    "benchmarking_script",
    "Benchmarking script",
    (
        Part("a", script, lambda target: arithmetic("bench", "--help")),
        Part("b", timings, timing_commands),
        Part("c", warmup, warmup_commands),
    ),
)
