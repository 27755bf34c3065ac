"""A ``cs336_basics`` of the user's that has the classes and is otherwise unlike ours: right, or one sentence."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import cs336_basics
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from cs336sys import api
from cs336sys.cli import app
from cs336sys.errors import CapabilityError, UsageError, UserCodeError
from cs336sys.results.model import Cell, Run
from cs336sys.settings.choices import OPTIMIZERS, Optimizer
from cs336sys.settings.course_package import CoursePackage, telling_import_errors
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.tables.titles import package_notes, training_plan
from cs336sys.training import model as models
from cs336sys.training.model import build_optimizer
from cs336sys.training.user_models import telling_user_errors

SIZE = choose_size("tiny", context=8, batch_size=2, vocab_size=16, d_model=16, d_ff=16, num_heads=2)
FORMULAS = (
    "parameters, FLOPs and predicted memory are formulas of this program's own cs336_basics; a/cs336_basics 12 may "
)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of our package, as of a student who edits it."""
    package = tmp_path / "cs336_basics"
    shutil.copytree(Path(cs336_basics.__file__).parent, package)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return package


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def (:\n", "model.py, line 1: SyntaxError: invalid syntax; correct it, or take it off PYTHONPATH"),
        ("\nraise ValueError('not today')\n", "model.py, line 2: ValueError: not today; correct it"),
        ("import cs336_basics.none_such\n", "model.py, line 1: ModuleNotFoundError: No module named"),
    ],
)
def test_failing_import_is_one_sentence(copied, text, sentence, monkeypatch):
    (copied / "model.py").write_text(text)
    with monkeypatch.context() as patched:
        for name in [name for name in sys.modules if name.partition(".")[0] == "cs336_basics"]:
            patched.delitem(sys.modules, name)
        with pytest.raises(UsageError) as raised, telling_import_errors():
            import cs336_basics.model  # noqa: F401
        patched.delitem(sys.modules, "cs336_basics", raising=False)
    assert str(raised.value).startswith(f"the cs336_basics in {copied.parent} fails: {sentence}")
    with pytest.raises(ZeroDivisionError), telling_import_errors():
        _ = 1 / 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def forward(x):\n    return scael(x)\n", "line 2: NameError: name 'scael' is not defined"),
        ("def forward(x):\n    import cs336_basics.gone\n", "line 2: ModuleNotFoundError: No module named"),
        ("import torch\ndef forward(x):\n    return torch.nn.functional.linear(x, x)\n", "line 3: TypeError: linear()"),
    ],
)
def test_error_in_a_copied_course_package_names_its_line(copied, text, sentence):
    (copied / "model.py").write_text(text)
    forward = runpy.run_path(copied / "model.py")["forward"]
    with pytest.raises(UserCodeError) as raised, telling_user_errors(Workload(SIZE)):
        forward(1)
    assert str(raised.value).startswith(f"cs336_basics/model.py, {sentence}")
    with pytest.raises(ZeroDivisionError), telling_user_errors(Workload(SIZE)):
        _ = 1 / 0


def test_syntax_error_of_a_copied_course_package_is_refused_before_work(copied):
    """50 lines of our internals were printed, because a copy has the mark of ours."""
    with (copied / "optimizer.py").open("a") as file:
        file.write("class Mine(\n")
    line = len((copied / "optimizer.py").read_text().splitlines())
    ended = CliRunner().invoke(app, ["bench", "--size", "tiny", "--dry-run"])
    assert ended.exit_code == 2
    assert ended.stderr == (
        f"error: the cs336_basics in {copied.parent} fails: optimizer.py, line {line}: SyntaxError: '(' was never "
        "closed; correct it, or take it off PYTHONPATH\n"
    )
    with pytest.raises(UsageError, match=r"^the cs336_basics in .* fails: optimizer.py, line") as raised:
        api.bench("tiny", dry_run=True)
    assert raised.value.__cause__ is None


def test_import_error_of_a_course_package_is_one_exception_of_the_library(copied):
    (copied / "model.py").write_text("import tocrh\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", "import cs336sys; cs336sys.verify"], capture_output=True, text=True, env=environment
    )
    assert "commands" not in ended.stderr
    assert "fails: model.py, line 1: ModuleNotFoundError: No module named 'tocrh'" in ended.stderr.splitlines()[-1]


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
    for where in ("cs336sys.training.model", "cs336sys.tables.titles"):
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
    (note,) = [note for note in training_plan([Workload(SIZE)]).notes if "formulas of" in note]
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
