"""``benchmarking_script``, mixed precision and compiled models: how long the phases of a training step take."""

from typing import Any

from cs336sys.commands.report.answer import Answer, compared, facts_of, measured, where
from cs336sys.commands.report.evidence import PLAIN, PLAIN_OF_ANY_MODE, cells_of
from cs336sys.commands.report.problem import Commands, measurement, training_sweep

_COLUMNS = ("size", "parameters", "forward_ms", "backward_ms", "optimizer_ms", "step_ms")


def script(answer: Answer) -> None:
    answer.write("steps.script")


_HANDOUTS_STEP = {"context": (512,), "batch_size": (4,)}  # In both years.
timings = measured(
    "bench",
    "steps.timings",
    {"bench": (*_COLUMNS, "gpu_busy_ms", "peak_gib", "status")},
    wanted=lambda handout: {"size": handout.sizes, **_HANDOUTS_STEP, "precision": ("fp32",), "warmup": (5,)},
    grid=lambda handout: {"size": handout.sizes},
)


def _bench_sweep(sizes: slice = slice(None), **options: Any) -> Commands:
    """Plan steps of the handout's sizes, or of this slice of them, with these lists of options."""
    return lambda target: [training_sweep(target, "bench", target.handout.sizes[sizes], **options)]


# benchmarking_mixed_precision takes the other precisions of the same run.
timing_commands = _bench_sweep(precision=("fp32", "bf16", "fp16"))
warmup_commands = _bench_sweep(warmup=("0", "1", "2", "5"))


def warmup(answer: Answer) -> None:
    """Compare the first measured step with the median after each number of warm-up steps, none among them."""
    wanted = {"size": answer.handout.sizes, "precision": ("fp32",)}
    groups = answer.find_each("bench", wanted, **PLAIN_OF_ANY_MODE)
    # The run with most cells, of those that have cells both without warm-up and with some.
    group = next((group for group in groups if {0} < group.by("warmup").keys()), None)
    if group is None:
        return
    answer.show([group], "bench", *_COLUMNS, "first_measured_ms")
    # The smallest model first.
    cells = sorted(map(facts_of, group.measured), key=lambda cell: cell["parameters"])
    # By the number of warm-up steps, of the size whose first step is slowest compared with its median.
    first_over_median = {
        count: max(cell["step"].measured[0] / cell["step"].median for cell in where(cells, warmup=count))
        for count in sorted({cell["warmup"] for cell in cells})
    }
    answer.write("steps.warmup", cells=cells, first_over_median=first_over_median)


_PHASES = ("forward", "backward", "step")


def _precision(block: str, setting: str, **tables: tuple[str, ...]):
    """Return a function that answers with the cells of ``precision`` that have a setting, preferably on a GPU."""
    return measured(
        "precision",
        block,
        tables,
        wanted=lambda handout: {"device": ("cuda",)},
        required={},  # These cells are single operations, without the settings of a training step.
        only=lambda cell: cell.configuration.get(setting) is not None,
    )


accumulation = _precision(block="", setting="accumulation", accumulation=())
dtypes = _precision(block="steps.dtypes", setting="loss_function", autocast=())
layer_norm = _precision(
    "steps.layer_norm", "loss_function", autocast=("precision", "loss_function", "fc1", "layer_norm", "rms_norm")
)
precision_commands = measurement("precision", seconds=5)


def by_size(answer: Answer) -> None:
    """Answer with the speed-ups of bf16 and fp16 over fp32 within a run, and with the sizes that failed."""
    wanted = {"size": answer.handout.sizes, **_HANDOUTS_STEP}
    settings = {"precision": ("fp32", "bf16", "fp16"), **PLAIN}
    groups = answer.find_each("bench", wanted, **settings)
    rows = compared(groups, "precision", "fp32", _PHASES, "precision", "parameters")  # Sorted by the last two.
    if not rows:
        return
    for row in rows:  # None where the kernels' time was not measured.
        row["idle_percent"] = row.get("gpu_busy_ms") and 100 * (1 - row["gpu_busy_ms"] / row["step_ms"])
    title = "mixed precision, and full precision before it, medians of the same run of so many steps"
    answer.show_compared(rows, "precisions", title, ("precision", "size"), _PHASES, "samples", "idle_percent")
    failures = [group.only(lambda cell: cell.status != "ok") for group in answer.find("bench", wanted, **settings)]
    failed = [group for group in failures if group.cells]  # By find(): each cell once, of however many runs.
    answer.measured_by(failed)
    answer.write("steps.by_size", rows=rows)
    answer.write_failures(cells_of(failed), "{size} in {precision}")
    # Where fp32 does not fit there is nothing to compare with; fp16 is more than the handout asks for.
    failed_sizes = {row["size"] for row in where((cell.configuration for cell in cells_of(failed)), precision="fp32")}
    sizes = [size for size in answer.handout.sizes if size not in failed_sizes]
    answer.lack_unmeasured("{called} in fp32 and {precision}", rows, {"size": sizes, "precision": ("bf16",)})


def compiled_model(answer: Answer) -> None:
    """Answer with compiled and uncompiled steps of one run."""
    sizes = answer.handout.sizes
    plain = {name: values for name, values in PLAIN_OF_ANY_MODE.items() if name != "compile"}
    wanted = {"size": sizes, **_HANDOUTS_STEP, "precision": ("fp32",)}
    phases = ("forward", "backward", "optimizer", "step")
    groups = answer.find_each("bench", wanted, mode=("train", "forward"), **plain)
    rows = compared(groups, "compile", "off", phases, "parameters")  # The smallest model first.
    # Blocks compiled one by one only where no model was compiled whole.
    compiled_whole: list[Any] = where(rows, compile="model")
    if rows := compiled_whole or rows:
        title = "compiled model, and vanilla before it, medians of the same run"
        last_columns = ("step_before_std_ms", "step_std_ms", "peak_before_gib", "peak_gib")
        answer.show_compared(rows, "compile", title, ("compile", "size", "precision"), phases, *last_columns)
        # Our command compiles all sizes but the largest, of which a plain step may not fit.
        *_, last_compiled, largest = sizes
        if where(rows, size=last_compiled) and not where(rows, size=largest):
            answer.write("steps.compiled_model", size=largest)
        answer.lack_unmeasured("the whole model compiled of {called}", compiled_whole, {"size": sizes[:-1]})


compiled_model_commands = _bench_sweep(slice(-1), compile=("off", "model"))
