"""Options: their declaration with the effects that they have, and the reading of their values."""

import copy
import enum
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

from cs336sys.errors import UsageError, choose_from, did_you_mean
from cs336sys.settings.user_code import is_file, is_user_code, named_object, source_file, split_reference


class Effect(enum.StrEnum):
    """An effect of an option, as errors say it; a settings file that no user has named sets harmless options alone."""

    HARMLESS = "is harmless"
    READS_FILE = "reads a file"
    WRITES_FILE = "writes a file"
    RUNS_CODE = "names code to run"
    CONNECTS = "opens connections"
    UNDECLARED = "does not declare what it may do"


def _declared(effect: Effect, *names: str, **settings: Any) -> Any:
    option = typer.Option(*names, **settings)
    option.effect = effect
    return option


# An option declared by typer.Option itself is Effect.UNDECLARED, and set by the settings files that users name alone.
setting = functools.partial(_declared, Effect.HARMLESS)
reads_file = functools.partial(_declared, Effect.READS_FILE)
writes_file = functools.partial(_declared, Effect.WRITES_FILE)
runs_code = functools.partial(_declared, Effect.RUNS_CODE)
connects = functools.partial(_declared, Effect.CONNECTS)


def effect_of(declaration: Any) -> Effect:
    """Return the effect that an option's declaration names."""
    return getattr(declaration, "effect", Effect.UNDECLARED)


# No option needs larger numbers: no machine holds as many tokens, or does as many FLOP/s.
LARGEST_WHOLE_NUMBER = 10**12
LARGEST_NUMBER = 1e18

# Names of the values of options in help, by their types. A flag has none.
_VALUE_WORDS = {list: "<a,b>", Sequence: "<a,b>", bool: " ", int: "<int>", float: "<number>", Path: "<file>"}


def with_read_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as typer should see it: with every option of its groups, read by callbacks.

    A group is a dataclass each of whose fields is an option, annotated as one. The parameter that takes it has an
    instance as its default, which holds the defaults of the options.

    The returned function has three attributes. ``read_options`` makes the groups and checks options as the command
    does; ``declared`` has each option's declaration by the name of its parameter, ``parameters`` types and defaults.
    """
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    parameters: dict[str, inspect.Parameter] = {}
    for parameter in inspect.signature(command).parameters.values():
        members = [parameter]
        if is_dataclass(parameter.annotation):
            group, defaults = parameter.annotation, parameter.default
            groups[parameter.name] = group
            members = [
                parameter.replace(name=field.name, annotation=field.type, default=getattr(defaults, field.name))
                for field in fields(group)
            ]
        parameters |= {member.name: member for member in members}
        panel = getattr(parameter.annotation, "panel", None)
        options += [_read_by_callback(member, panel) for member in members]

    # Options are Annotated[type, declaration].
    declared = {option.name: get_args(option.annotation)[1] for option in options if get_args(option.annotation)}

    def read(values: dict[str, Any]) -> dict[str, Any]:
        """Return the command's arguments for the options' values: those of a group become one instance of it."""
        values = dict(values)
        _refuse_one_file_for_two(values, declared)
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return values

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**read(values))

    run.read_options = read  # type: ignore[attr-defined]  # for callers without typer
    run.declared, run.parameters = declared, parameters  # type: ignore[attr-defined]
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
    """Raise a UsageError where an option would write a file that another writes or reads."""
    written: dict[str, str] = {}
    input_paths = []
    for name, value in values.items():
        paths = [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path)]
        if effect_of(declared.get(name)) is not Effect.WRITES_FILE:
            input_paths += paths
            continue
        for path in paths:
            if str(path) != "-" and not path.is_dir():  # Both take the output of several options.
                option = f"--{name.replace('_', '-')} {path}"
                other = written.setdefault(os.path.realpath(path), option)
                if other != option:
                    raise UsageError(f"{other} and {option}: one file cannot hold both; give another")
    for file in map(os.path.realpath, input_paths):
        if file in written:
            raise UsageError(f"{written[file]}: would overwrite an input file; give another name")


def choice(
    names: Collection[str], help: str | None = None, declare: Callable[..., Any] = setting, **settings: Any
) -> Any:
    """Declare an option that takes one of the names or, if it is a list, several; without ``help``, help lists them.

    ``declare`` declares the option with its effect. With ``parser`` it takes more than these names, which shells offer.
    """
    help = f"{', '.join(names)}." if help is None else help
    return declare(help=help, autocompletion=among(names), **{"parser": one_of(names)} | settings)


def name_or_code(names: Collection[str], help: str, **settings: Any) -> Any:
    """Declare an option that takes one of the names, or several, and functions of the user's; names are harmless."""

    def read(text: str) -> str:
        return read_function(text) if is_user_code(text) or is_file(text) else one_of(names)(text)

    option = choice(names, help, runs_code, parser=read, **settings)
    option.harmless_values = names
    return option


