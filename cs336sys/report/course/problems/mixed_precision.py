"""``mixed_precision_accumulation`` and ``benchmarking_mixed_precision``: what low precision does, and what it gains."""

from collections.abc import Sequence

from cs336sys.report.course.answer import Answer, compared, compared_headers, extremes
from cs336sys.report.course.evidence import PLAIN, Selection, cells_of
from cs336sys.report.course.problem import measurement
from cs336sys.results.model import Cell
from cs336sys.workload import Workload

_PHASES = ("forward", "backward", "step")


def _precision_runs(answer: Answer, setting: str) -> list[Selection]:
    """The first invocation whose cells name this setting, of a GPU rather than of a CPU."""
    groups = answer.find("precision", {"device": ("cuda",)})
    named = [group.only(lambda cell: setting in cell.configuration) for group in groups]
    return [group for group in named if group.cells][:1]


def accumulation(answer: Answer) -> None:
    for group in _precision_runs(answer, "accumulation"):
        sums = [
            {"name": name, "sum": cell.derived["sum"], "error": abs(cell.derived["relative_error_percent"])}
            for name, cell in group.by("accumulation").items()
        ]
        least, most = extremes(sums, "error").values()
        answer.say("sums", sums=sums)
        answer.say("extremes", least=least, most=most, ratio=most["error"] / (least["error"] or 1e-12))
        mixed = [case["error"] for case in sums if "fp32 +=" in case["name"] and "16" in case["name"]]
        low = [case["error"] for case in sums if case["name"].startswith("fp16 +=")]
        if mixed and low and max(mixed) < min(low):
            answer.say("dtype of the sum", error=max(mixed))
        answer.show([group], "accumulation")


def dtypes(answer: Answer) -> None:
    for group in _precision_runs(answer, "loss_function"):
        cells = group.of(loss_function="cross-entropy")
        for cell in sorted(cells, key=lambda cell: cell.configuration["precision"] != "fp16"):
            answer.say("autocast", cell.derived, precision=cell.configuration["precision"])
        _say_of_cpu(answer, group.cells)
        answer.say_failures(group.cells, "autocast to")
        answer.show([group], "autocast")


def _say_of_cpu(answer: Answer, cells: Sequence[Cell]) -> None:
    if any(cell.configuration.get("device") != "cuda" for cell in cells):
        answer.say("of a CPU")


def layer_norm(answer: Answer) -> None:
    for group in _precision_runs(answer, "loss_function"):
        # The last cell of a precision stands for it: normalization does not depend on the loss.
        cells = group.by("precision")
        if not cells:
            continue
        outputs = [{"precision": precision, "dtype": cells[precision].derived["layer_norm"]} for precision in cells]
        dtypes = {output["dtype"] for output in outputs}
        answer.say("layer norm", outputs=outputs, fc1=list(dict.fromkeys(c.derived["fc1"] for c in group.measured)))
        answer.say("sensitive")
        alike = len(dtypes) == 1 or all(output["precision"] == output["dtype"] for output in outputs)
        answer.say("range of bf16", alike=alike)
        norms = {precision: cell.derived.get("rms_norm") for precision, cell in cells.items()}
        answer.say("RMSNorm", dtypes=[f"{dtype} ({precision})" for precision, dtype in norms.items() if dtype])
        _say_of_cpu(answer, group.measured)
        answer.measured_by([group])


precision_commands = measurement("precision", 5)


def by_size(answer: Answer) -> None:
    wanted = {"size": answer.handout.sizes, "context": (512,), "batch_size": (4,), "warmup": (5,)}
    settings = {"precision": ("fp32", "bf16", "fp16"), **PLAIN}
    # A half precision is compared with the fp32 of its own run, which another run may have measured, too.
    pairs: dict[tuple[str, str], tuple[dict, Selection]] = {}
    for group in answer.find_each("bench", wanted, **settings):
        for row in _pairs(group):
            pairs.setdefault((row["size"], row["precision"]), (row, group))
    if not pairs:
        return
    rows = sorted((row for row, _ in pairs.values()), key=lambda row: (row["flops"], row["precision"]))
    for precision in sorted({row["precision"] for row in rows}):
        _say_gains(answer, precision, [row for row in rows if row["precision"] == precision])
    selections = answer.find("bench", wanted, **settings)
    answer.say_failures(cells_of(selections), "size in precision")
    failed = [cell.configuration for cell in cells_of(selections) if cell.status != "ok"]
    answer.lack_unmeasured("both precisions", [*rows, *failed], size=answer.handout.sizes)
    headers = {"size": "size", "precision": "precision", **compared_headers(_PHASES, " in fp32", "")}
    answer.add_table("precisions", "full against mixed precision, medians of the same run", headers, rows)
    answer.measured_by([group for _, group in pairs.values()] + [group for group in selections if not group.measured])


def _say_gains(answer: Answer, precision: str, rows: Sequence[dict]) -> None:
    """Report the gain of each pass and of the step, its change with the size, and where the CPU limits it."""
    for phase in ("forward", "backward"):
        answer.say("gains", precision=precision, phase=phase, sizes=[row | row[phase] for row in rows])
    if len(rows) > 1:
        answer.say("over the sizes", gains=[row["step_speedup"] for row in rows])
    idle = [row for row in rows if row["idle_percent"] is not None and row["idle_percent"] > 20]
    if idle:
        answer.say("waits for the CPU", precision=precision, idle=idle)


def _pairs(group: Selection) -> list[dict]:
    """Each half precision compared with fp32 of the same run."""
    rows = []
    for cell in group.measured:
        full = group.first(size=cell.configuration["size"], precision="fp32")
        if full is None or cell.configuration["precision"] == "fp32":
            continue
        busy = cell.derived.get("gpu_busy_ms")
        row = {**cell.configuration, "flops": Workload.from_configuration(cell.configuration).flops}
        row["idle_percent"] = busy and 100 * (1 - busy / cell.samples["step"].median)
        rows.append(row | compared(full, cell, _PHASES))
    return rows
