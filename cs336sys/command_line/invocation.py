"""Groups of commands, imported only when they run, so that help stays fast; and calls with values from Python."""

import ast
import copy
import importlib.util
import keyword
import numbers
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from cs336sys.command_line.faults import say
from cs336sys.command_line.options import settings_file
from cs336sys.command_line.options.reading import with_read_options
from cs336sys.errors import UsageError, a_value, choose_from, did_you_mean
from cs336sys.results.recording import current_recording
from cs336sys.settings.user_code import TO_FILE, name_object

# Commands that measure in one process, which can be this one: it has functions that no other can import by name.
_MEASURED_HERE = ("bench", "memprof", "flash", "kernels")


@dataclass(frozen=True)
class Request:
    """A command, named after its group: ``("account", "memory")``, and values by :func:`keyword_of` its parameters.

    A value of None leaves the default.
    """

    command: tuple[str, ...]
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", {name: value for name, value in self.values.items() if value is not None})


def keyword_of(parameter: Any) -> str:
    """Return the name of an option in Python: ``batch_size`` of ``--batch-size``, ``from_`` of ``--from``."""
    if parameter.param_type_name != "option":
        return parameter.name
    name = next(name for name in parameter.opts if name.startswith("--"))[2:].replace("-", "_")
    return f"{name}_" if keyword.iskeyword(name) else name


