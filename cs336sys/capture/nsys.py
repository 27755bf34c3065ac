"""Runs of Nsight Systems, and a reader of what ``nsys export --type sqlite`` writes."""

import os
import re
import sqlite3
import subprocess
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from cs336sys.capture import capture as captures
from cs336sys.capture.capture import Calls, Capture, DeviceWork, Ranges, Texts, say_capture
from cs336sys.capture.intervals import Times
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.machine.diagnosis.software import Profiler
from cs336sys.processes.parent import run_guarded_program
from cs336sys.results.foreign import printable

NAME = "Nsight Systems"

# CUDA and NVTX only: with nsys's defaults a program of three matrix products made a report of 2 GB, with these one of
# 88 KB. Kernels of CUDA graphs are traced one by one, which is not the default.
PROFILE_OPTIONS = (
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--cuda-graph-trace=node",
    "--force-overwrite=true",
)

REPORT_SUFFIXES = (".nsys-rep", ".qdrep")


def is_profiled() -> bool:
    """Return whether this process was started by ``nsys profile``, which sets these variables for what it starts."""
    injections = (os.environ.get(name, "") for name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD"))
    return "NSYS_PROFILING_SESSION_ID" in os.environ or any("ToolsInjection" in path for path in injections)


def profile(nsys: Profiler, command: Sequence[str], folder: Path) -> Path:
    """Run a command under nsys from cudaProfilerStart to cudaProfilerStop, and return the report, in ``folder``.

    A CapabilityError says that nsys left none.
    """
    # Guarded, because nsys starts the program in a session of its own, and daemons besides.
    done = run_guarded_program([str(nsys.path), "profile", *PROFILE_OPTIONS, f"--output={folder / 'report'}", *command])
    for suffix in REPORT_SUFFIXES:
        if (report := folder / f"report{suffix}").exists():
            return report
    raise CapabilityError(f"nsys {nsys.version} left no report: {_last_line(done)}; `cs336sys doctor` may know more")


def export(nsys: Profiler, report: Path, database: Path) -> None:
    """Export a report as SQLite; a UsageError says that it is none, is damaged, or comes from a newer version."""
    options = ("--type=sqlite", "--force-overwrite=true", f"--output={database}")
    done = run_guarded_program([str(nsys.path), "export", *options, str(report.absolute())])
    if done.returncode != 0 or not database.exists():
        reason = _last_line(done)
        raise UsageError(say_capture("cannot export", version=nsys.version, report=report, reason=reason))


def _last_line(program: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (program.stdout + "\n" + program.stderr).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else f"it ended with exit code {program.returncode}"


# Schema: "SQLite Schema Reference" in the Nsight Systems User Guide. It differs between versions, and a table is there
# only if it has rows, so tables and columns are looked up before they are read.
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
_FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"  # API calls of the CUDA runtime and of the driver, by which Triton launches.
_WHOLE_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RANGES = "NVTX_EVENTS"
_STRINGS = "StringIds"
_GPUS = "TARGET_INFO_GPU"

_IS_POSSIBLE_TIME = f'start >= {-captures.LATEST_NS} AND "end" >= start AND "end" <= {captures.LATEST_NS}'

# CUpti_ActivityMemcpyKind
_COPY_KINDS = ("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_COPY_NAMES = {number: f"Memcpy {kind}" for number, kind in enumerate(_COPY_KINDS, 1)}


def _is_whole(column: str) -> str:
    """Return in SQL whether a column is a whole number; tables that pandas wrote hold such numbers as 5.0."""
    return f"(typeof({column}) IN ('integer', 'real') AND {column} = CAST({column} AS INTEGER))"


_RANGE_EVENTS = (59, 60)  # NVTX_EVENTS.eventType of ranges: push/pop, start/end.

_SHIFT_TO_PROCESS = ">> 24"  # A globalPid is a globalTid whose lowest 24 bits, the thread, are 0.

_STATEMENTS_BETWEEN_CHECKS = 100_000  # Instructions of SQLite's virtual machine: some milliseconds.


def load_export(path: Path) -> Capture:
    """Load kernels, copies, API calls and NVTX ranges of an exported report; the file is not written to.

    Raises:
        UsageError: it lacks something that is needed, or traced CUDA graphs as wholes; the sentence says what.
        sqlite3.DatabaseError, OverflowError: it is damaged, or takes too long.
    """
    report = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        deadline = time.process_time() + captures.READING_S
        report.set_progress_handler(lambda: time.process_time() > deadline, _STATEMENTS_BETWEEN_CHECKS)
        # A stranger's schema may hold functions and virtual tables that run code.
        report.execute("PRAGMA trusted_schema = OFF")
        return _Export(report).capture()
    finally:
        report.close()


class _Export:
    """Reads an export; a kind of table is its name without the version that newer exports append."""

    def __init__(self, report: sqlite3.Connection):
        self._report = report
        self._texts = Texts()
        self._unreadable = 0
        self._tables: dict[str, str] = {}
        # No views: a stranger's could compute for ever.
        rows = report.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        # Of NVTX_EVENTS and NVTX_EVENTS_V2, the last that has rows.
        for name in sorted(str(row[0]) for row in rows):
            kind = re.sub(r"_V\d+$", "", name)
            if kind not in self._tables or self._has_row(name):
                self._tables[kind] = name
        for kind in {_KERNELS, _COPIES, _FILLS, _CALLS, _RANGES, _STRINGS}.intersection(self._tables):
            if self._has_row(self._tables[kind], offset=captures.EVENTS):
                raise UsageError(say_capture("too many rows", most=captures.EVENTS, kind=kind))
        info = "SELECT name FROM pragma_table_info(?)"
        self._columns = {kind: {row[0] for row in report.execute(info, (name,))} for kind, name in self._tables.items()}

    def capture(self) -> Capture:
        """Return the capture, or raise a UsageError where something that is needed is missing."""
        if _STRINGS not in self._columns:
            raise captures.ForeignFileError(f"is no export of Nsight Systems: it has no table {_STRINGS}")
        if self._has_rows(_WHOLE_GRAPHS):
            raise UsageError(say_capture("whole graphs"))
        # Calls give kernels a phase. The sentences name the option of nsys that records what is missing.
        for kind, missing in ((_KERNELS, "no kernels"), (_CALLS, "no calls")):
            if not self._has_rows(kind):
                raise UsageError(say_capture(missing))
        # Names are those with arguments, or in an export without these the short ones.
        is_short = "demangledName" not in self._columns[_KERNELS] and "shortName" in self._columns[_KERNELS]
        work = DeviceWork.joined(
            self._work(_KERNELS, "shortName" if is_short else "demangledName", names=None),
            self._work(_COPIES, "copyKind", names=_COPY_NAMES, unnamed="Memcpy"),
            # Fills have no column that names them: the number 0 in its place.
            self._work(_FILLS, "0", names={0: "Memset"}),
        )
        calls, ranges = self._calls(), self._ranges()
        if not len(work):
            raise UsageError(say_capture("no times", unreadable=self._unreadable))
        gpu_names = {}
        if _GPUS in self._columns and {"id", "name"} <= self._columns[_GPUS]:
            rows = self._report.execute(f"SELECT id, name FROM {_GPUS} WHERE typeof(id) = 'integer'")
            gpu_names = {number: printable(str(name)) for number, name in rows}
        return Capture(NAME, self._texts.list, work, calls, ranges, gpu_names=gpu_names, unreadable=self._unreadable)

    def _read_integers(self, table: str, columns: Sequence[str]) -> array:
        """Return columns row by row; rows that are not whole numbers, or end before they start, count as unreadable."""
        values = array("q")
        places = [f"c{place}" for place in range(len(columns))]
        numbered = ", ".join(f"{column} AS {place}" for column, place in zip(columns, places, strict=True))
        whole = ", ".join(f"CAST({place} AS INTEGER)" for place in places)
        possible = f"SELECT {numbered} FROM {table} WHERE {_IS_POSSIBLE_TIME}"
        are_whole = " AND ".join(map(_is_whole, places))
        values.extend(chain.from_iterable(self._report.execute(f"SELECT {whole} FROM ({possible}) WHERE {are_whole}")))
        (count,) = self._report.execute(f"SELECT count(*) FROM {table}").fetchone()
        self._unreadable += count - len(values) // len(columns)
        return values

    def _text_numbers(self, keys: Times, text_of_key: Mapping[int, str], unnamed: str = "unnamed") -> Times:
        """Replace the report's keys of texts by our numbers of these texts, or of ``unnamed`` and the key."""
        distinct, index_in_distinct = np.unique(keys, return_inverse=True)
        numbers = [self._texts[text_of_key.get(key) or f"{unnamed} {key}"] for key in distinct.tolist()]
        return np.array(numbers, np.int64)[index_in_distinct]

    def _strings(self, ids: str) -> dict[int, str]:
        """Return the texts of ids, given as SQL that selects them."""
        rows = self._report.execute(f"SELECT id, value FROM {_STRINGS} WHERE id IN ({ids})")
        return {number: str(text) for number, text in rows}

    def _work(self, kind: str, name: str, *, names: Mapping[int, str] | None, unnamed: str = "unnamed") -> DeviceWork:
        """Return a kind of work, empty without its table.

        Args:
            name: column with the number that names a row; "0", as SQL, gives all rows the number 0.
            names: texts of these numbers; None for the report's own.
        """
        if kind not in self._columns:
            return DeviceWork.of(array("q"))
        name_columns = [name] if name != "0" else []  # "0" is no column.
        table = self._require_columns(kind, "start", "end", "globalPid", "correlationId", *name_columns)
        device = [self._column(kind, *column) for column in (("deviceId", "0"), ("streamId", "0"), ("bytes", "-1"))]
        launch = (f"globalPid {_SHIFT_TO_PROCESS}", "coalesce(correlationId, -1)")
        operation, collective = "-1", "-1"  # None: reports record neither.
        columns = (name, "start", '"end"', *launch, *device, operation, collective)
        work = DeviceWork.of(self._read_integers(table, columns))
        text_of_name = self._strings(f"SELECT {name} FROM {table}") if names is None else names
        streams = {number: str(number) for number in np.unique(work.stream).tolist()}
        return replace(
            work,
            name=self._text_numbers(work.name, text_of_name, unnamed),
            stream=self._text_numbers(work.stream, streams),
        )

    def _calls(self) -> Calls:
        """Return the calls of CUDA's API; -1, as SQL, stands for a number that the export lacks."""
        table = self._require_columns(_CALLS, "start", "end", "globalTid", "correlationId")
        name = self._column(_CALLS, "nameId", "-1")
        launch = (f"globalTid {_SHIFT_TO_PROCESS}", "coalesce(correlationId, -1)")
        calls = Calls.of(self._read_integers(table, (name, "start", '"end"', *launch, "globalTid")))
        return replace(calls, name=self._text_numbers(calls.name, self._strings(f"SELECT {name} FROM {table}")))

    def _ranges(self) -> Ranges:
        """Return the NVTX ranges that have a name, none if the program annotated none."""
        if _RANGES not in self._columns:
            return Ranges.of(array("q"))
        table = self._require_columns(_RANGES, "start", "end", "eventType", "globalTid")
        # The text stands in the row or, where it was registered or is often repeated, in StringIds.
        if not {"text", "textId"} & self._columns[_RANGES]:
            self._require_columns(_RANGES, "text")  # Raises: it is missing.
        text, text_id = (self._column(_RANGES, column, "NULL") for column in ("text", "textId"))
        rows = self._report.execute(
            f"""SELECT coalesce({text}, strings.value), CAST(start AS INTEGER), CAST("end" AS INTEGER),
                    globalTid {_SHIFT_TO_PROCESS}, CAST(globalTid AS INTEGER)
                FROM {table} LEFT JOIN {_STRINGS} AS strings ON strings.id = {text_id}
                WHERE eventType IN {_RANGE_EVENTS} AND {_IS_POSSIBLE_TIME} AND {_is_whole("start")}
                    AND {_is_whole('"end"')} AND {_is_whole("globalTid")}"""
        )
        values = array("q")
        for name, *numbers in rows:
            if name is not None:
                values.extend((self._texts[str(name)], *numbers))
        return Ranges.of(values)

    def _require_columns(self, kind: str, *names: str) -> str:
        """Return the table's name, or raise a UsageError if it lacks one of these columns."""
        missing = [column for column in names if column not in self._columns[kind]]
        if missing:
            raise UsageError(say_capture("missing columns", missing=missing, table=self._tables[kind]))
        return self._tables[kind]

    def _column(self, kind: str, name: str, default: str) -> str:
        """Return a column in SQL, and the default for NULL and where the table lacks it."""
        return f"coalesce({name}, {default})" if name in self._columns[kind] else default

    def _has_row(self, table: str, offset: int = 0) -> bool:
        quoted = table.replace('"', '""')
        return self._report.execute(f'SELECT 1 FROM "{quoted}" LIMIT 1 OFFSET {offset}').fetchone() is not None

    def _has_rows(self, kind: str) -> bool:
        return kind in self._columns and self._has_row(self._tables[kind])
