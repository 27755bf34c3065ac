"""Settings files: ``[tool.cs336sys.bench]`` in the nearest pyproject.toml, or ``[bench]`` in that of ``--config``.

The tables of a file become click's ``default_map``, level by level; the keys of a command are read when that command
runs. A file that the user has not named may come from a stranger: it is refused if another user owns it, and sets only
options that are declared harmless (:class:`cs336sys.command_line.options.reading.Effect`).
"""

import contextlib
import difflib
import os
import pwd
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cs336sys.command_line.faults import say
from cs336sys.command_line.options.reading import Effect, effect_of
from cs336sys.errors import DEBUG_VARIABLE, UsageError, choose_from, nearest_name
from cs336sys.processes import is_first_rank

# Keys of a context's ``meta``: how errors begin that name a command's table, the file, and whether the user named it.
_PLACE, _FILE, _IS_NAMED = "cs336sys.settings", "cs336sys.settings_file", "cs336sys.settings_file_is_named"


def with_config_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``--config FILE`` before the command, wherever it stood."""
    for number, argument in enumerate(arguments):
        if argument == "--config" or argument.startswith("--config="):
            end = number + (2 if argument == "--config" else 1)  # FILE is the next argument, or in this one.
            return [*arguments[number:end], *arguments[:number], *arguments[end:]]
    return list(arguments)


def use_settings(ctx: Any, config: Path | None, commands: Collection[str]) -> None:
    """Let the commands below this context take their defaults from ``config``, or else the nearest pyproject.toml.

    A UsageError says that the file cannot be read, is no TOML, or has tables of no command.
    """
    file, is_pyproject = config, config is None or config.name == "pyproject.toml"
    if file is None:
        folders = (Path.cwd(), *Path.cwd().parents)
        file = next((path for path in (folder / "pyproject.toml" for folder in folders) if path.is_file()), None)
    tables: dict[str, Any] = {}
    if file is not None:
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
        except ValueError as error:
            raise UsageError(f"cannot read {file}: it is not TOML: {error}") from error
    if is_pyproject:
        tables = tables.get("tool", {})
        tables = tables.get("cs336sys", {}) if isinstance(tables, Mapping) else {}
    if config is None and file is not None and tables:  # Most pyproject.toml have no table of ours, whoever owns them.
        _refuse_other_owner(file)
    ctx.meta[_FILE], ctx.meta[_IS_NAMED] = file, config is not None
    ctx.meta[_PLACE] = f"{file}: tool.cs336sys." if is_pyproject else f"{file}: "  # How errors begin to name a key.
    ctx.default_map = tables
    check_tables(ctx, commands)


def _refuse_other_owner(path: Path) -> None:
    """Raise a UsageError if a file belongs to another user than this one, root, or who called sudo."""
    trusted = {0, os.geteuid()}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        trusted.add(int(os.environ["SUDO_UID"]))
    # The owners of a link and of its target: a stranger's link may lead to a file that this user wrote for other uses.
    for owner in (path.lstat().st_uid, path.stat().st_uid):
        if owner not in trusted:
            name = str(owner)
            with contextlib.suppress(KeyError):
                name = pwd.getpwuid(owner).pw_name
            raise UsageError(
                f"{path}: belongs to another user, {name}, so its settings are not taken; --config {path} takes them, "
                f"and --config {os.devnull} none"
            )


def _place(ctx: Any) -> str:
    """Return the prefix of a key of this context's table in errors."""
    commands: list[str] = []
    while ctx.parent is not None:
        commands, ctx = [ctx.info_name, *commands], ctx.parent
    return ctx.meta[_PLACE] + "".join(f"{name}." for name in commands)


def check_tables(ctx: Any, commands: Collection[str]) -> None:
    """Raise a UsageError if the context's settings are not tables of these commands."""
    place, tables = _place(ctx), ctx.default_map
    if not isinstance(tables, Mapping):
        raise UsageError(f"{place.removesuffix('.')}: must be a table")
    for name, value in tables.items():
        if name not in commands:
            raise UsageError(f"{place}{name}: {choose_from(name, commands)}")
        if not isinstance(value, Mapping):
            raise UsageError(f"{place}{name}: must be a table of the options of {name}")


