"""Groups of commands that are imported only when they are asked for, so that help stays fast."""

import importlib
from typing import ClassVar

import typer
from typer.core import TyperGroup

from cs336sys.commands.options import with_option_groups

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class LazyGroup(TyperGroup):
    """A group of commands in modules of their own.

    Attributes:
        modules: for each command's name its module, in which it is a function, or a group (a Typer app), of that name.
    """

    modules: ClassVar[dict[str, str]] = {}

    def list_commands(self, ctx):
        return list(self.modules)

    def get_command(self, ctx, cmd_name):
        if cmd_name not in self.modules:
            return None
        found = getattr(importlib.import_module(self.modules[cmd_name]), cmd_name)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        command.command(cmd_name, context_settings=HELP_OPTIONS)(with_option_groups(found))
        return typer.main.get_command(command)
