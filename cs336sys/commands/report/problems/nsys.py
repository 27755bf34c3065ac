"""``nsys_profile``: which kernels take the time, and how the passes, the step and attention differ in them."""

from functools import partial
from typing import Any

from cs336sys.commands.report.answer import Answer, Settings, longest, measured, where
from cs336sys.commands.report.evidence import PLAIN, Selection, joined_selection
from cs336sys.commands.report.problem import Command, Handout, Target, training_sweep


def _wanted(handout: Handout) -> Settings:
    # 2026 leaves the contexts to us: whatever was profiled is shown.
    contexts = handout.profile_contexts if handout.year == 2025 else (256, 512, 1024, 2048, 4096, 8192)
    return {"size": handout.profile_sizes, "context": contexts, "precision": ("fp32",)}


# Plain steps in fp32 of the handout's sizes and contexts.
_profiled = partial(measured, "nsys", wanted=_wanted, required=PLAIN)


def _forward_passes(answer: Answer, groups: list[Selection]) -> dict[str, Any] | None:
    """Add the pictures; return forward passes for the sentences, and which are ``far`` (10 %) from unprofiled ones."""
    answer.draw(groups)
    passes = []
    for row in where(joined_selection(groups).rows("phases"), phase="forward"):
        if row["unprofiled_ms"]:
            ratio = row["span_ms"] / row["unprofiled_ms"].median  # from first to last kernel, over bench's time
            passes.append({**row, "ratio": ratio, "running_percent": 100 * row["busy_ms"] / row["span_ms"]})
    far = [row for row in passes if abs(row["ratio"] - 1) > 0.1]
    return {"passes": passes, "far": far} if any(group.measured for group in groups) else None  # None: no answer


forward_time = _profiled(
    "nsys.forward_time",
    {"phases": ("phase", "unprofiled_ms", "wall_ms", "span_ms", "busy_ms", "idle_percent", "status")},
    medians=True,
    facts=_forward_passes,
    # Rows of failed cells have no phase.
    keep=lambda rows: [row for row in rows if row.get("phase") in ("forward", None)],
)
top_kernel = _profiled("nsys.top_kernel", {"top kernel": ()})
other_kernels = _profiled(
    "nsys.other_kernels", {"other kernels": ()}, keep=lambda rows: longest(where(rows, phase="forward"))
)
whole_step = _profiled(
    "nsys.whole_step",
    {"shares": ()},
    required={**PLAIN, "mode": ("train", "forward")},
    keep=lambda rows: [row for row in rows if row["phase"] in ("forward", "backward", "step")],
)
_TIMES = ("scores_ms", "final_ms", "softmax_ms", "other_ms")
_RATES = ("time_ratio", "flops_ratio", "bytes_ratio", "matmul_tflops", "softmax_gbps")
softmax = _profiled("nsys.softmax", {"attention": (*_TIMES, *_RATES)})


def profile_commands(target: Target) -> list[Command]:
    contexts, sizes = target.handout.profile_contexts, target.handout.profile_sizes
    if target.is_small:
        contexts = contexts[-2:]  # The two longest.
    # 25 steps take about as long as a cell's steps with and without the profiler, and nsys's report, which it exports.
    return [training_sweep(target, "nsys", sizes, contexts, steps=25, mode=("train", "forward"))]
