"""What the next feature costs: it is added in a copy of the package, and the files that this touches are counted."""

import csv
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from cs336sys.results.model import read_results

PACKAGE = Path(__file__).parents[1] / "cs336sys"
COMMAND = (sys.executable, "-m", "cs336sys")
PLAN = ("bench", "--size", "tiny", "--device", "cpu", "--dry-run", "--format", "csv")

# Texts of files, and what stands before them afterwards.
OPTION = {
    "settings/training.py": {
        "    user: UserCode = ": '    dummy: int = setting(7, "None.", minimum=0, several=True, panel=WHAT_RUNS)\n',
    },
    # Where it is used.
    "commands/bench/measure.py": {
        "        **observed,\n    }": '        "notes": [f"doubled {2 * workload.dummy}"],\n',
    },
}
# Of an option of attn, of kernels and of ddp: the field, its place in help, and where it is used.
FIELD = '    dummy: int = setting(7, "None.", minimum=0, several=True, header="dummies")\n'
OPTION_OF_ATTN = {
    "settings/operations.py": {"    kv_heads: int | None = _varied(": FIELD},
    "commands/attn.py": {'"warmup", "steps", "plot"': '"dummy", '},
    "commands/attention/measure.py": {
        '        derived |= {"held_gib": None': '        derived["doubled"] = 2 * workload.dummy\n',
    },
}
OPTION_OF_KERNELS = {
    "settings/operations.py": {"    vocab_size: int | None = _varied(": FIELD},
    "commands/kernels/options.py": {'"head_dim", "vocab_size", *OPERATION_OPTIONS': '"dummy", '},
    "commands/kernels/measure.py": {
        '        derived["over_inputs_gib"]': '        derived["doubled"] = 2 * workload.dummy\n',
    },
}
OPTION_OF_DDP = {
    "settings/parallel.py": {"    transport: str = setting(": FIELD},
    "commands/ddp/options.py": {'"gradient_dtype", "transport")\nclass': '"dummy", '},
    "commands/rank_training/measure.py": {
        "    derived = with_notes(_checked_columns[key]": '    columns["doubled"] = 2 * workload.dummy\n',
    },
}
COLUMN = {
    "commands/bench/tables.py": {
        '        Column("first_measured_ms"': '        Column("dummy_ms", "dummy", "ms"),\n',
        '    row |= cell.derived | {"first_measured_ms"': '    row["dummy_ms"] = 2 * step.mean\n',
    },
}
STRATEGY = {
    "settings/strategies.py": {
        '    "fsdp": Strategy(': '    "dummy": Strategy("cs336sys.training.ranks.strategies.dummy"),\n',
    },
    "training/ranks/strategies.py": {
        "def sharded_optimizer(": """\
def dummy(*arguments: Any) -> Replica:
    return averaged_in_buckets(*arguments)


""",
    },
}
OPERATION = {
    "settings/operations.py": {'    "weighted-sum": Fused': '    "dummy": FusedOperation(("ours", "eager")),\n'},
    "commands/kernels/operations.py": {
        "from cs336sys.kernels.linear_cross_entropy import": "from cs336sys.kernels.dummy import dummy\n",
        '    "weighted-sum": DifferentiatedFunction(': """\
    "dummy": DifferentiatedFunction(
        inputs=lambda workload, random, generator: {"x": random((workload.tokens, workload.width))},
        reference=lambda workload: dummy,
        implementations=_implementations(dummy, lambda x: x + x),
        moved_tensors=(2, 2),
    ),
""",
    },
    "kernels/dummy.py": {"": "def dummy(x):\n    return 2 * x\n"},
}


