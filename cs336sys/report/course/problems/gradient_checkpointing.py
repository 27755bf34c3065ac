"""``gradient_checkpointing``: what checkpoints save of the peak, and the least that groups of blocks hold."""

from typing import Any

from cs336sys.accounting.checkpointing import best_group_size, predicted_peak
from cs336sys.accounting.one_device import checkpointing_answers
from cs336sys.report.course.answer import Answer, facts_of
from cs336sys.report.course.evidence import PLAIN_OF_ANY_MODE, Selection
from cs336sys.report.course.problem import Command, Target, training_sweep
from cs336sys.report.course.problems.memory_profiling import SIZE
from cs336sys.sizes import choose_size
from cs336sys.workload import MemoryWorkload

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
    answer.write("gradient_checkpointing.nested", runs=cells)


def one_recomputation(answer: Answer) -> None:
    runs = _checkpointed_runs(answer)
    answer.show(runs, "checkpointing", *_COLUMNS, "status")
    for run in runs:
        size = MemoryWorkload.from_configuration(run.cells[0].configuration).training.size
        setting = (size, run.setting("precision"), "train", "reference")
        # By the blocks of a checkpoint, a half where layers have one each.
        blocks = {
            "sublayer": 0.5,
            "block": 1.0,
            **{f"every={count}": float(count) for count in range(2, size.num_layers)},
        }
        cells = [facts_of(cell) | {"blocks": blocks.get(cell.configuration["checkpointing"])} for cell in run.measured]
        cells = sorted((cell for cell in cells if cell["blocks"]), key=lambda cell: cell["blocks"])
        facts = {"need_gib": predicted_peak(*setting).total_gib, "precision": setting[1], "cells": cells}
        answer.write("gradient_checkpointing.one_recomputation", rule=best_group_size(*setting), **facts)


def checkpointing_commands(target: Target) -> list[Command]:
    strategies = ("none", "block", "every=2", "every=3", "sublayer", "attention", "ffn", "nested")
    options: dict[str, Any] = {"precision": ("fp32",), "checkpoint": strategies}
    flags = ("--no-predict", "--steps", "1")
    return [training_sweep(target, "memprof", (SIZE,), (2048,), flags, steps=5, **options)]
