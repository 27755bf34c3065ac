"""Durations of steps and attention: ``benchmarking_script``, mixed precision, ``torch_compile``, FlashAttention."""

from typing import Any

from cs336sys.accounting.activations import attention_memory
from cs336sys.accounting.hardware import datasheet
from cs336sys.accounting.one_device import attention_answers
from cs336sys.commands.report.answer import Answer, compared, facts_of, measured, where
from cs336sys.commands.report.evidence import PLAIN, PLAIN_OF_ANY_MODE, Selection, cells_of
from cs336sys.commands.report.problem import Commands, measurement, sized, training_sweep
from cs336sys.results.model import Cell

_COLUMNS = ("size", "parameters", "forward_ms", "backward_ms", "optimizer_ms", "step_ms")


def script(answer: Answer) -> None:
    answer.write("speed.script")


_HANDOUTS_STEP = {"context": (512,), "batch_size": (4,)}  # In both years.
timings = measured(
    "bench",
    "speed.timings",
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
    answer.write("speed.warmup", cells=cells, first_over_median=first_over_median)


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
dtypes = _precision(block="speed.dtypes", setting="loss_function", autocast=())
layer_norm = _precision(
    "speed.layer_norm", "loss_function", autocast=("precision", "loss_function", "fc1", "layer_norm", "rms_norm")
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
    answer.write("speed.by_size", rows=rows)
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
            answer.write("speed.compiled_model", size=largest)
        answer.lack_unmeasured("the whole model compiled of {called}", compiled_whole, {"size": sizes[:-1]})


compiled_model_commands = _bench_sweep(slice(-1), compile=("off", "model"))


_GRID = {"context": (256, 1024, 4096, 8192, 16384), "head_dim": (16, 32, 64, 128), "dtype": ("fp32",)}


def _too_large(answer: Answer, groups: list[Selection]) -> dict[str, Any]:
    """Return the smallest shape that did not fit (or, where all did, the first that cannot) and its memory in bytes."""
    # Pictures are drawn over the context, of which one alone would be a point.
    answer.draw(group for group in groups if len({cell.configuration["context"] for cell in group.measured}) > 1)
    cells = sorted(map(facts_of, cells_of(groups)), key=lambda cell: (cell["context"], cell["head_dim"]))
    run = groups[0].invocation.run
    sheet = datasheet(run.machine.get("gpu") or "") if run is not None else None
    out = where(cells, status="oom")
    # Where all fitted, search on from the longest context, at the head dimension that needs least.
    shape = out[0] if out else {**cells[-1], "head_dim": min(cell["head_dim"] for cell in cells)}
    batch = shape["batch_size"] * shape["heads"]
    context, head_dim, dtype = shape["context"], shape["head_dim"], shape["dtype"]
    eager = {"causal": shape["causal"], "implementation": "eager"}
    while not out and sheet and attention_memory(batch, context, head_dim, dtype, **eager).peak <= sheet.memory_bytes:
        context *= 2  # Until it cannot fit.
    if out or sheet:  # Else no shape is known to be too large.
        answers = attention_answers(batch, context, head_dim, dtype, **eager)
        answer.derive(answers, table="accounting", title=f"{batch} x {context} x {head_dim} {dtype}, tensor by tensor")
    memory = attention_memory(batch, context, head_dim, dtype, **eager)
    return {"out": out, "sheet": sheet, "context": context, "head_dim": head_dim, "memory": memory}


pytorch_attention = measured(
    "attn",
    "speed.pytorch_attention",
    {"attn": ("forward_ms", "backward_ms", "held_gib", "predicted_held_gib", "peak_gib", "status")},
    wanted=lambda handout: _GRID,
    required={"implementation": ("eager", "model")},
    medians=True,
    facts=_too_large,
)

_ATTENTION = "attn --implementation eager,compiled,model"  # One run for both problems.
_SMALL_ATTENTION = f"{_ATTENTION} --context 64,128 --head-dim 16,32 --steps 10"
attention_commands = sized(measurement(_ATTENTION, seconds=180), measurement(_SMALL_ATTENTION, seconds=20))


def compiled_attention(answer: Answer) -> None:
    """Answer with compiled and eager attention of one run."""
    groups = answer.find("attn", _GRID, implementation=("eager", "compiled"))
    parts = ("forward", "backward")
    if rows := compared(groups, "implementation", "eager", parts, "head_dim", "context"):
        title = "compiled attention, and eager before it, medians of the same run"
        answer.show_compared(rows, "compiled", title, ("implementation", "context", "head_dim"), parts)
        answer.write_failures(cells_of(groups), "{implementation} at context {context}, head dim {head_dim}")


_OURS = ("auto", "triton", "hopper", "tiled")
_PARTS = ("forward", "backward", "end_to_end")

# By the leaderboard's protocol do_bench repeats its call for so long, and a warm GPU is slower than in shorter runs.
_BOARD_MS = 10_000

weighted_sum = measured("kernels", block="", tables={"kernels": ()}, required={"op": ("weighted-sum",)}, medians=True)
_WEIGHTED_SUM = "kernels --op weighted-sum"
_SMALL_WEIGHTED_SUM = f"{_WEIGHTED_SUM} --tokens 256 --width 128 --implementation ours,eager"
weighted_sum_commands = sized(measurement(_WEIGHTED_SUM, seconds=20), measurement(_SMALL_WEIGHTED_SUM, seconds=20))


def flash_benchmarking(answer: Answer) -> None:
    """Answer with our kernels and eager attention of one run, over the handout's grid of shapes."""
    contexts = tuple(2**power for power in range(7, 17))
    grid = {"context": contexts, "head_dim": (16, 32, 64, 128), "causal": (True,)}
    groups = answer.find_each("flash", grid, batch_size=(1,), heads=(1,), implementation=("auto", "tiled", "eager"))
    pairs = compared(groups, "implementation", "eager", _PARTS, "undecided")
    if not pairs:
        return
    settings = ("dtype", "head_dim", "context")
    # Of several kernels of ours the one with fewest undecided phases is shown: the first pair, backwards the last.
    rows_by_shape = {tuple(row[name] for name in settings): row for row in reversed(pairs)}
    rows = [row for _, row in sorted(rows_by_shape.items())]
    title = "FlashAttention, regular PyTorch attention before it, batch 1, causal, medians of so many samples at least"
    for row in rows:
        row["largest_error"] = max(row[name] or 0.0 for name in row if name.endswith("_error"))
    answer.show_compared(rows, "flash", title, settings, _PARTS, "samples", "largest_error")
    groups = list({id(row["group"]): row["group"] for row in pairs}.values())  # Each once; they cannot be hashed.
    # Of each dtype the first run: backwards, it replaces the later ones.
    answer.draw({group.measured[0].configuration["dtype"]: group for group in reversed(groups)}.values())
    tried = [cell for group in groups for cell in group.cells]
    answer.write_failures(tried, "{implementation} at context {context}, head dim {head_dim}, {dtype}")
    shapes = {name: dict.fromkeys(row[name] for row in rows) for name in settings[1:]}  # Without the dtype.
    # Shapes that failed have a sentence already, and are not missing as well. First what the runs lack, then dtypes.
    failed = [cell.configuration for cell in tried if cell.status != "ok"]
    label = "regular PyTorch attention at context {context}, head dim {head_dim} in {dtype}"
    answer.lack_unmeasured(label, [*rows, *failed], {"dtype": dict.fromkeys(row["dtype"] for row in rows), **shapes})
    answer.lack_unmeasured("the grid in {dtype}", rows, {"dtype": ("bf16", "fp32")})


_SMALL_SHAPES = "--batch-size 1 --num-heads 1 --context 128,256 --head-dim 16 --dtype fp32 --repetition-ms 20"
_SMALL_FLASH = measurement(f"flash --implementation auto,tiled,eager {_SMALL_SHAPES}", seconds=10)
flash_commands = sized(measurement("flash --grid course", seconds=600), _SMALL_FLASH)


def board(answer: Answer) -> None:
    """Answer with our fastest kernel at the leaderboard's shape, and with the others of its run."""
    shape = {"batch_size": (1,), "heads": (16,), "context": (16384,), "head_dim": (64,), "dtype": ("bf16",)}
    shape |= {"causal": (True,), "window": (None,)}

    def median_ms(cell: Cell) -> float:
        return cell.samples["end_to_end"].median

    kernels = [(cell, group) for group in answer.find_each("flash", **shape) for cell in group.measured]
    ours = [(cell, group) for cell, group in kernels if cell.configuration["implementation"] in _OURS]
    # Kernels are measured again when they have become faster: the fastest counts, of those by the protocol if possible.
    ours.sort(key=lambda pair: (pair[0].configuration["repetition_ms"] < _BOARD_MS, median_ms(pair[0])))
    for cell, group in ours[:1]:  # The best, if any.
        answer.show([group], "flash", *(f"{part}_ms" for part in _PARTS), "end_to_end_tflops", "status", medians=True)
        others = [other for other in group.measured if other.configuration["implementation"] not in _OURS]
        others.sort(key=median_ms)
        answer.write("speed.board", ours=facts_of(cell), others=list(map(facts_of, others)))


board_commands = sized(measurement(f"flash --grid board --warmup-ms 1000 --repetition-ms {_BOARD_MS}", seconds=200))
