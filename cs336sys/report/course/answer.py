"""The answer to a part of a problem, put together from saved cells and the sentences next to the problem's module."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from itertools import pairwise, product
from operator import itemgetter
from pathlib import Path
from string import Formatter
from typing import Any

from cs336sys.accounting.derivation import Derived
from cs336sys.report.account.answers import answers_table
from cs336sys.report.course.evidence import Evidence, Selection
from cs336sys.report.course.problem import Handout
from cs336sys.report.numbers import format_number, format_operand, format_quantity, in_shown_unit
from cs336sys.report.table import Column, Table
from cs336sys.results.model import Cell, Run, Samples
from cs336sys.results.statistics import Interval, ratio, same_within

# Times that differ by less are called the same.
ALIKE = 0.05


def joined(parts: Iterable[str], conjunction: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    listed = list(parts)
    if len(listed) < 2:
        return "".join(listed)
    return f"{', '.join(listed[:-1])} {conjunction} {listed[-1]}"


def _ms(value: float) -> str:
    return format_quantity(value, "ms")


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
    """Return how much faster ``after`` is, as far as the samples can tell: ``1.28x as fast``."""
    speedup = ratio(before, after)
    if speedup.is_undecided:
        return f"undecided; about {speedup.to_decide} steps would decide"
    if speedup.is_noise:
        return f"the {same_within(speedup.low, speedup.high)}"
    if speedup.is_bound:
        return f"at least {speed(speedup.low if speedup.low > 1 else speedup.high, alike=0.0)}"
    # Beyond the noise, a difference is one however small; three digits show half a percent.
    return speed(speedup.estimate, alike=0.005)


def trend(values: Sequence[float]) -> str:
    """``grows``, ``falls``, or neither, over a series."""
    steps = {(after > before) - (after < before) for before, after in pairwise(values)}
    return "grows" if steps == {1} else "falls" if steps == {-1} else "neither grows nor falls steadily"


def cost(exposed: Interval) -> str:
    """Phrase what communication adds to a step, as far as the noise allows."""
    if exposed.is_undecided:
        return f"{_ms(exposed.estimate)} (too few steps to tell from nothing at 5 %)"
    if exposed.is_noise:
        return f"less than {_ms(max(exposed.high, 0))}, below the noise"
    return f"{_ms(exposed.estimate)} ({_ms(exposed.low)} to {_ms(exposed.high)})"


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


# Formats of one fact; of a list each is written so, joined with "and".
FORMATS: dict[str, Callable[[Any], str]] = {
    **{unit: partial(format_quantity, unit=unit) for unit in ("bytes", "decimal_bytes", "gbps")},
    **{"ms": _ms, "gib": gib, "times": times, "percent": percent, "change": change, "as_long": as_long, "speed": speed},
    **{"cost": cost, "derived": derived_value, "s": lambda count: "" if count == 1 else "s"},
    "us": lambda us: format_quantity(us, "us") if us < 1e3 else _ms(us / 1e3),
    "signed ms": lambda value: f"{'+' if value > 0 else ''}{_ms(value)}",
}
# Formats of a list.
LIST_FORMATS: dict[str, Callable[[Any], str]] = {
    "trend": trend,
    "spread": spread,
    "spread ms": lambda values: spread(values, _ms),
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
        matches = re.findall(r"^\[(.+?)\] (.*?)(?=^\[|^#|\Z)", "\n".join(texts), re.M | re.S)
        # The line after the first begins where a word ended; only before a clause is the space at its start its own.
        self.sentences = {name: re.sub(r"\s*\n\s*", " ", body.rstrip()) for name, body in matches}
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
            return joined(self.format_field(item, spec) for item in value)
        if spec in self.prose.sentences:
            item_facts = value if isinstance(value, Mapping) else {}
            return self.prose.fill(spec, {**self.facts, **item_facts}) if value or item_facts else ""
        if "|" in spec:
            return spec.split("|")[0 if value else 1]
        return self.prose.formats[spec](value) if spec in self.prose.formats else super().format_field(value, spec)


@cache
def _text(name: str) -> str:
    return (files("cs336sys.report.course.problems") / f"{name}.md").read_text()


def prose_of(function: Callable[..., Any]) -> Prose:
    """The sentences next to the function's module."""
    return Prose(_text("common"), _text(function.__module__.rpartition(".")[2]))


_NO_FACTS: Mapping[str, Any] = {}

# Units of a column by how its key ends.
_UNITS = {"_ms": "ms", "_gib": "gib", "_speedup": "ratio"}


