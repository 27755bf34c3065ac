"""The ``cs336sys`` command: a table of subcommands, each imported only when it is asked for."""

import sys
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from cs336sys import __version__
from cs336sys.command_line import faults
from cs336sys.command_line.invocation import HELP_OPTIONS, LazyGroup
from cs336sys.command_line.options.settings_file import use_settings, with_config_first

# The panels of --help. Every subcommand is a function of its name, or a group of commands (a Typer app), in
# ``commands/NAME/options.py`` or, where it is short, in ``commands/NAME.py``.
PANELS = {
    "Measure": ("bench", "nsys", "memprof", "attn", "flash", "kernels", "allreduce", "ddp", "shard"),
    "Understand": ("trace", "account", "precision", "losses"),
    "Decide": ("tune", "verify", "compare"),
    "Write up": ("report", "show", "slurm", "doctor"),
}
COMMANDS = tuple(name for names in PANELS.values() for name in names)


def module_of(command: str) -> str:
    """Return the dotted name of the module in which a subcommand is a function or a group."""
    is_folder = Path(__file__).with_name("commands").joinpath(command, "options.py").exists()
    return f"cs336sys.commands.{command}.options" if is_folder else f"cs336sys.commands.{command}"


class CommandTable(LazyGroup):
    """All subcommands; an error that a user can fix ends with its one sentence."""

    modules: ClassVar = {name: module_of(name) for name in COMMANDS}
    panels: ClassVar = {name: panel for panel, names in PANELS.items() for name in names}

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, with_config_first(args))

    def main(self, *args, **settings):
        """Run the command line and exit; without typer's standalone mode, as :mod:`cs336sys.api` calls it, return."""
        if not settings.get("standalone_mode", True):
            return super().main(*args, **settings)
        settings["standalone_mode"] = False
        return sys.exit(faults.exit_code_of(lambda: super(CommandTable, self).main(*args, **settings)))

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            # Caught before typer ends the command in its own way.
            raise typer.Exit(faults.interruption_code(interrupt)) from interrupt


app = typer.Typer(cls=CommandTable, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"cs336sys {__version__}")
        raise typer.Exit


@app.callback()
def cs336sys(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="<file>", help="Settings: \\[bench] size = 'small' is bench's --size small."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Benchmark, profile and parallelise Transformer training.

    Every option can also be set by a variable, CS336SYS_BENCH_SIZE=small is bench's --size small, and below that in
    \\[tool.cs336sys.bench] of the nearest pyproject.toml, or in \\[bench] of the --config file instead.
    """
    use_settings(ctx, config, COMMANDS)


def main() -> None:
    faults.open_closed_streams()
    faults.end_like_ctrl_c_on_sigterm()
    app(auto_envvar_prefix="CS336SYS")
