"""One schema for the measurements of every command, and the reading of its JSON-lines files. Plain data, no torch.

A ``run`` line describes one invocation (arguments, machine, versions); the ``cell`` lines after it name that run by its
id. JSON lacks NaN and infinities: they are the strings ``NaN``, ``Infinity`` and ``-Infinity``, or bare words.
"""

import contextlib
import functools
import gzip
import io
import json
import math
import os
import pwd
import re
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from cs336sys.errors import UsageError
from cs336sys.results import foreign
from cs336sys.results.foreign import GZIP_MAGIC, TooLargeError, is_compressed, members_of
from cs336sys.results.recording import current_recording

SCHEMA_VERSION = 1
TABLES_SCHEMA_VERSION = 1  # Of the documents that ``--format json`` prints.

Status = Literal["ok", "oom", "timeout", "unsupported", "error", "wrong"]

# Entries of a run's environment that name the code, on which no timing depends, and readings of a moment.
_NO_CONDITIONS = ("cs336sys", "git_commit", "git_dirty", "source_digest", "seed")
_MOMENTARY = re.compile(r"gpu\d+_(sm_clock_mhz|temperature_c|power_w|clock_limits)")

# What tables for programs say about a row besides its settings and values.
ORIGIN = ("reason", "gpu_name", "gpu_count", "cpu", "torch", "driver", "date", "source_digest", "run_id")

# A time between CUDA events is a float32 of ms, of which 7 digits are sure. Written with the 17 digits of a double the
# compressed results in docs/results took 4.2 MB, with 7 they take 2.4 MB.
_TIME_DIGITS = 7


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
        """Sample standard deviation; 0 for a single sample, NaN where one of them is no finite number."""
        if len(self.measured) < 2:
            return 0.0
        if not all(map(math.isfinite, self.measured)):
            return math.nan
        mean = self.mean  # In floats: statistics.stdev computes in fractions, which takes ten times as long.
        return math.sqrt(math.fsum((sample - mean) ** 2 for sample in self.measured) / (len(self.measured) - 1))

    @property
    def median(self) -> float:
        return statistics.median(self.measured)

    @property
    def to_keep(self) -> "Samples":
        """Return what files keep of the samples: :data:`_TIME_DIGITS` digits of times, other units as they are."""
        if self.unit not in ("ms", "us"):
            return self
        measured, warmup = (
            tuple(float(f"{time:.{_TIME_DIGITS}g}") for time in times) for times in (self.measured, self.warmup)
        )
        return replace(self, measured=measured, warmup=warmup)

    def percentile(self, percent: float) -> float:
        """Interpolate linearly between the closest ranks; ``percent`` is 0 to 100."""
        ordered = sorted(self.measured)
        position = (len(ordered) - 1) * percent / 100
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Cell:
    """One point of a sweep: its configuration, and what was measured of it.

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
        arguments: the command line, with ``~`` for the user's home folder, so that files can be published.
        machine: devices and software that timings depend on; two runs are comparable when it is equal.
        environment: everything else worth knowing later (git commit, matmul precision, clocks, temperature, ...).
    """

    run_id: str
    time: str
    arguments: tuple[str, ...]
    machine: dict[str, Any]
    environment: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(map(hide_home, self.arguments)))

    @property
    def origin(self) -> dict[str, Any]:
        """Return what rows of tables say about where and when they were measured, by the names of :data:`ORIGIN`."""
        values = self.machine | self.environment
        values |= {"gpu_name": self.machine.get("gpu"), "run_id": self.run_id, "date": self.time}
        return {name: values.get(name) for name in ORIGIN}

    @property
    def conditions(self) -> dict[str, Any]:
        """Return what a timing depends on besides the code: the machine, threads, matmul precision, variables.

        A GPU's clock and temperature at a moment are no part of it; its power limit is.
        """
        return self.machine | {
            name: value
            for name, value in self.environment.items()
            if name not in _NO_CONDITIONS and not _MOMENTARY.fullmatch(name)
        }


def hide_home(text: str) -> str:
    """Return the text with ``~`` for the path of the user's home folder."""
    return _homes(os.environ.get("HOME", "")).sub("~", text)


