"""``cs336sys account``: what training needs, on paper. Arithmetic without a GPU and without torch."""

from typing import ClassVar

import typer

from cs336sys.command_line.invocation import LazyGroup

# Subjects, and the commands that each module has.
_MODULES = {
    "model": ("memory", "activations", "attention", "flops"),
    "communication": ("buckets", "parallel", "xxl"),
    "scaling": ("scaling",),
    "step": ("step",),
}


class AccountCommands(LazyGroup):
    modules: ClassVar = {
        name: f"cs336sys.commands.account.options.{module}" for module, names in _MODULES.items() for name in names
    }


account = typer.Typer(
    name="account", cls=AccountCommands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@account.callback()
def _account() -> None:
    """Memory, FLOPs and communication on paper: every number with its formula, and with the question it answers.

    cs336sys account memory --size xl --world-size 2 --strategy none,optimizer,fsdp

    cs336sys account parallel --strategy fsdp-tp --tokens 131072 --plot parallel.png
    """


MOST_DEVICES = 1_000_000  # All meshes of a number of devices are tried: at 10^12 that goes on for hours.
