"""Parts of tables: which, which columns, which order."""

import math
from dataclasses import replace

import pytest

from cs336sys.accounting.derivation import Derived
from cs336sys.errors import UsageError
from cs336sys.results.model import Samples
from cs336sys.results.statistics import Interval
from cs336sys.tables.answers import answers_table
from cs336sys.tables.table import Column, Table, select_columns, select_in_groups


def samples(*values):
    return Samples("ms", "cpu clock", values)


TIMES = Table(
    "times",
    "Times",
    [Column("size", "size"), Column("step_ms", "step", "ms"), Column("error", "error")],
    [
        {"size": "a", "step_ms": samples(3.0, 5.0), "error": "1.0e-05"},
        {"size": "b", "step_ms": samples(), "error": "2.0e-06"},
        {"size": "c", "step_ms": samples(1.0), "error": None},
        {"size": "d", "step_ms": 11.0, "error": "none"},
    ],
)
RATIOS = Table(
    "ratios",
    "Ratios",
    [Column("size", "size"), Column("ratio", "ratio", "ratio")],
    [{"size": name, "ratio": value} for name, value in (("a", Interval(2.0, 1.0, 3.0)), ("b", math.nan), ("c", 1.5))],
)


def sort_rows(tables, order):
    return select_in_groups([tables], order=order)[0]


def order(tables):
    return ["".join(row["size"] for row in table.rows) for table in tables]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("step_ms", ["cadb", "abc"]),
        ("-step_ms", ["dacb", "abc"]),
        ("error", ["badc", "abc"]),
        ("-ratio", ["abcd", "acb"]),
        ("ratio", ["abcd", "cab"]),
        ("-size", ["dcba", "cba"]),
    ],
)
def test_rows_are_sorted_where_the_column_is_and_those_without_a_value_come_last(column, expected):
    assert order(sort_rows([TIMES, RATIOS], column)) == expected


@pytest.mark.parametrize(
    ("column", "expected"), [("value", ["5 MB", "3 GB", "2 ms", "1 s"]), ("-value", ["3 GB", "5 MB", "1 s", "2 ms"])]
)
def test_values_with_units_of_their_own_are_sorted_by_what_they_are(column, expected):
    answers = [
        Derived("3 GB", 3 * 2**30, "bytes"),
        Derived("2 ms", 2e-3, "s"),
        Derived("1 s", 1.0, "s"),
        Derived("5 MB", 5e6, "decimal_bytes"),
    ]
    (table,) = sort_rows([answers_table("some", "some", answers)], column)
    assert [row["quantity"] for row in table.rows] == expected


def test_columns_come_in_the_order_asked_for_and_tables_without_any_are_left_out():
    (times,) = select_columns([TIMES, RATIOS], ["error", "step_ms"])
    assert [column.key for column in times.columns] == ["error", "step_ms"]
    assert len(select_columns([TIMES, RATIOS], ["size"])) == 2


def test_columns_are_named_by_key_or_by_what_people_see():
    ddp = Table("ddp", "", [Column("strategy", "mode"), Column("mode", "what runs")], [])
    chosen = [table.columns for table in select_columns([ddp, TIMES], ["mode", "STEP", "step_ms", "What runs"])]
    assert chosen == [[ddp.columns[1]], [TIMES.columns[1]]], "the key goes before the header, and no column comes twice"
    assert select_columns([replace(ddp, columns=ddp.columns[:1])], ["mode"])[0].columns == [ddp.columns[0]]
    assert order(sort_rows([TIMES], "-Step")) == ["dacb"]


def test_tables_are_chosen_by_name():
    assert select_in_groups([[TIMES, RATIOS]], ["ratios"])[0] == [RATIOS]


@pytest.mark.parametrize(
    ("select", "sentence"),
    [
        (lambda: select_in_groups([[TIMES]], ["time"]), "--table 'time': choose from times; did you mean times?"),
        (
            lambda: select_in_groups([[TIMES, RATIOS]], keys=["x"]),
            "--columns 'x': choose from size, step_ms, error, ratio",
        ),
        (lambda: sort_rows([RATIOS], "-x"), "--sort 'x': choose from size, ratio"),
    ],
)
def test_column_of_no_table_is_refused(select, sentence):
    with pytest.raises(UsageError) as refused:
        select()
    assert str(refused.value) == sentence


def test_groups_stay_apart_and_what_one_lacks_another_may_have():
    groups = select_in_groups([[TIMES], [RATIOS, TIMES]], ["times"], ["size"], "-step_ms")
    assert [order(group) for group in groups] == [["dacb"], ["dacb"]]
    assert [[column.key for column in table.columns] for group in groups for table in group] == [["size"]] * 2
    assert select_in_groups([[TIMES], [RATIOS]], keys=["ratio"])[0] == []
    with pytest.raises(UsageError, match="--table 'ratios': choose from times"):
        select_in_groups([[TIMES], []], ["ratios"])


def test_notes_lose_what_they_say_of_columns_that_were_not_chosen():
    notes = ["step: the median; error: against float64", "error: against float64", "no speed-ups: eager was not timed"]
    (chosen,) = select_columns([replace(TIMES, notes=notes)], ["size", "step_ms"])
    assert chosen.notes == ["step: the median"]
    faster = replace(RATIOS, columns=[*RATIOS.columns, Column("speedup", "over eager", "ratio")], notes=notes)
    (chosen,) = select_columns([faster], ["size", "speedup"])
    assert notes[2] in chosen.notes
