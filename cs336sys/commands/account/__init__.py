"""``cs336sys account``: what training needs, on paper. Arithmetic without a GPU and without torch."""

from typing import ClassVar

import typer

from cs336sys.command_line.invocation import LazyGroup

_SUBCOMMANDS = ("memory", "activations", "attention", "flops", "buckets", "parallel", "xxl", "scaling", "step")


class AccountCommands(LazyGroup):
    modules: ClassVar = dict.fromkeys(_SUBCOMMANDS, "cs336sys.commands.account.subcommands")


account = typer.Typer(
    name="account", cls=AccountCommands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@account.callback()
def _account() -> None:
    """Derive memory, FLOPs and communication on paper: every number with its formula, and with the question it answers.

    cs336sys account memory --size xl --world-size 2 --strategy none,optimizer,fsdp

    cs336sys account parallel --strategy fsdp-tp --tokens 131072 --plot parallel.png
    """
