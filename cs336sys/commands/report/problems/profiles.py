"""``nsys_profile``, ``memory_profiling``, ``gradient_checkpointing``: what takes the time, and what the memory."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cs336sys.accounting.memory import best_group_size
from cs336sys.accounting.one_device import checkpointing_answers, tensor_answers
from cs336sys.commands.report.answer import Answer, Settings, facts_of, longest, measured, where
from cs336sys.commands.report.evidence import PLAIN, PLAIN_OF_ANY_MODE, Selection, cells_of, joined_selection
from cs336sys.commands.report.problem import Command, Handout, Target, plain_peak_gib, training_sweep
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.settings.sizes import SIZES, choose_size


def _wanted(handout: Handout) -> Settings:
    # 2026 leaves the contexts to us: whatever was profiled is shown.
    contexts = handout.profile_contexts if handout.year == 2025 else (256, 512, 1024, 2048, 4096, 8192)
    return {"size": handout.profile_sizes, "context": contexts, "precision": ("fp32",)}


# Plain steps in fp32 of the handout's sizes and contexts.
_plain_profiles = partial(measured, "nsys", wanted=_wanted, required=PLAIN)


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


forward_time = _plain_profiles(
    "profiles.forward_time",
    {"phases": ("phase", "unprofiled_ms", "wall_ms", "span_ms", "busy_ms", "idle_percent", "status")},
    medians=True,
    facts=_forward_passes,
    # Rows of failed cells have no phase.
    keep=lambda rows: [row for row in rows if row.get("phase") in ("forward", None)],
)
top_kernel = _plain_profiles("profiles.top_kernel", {"top kernel": ()})
other_kernels = _plain_profiles(
    "profiles.other_kernels", {"other kernels": ()}, keep=lambda rows: longest(where(rows, phase="forward"))
)
whole_step = _plain_profiles(
    "profiles.whole_step",
    {"shares": ()},
    required={**PLAIN, "mode": ("train", "forward")},
    keep=lambda rows: [row for row in rows if row["phase"] in ("forward", "backward", "step")],
)
_TIMES = ("scores_ms", "final_ms", "softmax_ms", "other_ms")
_RATES = ("time_ratio", "flops_ratio", "bytes_ratio", "matmul_tflops", "softmax_gbps")
softmax = _plain_profiles("profiles.softmax", {"attention": (*_TIMES, *_RATES)})


def profile_commands(target: Target) -> list[Command]:
    contexts, sizes = target.handout.profile_contexts, target.handout.profile_sizes
    if target.is_small:
        contexts = contexts[-2:]  # The two longest.
    # 25 steps take about as long as a cell's steps with and without the profiler, and nsys's report, which it exports.
    return [training_sweep(target, "nsys", sizes, contexts, steps=25, mode=("train", "forward"))]


SIZE = "2.7b"  # The model that both handouts ask about.

_CALLED = {"train": "a training step", "forward": "inference"}  # What the sentences call a mode.

_KINDS = ("parameters", "gradients", "optimizer_state", "activations", "temporary", "other")


def _profiled(block: str, tables: Mapping[str, Sequence[str]], *modes: str, precisions=("fp32",), **options: Any):
    """Return a function that answers with steps without checkpoints; ``options`` are arguments of :func:`measured`."""
    settings = {"checkpointing": ("none",), "mode": modes or (*_CALLED,), "precision": precisions}
    defaults: dict[str, Any] = {
        # Where the longest context that a handout asks for does not fit, shorter ones say what does.
        "wanted": lambda handout: {"size": (SIZE,), "context": {*handout.memory_contexts, 128, 256, 512}},
        "required": {**PLAIN_OF_ANY_MODE, **settings},
    }
    return measured("memprof", f"profiles.{block}", tables, **defaults | options)


def _draw_timelines(answer: Answer, groups: list[Selection]) -> dict[str, Any]:
    """Name each cell's picture by its mode and context; return what the sentences call a mode."""
    for group in groups:
        # memprof has one picture for each measured cell, in their order.
        for cell, draw in zip(group.measured, group.pictures().values(), strict=True):
            settings = cell.configuration
            answer.pictures[f"{_CALLED[settings['mode']]} at context {settings['context']} in fp32"] = draw
    return {"called": _CALLED}


timelines = _profiled(
    "timelines",
    {"phases": ("mode", "phase", "allocated_gib", *(f"{kind}_gib" for kind in _KINDS))},
    # 2026 asks for both of its contexts, 2025 for one.
    wanted=lambda handout: {"size": (SIZE,), "context": handout.memory_contexts[: 1 + (handout.year == 2026)]},
    facts=_draw_timelines,
)


def _precision_pairs(groups: list[Selection]) -> list[dict[str, Any]]:
    """Return for each mode and context tried in fp32 and bf16 both peaks in GiB, predicted unless both fit."""
    tried: dict[tuple[str, int], dict[str, Any]] = {}
    for settings, peak_gib in ((cell.configuration, cell.derived.get("peak_gib")) for cell in cells_of(groups)):
        tried.setdefault((settings["mode"], settings["context"]), {})[settings["precision"]] = peak_gib
    pairs = []
    for (mode, context), peaks in tried.items():
        if peaks.keys() >= {"fp32", "bf16"}:
            has_peaks = all(peaks.values())
            if not has_peaks:
                peaks = {precision: plain_peak_gib(SIZE, context, precision, mode) for precision in peaks}
            percent = 100 * abs(peaks["bf16"] / peaks["fp32"] - 1)
            pairs.append({"mode": mode, "context": context, "has_peaks": has_peaks, "percent": percent, **peaks})
    return pairs


