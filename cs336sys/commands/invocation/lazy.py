"""Groups of commands that are imported only when they are asked for, so that help stays fast."""

import ast
import copy
import importlib.util
from pathlib import Path
from typing import ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from cs336sys.commands.invocation.help_rows import in_fewer_rows, narrow_columns
from cs336sys.commands.options.reading import with_read_options
from cs336sys.commands.options.settings_file import check_tables, defaults_of, overruled_settings, tell_settings
from cs336sys.commands.options.variables import check_variables, with_own_variables
from cs336sys.errors import UsageError, choose_from

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class _Command(TyperCommand):
    def format_help(self, ctx, formatter):
        shown = copy.copy(self)
        shown.help = self.help or _docstring_of(self.callback)
        vars(shown)["get_params"] = lambda ctx: in_fewer_rows(self.get_params(ctx))
        with narrow_columns():
            super(_Command, shown).format_help(ctx, formatter)

    def get_params(self, ctx):
        return with_own_variables(super().get_params(ctx), ctx)

    def parse_args(self, ctx, args):
        if ctx.default_map:
            ctx.default_map = defaults_of(ctx, self.get_params(ctx))
        rest = super().parse_args(ctx, list(args))
        if overruled := overruled_settings(ctx):
            ctx.default_map = {name: value for name, value in ctx.default_map.items() if name not in overruled}
            ctx.params.clear()
            rest = super().parse_args(ctx, list(args))
        if not ctx.resilient_parsing:
            check_variables(ctx, self.get_params(ctx))
            tell_settings(ctx)
        return rest


class LazyGroup(TyperGroup):
    """A group of commands in modules of their own.

    Attributes:
        modules: for each command's name its module, in which it is a function, or a group (a Typer app), of that name.
            Settings that click needs for it alone are the module's ``CONTEXT_SETTINGS``.
    """

    modules: ClassVar[dict[str, str]] = {}

    def get_params(self, ctx):
        return with_own_variables(super().get_params(ctx), ctx)

    def parse_args(self, ctx, args):
        if ctx.default_map:
            check_tables(ctx, self.modules)
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            check_variables(ctx, self.get_params(ctx), self.modules)
        return rest

    def list_commands(self, ctx):
        return list(self.modules)

    def get_command(self, ctx, cmd_name):
        if cmd_name not in self.modules:
            return None
        module = importlib.import_module(self.modules[cmd_name])
        found = getattr(module, cmd_name)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        settings = HELP_OPTIONS | getattr(module, "CONTEXT_SETTINGS", {})
        command.command(cmd_name, cls=_Command, context_settings=settings)(with_read_options(found))
        return typer.main.get_command(command)

    def format_help(self, ctx, formatter):
        # A list of commands needs what each says of itself, and that can be read without its imports and its options.
        listed = copy.copy(self)
        listed.help = self.help or _docstring_of(self.callback)
        vars(listed)["get_command"] = lambda ctx, name: self._described(name) or self.get_command(ctx, name)
        vars(listed)["get_params"] = lambda ctx: in_fewer_rows(self.get_params(ctx))
        with narrow_columns():
            super(LazyGroup, listed).format_help(ctx, formatter)

    def _described(self, name):
        """A command that does nothing, with the docstring of the one in its module; None if that is a group."""
        described = _docstring(self.modules[name], name)
        return None if described is None else TyperCommand(name, help=described)

    def resolve_command(self, ctx, args):
        if args[0] not in self.modules and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise UsageError(f"unknown command '{args[0]}': {choose_from(args[0], self.modules)}")
        return super().resolve_command(ctx, args)


def _docstring_of(callback):
    return _docstring(callback.__module__, callback.__name__)


def _docstring(module, function):
    """The docstring of a function, from its source: not imported, and without docstrings under ``python -OO``, too."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for statement in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == function:
            return ast.get_docstring(statement)
    return None
