"""Sentences of the write-ups: named in the Markdown file next to each module of problems, and filled with facts."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from string import Formatter
from typing import Any

from cs336sys.accounting.derivation import Derived
from cs336sys.report.numbers import format_number, format_operand, format_quantity, in_shown_unit
from cs336sys.results.model import Samples
from cs336sys.results.statistics import Interval, fewest_samples, ratio

# Times that differ by less are called the same.
ALIKE = 0.05


def joined(words: Iterable[str], conjunction: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    listed = list(words)
    if len(listed) < 2:
        return "".join(listed)
    return f"{', '.join(listed[:-1])} {conjunction} {listed[-1]}"


def gib(value: float) -> str:
    return format_quantity(value, "gib") if abs(value) >= 0.1 or value == 0 else format_quantity(value, "gib as mib")


def times(value: float) -> str:
    """A factor in three digits, ``2.10x``; ``4x`` where it is exactly that."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}x"
    return f"{value:#.3g}x".replace(".x", "x")


def percent(value: float) -> str:
    return f"{value:.2g} %" if abs(value) < 1 else f"{format_number(value, 'percent')} %"


def spread(values: Sequence[float], word: Callable[[float], str] = times) -> str:
    """``between 1.2x and 1.9x``, or the one value if all are shown alike."""
    low, high = word(min(values)), word(max(values))
    return low if low == high else f"between {low} and {high}"


def change(ratio: float) -> str:
    """``grows 2.1x``, ``falls to 0.4x``, ``stays within 5 %``, :data:`ALIKE`."""
    if abs(ratio - 1) <= ALIKE:
        return f"stays within {ALIKE:.0%}".replace("%", " %")
    return f"grows {times(ratio)}" if ratio > 1 else f"falls to {times(ratio)}"


def as_long(ratio: float) -> str:
    """``as long as``, where both are shown alike, or ``2.1x as long as``."""
    return "as long as" if times(ratio) in ("1x", "1.00x") else f"{times(ratio)} as long as"


def speed(ratio: float, alike: float = ALIKE) -> str:
    """A ratio of times, theirs over ours: ``2.1x as fast``, ``as fast within 5 %``, ``1.3x slower``."""
    if abs(ratio - 1) <= alike:
        return f"as fast within {100 * alike:g} %"
    return f"{times(ratio)} as fast" if ratio > 1 else f"{times(1 / ratio)} slower"


def faster(before: Samples, after: Samples) -> str:
    """Return how much faster ``after`` is, as far as the samples can tell: ``1.28x as fast``, or nothing within the
    noise.
    """
    found = ratio(before, after)
    if found.is_undecided:
        return f"undecided: {too_few(before, after)}"
    if found.is_noise:
        return f"no different within the noise ({times(found.low)} to {times(found.high)} the speed)"
    # Beyond the noise, a difference is one however small; three digits show half a percent.
    return speed(found.estimate, alike=0.005)


def too_few(*series: Samples) -> str:
    """Say why the rank-sum test says nothing of these samples."""
    counts = [len(one.measured) for one in series]
    why = "are too few" if min(counts) < fewest_samples() else "drift too much"
    return f"{' and '.join(map(str, dict.fromkeys(counts)))} steps {why} for a verdict at 5 %"


def trend(values: Sequence[float]) -> str:
    """``grows``, ``falls``, or neither, over a series."""
    steps = [after - before for before, after in pairwise(values)]
    if steps and all(step > 0 for step in steps):
        return "grows"
    if steps and all(step < 0 for step in steps):
        return "falls"
    return "neither grows nor falls steadily"


def cost(exposed: Interval) -> str:
    """Phrase what communication adds to a step, as far as the noise allows."""
    if exposed.is_undecided:
        return f"{format_quantity(exposed.estimate, 'ms')} (too few steps to tell from nothing at 5 %)"
    if exposed.is_noise:
        return f"less than {format_quantity(max(exposed.high, 0), 'ms')}, below the noise"
    low, high = format_quantity(exposed.low, "ms"), format_quantity(exposed.high, "ms")
    return f"{format_quantity(exposed.estimate, 'ms')} ({low} to {high})"


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


def _quantity(unit: str) -> Callable[[float], str]:
    return lambda value: format_quantity(value, unit)


# Formats of one fact; of a list each is written so, joined with "and".
FORMATS: dict[str, Callable[[Any], str]] = {
    **{unit: _quantity(unit) for unit in ("ms", "bytes", "decimal_bytes", "gbps")},
    **{"gib": gib, "times": times, "percent": percent, "change": change, "as_long": as_long, "speed": speed},
    **{"cost": cost, "derived": derived_value, "s": lambda count: "" if count == 1 else "s"},
    "us": lambda us: format_quantity(us, "us") if us < 1e3 else format_quantity(us / 1e3, "ms"),
    "signed ms": lambda value: f"{'+' if value > 0 else ''}{format_quantity(value, 'ms')}",
}
# Formats of a list.
LIST_FORMATS: dict[str, Callable[[Any], str]] = {
    "trend": trend,
    "spread": spread,
    "spread ms": lambda values: spread(values, _quantity("ms")),
    "spread percent": lambda values: spread(values, percent),
    "or": lambda values: joined(map(str, values), "or"),
}


class Prose:
    """The sentences of a template by their names, and those that all problems share.

    A sentence names facts and how each is written: ``{mean:ms}``, ``{ratios:trend}``; ``{is_less:less|more}`` chooses
    by a fact. With the name of another sentence as its format, a fact fills that one: for each dictionary of a list
    (joined with "and"), once for a dictionary or True, and not at all for None, False or an empty list.
    """

    def __init__(self, *texts: str) -> None:
        found = (match for text in texts for match in re.finditer(r"^\[(.+?)\] (.*?)(?=^\[|^#|\Z)", text, re.M | re.S))
        # The line after the first begins where a word ended; only before a clause is the space at its start its own.
        self.sentences = {name: re.sub(r"\s*\n\s*", " ", body.rstrip()) for name, body in (m.groups() for m in found)}
        self.formats = dict(FORMATS)

    def fill(self, name: str, facts: Mapping[str, Any]) -> str:
        return _Filled(self, facts).vformat(self.sentences[name], (), facts)


class _Filled(Formatter):
    def __init__(self, prose: Prose, facts: Mapping[str, Any]) -> None:
        self.prose, self.facts = prose, facts

    def format_field(self, value: Any, spec: str) -> str:
        if spec in LIST_FORMATS:
            return LIST_FORMATS[spec](value)
        if isinstance(value, (list, tuple)):
            return joined(self.format_field(one, spec) for one in value)
        if spec in self.prose.sentences:
            own = value if isinstance(value, Mapping) else {}
            return self.prose.fill(spec, {**self.facts, **own}) if value or own else ""
        if "|" in spec:
            return spec.split("|")[0 if value else 1]
        return self.prose.formats[spec](value) if spec in self.prose.formats else super().format_field(value, spec)


@cache
def _text(name: str) -> str:
    return (files("cs336sys.report.course.problems") / f"{name}.md").read_text()


def prose_of(function: Callable[..., Any]) -> Prose:
    """The sentences next to the function's module."""
    return Prose(_text("common"), _text(function.__module__.rpartition(".")[2]))
