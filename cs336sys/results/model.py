"""One schema for what every command measures, and the JSON-lines file it is kept in. Plain data, no torch.

A results file holds one JSON object a line. A ``run`` line describes one invocation (arguments, machine, versions); the
``cell`` lines after it name that run by its id. A cell is written and flushed the moment it is done, so an interrupted
sweep loses nothing that was measured, and files can be concatenated. Numbers that JSON lacks are the strings ``NaN``,
``Infinity`` and ``-Infinity``, or bare as other programs write them.
"""

import contextlib
import functools
import gzip
import io
import json
import math
import os
import re
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from cs336sys.errors import UsageError
from cs336sys.results import foreign
from cs336sys.results.gzip_members import GZIP_MAGIC, TooLargeError, is_compressed, members_of
from cs336sys.results.recording import current_recording

SCHEMA_VERSION = 1
# Of the documents that ``--format json`` prints.
TABLES_SCHEMA_VERSION = 1

Status = Literal["ok", "oom", "timeout", "unsupported", "error", "wrong"]

# How a results file spells what JSON has no number for.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# Of a run's environment, what is known of the code, and what no timing depends on.
_APART = ("cs336sys", "git_commit", "git_dirty", "source_digest", "seed")
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
        # In floats: statistics.stdev computes in fractions, which takes ten times as long.
        mean = self.mean
        return math.sqrt(math.fsum((sample - mean) ** 2 for sample in self.measured) / (len(self.measured) - 1))

    @property
    def median(self) -> float:
        return statistics.median(self.measured)

    @property
    def to_keep(self) -> "Samples":
        """Times to :data:`_TIME_DIGITS` digits, other units as they are."""
        if self.unit not in ("ms", "us"):
            return self
        measured, warmup = (
            tuple(float(f"{time:.{_TIME_DIGITS}g}") for time in times) for times in (self.measured, self.warmup)
        )
        return replace(self, measured=measured, warmup=warmup)

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
        """What rows of tables say about where and when their numbers were measured, by the names of ORIGIN."""
        values = self.machine | self.environment
        values |= {"gpu_name": self.machine.get("gpu"), "run_id": self.run_id, "date": self.time}
        return {name: values.get(name) for name in ORIGIN}

    @property
    def conditions(self) -> dict[str, Any]:
        """All but the code that a timing depends on: the machine, threads, matmul precision, variables.

        What a GPU's clock and temperature were at a moment is no part of it; its power limit is.
        """
        settings = {name: value for name, value in self.environment.items() if name not in _APART}
        return self.machine | {name: value for name, value in settings.items() if not _MOMENTARY.fullmatch(name)}


def hide_home(text: str) -> str:
    """Return the text with ``~`` for the path of the user's home folder."""
    return _homes(os.environ.get("HOME", "")).sub("~", text)


@functools.cache
def _homes(home: str) -> re.Pattern[str]:
    """Return what matches the home folder, by its name in the environment or in the list of users, or resolved."""
    names = {home}
    with contextlib.suppress(ImportError, KeyError):
        import pwd

        names.add(pwd.getpwuid(os.getuid()).pw_dir)
    paths = {name.rstrip("/") for path in filter(os.path.isabs, names) for name in (path, os.path.realpath(path))}
    texts = map(re.escape, sorted(paths - {""}, key=len, reverse=True))
    # As a whole name of folders: /home/me is in neither /data/home/me nor /home/me2.
    return re.compile(rf"(?<![\w-])(?:{'|'.join(texts)})(?![\w-])" if paths - {""} else r"(?!)")


def differing_conditions(first: Run | None, second: Run | None) -> dict[str, tuple[Any, Any]]:
    """The :attr:`Run.conditions` in which two runs differ, with both values; a run that is not recorded has none."""
    if first is second:
        return {}
    of_first, of_second = ({"machine": "not recorded"} if run is None else run.conditions for run in (first, second))
    return {
        name: (of_first.get(name), of_second.get(name))
        for name in of_first | of_second
        if of_first.get(name) != of_second.get(name)
    }


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
    """A line of JSON, in which NaN and infinities are strings that :func:`read_results` reads as numbers."""
    try:
        return json.dumps(value, allow_nan=False, **settings)
    except ValueError:
        return json.dumps(_without_bare_names(value), allow_nan=False, **settings)


