"""Findings said by a package's template."""

import ast
import re
from pathlib import Path

import jinja2
import pytest

import cs336sys
from cs336sys.findings import Finding, sentence


def test_a_fact_that_a_sentence_needs_and_was_not_given_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="steps"):
        sentence("cs336sys.commands.memprof", "graph kept", Finding("graph kept"), size=str, step_bytes=1)


ROOT = Path(cs336sys.__file__).parent
BLOCKS = {
    path: set(jinja2.Environment().from_string(path.read_text()).blocks) for path in ROOT.rglob("sentences.jinja")
}
# Appended to a cause; or put before a word.
DYNAMIC = r"_(remedy|decides|categories)$"


@pytest.fixture(scope="module")
def nodes():
    """All calls and texts in the package's code."""
    trees = [ast.parse(path.read_text()) for path in ROOT.rglob("*.py")]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Constant)]


def test_sentences_that_code_names_exist(nodes):
    names = [getattr(getattr(node, "func", None), "id", "") for node in nodes]
    calls = [node for node, name in zip(nodes, names, strict=True) if name == "sentence" or name.startswith("say_")]
    texts = [argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)]
    assert len(texts) > 50
    assert {text.replace(" ", "_") for text in texts} <= set().union(*BLOCKS.values())


# Those of verify are named by a cause and what is seen of it: tests/commands/verify/test_causes.py.
@pytest.mark.parametrize(
    "path", [path for path in BLOCKS if path.parent.name != "verify"], ids=lambda path: path.parent.name
)
def test_every_sentence_is_named_by_code_or_by_another(nodes, path):
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    used = {text.replace(" ", "_") for text in texts} | set(re.findall(r"self\.(\w+)\(", path.read_text()))
    assert {block for block in BLOCKS[path] if not {block, re.sub(DYNAMIC, "", block)} & used} == set()
