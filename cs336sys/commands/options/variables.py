"""The variable of every option: ``CS336SYS_BENCH_NUM_LAYERS`` is ``bench --num-layers``."""

import difflib
import os
from collections.abc import Collection, Sequence
from typing import Any

from cs336sys.errors import DEBUG_VARIABLE, UsageError, choose_from

# Variables that are no option's: whether errors show where they came from, and nsys's path.
_OF_NO_OPTION = (DEBUG_VARIABLE, "CS336SYS_NSYS")

# From this likeness on, one word is taken for a misspelling of the other: benhc and bench are 0.8, triton and attn 0.6.
_NEARLY = 0.75


def with_own_variables(parameters: list[Any], ctx: Any) -> list[Any]:
    """Give every option a variable of its name: that of ``bench --num-layers`` ends in _NUM_LAYERS.

    Typer's own are called after the function's parameters, and turn --version, --help and completion on, too.
    """
    for parameter in parameters:
        if parameter.param_type_name != "option":
            continue
        parameter.allow_from_autoenv = False
        # One line of help tells the rule.
        parameter.show_envvar = False
        if ctx.auto_envvar_prefix is not None and parameter.expose_value and not parameter.is_eager:
            name = next(name for name in parameter.opts if name.startswith("--"))
            parameter.envvar = _variable(ctx, name[2:])
    return parameters


def check_variables(ctx: Any, parameters: Sequence[Any], commands: Collection[str] = ()) -> None:
    """Refuse variables of a command, or of a group of commands, that set nothing.

    Args:
        parameters: as :func:`with_own_variables` returns them.
        commands: of a group, whose variables are checked when they run.

    Raises:
        UsageError: a variable begins like those of the command, and is none of them.
    """
    if ctx.auto_envvar_prefix is None:
        return
    # Those of --help and --version set nothing, and are no mistake either.
    known = {_variable(ctx, name[2:]) for one in parameters for name in one.opts if name.startswith("--")}
    beyond = len(ctx.auto_envvar_prefix) + 1
    for variable in sorted(os.environ):
        if not variable.startswith(f"{ctx.auto_envvar_prefix}_") or variable in (*known, *_OF_NO_OPTION):
            continue
        if not commands:
            nearest = difflib.get_close_matches(variable[beyond:], sorted(name[beyond:] for name in known), n=1)
            hint = (
                f"did you mean {variable[:beyond]}{nearest[0]}?"
                if nearest
                else f"{ctx.command_path} --help shows those that it has"
            )
            raise UsageError(f"{variable}: {ctx.info_name} has no such option; {hint}")
        word = variable[beyond:].partition("_")[0].lower()
        # Others may have variables that begin alike, but not with what is nearly a command.
        if word not in commands and difflib.get_close_matches(word, commands, cutoff=_NEARLY):
            raise UsageError(f"{variable}: unknown command '{word}': {choose_from(word, commands)}")


def _variable(ctx: Any, name: str) -> str:
    return f"{ctx.auto_envvar_prefix}_{name.replace('-', '_').upper()}"
