"""Phrases that depend on numbers: the parts that the answers' sentences are put together from."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from cs336sys.accounting.derivation import Derived
from cs336sys.report.numbers import format_number, format_operand, format_quantity, in_shown_unit
from cs336sys.results.model import Cell, Samples
from cs336sys.results.statistics import ratio

# Times that differ by less are called the same.
ALIKE = 0.05


def joined(words: Iterable[str], conjunction: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    listed = list(words)
    if len(listed) < 2:
        return "".join(listed)
    return f"{', '.join(listed[:-1])} {conjunction} {listed[-1]}"


def ms(value: float) -> str:
    return format_quantity(value, "ms")


def gib(value: float) -> str:
    return format_quantity(value, "gib") if abs(value) >= 0.1 or value == 0 else format_quantity(value, "gib as mib")


def times(value: float) -> str:
    """A factor in three digits, ``2.13x``."""
    return f"{value:,.0f}x" if abs(value) >= 100 else f"{value:.3g}x"


def percent(value: float) -> str:
    return f"{value:.2g} %" if abs(value) < 1 else f"{format_number(value, 'percent')} %"


def spread(values: Sequence[float], word=times) -> str:
    """``between 1.2x and 1.9x``, or the one value if all are shown alike."""
    low, high = word(min(values)), word(max(values))
    return low if low == high else f"between {low} and {high}"


def change(before: float, after: float, *, up: str = "grows", down: str = "falls") -> str:
    """``grows 2.1x``, ``falls to 0.4x``, ``stays the same`` within :data:`ALIKE`."""
    ratio = after / before
    if abs(ratio - 1) <= ALIKE:
        return "stays the same"
    return f"{up} {times(ratio)}" if ratio > 1 else f"{down} to {times(ratio)}"


def as_long(ratio: float) -> str:
    """``as long as``, where both are shown alike, or ``2.1x as long as``."""
    return "as long as" if times(ratio) == "1x" else f"{times(ratio)} as long as"


def speed(ratio: float, alike: float = ALIKE) -> str:
    """A ratio of times, theirs over ours: ``2.1x as fast``, ``as fast`` within ``alike``, ``1.3x slower``."""
    if abs(ratio - 1) <= alike:
        return "as fast"
    return f"{times(ratio)} as fast" if ratio > 1 else f"{times(1 / ratio)} slower"


def faster(before: Samples, after: Samples) -> str:
    """How much faster ``after`` is, as far as the samples can tell: ``1.28x as fast``, or nothing within the noise."""
    found = ratio(before, after)
    if found.is_noise:
        return f"no different within the noise ({times(found.low)} to {times(found.high)} the speed)"
    # Beyond the noise, a difference is one however small; three digits show half a percent.
    return speed(found.estimate, alike=0.005)


def trend(values: Sequence[float]) -> str:
    """``grows``, ``falls``, or neither, over a series."""
    steps = [after - before for before, after in pairwise(values)]
    if steps and all(step > 0 for step in steps):
        return "grows"
    if steps and all(step < 0 for step in steps):
        return "falls"
    return "neither grows nor falls steadily"


def failures(cells: Sequence[Cell], what) -> list[str]:
    """One sentence for each status that is none of success: which cells, and why."""
    words = {
        "oom": "ran out of memory",
        "unsupported": "is not supported",
        "timeout": "took too long",
        "wrong": "gave wrong results",
        "error": "failed",
    }
    sentences = []
    for status, verb in words.items():
        failed = [cell for cell in cells if cell.status == status]
        if failed:
            names = joined(dict.fromkeys(what(cell) for cell in failed))
            reasons = "; ".join(dict.fromkeys(_why(cell.reason) for cell in failed if cell.reason))
            # "a training step" begins the sentence, the name of a size stays as it is.
            names = f"A{names[1:]}" if names.startswith("a ") else names
            sentences.append(f"{names} {verb}{f' ({reasons})' if reasons else ''}.")
    return sentences


def _why(reason: str) -> str:
    """A cell's reason, without what the verb before it says: ``at warm-up 1/5: tried to allocate 82.00 MiB``."""
    said = reason.removeprefix("out of memory ").replace("CUDA out of memory. Tried", "tried")
    return said.rstrip(".")


def derived_sentence(answer: Derived) -> str:
    """A derived value with its formula and its reason."""
    reason = f" {answer.reason}" if answer.reason else ""
    quantity = f"{answer.quantity[:1].upper()}{answer.quantity[1:]}"
    return f"{quantity}: {answer.derivation(format_operand)}, {derived_value(answer)}.{reason}"


def derived_value(answer: Derived) -> str:
    """``20 MiB``, ``at most 60.61 devices``."""
    value, unit = in_shown_unit(answer.value, answer.unit)
    if value == float("inf"):
        return "without limit"
    relation = {"<=": "at most ", ">=": "at least "}.get(answer.relation, "")
    number = f"{value:,.0f}" if value == int(value) else format_quantity(value, "")
    return f"{relation}{number.strip()} {unit}".strip()
