"""``benchmarking_script``, mixed precision and compiled models: how long the phases of a training step take."""

from typing import Any

from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.commands.report.answer import Answer, compared, facts_of, measured, where
from cs336sys.commands.report.evidence import PLAIN, PLAIN_OF_ANY_MODE, cells_of
from cs336sys.commands.report.problem import Command, Target, measurement, training_sweep
from cs336sys.settings.sizes import choose_size

_COLUMNS = ("size", "parameters", "forward_ms", "backward_ms", "optimizer_ms", "step_ms")


def script(answer: Answer) -> None:
    answer.write("steps.script")


def needed_gib(size: str, context: int) -> float:
    """Return the peak of a plain step by the accounting, GiB."""
    return predicted_peak(choose_size(size, context=context), "fp32", "train", "reference").total_gib


_AS_ASKED = {"context": (512,), "precision": ("fp32",), "warmup": (5,), "batch_size": (4,)}
timings = measured(
    *("bench", "steps.timings", {"bench": (*_COLUMNS, "gpu_busy_ms", "peak_gib", "status")}),
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
        answer.write("steps.warmup", cells=cells, late=dict(zip(counts, late, strict=True)))


def warmup_commands(target: Target) -> list[Command]:
    return [training_sweep(target, "bench", target.handout.sizes, warmup=("0", "1", "2", "5"))]


_PHASES = ("forward", "backward", "step")


def _precision(block: str, setting: str, **tables: tuple[str, ...]):
    return measured(
        *("precision", block, tables),
        wanted=lambda handout: {"device": ("cuda",)},
        required={},
        only=lambda cell: cell.configuration.get(setting) is not None,
    )


accumulation = _precision("", "accumulation", accumulation=())
dtypes = _precision("steps.dtypes", "loss_function", autocast=())
layer_norm = _precision(
    "steps.layer_norm", "loss_function", autocast=("precision", "loss_function", "fc1", "layer_norm", "rms_norm")
)
precision_commands = measurement("precision", 5)


def by_size(answer: Answer) -> None:
    wanted = {"size": answer.handout.sizes, "context": (512,), "batch_size": (4,)}
    settings = {"precision": ("fp32", "bf16", "fp16"), **PLAIN}
    groups = answer.find_each("bench", wanted, **settings)
    rows = compared(groups, "precision", "fp32", _PHASES, "precision", "parameters")
    if not rows:
        return
    for row in rows:
        row["idle_percent"] = row.get("gpu_busy_ms") and 100 * (1 - row["gpu_busy_ms"] / row["step_ms"])
    title = "mixed precision, and full precision before it, medians of the same run of so many steps"
    answer.show_compared(rows, "precisions", title, ("precision", "size"), _PHASES, "samples", "idle_percent")
    failed = [group for group in answer.find("bench", wanted, **settings) if not group.measured]
    answer.measured_by(failed)
    answer.write("steps.by_size", rows=rows)
    answer.write_failures(cells_of(failed), "{size} in {precision}")
    # Where full precision does not fit there is nothing to compare.
    without = {cell.configuration["size"] for cell in cells_of(failed) if cell.configuration["precision"] == "fp32"}
    sizes = [size for size in answer.handout.sizes if size not in without]
    answer.lack_unmeasured("{called} in fp32 and {precision}", rows, {"size": sizes, "precision": ("bf16",)})


def compiled_model(answer: Answer) -> None:
    sizes = answer.handout.sizes
    plain = {name: values for name, values in PLAIN_OF_ANY_MODE.items() if name != "compile"}
    wanted = {"size": sizes, "context": (512,), "batch_size": (4,), "precision": ("fp32",)}
    phases = ("forward", "backward", "optimizer", "step")
    groups = answer.find_each("bench", wanted, mode=("train", "forward"), **plain)
    rows = compared(groups, "compile", "off", phases, "parameters")
    # A compiled model is the answer, compiled blocks where there is none.
    whole: list[Any] = where(rows, compile="model")
    if rows := whole or rows:
        title = "compiled model, and vanilla before it, medians of the same run"
        extra_columns = ("step_before_std_ms", "step_std_ms", "peak_before_gib", "peak_gib")
        answer.show_compared(rows, "compile", title, ("compile", "size", "precision"), phases, *extra_columns)
        # The plan leaves the largest out: a plain step of it may not fit.
        *_, last_compiled, largest = sizes
        if where(rows, size=last_compiled) and not where(rows, size=largest):
            answer.write("steps.compiled_model", size=largest, need_gib=needed_gib(largest, 512))
        answer.lack_unmeasured("the whole model compiled of {called}", whole, {"size": sizes[:-1]})


def compiled_model_commands(target: Target) -> list[Command]:
    return [training_sweep(target, "bench", target.handout.sizes[:-1], compile=("off", "model"))]
