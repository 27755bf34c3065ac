import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cs336sys.errors import OutputError, UsageError
from cs336sys.results.model import Samples
from cs336sys.tables.outputs import FORMATS, read_output
from cs336sys.tables.render import check_output, emit, render
from cs336sys.tables.table import Column, Table, grid_of, select_columns, select_in_groups
from cs336sys.tables.terminal import print_tables


def ms(*measured):
    return Samples("ms", "cuda events", measured)


SWEEP = Table(
    "bench",
    "bench: H200, torch 2.11",
    (
        Column("size", "size"),
        Column("parameters", "parameters", "parameters"),
        Column("forward_ms", "forward", "ms"),
        Column("tokens_per_s", "tokens/s", "tokens_per_s"),
        Column("mfu_percent", "MFU", "percent"),
        Column("launch_bound", "launch-bound"),
        Column("status", "status"),
    ),
    [
        {
            "size": "small",
            "parameters": 128_625_408,
            "forward_ms": ms(12.0, 12.2, 12.7),
            "tokens_per_s": 165432.1,
            "mfu_percent": None,
            "launch_bound": True,
            "status": "ok",
            "seed": 3,
        },
        {"size": "2.7b", "parameters": 3_406_809_600, "forward_ms": None, "status": "oom"},
    ],
    notes=("mean ± standard deviation of 3 steps",),
)

# Everything that one of the formats could take for its own syntax.
HOSTILE_TEXT = 'a|b <c> [d] *e* `f` _g_ h_i #j $k & 50% {l} ~m ^n \\o "p"'
HOSTILE = Table("hostile", HOSTILE_TEXT, (Column("text", HOSTILE_TEXT),), [{"text": HOSTILE_TEXT}], (HOSTILE_TEXT,))

EMPTY = Table("empty", "nothing measured", (Column("size", "size"), Column("step_ms", "step", "ms")), [])


def test_markdown():
    assert render([SWEEP, EMPTY], "markdown") == (
        "### bench: H200, torch 2.11\n"
        "\n"
        "| size   |   parameters |   forward, ms |   tokens/s | launch-bound   | status   |\n"
        "|:-------|-------------:|--------------:|-----------:|:---------------|:---------|\n"
        "| small  |      128.6 M |  12.30 ± 0.36 |    165,432 | yes            | ok       |\n"
        "| 2.7b   |       3.41 B |             - |          - | -              | oom      |\n"
        "\n"
        "- mean ± standard deviation of 3 steps\n"
        "\n"
        "### nothing measured\n"
        "\n"
        "| size   | step, ms   |\n"
        "|--------|------------|\n"
    )


def test_text_table():
    assert render([SWEEP], "table") == (
        "bench: H200, torch 2.11\n"
        "╭────────┬──────────────┬───────────────┬────────────┬────────────────┬──────────╮\n"
        "│ size   │   parameters │   forward, ms │   tokens/s │ launch-bound   │ status   │\n"
        "├────────┼──────────────┼───────────────┼────────────┼────────────────┼──────────┤\n"
        "│ small  │      128.6 M │  12.30 ± 0.36 │    165,432 │ yes            │ ok       │\n"
        "│ 2.7b   │       3.41 B │             - │          - │ -              │ oom      │\n"
        "╰────────┴──────────────┴───────────────┴────────────┴────────────────┴──────────╯\n"
        "mean ± standard deviation of 3 steps\n"
    )


def test_latex():
    assert render([SWEEP], "latex") == (
        "\\begin{table}\n"
        "\\centering\n"
        "\\caption{bench: H200, torch 2.11}\n"
        "\\begin{tabular}{lrrrll}\n"
        "\\toprule\n"
        " size   &   parameters &   forward, ms &   tokens/s & launch-bound   & status   \\\\\n"
        "\\midrule\n"
        " small  &      128.6 M &  12.30 $\\pm$ 0.36 &    165,432 & yes            & ok       \\\\\n"
        " 2.7b   &       3.41 B &             - &          - & -              & oom      \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
        "\\par\\footnotesize mean $\\pm$ standard deviation of 3 steps\n"
        "\\end{table}\n"
    )


def test_typst():
    assert render([SWEEP], "typst") == (
        "#figure(\n"
        '  caption: "bench: H200, torch 2.11",\n'
        "  table(\n"
        "    columns: 6,\n"
        "    align: (left, right, right, right, left, left,),\n"
        '    table.header("size", "parameters", "forward, ms", "tokens/s", "launch-bound", "status"),\n'
        '    "small", "128.6 M", "12.30 ± 0.36", "165,432", "yes", "ok",\n'
        '    "2.7b", "3.41 B", "-", "-", "-", "oom",\n'
        "  ),\n"
        ")\n"
        "\n"
        '#"mean ± standard deviation of 3 steps"\n'
    )


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


