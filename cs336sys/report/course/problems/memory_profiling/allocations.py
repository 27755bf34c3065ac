"""(d), (e) and (f): the residual stream, the largest allocations, and what one block saves and produces."""

from cs336sys.accounting.activations import block_activations
from cs336sys.accounting.answers.model import tensor_answers
from cs336sys.report.course.evidence import Evidence, Found
from cs336sys.report.course.problem import Answer, runs_of
from cs336sys.report.course.problems.memory_profiling.cells import SIZE, context_of, recorded
from cs336sys.report.course.target import Handout
from cs336sys.report.course.words import ALIKE, derived_sentence, joined, percent, times
from cs336sys.report.numbers import format_quantity
from cs336sys.results import Cell
from cs336sys.sizes import SIZES
from cs336sys.workload import MemoryWorkload


def residual_stream(evidence: Evidence, handout: Handout) -> Answer:
    return Answer([derived_sentence(tensor_answers(SIZES[SIZE], "fp32")[0])])


def largest_allocations(evidence: Evidence, handout: Handout) -> Answer | None:
    found = [
        Found(group.invocation, group.measured)
        for group in recorded(evidence, handout, precision=("fp32",), mode=("forward",))
        if group.measured
    ]
    if not found:
        return None
    sentences = []
    for cell in sorted((cell for group in found for cell in group.cells), key=context_of):
        top = cell.derived["largest"][0]
        alike = [kind for kind in cell.derived["largest"] if kind["size"] == top["size"]]
        sentences.append(
            f"At context {context_of(cell)} the largest allocations of the forward pass have "
            f"{format_quantity(top['size'], 'bytes')} each: {joined(map(_kind_words, alike))}."
        )
    keys = ("context", "size_bytes", "count", "phase", "category", "module", "operation", "code")
    tables = [table for group in found for table in group.table("allocations", *keys)]
    return Answer(sentences, tables, {}, runs_of(found))


def _kind_words(kind: dict) -> str:
    """``32 by `mm` in `layers.*.ffn.w1` (cs336_basics/model.py:34 forward)``."""
    where = f" in `{kind['module']}`" if kind.get("module") else ""
    return f"{kind['count']} by `{kind['operation']}`{where}" + (f" ({kind['code']})" if kind.get("code") else "")


def block(evidence: Evidence, handout: Handout) -> Answer | None:
    found = [
        Found(group.invocation, kept)
        for group in recorded(evidence, handout, precision=("fp32",), mode=("train",))
        if (kept := [cell for cell in group.measured if cell.derived.get("saved_tensors")])
    ]
    if not found:
        return None
    sentences = []
    for cell in sorted((cell for group in found for cell in group.cells), key=context_of):
        tensors = cell.derived["saved_tensors"]
        total = sum(tensor["size"] for tensor in tensors)
        predicted = block_activations(
            MemoryWorkload.from_configuration(cell.configuration).training.size, "fp32", "reference"
        )
        as_derived = (
            "as the formula has it"
            if abs(total / predicted.total - 1) < 0.01
            else f"{times(total / predicted.total)} the formula's"
        )
        five = tensors[:5]
        listed = [f"{_saved_by(tensor)} {percent(100 * tensor['size'] / total)}" for tensor in five]
        sentences.append(
            f"At context {context_of(cell)} one block saves {format_quantity(total, 'bytes')} for the backward pass "
            f"({as_derived}), of which the five largest tensors, {joined(listed)}, are "
            f"{percent(100 * sum(tensor['size'] for tensor in five) / total)}."
        )
        sentences += _gradient_words(cell)
    tables = []
    for group in found:
        tables += group.table(
            "block",
            *("context", "saved_bytes", "saved_predicted_bytes", "forward_growth_bytes", "backward_change_bytes"),
            *("gradients_by_difference_bytes", "gradients_bytes", "gradients_expected_bytes"),
        )
        last = Found(group.invocation, sorted(group.cells, key=context_of)[-1:])
        tables += last.table(
            "saved_tensors", "context", "tensor", "shape", "size_bytes", "share_percent", "operation", "code"
        )
    return Answer(sentences, tables, {}, runs_of(found))


def _saved_by(tensor: dict) -> str:
    """``Exp of softmax``: the operation, and the function that called it, of a ``forward`` its line."""
    place, _, function = (tensor.get("code") or "").rpartition(" ")
    caller = place.rpartition("/")[2] if function == "forward" else function
    return (tensor.get("operation") or "an input") + (f" of {caller}" if caller else "")


def _gradient_words(cell: Cell) -> list[str]:
    changes = cell.derived.get("block")
    if not changes or changes.get("backward_change") is None:
        return []
    produced = changes["backward_change"] + changes["forward_growth"]
    size = MemoryWorkload.from_configuration(cell.configuration).training.size
    expected = 4 * (4 * size.d_model**2 + 3 * size.d_model * size.d_ff + 2 * size.d_model)
    agrees = abs(produced / expected - 1) <= ALIKE
    return [
        f"Its backward pass changes what is held by {format_quantity(changes['backward_change'], 'bytes')} where the "
        f"forward pass added {format_quantity(changes['forward_growth'], 'bytes')}, so it produces "
        f"{format_quantity(produced, 'bytes')} of gradients; 4 bytes for each of its parameters are "
        f"{format_quantity(expected, 'bytes')}: {'as expected' if agrees else 'not as expected'}."
    ]
