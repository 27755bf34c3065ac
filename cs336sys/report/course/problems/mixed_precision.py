"""``mixed_precision_accumulation`` and ``benchmarking_mixed_precision``: what low precision does, and what it gains."""

from collections.abc import Sequence
from operator import itemgetter

from cs336sys.report.course.answer import Answer, compared, compared_headers
from cs336sys.report.course.evidence import PLAIN, Selection, cells_of
from cs336sys.report.course.problem import Command, Target, simple
from cs336sys.results.model import Cell
from cs336sys.workload import Workload

_PHASES = ("forward", "backward", "step")


def _precision(answer: Answer, setting: str) -> list[Selection]:
    """The first invocation whose cells name this setting, of a GPU rather than of a CPU."""
    groups = answer.find("precision", {"device": ("cuda",)})
    named = [Selection(group.invocation, [c for c in group.cells if setting in c.configuration]) for group in groups]
    return [group for group in named if group.cells][:1]


def accumulation(answer: Answer) -> None:
    for group in _precision(answer, "accumulation"):
        sums = [
            {
                "name": cell.configuration["accumulation"],
                "sum": cell.derived["sum"],
                "error": abs(cell.derived["relative_error_percent"]),
            }
            for cell in group.measured
        ]
        worst, best = (choose(sums, key=itemgetter("error")) for choose in (max, min))
        answer.say("sums", sums=sums)
        answer.say("extremes", worst=worst["name"], best=best["name"], ratio=worst["error"] / (best["error"] or 1e-12))
        mixed = [case["error"] for case in sums if "fp32 +=" in case["name"] and "16" in case["name"]]
        low = [case["error"] for case in sums if case["name"].startswith("fp16 +=")]
        if mixed and low and max(mixed) < min(low):
            answer.say("dtype of the sum", error=max(mixed))
        answer.show([group], "accumulation")


def dtypes(answer: Answer) -> None:
    for group in _precision(answer, "loss_function"):
        cells = [cell for cell in group.measured if cell.configuration["loss_function"] == "cross-entropy"]
        for cell in sorted(cells, key=lambda cell: cell.configuration["precision"] != "fp16"):
            answer.say("autocast", cell.derived, precision=cell.configuration["precision"])
        _say_of_cpu(answer, group.cells)
        answer.say_failures(group.cells, "autocast to")
        answer.show([group], "autocast")


def _say_of_cpu(answer: Answer, cells: Sequence[Cell]) -> None:
    if any(cell.configuration.get("device") != "cuda" for cell in cells):
        answer.say("of a CPU")


def layer_norm(answer: Answer) -> None:
    for group in _precision(answer, "loss_function"):
        # The last cell of a precision stands for it: normalization does not depend on the loss.
        cells = {cell.configuration["precision"]: cell.derived for cell in group.measured}
        if not cells:
            continue
        kept = {precision: dtypes["layer_norm"] for precision, dtypes in cells.items()}
        alike = len(set(kept.values())) == 1 or all(precision == dtype for precision, dtype in kept.items())
        answer.say(
            "layer norm",
            outputs=[{"precision": precision, "dtype": dtype} for precision, dtype in kept.items()],
            fc1=list(dict.fromkeys(cell.derived["fc1"] for cell in group.measured)),
        )
        answer.say("sensitive")
        answer.say("range of bf16", alike=alike)
        norms = {precision: dtypes.get("rms_norm") for precision, dtypes in cells.items()}
        answer.say("RMSNorm", dtypes=[f"{dtype} ({precision})" for precision, dtype in norms.items() if dtype])
        _say_of_cpu(answer, group.measured)
        answer.measured_by([group])


def precision_commands(target: Target) -> list[Command]:
    return [simple(target, "precision", seconds=5)]


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
    measured_sizes = {row["size"] for row in rows} | {
        c.configuration["size"] for c in cells_of(selections) if c.status != "ok"
    }
    for size in answer.handout.sizes:
        if size not in measured_sizes:
            answer.lack("both precisions", size=size)
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
    for size in dict.fromkeys(cell.configuration["size"] for cell in group.measured):
        full = next(iter(group.of(size=size, precision="fp32")), None)
        for cell in group.of(size=size):
            precision = cell.configuration["precision"]
            if full is None or precision == "fp32":
                continue
            busy = cell.derived.get("gpu_busy_ms")
            row = {"size": size, "precision": precision, "flops": Workload.from_configuration(cell.configuration).flops}
            row["idle_percent"] = busy and 100 * (1 - busy / cell.samples["step"].median)
            rows.append(row | compared(full, cell, _PHASES))
    return rows