def _without_bare_names(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, number in _NOT_FINITE.items() if str(number) == str(value))
    if isinstance(value, Mapping):
        return {name: _without_bare_names(item) for name, item in value.items()}
    return [_without_bare_names(item) for item in value] if isinstance(value, list | tuple) else value


def _with_numbers(value: Any) -> Any:
    """The inverse of :func:`_without_bare_names`."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: _with_numbers(item) for name, item in value.items()}
    return [_with_numbers(item) for item in value] if isinstance(value, list) else value


# Settings that name a folder for files of a cell, or none; memprof has a "trace" that is none of them.
_FOLDERS = ("keep", "snapshot", "trace")


def folders_of(configuration: Mapping[str, Any]) -> dict[str, str]:
    """The settings by which a cell leaves traces, reports or snapshots in folders, with these."""
    return {name: configuration[name] for name in _FOLDERS if isinstance(configuration.get(name), str)}


def configuration_key(configuration: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> str:
    """Canonical text of what a configuration measures: equal for equal settings, whatever their order.

    Settings that no measurement depends on are no part of it: the folders of :func:`folders_of`, ``timeout_s``, how
    long ranks wait for each other before they give up, and what rows of tables say about their :data:`ORIGIN`.
    """
    passed_over = {*ignore, "timeout_s", *ORIGIN, *folders_of(configuration)}
    passed_over |= {name for name in _FOLDERS if configuration.get(name) is None}
    return json_text({name: value for name, value in configuration.items() if name not in passed_over}, sort_keys=True)


def distinguishing_settings(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fewest leading settings that tell them apart: ``size``, without the ``d_model`` that follows from it."""
    distinguishing: list[str] = []
    groups, group_count = [0] * len(configurations), 1
    for name in dict.fromkeys(name for configuration in configurations for name in configuration):
        numbers: dict[tuple[int, str], int] = {}
        divided = [
            numbers.setdefault((group, configuration_key({name: values.get(name)})), len(numbers))
            for group, values in zip(groups, configurations, strict=True)
        ]
        if len(numbers) > group_count:
            distinguishing.append(name)
            groups, group_count = divided, len(numbers)
    return distinguishing


@dataclass(frozen=True)
class Results:
    """The content of a results file.

    Attributes:
        passed_over: what was left out, a sentence for each line: ``line 7 is cut, or no record of results``.
    """

    runs: dict[str, Run]
    cells: tuple[Cell, ...]
    passed_over: tuple[str, ...] = ()


def read_several(paths: str) -> Results:
    """Read several files, given as ``a.jsonl,b.jsonl``; a file that has commas in its name is one.

    A command that runs as a function may be called with results instead (:mod:`cs336sys.results.recording`).

    Raises:
        UsageError: as :func:`read_results`, or there is none.
    """
    recording = current_recording()
    if recording is not None and paths in recording.sources:
        return recording.sources[paths]
    names = [paths] if Path(paths).exists() else [name for name in paths.split(",") if name]
    files = {name: read_results(Path(name)) for name in names or [paths]}
    runs = {run_id: run for file in files.values() for run_id, run in file.runs.items()}
    cells = tuple(cell for file in files.values() for cell in file.cells)
    passed_over = (f"{name}: {left_out}" for name, file in files.items() for left_out in file.passed_over)
    return Results(runs, cells, tuple(passed_over))


# Lines that are named one by one before the rest is counted.
_NAMED = 5


def passed_over_words(results: Results) -> list[str]:
    """Warn of the lines that were left out, the first ones with their faults."""
    named, count = results.passed_over[:_NAMED], len(results.passed_over) - _NAMED
    note = [f"{count} more line{'s are' if count > 1 else ' is'} passed over"] if count > 0 else []
    return [*(f"{sentence}, and passed over" for sentence in named), *note]


