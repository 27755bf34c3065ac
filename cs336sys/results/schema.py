"""The JSON Schema of results files, made from the dataclasses that are written to them, and of ``--format json``."""

import types
import typing
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cs336sys.results.model import SCHEMA_VERSION, TABLES_SCHEMA_VERSION, Cell, Run, Samples

_NAMES = {str: "string", type(None): "null"}

_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}  # JSON has no numbers for these.


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT = {"type": "string"}
_SCALAR = {"anyOf": [{"type": json_type} for json_type in ("string", "number", "boolean", "null")]}
_ROW = {"type": "object", "additionalProperties": _SCALAR}
_TABLE = _object({"name": _TEXT, "title": _TEXT, "rows": _array(_ROW), "notes": _array(_TEXT)})
_TABLES = _object({"schema_version": {"const": TABLES_SCHEMA_VERSION}, "tables": _array(_TABLE)})


def results_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a results file's line, with that of ``--format json`` as ``tables``."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of a results file of cs336sys, version {SCHEMA_VERSION}",
        "oneOf": [{"$ref": "#/$defs/run"}, {"$ref": "#/$defs/cell"}],
        "$defs": {"run": _record(Run), "cell": _record(Cell), "samples": _of_dataclass(Samples), "tables": _TABLES},
    }


def _record(kind: type) -> dict[str, Any]:
    """Return the schema of a line: of a dataclass, with the version and the kind of the record."""
    described = _of_dataclass(kind)
    marks = {"schema_version": {"const": SCHEMA_VERSION}, "kind": {"const": kind.__name__.lower()}}
    return described | {"properties": marks | described["properties"], "required": [*marks, *described["required"]]}


def _of_dataclass(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    described = _object({member.name: _of_type(hints[member.name]) for member in fields(kind)})
    # read_results wants all others whatever their default; a cell that is ok may lack its reason.
    return described | {"required": [name for name in described["required"] if name != "reason"]}


def _of_type(kind: Any) -> dict[str, Any]:
    """Return the schema of a field's type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if kind is float:
        return _NUMBER
    if kind is Samples:
        return {"$ref": "#/$defs/samples"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:  # tuple[X, ...]: all members are of one type.
        return _array(_of_type(arguments[0]))
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_type(arguments[1])}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_of_type(alternative) for alternative in arguments]}
    return {"type": _NAMES[kind]}
