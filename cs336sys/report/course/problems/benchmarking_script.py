"""``benchmarking_script``: how long forward, backward and optimizer take, and what warm-up changes."""

from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.report.course.answer import Answer, facts_of, measured
from cs336sys.report.course.evidence import PLAIN_OF_ANY_MODE
from cs336sys.report.course.problem import Command, Target, training_sweep
from cs336sys.sizes import choose_size

_COLUMNS = ("size", "parameters", "forward_ms", "backward_ms", "optimizer_ms", "step_ms")


def script(answer: Answer) -> None:
    answer.write("benchmarking_script.script")


def needed_gib(size: str, context: int) -> float:
    """Return the peak of a plain step by the accounting, GiB."""
    return predicted_peak(choose_size(size, context=context), "fp32", "train", "reference").total_gib


_AS_ASKED = {"context": (512,), "precision": ("fp32",), "warmup": (5,), "batch_size": (4,)}
timings = measured(
    *("bench", "benchmarking_script.timings", {"bench": (*_COLUMNS, "gpu_busy_ms", "peak_gib", "status")}),
    wanted=lambda handout: {"size": handout.sizes, **_AS_ASKED},
    grid=lambda handout: {"size": handout.sizes},
    facts=lambda answer, groups: {"needed_gib": needed_gib},
)


def timing_commands(target: Target) -> list[Command]:
    """In all precisions, so that ``benchmarking_mixed_precision`` needs no run of its own."""
    return [training_sweep(target, "bench", target.handout.sizes, precision=("fp32", "bf16", "fp16"))]


def warmup(answer: Answer) -> None:
    wanted = {"size": answer.handout.sizes, "precision": ("fp32",)}
    groups = answer.find_each("bench", wanted, **PLAIN_OF_ANY_MODE)
    for group in [group for group in groups if {0} < group.by("warmup").keys()][:1]:
        answer.show([group], "bench", *_COLUMNS, "first_measured_ms")
        cells = sorted(map(facts_of, group.measured), key=lambda cell: cell["parameters"])
        counts = sorted({cell["warmup"] for cell in cells})
        # How much longer than the median the first step is, of the size where that is most.
        late = [max(c["step"].measured[0] / c["step"].median for c in cells if c["warmup"] == n) for n in counts]
        answer.write("benchmarking_script.warmup", cells=cells, late=dict(zip(counts, late, strict=True)))


def warmup_commands(target: Target) -> list[Command]:
    return [training_sweep(target, "bench", target.handout.sizes, warmup=("0", "1", "2", "5"))]