def read_results(path: Path) -> Results:
    """Read a file of :mod:`cs336sys.results.file`, or a pipe; a line that is no record of today's is passed over.

    This is the one place where what strangers have written becomes runs and cells: numbers are of a size that can be
    computed with, times are more than 0, text is without control characters (:mod:`cs336sys.results.foreign`).

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
                cells.append(_cell(record))
            else:
                raise ValueError("it is neither a run nor a cell")
        except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
            name = kind if kind in ("run", "cell") else "record"
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            passed_over.append(f"line {number} is no {name} of this schema: {reason}")
    if not runs and not cells:
        fault = next(iter(passed_over), "")
        why = f"; {fault}" if "schema:" in fault or "damaged" in fault else ""
        raise UsageError(f"{path} holds no results: it should be a file written by --save{why}")
    return Results(runs, tuple(cells), tuple(passed_over))


def _contents(path: Path, passed_over: list[str]) -> Iterator[bytes]:
    """The text of a file part by part, decompressed; adds to ``passed_over`` what of it is damaged."""
    try:
        chunks = foreign.read_chunks(path, foreign.FILE_BYTES)
        first = next(chunks, b"")
        # A pipe's name does not say that what comes is compressed.
        if not first.startswith(GZIP_MAGIC):
            if first and is_compressed(path):
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
            if member.is_cut and not member.content:
                passed_over.append(f"the compressed data from byte {member.start} on is truncated")
    except TooLargeError as error:
        raise UsageError(
            f"{path} holds more than {foreign.FILE_BYTES // foreign.MIB} MiB when decompressed, which is the most that "
            "is read"
        ) from error


def _json_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a text, those longer than :data:`LINE_BYTES` without their end."""
    pending: list[bytes] = []
    room = foreign.LINE_BYTES + 1
    for part in parts:
        stream = io.BytesIO(part)
        while line := stream.readline():
            # Of a line that is too long enough is kept to be seen to be that.
            pending.append(line[:room])
            room -= len(pending[-1])
            if line.endswith(b"\n"):
                yield b"".join(pending).rstrip(b"\r\n")
                pending, room = [], foreign.LINE_BYTES + 1
    if pending:
        yield b"".join(pending)


def holds_results(path: Path) -> bool:
    """Return whether a file begins as those that ``--save`` writes, so that measurements would be lost with it."""
    try:
        with gzip.open(path) if is_compressed(path) else path.open("rb") as stream:
            # A run's, which is short.
            first = stream.readline(2**20)
    except (OSError, EOFError, zlib.error):
        return False
    return first.startswith(b'{"schema_version"') or read_record(first) is not None


def read_record(line: bytes) -> dict[str, Any] | None:
    """Read a line; None for one that is half written, or another program's."""
    try:
        record = json.loads(line)
        if b'NaN"' in line or b'Infinity"' in line:
            record = _with_numbers(record)
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
    """Raise a KeyError or a TypeError where another program, or a hand, has written something else."""
    if not isinstance(record, dict):
        raise TypeError("samples are no dict")
    for name, kind in types.items():
        if not isinstance(record[name], kind):
            raise TypeError(f"{name} is no {kind.__name__}")


def _read_run(record: dict[str, Any]) -> Run:
    _check_types(record, _RUN_TYPES)
    for name, value in (record["machine"] | record["environment"]).items():
        if isinstance(value, dict | list):
            raise TypeError(f"{name} is no text or number")
    named = [(record["machine"], ("gpu", "cpu")), (record["environment"], ("git_commit", "source_digest"))]
    for values, names in named:
        for name in names:
            if not isinstance(values.get(name), str | None):
                raise TypeError(f"{name} is no str")
    return Run(**record | {"arguments": tuple(map(str, record["arguments"]))})


def _cell(record: dict[str, Any]) -> Cell:
    _check_types(record, _CELL_TYPES)
    if record["status"] not in get_args(Status):
        raise ValueError(f"its status is '{record['status'][:40]}'")
    if not isinstance(record.get("reason"), str | None):
        raise TypeError("reason is no str")
    samples = {name: _samples(name, values) for name, values in record["samples"].items()}
    return Cell(**record | {"samples": samples})


def _samples(name: str, record: dict[str, Any]) -> Samples:
    _check_types(record, _SAMPLES_TYPES)
    foreign.check_samples(name, record["unit"], record["measured"], record["warmup"])
    return Samples(**record | {"measured": tuple(record["measured"]), "warmup": tuple(record["warmup"])})
