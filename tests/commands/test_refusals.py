"""What a command refuses before it starts anything: one sentence, in a second, with --dry-run as without."""

import importlib.util
import json
import shlex
from pathlib import Path
from string import Template
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from cs336sys.cli import app, module_of
from cs336sys.errors import UsageError
from cs336sys.machine.system import Capacity

PLANNED = ("bench", "nsys", "memprof", "allreduce", "ddp", "shard", "attn", "flash")


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], auto_envvar_prefix="CS336SYS")


def refused(*arguments, code=2):
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


SWEEPING = [
    (["--cell-timeout", "-1"], "--cell-timeout '-1': must be between 0.001 and 1e+06"),
    (["--track", "nope"], "--track 'nope': choose from mlflow, wandb"),
    (["--save", "x.csv"], "--save x.csv: holds JSON lines, whose names end in .jsonl or .jsonl.gz"),
]


@pytest.mark.parametrize("command", PLANNED)
def test_a_dry_run_refuses_what_the_run_refuses(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, sentence in [*SWEEPING, (["--resume"], "--resume needs --save")]:
        assert refused(command, *options) == refused(command, *options, "--dry-run")
        assert sentence in refused(command, *options, "--dry-run")
    (tmp_path / "notes.jsonl").write_text("of today\n")
    sentence = "cannot write results to notes.jsonl: it holds something else; give another file"
    assert sentence in refused(command, "--save", "notes.jsonl", "--dry-run")
    assert "no folder that can be written to" in refused(command, "--save", "notes.jsonl/r.jsonl", "--dry-run")
    monkeypatch.setattr("cs336sys.machine.system.capacity", lambda device: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "device 'cuda': torch sees no CUDA GPU here" in refused(command, "--device", "cuda", "--dry-run", code=3)
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "wandb" else found(name, *rest))
    assert "--track wandb: wandb is not installed" in refused(command, "--track", "wandb", "--dry-run", code=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.jsonl"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((command, "--plot x.png") for command in ("bench", "nsys", "allreduce", "ddp", "shard", "attn", "flash")),
        *((command, "--plot-scaling x.png") for command in ("ddp", "shard")),
        *((command, "--trace x") for command in ("ddp", "shard")),
        ("ddp", "--plot-buckets x.png"),
        ("nsys", "--keep x"),
        ("memprof", "--snapshot x"),
    ],
)
def test_a_dry_run_writes_nothing_that_is_measured(command, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks = ["--world-size", "1,2"] if option.startswith("--plot-scaling") else []
    sentence = f"error: {option}: --dry-run measures nothing to write there; leave one of them out\n"
    assert refused(command, *ranks, *option.split(), "--dry-run") == sentence


@pytest.mark.parametrize("command", [*PLANNED, "kernels", "losses"])
def test_slurm_reads_the_values_of_options(command):
    for options, sentence in SWEEPING:
        assert sentence in refused("slurm", command, *options)
    assert invoke("slurm", command, "--resume", *(["--text", __file__] if command == "losses" else [])).exit_code == 0


def test_slurm_plans_for_the_devices_and_trackers_of_the_job():
    for command in PLANNED:
        assert invoke("slurm", command, "--device", "cuda", "--track", "wandb").exit_code == 0


TESTS = Path(__file__).parents[1]
RESULTS = TESTS.parent / "docs" / "results"
# What stands for a path in refused.txt.
PATHS = {"MODELS": TESTS / "user_models.py", "RESULTS": RESULTS, "TEXT": __file__}
PATHS |= {name: RESULTS / f"{file}-h200.jsonl.gz" for name, file in (("BENCH", "bench"), ("BOARD", "flash-board"))}


def refused_commands():
    """Return pairs of a command and what its error says."""
    text = Template(Path(__file__).with_name("refused.txt").read_text()).substitute(PATHS)
    lines = [line.strip() for line in text.splitlines() if line and not line.startswith("#")]
    return zip(lines[::2], lines[1::2], strict=True)


def test_bad_input_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cs336sys.run.cells.Worker.measure", None)
    monkeypatch.setattr("cs336sys.machine.diagnosis.diagnose", None)
    wrong = []
    for line, sentence in refused_commands():
        result = invoke(*shlex.split(line))
        errors = result.stderr.splitlines()
        if (result.exit_code, result.stdout, len(errors)) != (2, "", 1) or not errors[0].startswith("error: "):
            wrong.append(f"{line}: {result.exit_code}, {result.output}")
        elif sentence not in result.stderr:
            wrong.append(f"{line}: {result.stderr}")
    assert not wrong, "\n".join(wrong)
    assert list(tmp_path.iterdir()) == []


def test_cell_that_does_not_fit_is_named_before_it_runs(monkeypatch):
    monkeypatch.setattr("cs336sys.machine.system.capacity", {"cpu": Capacity("a CPU", 23.5)}.get)
    for command in ("bench", "nsys", "memprof"):
        monkeypatch.setattr(f"{module_of(command)}.run_sweep", Mock(side_effect=UsageError("measured")))
        refused_cell = invoke(command, "--size", "tiny,10b", "--device", "cpu")
        assert refused_cell.exit_code == 2
        assert refused_cell.stderr.startswith("error: 10b-s512-b4-v10000-train-fp32-")
        assert refused_cell.stderr.endswith(
            " GiB, and a CPU has 23.5: choose a smaller size (--dry-run shows what fits), or add --force\n"
        )
        told = invoke(command, "--size", "tiny,10b", "--device", "cpu", "--force").stderr.splitlines()
        assert len(told) == 2
        assert told[0].startswith("warning: 10b-s512-b4-v10000-train-fp32-")
        assert "is predicted to need " in told[0]
        assert told[0].endswith(
            " GiB, and a CPU has 23.5: it will run out of memory, or be killed; --dry-run shows what fits"
        )
        assert invoke(command, "--size", "tiny", "--device", "cpu").stderr == "error: measured\n"


@pytest.mark.parametrize("command", ["ddp", "shard"])
def test_ranks_that_do_not_fit_one_cpu_are_said_before_they_are_tried(monkeypatch, command):
    found = Capacity("a CPU", 300.0)
    monkeypatch.setattr("cs336sys.machine.system.capacity", lambda device: found)
    monkeypatch.setattr(f"{module_of(command)}.run_sweep", Mock(side_effect=UsageError("measured")))
    arguments = ("--size", "10b", "--world-size", "1,2", "--device", "cpu")
    assert "a CPU has 300.0: choose a smaller size" in invoke(command, *arguments).stderr
    alone = invoke(command, *arguments, "--force").stderr.splitlines()
    # One rank needs 199 GiB, and the strategies of one cell the same.
    assert len(alone) == 2
    assert " on 2 ranks is predicted to need 398.3 GiB, and a CPU has 300.0: it will run out" in alone[0]
    # A GPU holds as many blocks as are compared on it.
    found = Capacity("a GPU", 300.0, is_gpu=True)
    assert invoke(command, "--size", "10b", "--world-size", "2").stderr == "error: measured\n"
    found = Capacity("a CPU", 300.0)
    assert invoke(command, "--size", "10b", "--check-layers", "1").stderr == "error: measured\n"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert invoke(command, "--size", "10b").stderr == "error: measured\n"


def test_a_grid_on_the_line_goes_before_shapes_of_a_settings_file(tmp_path):
    (tmp_path / "s.toml").write_text("[flash]\ncontext = 128\nqueries = 64\n")
    options = "--grid", "board", "--dry-run", "--format", "json"
    (plan,) = json.loads(invoke("--config", tmp_path / "s.toml", "flash", *options).stdout)["tables"]
    assert {(row["context"], row["queries"]) for row in plan["rows"]} == {(16384, None)}
    (tmp_path / "s.toml").write_text("[flash]\ncontext = 128\ngrid = 'board'\n")
    assert "--grid board: has shapes of its own" in invoke("--config", tmp_path / "s.toml", "flash").stderr
