"""Options that several commands share, and the reading of their values."""

import copy
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from typer.models import OptionInfo

from cs336sys.command_line.options.effects import Effect, effect_of, runs_code, setting
from cs336sys.errors import UsageError, choose_from, did_you_mean
from cs336sys.settings.user_code import (
    is_file,
    is_user_code,
    named_object,
    read_reference,
    source_file,
    split_reference,
)

# Beyond these no option means anything: no machine holds as many tokens, or does as many FLOP/s.
LARGEST_WHOLE_NUMBER = 10**12
LARGEST_NUMBER = 1e18
# A refusal of small numbers names no greatest one from here on.
_OUT_OF_REACH = 1e9

# What help calls the value of an option, by its type. A flag has none.
_VALUE_WORDS = {list: "<a,b>", Sequence: "<a,b>", bool: " ", int: "<int>", float: "<number>", Path: "<file>"}


def with_read_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer should see it: with every option of its groups, and with callbacks that read their values.

    A group is a dataclass each of whose fields is an option, annotated as one. The parameter that takes it has an
    instance as its default, which holds the defaults of the options.

    The attribute ``read_options`` of what is returned makes the groups and checks options as the command does. Its
    ``declared`` has each option's declaration by the name of its parameter, its ``parameters`` types and defaults.
    """
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    plain: dict[str, inspect.Parameter] = {}
    for parameter in inspect.signature(command).parameters.values():
        members = {parameter.name: parameter}
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            members = {
                field.name: parameter.replace(
                    name=field.name, annotation=field.type, default=getattr(parameter.default, field.name)
                )
                for field in fields(parameter.annotation)
            }
        plain |= members
        panel = getattr(parameter.annotation, "panel", None)
        options += [_read_by_callback(option, panel) for option in members.values()]

    declared = {option.name: get_args(option.annotation)[1] for option in options if get_args(option.annotation)}

    def read(values: dict[str, Any]) -> dict[str, Any]:
        values = dict(values)
        _refuse_one_file_for_two(values, declared)
        options_of_groups = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return values | options_of_groups

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**read(values))

    run.read_options = read  # type: ignore[attr-defined]  # for who has the command alone
    run.declared, run.parameters = declared, plain  # type: ignore[attr-defined]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # what inspect.signature looks for
    return run


def refuse_given(ctx: typer.Context, names: Collection[str], why: str) -> None:
    """Raise a UsageError if one of these parameters was given on the command line."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name)
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[0]}: {why}; leave it out")


def is_given(context: typer.Context, option: str) -> bool:
    """Return whether the user has given this option, by its parameter's name, on the command line or by a variable."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _refuse_one_file_for_two(values: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
    """Raise a UsageError where an option would write the file of another: the table over the results, or the text."""
    written: dict[str, str] = {}
    other_paths = []
    for name, value in values.items():
        paths = [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path)]
        if effect_of(declared.get(name)) is not Effect.WRITES_FILE:
            other_paths += paths
            continue
        for path in paths:
            if str(path) != "-" and not path.is_dir():
                option = f"--{name.replace('_', '-')} {path}"
                other = written.setdefault(os.path.realpath(path), option)
                if other != option:
                    raise UsageError(f"{other} and {option}: one file cannot hold both; give another")
    for path in other_paths:
        if os.path.realpath(path) in written:
            raise UsageError(f"{written[os.path.realpath(path)]}: would overwrite an input file; give another name")


def choice(
    names: Collection[str], help: str | None = None, declare: Callable[..., Any] = setting, **settings: Any
) -> Any:
    """An option that takes one of the names or, if it is a list, several. Its help lists them unless it says otherwise.

    Args:
        declare: declares what the option may do, as :func:`setting` does.
        settings: of ``typer.Option``; with ``parser`` it takes more than these names, which shells offer.
    """
    help = f"{', '.join(names)}." if help is None else help
    return declare(help=help, autocompletion=among(names), **{"parser": one_of(names)} | settings)


def name_or_code(names: Collection[str], help: str, **settings: Any) -> Any:
    """An option that takes one of the names, or several, and functions of the user's; the names are harmless."""

    def read(text: str) -> str:
        return read_function(text) if is_user_code(text) or is_file(text) else one_of(names)(text)

    option = choice(names, help, runs_code, parser=read, **settings)
    option.harmless_values = names
    return option


# In a file that has one of these, names may come from where its text does not say.
_COMPUTED_NAMES = r"import \*|\b(__getattr__|globals|locals|vars|setattr|exec)\b"


def read_function(text: str) -> str:
    """Return an option's value, which names a function in a file or module that is there; nothing of it is run.

    Raises:
        UsageError: it names none.
    """
    file, name = source_file(read_reference(text)), split_reference(text)[1]
    if file.suffix == ".py" and named_object(text) is None:
        source = file.read_text(encoding="utf-8", errors="replace")
        if not re.search(rf"\b{name}\b|{_COMPUTED_NAMES}", source):
            functions = re.findall(r"^(?:class|(?:async )?def) (\w+)", source, flags=re.M)
            listed = ", ".join(functions) or "no function"
            raise UsageError(f"'{text}': {file.name} has no {name}; it has {listed}{did_you_mean(name, functions)}")
    return text


