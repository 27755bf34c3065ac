"""What options were called before all commands had one word for one thing: still understood, and not shown."""

from collections.abc import Mapping

# Of each command, by the names of today.
FORMER_NAMES: Mapping[str, Mapping[str, str]] = {
    "attn": {"--implementations": "--implementation", "--d-model": "--head-dim"},
    "flash": {"--implementations": "--implementation", "--heads": "--num-heads"},
    "kernels": {"--implementations": "--implementation"},
    "memprof": {"--trace": "--predict", "--no-trace": "--no-predict"},
    "allreduce": {"--iterations": "--steps"},
    # Of account.
    "attention": {"--implementations": "--implementation", "--d-model": "--head-dim"},
    "parallel": {"--batch": "--tokens"},
}


def with_todays_name(command: str | None, argument: str) -> str:
    """An argument of a command with today's name of the option that it begins with."""
    option, equals, value = argument.partition("=")
    return FORMER_NAMES.get(command or "", {}).get(option, option) + equals + value


def former_names(command: str, option: str) -> list[str]:
    """What an option was called before."""
    return [former for former, name in FORMER_NAMES.get(command, {}).items() if name == option]
