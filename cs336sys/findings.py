"""Findings of a diagnosis, and their sentences, which stand in ``sentences.jinja`` of the package that prints them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jinja2 import Template

# How sure a finding is: nothing else explains the evidence, something else could, or the evidence does not say.
Certainty = Literal["measured", "looks like", "cannot tell"]


@dataclass(frozen=True)
class Finding:
    """A mistake, a fault or a waste, as programs know it; a template says it, and what to do about it, to people.

    Attributes:
        cause: in a word or two, as in the documentation.
        where: the line of code, the rank or the parameter; empty where none is known.
        amount, unit: how much it holds, takes or is off.
        facts: further values that its sentences name.
    """

    cause: str
    where: str = ""
    amount: float = 0.0
    unit: str = ""
    certainty: Certainty = "measured"
    facts: Mapping[str, Any] = field(default_factory=dict)


def sentence(package: str, name: str, finding: Finding | None = None, /, **facts: Any) -> str:
    """Render a block of the package's ``sentences.jinja``.

    Args:
        name: of the block, in which spaces are underscores: a finding's cause, ``fp32 logits``, or what to say of it.
        finding: its fields and facts are values of the block.
        facts: further values, and functions that write them, such as ``quantity=format_quantity``. A value that the
            block names and was not given is a jinja2.UndefinedError.
    """
    values = facts if finding is None else {**vars(finding), **finding.facts, **facts}
    template = _sentences(package)
    return "".join(template.blocks[name.replace(" ", "_")](template.new_context(values))).strip()


@cache
def _sentences(package: str) -> "Template":
    """Read a package's sentences; the ends of their lines are spaces, so that a sentence can take several lines."""
    from jinja2 import Environment, StrictUndefined

    source = (resources.files(package) / "sentences.jinja").read_text()
    return Environment(undefined=StrictUndefined).from_string(re.sub(r"\s*\n\s*", " ", source))
