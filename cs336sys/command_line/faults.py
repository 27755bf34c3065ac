"""End a command that cannot go on: one sentence on standard error and an exit code, for all commands alike."""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import typer

from cs336sys import errors
from cs336sys.processes import started_outside
from cs336sys.results.foreign import printable
from cs336sys.settings.course_package import telling_import_errors
from cs336sys.tables.outputs import writing_stdout


def say(sentence: str) -> None:
    """Write a line to standard error, if that can be written: no measurement is lost because its log is."""
    with contextlib.suppress(OSError):
        typer.echo(printable(sentence), err=True)  # Strangers may have named files and ranges.


def exit_code_of(run: Callable[[], Any]) -> int:
    """Run a command to its end, print its error, and return its exit code."""
    try:
        with writing_stdout(), telling_import_errors():
            code = run()
    except errors.ReaderLeft as left:
        return left.exit_code
    except errors.SENTENCES as error:
        if errors.DEBUG_VARIABLE in os.environ and error.__cause__ is not None:  # Made of another, which it shows.
            traceback.print_exc()
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return interruption_code(interrupt)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich raises it where nobody reads the help that it prints.
            return errors.READER_LEFT
        raise
    except Exception as error:
        if (sentence := sentence_of(error)) is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            # A group without a command: the message is its help, and empty where rich has printed that already.
            message = error.format_message().strip()  # type: ignore[attr-defined]
            typer.echo(message or None, err=True, nl=bool(message))  # No empty line.
        else:
            say(f"error: {sentence}")
        return getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 0  # Out of standalone mode typer returns a typer.Exit's code.


def sentence_of(error: Exception) -> str | None:
    """Return the sentence for an error that typer raises, for an unknown option with the nearest; None for others."""
    # They are click's or, by typer's version, its own copies of click's: no type to name covers both.
    if not hasattr(error, "format_message"):
        return None
    if type(error).__name__ == "NoSuchOption":
        name, context = error.option_name, error.ctx  # type: ignore[attr-defined]
        parameters = context.command.params if context else ()
        options = [option for parameter in parameters for option in parameter.opts if option.startswith("--")]
        return f"no such option: {name}{errors.did_you_mean(name, options)}"
    message = error.format_message().strip()
    return f"{message[:1].lower()}{message[1:].rstrip('.')}"


def interruption_code(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code after Ctrl-C or SIGTERM."""
    return errors.TERMINATED if isinstance(interrupt, errors.Terminated) else errors.INTERRUPTED


def end_like_ctrl_c_on_sigterm() -> None:
    """Let SIGTERM raise :class:`errors.Terminated` in this process from now on, once: batch systems send several.

    It still ends ranks that torchrun started at once: torchrun sends it where another rank has failed, and a rank that
    waits for that one in a collective would raise nothing.
    """
    identity = None
    with contextlib.suppress(errors.UsageError):  # A command that starts ranks says what is wrong with their variables.
        identity = started_outside()
    if identity is None:
        signal.signal(signal.SIGTERM, _terminate)


@contextlib.contextmanager
def interruptions_deferred() -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM that come during this context at its end."""
    arrived: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {}
    # Python runs handlers in its main thread alone, which alone may set them.
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # SIG_IGN and SIG_DFL are no functions: an ignored signal stays ignored, and one that ends the process still does.
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda *arguments: arrived.append(arguments))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handlers[number](number, frame)


def _terminate(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise errors.Terminated


def open_closed_streams() -> None:
    """Open standard streams that are closed (``>&-``), or the next files to be opened would become them.

    ``sys.stdout`` stays None, so that results are refused; the log is discarded.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is that of the closed stream. Workers inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        # print and warnings would take standard output in its place.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
