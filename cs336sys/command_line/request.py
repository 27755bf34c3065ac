"""Calls of commands with values instead of a command line, for the functions of the Python API."""

import keyword
import numbers
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336sys.command_line.faults import say
from cs336sys.errors import UsageError, a_value, did_you_mean
from cs336sys.results.recording import current_recording
from cs336sys.settings.user_code import TO_FILE, name_object

# Commands that measure in one process, which can be this one: it has functions that no other can import by name.
_MEASURED_HERE = ("bench", "memprof", "flash", "kernels")


@dataclass(frozen=True)
class Request:
    """A command, named after its group: ``("account", "memory")``, and values by :func:`keyword_of` its parameters.

    A value of None leaves the default.
    """

    command: tuple[str, ...]
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", {name: value for name, value in self.values.items() if value is not None})


def keyword_of(parameter: Any) -> str:
    """Return the name of an option in Python: ``batch_size`` of ``--batch-size``, ``from_`` of ``--from``."""
    if parameter.param_type_name != "option":
        return parameter.name
    name = next(name for name in parameter.opts if name.startswith("--"))[2:].replace("-", "_")
    return f"{name}_" if keyword.iskeyword(name) else name


class RequestParser:
    """Hands the values of a request to click, which expects a parser of a command line."""

    _opt_prefixes: frozenset[str] = frozenset()  # click asks for it

    def __init__(self, request: Request, parameters: Sequence[Any]):
        self.request = request
        self.parameters = {keyword_of(parameter): parameter for parameter in parameters}

    def parse_args(self, args: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
        """Return values by parameters' names (``args`` are none here), and record the command line that they make."""
        options: dict[str, Any] = {}
        arguments: list[str] = []
        for name, value in self.request.values.items():
            if name not in self.parameters:
                raise UsageError(f"no such option: {name}{did_you_mean(name, self.parameters)}")
            parameter = self.parameters[name]
            is_option = parameter.param_type_name == "option"
            if is_option and parameter.is_flag:
                if not isinstance(value, bool):
                    raise UsageError(f"{name}={value!r}: must be True or False")
                options[parameter.name] = value
                arguments += parameter.opts[:1] if value else parameter.secondary_opts[:1]
                continue
            if isinstance(value, bool):
                raise UsageError(f"{name}={value!r}: takes a value, not True or False")
            texts = [self._text(name, item) for item in values_of(value)]
            is_list = parameter.multiple if is_option else parameter.nargs != 1
            if not is_list and len(texts) != 1:
                raise UsageError(f"{name}={value!r}: takes one value")
            options[parameter.name] = texts if is_list else texts[0]
            arguments += [f"{parameter.opts[0]}={text}" for text in texts] if is_option else texts
        if (recording := current_recording()) is not None:
            recording.arguments = (self.request.command[0], *arguments)
        return options, [], []  # click expects left-over arguments, too, and the order of parameters

    def _text(self, name: str, value: Any) -> str:
        """Write a Python value as the command line has it: functions as FILE.py:NAME."""
        if isinstance(value, str | numbers.Real | Path) and not isinstance(value, bool):
            return str(value)
        if not callable(value):
            raise UsageError(
                f"{name}={value!r}: must be a text, a number, a path, a function of a file, or a list of them"
            )
        module = sys.modules.get(str(getattr(value, "__module__", None)))
        file, object_name = getattr(module, "__file__", None), getattr(value, "__qualname__", "")
        # A function of a module's top level, which workers can import: of a package by dotted name, else from its file.
        if module and file and object_name.isidentifier() and getattr(module, object_name, None) is value:
            return f"{module.__name__ if '.' in module.__name__ else file}:{object_name}"
        sentence = f"{name}: {a_value(value)} that worker processes cannot find by name"
        if self.request.command[0] not in _MEASURED_HERE:
            raise UsageError(f"{sentence}; {TO_FILE}")  # How to put it into a file.
        say(f"note: {sentence}: it is measured in this process, and nothing ends a cell that takes too long")
        return name_object(value)  # A name for it that this process alone knows.


def values_of(value: Any) -> list[Any]:
    """Return the values of a list, range, array or other iterable, or one value alone."""
    is_single = isinstance(value, str | bytes | Path | Mapping) or callable(value) or not isinstance(value, Iterable)
    return [value] if is_single else list(value)
