"""``cs336sys account``: what training needs, on paper. Arithmetic without a GPU and without torch."""

from typing import ClassVar

import typer

from cs336sys.commands.invocation import LazyGroup
from cs336sys.errors import UsageError

# Subjects, and the commands that each module has.
_MODULES = {
    "model": ("memory", "activations", "attention", "flops"),
    "communication": ("buckets", "parallel", "xxl"),
    "scaling": ("scaling",),
    "step": ("step",),
}


class AccountCommands(LazyGroup):
    modules: ClassVar = {
        name: f"cs336sys.commands.account.{module}" for module, names in _MODULES.items() for name in names
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


def require_positive(value: float | None, option: str) -> None:
    """Raise a UsageError for a rate that is 0 or less."""
    if value is not None and value <= 0:
        raise UsageError(f"{option} {value:g}: must be positive")


# All meshes of a number of devices are tried: at 10^12 that goes on for hours.
_MOST_DEVICES = 1_000_000


def require_triable(devices: int) -> None:
    """Raise a UsageError for more devices than whose meshes can be tried in seconds."""
    if devices > _MOST_DEVICES:
        raise UsageError(f"--devices {devices}: must be at most {_MOST_DEVICES}, whose meshes take seconds to try")
