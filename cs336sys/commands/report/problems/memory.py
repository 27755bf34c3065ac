"""``memory_profiling`` and ``gradient_checkpointing``: where memory goes in a step, and what checkpoints save of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from cs336sys.accounting.checkpointing import best_group_size, predicted_peak
from cs336sys.accounting.one_device import checkpointing_answers, tensor_answers
from cs336sys.commands.report.answer import Answer, facts_of, measured
from cs336sys.commands.report.evidence import PLAIN_OF_ANY_MODE, Selection, cells_of
from cs336sys.commands.report.problem import Command, Target, training_sweep
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.settings.sizes import SIZES, choose_size

# The model that both handouts ask about.
SIZE = "2.7b"

# What the sentences call a mode.
_CALLED = {"train": "a training step", "forward": "inference"}

_KINDS = ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")


def _profiled(block: str, tables: Mapping[str, Sequence[str]], *modes: str, precisions=("fp32",), **options: Any):
    """Answer with steps of the model that both handouts ask about, without checkpoints."""
    settings = {"checkpointing": ("none",), "mode": modes or (*_CALLED,), "precision": precisions}
    # Where the longest context that a handout asks for does not fit, shorter ones say what does.
    options = {
        "wanted": lambda handout: {"size": (SIZE,), "context": {*handout.memory_contexts, 128, 256, 512}},
        "required": {**PLAIN_OF_ANY_MODE, **settings},
        **options,
    }
    return measured("memprof", f"memory.{block}", tables, **options)


def _draw_timelines(answer: Answer, groups: list[Selection]) -> dict[str, Any]:
    for group in groups:
        for cell, draw in zip(group.measured, group.pictures().values(), strict=True):
            settings = cell.configuration
            answer.pictures[f"{_CALLED[settings['mode']]} at context {settings['context']} in fp32"] = draw
    return {"called": _CALLED}


timelines = _profiled(
    "timelines",
    {"phases": ("mode", "phase", "allocated_gib", *(f"{kind.replace(' ', '_')}_gib" for kind in _KINDS))},
    wanted=lambda handout: {"size": (SIZE,), "context": handout.memory_contexts[: 1 + (handout.year == 2026)]},
    facts=_draw_timelines,
)


def _predicted(context: int, precision: str, mode: str) -> float:
    return predicted_peak(choose_size(SIZE, context=context), precision, mode, "reference").total_gib


def _pairs(groups: list[Selection]) -> list[dict[str, Any]]:
    """Peaks in fp32 and in bf16, both predicted where one did not fit."""
    names = ("mode", "context", "precision")
    cells = {tuple(cell.configuration[name] for name in names): cell for cell in cells_of(groups)}
    pairs = []
    for mode, context in dict.fromkeys(key[:2] for key in cells):
        cell_pair = {precision: cells.get((mode, context, precision)) for precision in ("fp32", "bf16")}
        peaks = {precision: cell and cell.derived.get("peak_gib") for precision, cell in cell_pair.items()}
        pair = {"mode": mode, "context": context, "has_peaks": all(peaks.values())}
        pair |= peaks if pair["has_peaks"] else {name: _predicted(context, name, mode) for name in peaks}
        pairs += [pair | {"percent": 100 * abs(pair["bf16"] / pair["fp32"] - 1)}] if all(cell_pair.values()) else []
    return pairs


def _peaks(block: str, *precisions: str):
    """Peaks of a forward pass and of a training step, in these precisions, with those of what did not fit predicted."""
    steps = {"mode": (*_CALLED,), "precision": precisions}
    return _profiled(
        block,
        {"memprof": ("context", "mode", "precision", "peak_gib", "peak_phase", "step_ms", "status")},
        precisions=precisions,
        grid=lambda handout: {"context": handout.memory_contexts, **steps},
        label="{mode} at context {context} in {precision}",
        facts=lambda answer, groups: {
            **{"called": _CALLED, "predicted": _predicted, "kinds": _KINDS},
            "pairs": _pairs(groups),
        },
    )


peaks = _peaks("peaks", "fp32")
mixed_precision = _peaks("mixed_precision", "fp32", "bf16")


def residual_stream(answer: Answer) -> None:
    answer.derive(tensor_answers(SIZES[SIZE], "fp32")[:1], "residual", "a tensor of the residual stream")


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
    options: dict[str, Any] = {"mode": ("forward", "train"), "precision": ("fp32", "bf16")}
    contexts = sorted(target.handout.memory_contexts)
    flags = ("--no-predict", "--steps", "1")
    return [training_sweep(target, "memprof", (SIZE,), contexts, flags, steps=4, **options)]


_COLUMNS = ("precision", "checkpointing", "peak_gib", "predicted_gib", "recomputed_percent", "step_ms", "step_ratio")


def _checkpointed_runs(answer: Answer) -> list[Selection]:
    wanted = {"size": (SIZE,), "context": (2048,)}
    runs = answer.find("memprof", wanted, mode=("train",), **PLAIN_OF_ANY_MODE)
    runs = [group for group in runs if len({cell.configuration["checkpointing"] for cell in group.cells}) > 1]
    # Asked in the model's own precision.
    return sorted(runs, key=lambda group: group.setting("precision") != "fp32")


def nested(answer: Answer) -> None:
    answers = checkpointing_answers(choose_size(SIZE, context=2048), "fp32", "reference")
    answer.derive(answers, "rules", "what strategies hold")
    runs = [group for group in _checkpointed_runs(answer) if "nested" in group.by("checkpointing")][:1]
    answer.measured_by(runs)
    # Only what one run measured is compared.
    cells = [{name: facts_of(cell) for name, cell in group.by("checkpointing").items()} for group in runs]
    answer.write("memory.nested", runs=cells)


def one_recomputation(answer: Answer) -> None:
    runs = _checkpointed_runs(answer)
    answer.show(runs, "checkpointing", *_COLUMNS, "status")
    for run in runs:
        size = MemoryWorkload.from_configuration(run.cells[0].configuration).training.size
        precision = run.setting("precision")
        # The blocks of a checkpoint, a half where layers have one each.
        blocks = {"sublayer": 0.5, "block": 1.0, **{f"every={count}": count for count in range(2, size.num_layers)}}
        cells = [facts_of(cell) | {"blocks": blocks.get(cell.configuration["checkpointing"])} for cell in run.measured]
        cells = sorted((cell for cell in cells if cell["blocks"]), key=lambda cell: cell["blocks"])
        rule = best_group_size(size, precision, "train", "reference")
        if cells:
            answer.write("memory.one_recomputation", rule=rule, cells=cells, precision=precision)


def checkpointing_commands(target: Target) -> list[Command]:
    strategies = ("none", "block", "every=2", "every=3", "sublayer", "attention", "ffn", "nested")
    options: dict[str, Any] = {"precision": ("fp32",), "checkpoint": strategies}
    flags = ("--no-predict", "--steps", "1")
    return [training_sweep(target, "memprof", (SIZE,), (2048,), flags, steps=5, **options)]