def test_json_has_no_nan():
    columns = (Column("a", "a"), Column("b", "b"), Column("c_ms", "c", "ms"))
    row = {"a": math.nan, "b": -math.inf, "c_ms": ms(math.nan)}
    [table] = json.loads(render([Table("t", "t", columns, [row])], "json"))["tables"]
    assert table["rows"] == [{"a": None, "b": None, "c_ms_mean": None, "c_ms_std": 0.0, "c_ms_median": None}]


def test_number_among_samples_stands_under_the_mean():
    table = Table("t", "t", (Column("step_ms", "step", "ms"),), [{"step_ms": ms(1.0, 3.0)}, {"step_ms": 2.5}])
    assert (
        render([table], "csv") == f"table,step_ms_mean,step_ms_std,step_ms_median\nt,2.0,{math.sqrt(2)},2.0\nt,2.5,,\n"
    )


def test_csv():
    header, small, big = csv.reader(io.StringIO(render([SWEEP], "csv")))
    assert ",".join(header) == (
        "table,size,parameters,forward_ms_mean,forward_ms_std,forward_ms_median,tokens_per_s,mfu_percent,"
        "launch_bound,status"
    )
    assert list(map(float, small[3:6])) == pytest.approx([12.3, math.sqrt(0.13), 12.2])
    assert small[:3] + small[6:] == ["bench", "small", "128625408", "165432.1", "", "true", "ok"]
    assert big == ["bench", "2.7b", "3406809600", "", "", "", "", "", "", "oom"]


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


def test_csv_reads_back_hostile_text():
    [header, row] = csv.reader(io.StringIO(render([HOSTILE], "csv")))
    assert (header, row) == (["table", "text"], ["hostile", HOSTILE_TEXT])


def test_markdown_escapes():
    escaped = 'a\\|b \\<c> \\[d\\] \\*e\\* \\`f\\` \\_g\\_ h_i #j $k & 50% {l} ~m ^n \\\\o "p"'
    text = render([HOSTILE], "markdown")
    assert text.count(escaped) == 4
    assert text.startswith(f"### {escaped}\n")


def test_latex_escapes_cells_captions_and_notes_alike():
    escaped = (
        "a|b \\ensuremath{<}c\\ensuremath{>} [d] *e* `f` \\_g\\_ h\\_i \\#j \\$k \\& 50\\% \\{l\\} \\textasciitilde{}m "
        '\\^{}n \\textbackslash{}o "p"'
    )
    text = render([HOSTILE], "latex")
    assert text.count(escaped) == 4
    assert f"\\caption{{{escaped}}}" in text


def test_latex_row_may_start_with_a_bracket():
    table = Table("t", "t", (Column("interval", "[from, to]"),), [{"interval": "[1, 2]"}])
    lines = render([table], "latex").splitlines()
    assert [line for line in lines if "[" in line] == [" {[}from, to]   \\\\", " {[}1, 2]       \\\\"]


def test_typst_escapes():
    escaped = '"' + HOSTILE_TEXT.replace("\\", "\\\\").replace('"', '\\"') + '"'
    text = render([HOSTILE], "typst")
    assert f"  caption: {escaped},\n" in text
    assert f"    table.header({escaped}),\n    {escaped},\n" in text
    assert text.endswith(f"\n#{escaped}\n")
    assert "align: (left,)," in text


@pytest.mark.parametrize("format", FORMATS)
def test_table_without_rows_shows_its_columns(format):
    text = render([EMPTY], format)
    assert format == "json" or "step" in text
    assert format != "latex" or "\\begin{tabular}{ll}" in text


def test_line_breaks_do_not_break_a_row():
    table = Table("t", "t", (Column("reason", "reason"),), [{"reason": "first\nsecond"}], notes=("third\nfourth",))
    for format in ("table", "markdown", "latex", "typst"):
        text = render([table], format)
        assert "first second" in text
        assert "third fourth" in text


