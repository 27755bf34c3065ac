"""Sentences from templates: each block that a module asks for is in its template, and each block is asked for."""

import ast
from pathlib import Path

import jinja2
import pytest

from cs336sys.tables.table import package_templates, sentences

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


def test_a_fact_that_is_not_there_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="capacity"):
        sentences("cs336sys.tables.titles", "plan")
