"""Pages of tables and pictures: one file that loads nothing, which says what the tables say."""

import html.parser
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


class Reader(html.parser.HTMLParser):
    """The texts of a page by the element that they stand in."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1], data))

    def of(self, tag):
        return [text for name, text in self.texts if name == tag]


def test_a_page_says_what_the_table_says():
    reader = Reader(html_page("Title & more", [html_table(TABLE)]))
    assert reader.open == [], "every element is closed"
    assert reader.of("h1") == ["Title & more"]
    assert reader.of("h2") == ["Times of <a> & b"]
    assert reader.of("th") == ["name", "step, ms", "held, GiB"]
    assert reader.of("td") == ["<b>", "2.00 ± 1.41 !", "1.000", "c", "-", "2.000"]
    assert reader.of("p")[0] == "a note with <tags>"
    assert reader.of("p")[1].startswith("!: the standard deviation is more than 20 %")


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
