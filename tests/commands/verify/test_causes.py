"""Each block of ``sentences.jinja`` is said somewhere, and each that is said is there; ``figures.txt`` has examples."""

import ast
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch
from written_figures import read_figures, rows_of, write_figures

from cs336sys.commands import verify
from cs336sys.commands.verify.comparison import ComparedCase, fault
from cs336sys.commands.verify.measure import _Case
from cs336sys.findings import sentence
from cs336sys.parity.record import RankReport, Record
from cs336sys.parity.rounding import rounding_in
from cs336sys.parity.weights import TensorComparison

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
    within_others = {"on_one_rank", "with_gradients", "shape_that_it_sees", "lost_ranks"}
    assert template.blocks.keys() - said - within_others == set()


NAMES = {"names": list("abcd"), "are_compared": True}
ALONE = {"names": ["a"], "are_compared": False}
GROUP = {"name": "w", "key": "lr", "value": 0.1, "expected": 1.0, "sees": None, "shape": (3, 2)}


def said(*cause, **facts):
    return sentence(verify.__name__, "meaning", fault(*cause, **facts))


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_facts_fill_a_sentence(expression, rows):
    assert rows_of(expression, globals()) == rows


# What compared tensors say: how much rounding explains, which names and slices fit, and by how much one is off.
@pytest.mark.parametrize(
    ("dtype", "half", "most"),
    [(torch.float64, None, 1e-14), (torch.float32, None, 1e-5), (torch.float32, torch.bfloat16, 0.01)],
)
@pytest.mark.parametrize("repeated", [0.0, 1e-3])
def test_rounding_explains_little(dtype, half, most, repeated):
    value = torch.ones(100, dtype=dtype)
    comparison = SimpleNamespace(rounding=rounding_in(dtype, half), shapes={"w": value.shape})
    others = [value, value * (1 + repeated), value * (1 + repeated / 2)]
    allowed = ComparedCase._rounding(comparison, value, others)
    relative = allowed / torch.linalg.vector_norm(value).item()
    assert repeated < relative <= most + 20 * repeated
    assert relative > torch.finfo(half or dtype).eps / 2


def test_parameters_and_copies_that_one_side_lacks_are_off():
    weight = torch.ones(3)
    lacking = TensorComparison({"w": weight / 2}, {"w": weight}, {}, allowed=0.1)
    assert lacking.farthest(1).relative == 2
    stale = TensorComparison({"w": weight}, {"w": 2 * weight}, {"w": 2 * weight, "the copy of w": weight}, allowed=0.1)
    assert stale.farthest(1).parameter == "the copy of w"
    assert stale.explained(lambda name: []) == []


def test_parameter_without_a_name_is_refused_by_its_name_and_not_by_that_of_unknown_slices():
    reports = [RankReport(Record(), unmatched=("c.renamed",))]
    shapes = dict.fromkeys(("a.weight", "b.weight"), torch.Size([5, 3]))
    compared = SimpleNamespace(records=[Record()], shapes=shapes, unknown={"a.weight"}, reports=reports)
    outcome = _Case._nothing_found(SimpleNamespace(), compared)
    assert outcome.derived["verdict"] == "refused"
    assert "no parameter that is the model's b.weight; c.renamed is none of the model's" in outcome.reason


if __name__ == "__main__":
    write_figures(PATH, globals())
