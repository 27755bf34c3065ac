"""Every ratio, rate, difference and share in a sentence of the write-ups follows from the numbers printed next to it.

    python -m pytest -n0 -s tests/commands/report/test_recomputed.py

says how many were recomputed.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from course_answers import written

from cs336sys.commands.report.answer import Answer
from cs336sys.tables.numbers import format_value
from cs336sys.tables.table import Table

NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)"
TOKEN = re.compile(rf"(?<![\w.,-]){NUMBER}(?:x\b| %)")


@dataclass(frozen=True)
class Printed:
    """A number as it is printed: it may be off by half of its last digit."""

    value: float
    digit: float

    @classmethod
    def of(cls, text: str) -> "Printed":
        mantissa, _, exponent = text.replace(",", "").partition("e")
        decimals = len(mantissa.partition(".")[2])
        return cls(float(text.replace(",", "")), 10.0 ** (int(exponent or 0) - decimals))

    def ends(self) -> tuple[float, float]:
        return self.value - self.digit / 2, self.value + self.digit / 2


def agrees(result: str, operands: Sequence[str], formula: Callable[..., float]) -> bool:
    """Return whether the printed result is what the printed operands give, but for its last digit."""
    found = [formula(*corner) for corner in itertools.product(*(Printed.of(one).ends() for one in operands))]
    printed = Printed.of(result)
    return min(found) - printed.digit <= printed.value <= max(found) + printed.digit


def over(a: float, b: float) -> float:
    return a / b


def part(a: float, b: float) -> float:
    return 100 * a / b


# Sentences whose numbers stand in them: the pattern, the group that is computed (of several, each) and from which.
N = NUMBER
HIDDEN = rf"Of the {N} ms that communication adds to a step of naive, {N} ms, {N} %, are hidden"
SENTENCES: list[tuple[str, int, Sequence[int], Callable[..., float]]] = [
    (rf"softmax takes {N} ms, {N}x the {N} ms of", 2, (1, 3), over),
    (rf"{N}x the {N} ms of the two products, with {N}x their FLOPs: per FLOP {N}x", 4, (1, 3), over),
    (rf"{N} GiB in fp32 and {N} GiB in bf16 \(context \d+, {N}x\)", 3, (2, 1), over),
    (rf"allocated by {N} MiB where the forward pass added {N} MiB, so it produces {N} MiB", 3, (1, 2),
     lambda change, growth: change + growth),
    (rf"{N} GiB at context 8192 and {N} GiB at context 16384: [^.]*?it grows {N}x", 3, (2, 1), over),
    (rf"a step takes {N} ms \(median[^)]*\), of which {N} ms, {N} %", 3, (2, 1), part),
    (rf"\(median {N} ms a step\), [a-z0-9 MB]+ \(median {N} ms\) is {N}x as fast", 3, (1, 2), over),
    (rf"\(median {N} ms a step\), [a-z0-9 MB]+ \(median {N} ms\) is {N}x slower", 3, (2, 1), over),
    (HIDDEN, 3, (2, 1), part),
    (rf"backward pass of {N} ms covers gradients that need {N} ms .*? A link that is {N}x slower", 3, (1, 2), over),
]  # fmt: skip


@dataclass
class Checked:
    """What was recomputed, what disagrees, and where the ratios and shares stand that were."""

    count: int = 0
    wrong: list[str] = field(default_factory=list)
    spans: set[tuple[int, int]] = field(default_factory=set)

    def add(self, where: str, span: tuple[int, int], result: str, operands: Sequence[str], formula) -> None:
        self.count += 1
        self.spans.add(span)
        if not agrees(result, operands, formula):
            self.wrong.append(f"{where}: {result} of {', '.join(operands)}")


def check_sentences(where: str, text: str, checked: Checked) -> None:
    for pattern, result, operands, formula in SENTENCES:
        for match in re.finditer(pattern, text):
            values = [match.group(one) for one in operands]
            checked.add(where, match.span(result), match.group(result), values, formula)


def numbers(pattern: str, text: str) -> list[re.Match]:
    return list(re.finditer(pattern, text))


def check_lists(where: str, text: str, checked: Checked) -> None:
    """Ratios of lists: their ends, or one for each."""
    for match in numbers(rf"a step takes {N} ms without sharding, (.*?) \(medians\)", text):
        for sharded in numbers(rf"{N} ms with `[a-z-]+` \({N}x as fast\)", match[2]):
            span = tuple(match.start(2) + end for end in sharded.span(2))
            checked.add(where, span, sharded[2], (match[1], sharded[1]), over)
    for match in numbers(rf"the peak is ([^:]*), up to {N} % apart", text):
        pairs = [number.groups() for number in numbers(rf"{N} GiB in fp32 and {N} GiB in bf16", match[1])]
        furthest = max(pairs, key=lambda pair: abs(over(*(Printed.of(number).value for number in pair)) - 1))
        checked.add(where, match.span(2), match[2], furthest, lambda full, half: 100 * abs(half / full - 1))
    together = re.search(rf"Forward and backward together take {N} ms", text)
    if together:
        for one in numbers(rf"[a-z0-9-]+ {N} ms \({N}x\)", text):
            checked.add(where, one.span(2), one[2], (one[1], together[1]), over)
    board = re.search(rf"8B model takes {N} ms .*?; {N}x the speed of .*? of {N} s", text)
    if board:
        checked.add(where, board.span(2), board[2], (board[3], board[1]), lambda s, ms: 1e3 * s / ms)


def cells(table: Table) -> Iterator[dict[str, str]]:
    """The rows as they are printed, by key."""
    for row in table.rows:
        shown = {column.key: format_value(row.get(column.key), column.unit) for column in table.columns}
        yield {
            key: re.sub(r"(?<=\d)x(?: \(.*\))?$", "", text).split(" ± ")[0].lstrip("<! ") for key, text in shown.items()
        }


def of_tables(block: Answer, name: str) -> list[dict[str, str]]:
    """The printed rows of the tables of this name."""
    return [row for table in block.tables if table.name == name for row in cells(table)]


def check_tables(where: str, block: Answer, checked: Checked) -> None:
    """Ratios, differences and rates of tables, of the times in their row."""

    def add(result: str, operands: Sequence[str], formula) -> None:
        if "-" not in (result, *operands):
            checked.count += 1
            if not agrees(result, operands, formula):
                checked.wrong.append(f"{where}, table: {result} of {', '.join(operands)}")

    for table in block.tables:
        keys = [column.key for column in table.columns]
        for row in cells(table):
            for key in keys:
                phase = key.removesuffix("_speedup")
                if f"{phase}_before_ms" in row and key.endswith("_speedup"):
                    after = row.get(f"{phase}_ms", "-")
                    if re.fullmatch(NUMBER, row[key]):
                        add(row[key], (row[f"{phase}_before_ms"], after), over)
            if {"size_bytes", "time_us", "algbw_gbps"} <= row.keys():
                size = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
                amount, unit = row["size_bytes"].split()
                add(row["algbw_gbps"], (amount, row["time_us"]), lambda a, us, unit=size[unit]: a * unit / us / 1e3)
            if {"exposed_ms", "step_ms", "unsynchronized_ms"} <= row.keys() and table.name == "ddp":
                add(row["exposed_ms"], (row["step_ms"], row["unsynchronized_ms"]), lambda a, b: a - b)
            if {"time_ratio", "softmax_ms", "scores_ms", "final_ms"} <= row.keys():
                operands = row["softmax_ms"], row["scores_ms"], row["final_ms"]
                add(row["time_ratio"], operands, lambda softmax, a, b: softmax / (a + b))


def check_with_tables(where: str, text: str, block: Answer, checked: Checked) -> None:
    """Sentences whose numbers stand in the table below them."""
    rows = [row for table in block.tables if table.name == "phases" for row in cells(table)]
    forward = [row for row in rows if row.get("phase") == "forward" and row.get("unprofiled_ms", "-") != "-"]
    far = re.search(rf"take between {N}x and {N}x as long under it, .*? between {N} % and {N} % of that", text)
    for groups, keys, formula in ((1, 2), ("span_ms", "unprofiled_ms"), over), ((3, 4), ("busy_ms", "span_ms"), part):
        for group in groups if far else ():
            operands = [tuple(row[key] for key in keys) for row in forward]
            same = [pair for pair in operands if agrees(far[group], pair, formula)]
            checked.add(where, far.span(group), far[group], (same or operands)[0], formula)
    for match in numbers(rf"(\w[\w.]*)(?: \([^)]*\))? at context (\d+) \({N} %\)", text):
        row = next(row for row in forward if (row["size"], row["context"].replace(",", "")) == match.groups()[:2])
        checked.add(
            where, match.span(3), match[3], (row["busy_ms"], row["unprofiled_ms"]), lambda a, b: 100 * (1 - a / b)
        )
    sweep: dict[tuple, list[str]] = {}
    for row in of_tables(block, "allreduce"):
        sweep.setdefault((row.get("backend"), row.get("world_size")), []).append(row["time_us"])
    for match in numbers(rf"NCCL for the smallest and {N}x for the largest message on (\d+)", text):
        operands = [sweep[backend, match[2]][-1] for backend in ("gloo", "nccl")]
        checked.add(where, match.span(1), match[1], operands, over)
    for match in numbers(
        rf"takes {N}x as long as NCCL for the smallest and \S+ for the largest message on (\d+)", text
    ):
        operands = [sweep[backend, match[2]][0] for backend in ("gloo", "nccl")]
        checked.add(where, match.span(1), match[1], operands, over)
    steps = {row["bucket_mb"]: row["step_ms"] for row in of_tables(block, "ddp") if "bucket_mb" in row}
    for match in numbers(rf"Here ([\d.]+) MB are fastest, and the slowest, ([\d.]+) MB, take {N}x", text):
        checked.add(where, match.span(3), match[3], (steps[match[2]], steps[match[1]]), over)
    # Memory at the peak, and what is saved of it, a table for each precision.
    tables = [[row for row in cells(table) if row.get("moment") == "peak"] for table in block.tables]
    peaks = [{row["strategy"]: row["total_gib"] for row in rows} for rows in tables if rows]
    for match, peak in zip(numbers(rf"`optimizer` saves {N} GiB of the peak", text), peaks, strict=False):
        checked.add(where, match.span(1), match[1], (peak["none"], peak["optimizer"]), lambda a, b: a - b)
    for match in numbers(rf"{N} GiB against `([a-z]+)` \({N} % of the {N} GiB", text):
        operands = (peaks[0][match[2]], peaks[0]["fsdp"])
        checked.add(where, match.span(1), match[1], operands, lambda a, b: a - b)
        checked.add(where, match.span(3), match[3], (match[1], match[4]), part)
    # Where it is faster, and between which speed-ups: those of two rows.
    for sentence in [sentence for sentence in block.sentences if "is faster beyond the noise" in sentence]:
        setting, value = sentence.replace(",", "").split()[1:3]
        rows = [row for table in block.tables for row in cells(table) if row.get(setting) == value]
        for match in numbers(rf"(\w+(?: \w+)*) is faster beyond [^()]* rows \((?:between {N}x and )?{N}x as", sentence):
            phase = match[1].removeprefix("and ").replace(" ", "_")
            phase = phase if f"{phase}_ms" in rows[0] else phase.rpartition("_")[2]
            pairs = [(row[f"{phase}_before_ms"], row[f"{phase}_ms"]) for row in rows if f"{phase}_ms" in row]
            for group in [group for group in (2, 3) if match[group]]:
                start = text.index(sentence)
                span = (start + match.start(group), start + match.end(group))
                same = [pair for pair in pairs if agrees(match[group], pair, over)]
                checked.add(where, span, match[group], (same or pairs)[0], over)
    hidden = re.search(HIDDEN, text)
    exposed = {row["strategy"]: row["exposed_ms"] for row in of_tables(block, "ddp")}
    if hidden:
        checked.add(where, hidden.span(2), hidden[2], (exposed["naive"], exposed["overlap"]), lambda a, b: a - b)


# Ratios and shares that are read from a profile, a plan or a formula, and follow from no number that is printed.
READ = [
    r"of the kernels of a forward pass", r"% in \d+ calls", r"%, \d+ calls?\)", r"of the kernel time",
    r"elementwise kernels", r"in the whole step", r"agrees within",
    r"the mean step", r"computing ran next to it", r"Over the sizes the gain",
    r"first measured step takes", r"no kernel runs in", r"in the backward pass", r"five largest tensors",
    r"way that the parameter went", r"where the context grows", r"warm-up steps that step takes",
    r"as long\.", r"take [\d.]+x as long", r"x the (?:error|speed\))", r"\d+ %\), and in", r"calls\)\.",
    r"told apart at 5 %",
]  # fmt: skip


@pytest.mark.parametrize("year", [2025, 2026])
def test_every_ratio_rate_difference_and_share_is_that_of_the_numbers_next_to_it(year):
    count, wrong, not_recomputed = 0, [], []
    for problem, sections in written(year).problems:
        for section in sections:
            for block in section.answers:
                where, text = f"{problem.name} ({section.letter})", " ".join(block.sentences)
                checked = Checked()
                for check in (check_sentences, check_lists):
                    check(where, text, checked)
                check_with_tables(where, text, block, checked)
                check_tables(where, block, checked)
                count, wrong = count + checked.count, wrong + checked.wrong
                for token in TOKEN.finditer(text):
                    if re.search(r"(stays within|fast within|at most|more than) $", text[: token.start()]):
                        # A bound that a comparison has, not a result.
                        continue
                    around = text[max(0, token.start() - 220) : token.end() + 60]
                    if token.span(1) not in checked.spans and not any(re.search(one, around) for one in READ):
                        not_recomputed.append(f"{where}: ...{around}...")
    print(f"\n{year}: {count} recomputed")
    assert wrong == []
    assert not_recomputed == []
    assert count > {2025: 400, 2026: 370}[year]


def test_the_check_sees_what_it_is_for():
    """The sentences that were wrong."""
    for text in (
        "With naive a step takes 422.4 ms (median; standard deviation 22.85 ms), of which 46.10 ms, 10.7 %, pass",
        "Against naive (median 422.4 ms a step), overlapping (median 399.3 ms) is 1.08x as fast",
    ):
        checked = Checked()
        check_sentences("", text, checked)
        assert (checked.count > 0, checked.wrong != []) == (True, True), text
    assert agrees("2.13", ("4.26", "2.00"), over)
    assert not agrees("2.16", ("4.26", "2.00"), over)
