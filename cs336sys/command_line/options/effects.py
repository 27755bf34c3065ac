"""Effects of options beyond the choice of what is computed and shown, declared where the option is."""

import enum
import functools
from typing import Any

import typer


class Effect(enum.StrEnum):
    """An effect of an option, as errors say it; a settings file that no user has named sets harmless options alone."""

    HARMLESS = "is harmless"
    READS_FILE = "reads a file"
    WRITES_FILE = "writes a file"
    RUNS_CODE = "names code to run"
    CONNECTS = "opens connections"
    UNDECLARED = "does not declare what it may do"


def _declared(effect: Effect, *names: str, **settings: Any) -> Any:
    """Declare an option as ``typer.Option`` does, and its effect."""
    option = typer.Option(*names, **settings)
    option.effect = effect
    return option


# An option declared by typer.Option itself is Effect.UNDECLARED, and set by the settings files that users name alone.
setting = functools.partial(_declared, Effect.HARMLESS)
reads_file = functools.partial(_declared, Effect.READS_FILE)
writes_file = functools.partial(_declared, Effect.WRITES_FILE)
runs_code = functools.partial(_declared, Effect.RUNS_CODE)
connects = functools.partial(_declared, Effect.CONNECTS)


def effect_of(declaration: Any) -> Effect:
    """Return the effect that an option's declaration names."""
    return getattr(declaration, "effect", Effect.UNDECLARED)