def read_function(text: str) -> str:
    """Return an option's value, FILE.py:NAME, or raise a UsageError if the file, which is not run, lacks the name."""
    file, name = source_file(text), split_reference(text)[1]
    # An object that Python has passed (here:NAME) is there already, and its NAME, which we made up, stands in no file.
    if file.suffix == ".py" and named_object(text) is None:
        source = file.read_text(encoding="utf-8", errors="replace")
        # Any mention of NAME may define or import it, and so may code that computes names.
        if not re.search(rf"\b{name}\b|import \*|\b(__getattr__|globals|locals|vars|setattr|exec)\b", source):
            functions = re.findall(r"^(?:class|(?:async )?def) (\w+)", source, flags=re.M)
            listed = ", ".join(functions) or "no function"
            raise UsageError(f"'{text}': {file.name} has no {name}; it has {listed}{did_you_mean(name, functions)}")
    return text


def _read_by_callback(parameter: inspect.Parameter, panel: str | None) -> inspect.Parameter:
    """Return the option in this panel of the help, with a short word for its value, which a callback reads.

    The value is read by the option's ``parser``, or as a number between its ``min`` and ``max`` (without these, our
    largest numbers above); other options have their text. Typer itself, which sees texts alone, words errors
    differently from version to version, and takes inf and nan.
    """
    kind, *metadata = get_args(parameter.annotation) or (None,)  # Of Annotated[kind, option].
    if not metadata or not isinstance(metadata[0], OptionInfo):
        return parameter  # an argument, or typer's context
    # A copy, because commands share declarations.
    types, option, default = types_in(kind), copy.copy(metadata[0]), parameter.default
    option.rich_help_panel = option.rich_help_panel or panel
    option.metavar = option.metavar or next(
        (word for value_type, word in _VALUE_WORDS.items() if value_type in types), "<name>"
    )
    if option.show_default is True:
        option.show_default = default not in (None, [], ())  # These say nothing.
    if Path in types:
        # Typer before 0.29 makes a path of a text only when it calls the command; slurm reads options and calls none.
        option.path_type = Path  # type: ignore[assignment]  # it takes any class
    convert = option.parser or _number_reader(types, option)
    if convert is not None:
        is_list = bool({list, Sequence} & types)
        # A list that is empty by default may be left out; of any other, an empty text is a mistake.
        option.callback = _callback(convert, is_list=is_list, may_be_empty=is_list and not default)
        option.parser = option.min = option.max = None  # The callback has them; typer would read and check again.
        kind = list[str] if is_list else str
        if type(None) in types:
            kind = kind | None
        # Typer gets texts, so the default becomes one, too, which the callback reads like the user's.
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


def _number_reader(types: set[Any], option: OptionInfo) -> Callable[[str], float] | None:
    """Return the function that reads an option's numbers within their bounds; None where its values are no numbers."""
    if not {float, int} & types:
        return None
    is_whole = float not in types
    largest = LARGEST_WHOLE_NUMBER if is_whole else LARGEST_NUMBER
    highest = largest if option.max is None else option.max
    return between(-highest if option.min is None else option.min, highest, is_whole=is_whole)


