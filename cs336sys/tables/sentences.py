"""Sentences for people, made by Jinja templates from the facts that a module has: notes below tables, warnings."""

import re
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
    environment.filters |= {"to": format, "quantity": format_quantity}
    environment.filters["counted"] = lambda number, noun: f"{number} {noun}{'s' * (number != 1)}"
    return environment


def paragraphs(template: "Template", block: str, facts: dict[str, Any]) -> list[str]:
    """Return the paragraphs that a block makes of the facts, each in one line, or raise a jinja2.UndefinedError."""
    text = "".join(template.blocks[block](template.new_context(facts)))
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def sentences(module: str, block: str, **facts: Any) -> tuple[str, ...]:
    """Return the sentences of a block of the template next to a module: ``tables.jinja`` next to ``tables.py``."""
    path = module.removeprefix("cs336sys.").replace(".", "/")
    return tuple(paragraphs(package_templates().get_template(f"{path}.jinja"), block, facts))
