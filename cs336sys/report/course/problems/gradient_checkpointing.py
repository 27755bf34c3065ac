"""``gradient_checkpointing``: what checkpoints save of the peak, and the least that groups of blocks hold."""

from typing import Any

from cs336sys.accounting.checkpointing import best_group_size, checkpointing_answers, predicted_peak
from cs336sys.accounting.memory import GIB
from cs336sys.report.course.answer import Answer
from cs336sys.report.course.evidence import PLAIN_OF_ANY_MODE, Selection
from cs336sys.report.course.problem import Command, Target, training_sweep
from cs336sys.results.model import Cell
from cs336sys.sizes import choose_size
from cs336sys.workload import MemoryWorkload

# The model that both handouts ask about.
_SIZE = "2.7b"

# Of blocks: their layers.
_SUBLAYER = 0.5

# Peaks this close are called the same: an allocator rounds, and its workspaces differ.
_ALIKE = 0.002


def nested(answer: Answer) -> None:
    answers = checkpointing_answers(choose_size(_SIZE, context=2048), "fp32", "reference")
    part_a = [rule for rule in answers if rule.question.endswith("(a)")]
    plain = next(rule.value for rule in answers if rule.quantity == "held without checkpoints")
    answer.say("halves")
    answer.say("alive")
    answer.derive(answers, "rules", "what strategies hold", say=part_a)
    answer.say("without checkpoints", held=plain / GIB, ratio=plain / part_a[0].value)
    runs = _checkpointed_runs(answer)
    answer.measured_by(runs)
    # Only what one run measured is compared.
    for measured in [strategies for group in runs if "nested" in (strategies := group.by("checkpointing"))][:1]:
        cell, block = measured["nested"], measured.get("block")
        compared = block and {
            "block_peak": _peak(block),
            "longer": cell.samples["step"].median / block.samples["step"].median,
        }
        answer.say("nested halves", cell.configuration, peak=_peak(cell), compared=compared)
        if block is not None and _needs_as_much(block, cell):
            # Where the whole step's peak is, if nested halves do not lower it.
            size = MemoryWorkload.from_configuration(block.configuration).training.size
            moment = predicted_peak(size, block.configuration["precision"], "train", "reference", "block").moment
            if moment.endswith(f"block 1 of {size.num_layers}"):
                answer.say("no lower peak", moment=moment)


def _checkpointed_runs(answer: Answer) -> list[Selection]:
    wanted = {"size": (_SIZE,), "context": (2048,)}
    runs = answer.find("memprof", wanted, mode=("train",), **PLAIN_OF_ANY_MODE)
    return [group for group in runs if len({cell.configuration["checkpointing"] for cell in group.cells}) > 1]


def one_recomputation(answer: Answer) -> None:
    # Asked in the model's own precision; what is measured there need not be called missing elsewhere.
    runs = sorted(_checkpointed_runs(answer), key=lambda group: group.setting("precision") != "fp32")
    cuts_blocks = any(_SUBLAYER in map(_blocks_a_checkpoint, group.measured) for group in runs)
    for group in runs:
        _say_groups(answer, group, cuts_blocks)
    keys = ("context", "precision", "checkpointing", "peak_gib", "predicted_gib", "recomputed_percent", "step_ms")
    answer.show(runs, "checkpointing", *keys, "step_ratio", "status")


def _say_groups(answer: Answer, run: Selection, cuts_blocks: bool) -> None:
    """Report what one run measured, next to what the formula expects."""
    precision = run.setting("precision")
    size = MemoryWorkload.from_configuration(run.cells[0].configuration).training.size
    rule = best_group_size(size, precision, "train", "reference")
    answer.prose.formats["pieces"] = lambda blocks: answer.fill("groups" if blocks >= 1 else "layers", blocks=blocks)
    facts = {"precision": precision, "context": size.context, "blocks": size.num_layers, "expected": rule.best}
    by_rule = rule.best == max(1, round(rule.rule))
    answer.say("rule", facts, input=rule.block_input, saved=rule.block_activations, least=rule.rule, by_rule=by_rule)
    pieces = [(_blocks_a_checkpoint(cell), cell) for cell in run.measured]
    grouped = {blocks: cell for blocks, cell in pieces if blocks is not None and blocks <= size.num_layers}
    if grouped:
        peaks = [cell.configuration | {"peak": _peak(cell)} for _, cell in sorted(grouped.items())]
        answer.say("peaks", facts, peaks=peaks)
        # What needs as much with fewer checkpoints is better.
        least = min(grouped.values(), key=_peak)
        alike = [blocks for blocks in grouped if _needs_as_much(grouped[blocks], least)]
        best = rule.best if rule.best in alike else max(alike)
        answer.say("least as expected" if best == rule.best else "least elsewhere", facts, best=best)
        _say_neighbours(answer, grouped, best, cuts_blocks)
    answer.say_failures(
        run.cells, lambda cell: "plain step" if cell.configuration["checkpointing"] == "none" else "checkpointed step"
    )
    answer.say("predicted", need=predicted_peak(size, precision, "train", "reference").total_gib)


def _blocks_a_checkpoint(cell: Cell) -> float | None:
    """Return how many blocks a checkpoint covers, a half where layers have one each; None of other strategies."""
    strategy = cell.configuration["checkpointing"]
    if strategy.startswith("every="):
        return int(strategy.removeprefix("every="))
    return {"block": 1.0, "sublayer": _SUBLAYER}.get(strategy)


def _peak(cell: Cell) -> float:
    return cell.derived["peak_gib"]


def _needs_as_much(cell: Cell, other: Cell) -> bool:
    return _peak(cell) <= (1 + _ALIKE) * _peak(other)


def _say_neighbours(answer: Answer, grouped: dict[float, Cell], best: float, cuts_blocks: bool) -> None:
    """Report the needs of the next smaller and the next larger pieces that were measured."""
    smaller = max((pieces for pieces in grouped if pieces < best), default=None)
    larger = min((pieces for pieces in grouped if pieces > best), default=None)
    for other, called in ((smaller, "smaller"), (larger, "larger")):
        if other is not None:
            name = "as much" if _needs_as_much(grouped[other], grouped[best]) else "more"
            answer.say(name, called=called, pieces=other, more=_peak(grouped[other]) - _peak(grouped[best]))
    if best == 1 and smaller == _SUBLAYER and _needs_as_much(grouped[_SUBLAYER], grouped[1]):
        answer.say("cutting does not help")
    elif best == 1 and smaller is None and not cuts_blocks:
        answer.say("no smaller pieces")


def checkpointing_commands(target: Target) -> list[Command]:
    strategies = ("none", "block", "every=2", "every=3", "sublayer", "attention", "ffn", "nested")
    options: dict[str, Any] = {"precision": ("fp32",), "checkpoint": strategies}
    flags = ("--no-predict", "--steps", "1")
    return [training_sweep(target, "memprof", (_SIZE,), (2048,), flags, steps=5, **options)]
