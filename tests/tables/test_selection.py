"""Parts of tables: which, which columns, which order."""

import math
from dataclasses import replace

import pytest

from cs336sys.errors import UsageError
from cs336sys.results.model import Samples
from cs336sys.results.statistics import Interval
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


def order(tables):
    return ["".join(row["size"] for row in table.rows) for table in tables]


def test_columns_come_in_the_order_asked_for_and_tables_without_any_are_left_out():
    (times,) = select_columns([TIMES, RATIOS], ["error", "step_ms"])
    assert [column.key for column in times.columns] == ["error", "step_ms"]
    assert len(select_columns([TIMES, RATIOS], ["size"])) == 2


def test_columns_are_named_by_key_or_by_what_people_see():
    ddp = Table("ddp", "", [Column("strategy", "mode"), Column("mode", "what runs")], [])
    chosen = [table.columns for table in select_columns([ddp, TIMES], ["mode", "STEP", "step_ms", "What runs"])]
    assert chosen == [[ddp.columns[1]], [TIMES.columns[1]]], "the key goes before the header, and no column comes twice"
    assert select_columns([replace(ddp, columns=ddp.columns[:1])], ["mode"])[0].columns == [ddp.columns[0]]
    assert order(select_in_groups([[TIMES]], order="-Step")[0]) == ["dacb"]


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
