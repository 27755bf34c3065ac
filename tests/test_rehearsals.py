"""What the next feature costs: it is added in a copy of the package, and the files that this touches are counted."""

import csv
import inspect
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "cs336sys"
PLAN = ("bench", "--size", "tiny", "--device", "cpu", "--dry-run", "--format", "csv")

# Texts of files, and what stands before them afterwards.
OPTION = {
    "workload/training.py": {
        "    seed: int = 0\n    user: UserCode": "    dummy: int = 7\n",
    },
    "commands/options/training.py": {
        '    tf32: Annotated[bool, setting("--tf32/': '    dummy: Annotated[int, setting(help="None.", min=0)] = 7\n',
    },
}
COLUMN = {
    "report/bench.py": {
        '        Column("step_ms", "step", "ms"': '        Column("dummy_ms", "dummy", "ms"),\n',
        '    row |= cell.derived | {"first_measured_ms"': '    row["dummy_ms"] = 2 * step.mean\n',
    },
}


@pytest.fixture
def changed(tmp_path):
    def change(additions):
        shutil.copytree(PACKAGE, tmp_path / "cs336sys", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(
            PACKAGE.parent / "cs336-basics", tmp_path / "cs336-basics", ignore=shutil.ignore_patterns("*.pyc")
        )
        for file, texts in additions.items():
            path = tmp_path / "cs336sys" / file
            for text, addition in texts.items():
                assert path.read_text().count(text) == 1
                path.write_text(path.read_text().replace(text, addition + text))
        return tmp_path

    return change


def run(folder, *arguments, **variables):
    environment = os.environ | {"PYTHONPATH": str(folder)} | variables
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_option_of_training_takes_two_files(changed):
    assert len(OPTION) <= 3
    folder = changed(OPTION)
    command = (sys.executable, "-m", "cs336sys")
    planned = [run(folder, *command, *PLAN, "--dummy", "3"), run(folder, *command, *PLAN, CS336SYS_BENCH_DUMMY="4")]
    (folder / "settings.toml").write_text("bench.dummy = 5\n")
    planned.append(run(folder, *command, *PLAN, "--config", "settings.toml", "--columns", "size,dummy"))
    assert [row["dummy"] for text in planned for row in csv.DictReader(io.StringIO(text))] == ["3", "4", "5"]
    script = "import inspect, cs336sys; print(inspect.signature(cs336sys.ddp).parameters['dummy'])"
    assert run(folder, sys.executable, "-c", script).strip() == str(
        inspect.Parameter("dummy", 3, default=7, annotation=int)
    )
    assert "--dummy <int>" in run(folder, *command, "shard", "--help", COLUMNS="80")


def test_a_column_takes_one_file(changed, tmp_path):
    assert len(COLUMN) <= 1
    folder = changed(COLUMN)
    saved = PACKAGE.parent / "docs" / "results" / "bench-turn-h200.jsonl.gz"
    text = run(folder, sys.executable, "-m", "cs336sys", "show", str(saved), "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    measured = [row for row in rows if row["status"] == "ok"]
    assert [float(row["dummy_ms"]) for row in measured] == [2 * float(row["step_ms_mean"]) for row in measured]
    assert measured
