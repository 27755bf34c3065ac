"""The JSON Schema that ``show --schema`` prints, against the files that are kept and against damaged lines."""

import gzip
import importlib.util
import json
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.results.model import Cell, Run, Samples, read_results

KEPT = sorted((Path(__file__).parents[2] / "docs" / "results").rglob("*.jsonl.gz"))


@pytest.fixture(scope="module")
def schema():
    printed = CliRunner().invoke(app, ["show", "--schema"])
    assert printed.exit_code == 0
    return json.loads(printed.stdout)


def is_valid(value, schema, root):
    """Judge by the few keywords that our schema has; another keyword is a KeyError."""
    kinds = {"object": dict, "array": list, "string": str, "null": type(None), "number": (int, float), "boolean": bool}

    def one(keyword, rule):
        if keyword == "$ref":
            return is_valid(value, root["$defs"][rule.removeprefix("#/$defs/")], root)
        if keyword == "type":
            return isinstance(value, kinds[rule]) and (rule == "boolean") == isinstance(value, bool)
        return {
            "const": lambda: value == rule,
            "enum": lambda: value in rule,
            "anyOf": lambda: any(is_valid(value, some, root) for some in rule),
            "oneOf": lambda: sum(is_valid(value, some, root) for some in rule) == 1,
            "items": lambda: all(is_valid(item, rule, root) for item in value),
            "required": lambda: set(rule) <= value.keys(),
            "properties": lambda: all(is_valid(value[name], rule[name], root) for name in rule if name in value),
            "additionalProperties": lambda: all(
                rule is not False and is_valid(value[name], rule, root)
                for name in value
                if name not in schema.get("properties", {})
            ),
        }[keyword]()

    return all(one(*item) for item in schema.items() if item[0] not in ("$schema", "$defs", "title"))


def lines_of(path, step=1):
    """The first five lines, and each ``step``-th of the others."""
    lines = gzip.decompress(path.read_bytes()).splitlines()
    return [json.loads(line) for line in [*lines[:5], *lines[5::step]]]


@pytest.mark.parametrize("kind", [Run, Cell, Samples])
def test_schema_has_the_fields_of_what_is_written(schema, kind):
    properties = schema["$defs"][kind.__name__.lower()]["properties"]
    assert [name for name in properties if name not in ("schema_version", "kind")] == [f.name for f in fields(kind)]


def test_every_kept_file_is_valid(schema, tier):
    assert len(KEPT) > 50
    lines = ((path.name, line) for path in KEPT for line in lines_of(path, 1 if tier.is_nightly else 10))
    wrong = [name for name, line in lines if not is_valid(line, schema, schema)]
    assert wrong == []


@pytest.mark.parametrize(
    "damage",
    [
        {"status": "fine"},
        {"samples": {"step_ms": {"unit": "ms", "method": "cpu clock", "measured": ["fast"], "warmup": []}}},
        {"schema_version": 2},
        {"kind": "row"},
        {"configuration": None},
        {"unknown": 1},
    ],
)
def test_schema_refuses_what_reading_passes_over(schema, damage, tmp_path):
    run, cell = ({"schema_version": 1, "kind": "run"} | RUN), ({"schema_version": 1, "kind": "cell"} | CELL)
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, (run, cell))))
    assert is_valid(cell, schema, schema)
    assert len(read_results(path).cells) == 1
    assert not is_valid(cell | damage, schema, schema)
    if "schema_version" not in damage:
        path.write_text("\n".join(map(json.dumps, (run, cell | damage))))
        assert read_results(path).cells == ()


RUN = {"run_id": "a", "time": "now", "arguments": ["bench"], "machine": {}, "environment": {}}
CELL = {
    "command": "bench",
    "configuration": {"size": "tiny"},
    "status": "ok",
    "samples": {"step_ms": {"unit": "ms", "method": "cpu clock", "measured": [1.5], "warmup": []}},
    "derived": {"tokens_per_s": "NaN"},
    "reason": None,
    "run_id": "a",
}


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("jsonschema") is None, reason="needs jsonschema")
def test_jsonschema_agrees(schema):
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for path in KEPT:
        assert all(validator.is_valid(line) for line in lines_of(path)), path


@pytest.mark.parametrize("name", ["bench-h200", "ddp-graph-h200", "nsys-h200", "flash-h200"])
def test_tables_of_format_json_are_valid(schema, name):
    path = next(path for path in KEPT if path.name == f"{name}.jsonl.gz")
    printed = CliRunner().invoke(app, ["show", str(path), "--format", "json"])
    document = json.loads(printed.stdout)
    assert is_valid(document, schema["$defs"]["tables"], schema)
    document["tables"][0]["rows"][0]["size"] = ["no", "scalar"]
    assert not is_valid(document, schema["$defs"]["tables"], schema)
