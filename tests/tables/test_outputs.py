"""Tables and pictures in files, in pipes and on terminals: what cannot be written is found before it is measured.

What they look like is in ``figures.txt``.
"""

import io
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from test_tables_figures import EMPTY, SWEEP

from cs336sys.errors import OutputError, UsageError
from cs336sys.tables.outputs import FORMATS, check_writable, read_output, write_figure, write_file
from cs336sys.tables.page import html_page, html_picture, html_table
from cs336sys.tables.render import check_output, emit, render


def test_a_folder_gets_a_file_for_each_name_of_tables(tmp_path):
    check_output(read_output(f"{tmp_path}/new/"))
    emit([SWEEP, EMPTY], output=read_output(f"{tmp_path}/new/"))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {f"{SWEEP.name}.csv", f"{EMPTY.name}.csv"}
    assert (tmp_path / "new" / f"{SWEEP.name}.csv").read_text() == render([SWEEP], "csv")
    emit([SWEEP], format="markdown", output=tmp_path)
    assert (tmp_path / f"{SWEEP.name}.md").read_text() == render([SWEEP], "markdown")


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


# Less than any table or picture takes.
ROOM_BYTES = 100


def _with_little_room():
    # A larger file is refused in the middle of a write, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, ROOM_BYTES))


def test_a_disk_that_fills_leaves_the_file_of_before(tmp_path):
    path = tmp_path / "table.md"
    path.write_text("of before\n")
    ended = subprocess.run(
        [sys.executable, "-m", "cs336sys", "account", "buckets", "--output", path],
        capture_output=True,
        text=True,
        timeout=90,
        preexec_fn=_with_little_room,
        # Python does not notice that it wrote half of its compiled modules, and could not read them later.
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (ended.returncode, ended.stderr) == (1, f"error: cannot write --output {path}: File too large\n")
    assert path.read_text() == "of before\n"
    assert os.listdir(tmp_path) == ["table.md"]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_that_cannot_be_written_leaves_that_of_before(tmp_path, monkeypatch, ending):
    path = tmp_path / f"plot.{ending}"
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    write_figure(figure, path)
    before = path.read_bytes()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, limits[1]))
    try:
        with pytest.raises(OutputError, match=f"^cannot write --plot {path}: File too large$"):
            write_figure(figure, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_link_to_a_file_that_is_not_there_stays_a_link(tmp_path):
    link = tmp_path / "link.md"
    link.symlink_to("file.md")
    check_writable(link, "--output")
    assert os.listdir(tmp_path) == ["link.md"], "the check made a file, or took the link"
    write_file(link, b"new\n", "--output")
    assert link.is_symlink()
    assert (tmp_path / "file.md").read_bytes() == b"new\n"


def test_a_page_loads_nothing():
    def draw(path):
        path.write_bytes(b"a picture")

    page = html_page("t", [html_table(SWEEP), html_picture(draw, "what it shows")])
    assert '<img src="data:image/png;base64,YSBwaWN0dXJl" alt="what it shows">' in page
    assert not re.search(r"https?:|src=\"(?!data:)|@import|url\(|<link|<script", page)
