"""Ratios, rates, differences and shares of the write-ups follow from the numbers that are printed next to them."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

import pytest
from course_answers import written

from cs336sys.tables.numbers import format_value
from cs336sys.tables.table import Table


def ends(text: str) -> tuple[float, float]:
    """What a printed number may have been: it may be off by half of its last digit."""
    half = last_digit(text) / 2
    return float(text.replace(",", "")) - half, float(text.replace(",", "")) + half


def last_digit(text: str) -> float:
    mantissa, _, exponent = text.replace(",", "").partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def agrees(result: str, operands: Sequence[str], formula: Callable[..., float]) -> bool:
    """Return whether the printed result is what the printed operands give, but for its last digit."""
    possible = [formula(*corner) for corner in itertools.product(*map(ends, operands))]
    return min(possible) - last_digit(result) <= float(result.replace(",", "")) <= max(possible) + last_digit(result)


def over(a: float, b: float) -> float:
    return a / b


def part(a: float, b: float) -> float:
    return 100 * a / b


# Sentences whose numbers stand in them: the pattern, the group that is computed and from which.
N = r"(-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)"
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
    (rf"Of the {N} ms that communication adds to a step of naive, {N} ms, {N} %, are hidden", 3, (2, 1), part),
    (rf"backward pass of {N} ms covers gradients that need {N} ms .*? A link that is {N}x slower", 3, (1, 2), over),
]  # fmt: skip


def in_sentences(text: str) -> Iterator[tuple]:
    """Printed results, each with its operands and its formula."""
    for pattern, result, operands, formula in SENTENCES:
        for match in re.finditer(pattern, text):
            yield match[result], [match[group] for group in operands], formula


def in_table(table: Table) -> Iterator[tuple]:
    for values in table.rows:
        shown = {column.key: format_value(values.get(column.key), column.unit) for column in table.columns}
        row = {
            key: re.sub(r"(?<=\d)x(?: \(.*\))?$", "", text).split(" ± ")[0].lstrip("<! ") for key, text in shown.items()
        }
        for phase in [key.removesuffix("_speedup") for key in row if key.endswith("_speedup")]:
            if f"{phase}_before_ms" in row and re.fullmatch(N, row[f"{phase}_speedup"]):
                yield row[f"{phase}_speedup"], [row[f"{phase}_before_ms"], row.get(f"{phase}_ms", "-")], over
        if {"size_bytes", "time_us", "algbw_gbps"} <= row.keys():
            amount, unit = row["size_bytes"].split()
            size = {"KB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
            yield row["algbw_gbps"], [amount, row["time_us"]], lambda a, us, size=size: a * size / us / 1e3
        if {"exposed_ms", "step_ms", "unsynchronized_ms"} <= row.keys() and table.name == "ddp":
            yield row["exposed_ms"], [row["step_ms"], row["unsynchronized_ms"]], lambda a, b: a - b
        if {"time_ratio", "softmax_ms", "scores_ms", "final_ms"} <= row.keys():
            yield (
                row["time_ratio"],
                [row[f"{name}_ms"] for name in ("softmax", "scores", "final")],
                lambda s, a, b: s / (a + b),
            )


@pytest.mark.parametrize("year", [2025, 2026])
def test_results_in_sentences_and_tables_are_those_of_the_numbers_next_to_them(year):
    sections = [section for _, of_problem in written(year).problems for section in of_problem]
    blocks = [block for section in sections for block in section.answers]
    computed = [result for block in blocks for result in in_sentences(" ".join(block.sentences))]
    computed += [result for block in blocks for table in block.tables for result in in_table(table)]
    computed = [(result, operands, formula) for result, operands, formula in computed if "-" not in (result, *operands)]
    assert [(result, operands) for result, operands, formula in computed if not agrees(result, operands, formula)] == []
    assert len(computed) > {2025: 350, 2026: 320}[year]


def test_the_check_sees_what_it_is_for():
    """The sentences that were wrong."""
    for text in (
        "With naive a step takes 422.4 ms (median; standard deviation 22.85 ms), of which 46.10 ms, 10.7 %, pass",
        "Against naive (median 422.4 ms a step), overlapping (median 399.3 ms) is 1.08x as fast",
    ):
        assert [agrees(*computed) for computed in in_sentences(text)] == [False], text
    assert agrees("2.13", ("4.26", "2.00"), over)
    assert not agrees("2.16", ("4.26", "2.00"), over)
