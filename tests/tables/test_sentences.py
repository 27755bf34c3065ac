"""Sentences from templates: each block that a module asks for is in its template, and each block is asked for."""

import ast
from pathlib import Path

import jinja2
import pytest

from cs336sys.tables.table import package_templates, paragraphs, sentences

PACKAGE = Path(__file__).parents[2] / "cs336sys"


def requested_blocks():
    """Return the blocks that calls of ``sentences(__name__, BLOCK, ...)`` name, by the template of their module."""
    requested = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name("sentences"), args=[ast.Name("__name__"), ast.Constant(block), *_]):
                    template = path.relative_to(PACKAGE).with_suffix(".jinja").as_posix()
                    requested.setdefault(template, set()).add(block)
    return requested


def test_templates_have_the_blocks_that_modules_ask_for():
    requested = requested_blocks()
    assert len(requested) > 15
    assert {name: set(package_templates().get_template(name).blocks) for name in requested} == requested


def template_of(text):
    return package_templates().from_string("{% block notes %}" + text + "{% endblock %}")


def test_paragraphs_are_sentences_in_one_line():
    template = template_of("\none\nand two\n\n{% if has_more %}\nmore\n{% endif %}\n\nlast\n")
    assert paragraphs(template, "notes", {"has_more": False}) == ["one and two", "last"]
    assert paragraphs(template, "notes", {"has_more": True}) == ["one and two", "more", "last"]


def test_numbers_are_written_by_filters():
    template = template_of(
        '{{ 0.12345 | to(".2g") }} {{ 1 | counted("cell") }} {{ 2 | counted("cell") }} {{ 1.5 | quantity("ms") }}'
    )
    assert paragraphs(template, "notes", {}) == ["0.12 1 cell 2 cells 1.500 ms"]


def test_a_fact_that_is_not_there_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="capacity"):
        sentences("cs336sys.tables.titles", "plan")