COMMAND_FILES = {
    "cli.py": {'"slurm", "doctor"),': '"dummy", '},
    "commands/dummy/options.py": {
        "": """\
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.training import TrainingOptions
from cs336sys.run.sweep import run_sweep


def dummy(
    training: TrainingOptions = TrainingOptions(),
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    \"\"\"Count the parameters of models.\"\"\"
    from cs336sys.commands.dummy.tables import dummy_tables

    configurations = [workload.configuration() for workload in training.workloads(["train"])]
    measure = "cs336sys.commands.dummy.measure:measure_dummy"
    run_sweep("dummy", measure, configurations, sweeping).report(dummy_tables, output)
"""
    },
    "commands/dummy/measure.py": {
        "": """\
from cs336sys.run.cells import Outcome
from cs336sys.settings.training import Workload


def measure_dummy(configuration, progress):
    return Outcome("ok", derived={"counted": Workload.from_configuration(configuration).parameters})
"""
    },
    "commands/dummy/tables.py": {
        "": """\
from cs336sys.tables.saved import SavedCommand, of_run
from cs336sys.tables.table import Column, Table


def dummy_tables(cells, run):
    columns = (Column("size", "size"), Column("counted", "counted", "count"))
    rows = [cell.configuration | cell.derived | {"status": cell.status} for cell in cells]
    return [Table("dummy", "Parameters", columns, rows)]


SAVED = SavedCommand(of_run(dummy_tables))
"""
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
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                path.write_text(texts.pop(""))
            for text, addition in texts.items():
                assert path.read_text().count(text) == 1
                path.write_text(path.read_text().replace(text, addition + text))
        return tmp_path

    return change


def run(folder, *arguments, exit_code=0, **variables):
    environment = os.environ | {"PYTHONPATH": str(folder)} | variables
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == exit_code, done.stderr
    return done.stdout if exit_code == 0 else done.stderr


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_an_option_of_training_takes_its_field_and_its_use(changed):
    assert len(OPTION) <= 2
    folder = changed(OPTION)
    planned = [run(folder, *COMMAND, *PLAN, "--dummy", "3"), run(folder, *COMMAND, *PLAN, CS336SYS_BENCH_DUMMY="4")]
    (folder / "settings.toml").write_text("bench.dummy = 5\n")
    planned.append(run(folder, *COMMAND, *PLAN, "--config", "settings.toml", "--columns", "size,dummy"))
    assert [row["dummy"] for text in planned for row in rows_of(text)] == ["3", "4", "5"]
    script = "import inspect, cs336sys; print(inspect.signature(cs336sys.ddp).parameters['dummy'])"
    assert run(folder, sys.executable, "-c", script).strip() == str(
        inspect.Parameter("dummy", 3, default=(7,), annotation=int | Iterable[int])
    )
    assert "--dummy <a,b>" in run(folder, *COMMAND, "shard", "--help-all", COLUMNS="80")
    small = ("--device", "cpu", "--context", "8", "--batch-size", "1", "--vocab-size", "64", "--d-model", "32")
    short = ("--warmup", "0", "--steps", "1", "--save", "b.jsonl", "--wide")
    measured = run(folder, *COMMAND, "bench", *small, *short, "--dummy", "1,2")
    assert re.search(r"dummy .*step", measured)
    assert "doubled 2" in measured
    shown = rows_of(run(folder, *COMMAND, "show", "b.jsonl", "--format", "csv"))
    assert [row["dummy"] for row in shown] == ["1", "2"]
    refused = run(folder, *COMMAND, "bench", "--dummy", "-1", exit_code=2)
    assert refused == "error: --dummy '-1': must be at least 0\n"


@pytest.fixture
def with_options(changed):
    additions = {}
    for option in (OPTION_OF_ATTN, OPTION_OF_KERNELS, OPTION_OF_DDP):
        assert len(option) <= 3
        for file, texts in option.items():
            additions.setdefault(file, {}).update(texts)
    return changed(additions)


# All in one process, which imports the package once.
ASKED = """
import inspect, os
from typer.testing import CliRunner
import cs336sys.api as api
from cs336sys.cli import app
os.environ["COLUMNS"] = "80"
for command in ("attn", "kernels", "ddp"):
    assert "--dummy <a,b>" in CliRunner().invoke(app, [command, "--help-all"]).output
    refused = CliRunner().invoke(app, [command, "--dummy", "-1"])
    assert (refused.exit_code, refused.output) == (2, "error: --dummy '-1': must be at least 0\\n")
    print(inspect.signature(getattr(api, command)).parameters["dummy"])
"""


def test_an_option_of_an_operation_or_of_ddp_takes_three_files(with_options):
    named = inspect.Parameter("dummy", 3, default=(7,), annotation=int | Iterable[int])
    assert run(with_options, sys.executable, "-c", ASKED).splitlines() == [str(named)] * 3
    (with_options / "settings.toml").write_text("attn.dummy = 5\n")
    planned = (*COMMAND, "--config", "settings.toml", "attn", "--dry-run", "--device", "cpu")
    assert "dummies 5" in run(with_options, *planned)
    assert {row["dummy"] for row in rows_of(run(with_options, *planned, "--format", "csv"))} == {"5"}
    ddp = (*COMMAND, "ddp", "--mode", "naive,bucketed", "--size", "tiny", "--device", "cpu", "--dry-run")
    rows = rows_of(run(with_options, *ddp, "--dummy", "1,2", "--format", "csv"))
    assert [(row["strategy"], row["bucket_mb"], row["dummy"]) for row in rows] == [
        (strategy, bucket, dummy) for strategy, bucket in (("naive", ""), ("bucketed", "block")) for dummy in ("1", "2")
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "shape"),
    [
        ("attn", "--implementation eager --context 8 --head-dim 4 --warmup 0 --steps 1"),
        ("kernels", "--implementation eager --op adamw --tokens 4 --width 8 --warmup-ms 0 --repetition-ms 1"),
        ("ddp", "--mode naive --context 16 --batch-size 2 --vocab-size 64 --warmup 1 --steps 2"),
    ],
)
def test_a_new_option_reaches_its_cells(with_options, command, shape):
    settings = ("--device", "cpu", *shape.split(), "--dummy", "1,2", "--save", "cells.jsonl")
    assert "dummies" in run(with_options, *COMMAND, command, *settings)
    cells = read_results(with_options / "cells.jsonl").cells
    assert [(cell.status, cell.configuration["dummy"], cell.derived["doubled"]) for cell in cells] == [
        ("ok", dummy, 2 * dummy) for dummy in (1, 2)
    ]
    shown = rows_of(run(with_options, *COMMAND, "show", "cells.jsonl", "--format", "csv", "--sort", "-dummy"))
    assert [row["dummy"] for row in shown] == ["2", "1"]


def test_a_column_takes_one_file(changed, tmp_path):
    assert len(COLUMN) <= 1
    folder = changed(COLUMN)
    saved = PACKAGE.parent / "docs" / "results" / "bench-turn-h200.jsonl.gz"
    text = run(folder, sys.executable, "-m", "cs336sys", "show", str(saved), "--format", "csv")
    rows = rows_of(text)
    measured = [row for row in rows if row["status"] == "ok"]
    assert [float(row["dummy_ms"]) for row in measured] == [2 * float(row["step_ms_mean"]) for row in measured]
    assert measured


def test_a_strategy_takes_two_files(changed):
    assert len(STRATEGY) <= 4
    folder = changed(STRATEGY)
    shard = (*COMMAND, "shard", "--size", "tiny", "--device", "cpu", "--strategy")
    columns = ("--format", "csv", "--columns", "strategy,peak_gib,predicted_sent_bytes")
    dummy, none = rows_of(run(folder, *shard, "dummy,none", "--dry-run", *columns))
    assert dummy == none | {"strategy": "dummy"}
    assert float(dummy["peak_gib"]) > 0
    assert "optimizer-flat, dummy, fsdp" in " ".join(run(folder, *COMMAND, "shard", "--help", COLUMNS="200").split())
    assert "did you mean dummy" in run(folder, *shard, "dumy", exit_code=2)


@pytest.mark.nightly
def test_a_new_strategy_trains_and_is_shown(changed):
    folder = changed(STRATEGY)
    settings = ("--size", "tiny", "--device", "cpu", "--steps", "2", "--warmup", "1", "--save", "cells.jsonl")
    run(folder, *COMMAND, "shard", "--strategy", "dummy", *settings)
    shown = run(folder, *COMMAND, "show", "cells.jsonl", "--format", "csv", "--table", "shard")
    (row,) = rows_of(shown)
    assert (row["strategy"], row["status"]) == ("dummy", "ok")
    assert float(row["sent_bytes"]) == pytest.approx(float(row["predicted_sent_bytes"]), rel=0.01)


def test_a_fused_operation_takes_three_files(changed):
    assert len(OPERATION) <= 3
    folder = changed(OPERATION)
    kernels = (*COMMAND, "kernels", "--device", "cpu", "--op")
    shape = ("--tokens", "4", "--width", "8", "--warmup-ms", "1", "--repetition-ms", "1")
    run(folder, *kernels, "dummy", *shape, "--save", "cells.jsonl")
    rows = rows_of(run(folder, *COMMAND, "show", "cells.jsonl", "--format", "csv"))
    assert [(row["op"], row["implementation"], row["status"]) for row in rows] == [
        ("dummy", "ours", "ok"),
        ("dummy", "eager", "ok"),
    ]
    assert "dummy, weighted-sum" in " ".join(run(folder, *COMMAND, "kernels", "--help-all", COLUMNS="200").split())
    assert "did you mean dummy" in run(folder, *kernels, "dumy", exit_code=2)


def test_a_command_takes_four_files(changed):
    assert len(COMMAND_FILES) <= 4
    folder = changed(COMMAND_FILES)
    assert "Count the parameters of models" in run(folder, *COMMAND, "--help", COLUMNS="120")
    dummy = (*COMMAND, "dummy", "--size", "tiny", "--device", "cpu", "--save", "cells.jsonl", "--format", "csv")
    (measured,) = rows_of(run(folder, *dummy))
    (shown,) = rows_of(run(folder, *COMMAND, "show", "cells.jsonl", "--format", "csv"))
    assert measured["counted"] == shown["counted"] == "3084928"
    assert "did you mean dummy" in run(folder, *COMMAND, "dumy", exit_code=2)