def _callback(convert: Callable[[str], Any], *, is_list: bool, may_be_empty: bool) -> Callable[..., Any]:
    """Return typer's callback of an option: it reads texts by ``convert``, and keeps None or, if allowed, no values."""

    def read(param: typer.CallbackParam, value: Any) -> Any:
        if value is None or (may_be_empty and not value):
            return value
        return (split_list if is_list else read_value)(value, param.opts[0], convert)

    return read


Value = TypeVar("Value")


def split_list(values: Sequence[str], option: str, convert: Callable[[str], Value]) -> list[Value]:
    """Read each value of a list option once, from ``a,b,c``, repeated options or both, or raise a UsageError."""
    converted = [read_value(part.strip(), option, convert) for value in values for part in value.split(",")]
    if not converted:
        raise UsageError(f"{option} needs at least one value")
    return list(dict.fromkeys(converted))


def read_value(text: str, option: str, convert: Callable[[str], Value]) -> Value:
    """Read the value of an option that takes a single one, or raise a UsageError where ``convert`` refuses it."""
    try:
        return convert(text)
    except ValueError as error:
        # Ours may begin with the text, as those of read_function do; others are of int() and float().
        rule = str(error).removeprefix(f"'{text}'").lstrip(": ") if isinstance(error, UsageError) else "not a number"
        raise UsageError(f"{option} '{text}': {rule}") from error


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """Return a converter for :func:`split_list` that takes only these names."""

    def convert(text: str) -> str:
        if text not in names:
            raise UsageError(choose_from(text, names))
        return text

    return convert


def between(lowest: float, highest: float, *, is_whole: bool = False) -> Callable[[str], Any]:
    """Return a converter for :func:`split_list` that takes numbers, or only whole ones, ``1e3`` and ``1000``."""

    def convert(text: str) -> Any:
        value = _read_whole(text) if is_whole else _read_finite(text)
        if value < lowest and highest >= 1e9:  # Nobody reaches that maximum, so the error need not name it.
            raise UsageError(f"must be at least {lowest:g}")
        if not lowest <= value <= highest:
            raise UsageError(f"must be between {lowest:g} and {highest:g}")
        return value

    return convert


def _read_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        exact = _read_finite(text)  # 1e3 and 1000.0 are whole, too; int() above keeps all digits of larger ones.
        if int(exact) != exact:
            raise UsageError("must be a whole number") from None
        return int(exact)


def _read_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise UsageError("must be a finite number")
    return value


def among(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return a function that completes ``a,b,...`` in a shell by the names that do not stand there already."""

    def complete(incomplete: str) -> list[str]:
        earlier, comma, last = incomplete.rpartition(",")
        return [f"{earlier}{comma}{name}" for name in names if name.startswith(last) and name not in earlier.split(",")]

    return complete


_BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTE_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def byte_count(text: str) -> int:
    """Read ``512``, ``8B``, ``1.5MB`` (1,500,000) or ``1MiB`` (1,048,576), or raise a UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B?)", text.upper())
    if match is None or match[2] not in _BYTE_UNITS:
        raise UsageError("write a size as 8B, 10KB, 1MB (1e6 bytes) or 1MiB (2^20 bytes)")
    count = float(match[1]) * _BYTE_UNITS[match[2]]
    if not 1 <= count <= LARGEST_NUMBER or count != int(count):
        raise UsageError("must be a whole number of bytes, between 1 and 1e18")
    return int(count)


def read_memory_limit(text: str, option: str = "--memory-limit") -> float:
    """Read the bytes of ``130GiB``, ``140GB`` or ``80G`` (GiB, as Slurm and Docker count), or raise a UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([KMGT])(I?B)?", text.strip().upper())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise UsageError(f"{option} '{text}': give a size such as 130GiB, 140GB, 512MiB or 80G (GiB)")
    return float(match[1]) * _BYTE_UNITS[match[2] + (match[3] or "IB")]
