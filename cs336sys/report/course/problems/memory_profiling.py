"""``memory_profiling``: where memory goes in inference and in a training step."""

from collections.abc import Mapping, Sequence
from typing import Any

from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.accounting.one_device import tensor_answers
from cs336sys.report.course.answer import Answer, Settings, measured
from cs336sys.report.course.evidence import PLAIN_OF_ANY_MODE, Selection
from cs336sys.report.course.problem import Command, Handout, Target, training_sweep
from cs336sys.sizes import SIZES, choose_size

# The model that both handouts ask about.
SIZE = "2.7b"

# What the sentences call a mode.
_CALLED = {"train": "a training step", "forward": "inference"}

_KINDS = ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")


def _wanted(handout: Handout) -> Settings:
    # Where the longest that a handout asks for does not fit, shorter ones say what does.
    return {"size": (SIZE,), "context": {*handout.memory_contexts, 128, 256, 512}}


def _profiled(block: str, tables: Mapping[str, Sequence[str]], *modes: str, precisions=("fp32",), **options: Any):
    """Answer with steps of the model that both handouts ask about, without checkpoints."""
    settings = {"checkpointing": ("none",), "mode": modes or (*_CALLED,), "precision": precisions}
    options = {"wanted": _wanted, "required": {**PLAIN_OF_ANY_MODE, **settings}, **options}
    return measured("memprof", f"memory_profiling.{block}", tables, **options)


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


def _peaks(block: str, *precisions: str):
    """Peaks of a forward pass and of a training step, in these precisions, with those of what did not fit predicted."""
    steps = {"mode": (*_CALLED,), "precision": precisions}
    return _profiled(
        block,
        {"memprof": ("context", "mode", "precision", "peak_gib", "peak_phase", "step_ms", "status")},
        precisions=precisions,
        grid=lambda handout: {"context": handout.memory_contexts, **steps},
        label="{mode} at context {context} in {precision}",
        facts=lambda answer, groups: {"called": _CALLED, "predicted": _predicted, "kinds": _KINDS},
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
