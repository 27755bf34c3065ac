"""``gradient_checkpointing``: what checkpoints save of the peak, and the least that groups of blocks hold."""

from cs336sys.accounting.checkpointing import best_group_size, checkpointing_answers, predicted_peak
from cs336sys.report.account.answers import answers_table
from cs336sys.report.course.evidence import PLAIN, Evidence, Found
from cs336sys.report.course.problem import (
    GIB,
    Answer,
    Command,
    Handout,
    Part,
    Problem,
    Sweep,
    Target,
    arithmetic,
    runs_of,
)
from cs336sys.report.course.words import as_long, derived_sentence, failures, gib, joined, times
from cs336sys.report.numbers import format_quantity
from cs336sys.results.model import Cell
from cs336sys.sizes import choose_size
from cs336sys.workload import MemoryWorkload

# The model that both handouts ask about.
_SIZE = "2.7b"

# Of blocks: their layers.
_SUBLAYER = 0.5

# Peaks this close are called the same: an allocator rounds, and its workspaces differ.
_ALIKE = 0.002

_ONLY_WHOLE = "Groups of one block are the smallest of whole blocks"

_SKETCH = (
    "def run(x, blocks): if one block is left, return blocks[0](x); otherwise split blocks into halves a and b, and "
    "return checkpoint(run, checkpoint(run, x, a), b)"
)


def nested(evidence: Evidence, handout: Handout) -> Answer:
    answers = checkpointing_answers(choose_size(_SIZE, context=2048), "fp32", "reference")
    asked = [answer for answer in answers if answer.question.endswith("(a)")]
    plain = next(answer for answer in answers if answer.quantity == "held without checkpoints")
    sentences = [
        f"Halves inside halves: `{_SKETCH}`.",
        "At any time one block's residuals are alive, and one input for each level of halves that waits.",
        *map(derived_sentence, asked),
        f"Without checkpoints {format_quantity(plain.value / GIB, 'gib')} are held, "
        f"{times(plain.value / asked[0].value)} as much.",
    ]
    found = _checkpointed(evidence)
    # Only what one run measured is compared.
    by_strategy = [{cell.configuration["checkpointing"]: cell for cell in group.measured} for group in found]
    for measured in [one for one in by_strategy if "nested" in one][:1]:
        cell = measured["nested"]
        sentences.append(
            f"Measured (context {cell.configuration['context']}, {cell.configuration['precision']}): nested halves "
            f"peak at {gib(cell.derived['peak_gib'])}"
            + (
                f", one checkpoint a block at {gib(measured['block'].derived['peak_gib'])}, and the step takes "
                f"{as_long(cell.samples['step'].median / measured['block'].samples['step'].median)} with the latter."
                if "block" in measured
                else "."
            )
        )
        if "block" in measured and _needs_as_much(measured["block"], cell):
            sentences += _why_not_less(measured["block"])
    return Answer(sentences, [answers_table("rules", "what strategies hold", answers)], {}, runs_of(found))


def _why_not_less(block: Cell) -> list[str]:
    """Where the whole step's peak is, if nested halves do not lower it."""
    size = MemoryWorkload.from_configuration(block.configuration).training.size
    peak = predicted_peak(size, block.configuration["precision"], "train", "reference", "block")
    if not peak.moment.endswith(f"block 1 of {size.num_layers}"):
        return []
    return [
        f"The halves lower no peak of the whole step, because that comes at the end of the backward pass "
        f"({peak.moment}, as predicted): then no later block's input is kept with either, while all gradients and the "
        "optimizer state are there."
    ]


def _checkpointed(evidence: Evidence) -> list[Found]:
    plain = {name: values for name, values in PLAIN.items() if name != "mode"}
    found = evidence.find("memprof", {"size": (_SIZE,), "context": (2048,)}, mode=("train",), **plain)
    return [group for group in found if len({cell.configuration["checkpointing"] for cell in group.cells}) > 1]


def one_recomputation(evidence: Evidence, handout: Handout) -> Answer | None:
    found = _checkpointed(evidence)
    if not found:
        return None
    # Asked in the model's own precision; what is measured there need not be called missing elsewhere.
    found.sort(key=lambda group: group.cells[0].configuration["precision"] != "fp32")
    cuts_blocks = any(_SUBLAYER in map(_group, group.measured) for group in found)
    sentences = [
        sentence
        for group in found
        for sentence in _group_words(group)
        if not (cuts_blocks and sentence.startswith(_ONLY_WHOLE))
    ]
    keys = ("context", "precision", "checkpointing", "peak_gib", "predicted_gib", "recomputed_percent", "step_ms")
    tables = [table for group in found for table in group.table("checkpointing", *keys, "step_ratio", "status")]
    return Answer(sentences, tables, {}, runs_of(found))


