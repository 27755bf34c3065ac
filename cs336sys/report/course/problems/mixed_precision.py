"""``mixed_precision_accumulation`` and ``benchmarking_mixed_precision``: what low precision does, and what it gains."""

from typing import Any

from cs336sys.report.course.answer import Answer, compared, measured
from cs336sys.report.course.evidence import PLAIN, cells_of
from cs336sys.report.course.problem import measurement

_PHASES = ("forward", "backward", "step")


def _precision(block: str, setting: str, **tables: tuple[str, ...]):
    return measured(
        *("precision", f"mixed_precision.{block}", tables),
        wanted=lambda handout: {"device": ("cuda",)},
        required={},
        only=lambda cell: cell.configuration.get(setting) is not None,
        label="autocast to {precision}",
    )


accumulation = _precision("accumulation", "accumulation", accumulation=())
dtypes = _precision("dtypes", "loss_function", autocast=())
layer_norm = _precision("layer_norm", "loss_function")
precision_commands = measurement("precision", 5)


def by_size(answer: Answer) -> None:
    wanted = {"size": answer.handout.sizes, "context": (512,), "batch_size": (4,)}
    settings = {"precision": ("fp32", "bf16", "fp16"), **PLAIN}
    rows: list[dict[str, Any]] = []
    # A half precision is compared with the fp32 of its own run, one with the 5 warm-up steps that are asked for first.
    for chosen in ({**wanted, "warmup": (5,)}, wanted):
        compared_before = {row["precision"] for row in rows}
        more = compared(
            answer.find_each("bench", chosen, **settings), "precision", "fp32", _PHASES, "precision", "parameters"
        )
        rows += [row for row in more if row["precision"] not in compared_before]
    if not rows:
        return
    for row in rows:
        row["idle_percent"] = row.get("gpu_busy_ms") and 100 * (1 - row["gpu_busy_ms"] / row["step_ms"])
    title = "mixed precision, and full precision before it, medians of the same run of so many steps"
    answer.show_compared(rows, "precisions", title, ("size", "precision"), _PHASES, "samples", "idle_percent")
    failed = [group for group in answer.find("bench", {**wanted, "warmup": (5,)}, **settings) if not group.measured]
    answer.measured_by(failed)
    answer.write("mixed_precision.by_size", rows=rows)
    answer.write_failures(cells_of(failed), "{size} in {precision}")
    # Where full precision does not fit there is nothing to compare.
    without = {cell.configuration["size"] for cell in cells_of(failed) if cell.configuration["precision"] == "fp32"}
    sizes = [size for size in answer.handout.sizes if size not in without]
    answer.lack_unmeasured("{called} in fp32 and {precision}", rows, {"size": sizes, "precision": ("bf16", "fp16")})