def defaults_of(ctx: Any, parameters: Sequence[Any], typed: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of the context's command by the names of its parameters, as texts of a command line.

    Where the user has ``typed`` an option or set its variable, its alternatives are ignored: the file's ``precision``
    for ``--bf16``. A UsageError names a key that is no option, or a value that cannot be one or is not harmless.
    """
    # By every name of an option, without those that end the command, as --help.
    options = {
        name.removeprefix("--"): parameter
        for parameter in parameters
        if parameter.param_type_name == "option" and parameter.expose_value and not parameter.is_eager
        for name in parameter.opts
        if name.startswith("--")
    }
    place = _place(ctx)
    defaults: dict[str, Any] = {}
    for key, value in ctx.default_map.items():
        name = key.replace("_", "-")
        if name not in options:
            raise UsageError(f"{place}{key}: {_no_such_option(ctx, name, options)}")
        option = options[name]
        if option.name in defaults:
            raise UsageError(f"{place}{key}: sets --{name} a second time; leave one of them out")
        declaration = ctx.command.callback.declared[option.name]
        values = value if isinstance(value, list) else [value]
        texts = {text.strip() for item in values for text in str(item).split(",")}
        # An option is harmless, or each of its values is.
        is_harmless = effect_of(declaration) is Effect.HARMLESS or texts <= {
            *getattr(declaration, "harmless_values", ())
        }
        if not ctx.meta[_IS_NAMED] and not is_harmless:
            raise UsageError(
                f"{place}{key} = {value!r}: {effect_of(declaration)}, which a file that was found may not; give "
                f"--{name} on the command line, or name the file: --config {ctx.meta[_FILE]}"
            )
        if option.is_flag:
            if not isinstance(value, bool):
                raise UsageError(f"{place}{key} = {value!r}: must be true or false")
            defaults[option.name] = value
        elif option.multiple:
            defaults[option.name] = [_option_text(f"{place}{key}", item) for item in values]
        else:
            defaults[option.name] = _option_text(f"{place}{key}", value)
    names = ("precision", "bf16", "fp16")  # Which stand in for each other.
    if any(name in typed or os.environ.get(_variable(ctx, name)) for name in names):
        return {name: value for name, value in defaults.items() if name not in names}
    return defaults


def _no_such_option(ctx: Any, name: str, names: Collection[str], prefix: str = "") -> str:
    """Say that the context's command lacks an option, and name the nearest one, after its prefix."""
    nearest = nearest_name(name, names)
    hint = f"did you mean {prefix}{nearest}?" if nearest else f"{ctx.command_path} --help-all shows its options"
    return f"{ctx.info_name} has no such option; {hint}"


def tell_settings(ctx: Any) -> None:
    """Name the options of the context's command that a settings file has set, and the file; on rank 0 alone."""
    options = {option.name: max(option.opts, key=len) for option in ctx.command.params}  # --output and not -o
    names = [name for name in options if (source := ctx.get_parameter_source(name)) and source.name == "DEFAULT_MAP"]
    if not names:
        return
    with contextlib.suppress(UsageError):  # The command itself refuses wrong variables of ranks.
        if not is_first_rank():
            return
    say(f"settings from {ctx.meta[_FILE]}: {', '.join(options[name] for name in names)}")


def _option_text(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{key} = {value!r}: must be a text or a number, or a list of them where the option takes one")
    return str(value)


# Every option has a variable: that of ``bench --num-layers`` is ``CS336SYS_BENCH_NUM_LAYERS``. These belong to none:
# whether errors show tracebacks, nsys's path, the engine of attention, and whether tests write pages of docs.
_OTHER_VARIABLES = (DEBUG_VARIABLE, "CS336SYS_NSYS", "CS336SYS_TRITON_ENGINE", "CS336SYS_WRITE_DOCS")


def with_own_variables(parameters: list[Any], ctx: Any) -> list[Any]:
    """Let every option be set by a variable of its own name, where Typer's would have that of the Python parameter."""
    for parameter in parameters:
        if parameter.param_type_name != "option":
            continue
        parameter.allow_from_autoenv = False
        # The rule stands in one line of the help. Options that end a command, as --help, get no variable.
        parameter.show_envvar = False
        if ctx.auto_envvar_prefix is not None and parameter.expose_value and not parameter.is_eager:
            name = next(name for name in parameter.opts if name.startswith("--"))
            parameter.envvar = _variable(ctx, name[2:])
    return parameters


def check_variables(ctx: Any, parameters: Sequence[Any], commands: Collection[str] = ()) -> None:
    """Raise a UsageError for a variable that begins like those of a command (or a group of ``commands``) and is none.

    ``parameters`` are as :func:`with_own_variables` returns them; commands of a group check variables when they run.
    """
    if ctx.auto_envvar_prefix is None:
        return
    # Variables of --help and --version set nothing, but are no mistake.
    option_variables = {
        _variable(ctx, name[2:]) for parameter in parameters for name in parameter.opts if name.startswith("--")
    }
    prefix = f"{ctx.auto_envvar_prefix}_"
    for variable in sorted(os.environ):
        if not variable.startswith(prefix) or variable in (*option_variables, *_OTHER_VARIABLES):
            continue
        name = variable.removeprefix(prefix)
        if not commands:
            names = sorted(variable.removeprefix(prefix) for variable in option_variables)
            raise UsageError(f"{variable}: {_no_such_option(ctx, name, names, prefix)}")
        # Of a group: the variable should name one of its commands next, which checks the rest itself.
        word = name.partition("_")[0].lower()
        # Misspellings are so similar: benhc and bench are 0.8, triton and attn 0.6.
        if word not in commands and difflib.get_close_matches(word, commands, cutoff=0.75):
            raise UsageError(f"{variable}: unknown command '{word}': {choose_from(word, commands)}")
        if word not in commands:
            example = f"{prefix}{next(iter(commands)).upper()}_{name}"
            raise UsageError(f"{variable}: '{word}' is no command; the variable of an option names one: {example}")


def _variable(ctx: Any, name: str) -> str:
    return f"{ctx.auto_envvar_prefix}_{name.replace('-', '_').upper()}"
