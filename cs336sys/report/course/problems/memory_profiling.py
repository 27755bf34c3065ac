"""``memory_profiling``: where memory goes in inference and in a training step."""

from typing import Any

from cs336sys.accounting.activations import block_activations
from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.accounting.one_device import tensor_answers
from cs336sys.report.course.answer import Answer, Settings, facts_of, measured
from cs336sys.report.course.evidence import PLAIN_OF_ANY_MODE, Selection, cells_of
from cs336sys.report.course.problem import Command, Handout, Target, training_sweep
from cs336sys.sizes import SIZES, choose_size

# The model that both handouts ask about.
SIZE = "2.7b"

# What the sentences call a mode.
_CALLED = {"train": "a training step", "forward": "inference"}

_KINDS = ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")

_LABEL = "{mode} at context {context} in {precision}"


def _wanted(handout: Handout) -> Settings:
    # Where the longest that a handout asks for does not fit, shorter ones say what does.
    return {"size": (SIZE,), "context": {*handout.memory_contexts, 128, 256, 512}}


def _required(*modes: str, precision: tuple[str, ...] = ("fp32",)) -> Settings:
    return {**PLAIN_OF_ANY_MODE, "checkpointing": ("none",), "mode": modes or (*_CALLED,), "precision": precision}


def timelines(answer: Answer) -> None:
    contexts = answer.handout.memory_contexts if answer.handout.year == 2026 else (512,)
    selections = answer.find("memprof", _wanted(answer.handout), **_required())
    for mode, called in _CALLED.items():
        recorded = [Selection(group.invocation, [cell]) for group in selections for cell in group.of(mode=mode)]
        recorded.sort(key=lambda group: group.setting("context"))
        chosen = [group for group in recorded if group.setting("context") in contexts] or recorded[-1:]
        for group in chosen:
            (draw,) = group.pictures().values()
            answer.pictures[f"{called} at context {group.setting('context')} in fp32"] = draw
        parts = ("gradients", "optimizer_state", "activations", "temporary", "other")
        columns = ("phase", "allocated_gib", "parameters_gib", *(f"{part}_gib" for part in parts))
        answer.show(chosen, "phases", *columns, join=True)
        steps = [facts_of(group.cells[0]) for group in chosen]
        if selections:
            answer.write("memory_profiling.timelines", steps=steps, called=called, mode=mode, kinds=_KINDS)
    failed = [cell for cell in cells_of(selections) if cell.configuration["context"] in contexts]
    answer.write_failures(failed, _LABEL)


def _predicted(context: int, precision: str, mode: str) -> float:
    return predicted_peak(choose_size(SIZE, context=context), precision, mode, "reference").total_gib


def _peaks(block: str, *precisions: str):
    """Peaks of a forward pass and of a training step, in these precisions, with those of what did not fit predicted."""

    def answered(answer: Answer) -> None:
        columns = ("context", "mode", "precision", "peak_gib", "peak_phase", "step_ms", "status")
        selections = answer.find("memprof", _wanted(answer.handout), **_required(precision=precisions))
        answer.show(selections, "memprof", *columns, join=True)
        cells = sorted(map(facts_of, cells_of(selections)), key=lambda cell: cell["context"])
        if cells:
            facts = {"cells": cells, "called": _CALLED, "predicted": _predicted}
            answer.write(f"memory_profiling.{block}", **facts)
            answer.write_failures(cells_of(selections), _LABEL)
            grid: dict[str, Any] = {"context": sorted(answer.handout.memory_contexts), "mode": (*_CALLED,)}
            answer.lack_unmeasured("{mode} at context {context}", cells, grid)

    return answered


peaks = _peaks("peaks", "fp32")
mixed_precision = _peaks("mixed_precision", "fp32", "bf16")


def residual_stream(answer: Answer) -> None:
    answers = tensor_answers(SIZES[SIZE], "fp32")[:1]
    answer.derive(answers, "residual", "a tensor of the residual stream", say=answers)


largest_allocations = measured(
    "memprof",
    "memory_profiling.largest_allocations",
    {"allocations": ("context", "size_bytes", "count", "phase", "category", "module", "operation", "code")},
    wanted=_wanted,
    required=_required("forward"),
    label=_LABEL,
)


def block(answer: Answer) -> None:
    runs = answer.find("memprof", _wanted(answer.handout), **_required("train"))
    recorded = [group.only(lambda cell: cell.status == "ok" and cell.derived.get("saved_tensors")) for group in runs]
    selections = [group for group in recorded if group.cells]
    if not selections:
        return
    columns = ("saved_bytes", "saved_predicted_bytes", "forward_growth_bytes", "backward_change_bytes")
    gradients = ("gradients_by_difference_bytes", "gradients_bytes", "gradients_expected_bytes")
    answer.show(selections, "block", *columns, *gradients, join=True)
    answer.show(
        selections, "saved_tensors", "tensor", "shape", "size_bytes", "share_percent", "operation", "code", join=True
    )
    rows = [row for group in selections for row in group.rows("saved_tensors") if "shape" in row]
    blocks = sorted((row for group in selections for row in group.rows("block")), key=lambda row: row["context"])
    unmeasured = [context for context in answer.handout.memory_contexts if context > blocks[-1]["context"]]
    predicted = {c: block_activations(choose_size(SIZE, context=c), "fp32", "reference").total for c in unmeasured}
    answer.write("memory_profiling.block", blocks=blocks, rows=rows, predicted=predicted)


def memory_commands(target: Target) -> list[Command]:
    options: dict[str, Any] = {"mode": ("forward", "train"), "precision": ("fp32", "bf16")}
    contexts = sorted(target.handout.memory_contexts)
    flags = ("--no-predict", "--steps", "1")
    return [training_sweep(target, "memprof", (SIZE,), contexts, flags, steps=4, **options)]
