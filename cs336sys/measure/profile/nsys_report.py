"""Reads what ``nsys export --type sqlite`` writes.

Schema: "SQLite Schema Reference" in the Nsight Systems User Guide. It differs between versions, and a table is there
only if it has rows, so tables and columns are looked up before they are read.
"""

import functools
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from cs336sys.errors import UsageError
from cs336sys.measure.profile.capture import Capture, empty_tables
from cs336sys.measure.profile.nsys import NAME
from cs336sys.printable import printable

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
_FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
# API calls of the CUDA runtime and of the driver, which Triton's launches are.
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_WHOLE_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RANGES = "NVTX_EVENTS"
_STRINGS = "StringIds"

# CUpti_ActivityMemcpyKind; StringIds has no negative ids, so these can stand beside it.
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
    try:
        tables.execute("ATTACH ? AS report", (f"{path.absolute().as_uri()}?mode=ro",))
        _load(tables)
        tables.commit()
        tables.execute("DETACH report")
    except sqlite3.DatabaseError as error:
        tables.close()
        raise UsageError(f"{called or path} cannot be read as an SQLite database: {error}") from error
    except UsageError as error:
        tables.close()
        raise UsageError(f"{called or path} {error}") from error
    return Capture(tables, NAME)


def _load(tables: sqlite3.Connection) -> None:
    columns = _columns(tables)
    _require_recorded(tables, columns)
    need = functools.partial(_require_columns, columns)
    need(_CALLS, "start", "globalTid", "correlationId")
    tables.execute(
        f"""INSERT OR IGNORE INTO launch
            SELECT {_PROCESS.format(column="globalTid")}, correlationId, start, globalTid FROM report.{_CALLS}"""
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


def _require_recorded(tables: sqlite3.Connection, columns: Mapping[str, set[str]]) -> None:
    """Refuse an export without what gives kernels a phase, with the option of nsys that records it."""
    if _STRINGS not in columns:
        raise UsageError(f"is no export of Nsight Systems: it has no table {_STRINGS}")
    if _has_rows(tables, columns, _WHOLE_GRAPHS):
        raise UsageError(
            "holds CUDA graphs as wholes, without their kernels: profile again with --cuda-graph-trace=node"
        )
    if not _has_rows(tables, columns, _KERNELS):
        raise UsageError("holds no GPU kernels: profile with -t cuda,nvtx, and let the capture contain work on the GPU")
    if not _has_rows(tables, columns, _CALLS):
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
    gpu = "deviceId" if "deviceId" in columns[table] else "0"
    tables.execute(
        f"""INSERT INTO work
            SELECT start, "end", {_PROCESS.format(column="globalPid")}, correlationId, {name}, {gpu}
            FROM report.{table}"""
    )


def _columns(tables: sqlite3.Connection) -> dict[str, set[str]]:
    """The columns of each table of the report; a view of a stranger could compute for ever."""
    names = [row[0] for row in tables.execute("SELECT name FROM report.sqlite_master WHERE type = 'table'")]
    info = "SELECT name FROM pragma_table_info(?, 'report')"
    return {name: {row[0] for row in tables.execute(info, (name,))} for name in names}


def _has_rows(tables: sqlite3.Connection, columns: Mapping[str, set[str]], table: str) -> bool:
    return table in columns and tables.execute(f"SELECT 1 FROM report.{table} LIMIT 1").fetchone() is not None
