"""Sentences for people, made by Jinja templates from the facts that a module has: notes below tables, warnings."""

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from cs336sys.tables.numbers import format_quantity

if TYPE_CHECKING:
    from jinja2 import Environment, Template


@cache
def package_templates() -> "Environment":
    """Load the package's templates by their paths in it, with filters that write numbers."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("cs336sys", ".")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"to": format, "quantity": format_quantity, "counted": count_of}
    return environment


def template_of(module: str) -> "Template":
    """Return the template next to a module: ``tables.jinja`` next to ``tables.py``."""
    return package_templates().get_template(f"{module.removeprefix('cs336sys.').replace('.', '/')}.jinja")


def count_of(number: int, noun: str) -> str:
    """Return ``1 cell`` or ``2 cells``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def written(template: "Template", block: str, facts: Mapping[str, Any]) -> str:
    """Return what a block makes of the facts; a jinja2.UndefinedError lacks one."""
    return "".join(template.blocks[block](template.new_context(dict(facts))))


def paragraphs(template: "Template", block: str, facts: Mapping[str, Any]) -> list[str]:
    """Return the paragraphs that a block makes of the facts, each in one line."""
    parts = re.split(r"\n\s*\n", written(template, block, facts))
    return [" ".join(part.split()) for part in parts if part.strip()]


def sentences(module: str, block: str, **facts: Any) -> tuple[str, ...]:
    """Return the sentences of a block of a module's :func:`template_of`."""
    return tuple(paragraphs(template_of(module), block, facts))