@dataclass
class Answer:
    """The sentences of a part, and the cells of one machine that they are about.

    Attributes:
        sentences: computed from the numbers; a part without sentences and tables has no answer.
        runs: that measured what the sentences say; none for what follows from arithmetic.
        missing: what is asked and was not measured.
    """

    evidence: Evidence
    handout: Handout
    prose: Prose
    sentences: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prose.formats["called"] = self.handout.called
        self.find, self.find_each = self.evidence.find, self.evidence.find_each

    def fill(self, name: str, facts: Mapping[str, Any] = _NO_FACTS, /, **more: Any) -> str:
        """A named sentence of the template with these facts."""
        return self.prose.fill(name, {**facts, **more})

    def say(self, name: str, facts: Mapping[str, Any] = _NO_FACTS, /, **more: Any) -> None:
        self.sentences.append(self.fill(name, facts, **more))

    def say_any(self, name: str, /, **lists: Sequence[Any]) -> None:
        """A sentence about lists, unless they are empty; ``is_one`` in it chooses by the length."""
        if all(lists.values()):
            self.say(name, lists, is_one=len(next(iter(lists.values()))) == 1)

    def lack(self, name: str, facts: Mapping[str, Any] = _NO_FACTS, /, **more: Any) -> None:
        """Say what is missing."""
        self.missing.append(self.fill(name, facts, **more))

    def lack_unmeasured(self, name: str, rows: Iterable[Mapping[str, Any]], **grid: Iterable[Any]) -> None:
        """Say which points of a grid of settings no row has."""
        measured = {tuple(row[key] for key in grid) for row in rows}
        for values in product(*grid.values()):
            if values not in measured:
                self.lack(name, dict(zip(grid, values, strict=True)))

    def say_failures(self, cells: Sequence[Cell], name: str | Callable[[Cell], str]) -> None:
        """One sentence for each status that is none of success: which cells, by the named sentence, and why."""
        name_of = name if callable(name) else lambda cell: name
        for status in ("oom", "unsupported", "timeout", "wrong", "error"):
            if failed := [cell for cell in cells if cell.status == status]:
                names = joined(dict.fromkeys(self.fill(name_of(cell), cell.configuration) for cell in failed))
                # "a training step" begins the sentence, the name of a size stays as it is.
                names = f"A{names[1:]}" if names.startswith("a ") else names
                reasons = dict.fromkeys(_short_reason(cell.reason) for cell in failed if cell.reason)
                self.say(status, names=names, reasons=f" ({'; '.join(reasons)})" if reasons else "")

    def derive(self, answers: Sequence[Derived], table: str, title: str, say: Iterable[Derived] = ()) -> None:
        """Derived values as sentences, some of those of a table."""
        self.sentences += map(derived_sentence, say)
        self.tables.append(answers_table(table, title, answers))

    def measured_by(self, groups: Iterable[Selection]) -> None:
        """Name the invocations that measured the cells, each once."""
        self.runs |= {run.run_id: run for group in groups for run in group.invocation.runs[-1:]}

    def show(self, groups: Sequence[Selection], table: str, *columns: str, medians: bool = False) -> None:
        """The command's own table, with these columns alone if any is given, and of samples with their medians."""
        shown = [
            _with_its_notes(selected, whole) for group in groups for selected, whole in group.tables(table, *columns)
        ]
        self.tables += map(of_medians, shown) if medians else shown
        self.measured_by(groups)

    def add_table(self, name: str, title: str, headers: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of the write-up's own, if it has a row; units follow from the ends of keys."""
        units = {key: next((unit for end, unit in _UNITS.items() if key.endswith(end)), None) for key in headers}
        if rows:
            self.tables.append(Table(name, title, [Column(key, headers[key], units[key]) for key in headers], rows))

    def draw(self, groups: Iterable[Selection], *names: str) -> None:
        """The pictures of all groups (of these names, if any is given), numbered where several have one of a name."""
        for group in groups:
            for name, draw in group.pictures(*names).items():
                number = 1 + sum(picture.split(",")[0] == name for picture in self.pictures)
                self.pictures[name if number == 1 else f"{name}, {number}"] = draw


def _with_its_notes(table: Table, whole: Table) -> Table:
    """A table without what notes say of columns that it has not (``hidden: ...; as it ran: ...``)."""
    headers = {column.header for column in table.columns}
    gone = {column.header.split(",")[0] for column in whole.columns if column.header not in headers}
    has_speedups = any(column.key.endswith("speedup") for column in table.columns)
    notes = [note for note in table.notes if has_speedups or not note.startswith("no speed-ups")]
    kept = ("; ".join(part for part in note.split("; ") if part.partition(":")[0] not in gone) for note in notes)
    return replace(table, notes=list(filter(None, kept)))


def of_medians(table: Table) -> Table:
    """A table with medians in place of means and standard deviations, as the sentences next to it have them."""

    def shown(value: Any) -> Any:
        return value.median if isinstance(value, Samples) and value.measured else value

    rows = [{name: shown(value) for name, value in row.items()} for row in table.rows]
    notes = [note.replace("mean ± standard deviation", "medians") for note in table.notes]
    return replace(table, rows=rows, notes=notes)


def _short_reason(reason: str) -> str:
    """A cell's reason, without what the verb before it says: ``at warm-up 1/5: tried to allocate 82.00 MiB``."""
    return reason.removeprefix("out of memory ").replace("CUDA out of memory. Tried", "tried").rstrip(".")


def extremes(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Mapping[str, Any]]:
    """The rows with the least and with the most."""
    return {"least": min(rows, key=itemgetter(key)), "most": max(rows, key=itemgetter(key))}


def compared(before: Cell, after: Cell, phases: Iterable[str]) -> dict[str, Any]:
    """Medians of two cells and how many times as fast the second is, by phase: facts, and a row's values."""
    row: dict[str, Any] = {}
    for phase in phases:
        first, second = before.samples[phase], after.samples[phase]
        speedup = ratio(first, second)
        row |= {f"{phase}_before_ms": first.median, f"{phase}_ms": second.median, f"{phase}_speedup": speedup.estimate}
        row[phase] = {"before": first.median, "after": second.median, "speedup": speedup.estimate}
        row[phase] |= {"low": speedup.low, "high": speedup.high}
    return row


def compared_headers(phases: Iterable[str], before: str, after: str) -> dict[str, str]:
    parts = {"_before_ms": before, "_ms": after, "_speedup": None}
    return {phase + key: "faster" if end is None else phase + end for phase in phases for key, end in parts.items()}
