"""Settings: fields of frozen dataclasses that describe themselves. Plain data, no torch.

From a field follow its option, variable and key in a settings file, the refusal of wrong values, its entry in a cell's
configuration, columns and titles, the signature of the Python API, and its row in docs/columns.md.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import product
from typing import Any, Self

from cs336sys.errors import UsageError, require_known
from cs336sys.settings.user_code import is_user_code

LONGEST_S = 1e6  # Of options that are times to wait: 11 days. Above 24.8 days poll(2) overflows.

# Panels of the help, besides that of the command's own options.
MODEL, WHAT_RUNS, MEASURING, OUTPUT = "Model", "What runs", "Measuring", "Output"


@dataclass(frozen=True)
class Needs:
    """The values that are ``allowed`` for the setting ``other`` where the setting with this need has one of ``values``.

    Without ``values``, each but the default has the need. ``reason``, with ``{}`` for the other value, ends a refusal.
    """

    other: str
    allowed: Collection[Any]
    reason: str
    values: Collection[Any] = ()


@dataclass(frozen=True)
class Setting:
    """A field, and its description.

    Attributes:
        help: of the option.
        choices: the texts that are allowed.
        takes_code: a value may also be a function of the user.
        parse: reads a text that is none of the choices, such as several of them joined.
        minimum, maximum: of a number.
        several: the option takes a list, and a sweep has a cell for each of its values.
        panel: the panel of help.
        option: the option's name as a parameter, if that is not the field's.
        option_default: of the option, if that is not the field's; cells that cannot have it have the field's.
        shown_default: the default as help shows it, if that is not the default itself.
        off: the option that turns a switch off, if that is not ``--no-NAME``.
        key: the name in configurations, if that is not the field's; None: it is no setting.
        header: of the column for people, if that is not the name; None: people get no column.
        is_by_size: the option has no default, the size of the model decides.
        in_titles: titles name the value even if it is the default.
        needs: the values that other settings must have.
        is_required: the default is refused where other settings have these.
        name, type, default: of the field.
    """

    help: str = ""
    choices: Collection[str] = ()
    takes_code: bool = False
    parse: Callable[[str], str] | None = None
    minimum: float | None = None
    maximum: float | None = None
    several: bool = False
    panel: str = ""
    option: str = ""
    option_default: Any = None
    shown_default: str = ""
    off: str = ""
    key: str | None = ""
    header: str | None = ""
    is_by_size: bool = False
    in_titles: bool = False
    needs: Sequence[Needs] = ()
    is_required: bool = False
    name: str = ""
    type: Any = None
    default: Any = None

    @property
    def flag(self) -> str:
        """Return the option: ``--batch-size``."""
        return f"--{(self.option or self.name).replace('_', '-')}"

    def checked(self, value: Any) -> Any:
        """Return a value as its parser makes it, or raise a UsageError if it is out of range or no choice."""
        if value is not None and self.minimum is not None and value < self.minimum:
            raise UsageError(f"{self.flag} {value}: must be at least {self.minimum}")
        if value is not None and self.maximum is not None and value > self.maximum:
            raise UsageError(f"{self.flag} {value}: must be at most {self.maximum:,}")
        # A parser reads the choices, too.
        if self.parse is not None and value is not None:
            try:
                return self.parse(value)
            except UsageError as error:
                raise UsageError(f"{self.flag} '{value}': {error}") from error
        if self.choices and not (self.takes_code and is_user_code(value)):
            require_known(self.name, value, self.choices)
        return value

    def needs_of(self, value: Any) -> list[Needs]:
        """Return what a value needs of other settings; the default needs nothing."""
        return [need for need in self.needs if value in need.values or (value != self.default and not need.values)]

    def gives_way(self, value: Any, cell: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> bool:
        """Return whether a sweep's cell takes the default in place of a value that only fits other cells of the sweep.

        ``lists`` has the values of all cells.
        """
        # Where the other setting is not as the value needs it, an option's own default gives way; a value that the user
        # chose only if another cell can have it: where none can, it stays, and its cells refuse it.
        return any(
            cell[need.other] not in need.allowed
            and (value == self.option_default or not set(need.allowed).isdisjoint(lists[need.other]))
            for need in self.needs_of(value)
            if need.other in cell
        )


def setting(default: Any = MISSING, help: str = "", **description: Any) -> Any:
    """Declare a field of a :class:`Configured` that is described as :class:`Setting` says."""
    return field(default=default, metadata={"setting": Setting(help, **description)})


def same_setting(owner: Any, name: str, default: Any = None) -> Any:
    """Declare a field as the class ``owner`` does, with another default where one is named."""
    original = owner.__dataclass_fields__[name]
    return field(default=original.default if default is None else default, metadata=original.metadata)


def _describe_fields(kind: Any) -> tuple[Setting, ...]:
    settings = []
    for member in fields(kind):
        described = member.metadata.get("setting", Setting())
        key = member.name if described.key == "" else described.key
        settings.append(replace(described, key=key, name=member.name, type=member.type, default=member.default))
    return tuple(settings)


# Annotated, because mypy takes no class for hashable.
_settings: Callable[[Any], tuple[Setting, ...]] = functools.cache(_describe_fields)


def _is_nested(setting: Setting) -> bool:
    return isinstance(setting.type, type) and issubclass(setting.type, Configured)


@dataclass(frozen=True)
class Configured:
    """A cell's settings: its fields are the cell's configuration in the results, and come back from it."""

    def configuration(self) -> dict[str, Any]:
        """Return all fields, with those of nested settings, as one flat dictionary of JSON scalars."""
        flat: dict[str, Any] = {}
        for setting in _settings(type(self)):
            value = getattr(self, setting.name)
            if isinstance(value, Configured):
                flat |= value.configuration()
            elif setting.key is not None:
                flat[setting.key] = value
        return flat

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """Return all settings that a :meth:`configuration` can have, by their keys in it."""
        flat: dict[str, Setting] = {}
        for setting in _settings(cls):
            if _is_nested(setting):
                flat |= setting.type.settings()
            elif setting.key is not None:
                flat[setting.key] = setting
        return flat

    @classmethod
    def direct_settings(cls) -> dict[str, Setting]:
        """Return the settings that are fields, without those of nested settings, by the fields' names."""
        return {setting.name: setting for setting in _settings(cls) if setting.key and not _is_nested(setting)}

    @classmethod
    def in_panel(cls, panel: str) -> tuple[str, ...]:
        """Return the names of the settings whose options are in a panel of help."""
        return tuple(name for name, setting in cls.settings().items() if setting.panel == panel)

    @classmethod
    def from_configuration(cls, configuration: Mapping[str, Any]) -> Self:
        """Build the workload of a :meth:`configuration`; entries of no setting, as a round's number, are ignored."""
        values: dict[str, Any] = {}
        for setting in _settings(cls):
            if _is_nested(setting):
                values[setting.name] = setting.type.from_configuration(configuration)
            elif setting.key is not None and (setting.key in configuration or setting.default is MISSING):
                values[setting.name] = configuration[setting.key]
        return cls(**values)

    def check_settings(self) -> None:
        """Keep each value as its setting reads it; raise a UsageError for one that is not allowed, or needs others."""
        for setting in _settings(type(self)):
            object.__setattr__(self, setting.name, setting.checked(getattr(self, setting.name)))  # It is frozen.
        configuration = self.configuration()
        for setting in _settings(type(self)):
            value = getattr(self, setting.name)
            for need in setting.needs_of(value):
                other = configuration.get(need.other)
                if other not in need.allowed:
                    text = f"{value:g}" if isinstance(value, float) else value
                    raise UsageError(f"{setting.flag} {text}: {need.reason.format(other)}")
            if setting.is_required and value == setting.default:
                for need in setting.needs:
                    other = configuration[need.other]
                    if other in need.allowed:
                        raise UsageError(f"{setting.flag}: {need.other} '{other}' needs one")

    @classmethod
    def combinations(cls, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return every combination of lists and single values, each once.

        Where a value needs another setting that only some cells have, the other cells take its default; where no cell
        has it, the value stays, and the cells refuse it.

        Args:
            values: by the names of fields, the one first that changes slowest; lists of settings that are ``several``,
                of which an empty one stands for the default.
        """
        described = cls.direct_settings()
        lists = {
            name: (value or [described[name].default]) if described[name].several else [value]
            for name, value in values.items()
        }
        cells = [dict(zip(lists, combination, strict=True)) for combination in product(*lists.values())]
        for cell in cells:
            # All are found first: a value gives way to what was chosen, not to a default that another value just took.
            yielding = [name for name, value in cell.items() if described[name].gives_way(value, cell, lists)]
            cell |= {name: described[name].default for name in yielding}
        return [dict(items) for items in dict.fromkeys(tuple(cell.items()) for cell in cells)]

    def is_default(self, name: str) -> bool:
        return bool(getattr(self, name) == self.settings()[name].default)
