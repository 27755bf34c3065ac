"""``--track``: every measured cell is a run of an experiment tracker, with its parameters, figures and files."""

import contextlib
import importlib.util
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from cs336sys.command_line.faults import say
from cs336sys.errors import CapabilityError, OutputError
from cs336sys.processes.files import OwnedFolder
from cs336sys.results.model import Cell, Run, folders_of, json_text

# Of MLflow's experiment and W&B's project, where their variables name no other.
PROJECT = "cs336sys"


@dataclass(frozen=True)
class TrackedCell:
    """A cell as trackers take it.

    Attributes:
        name: of the run: the command, and the settings that tell the cell from others of its sweep.
        group: the sweep, by the id of its run.
        parameters: the configuration, and the machine.
        figures: finite statistics of samples and numbers derived from them, by the names of csv.
        texts: derived texts, the status and its reason.
        files: the cell as JSON, and what it has left in the folders that it was given.
    """

    name: str
    group: str
    parameters: Mapping[str, str]
    figures: Mapping[str, float]
    texts: Mapping[str, str]
    files: Sequence[Path]
    is_failed: bool


class _Mlflow:
    """Runs of MLflow: in its own local store, or where ``MLFLOW_TRACKING_URI`` says. A run is whole once tracked."""

    def __init__(self, command: str):
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # It reports that it makes a new store.
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        self._experiment = experiment.experiment_id if experiment else self._client.create_experiment(name)

    def track(self, cell: TrackedCell) -> None:
        from mlflow.entities import Metric, Param, RunTag

        run_id = self._client.create_run(self._experiment, run_name=cell.name).info.run_id
        now_ms = int(1000 * time.time())
        metrics = [Metric(name, value, timestamp=now_ms, step=0) for name, value in cell.figures.items()]
        parameters = [Param(name, value) for name, value in cell.parameters.items()]
        # MLflow's limit for a tag; its parameters may have 6000.
        tags = [RunTag(name, value[:5000]) for name, value in {**cell.texts, "sweep": cell.group}.items()]
        self._client.log_batch(run_id, metrics, parameters, tags)
        for path in cell.files:
            self._client.log_artifact(run_id, str(path))
        self._client.set_terminated(run_id, "FAILED" if cell.is_failed else "FINISHED")

    def close(self) -> None:
        pass


class _WeightsAndBiases:
    """Runs of W&B: in the folder ``wandb`` for ``wandb sync``, or as ``WANDB_MODE`` says."""

    def __init__(self, command: str):
        import wandb

        self._wandb = wandb
        self._command = command

    def track(self, cell: TrackedCell) -> None:
        run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            mode=os.environ.get("WANDB_MODE", "offline"),
            group=cell.group,
            job_type=self._command,
            name=cell.name,
            config=dict(cell.parameters),
            reinit="finish_previous",
            # It prints nothing among our lines, and reads no clocks or memory while the next cell is measured.
            settings=self._wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        try:
            run.log(dict(cell.figures))
            run.summary.update(dict(cell.texts))
            for path in cell.files:
                copy = Path(run.dir, path.name)  # A copy, because the file may be gone when the run is synchronised.
                copy.write_bytes(path.read_bytes())
                run.save(str(copy), base_path=run.dir, policy="end")
        finally:
            run.finish(exit_code=1 if cell.is_failed else 0)

    def close(self) -> None:
        self._wandb.teardown()


Tracker: TypeAlias = _Mlflow | _WeightsAndBiases
_TRACKERS: dict[str, type[Tracker]] = {"mlflow": _Mlflow, "wandb": _WeightsAndBiases}


class Tracking:
    """The trackers of a sweep. One that fails is left out from then on; ``faults`` say why cells are missing in it."""

    def __init__(self, command: str, settings: Sequence[str], trackers: Mapping[str, Tracker]):
        self.faults: list[OutputError] = []
        self._command = command
        self._settings = settings
        self._trackers = dict(trackers)

    def track(self, cell: Cell, run: Run | None, took_s: float) -> None:
        """Track a cell that was just measured; files older than ``took_s`` seconds are those of earlier cells."""
        if not self._trackers:
            return
        with _as_tracked(self._command, self._settings, cell, run, time.time() - took_s) as tracked:
            for name, tracker in list(self._trackers.items()):
                try:
                    tracker.track(tracked)
                except Exception as error:
                    fault = OutputError(f"--track {name}: {_one_line(error)}")
                    say(f"warning: {fault}; later measurements are not tracked there")
                    self.faults.append(fault)
                    del self._trackers[name]
                    _close(tracker)

    def close(self) -> None:
        for tracker in self._trackers.values():
            _close(tracker)


def check_installed(names: Sequence[str]) -> None:
    """Raise a CapabilityError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise _not_installed(name, name)


def _not_installed(tracker: str, package: str | None) -> CapabilityError:
    return CapabilityError(f"--track {tracker}: {package} is not installed: python -m pip install 'cs336sys[track]'")


def start_tracking(command: str, settings: Sequence[str], names: Sequence[str]) -> Tracking:
    """Start the trackers of these names (``options.output.TRACKERS``), or raise a CapabilityError if one cannot.

    Args:
        settings: those of a configuration that tell the cells of the sweep apart.
    """
    started = {}
    for name in names:
        try:
            import_module(name)
            started[name] = _TRACKERS[name](command)
        except ModuleNotFoundError as error:
            raise _not_installed(name, error.name) from error
        except Exception as error:
            raise CapabilityError(f"--track {name}: {_one_line(error)}") from error
    return Tracking(command, settings, started)


@contextlib.contextmanager
def _as_tracked(
    command: str, settings: Sequence[str], cell: Cell, run: Run | None, started_s: float
) -> Iterator[TrackedCell]:
    """Give the cell as trackers take it; its JSON file is removed at the end of this context."""
    configuration = cell.configuration
    machine = {} if run is None else {f"machine.{name}": value for name, value in run.machine.items()}
    parameters = (configuration | machine).items()
    figures = {name: value for name, value in cell.derived.items() if isinstance(value, int | float)}
    for name, samples in cell.samples.items():
        if samples.measured:
            column = f"{name}_{samples.unit}"
            figures |= {f"{column}_{part}": getattr(samples, part) for part in ("mean", "std", "median")}
    texts = {name: value for name, value in cell.derived.items() if isinstance(value, str)}
    texts |= {"status": cell.status} | ({"reason": cell.reason} if cell.reason else {})
    folders = folders_of(configuration).values()
    files = [path for folder in folders for path in sorted(Path(folder).glob("*")) if path.is_file()]
    with OwnedFolder() as folder:
        cell_file = folder / "cell.json"
        cell_file.write_text(json_text({"cell": asdict(cell), "run": None if run is None else asdict(run)}))
        yield TrackedCell(  # Named by any one setting where none tells cells apart.
            name=" ".join([command, *(str(configuration.get(name)) for name in settings or list(configuration)[:1])]),
            group=cell.run_id or "a run not recorded",
            parameters={name: value if isinstance(value, str) else json_text(value) for name, value in parameters},
            figures={name: float(value) for name, value in figures.items() if math.isfinite(value)},
            texts=texts,
            files=[cell_file, *(path for path in files if path.stat().st_mtime >= started_s)],
            is_failed=cell.status in ("error", "wrong"),
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _close(tracker: Tracker) -> None:
    with contextlib.suppress(Exception):  # What is wrong with a tracker is reported where it tracks.
        tracker.close()
