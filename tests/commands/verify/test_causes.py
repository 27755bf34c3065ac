"""Each sentence of ``causes.toml`` is said somewhere, and each that is said is there."""

import ast
from pathlib import Path

from cs336sys.commands import verify
from cs336sys.commands.verify.comparison import SENTENCES, explain

FOLDER = Path(verify.__file__).parent


def strings_in(node):
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def test_sentences_that_are_named_exist_and_all_others_are_named_too():
    texts, named = set(), set()
    for file in FOLDER.glob("*.py"):
        tree = ast.parse(file.read_text())
        texts |= strings_in(tree)
        for call in ast.walk(tree):
            name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
            if name in ("conclude", "explain") and all(isinstance(part, ast.Constant) for part in call.args[:2]):
                named.add(tuple(part.value for part in call.args[:2]))
    assert len(named) > 30
    assert [names for names in named if names[1] not in SENTENCES[names[0]]] == []
    by_case = ("compared", "right where")
    unsaid = [
        (cause, seen)
        for cause, sentences in SENTENCES.items()
        for seen in sentences
        if cause not in by_case and not {cause, seen} <= texts
    ]
    assert unsaid == []


def test_facts_fill_a_sentence():
    assert explain("schedule", "rate", step=1, rank=0, rate=0.125, expected=0.25).startswith(
        "after step 1 the learning rate is 0.125 on rank 0, and 0.25 in one process"
    )
