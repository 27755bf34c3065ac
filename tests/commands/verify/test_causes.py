"""Each block of ``sentences.jinja`` is said somewhere, and each that is said is there."""

import ast
from importlib import resources

import jinja2
import pytest

from cs336sys.commands import verify
from cs336sys.commands.verify.comparison import fault, with_facts
from cs336sys.findings import sentence

FOLDER = resources.files(verify)


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


LACKING = "the wrapped module has no parameter that is the model's w"
NAMES = {"names": list("abcd"), "are_compared": True}
ALONE = {"names": ["a"], "are_compared": False}
GROUP = {"name": "w", "key": "lr", "value": 0.1, "expected": 1.0, "sees": None, "shape": (3, 2)}
SCHEDULE = {"step": 1, "rank": 0, "rate": 0.125, "expected": 0.25}


@pytest.mark.parametrize(
    ("block", "facts", "text"),
    [
        ("scaled unequally", {"sums": "1, 3"}, "the ranks' gradients count 1, 3 times what they should"),
        ("left-out", {"name": "w", "is_on_all": True}, "w has no gradient on every rank: the wrap leaves it out"),
        (
            "left-out",
            {"name": "w", "is_on_all": False, "rank": 1},
            "w has no gradient on rank 1: the...",
        ),
        ("forward later", {"step": 2}, "the loss of step 2 is the first that is off; the weights..."),
        ("one-rank's", {"rank": 1, "sender": "rank 0", "is_alone": True}, "rank 1 has the gradient of rank 0 alone"),
        ("race late", {"late_rank": 1}, "right while ranks are equally fast, wrong when rank 1 is late: ..."),
        ("uneven loss", {}, "the loss counts ranks alike that have different numbers of sequences"),
        ("clipping", {}, "gradients are not clipped by the norm that was found"),
        ("frozen", {"name": "w"}, "w is frozen and was changed"),
        ("not-sent", {"ranks": [0, 2], **NAMES}, "only rank 0, 2 has wrong weights, with the right gradients: a, b, c"),
        (
            "optimizer",
            {"ratio": 2.0, **ALONE},
            "the step is 2 times too long, with gradients that could not be...",
        ),
        ("wrong-slices", {"name": "w"}, "wrapping changes w"),
        ("evaluation", {}, "the model evaluates with other weights, or otherwise, than it trains"),
        ("dropout shared", {}, "ranks that share sequences drop different elements of them: seed them alike"),
        (
            "groups",
            GROUP,
            "w has lr 0.1 on ranks and 1.0 in one process: the optimizer sees no such parameter where...",
        ),
        ("unnamed-parameter", {"missing": "w", "unmatched": "v"}, f"{LACKING}; v is none of the model's"),
        ("unnamed-parameter", {"missing": "w", "unmatched": ""}, LACKING),
        (
            "schedule",
            SCHEDULE,
            "after step 1 the learning rate is 0.125 on rank 0, and 0.25 in one process: the...",
        ),
        ("right-where", {"case": "uneven"}, "while all ranks have equally many sequences"),
        ("right-where", {"case": "step"}, ""),
    ],
)
def test_facts_fill_a_sentence(block, facts, text):
    parts = [part.replace("-", " ") for part in block.split()]
    filled = sentence(verify.__name__, "meaning", fault(*parts, **facts))
    assert filled.startswith(text.removesuffix("...")) if text.endswith("...") else filled == text


def test_what_is_known_besides_stands_around_the_sentence():
    frozen = with_facts(fault("frozen", name="w"), "tied", is_tied_alone=True, first_in_pass="w", note="see w")
    assert frozen.cause == "tied"
    assert sentence(verify.__name__, "meaning", with_facts(frozen, is_of_plain_step=True, right_where="here")) == (
        "as in the plain step: only the weight that several layers share is off: w, the first in the backward pass: "
        "w is frozen and was changed; it is right here; see w"
    )
