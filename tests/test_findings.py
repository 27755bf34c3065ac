"""Findings said by a package's template."""

import ast
import re
import sys
from pathlib import Path

import jinja2
import pytest

import cs336sys
from cs336sys.findings import Finding, sentence

TEMPLATE = """
{# Line breaks are spaces. #}
{% block slow_disk %}
{{ where }} waits {{ write(amount) }}
{{ unit }} a step{% if certainty == "looks like" %}, it seems{% endif %}:
{{ self.remedy() | trim }}
{% endblock %}
{% block remedy %}copy {{ files }} first{% endblock %}
"""


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    name = f"sayings_{request.node.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "sentences.jinja").write_text(TEMPLATE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_block_of_the_cause_is_one_line_of_fields_and_facts(package):
    finding = Finding("slow disk", "rank 1", 2.5, "ms", "looks like", {"files": "a  file\nor two"})
    text = sentence(package, finding.cause, finding, write="{:.2f}".format)
    assert text == "rank 1 waits 2.50 ms a step, it seems: copy a  file\nor two first"


def test_value_that_a_sentence_needs_and_was_not_given_is_an_error(package):
    with pytest.raises(jinja2.UndefinedError, match="files"):
        sentence(package, "remedy")


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
