"""A ``cs336_basics`` of the user's that has the classes and is otherwise unlike ours: right, or one sentence."""

import sys

import pytest
import torch
from torch import nn

from cs336sys.choices import OPTIMIZERS, Optimizer
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.experiments import models
from cs336sys.experiments.optimizers import build_optimizer
from cs336sys.report.bench import bench_plan
from cs336sys.report.titles import package_notes
from cs336sys.results.model import Cell, Run
from cs336sys.sizes import choose_size
from cs336sys.workload import Workload
from cs336sys.workload.course_package import CoursePackage, telling_import_errors

SIZE = choose_size("tiny", context=8, batch_size=2, vocab_size=16, d_model=16, d_ff=16, num_heads=2)
FORMULAS = (
    "parameters, FLOPs and predicted memory are formulas of this program's own cs336_basics; a/cs336_basics 12 may "
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def (:\n", "model.py, line 1: SyntaxError: invalid syntax; take it off PYTHONPATH, or correct it"),
        ("\nraise ValueError('not today')\n", "model.py, line 2: ValueError: not today; take it off"),
        ("import cs336_basics.none_such\n", "model.py, line 1: ModuleNotFoundError: No module named"),
    ],
)
def test_failing_import_is_one_sentence(text, sentence, tmp_path, monkeypatch):
    package = tmp_path / "cs336_basics"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(text)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "path", [str(tmp_path), *sys.path])
        for name in [name for name in sys.modules if name.partition(".")[0] == "cs336_basics"]:
            patched.delitem(sys.modules, name)
        with pytest.raises(UsageError) as raised, telling_import_errors():
            import cs336_basics.model  # noqa: F401
        patched.delitem(sys.modules, "cs336_basics", raising=False)
    assert str(raised.value).startswith(f"the cs336_basics in {tmp_path} cannot be imported: {sentence}")
    with pytest.raises(ZeroDivisionError), telling_import_errors():
        _ = 1 / 0


class Blocks(nn.Module):
    """One of a list."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(16, 16)


class Silent(nn.Module):
    """Computes attention, if any, by itself."""

    def __init__(self):
        super().__init__()
        self.head = nn.Embedding(16, 16)
        self.parts = nn.ModuleList([Blocks(), Blocks()])

    def forward(self, x):
        return self.head(x)


@pytest.fixture
def theirs(monkeypatch, tmp_path):
    monkeypatch.setattr(CoursePackage, "name", "a/cs336_basics 12")
    for where in ("cs336sys.experiments.models", "cs336sys.report.titles"):
        monkeypatch.setattr(f"{where}.course_package", lambda: CoursePackage(tmp_path, is_ours=False))
    models._require_replaceable_attention.cache_clear()
    yield
    models._require_replaceable_attention.cache_clear()


def test_attention_that_cannot_be_replaced_is_refused(theirs, monkeypatch):
    models.use_attention(Workload(SIZE, attention="sdpa"))
    models._require_replaceable_attention.cache_clear()
    monkeypatch.setattr(models, "_plain_model", lambda workload: Silent())
    models.use_attention(Workload(SIZE))
    for attention in ("sdpa", "flash"):
        with pytest.raises(
            CapabilityError, match=r"a/cs336_basics 12 computes attention without .* choose --attention r"
        ):
            models.use_attention(Workload(SIZE, attention=attention))


def test_formulas_of_ours_are_not_taken_for_those_of_theirs(theirs):
    (note,) = [note for note in bench_plan([Workload(SIZE)]).notes if "formulas of" in note]
    cells = [Cell("bench", Workload(SIZE).configuration(), "ok")]
    run = Run("1", "", (), {}, {"cs336_basics": "a/cs336_basics 12"})
    assert package_notes(cells, run) == (note,)
    assert note.startswith(FORMULAS)
    assert package_notes(cells, Run("1", "", (), {}, {})) == ()


class WithoutDefault(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)


def test_blocks_and_learning_rates_of_other_names_are_found(monkeypatch):
    assert list(models.blocks_of(Workload(SIZE), Silent())) == ["parts.0", "parts.1"]
    monkeypatch.setitem(OPTIMIZERS, "course", Optimizer(f"{__name__}.WithoutDefault"))
    assert build_optimizer(Workload(SIZE), Silent().parameters()).defaults["lr"] == 1e-3
    assert build_optimizer(Workload(SIZE), Silent().parameters(), lr=0.5).defaults["lr"] == 0.5
