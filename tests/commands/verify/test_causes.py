"""Each block of ``sentences.jinja`` is said somewhere, and each that is said is there; ``figures.txt`` has examples."""

import ast
from importlib import resources
from pathlib import Path

import jinja2
import pytest
from written_figures import read_figures, rows_of, write_figures

from cs336sys.commands import verify
from cs336sys.commands.verify.comparison import fault, with_facts
from cs336sys.findings import sentence

FOLDER = resources.files(verify)
PATH = Path(__file__).with_name("figures.txt")


def test_sentences_that_are_named_exist_and_all_others_are_named_too():
    template = jinja2.Environment().from_string((FOLDER / "sentences.jinja").read_text())
    texts, named = set(), set()
    for file in FOLDER.iterdir():
        for node in ast.walk(ast.parse(file.read_text() if file.name.endswith(".py") else "")):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value.replace("'", ""))
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if name in ("conclude", "fault") and all(isinstance(part, ast.Constant) for part in node.args[:2]):
                named.add("_".join(" ".join(part.value for part in node.args[:2]).replace("'", "").split()))
    assert len(named) > 30
    assert named - template.blocks.keys() == set()
    said = {f"{cause} {seen}".strip().replace(" ", "_") for cause in texts for seen in ("", *texts) if len(cause) < 30}
    within_others = {"with_gradients", "shape_that_it_sees", "lost_ranks"}
    assert template.blocks.keys() - said - within_others == set()


NAMES = {"names": list("abcd"), "are_compared": True}
ALONE = {"names": ["a"], "are_compared": False}
GROUP = {"name": "w", "key": "lr", "value": 0.1, "expected": 1.0, "sees": None, "shape": (3, 2)}


def said(*cause, **facts):
    return sentence(verify.__name__, "meaning", fault(*cause, **facts))


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_facts_fill_a_sentence(expression, rows):
    assert rows_of(expression, globals()) == rows


def test_what_is_known_besides_stands_around_the_sentence():
    frozen = with_facts(fault("frozen", name="w"), "tied", is_tied_alone=True, first_in_pass="w", note="see w")
    assert frozen.cause == "tied"
    assert sentence(verify.__name__, "meaning", with_facts(frozen, is_of_plain_step=True, right_where="here")) == (
        "as in the plain step: only the weight that several layers share is off: w, the first in the backward pass: "
        "w is frozen and was changed; it is right here; see w"
    )


if __name__ == "__main__":
    write_figures(PATH, globals())