def _peaks(block: str, *precisions: str):
    """Return a function that answers with peaks of a forward pass and a training step, predicted where they failed."""
    steps = {"mode": (*_CALLED,), "precision": precisions}
    return _profiled(
        block,
        {"memprof": ("context", "mode", "precision", "peak_gib", "peak_phase", "step_ms", "status")},
        precisions=precisions,
        grid=lambda handout: {"context": handout.memory_contexts, **steps},
        label="{mode} at context {context} in {precision}",
        facts=lambda answer, groups: {"called": _CALLED, "pairs": _precision_pairs(groups)},
    )


peaks = _peaks("peaks", "fp32")
mixed_precision = _peaks("mixed_precision", "fp32", "bf16")


def residual_stream(answer: Answer) -> None:
    answer.derive(tensor_answers(SIZES[SIZE], "fp32")[:1], table="residual", title="a tensor of the residual stream")


_ALLOCATION = ("context", "size_bytes", "count", "phase", "category", "module", "operation", "code")
largest_allocations = _profiled("largest_allocations", {"allocations": _ALLOCATION}, "forward")

_SAVED = ("saved", "saved_predicted", "forward_growth", "backward_change")
_GRADIENTS = ("gradients_by_difference", "gradients", "gradients_expected")
_TENSOR = ("tensor", "shape", "size_bytes", "share_percent", "operation", "code")
block = _profiled(
    "block",
    {"block": [f"{name}_bytes" for name in (*_SAVED, *_GRADIENTS)], "saved_tensors": _TENSOR},
    # With a checkpoint a block saves its tensors when it is computed again, also where a plain step does not fit.
    required={**PLAIN_OF_ANY_MODE, "checkpointing": ("none", "block"), "mode": ("train",), "precision": ("fp32",)},
    only=lambda cell: cell.status == "ok" and cell.derived.get("saved_tensors"),
    grid=lambda handout: {"context": handout.memory_contexts},
    label="what a block saves at context {context}",
)


def memory_commands(target: Target) -> list[Command]:
    """Plan one sweep for all parts; a cell takes a warm-up step, one to count peaks, a recorded and a timed one."""
    options: dict[str, Any] = {"mode": ("forward", "train"), "precision": ("fp32", "bf16")}
    contexts = sorted(target.handout.memory_contexts)
    flags = ("--no-predict", "--steps", "1")
    return [training_sweep(target, "memprof", (SIZE,), contexts, flags, steps=4, **options)]


_CHECKPOINTED_CONTEXT = 2048  # Of gradient_checkpointing, which only 2026 asks.
_COLUMNS = ("precision", "checkpointing", "peak_gib", "predicted_gib", "recomputed_percent", "step_ms", "step_ratio")


def _checkpointed_runs(answer: Answer) -> list[Selection]:
    """Find runs that compare ways of checkpointing, those in fp32, which is asked for, first."""
    wanted = {"size": (SIZE,), "context": (_CHECKPOINTED_CONTEXT,)}
    runs = answer.find("memprof", wanted, mode=("train",), **PLAIN_OF_ANY_MODE)
    runs = [group for group in runs if len({cell.configuration["checkpointing"] for cell in group.cells}) > 1]
    return sorted(runs, key=lambda group: group.setting("precision") != "fp32")


def nested(answer: Answer) -> None:
    """Answer with what each strategy holds, and with one run that measured nested halves."""
    answers = checkpointing_answers(choose_size(SIZE, context=_CHECKPOINTED_CONTEXT), "fp32", attention="reference")
    answer.derive(answers, table="rules", title="what strategies hold")
    runs = [group for group in _checkpointed_runs(answer) if "nested" in group.by("checkpointing")][:1]
    answer.measured_by(runs)
    cells_of_runs = [{name: facts_of(cell) for name, cell in group.by("checkpointing").items()} for group in runs]
    answer.write("profiles.nested", runs=cells_of_runs)


def one_recomputation(answer: Answer) -> None:
    """Answer with how many blocks a checkpoint should span to hold least: by the rule, and measured by each run."""
    runs = _checkpointed_runs(answer)
    answer.show(runs, "checkpointing", *_COLUMNS, "status")
    for run in runs:
        size = MemoryWorkload.from_configuration(run.cells[0].configuration).training.size
        precision = run.setting("precision")
        # The blocks that a checkpoint spans: half a block where attention and feed-forward layer have one each.
        blocks = {"sublayer": 0.5, "block": 1.0, **{f"every={count}": count for count in range(2, size.num_layers)}}
        cells = [facts_of(cell) | {"blocks": blocks.get(cell.configuration["checkpointing"])} for cell in run.measured]
        # Other strategies (none, nested, ...) have no such number, and are not compared with the rule.
        cells = sorted((cell for cell in cells if cell["blocks"]), key=lambda cell: cell["blocks"])
        rule = best_group_size(size, precision, mode="train", attention="reference")
        if cells:
            answer.write("profiles.one_recomputation", rule=rule, cells=cells, precision=precision)


def checkpointing_commands(target: Target) -> list[Command]:
    """Plan one sweep of all strategies at the context that is asked for; a cell takes about five plain steps."""
    strategies = ("none", "block", "every=2", "every=3", "sublayer", "attention", "ffn", "nested")
    options: dict[str, Any] = {"precision": ("fp32",), "checkpoint": strategies}
    flags = ("--no-predict", "--steps", "1")
    return [training_sweep(target, "memprof", (SIZE,), (_CHECKPOINTED_CONTEXT,), flags, steps=5, **options)]
