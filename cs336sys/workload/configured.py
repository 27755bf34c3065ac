"""What every workload is: plain data that a results file holds, and gets back."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from cs336sys.errors import UsageError, choose_from
from cs336sys.sizes import ModelSize
from cs336sys.user_code import is_user_code

# A size's fields in a configuration, which calls its name "size"; its own default precision decides nothing.
_SHAPE = tuple(field.name for field in fields(ModelSize) if field.name not in ("name", "precision"))


@dataclass(frozen=True)
class Configured:
    """What a cell measures: its fields are the cell's configuration in the results, and come back from it."""

    def configuration(self) -> dict[str, Any]:
        """All fields as one flat dictionary of JSON scalars; of a size or of another workload, their fields."""
        flat: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, ModelSize):
                flat |= {"size": value.name} | {name: getattr(value, name) for name in _SHAPE}
            else:
                flat |= value.configuration() if isinstance(value, Configured) else {field.name: value}
        return flat

    @classmethod
    def from_configuration(cls, configuration: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`configuration`; what is no field, like the number of a round, is passed over."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.type is ModelSize:
                shape = {name: configuration[name] for name in _SHAPE if name in configuration}
                values[field.name] = ModelSize(configuration["size"], **shape)
            elif isinstance(field.type, type) and issubclass(field.type, Configured):
                values[field.name] = field.type.from_configuration(configuration)
            elif field.name in configuration:
                values[field.name] = configuration[field.name]
        return cls(**values)


def check_choices(workload: Configured, choices: Mapping[str, Collection[str]]) -> None:
    for field, names in choices.items():
        value = getattr(workload, field)
        if value not in names and not (field == "optimizer" and is_user_code(value)):
            raise UsageError(f"unknown {field} '{value}': {choose_from(value, names)}")


DEVICES = ("auto", "cuda", "cpu")
