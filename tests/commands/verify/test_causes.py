"""Each block of ``sentences.jinja`` is said somewhere, and each that is said is there."""

import ast
from importlib import resources

import jinja2

from cs336sys.commands import verify
from cs336sys.commands.verify.comparison import explain

FOLDER = resources.files(verify)


def test_sentences_that_are_named_exist_and_all_others_are_named_too():
    template = jinja2.Environment().from_string((FOLDER / "sentences.jinja").read_text())
    texts, named = set(), set()
    for file in FOLDER.iterdir():
        for node in ast.walk(ast.parse(file.read_text() if file.name.endswith(".py") else "")):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value.replace("'", ""))
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if name in ("conclude", "explain") and all(isinstance(part, ast.Constant) for part in node.args[:2]):
                named.add("_".join(" ".join(part.value for part in node.args[:2]).replace("'", "").split()))
    assert len(named) > 30
    assert named - template.blocks.keys() == set()
    said = {f"{cause} {seen}".strip().replace(" ", "_") for cause in texts for seen in ("", *texts) if len(cause) < 30}
    within_others = {"with_gradients", "shape_that_it_sees"}
    assert template.blocks.keys() - said - within_others == set()


def test_facts_fill_a_sentence():
    assert explain("schedule", step=1, rank=0, rate=0.125, expected=0.25).startswith(
        "after step 1 the learning rate is 0.125 on rank 0, and 0.25 in one process"
    )
    assert explain("one rank's", rank=1, sender="rank 0", is_alone=True) == "rank 1 has the gradient of rank 0 alone"
