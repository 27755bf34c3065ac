"""Runs Nsight Systems, and reads what ``nsys export --type sqlite`` writes. Standard library only."""

import functools
import os
import sqlite3
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.measure.diagnosis.profilers import Profiler, makes_reports
from cs336sys.measure.profile.capture import EVENTS, Capture, empty_tables, is_waiting_call, why_unreadable
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


def unusable(nsys: Profiler | None) -> str | None:
    """Return why this nsys cannot make reports; None if it can."""
    if nsys is None:
        return "nsys is not installed"
    if not makes_reports(nsys.path):
        return f"nsys {nsys.version} lacks libdw.so.1"
    return None


def profile(nsys: Profiler, command: Sequence[str], folder: Path) -> Path:
    """Run ``command`` under nsys, which captures from cudaProfilerStart to cudaProfilerStop.

    Returns:
        The report, in ``folder``.

    Raises:
        CapabilityError: nsys left no report.
    """
    done = _run_nsys(nsys, ["profile", *PROFILE_OPTIONS, f"--output={folder / 'report'}", *command])
    for suffix in REPORT_SUFFIXES:
        if (report := folder / f"report{suffix}").exists():
            return report
    raise CapabilityError(f"nsys {nsys.version} left no report: {_last_line(done)}; `cs336sys doctor` may know more")


