"""``mixed_precision_accumulation`` and ``benchmarking_mixed_precision``: what low precision does, and what it gains."""

from cs336sys.report.course.answer import Answer, compared, comparison_table, measured
from cs336sys.report.course.evidence import PLAIN, cells_of
from cs336sys.report.course.problem import measurement

_PHASES = ("forward", "backward", "step")


class _Named:
    """Every value of a setting that a cell has."""

    def __contains__(self, value: object) -> bool:
        return value is not None


def _precision(block: str, setting: str, **tables: tuple[str, ...]):
    return measured(
        "precision",
        f"mixed_precision.{block}",
        tables,
        wanted=lambda handout: {"device": ("cuda",)},
        required={setting: _Named()},  # type: ignore[dict-item]
        label="autocast to {precision}",
    )


accumulation = _precision("accumulation", "accumulation", accumulation=())
dtypes = _precision("dtypes", "loss_function", autocast=())
layer_norm = _precision("layer_norm", "loss_function")
precision_commands = measurement("precision", 5)


def by_size(answer: Answer) -> None:
    wanted = {"size": answer.handout.sizes, "context": (512,), "batch_size": (4,), "warmup": (5,)}
    settings = {"precision": ("fp32", "bf16", "fp16"), **PLAIN}
    # A half precision is compared with the fp32 of its own run, which another run may have measured, too.
    pairs = compared(answer.find_each("bench", wanted, **settings), "precision", "fp32", _PHASES)
    if not pairs:
        return
    for row, _ in pairs:
        busy_ms = row.get("gpu_busy_ms")
        row["idle_percent"] = busy_ms and 100 * (1 - busy_ms / row["step_ms"])
    rows = sorted((row for row, _ in pairs), key=lambda row: (row["precision"], row["parameters"]))
    title = "mixed precision, and full precision before it, medians of the same run"
    answer.tables.append(comparison_table("precisions", title, ("size", "precision"), _PHASES, rows))
    selections = answer.find("bench", wanted, **settings)
    answer.measured_by([group for _, group in pairs] + [group for group in selections if not group.measured])
    answer.write("mixed_precision.by_size", rows=rows)
    answer.write_failures(cells_of(selections), "{size} in {precision}")
    tried = [cell.configuration for cell in cells_of(selections) if cell.status != "ok"]
    answer.lack_unmeasured("{called} in fp32 and bf16", [*rows, *tried], {"size": answer.handout.sizes})