def drawn(table, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_tables([table], console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def test_terminal_wide_enough():
    assert drawn(SWEEP, 80) == [
        "bench: H200, torch 2.11",
        "size   parameters   forward, ms  tokens/s  launch-bound  status",
        "────────────────────────────────────────────────────────────────",
        "small     128.6 M  12.30 ± 0.36   165,432  yes           ok",
        "2.7b       3.41 B             -         -  -             oom",
        "mean ± standard deviation of 3 steps",
    ]


def test_narrower_terminal_stacks_headers_and_wraps_text():
    table = Table(
        "t",
        "t",
        (Column("a_ms", "backward pass", "ms"), Column("b_ms", "optimizer step", "ms"), Column("reason", "reason")),
        [{"a_ms": 1.5, "b_ms": 2.5, "reason": "CUDA out of memory: tried to allocate 12 GiB of 139 GiB"}],
    )
    assert drawn(table, 42) == [
        "t",
        "backward  optimizer",
        "   pass,      step,",
        "      ms         ms  reason",
        "──────────────────────────────────────────",
        "   1.500      2.500  CUDA out of memory:",
        "                     tried to allocate 12",
        "                     GiB of 139 GiB",
    ]


def test_terminal_narrower_than_the_table_turns_it():
    assert drawn(SWEEP, 40) == [
        "bench: H200, torch 2.11",
        "size                 small    2.7b",
        "───────────────────────────────────",
        "parameters         128.6 M  3.41 B",
        "forward, ms   12.30 ± 0.36       -",
        "tokens/s           165,432       -",
        "launch-bound           yes       -",
        "status                  ok     oom",
        "mean ± standard deviation of 3 steps",
    ]


MANY = Table(
    "bench",
    "bench: H200",
    (
        Column("size", "size"),
        Column("precision", "precision"),
        Column("bits", "bits"),
        *(Column(f"{phase}_ms", phase, "ms") for phase in ("forward", "backward", "optimizer")),
        Column("status", "status"),
    ),
    [
        {"size": "small", "precision": precision, "bits": 32 if row < 2 else 16, "status": "ok"}
        | {"forward_ms": 1000.0 + row, "backward_ms": 2.0, "optimizer_ms": ms(*(3.0 + row / 4, 3.0))}
        for row, precision in enumerate(["fp32", "tf32", "bf16", "fp16"])
    ],
)


def test_terminal_too_narrow_for_rows_and_columns_splits_the_columns():
    """What all rows have in common stands in the title, what it takes to tell them apart in every part."""
    assert drawn(MANY, 37) == [
        "bench: H200, size small, status ok",
        "                 forward,  backward,",
        "precision  bits        ms         ms",
        "─────────────────────────────────────",
        "fp32         32     1,000      2.000",
        "tf32         32     1,001      2.000",
        "bf16         16     1,002      2.000",
        "fp16         16     1,003      2.000",
        "",
        "precision  optimizer, ms",
        "─────────────────────────",
        "fp32       3.000 ± 0.000",
        "tf32         3.12 ± 0.18",
        "bf16         3.25 ± 0.35",
        "fp16         3.38 ± 0.53",
    ]


def test_numbers_that_are_all_the_same_stay_in_the_table_and_so_do_the_words_of_a_single_row():
    assert "2.000" in drawn(MANY, 37)[4]
    assert "launch-bound           yes" in drawn(replace(SWEEP, rows=SWEEP.rows[:1]), 30)


def test_headers_are_as_wide_as_what_stands_below_them():
    table = Table(
        "t",
        "t",
        (Column("moment", "moment of the peak"), Column("a_gib", "predicted optimizer state", "gib")),
        [{"moment": "softmax backward of block 3", "a_gib": 1.0}],
    )
    assert drawn(table, 37)[1:5] == [
        "                           predicted",
        "                           optimizer",
        "                              state,",
        "moment of the peak               GiB",
    ]


def test_terminal_narrower_than_a_column_prints_records():
    assert drawn(MANY, 15)[3:8] == [
        "╭──────┬──────╮",
        "│ prec │ fp32 │",
        "│ isio │      │",
        "│ n    │      │",
        "│ bits │ 32   │",
    ]


@pytest.mark.parametrize("width", [15, 25, 45, 60, 64, 100])
def test_no_width_hides_a_character(width):
    seen = sorted("".join(drawn(SWEEP, width)))
    for values in (["small", "128.6M", "12.30±0.36", "165,432", "yes", "ok"], ["2.7b", "3.41B", "oom"]):
        for character in "".join(values):
            seen.remove(character)
    assert "…" not in seen


def test_terminal_does_not_read_markup():
    lines = drawn(HOSTILE, 200)
    assert (lines[3], lines[-1]) == (HOSTILE_TEXT, HOSTILE_TEXT)


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


def test_emit_on_a_terminal_in_another_format_prints_that_format(monkeypatch):
    terminal = as_terminal(monkeypatch)
    emit([SWEEP], format="csv")
    assert terminal.getvalue() == render([SWEEP], "csv")


@pytest.mark.parametrize(("format", "expected"), [(None, "markdown"), ("table", "table"), ("json", "json")])
def test_emit_into_a_pipe_or_a_file_cuts_nothing(format, expected, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "20")
    emit([SWEEP], format=format)
    assert capsys.readouterr().out == render([SWEEP], expected)
    emit([SWEEP], format=format, output=tmp_path / "table")
    assert (tmp_path / "table").read_text(encoding="utf-8") == render([SWEEP], expected)
    assert capsys.readouterr().out == ""


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
    ],
)
def test_format_follows_the_name_of_the_file_unless_said(tmp_path, name, asked, format):
    emit([SWEEP], format=asked, output=tmp_path / name)
    assert (tmp_path / name).read_text() == render([SWEEP], format)


def test_a_dash_is_standard_output(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check_output(Path("-"))
    emit([SWEEP], output=Path("-"))
    assert capsys.readouterr().out == render([SWEEP], "markdown")
    assert list(tmp_path.iterdir()) == []


def test_unknown_format_leaves_the_output_alone(tmp_path):
    existing = tmp_path / "report.md"
    existing.write_text("yesterday's numbers")
    with pytest.raises(UsageError, match="unknown format"):
        emit([SWEEP], format="pdf", output=existing)
    assert existing.read_text() == "yesterday's numbers"


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