class RequestParser:
    """A parser that hands the values of a request to click, which expects one of a command line."""

    _opt_prefixes: frozenset[str] = frozenset()  # click asks for it

    def __init__(self, request: Request, parameters: Sequence[Any]):
        self.request = request
        self.parameters = {keyword_of(parameter): parameter for parameter in parameters}

    def parse_args(self, args: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
        """Return values by parameters' names (``args`` are none here), and record the command line that they make."""
        options: dict[str, Any] = {}
        arguments: list[str] = []
        for name, value in self.request.values.items():
            if name not in self.parameters:
                raise UsageError(f"no such option: {name}{did_you_mean(name, self.parameters)}")
            parameter = self.parameters[name]
            is_option = parameter.param_type_name == "option"
            if is_option and parameter.is_flag:
                if not isinstance(value, bool):
                    raise UsageError(f"{name}={value!r}: must be True or False")
                options[parameter.name] = value
                arguments += parameter.opts[:1] if value else parameter.secondary_opts[:1]
                continue
            if isinstance(value, bool):
                raise UsageError(f"{name}={value!r}: takes a value, not True or False")
            texts = [self._text(name, item) for item in values_of(value)]
            is_list = parameter.multiple if is_option else parameter.nargs != 1
            if not is_list and len(texts) != 1:
                raise UsageError(f"{name}={value!r}: takes one value")
            options[parameter.name] = texts if is_list else texts[0]
            arguments += [f"{parameter.opts[0]}={text}" for text in texts] if is_option else texts
        if (recording := current_recording()) is not None:
            recording.arguments = (self.request.command[0], *arguments)
        return options, [], []  # click expects left-over arguments, too, and the order of parameters

    def _text(self, name: str, value: Any) -> str:
        """Write a Python value as the command line has it: functions as FILE.py:NAME."""
        if isinstance(value, str | numbers.Real | Path) and not isinstance(value, bool):
            return str(value)
        if not callable(value):
            raise UsageError(
                f"{name}={value!r}: must be a text, a number, a path, a function of a file, or a list of them"
            )
        module = sys.modules.get(str(getattr(value, "__module__", None)))
        file, object_name = getattr(module, "__file__", None), getattr(value, "__qualname__", "")
        # A function of a module's top level, which workers can import: of a package by dotted name, else from its file.
        if module and file and object_name.isidentifier() and getattr(module, object_name, None) is value:
            return f"{module.__name__ if '.' in module.__name__ else file}:{object_name}"
        sentence = f"{name}: {a_value(value)} that worker processes cannot find by name"
        if self.request.command[0] not in _MEASURED_HERE:
            raise UsageError(f"{sentence}; {TO_FILE}")  # How to put it into a file.
        say(f"note: {sentence}: it is measured in this process, and nothing ends a cell that takes too long")
        return name_object(value)  # A name for it that this process alone knows.


def values_of(value: Any) -> list[Any]:
    """Return the values of a list, range, array or other iterable, or one value alone."""
    is_single = isinstance(value, str | bytes | Path | Mapping) or callable(value) or not isinstance(value, Iterable)
    return [value] if is_single else list(value)


# Of a long list of options, --help shows the first ten of these, then of the others in their order.
MOST_USED = (
    *("--model", "--size", "--bf16", "--context", "--save", "--format", "--from", "--wrap", "--text", "--memory"),
    *("--gpu", "--plan", "--measure", "--world-size", "--strategy", "--case", "--mesh", "--checkpoint", "--mode"),
    *("--bucket-mb", "--learning-rate", "--op", "--implementation", "--kernel", "--dtype", "--tokens", "--width"),
    *("--head-dim", "--causal", "--compile", "--attention", "--cuda-graph", "--baseline", "--plot", "--dry-run"),
)


def _as_shown(parameter: Any) -> Any:
    """Return a copy of a parameter as help shows it: a flag that is off without ``--no-``, a value next to its name."""
    shown = copy.copy(parameter)
    if getattr(parameter, "secondary_opts", None) and parameter.default is False:
        shown.secondary_opts, shown.show_default = [], False
    if parameter.param_type_name == "option":
        # Less wide than a column of its own, which typer makes for values.
        value = "" if parameter.is_flag else parameter.metavar or ""
        shown.opts, shown.metavar = [f"{','.join(shown.opts)} {value}".rstrip()], ""
    return shown


HELP_OPTIONS = {"help_option_names": ["-h", "--help", "--help-all"]}


class _CommandBase:
    """Methods that commands and groups share: variables named after options, and help in few rows."""

    shows_all = False

    def get_params(self: Any, ctx: Any) -> list[Any]:
        return settings_file.with_own_variables(super().get_params(ctx), ctx)  # type: ignore[misc]  # typer's class is the next

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does, but name whole words of ``-size``, and say how several values are written."""
        self.shows_all = "--help-all" in args
        try:
            return super().parse_args(ctx, list(args))  # type: ignore[misc]  # A copy, because click empties it.
        except Exception as raised:
            error: Any = raised  # Click's type or typer's copy of it: by its name, as in faults.sentence_of().
            if type(error).__name__ == "NoSuchOption" and error.option_name[:2] != "--":
                # Of -size click names -s.
                typed = next((word for word in args if word.startswith(error.option_name)), error.option_name)
                error.option_name = typed.partition("=")[0]
            if extra := re.search(r"unexpected extra argument.*? \((.*)\)", getattr(error, "message", "")):
                rule = "each value follows its option, and several are joined by commas: a,b"
                raise UsageError(f"unexpected argument '{extra[1]}': {rule}") from None
            raise

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        """Write typer's help of a copy of this command, which has fewer options and narrower columns."""
        from typer import rich_utils

        shown = copy.copy(self)
        shown.help = self.help or _docstring(self.callback.__module__, self.callback.__name__)
        parameters = [parameter for parameter in self.get_params(ctx) if "--help" not in parameter.opts]
        options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
        if len(options) > 12 and not self.shows_all:  # To hide two or fewer is not worth the line that says so.
            shown.epilog = f"The 10 most used of {len(options)} options; --help-all shows all."
            # By the place in MOST_USED of the first name that is an option's: True sorts after False, so reversed.
            options.sort(key=lambda option: [name in option.opts for name in MOST_USED], reverse=True)
            parameters = [parameter for parameter in parameters if parameter not in options[10:]]
        vars(shown)["get_params"] = lambda ctx: [*map(_as_shown, parameters)]  # Called by format_help().
        # A space after a column and none before it: four of the six columns that typer draws are empty in our rows.
        wide = rich_utils.STYLE_OPTIONS_TABLE_PADDING
        rich_utils.STYLE_OPTIONS_TABLE_PADDING = (0, 1, 0, 0)  # type: ignore[assignment]  # rich takes four, too
        try:
            super(_CommandBase, shown).format_help(ctx, formatter)  # type: ignore[misc]
        finally:
            rich_utils.STYLE_OPTIONS_TABLE_PADDING = wide


class _Command(_CommandBase, TyperCommand):
    """A command whose options a settings file, variables and, from Python, a Request can set."""

    def make_parser(self, ctx):
        if isinstance(ctx.obj, Request):
            return RequestParser(ctx.obj, self.get_params(ctx))
        return super().make_parser(ctx)

    def parse_args(self, ctx, args):
        """Parse with the defaults of a settings file, and check the command's variables."""
        if ctx.default_map:  # The settings file's table of this command: defaults_of() makes values by parameter of it.
            # What the user gave: from Python (a Request) the names of options, else all words without leading dashes.
            typed = {text.partition("=")[0].removeprefix("--") for text in (ctx.obj.values if ctx.obj else args)}
            ctx.default_map = settings_file.defaults_of(ctx, self.get_params(ctx), typed)
        try:
            rest = super().parse_args(ctx, args)
        except UsageError:
            settings_file.tell_settings(ctx)  # The refused value may be the file's, of which the user has to know.
            raise
        if not ctx.resilient_parsing:  # which completion and ``show`` of saved arguments ask for: they run nothing
            settings_file.check_variables(ctx, self.get_params(ctx))
            settings_file.tell_settings(ctx)
        return rest


class LazyGroup(_CommandBase, TyperGroup):
    """A group of commands in modules of their own.

    Attributes:
        modules: for each command's name its module, in which it is a function, or a group (a Typer app), of that name.
            The module's ``CONTEXT_SETTINGS`` are click's for this command alone.
        panels: for each command's name the panel of help that lists it; without one, "Commands".
    """

    modules: ClassVar[dict[str, str]] = {}
    panels: ClassVar[dict[str, str]] = {}

    def parse_args(self, ctx, args):
        """Parse; refuse tables of the settings file, and variables, that name no command of this group."""
        if ctx.default_map:
            settings_file.check_tables(ctx, self.modules)
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:  # Which completion asks for: it runs nothing.
            settings_file.check_variables(ctx, self.get_params(ctx), self.modules)
        return rest

    def list_commands(self, ctx):
        return list(self.modules)

    def get_command(self, ctx, cmd_name):
        if cmd_name not in self.modules:
            return None
        module = importlib.import_module(self.modules[cmd_name])
        entry = getattr(module, cmd_name)
        if isinstance(entry, typer.Typer):
            return typer.main.get_command(entry)
        command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        settings = HELP_OPTIONS | getattr(module, "CONTEXT_SETTINGS", {})
        command.command(cmd_name, cls=_Command, context_settings=settings)(with_read_options(entry))
        return typer.main.get_command(command)

    def format_help(self, ctx, formatter):
        listed = copy.copy(self)  # Lists of commands need only their docstrings, read without importing them.
        vars(listed)["get_command"] = self._described
        super(LazyGroup, listed).format_help(ctx, formatter)

    def _described(self, ctx, name):
        """Return a command for lists, which has only its help and panel, so that its module need not be imported."""
        described = _docstring(self.modules[name], name)  # None for a group: no function has its name, so import it.
        command = self.get_command(ctx, name) if described is None else TyperCommand(name, help=described)
        command.rich_help_panel = self.panels.get(name)
        return command

    def resolve_command(self, ctx, args):
        if args[0] not in self.modules and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise UsageError(f"unknown command '{args[0]}': {choose_from(args[0], self.modules)}")
        return super().resolve_command(ctx, args)


def _docstring(module, function):
    """Read the docstring of a function from its source, without importing it, and under ``python -OO``, too."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for statement in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == function:
            return ast.get_docstring(statement)
    return None
