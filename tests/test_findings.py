"""Findings said by a package's template."""

import sys

import pytest

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
    jinja2 = pytest.importorskip("jinja2")
    with pytest.raises(jinja2.UndefinedError, match="files"):
        sentence(package, "remedy")
