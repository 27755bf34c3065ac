"""One schema for what every command measures, and the JSON-lines file it is kept in. Plain data, no torch.

A results file holds one JSON object a line. A ``run`` line describes one invocation (arguments, machine, versions); the
``cell`` lines after it name that run by its id. A cell is written and flushed the moment it is done, so an interrupted
sweep loses nothing that was measured, and files can be concatenated.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cs336sys.errors import UsageError

SCHEMA_VERSION = 1

Status = Literal["ok", "oom", "timeout", "unsupported", "error", "wrong"]


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one quantity; the warm-up ones are kept apart.

    Attributes:
        unit: what the numbers are in, as in column names: ``ms``, ``gib``, ``gbps``.
        method: how they were taken: ``cuda events``, ``cpu clock``, ``graph replay``, ...
    """

    unit: str
    method: str
    measured: tuple[float, ...]
    warmup: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        return statistics.fmean(self.measured)

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 for a single sample."""
        return statistics.stdev(self.measured) if len(self.measured) > 1 else 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.measured)

    def percentile(self, percent: float) -> float:
        """Linear interpolation between the closest ranks, ``percent`` in 0..100."""
        ordered = sorted(self.measured)
        position = (len(ordered) - 1) * percent / 100
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Cell:
    """One point of a sweep: what was asked for and what came of it.

    Attributes:
        configuration: everything that decides the measurement, JSON scalars only.
        samples: raw measurements by column name.
        derived: columns computed from them (``tokens_per_s``, ``mfu_percent``, ...); None where it is unknown.
        reason: why a cell that is not ``ok`` has no numbers, one sentence.
        run_id: the run that measured it.
    """

    command: str
    configuration: dict[str, Any]
    status: Status
    samples: dict[str, Samples] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    run_id: str = ""


@dataclass(frozen=True)
class Run:
    """One invocation of a command and the machine it ran on.

    Attributes:
        machine: devices and software that timings depend on; two runs are comparable when it is equal.
        environment: everything else worth knowing later (git commit, matmul precision, clocks, temperature, ...).
    """

    run_id: str
    time: str
    arguments: tuple[str, ...]
    machine: dict[str, Any]
    environment: dict[str, Any]


def configuration_key(configuration: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> str:
    """Canonical text of a configuration: equal for equal settings, whatever their order."""
    return json.dumps({name: value for name, value in configuration.items() if name not in ignore}, sort_keys=True)


class ResultsFile:
    """Appends runs and cells to a JSON-lines file.

    Raises:
        UsageError: the file cannot be opened for appending; raised by the constructor, before anything is measured.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("a+b")
        except OSError as error:
            raise UsageError(f"cannot write results to {path}: {error.strerror or error}") from error
        self._end_truncated_line()

    def _end_truncated_line(self) -> None:
        """Close a line that an earlier, killed run left half written, so that the next record starts its own."""
        if self._stream.seek(0, 2) > 0:
            self._stream.seek(-1, 2)
            if self._stream.read(1) != b"\n":
                self._stream.write(b"\n")

    def append(self, record: Run | Cell) -> None:
        line = {"schema_version": SCHEMA_VERSION, "kind": type(record).__name__.lower()} | asdict(record)
        self._stream.write(json.dumps(line).encode() + b"\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


@dataclass(frozen=True)
class Results:
    """What a results file holds."""

    runs: dict[str, Run]
    cells: tuple[Cell, ...]

    def measured_on(self, machine: Mapping[str, Any]) -> Iterator[Cell]:
        """The cells that were measured on an equal machine."""
        for cell in self.cells:
            run = self.runs.get(cell.run_id)
            if run is not None and run.machine == machine:
                yield cell


def read_results(path: Path) -> Results:
    """Read a file written by :class:`ResultsFile`; half-written lines (a killed run's last) are passed over.

    Raises:
        UsageError: the file cannot be read, holds no results, or was written by a newer version.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read results from {path}: {error.strerror or error}") from error
    runs: dict[str, Run] = {}
    cells: list[Cell] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            version, kind = record.pop("schema_version"), record.pop("kind")
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if version != SCHEMA_VERSION:
            raise UsageError(f"{path} has schema version {version}, this cs336sys reads version {SCHEMA_VERSION}")
        try:
            if kind == "run":
                runs[record["run_id"]] = Run(**record | {"arguments": tuple(record["arguments"])})
            elif kind == "cell":
                cells.append(Cell(**record | {"samples": {n: _samples(s) for n, s in record["samples"].items()}}))
        except (TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{path}: line {number} is no {kind} of this schema") from error
    if not runs and not cells:
        raise UsageError(f"{path} holds no results: it should be a file written by --save")
    return Results(runs, tuple(cells))


def _samples(record: dict[str, Any]) -> Samples:
    return Samples(**record | {"measured": tuple(record["measured"]), "warmup": tuple(record["warmup"])})
