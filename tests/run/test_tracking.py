"""``--track``: cells become runs of the real trackers; a tracker that fails loses nothing."""

import json
import math
import os

import pytest
import typer
from fake_worker import FakeWorker

from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.errors import CapabilityError
from cs336sys.results.model import Cell, Samples
from cs336sys.run import tracking
from cs336sys.run.sweep import run_sweep
from cs336sys.run.tracking import start_tracking


def cell(size, status="ok", **settings):
    configuration = {"size": size, "tf32": False} | settings
    if status != "ok":
        return Cell("bench", configuration, status, run_id="abc123")
    derived = {"tokens_per_s": 100.5, "peak_gib": None, "mfu_percent": math.nan, "verdict": "yes", "timeline": {}}
    samples = {"step": Samples("ms", "cpu clock", (1.0, 2.0, 6.0))}
    return Cell("bench", configuration, status, samples, derived, run_id="abc123")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "WANDB_")):
            monkeypatch.delenv(name)
    return tmp_path


def track_two(name, folder):
    """A cell that is measured and one that breaks; the first leaves a file beside one of another day."""
    (folder / "traces").mkdir()
    (folder / "traces" / "old.json").write_text("{}")
    os.utime(folder / "traces" / "old.json", (1, 1))
    (folder / "traces" / "step.json").write_text("a trace")
    tracker = start_tracking("bench", ["size"], [name])
    tracker.track(cell("tiny", trace=str(folder / "traces")), FakeWorker.run, 60.0)
    tracker.track(cell("small", "error"), None, 60.0)
    tracker.close()
    assert tracker.faults == []


def test_cells_are_runs_of_mlflow(folder):
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed: pip install 'cs336sys[track]'")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed: pip install 'cs336sys[track]'")
    pytest.importorskip("alembic", reason="alembic is not installed: pip install 'cs336sys[track]'")
    track_two("mlflow", folder)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("cs336sys")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"bench tiny", "bench small"}
    run = runs["bench tiny"]
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "size": "tiny",
        "tf32": "false",
        "trace": str(folder / "traces"),
        "machine.gpu": "NVIDIA H200",
        "machine.gpus": "2",
        "machine.torch": "null",
    }
    assert run.data.metrics == {
        "step_ms_mean": 3.0,
        "step_ms_median": 2.0,
        "step_ms_std": pytest.approx(math.sqrt(7)),
        "tokens_per_s": 100.5,
    }
    tags = {name: value for name, value in run.data.tags.items() if not name.startswith("mlflow.")}
    assert tags == {"status": "ok", "verdict": "yes", "sweep": "abc123"}
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"cell.json", "step.json"}
    saved = json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/cell.json"))
    assert saved["cell"]["samples"]["step"]["measured"] == [1.0, 2.0, 6.0]
    assert saved["run"]["machine"]["gpus"] == 2
    assert runs["bench small"].info.status == "FAILED"
    assert runs["bench small"].data.tags["status"] == "error"
    assert sorted(path.name for path in folder.iterdir()) == ["mlflow.db", "mlruns", "traces"], "the local store"


def test_cells_are_runs_of_wandb(folder, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'cs336sys[track]'")
    ended, finish = [], wandb.Run.finish
    monkeypatch.setattr(wandb.Run, "finish", lambda run, exit_code: ended.append(exit_code) or finish(run, exit_code))
    track_two("wandb", folder)
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(runs) == 2, "nothing is sent"
    # Records, whose texts stand in them as they are.
    logs = [next(path.glob("*.wandb")).read_bytes() for path in runs]
    (tiny,), (small,) = ([log for log in logs if name in log] for name in (b"bench tiny", b"bench small"))
    texts = b'cs336sys abc123 size "tiny" machine.gpu step_ms_median tokens_per_s 100.5 status "ok"'.split()
    assert [text for text in (*texts, b'"NVIDIA H200"') if text not in tiny] == []
    assert b"mfu_percent" not in tiny, "NaN is no figure"
    assert b'"error"' in small
    assert ended == [0, 1]
    files = {file.name for file in (runs[logs.index(tiny)] / "files").iterdir()}
    assert files & {"cell.json", "step.json", "old.json"} == {"cell.json", "step.json"}


class Recorder:
    """A tracker that fails at one of its cells."""

    def __init__(self, fails_at=None):
        self.names, self.closed, self.fails_at = [], False, fails_at

    def track(self, cell):
        assert not self.closed
        self.names.append((cell.name, cell.is_failed))
        assert json.loads(cell.files[0].read_text())["cell"]["status"]
        if len(self.names) == self.fails_at:
            raise ConnectionError("the server\nis gone")

    def close(self):
        self.closed = True


@pytest.fixture
def recorders(monkeypatch):
    """In the places of mlflow, which fails at its second cell, and of wandb."""
    started = {"mlflow": Recorder(fails_at=2), "wandb": Recorder()}
    monkeypatch.setattr(tracking, "_TRACKERS", {name: lambda command, name=name: started[name] for name in started})
    monkeypatch.setattr(tracking, "import_module", lambda name: None)
    return started


def test_a_sweep_tracks_what_it_measures_and_goes_on_without_a_tracker_that_fails(
    recorders, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr("cs336sys.run.cells.Worker", FakeWorker)
    path = tmp_path / "r.jsonl"
    configurations = [{"action": "measure"}, {"action": "raise"}, {"action": "measure again"}]
    run_sweep("bench", "fake:cells", configurations[:1], SweepOptions(save=path))
    asked = SweepOptions(save=path, resume=True, track=["mlflow", "wandb"])
    run_sweep("bench", "fake:cells", configurations[:1], asked)
    assert recorders["wandb"].names == [], "a cell of the file was not measured here"
    recorders["mlflow"].closed = recorders["wandb"].closed = False
    sweep = run_sweep("bench", "fake:cells", configurations, SweepOptions(track=["mlflow", "wandb"]))
    assert [cell.status for cell in sweep.cells] == ["ok", "error", "ok"]
    measured = [("bench measure", False), ("bench raise", True), ("bench measure again", False)]
    assert recorders["wandb"].names == measured
    assert recorders["mlflow"].names == measured[:2]
    assert recorders["mlflow"].closed
    assert recorders["wandb"].closed
    sentence = "--track mlflow: the server is gone"
    assert f"warning: {sentence}; later measurements are not tracked there\n" in capsys.readouterr().err
    with pytest.raises(typer.Exit) as ended:
        sweep.report(lambda cells, run: [], OutputOptions())
    assert ended.value.exit_code == 1
    assert f"error: {sentence}\n" in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_measured(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(tracking, "import_module", missing)
    sentence = "--track wandb: wandb is not installed: python -m pip install 'cs336sys\\[track\\]'"
    with pytest.raises(CapabilityError, match=sentence):
        run_sweep("bench", "fake:cells", [{"action": "measure"}], SweepOptions(track=["wandb"]))