def export(nsys: Profiler, report: Path, database: Path) -> None:
    """Export a report as SQLite.

    Raises:
        UsageError: this nsys cannot read the report: it is none, is damaged, or comes from a newer version.
    """
    done = _run_nsys(
        nsys, ["export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report.absolute())]
    )
    if done.returncode != 0 or not database.exists():
        raise UsageError(
            f"nsys {nsys.version} cannot export {report}, which must be a report of this version or an older one: "
            f"{_last_line(done)}"
        )


def _run_nsys(nsys: Profiler, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # nsys starts the program in a session of its own, and daemons besides.
    return run_guarded_program([str(nsys.path), *arguments])


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else f"it ended with exit code {done.returncode}"


# Schema: "SQLite Schema Reference" in the Nsight Systems User Guide. It differs between versions, and a table is there
# only if it has rows, so tables and columns are looked up before they are read.
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
_FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
# API calls of the CUDA runtime and of the driver, which Triton's launches are.
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_WHOLE_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RANGES = "NVTX_EVENTS"
_STRINGS = "StringIds"
_GPUS = "TARGET_INFO_GPU"

# CUpti_ActivityMemcpyKind; StringIds has no negative ids, so these can stand next to it.
_COPY_NAMES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH"}
_COPY_NAMES[10] = "PtoP"
_FILL_ID = -1_000

# NVTX_EVENTS.eventType of ranges: push/pop, start/end.
_RANGE_EVENTS = (59, 60)

# A globalPid is a globalTid whose lowest 24 bits, the thread, are 0.
_PROCESS = "{column} >> 24"


def read_nsys_database(path: Path, called: str | None = None) -> Capture:
    """Load kernels, copies, API calls and NVTX ranges of an exported report; the file is not written to.

    Args:
        called: what errors call the file instead of its path.

    Raises:
        UsageError: it is none, lacks something that is needed, or traced CUDA graphs as wholes; the sentence says what.
    """
    tables = empty_tables()
    tables.create_function("printable", 1, lambda text: printable(str(text)), deterministic=True)
    tables.create_function("is_waiting_call", 1, lambda name: is_waiting_call(str(name)), deterministic=True)
    try:
        # Neither what a stranger's schema computes nor its virtual tables are trusted.
        tables.execute("PRAGMA trusted_schema = OFF")
        tables.execute("ATTACH ? AS report", (f"{path.absolute().as_uri()}?mode=ro",))
        gpu_names = _load_export(tables)
        tables.commit()
        tables.execute("DETACH report")
    except sqlite3.DatabaseError as error:
        tables.close()
        raise UsageError(f"{called or path} {why_unreadable(error, 'an SQLite database')}") from error
    except UsageError as error:
        tables.close()
        raise UsageError(f"{called or path} {error}") from error
    return Capture(tables, NAME, gpu_names=gpu_names)


def _load_export(tables: sqlite3.Connection) -> dict[int, str]:
    columns = _column_names(tables)
    _require_recorded(tables, columns)
    need = functools.partial(_require_columns, columns)
    need(_CALLS, "start", "end", "globalTid", "correlationId")
    process = _PROCESS.format(column="globalTid")
    tables.execute(
        f"""INSERT OR IGNORE INTO launch
            SELECT {process}, correlationId, start, "end", globalTid FROM report.{_CALLS}"""
    )
    if "nameId" in columns[_CALLS]:
        tables.execute(
            f"""INSERT INTO waits SELECT {process}, start, "end", globalTid, printable(value)
                FROM report.{_CALLS} JOIN (SELECT * FROM report.{_STRINGS} WHERE is_waiting_call(value))
                ON nameId = id"""
        )
    names = {"demangledName", "shortName"} & columns[_KERNELS]
    need(_KERNELS, "start", "end", "globalPid", "correlationId", *(() if names else ("demangledName",)))
    _load_work(tables, columns, _KERNELS, "demangledName" if "demangledName" in names else "shortName")
    tables.execute(
        f"INSERT INTO name SELECT id, printable(value) FROM report.{_STRINGS} WHERE id IN (SELECT name FROM work)"
    )
    if _COPIES in columns:
        need(_COPIES, "start", "end", "globalPid", "correlationId", "copyKind")
        _load_work(tables, columns, _COPIES, "-copyKind")
    if _FILLS in columns:
        need(_FILLS, "start", "end", "globalPid", "correlationId")
        _load_work(tables, columns, _FILLS, str(_FILL_ID))
    names_of_copies = [(-kind, f"Memcpy {name}") for kind, name in _COPY_NAMES.items()]
    tables.executemany("INSERT INTO name VALUES (?, ?)", [*names_of_copies, (_FILL_ID, "Memset")])
    # A program without ranges has none of this table.
    if _RANGES in columns:
        _load_ranges(tables, columns)
    if _GPUS in columns and {"id", "name"} <= columns[_GPUS]:
        rows = tables.execute(f"SELECT id, printable(name) FROM report.{_GPUS} WHERE typeof(id) = 'integer'")
        return dict(rows.fetchall())
    return {}


def _require_recorded(tables: sqlite3.Connection, columns: Mapping[str, set[str]]) -> None:
    """Refuse an export without what gives kernels a phase, with the option of nsys that records it."""
    if _STRINGS not in columns:
        raise UsageError(f"is no export of Nsight Systems: it has no table {_STRINGS}")
    if _table_has_rows(tables, columns, _WHOLE_GRAPHS):
        raise UsageError(
            "holds CUDA graphs as wholes, without their kernels: profile again with --cuda-graph-trace=node"
        )
    if not _table_has_rows(tables, columns, _KERNELS):
        raise UsageError("holds no GPU kernels: profile with -t cuda,nvtx, and let the capture contain work on the GPU")
    if not _table_has_rows(tables, columns, _CALLS):
        raise UsageError("holds no CUDA API calls, so kernels have no phase: profile with -t cuda,nvtx")


def _require_columns(columns: Mapping[str, set[str]], table: str, *names: str) -> None:
    missing = [column for column in names if column not in columns[table]]
    if missing:
        raise UsageError(
            f"has no column {', '.join(missing)} in its table {table}: it was exported by a version of nsys that "
            "this cs336sys does not know"
        )


def _load_ranges(tables: sqlite3.Connection, columns: Mapping[str, set[str]]) -> None:
    _require_columns(columns, _RANGES, "start", "end", "eventType", "globalTid")
    # The text stands in the row or, where it was registered or is often repeated, in StringIds.
    text, strings = "text", ""
    if "textId" in columns[_RANGES]:
        text = "coalesce(text, strings.value)" if "text" in columns[_RANGES] else "strings.value"
        strings = f"LEFT JOIN report.{_STRINGS} AS strings ON strings.id = textId"
    else:
        _require_columns(columns, _RANGES, "text")
    tables.execute(
        f"""INSERT INTO ranges
            SELECT printable({text}), start, "end", {_PROCESS.format(column="globalTid")}, globalTid
            FROM report.{_RANGES} {strings}
            WHERE eventType IN {_RANGE_EVENTS} AND "end" IS NOT NULL AND {text} IS NOT NULL"""
    )


def _load_work(tables: sqlite3.Connection, columns: Mapping[str, set[str]], table: str, name: str) -> None:
    gpu, stream, size = (
        column if column in columns[table] else other
        for column, other in (("deviceId", "0"), ("streamId", "0"), ("bytes", "NULL"))
    )
    tables.execute(
        f"""INSERT INTO work (start, stop, process, correlation, name, gpu, stream, bytes)
            SELECT start, "end", {_PROCESS.format(column="globalPid")}, correlationId, {name}, {gpu}, {stream}, {size}
            FROM report.{table}"""
    )


def _column_names(tables: sqlite3.Connection) -> dict[str, set[str]]:
    """The columns of each table of the report; a view of a stranger could compute for ever."""
    names = [row[0] for row in tables.execute("SELECT name FROM report.sqlite_master WHERE type = 'table'")]
    for name in {_KERNELS, _COPIES, _FILLS, _CALLS, _RANGES, _STRINGS}.intersection(names):
        if tables.execute(f"SELECT 1 FROM report.{name} LIMIT 1 OFFSET {EVENTS}").fetchone():
            raise UsageError(f"holds more than {EVENTS:,} rows in {name}, the most that are read: profile fewer steps")
    info = "SELECT name FROM pragma_table_info(?, 'report')"
    return {name: {row[0] for row in tables.execute(info, (name,))} for name in names}


def _table_has_rows(tables: sqlite3.Connection, columns: Mapping[str, set[str]], table: str) -> bool:
    return table in columns and tables.execute(f"SELECT 1 FROM report.{table} LIMIT 1").fetchone() is not None
