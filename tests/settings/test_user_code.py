import os
import subprocess
import sys
from pathlib import Path

import pytest

from cs336sys.errors import UsageError
from cs336sys.settings.course_package import CoursePackage, course_package, first_folder, set_aside_others
from cs336sys.settings.user_code import digest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\nfrom blocks import attention\n\ndef build(size):\n import late\n")
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "__init__.py").write_text("")
    (tmp_path / "blocks" / "attention.py").write_text("from . import masks\n")
    (tmp_path / "blocks" / "masks.py").write_text("")
    (tmp_path / "late.py").write_text("")
    (tmp_path / "other.py").write_text("")
    return tmp_path


@pytest.mark.parametrize("changed", ["mine.py", "blocks/attention.py", "blocks/masks.py", "late.py"])
def test_the_digest_is_of_the_file_and_of_what_it_imports_from_its_folder(folder, changed):
    reference = f"{folder}/mine.py:build"
    before = digest([reference])
    (folder / "other.py").write_text("x = 1")
    assert digest([reference]) == before
    with (folder / changed).open("a") as file:
        file.write("# edited\n")
    assert digest([reference]) != before


def test_the_course_package_of_this_checkout_is_ours():
    package = course_package()
    assert package.name == "ours"
    package.require_needed()


def test_a_course_package_of_another_shape_is_one_sentence_and_makes_way_for_a_model(tmp_path, monkeypatch):
    theirs = tmp_path / "cs336_basics"
    theirs.mkdir()
    (theirs / "nn_utils.py").write_text("from torch.nn.functional import cross_entropy\n")
    (theirs / "optimizer.py").write_text("class AdamW: ...\n")
    (theirs / "model.py").write_text("class TransformerLM: ...\nclass Linear: ...\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    package = course_package()
    assert package == CoursePackage(theirs, is_ours=False)
    assert package.name.startswith(f"{tmp_path.name}/cs336_basics ")
    with pytest.raises(UsageError) as raised:
        package.require_needed()
    assert (
        "has no model.BasicsTransformerLM, model.Embedding, model.RMSNorm, model.scaled_dot_product_attention: take it "
        "off PYTHONPATH and give its model by --model (documentation: your_model)" in str(raised.value)
    )
    (theirs / "optimizer.py").unlink()
    with pytest.raises(UsageError, match="module optimizer"):
        package.require_needed()
    set_aside_others()
    assert str(tmp_path) not in sys.path
    assert first_folder() != theirs


@pytest.mark.parametrize("has_init", [True, False])
def test_own_course_package_is_found_where_no_other_is(tmp_path, has_init):
    package = tmp_path / "cs336_basics"
    package.mkdir()
    (package / ("__init__.py" if has_init else "model.py")).touch()
    program = "import cs336sys, cs336_basics; print(*cs336_basics.__path__)"
    found = []
    for path in (tmp_path, None):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # -S leaves out what an installation of ours would find.
        command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {program}"]
        environment |= {"PYTHONPATH": str(path)} if path else {}
        shown = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path.parent
        )
        found.append(Path(shown.stdout.strip()))
    assert found == [package, REPOSITORY / "cs336-basics" / "cs336_basics"]
