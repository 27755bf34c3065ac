"""The JSON Schema of results files, of the same fields as their lines' dataclasses, and of ``--format json``."""

from typing import Any, get_args

from cs336sys.results.model import SCHEMA_VERSION, TABLES_SCHEMA_VERSION, Status


def _object(optional: str = "", /, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties, one of which may be lacking, and no others."""
    required = [name for name in properties if name != optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _mapping(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def results_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a results file's line, with that of ``--format json`` as ``tables``."""
    text, anything = {"type": "string"}, _mapping({})
    # JSON has no numbers for these.
    numbers = _array({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]})
    scalar = {"anyOf": [{"type": json_type} for json_type in ("string", "number", "boolean", "null")]}
    line = {"schema_version": {"const": SCHEMA_VERSION}}
    run = {"run_id": text, "time": text, "arguments": _array(text), "machine": anything, "environment": anything}
    cell: dict[str, Any] = {"command": text, "configuration": anything, "status": {"enum": list(get_args(Status))}}
    cell |= {"samples": _mapping({"$ref": "#/$defs/samples"}), "derived": anything}
    cell |= {"reason": {"anyOf": [text, {"type": "null"}]}, "run_id": text}
    table = _object(name=text, title=text, rows=_array(_mapping(scalar)), notes=_array(text))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of a results file of cs336sys, version {SCHEMA_VERSION}",
        "oneOf": [{"$ref": "#/$defs/run"}, {"$ref": "#/$defs/cell"}],
        "$defs": {
            "run": _object(**line, kind={"const": "run"}, **run),
            "cell": _object("reason", **line, kind={"const": "cell"}, **cell),  # Readers want all but the reason.
            "samples": _object(unit=text, method=text, measured=numbers, warmup=numbers),
            "tables": _object(schema_version={"const": TABLES_SCHEMA_VERSION}, tables=_array(table)),
        },
    }
