"""``nsys_profile``: which kernels take the time, and how the passes, the step and attention differ in them."""

from collections.abc import Callable
from typing import Any

from cs336sys.report.course.answer import ALIKE, Answer, Settings, longest, measured, trend, where
from cs336sys.report.course.evidence import PLAIN, PLAIN_OF_ANY_MODE, Selection, joined_selection, measured_of
from cs336sys.report.course.problem import Command, Handout, Target, training_sweep


def _wanted(handout: Handout) -> Settings:
    contexts = handout.profile_contexts if handout.year == 2025 else (256, 512, 1024, 2048, 4096, 8192)
    return {"size": handout.profile_sizes, "context": contexts, "precision": ("fp32",)}


def _profiled(block: str, table: str, *columns: str, modes=("train",), **options: Any) -> Callable[[Answer], None]:
    """Answer with profiles of plain steps in fp32 of the handout's sizes and contexts."""
    required = {**PLAIN_OF_ANY_MODE, "mode": modes}
    return measured("nsys", f"nsys_profile.{block}", {table: columns}, wanted=_wanted, required=required, **options)


def _with_bench(answer: Answer, groups: list[Selection]) -> dict[str, Any] | None:
    """The forward passes with their time under the profiler over that without, and in ``bench``."""
    bench = answer.find("bench", {"warmup": (5,)}, precision=("fp32",), batch_size=(4,), **PLAIN)
    benched = {(c.configuration["size"], c.configuration["context"]): c.samples["forward"] for c in measured_of(bench)}
    passes = []
    for row in where(joined_selection(groups).rows("phases"), phase="forward"):
        if row["unprofiled_ms"]:
            longer = row["span_ms"] / row["unprofiled_ms"].median
            facts = {"ratio": longer, "is_near": abs(longer - 1) <= 2 * ALIKE}
            facts["running_percent"] = 100 * row["busy_ms"] / row["span_ms"]
            passes.append({**row, **facts, "benched": benched.get((row["size"], row["context"]))})
    answer.measured_by(bench if any(row["benched"] for row in passes) else ())
    return {"passes": passes} if measured_of(groups) else None


_PHASES = ("phase", "unprofiled_ms", "wall_ms", "span_ms", "busy_ms", "idle_percent", "status")
forward_time = _profiled(
    *("forward_time", "phases", *_PHASES), medians=True, draws=True, facts=_with_bench,
    keep=lambda rows: [row for row in rows if row.get("phase") in ("forward", None)],
)  # fmt: skip
top_kernel = _profiled("top_kernel", "top kernel")
other_kernels = _profiled("other_kernels", "other kernels", keep=lambda rows: longest(where(rows, phase="forward")))
whole_step = _profiled(
    *("whole_step", "shares"), modes=("train", "forward"),
    keep=lambda rows: [row for row in rows if row["phase"] in ("forward", "backward", "step")],
)  # fmt: skip


def _series(answer: Answer, groups: list[Selection]) -> dict[str, Any] | None:
    """By how the ratio of times changes with the context: the rows of the sizes where it does."""
    rows = [row for row in joined_selection(groups).rows("attention") if row.get("time_ratio")]
    series: dict[str, list[Any]] = {}
    for size in dict.fromkeys(row["size"] for row in rows):
        of_size = sorted(where(rows, size=size), key=lambda row: row["context"])
        series.setdefault(trend([row["time_ratio"] for row in of_size]), []).append(of_size)
    return {"attention": rows, "series": series} if rows else None


_ATTENTION = ("scores_ms", "final_ms", "softmax_ms", "other_ms", "time_ratio", "flops_ratio", "bytes_ratio")
softmax = _profiled("softmax", "attention", *_ATTENTION, "matmul_tflops", "softmax_gbps", facts=_series)


def profile_commands(target: Target) -> list[Command]:
    contexts = target.handout.profile_contexts[-2 if target.is_small else 0 :]
    # The profile itself and the steps without a profiler; nsys writes and exports its report.
    sizes = target.handout.profile_sizes
    return [training_sweep(target, "nsys", sizes, contexts, steps=25, mode=("train", "forward"))]