@functools.cache
def _homes(home: str) -> re.Pattern[str]:
    """Return what matches the home folder, by its name in the environment or in the list of users, or resolved."""
    homes = {home}
    with contextlib.suppress(KeyError):
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    homes = set(filter(os.path.isabs, homes))
    paths = {path.rstrip("/") for path in homes | set(map(os.path.realpath, homes))} - {""}
    texts = map(re.escape, sorted(paths, key=len, reverse=True))  # Of two that match, the longer.
    # As a whole name of folders: /home/me is in neither /data/home/me nor /home/me2. Without any, nothing matches.
    return re.compile(rf"(?<![\w-])(?:{'|'.join(texts)})(?![\w-])" if paths else r"(?!)")


def differing_conditions(first: Run | None, second: Run | None) -> dict[str, tuple[Any, Any]]:
    """Return the :attr:`Run.conditions` in which two runs differ, with both values; None is a run without a record."""
    if first is second:
        return {}
    a, b = ({"machine": "not recorded"} if run is None else run.conditions for run in (first, second))
    return {name: (a.get(name), b.get(name)) for name in a | b if a.get(name) != b.get(name)}


def same_code(first: Run | None, second: Run | None) -> bool | None:
    """Return whether two runs were of the same sources, by their digests; None where these are not recorded."""
    digests = [None if run is None else run.environment.get("source_digest") for run in (first, second)]
    return None if None in digests else digests[0] == digests[1]


def code_name(run: Run | None) -> str:
    """Name a run's code: commit and digest of the sources, as far as they are recorded."""
    environment = {} if run is None else run.environment
    digest, commit = environment.get("source_digest"), environment.get("git_commit")
    parts = ([f"commit {commit[:9]}"] if commit else []) + ([f"sources {digest[:9]}"] if digest else [])
    return " ".join(parts) or "not recorded"


def json_text(value: Any, **settings: Any) -> str:
    """Return a line of JSON, in which NaN and infinities are strings that :func:`read_results` reads as numbers."""
    try:
        return json.dumps(value, allow_nan=False, **settings)
    except ValueError:  # Few values have any of them, and looking through all takes time.
        return json.dumps(_with_named_numbers(value), allow_nan=False, **settings)


def _with_named_numbers(value: Any) -> Any:
    """Return a value of JSON with the names of :data:`.foreign.NOT_FINITE` for NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        # By their texts, for NaN equals no number.
        return next(name for name, number in foreign.NOT_FINITE.items() if str(number) == str(value))
    if isinstance(value, Mapping):
        return {name: _with_named_numbers(item) for name, item in value.items()}
    return [_with_named_numbers(item) for item in value] if isinstance(value, list | tuple) else value


# Settings that name a folder for files of a cell; memprof's "trace" is a boolean.
_FOLDERS = ("keep", "snapshot", "trace")


def folders_of(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Return the folders in which a cell leaves traces, reports or snapshots, by the settings that name them."""
    return {name: configuration[name] for name in _FOLDERS if isinstance(configuration.get(name), str)}


