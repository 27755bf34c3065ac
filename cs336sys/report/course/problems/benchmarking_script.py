"""``benchmarking_script``: how long forward, backward and optimizer take, and what warm-up changes."""

from cs336sys.report.course.answer import Answer, facts_of, measured
from cs336sys.report.course.evidence import PLAIN_OF_ANY_MODE
from cs336sys.report.course.problem import Command, Target, training_sweep

_COLUMNS = ("size", "parameters", "forward_ms", "backward_ms", "optimizer_ms", "step_ms")


def script(answer: Answer) -> None:
    answer.write("benchmarking_script.script")


timings = measured(
    "bench",
    "benchmarking_script.timings",
    {"bench": (*_COLUMNS, "gpu_busy_ms", "peak_gib", "status")},
    wanted=lambda handout: {
        **{"size": handout.sizes, "context": (512,), "precision": ("fp32",), "warmup": (5,), "batch_size": (4,)}
    },
    grid=lambda handout: {"size": handout.sizes},
    label="{called} (plain fp32 training needs about {need})",
)


def timing_commands(target: Target) -> list[Command]:
    """In both precisions, so that ``benchmarking_mixed_precision`` needs no run of its own."""
    return [training_sweep(target, "bench", target.handout.sizes, precision=("fp32", "bf16"))]


def warmup(answer: Answer) -> None:
    wanted = {"size": answer.handout.sizes, "precision": ("fp32",)}
    groups = answer.find_each("bench", wanted, **PLAIN_OF_ANY_MODE)
    for group in [group for group in groups if {0} < group.by("warmup").keys()][:1]:
        answer.show([group], "bench", *_COLUMNS, "first_measured_ms")
        cells = sorted(map(facts_of, group.measured), key=lambda cell: cell["parameters"])
        counts = {cell["warmup"] for cell in cells}
        # A first step this much longer than the median was not like the others.
        slow = {cell["warmup"] for cell in cells if cell["step"].measured[0] > 1.1 * cell["step"].median}
        answer.write("benchmarking_script.warmup", cells=cells, counts=counts, slow=slow)


def warmup_commands(target: Target) -> list[Command]:
    return [training_sweep(target, "bench", target.handout.sizes, warmup=("0", "1", "2", "5"))]
