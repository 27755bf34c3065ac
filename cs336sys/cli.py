"""The ``cs336sys`` command: a table of subcommands, each imported only when it is asked for."""

import importlib
from typing import Annotated

import typer
from typer.core import TyperGroup

from cs336sys import __version__
from cs336sys.errors import CapabilityError, UsageError

# Every subcommand is a function of its name in a module of its name.
COMMANDS = ("bench", "attn", "flash", "precision", "compare", "doctor")

INTERRUPTED = 130


class CommandTable(TyperGroup):
    """Imports a subcommand's module when it is looked up, so that help stays fast."""

    def list_commands(self, ctx):
        return list(COMMANDS)

    def get_command(self, ctx, cmd_name):
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"cs336sys.commands.{cmd_name}")
        command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        command.command(cmd_name, context_settings={"help_option_names": ["-h", "--help"]})(getattr(module, cmd_name))
        return typer.main.get_command(command)

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (UsageError, CapabilityError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(INTERRUPTED) from interrupt


app = typer.Typer(
    cls=CommandTable,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"cs336sys {__version__}")
        raise typer.Exit


@app.callback()
def cs336sys(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Benchmark, profile and parallelise Transformer training.

    Every option can also be set by a variable: CS336SYS_BENCH_SIZE=small is bench's --size small.
    """


def main() -> None:
    app(auto_envvar_prefix="CS336SYS")
