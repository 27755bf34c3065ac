"""Tables in files, in pipes and on terminals, and parts of them; what they look like is in ``figures.txt``."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_tables_figures import EMPTY, HOSTILE, HOSTILE_TEXT, RATIOS, SWEEP, TIMES, ms, order

from cs336sys.errors import OutputError, UsageError
from cs336sys.results.statistics import Interval
from cs336sys.tables.outputs import FORMATS, read_output
from cs336sys.tables.render import check_output, emit, render
from cs336sys.tables.table import Column, Table, grid_of, select_columns, select_in_groups


def test_json_holds_unrounded_numbers_and_every_column():
    document = json.loads(render([SWEEP, EMPTY], "json"))
    assert document["schema_version"] == 1
    bench, empty = document["tables"]
    assert (bench["name"], bench["title"]) == ("bench", "bench: H200, torch 2.11")
    assert bench["notes"] == ["mean ± standard deviation of 3 steps"]
    assert bench["rows"] == [
        {
            "size": "small",
            "parameters": 128_625_408,
            "forward_ms_mean": pytest.approx(12.3),
            "forward_ms_std": pytest.approx(math.sqrt(0.13)),
            "forward_ms_median": 12.2,
            "tokens_per_s": 165432.1,
            "mfu_percent": None,
            "launch_bound": True,
            "status": "ok",
        },
        dict.fromkeys(bench["rows"][0]) | {"size": "2.7b", "parameters": 3_406_809_600, "status": "oom"},
    ]
    assert empty == {"name": "empty", "title": "nothing measured", "rows": [], "notes": []}


def test_programs_get_no_nan_and_a_number_among_samples_under_the_mean():
    rows = [{"a": math.nan, "c_ms": ms(math.nan)}, {"a": -math.inf, "c_ms": 2.5}]
    table = Table("t", "t", (Column("a", "a"), Column("c_ms", "c", "ms")), rows)
    assert json.loads(render([table], "json"))["tables"][0]["rows"] == [
        {"a": None, "c_ms_mean": None, "c_ms_std": 0.0, "c_ms_median": None},
        {"a": None, "c_ms_mean": 2.5, "c_ms_std": None, "c_ms_median": None},
    ]


def test_csv():
    header, small, big = csv.reader(io.StringIO(render([SWEEP], "csv")))
    assert ",".join(header) == (
        "table,size,parameters,forward_ms_mean,forward_ms_std,forward_ms_median,tokens_per_s,mfu_percent,"
        "launch_bound,status"
    )
    assert list(map(float, small[3:6])) == pytest.approx([12.3, math.sqrt(0.13), 12.2])
    assert small[:3] + small[6:] == ["bench", "small", "128625408", "165432.1", "", "true", "ok"]
    assert big == ["bench", "2.7b", "3406809600", "", "", "", "", "", "", "oom"]
    assert list(csv.reader(io.StringIO(render([HOSTILE], "csv")))) == [["table", "text"], ["hostile", HOSTILE_TEXT]]


def test_csv_has_one_header_and_the_rows_of_all_tables_of_the_first_name():
    percentile = replace(SWEEP, title="another", columns=(*SWEEP.columns, Column("step_ms_p90", "step p90", "ms")))
    rows = list(csv.DictReader(io.StringIO(render([SWEEP, EMPTY, percentile], "csv"))))
    assert [row["table"] for row in rows] == [SWEEP.name] * 4
    assert [row["size"] for row in rows] == ["small", "2.7b"] * 2
    assert list(rows[0])[-1] == "step_ms_p90"


def test_programs_get_settings_origin_and_columns_that_people_do_not():
    columns = (Column("step_ms", "step", "ms", spread="samples"), Column("wall_ms", "wall", "ms"))
    more = {"settings": [Column("size", "size"), Column("seed", "seed")], "origin": [Column("run_id", "run")]}
    rows = [{"size": "tiny", "seed": 0, "wall_ms": 2.0, "run_id": "a"}]
    table = Table("t", "t", columns, rows, hidden=["wall_ms"], **more)
    header = "table,size,seed,step_ms_mean,step_ms_std,step_ms_median,wall_ms,run_id"
    assert render([table], "csv") == f"{header}\nt,tiny,0,,,,2.0,a\n"
    assert grid_of(replace(table, rows=[{**rows[0], "step_ms": ms(1.0)}])).headers == ["step, ms"]
    (chosen,) = select_columns([table], ["seed", "wall"])
    assert render([chosen], "csv") == "table,seed,wall_ms\nt,0,2.0\n"
    assert select_in_groups([[table]], order="-seed")[0][0].rows == rows


def test_a_folder_gets_a_file_for_each_name_of_tables(tmp_path):
    check_output(read_output(f"{tmp_path}/new/"))
    emit([SWEEP, EMPTY], output=read_output(f"{tmp_path}/new/"))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {f"{SWEEP.name}.csv", f"{EMPTY.name}.csv"}
    assert (tmp_path / "new" / f"{SWEEP.name}.csv").read_text() == render([SWEEP], "csv")
    emit([SWEEP], format="markdown", output=tmp_path)
    assert (tmp_path / f"{SWEEP.name}.md").read_text() == render([SWEEP], "markdown")


def test_line_breaks_do_not_break_a_row():
    table = Table("t", "t", (Column("reason", "reason"),), [{"reason": "first\nsecond"}], notes=("third\nfourth",))
    for format in ("table", "markdown", "latex", "typst"):
        text = render([table], format)
        assert "first second" in text
        assert "third fourth" in text


def as_terminal(monkeypatch):
    """Let standard output say that it is a terminal; no fixture, for pytest sets another before the test."""
    stream = type("Terminal", (io.StringIO,), {"encoding": "utf-8", "isatty": lambda self: True})()
    monkeypatch.setattr("sys.stdout", stream)
    return stream


def test_emit_draws_on_a_terminal_as_wide_as_columns_says(monkeypatch):
    terminal = as_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    emit([SWEEP])
    plain = re.sub(r"\x1b\[\d*m", "", terminal.getvalue())
    assert "size   parameters   forward, ms  tokens/s  launch-bound  status" in plain
    monkeypatch.setenv("COLUMNS", "40")
    emit([SWEEP], format="table")
    assert "forward, ms   12.30 ± 0.36       -" in terminal.getvalue()


def test_emit_without_unicode_still_prints_the_numbers(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    emit([SWEEP], format="markdown")
    stream.flush()
    assert b"| small  |      128.6 M |  12.30 ? 0.36 |" in stream.buffer.getvalue()


def test_check_output_finds_what_cannot_be_written_and_changes_nothing(tmp_path):
    existing = tmp_path / "report.md"
    existing.write_text("yesterday's numbers")
    check_output(existing, "markdown")
    check_output(None)
    assert existing.read_text() == "yesterday's numbers"

    with pytest.raises(UsageError, match=r"^cannot write --output .*report.md: there is no folder .*new; make it, or"):
        check_output(tmp_path / "new" / "report.md")
    assert not (tmp_path / "new").exists()

    with pytest.raises(UsageError, match=r"^cannot write --output .*report.md/x: "):
        check_output(existing / "x")
    with pytest.raises(UsageError, match=f"unknown format 'pdf': choose from {', '.join(FORMATS)}$"):
        check_output(existing, "pdf")


def test_table_is_printed_where_the_output_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"^cannot write --output .*: Not a directory$"):
        emit([SWEEP], output=tmp_path / "file" / "table")
    assert capsys.readouterr().out == render([SWEEP], "markdown")


@pytest.mark.parametrize(
    ("name", "asked", "format"),
    [
        ("x.json", None, "json"),
        ("x.CSV", None, "csv"),
        ("x.tex", None, "latex"),
        ("x.typ", None, "typst"),
        ("x.txt", None, "table"),
        ("x.md", None, "markdown"),
        ("results", None, "markdown"),
        ("x.json", "csv", "csv"),
        ("-", None, "markdown"),
        (None, "table", "table"),
    ],
)
def test_format_follows_the_name_of_the_file_unless_said(tmp_path, monkeypatch, capsys, name, asked, format):
    monkeypatch.chdir(tmp_path)
    # A pipe and a file are as wide as it takes.
    monkeypatch.setenv("COLUMNS", "20")
    check_output(name and Path(name))
    emit([SWEEP], format=asked, output=name and Path(name))
    printed, files = capsys.readouterr().out, [path.read_text() for path in tmp_path.iterdir()]
    assert [printed, *files] == ([render([SWEEP], format)] if name in ("-", None) else ["", render([SWEEP], format)])


def test_memory_of_tiny_models_is_shown_in_mib_and_kept_in_gib():
    def memory(*peaks_gib):
        columns = (Column("peak_gib", "peak", "gib"), Column("step_gib", "step", "gib"))
        return Table("m", "m", columns, [{"peak_gib": peak, "step_gib": ms(peak, peak)} for peak in peaks_gib])

    shown = render([memory(0.046875, 0.015625)], "markdown").splitlines()
    assert shown[2].split() == ["|", "peak,", "MiB", "|", "step,", "MiB", "|"]
    assert shown[4].split() == ["|", "48.00", "|", "48.00", "±", "0.00", "|"]
    assert shown[5].split() == ["|", "16.00", "|", "16.00", "±", "0.00", "|"]
    assert "peak, GiB" in render([memory(0.046875, 1.5)], "markdown")
    assert "peak, GiB" in render([memory(0.0)], "markdown")
    assert render([memory(0.046875)], "csv").splitlines()[1] == "m,0.046875,0.046875,0.0,0.046875"


def test_a_column_of_zeros_takes_the_unit_of_its_neighbours_and_gaps_leave_that_of_the_rest():
    def header(*rows):
        columns = (Column("peak_gib", "peak", "gib"), Column("state_gib", "state", "gib"))
        named = [dict(zip(("peak_gib", "state_gib"), row, strict=True)) for row in rows]
        return re.findall(r"(\w+), (\w+)", render([Table("m", "m", columns, named)], "markdown").splitlines()[2])

    assert header((0.046875, 0.0), (0.03125, 0)) == [("peak", "MiB"), ("state", "MiB")]
    assert header((12.5, 0.0)) == [("peak", "GiB"), ("state", "GiB")]
    # The largest of a column counts, whatever else stands in it.
    assert header((0.046875, "oom"), (0.0, 0.015625)) == [("peak", "MiB"), ("state", "MiB")]
    assert header((0.046875, 0.0), (1.5, 0.0)) == [("peak", "GiB"), ("state", "GiB")]


NOISY = Table(
    "t",
    "T",
    (Column("step_ms", "step", "ms"), Column("over", "over", "ratio")),
    [{"step_ms": ms(1.0, 3.0), "over": Interval(1.1, 0.5, 2.0, 1.0, to_decide=40)}, {"over": 1.0}],
    steadier="more --steps",
)


def test_marks_are_explained_with_what_to_do():
    for format in ("table", "markdown", "latex", "typst", "json"):
        text = render([NOISY], format)
        assert text.count("steadier: more --steps, and nothing else running") in (1, 2), format
        assert "about 40 samples of each would decide all ratios" in text
    quiet = Table("t", "T", NOISY.columns, [{"step_ms": ms(1.0, 1.1), "over": 1.5}], steadier="more --steps")
    assert "noise" not in render([quiet], "markdown")


def test_programs_get_the_interval():
    (row, other) = json.loads(render([NOISY], "json"))["tables"][0]["rows"]
    assert (row["over"], row["over_low"], row["over_high"]) == (1.1, 0.5, 2.0)
    assert (other["over"], other["over_low"]) == (1.0, None)
    assert (
        render([NOISY], "csv").splitlines()[0]
        == "table,step_ms_mean,step_ms_std,step_ms_median,over,over_low,over_high"
    )


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
