"""Pages of tables and pictures: one file that loads nothing, which says what the tables say."""

import html
import re

import pytest

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.results.model import Samples
from cs336sys.tables import outputs
from cs336sys.tables.outputs import check_plot
from cs336sys.tables.page import check_page_writable, html_page, html_picture, html_table
from cs336sys.tables.table import Column, Table

TABLE = Table(
    "times",
    "Times of <a> & b",
    [
        Column("name", "name"),
        Column("step_ms", "step", "ms"),
        Column("held_gib", "held", "gib"),
        Column("no", "no"),
    ],
    [
        {"name": "<b>", "step_ms": Samples("ms", "cpu clock", (1.0, 3.0)), "held_gib": 1.0},
        {"name": "c", "step_ms": None, "held_gib": 2.0},
    ],
    ("a note with <tags>",),
)


def test_a_page_says_what_the_table_says():
    page = html_page("Title & more", [html_table(TABLE)])

    def of(tag):
        return [html.unescape(text) for text in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page)]

    tags = set(re.findall(r"<(\w+)", page)) - {"meta"}
    assert [tag for tag in tags if len(re.findall(rf"<{tag}\b", page)) != page.count(f"</{tag}>")] == []
    assert of("h1") == ["Title & more"]
    assert of("h2") == ["Times of <a> & b"]
    assert of("th") == ["name", "step, ms", "held, GiB"]
    assert of("td") == ["<b>", "2.00 ± 1.41 !", "1.000", "c", "-", "2.000"]
    assert of("p")[0] == "a note with <tags>"
    assert of("p")[1].startswith("!: the standard deviation is more than 20 %")
    assert '<td>c</td><td class="number">-</td>' in page, "numbers stand right, words left"


def test_a_page_loads_nothing():
    def draw(path):
        path.write_bytes(b"a picture")

    page = html_page("t", [html_table(TABLE), html_picture(draw, "what it shows")])
    assert '<img src="data:image/png;base64,YSBwaWN0dXJl" alt="what it shows">' in page
    assert not re.search(r"https?:|src=\"(?!data:)|@import|url\(|<link|<script", page)


def test_a_page_needs_the_ending_of_one(tmp_path):
    check_page_writable(None)
    check_page_writable(tmp_path / "new" / "page.html")
    with pytest.raises(UsageError, match=r"--html .*p.pdf: the file must end in .html"):
        check_page_writable(tmp_path / "p.pdf")


def test_pictures_need_what_draws_them(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs.importlib.util, "find_spec", lambda name: None)
    for check, name in ((check_plot, "p.png"), (check_page_writable, "p.html")):
        with pytest.raises(CapabilityError, match=rf"{name}: matplotlib is not installed: python -m pip install"):
            check(tmp_path / name)