def _read_by_callback(parameter: inspect.Parameter, panel: str | None) -> inspect.Parameter:
    """The option in this panel of the help, with a short word for its value, which a callback reads.

    The value is read by the option's ``parser``, or as a number between its ``min`` and ``max`` (without these, within
    what means anything); other options have their text. Typer itself, which sees texts alone, words errors differently
    from version to version, and takes inf and nan.
    """
    kind, *metadata = get_args(parameter.annotation) or (None,)
    if not metadata or not isinstance(metadata[0], OptionInfo):
        return parameter
    types, option, default = types_in(kind), copy.copy(metadata[0]), parameter.default
    option.rich_help_panel = option.rich_help_panel or panel
    option.metavar = option.metavar or next(
        (word for value_type, word in _VALUE_WORDS.items() if value_type in types), "<name>"
    )
    if option.show_default is True:
        option.show_default = default not in (None, [], ())
    if Path in types:
        # typer before 0.29 makes a path of a text only when it calls the command; slurm reads options without.
        option.path_type = Path  # type: ignore[assignment]  # it takes any class
    convert = option.parser or _read_number(types, option)
    if convert is not None:
        is_list = bool({list, Sequence} & types)
        option.callback = _callback(convert, is_list=is_list, may_be_empty=not default)
        option.parser = option.min = option.max = None
        kind = list[str] if is_list else str
        if type(None) in types:
            kind = kind | None
        if is_list and default is not None:
            default = [",".join(map(_as_text, default))] if default else []
        elif default is not None:
            default = _as_text(default)
    elif Sequence in types:
        # Typer knows lists alone.
        kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]  # a type that is computed
    return parameter.replace(annotation=Annotated[kind, option], default=default)


def _as_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def types_in(kind: Any) -> set[Any]:
    """Return a type and all types that it is made of."""
    return {kind, get_origin(kind)}.union(*map(types_in, get_args(kind)))


def _read_number(types: set[Any], option: OptionInfo) -> Callable[[str], float] | None:
    if float in types:
        highest = LARGEST_NUMBER if option.max is None else option.max
        return between(-highest if option.min is None else option.min, highest)
    if int in types:
        most = LARGEST_WHOLE_NUMBER if option.max is None else int(option.max)
        return at_least(-most if option.min is None else int(option.min), most)
    return None


def _callback(convert: Callable[[str], Any], *, is_list: bool, may_be_empty: bool) -> Callable[..., Any]:
    def read(param: typer.CallbackParam, value: Any) -> Any:
        if value is None or (is_list and may_be_empty and not value):
            return value
        return (split_list if is_list else read_value)(value, param.opts[0], convert)

    return read


Value = TypeVar("Value")


def split_list(values: Sequence[str], option: str, convert: Callable[[str], Value]) -> list[Value]:
    """Values of a list option given as ``a,b,c``, by repetition, or both; repeated values are dropped.

    Raises:
        UsageError: nothing was given, or ``convert`` refuses a value.
    """
    converted = [read_value(part.strip(), option, convert) for value in values for part in value.split(",")]
    if not converted:
        raise UsageError(f"{option} needs at least one value")
    return list(dict.fromkeys(converted))


def read_value(text: str, option: str, convert: Callable[[str], Value]) -> Value:
    """The value of an option that takes a single one: of ``a,b`` all but the first would be dropped in silence.

    Raises:
        UsageError: ``convert`` refuses it.
    """
    try:
        return convert(text)
    except ValueError as error:
        rule = str(error).removeprefix(f"'{text}'").lstrip(": ") if isinstance(error, UsageError) else "not a number"
        raise UsageError(f"{option} '{text}': {rule}") from error


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """A converter for :func:`split_list` that takes only the given names."""

    def convert(text: str) -> str:
        if text not in names:
            raise UsageError(choose_from(text, names))
        return text

    return convert


def at_least(minimum: int, most: int = LARGEST_WHOLE_NUMBER) -> Callable[[str], int]:
    """A converter for :func:`split_list` that takes whole numbers from ``minimum`` on, ``1e3`` and ``1000``."""
    return between(minimum, most, _read_whole)


def between(lowest: float, highest: float, read: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """A converter for :func:`split_list` that takes numbers from ``lowest`` to ``highest``, which ``read`` reads."""

    def convert(text: str) -> Any:
        value = (read or _read_finite)(text)
        if value < lowest and highest >= _OUT_OF_REACH:
            raise UsageError(f"must be at least {lowest:g}")
        if not lowest <= value <= highest:
            raise UsageError(f"must be between {lowest:g} and {highest:g}")
        return value

    return convert


def _read_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        exact = _read_finite(text)
        if int(exact) != exact:
            raise UsageError("must be a whole number") from None
        return int(exact)


def _read_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise UsageError("must be a finite number")
    return value


# What a shell offers where a value is to be typed, called with what stands there so far; it offers files itself.
Completion = Callable[[str], list[str]]


def among(names: Collection[str]) -> Completion:
    """For an option that takes one of the names, or several after commas: those that are not given yet."""

    def complete(incomplete: str) -> list[str]:
        earlier, comma, last = incomplete.rpartition(",")
        return [f"{earlier}{comma}{name}" for name in names if name.startswith(last) and name not in earlier.split(",")]

    return complete
