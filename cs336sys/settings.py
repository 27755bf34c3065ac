"""Settings: fields of frozen dataclasses that describe themselves. Plain data, no torch.

From a field follow its option, the option's variable and its key in a settings file, the refusal of wrong values, its
entry in a cell's configuration, columns and titles, the signature of the Python API, and its row in docs/columns.md.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self

from cs336sys.errors import UsageError, require_known
from cs336sys.user_code import is_user_code

# Panels of the help, besides that of the command's own options.
MODEL, WHAT_RUNS, MEASURING, OUTPUT = "Model", "What runs", "Measuring", "Output"


@dataclass(frozen=True)
class Needs:
    """The values that another setting must have for these ``values``, or without any for all but the default.

    ``reason`` follows option and value in the refusal, with ``{}`` for the other setting's value.
    """

    other: str
    allowed: Collection[Any]
    reason: str
    values: Collection[Any] = ()


@dataclass(frozen=True)
class Setting:
    """A field, and its description.

    Attributes:
        help: of the option; without help, there is none.
        choices: the values of a text.
        takes_code: a value may also be a function of the user.
        parse: reads a text that is none of the choices, such as several of them joined.
        minimum, maximum: of a number.
        several: the option takes a list, and a sweep has a cell for each of its values.
        panel: the panel of help.
        option: the option's name as a parameter, if that is not the field's.
        key: the name in configurations, if that is not the field's; None: it is no setting.
        header: of the column for people, if that is not the name; None: people get no column.
        is_by_size: the option has no default, the size of the model decides.
        in_titles: titles name the value even if it is the default.
        needs: what other settings must be.
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
    key: str | None = ""
    header: str | None = ""
    is_by_size: bool = False
    in_titles: bool = False
    needs: Sequence[Needs] = ()
    name: str = ""
    type: Any = None
    default: Any = None

    @property
    def flag(self) -> str:
        """Return the option: ``--batch-size``."""
        return f"--{(self.option or self.name).replace('_', '-')}"

    def read(self, value: Any) -> Any:
        """Return an allowed value as it is kept.

        Raises:
            UsageError: it is none of the choices, or out of range.
        """
        if value is not None and self.minimum is not None and value < self.minimum:
            raise UsageError(f"{self.flag} {value}: must be at least {self.minimum}")
        if value is not None and self.maximum is not None and value > self.maximum:
            raise UsageError(f"{self.flag} {value}: must be at most {self.maximum:,}")
        if self.parse is not None:
            try:
                return self.parse(value)
            except UsageError as error:
                raise UsageError(f"{self.flag} '{value}': {error}") from error
        if self.choices and not (self.takes_code and is_user_code(value)):
            require_known(self.name, value, self.choices)
        return value

    def needs_of(self, value: Any) -> list[Needs]:
        """Return what a value needs; the default needs nothing."""
        return [need for need in self.needs if value in need.values or (value != self.default and not need.values)]


def setting(default: Any = MISSING, help: str = "", **description: Any) -> Any:
    """Declare a field of a :class:`Configured` that is described as :class:`Setting` says."""
    return field(default=default, metadata={"setting": Setting(help, **description)})


def _described_fields(kind: Any) -> tuple[Setting, ...]:
    described = [(member, member.metadata.get("setting", Setting())) for member in fields(kind)]
    return tuple(
        replace(
            description,
            key=member.name if description.key == "" else description.key,
            name=member.name,
            type=member.type,
            default=member.default,
        )
        for member, description in described
    )


_settings: Callable[[Any], tuple[Setting, ...]] = functools.cache(_described_fields)


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
            if isinstance(setting.type, type) and issubclass(setting.type, Configured):
                flat |= setting.type.settings()
            elif setting.key is not None:
                flat[setting.key] = setting
        return flat

    @classmethod
    def in_panel(cls, panel: str) -> tuple[str, ...]:
        """Return the names of the settings whose options are in a panel of help."""
        return tuple(name for name, setting in cls.settings().items() if setting.panel == panel)

    @classmethod
    def from_configuration(cls, configuration: Mapping[str, Any]) -> Self:
        """Return the inverse of :meth:`configuration`; other entries, like the number of a round, are ignored."""
        values: dict[str, Any] = {}
        for setting in _settings(cls):
            if isinstance(setting.type, type) and issubclass(setting.type, Configured):
                values[setting.name] = setting.type.from_configuration(configuration)
            elif setting.key is not None and (setting.key in configuration or setting.default is MISSING):
                values[setting.name] = configuration[setting.key]
        return cls(**values)

    def check_settings(self) -> None:
        """Refuse what the fields' descriptions do not allow, and keep values as these read them.

        Raises:
            UsageError: a value is none of the choices, out of range, or needs others.
        """
        for setting in _settings(type(self)):
            object.__setattr__(self, setting.name, setting.read(getattr(self, setting.name)))
        for setting in _settings(type(self)):
            value = getattr(self, setting.name)
            for need in setting.needs_of(value):
                other = self.configuration()[need.other]
                if other not in need.allowed:
                    raise UsageError(f"{setting.flag} {value}: {need.reason.format(other)}")

    @classmethod
    def compatible(cls, values: Mapping[str, Any], offered: Mapping[str, Collection[Any]]) -> dict[str, Any]:
        """Return a cell's values with defaults for those that need a value which other cells of its sweep have.

        Args:
            values: by the names of fields; ``offered``: the values of all cells, by the same names.
        """
        compatible = dict(values)
        for name, setting in cls.settings().items():
            for need in setting.needs_of(values.get(name, setting.default)):
                lacks = need.other in values and values[need.other] not in need.allowed
                if lacks and not set(need.allowed).isdisjoint(offered[need.other]):
                    compatible[name] = setting.default
        return compatible

    def is_default(self, name: str) -> bool:
        """Return whether a setting has its default."""
        return bool(getattr(self, name) == self.settings()[name].default)


def check_choices(workload: Configured, choices: Mapping[str, Collection[str]]) -> None:
    """Raise a UsageError for a field whose value is none of its choices."""
    for name, names in choices.items():
        require_known(name, getattr(workload, name), names)
