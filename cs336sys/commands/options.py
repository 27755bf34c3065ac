"""Options that several commands share, and the reading of their values."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cs336sys.errors import UsageError
from cs336sys.report.outputs import FORMATS

FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        help=f"Output format: {', '.join(FORMATS)}. Default: table on a terminal, markdown otherwise.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the result to this file instead of stdout.")
]
SaveOption = Annotated[
    Path | None, typer.Option("--save", help="Append every cell with its raw samples to this .jsonl file.")
]


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer should see it: with the options of every group among its parameters in the group's place.

    A group is a dataclass each of whose fields is an option, annotated as one. The parameter that takes it has an
    instance as its default, which holds the defaults of the options.
    """
    groups: dict[str, Any] = {}
    options = []
    for parameter in inspect.signature(command).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            for field in fields(parameter.annotation):
                default = getattr(parameter.default, field.name)
                options.append(parameter.replace(name=field.name, annotation=field.type, default=default))
        else:
            options.append(parameter)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        read = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **read)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # what inspect.signature looks for
    return run


Value = TypeVar("Value")


def split_list(values: Sequence[str], option: str, convert: Callable[[str], Value]) -> list[Value]:
    """Values of a list option given as ``a,b,c``, by repetition, or both; repeated values are dropped.

    Raises:
        UsageError: nothing was given, or ``convert`` refuses a value.
    """
    converted = []
    for text in (part.strip() for value in values for part in value.split(",")):
        try:
            converted.append(convert(text))
        except ValueError as error:
            rule = str(error) if isinstance(error, UsageError) else "not a number"
            raise UsageError(f"{option} '{text}': {rule}") from error
    if not converted:
        raise UsageError(f"{option} needs at least one value")
    return list(dict.fromkeys(converted))


def check_choice(value: str, option: str, choices: Sequence[str]) -> str:
    """The value of an option that takes one name.

    Raises:
        UsageError: it is none of the choices.
    """
    return split_list([value], option, one_of(choices))[0]


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """A converter for :func:`split_list` that takes only the given names."""

    def convert(text: str) -> str:
        if text not in choices:
            raise UsageError(f"choose from {', '.join(choices)}")
        return text

    return convert


def at_least(minimum: int) -> Callable[[str], int]:
    """A converter for :func:`split_list` that takes whole numbers from ``minimum`` on."""

    def convert(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise UsageError(f"must be at least {minimum}")
        return number

    return convert


def between(lowest: float, highest: float) -> Callable[[str], float]:
    """A converter for :func:`split_list` that takes numbers from ``lowest`` to ``highest``."""

    def convert(text: str) -> float:
        number = float(text)
        if not lowest <= number <= highest:
            raise UsageError(f"must be between {lowest:g} and {highest:g}")
        return number

    return convert


_BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTE_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def byte_count(text: str) -> int:
    """A converter for :func:`split_list` that takes ``512``, ``8B``, ``1.5MB`` (1,500,000) and ``1MiB`` (1,048,576)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B?)", text.upper())
    if match is None or match[2] not in _BYTE_UNITS:
        raise UsageError("write a size as 8B, 10KB, 1MB (1e6 bytes) or 1MiB (2^20 bytes)")
    count = float(match[1]) * _BYTE_UNITS[match[2]]
    if count < 1 or count != int(count):
        raise UsageError("must be a whole number of bytes, at least 1")
    return int(count)
