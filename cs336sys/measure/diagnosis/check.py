"""One line of the diagnosis."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "missing"]


@dataclass(frozen=True)
class Check:
    """What was looked for and what was found.

    Attributes:
        verdict: ``warn``: a command is slower, disturbed or unavailable; ``missing``: cs336sys cannot work like this.
        fix: what to do about it, one sentence with the command to type; None when there is nothing to do.
    """

    name: str
    found: str
    verdict: Verdict = "ok"
    fix: str | None = None