def configuration_key(configuration: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> str:
    """Return a text of what a configuration measures: equal for equal settings, whatever their order.

    No part of it are settings that no measurement depends on, the folders of :func:`folders_of`, how long ranks wait
    (``timeout_s``) and the :data:`ORIGIN` of rows, nor those that are None, which earlier versions may lack.
    """
    ignored = {*ignore, "timeout_s", *ORIGIN, *folders_of(configuration)}
    settings = {name: value for name, value in configuration.items() if name not in ignored and value is not None}
    return json_text(settings, sort_keys=True)


def distinguishing_settings(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the fewest leading settings that tell them apart: ``size``, not the ``d_model`` that follows from it."""
    distinguishing: list[str] = []
    # Values of the distinguishing settings so far: they do not tell apart configurations with equal keys.
    keys: list[tuple[str, ...]] = [()] * len(configurations)
    for name in dict.fromkeys(name for configuration in configurations for name in configuration):
        longer = [
            (*key, configuration_key({name: configuration.get(name)}))
            for key, configuration in zip(keys, configurations, strict=True)
        ]
        if len(set(longer)) > len(set(keys)):
            distinguishing.append(name)
            keys = longer
    return distinguishing


@dataclass(frozen=True)
class Results:
    """The content of a results file; ``passed_over`` has a sentence for each line that was left out."""

    runs: dict[str, Run]
    cells: tuple[Cell, ...]
    passed_over: tuple[str, ...] = ()


def read_several(paths: str) -> Results:
    """Read several files, ``a.jsonl,b.jsonl``, or one that has commas in its name, with errors as :func:`read_results`.

    A command that runs as a function may be called with results instead (:mod:`cs336sys.results.recording`).
    """
    recording = current_recording()
    if recording is not None and paths in recording.sources:
        return recording.sources[paths]
    names = [paths] if Path(paths).exists() else [name for name in paths.split(",") if name]
    files = {name: read_results(Path(name)) for name in names or [paths]}  # Commas alone are no file either.
    runs = {run_id: run for file in files.values() for run_id, run in file.runs.items()}
    cells = tuple(cell for file in files.values() for cell in file.cells)
    passed_over = (f"{name}: {sentence}" for name, file in files.items() for sentence in file.passed_over)
    return Results(runs, cells, tuple(passed_over))


def passed_over_words(results: Results) -> list[str]:
    """Warn of the lines that were left out, the first five with their faults."""
    named, count = results.passed_over[:5], len(results.passed_over) - 5
    note = [f"{count} more line{'s are' if count > 1 else ' is'} passed over"] if count > 0 else []
    return [*(f"{sentence}, and passed over" for sentence in named), *note]


def read_results(path: Path) -> Results:
    """Read a file of :mod:`cs336sys.results.file`, or a pipe, without the lines that are no record of this version.

    Here alone do files of strangers become runs and cells: numbers are of a size that can be computed with, times are
    more than 0, text is without control characters (:mod:`cs336sys.results.foreign`).

    Raises:
        UsageError: the file cannot be read, is too large, holds no results, or was written by a newer version.
    """
    runs: dict[str, Run] = {}
    cells: list[Cell] = []
    passed_over: list[str] = []
    usage = foreign.FileUsage()
    for number, line in enumerate(_json_lines(_contents(path, passed_over)), 1):
        usage.add(line + b"\n")
        if usage.percent > 100:
            raise UsageError(
                f"{path} holds records of more than {foreign.FILE_MEMORY_BYTES // foreign.MIB} MiB of memory, which is "
                "the most that is read: split it"
            )
        if len(line) > foreign.LINE_BYTES or line.count(b"{") + line.count(b"[") > foreign.LINE_CONTAINERS:
            passed_over.append(f"line {number} is larger than any record of results")
            continue
        record = read_record(line)
        if record is None:
            passed_over += [f"line {number} is cut, or no record of results"] if line.strip() else []
            continue
        kind = record.pop("kind")
        check_version(path, record.pop("schema_version"))
        try:
            record = foreign.checked_value(record)
            if kind == "run":
                runs[record["run_id"]] = _read_run(record)
            elif kind == "cell":
                cells.append(_read_cell(record))
            else:
                raise ValueError("it is neither a run nor a cell")
        except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
            name = kind if kind in ("run", "cell") else "record"
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            passed_over.append(f"line {number} is no {name} of this schema: {reason}")
    if not runs and not cells:
        # Say why if the first fault is one of a file of results. In other files each line is no record: that says less.
        fault = next(iter(passed_over), "")
        why = f"; {fault}" if "schema:" in fault or "damaged" in fault else ""
        raise UsageError(f"{path} holds no results: it should be a file written by --save{why}")
    return Results(runs, tuple(cells), tuple(passed_over))


def _contents(path: Path, passed_over: list[str]) -> Iterator[bytes]:
    """Yield the text of a file part by part, decompressed, and note in ``passed_over`` which data are damaged."""
    try:
        chunks = foreign.read_chunks(path, foreign.FILE_BYTES)
        first = next(chunks, b"")
        if not first.startswith(GZIP_MAGIC):  # A pipe's name does not say that what comes is compressed.
            if first and is_compressed(path):  # An empty file holds no gzip yet.
                raise UsageError(f"cannot read results from {path}: its name says that it is compressed, and it is not")
            yield first
            yield from chunks
            return
        compressed = b"".join((first, *chunks))
    except OSError as error:
        raise UsageError(f"cannot read results from {path}: {error.strerror or error}") from error
    try:
        for member in members_of(compressed, foreign.FILE_BYTES):
            if member.fault and not member.is_cut:
                # A byte has changed, and what it changed may look like a number.
                passed_over.append(f"the compressed data from byte {member.start} on is damaged ({member.fault})")
                continue
            yield member.content
            # A cut member with content has a cut last line, which read_results reports.
            if member.is_cut and not member.content:
                passed_over.append(f"the compressed data from byte {member.start} on is truncated")
    except TooLargeError as error:
        raise UsageError(
            f"{path} holds more than {foreign.FILE_BYTES // foreign.MIB} MiB when decompressed, which is the most that "
            "is read"
        ) from error


def _json_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a text; one longer than :data:`LINE_BYTES` is cut a byte later, so that its length shows."""
    pending: list[bytes] = []
    bytes_left = foreign.LINE_BYTES + 1
    for part in parts:
        # One line at a time: a list of all would take many times the memory of a part of empty lines.
        stream = io.BytesIO(part)
        while line := stream.readline():
            pending.append(line[:bytes_left])
            bytes_left -= len(pending[-1])
            if line.endswith(b"\n"):
                yield b"".join(pending).rstrip(b"\r\n")
                pending, bytes_left = [], foreign.LINE_BYTES + 1
    if pending:
        yield b"".join(pending)


def holds_results(path: Path) -> bool:
    """Return whether a file begins as those that ``--save`` writes, so that measurements would be lost with it."""
    try:
        with gzip.open(path) if is_compressed(path) else path.open("rb") as stream:
            first = stream.readline(2**20)  # The first line is a run's, which is short.
    except (OSError, EOFError, zlib.error):
        return False
    return first.startswith(b'{"schema_version"') or read_record(first) is not None


def read_record(line: bytes) -> dict[str, Any] | None:
    """Read a line, its values unchecked; None for one that is half written, or another program's."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and {"schema_version", "kind"} <= record.keys() else None


def check_version(path: Path, version: Any) -> None:
    """Raise a UsageError if a record is of another version than this program's."""
    if version != SCHEMA_VERSION:
        theirs = foreign.printable(str(version))[:40]
        raise UsageError(f"{path} has schema version {theirs}, this cs336sys reads version {SCHEMA_VERSION}")


_RUN_TYPES = {"run_id": str, "time": str, "arguments": list, "machine": dict, "environment": dict}
_CELL_TYPES = {"command": str, "run_id": str, "status": str, "configuration": dict, "samples": dict, "derived": dict}
_SAMPLES_TYPES = {"unit": str, "method": str, "measured": list, "warmup": list}


def _check_types(record: Any, types: Mapping[str, type]) -> None:
    """Raise a KeyError or a TypeError where a record lacks one of these fields, or has one of another type."""
    if not isinstance(record, dict):
        raise TypeError("samples are no dict")  # Runs and cells are, by read_record.
    for name, kind in types.items():
        if not isinstance(record[name], kind):
            raise TypeError(f"{name} is no {kind.__name__}")


def _read_run(record: dict[str, Any]) -> Run:
    """Build a run, or raise a KeyError, TypeError or ValueError that says what is wrong with the record."""
    _check_types(record, _RUN_TYPES)
    for name, value in (*record["machine"].items(), *record["environment"].items()):
        if isinstance(value, dict | list):
            raise TypeError(f"{name} is no text or number")
        # These are shortened for titles and notes, as text can be.
        if name in ("gpu", "cpu", "git_commit", "source_digest") and not isinstance(value, str | None):
            raise TypeError(f"{name} is no str")
    return Run(**record | {"arguments": tuple(map(str, record["arguments"]))})


def _read_cell(record: dict[str, Any]) -> Cell:
    _check_types(record, _CELL_TYPES)
    if record["status"] not in get_args(Status):
        raise ValueError(f"its status is '{record['status'][:40]}'")
    if not isinstance(record.get("reason"), str | None):
        raise TypeError("reason is no str")
    samples = {name: _read_samples(name, values) for name, values in record["samples"].items()}
    return Cell(**record | {"samples": samples})


def _read_samples(name: str, record: dict[str, Any]) -> Samples:
    _check_types(record, _SAMPLES_TYPES)
    foreign.check_samples(name, record["unit"], record["measured"], record["warmup"])
    return Samples(**record | {"measured": tuple(record["measured"]), "warmup": tuple(record["warmup"])})