def _group_words(found: Found) -> list[str]:
    """What one run measured, beside what the formula expects."""
    cells = found.cells
    size = MemoryWorkload.from_configuration(cells[0].configuration).training.size
    precision = cells[0].configuration["precision"]
    rule = best_group_size(size, precision, "train", "reference")
    sentences = [
        f"In {precision} groups of K blocks hold about N s / K + K b bytes, with N = {size.num_layers} blocks, an "
        f"input of s = {format_quantity(rule.block_input, 'bytes')} and "
        f"b = {format_quantity(rule.block_activations, 'bytes')} saved by a block: least at "
        f"K = sqrt(N s / b) = {rule.rule:.2g}"
        + (
            f", so {_pieces(rule.best)} should need the least."
            if rule.best == max(1, round(rule.rule))
            else f"; by the moments of a whole step, though, {_pieces(rule.best)} should need the least."
        )
    ]
    measured = [cell for cell in cells if cell.status == "ok"]
    grouped = {group: cell for cell in measured if (group := _group(cell)) is not None and group <= size.num_layers}
    if grouped:
        listed = [f"{gib(_peak(cell))} ({cell.configuration['checkpointing']})" for _, cell in sorted(grouped.items())]
        sentences.append(f"Measured at context {size.context} in {precision}: {joined(listed)}.")
        # What needs as much with fewer checkpoints is better.
        least = min(grouped.values(), key=_peak)
        alike = [pieces for pieces in grouped if _needs_as_much(grouped[pieces], least)]
        best = rule.best if rule.best in alike else max(alike)
        expected = "as expected" if best == rule.best else f"and not {_pieces(rule.best)} as expected"
        sentences.append(f"The least is that of {_pieces(best)}, {expected}.")
        sentences += _neighbours(grouped, best)
    sentences += failures(cells, _step_called)
    none = predicted_peak(size, precision, "train", "reference").total_gib
    sentences.append(f"Without checkpoints the step is predicted to need {gib(none)}.")
    return sentences


def _step_called(cell: Cell) -> str:
    strategy = cell.configuration["checkpointing"]
    return "a step without checkpoints" if strategy == "none" else f"a step with checkpoints `{strategy}`"


def _group(cell: Cell) -> float | None:
    """How many blocks a checkpoint covers, a half where layers have one each; None of other strategies."""
    strategy = cell.configuration["checkpointing"]
    known = {"block": 1.0, "sublayer": _SUBLAYER}
    return known.get(strategy) or (int(strategy.removeprefix("every=")) if strategy.startswith("every=") else None)


def _pieces(blocks: float) -> str:
    return f"groups of {blocks:g} block{'s' * (blocks > 1)}" if blocks >= 1 else "attention and feed-forward layers"


def _peak(cell: Cell) -> float:
    return cell.derived["peak_gib"]


def _needs_as_much(cell: Cell, other: Cell) -> bool:
    return _peak(cell) <= (1 + _ALIKE) * _peak(other)


def _neighbours(grouped: dict[float, Cell], best: float) -> list[str]:
    """What the next smaller and the next larger pieces need that were measured."""
    sentences = []
    smaller = max((pieces for pieces in grouped if pieces < best), default=None)
    larger = min((pieces for pieces in grouped if pieces > best), default=None)
    for other, called in ((smaller, "smaller"), (larger, "larger")):
        if other is None:
            continue
        more = _peak(grouped[other]) - _peak(grouped[best])
        needs = "as much" if _needs_as_much(grouped[other], grouped[best]) else f"{gib(more)} more"
        sentences.append(f"The next {called} pieces, {_pieces(other)}, need {needs}.")
    if best == 1 and smaller == _SUBLAYER and _needs_as_much(grouped[_SUBLAYER], grouped[1]):
        sentences.append(
            "Cutting blocks does not help because the peak is in the attention of the first block: when the backward "
            "pass is there, its feed-forward layer is done, and no other block's input is kept."
        )
    elif best == 1 and smaller is None:
        sentences.append(f"{_ONLY_WHOLE}; smaller pieces were not measured.")
    return sentences


def checkpointing_commands(target: Target) -> list[Command]:
    strategies = ("none", "block", "every=2", "every=3", "sublayer", "attention", "ffn", "nested")
    sweep = Sweep(
        "memprof",
        target.sizes((_SIZE,)),
        target.contexts((2048,)),
        {"precision": ("fp32",), "checkpoint": strategies},
        ("--no-predict", "--steps", "1"),
        steps=5,
    )
    return [sweep.on(target)]


GRADIENT_CHECKPOINTING = Problem(
    "gradient_checkpointing",
    "Memory-optimal gradient checkpointing",
    (
        Part("a", nested, lambda target: arithmetic("account", "checkpointing", "--size", _SIZE, "--context", "2048")),
        Part("b", one_recomputation, checkpointing_commands),
    ),
)
