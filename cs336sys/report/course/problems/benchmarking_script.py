"""``benchmarking_script``: how long forward, backward and optimizer take, and what warm-up changes."""

from collections.abc import Iterator, Sequence

from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.accounting.flops import count_parameters
from cs336sys.report.course.answer import Answer
from cs336sys.report.course.evidence import PLAIN, PLAIN_OF_ANY_MODE, Evidence, Selection, cells_of, measured_of
from cs336sys.report.course.problem import Command, Target, training_sweep
from cs336sys.results.model import Cell
from cs336sys.sizes import SIZES
from cs336sys.workload import Workload


def script(answer: Answer) -> None:
    answer.say("script")
    if cells := cells_of(answer.find("bench")):
        modes = list(dict.fromkeys(cell.configuration["mode"] for cell in cells))
        answer.say("cells", count=len(cells), modes=modes)


def timings(answer: Answer) -> None:
    sizes = answer.handout.sizes
    wanted = {"size": sizes, "context": (512,), "precision": ("fp32",), "warmup": (5,), "batch_size": (4,)}
    selections = answer.find("bench", wanted, **PLAIN)
    every = cells_of(selections)
    if not every:
        return
    if measured := sorted(measured_of(selections), key=_parameter_count):
        _say_timings(answer, measured)
    answer.say_failures(every, "name of the size")
    for cell in every:
        if cell.status == "oom":
            need = Workload.from_configuration(cell.configuration).predicted_peak().total_gib
            answer.say("need", cell.configuration, need=need)
    columns = ("size", "parameters", "forward_ms", "backward_ms", "optimizer_ms", "step_ms", "gpu_busy_ms")
    answer.show(selections, "bench", *columns, "peak_gib", "status")
    for size in sizes:
        if all(cell.configuration["size"] != size for cell in every):
            answer.lack("size", size=size, need=predicted_peak(SIZES[size], "fp32", "train", "reference").total_gib)


def _parameter_count(cell: Cell) -> int:
    return count_parameters(Workload.from_configuration(cell.configuration).size)


def _say_timings(answer: Answer, measured: Sequence[Cell]) -> None:
    """Say how long each part takes, from the smallest size to the largest, and how sure that is."""
    rows = [{**cell.configuration, **cell.samples, "parameters": _parameter_count(cell)} for cell in measured]
    answer.say("passes", sizes=rows)
    ratios = [row["backward"].mean / row["forward"].mean for row in rows]
    answer.say("backward", ratios=ratios, steps=[row["optimizer"].mean for row in rows])
    first, last = rows[0], rows[-1]
    if first is not last:
        grown, parameters = last["step"].mean / first["step"].mean, last["parameters"] / first["parameters"]
        facts = {"grown": grown, "parameters": parameters, "is_less": grown < parameters}
        answer.say("growth", facts, first=first, last=last)
    # Of a size there may be several cells, of several contexts for one.
    most, size = max((row["step"].std / row["step"].mean, row["size"]) for row in rows)
    counts = list(dict.fromkeys(len(row["step"].measured) for row in rows))
    answer.say("deviation", most=100 * most, size=size, steps=counts, is_small=most <= 0.05)
    waiting = [
        row | {"idle": 100 * (1 - busy / row["step"].median)}
        for row, cell in zip(rows, measured, strict=True)
        if (busy := cell.derived.get("gpu_busy_ms")) is not None and busy < 0.8 * row["step"].median
    ]
    answer.say_any("waiting", sizes=waiting)


def timing_commands(target: Target) -> list[Command]:
    """In both precisions, so that ``benchmarking_mixed_precision`` needs no run of its own."""
    return [training_sweep(target, "bench", target.handout.sizes, precision=("fp32", "bf16"))]


def warmup(answer: Answer) -> None:
    group = next(_by_warmup(answer.evidence), None)
    if group is None:
        return
    sizes = _by_size(group.measured)
    *others, warm = next(iter(sizes.values()))
    base, most = warm.samples["step"], warm.configuration["warmup"]
    for cell in others:
        step = cell.samples["step"]
        facts = {**cell.configuration, "steps": len(step.measured), "step": step, "base": base, "most": most}
        grown = step.mean / base.mean
        answer.say("warm-up", facts, grown=grown, first=_first_step(cell), first_step=step.measured[0])
    answer.say_any("other sizes", sizes=[{"size": size, "first": _first_step(sizes[size][0])} for size in sizes][1:])
    # A first step this much longer than the median was not like the others.
    slow = {cell.configuration["warmup"] for cell in group.measured if _first_step(cell) > 1.1}
    if 0 in slow:
        answer.say("pays once")
        later = sorted(count for count in slow if 0 < count < most)
        if later:
            answer.say("still to be done", counts=later, is_one=later == [1])
        elif group.of(warmup=1):
            answer.say("one is enough")
    columns = ("size", "warmup", "forward_ms", "backward_ms", "optimizer_ms", "step_ms", "first_measured_ms")
    answer.show([group], "bench", *columns)


def _first_step(cell: Cell) -> float:
    """Return the first measured step as a multiple of the median."""
    step = cell.samples["step"]
    return step.measured[0] / step.median


def _by_size(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of each size that was measured without warm-up and with it, the fewest warm-up steps first."""
    sizes: dict[str, dict[int, Cell]] = {}
    for cell in sorted(cells, key=lambda cell: (_parameter_count(cell), cell.configuration["warmup"])):
        sizes.setdefault(cell.configuration["size"], {})[cell.configuration["warmup"]] = cell
    return {size: list(cells.values()) for size, cells in sizes.items() if len(cells) > 1 and 0 in cells}


def _by_warmup(evidence: Evidence) -> Iterator[Selection]:
    """The cells of each invocation with several warm-ups; what only differs in these is one thing to ``find``."""
    for invocation, cells in evidence.shown:
        alone = Evidence(shown=[(invocation, cells)])
        counts = {cell.configuration.get("warmup") for cell in cells}
        groups = [group for count in counts for group in alone.find("bench", warmup=(count,), **PLAIN_OF_ANY_MODE)]
        if sizes := _by_size(measured_of(groups)):
            yield Selection(invocation, [cell for size in sizes.values() for cell in size])


def warmup_commands(target: Target) -> list[Command]:
    return [training_sweep(target, "bench", target.handout.sizes, warmup=("0", "1", "2", "5"))]
