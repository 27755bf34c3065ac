"""Errors that end a command early with one sentence instead of a traceback, and Ctrl-C and SIGTERM."""

from collections.abc import Collection

# 128 and the number of SIGINT, SIGPIPE and SIGTERM, as shells count.
INTERRUPTED = 130
READER_LEFT = 141
TERMINATED = 143

# Set where the tracebacks of the user's own code are asked for, and of lost processes: a sentence stands for them
# otherwise.
DEBUG_VARIABLE = "CS336SYS_DEBUG"


class UsageError(ValueError):
    """A request that makes no sense: the command exits with 2."""

    exit_code = 2


class CapabilityError(RuntimeError):
    """A request that this machine or installation cannot serve: the command exits with 3."""

    exit_code = 3


class UserCodeError(RuntimeError):
    """A function of the user (``--model``, ``--loss``, ...) cannot be used as it is; the message names its line."""

    exit_code = 1


class CaptureError(CapabilityError):
    """Work cannot be captured in a CUDA graph, as was noticed on the way: the process should compute nothing more."""


class LostProcessError(RuntimeError):
    """A process that this one works with died or hangs. The first line says which, and no traceback explains it."""


class OutputError(RuntimeError):
    """A result could not be written, to a file or to standard output: the command exits with 1."""

    exit_code = 1


class ReaderLeft(OutputError):
    """Nobody reads standard output any more (``cs336sys ... | head -1``): the command ends without a word."""

    exit_code = READER_LEFT


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what Ctrl-C does, but for the exit code."""


def choose_from(value: str, names: Collection[str]) -> str:
    """Suggest names for a value that is none of them: ``choose from fp32, bf16; did you mean bf16?``"""
    return f"choose from {', '.join(names)}{did_you_mean(value, names)}"


def require_known(noun: str, value: str, names: Collection[str]) -> None:
    """Raise a UsageError for a value that is none of the names."""
    if value not in names:
        raise UsageError(f"unknown {noun} '{value}': {choose_from(value, names)}")


def did_you_mean(value: str, names: Collection[str]) -> str:
    """``; did you mean bf16?``, or nothing if no name is near."""
    import difflib

    nearest = difflib.get_close_matches(value.lower(), names, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def a_value(value: object) -> str:
    """Name a value by its type, for messages: ``a list``, ``an Identity``, ``None``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
