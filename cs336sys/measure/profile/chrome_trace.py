"""Reads the trace that torch.profiler exports: JSON in the Chrome Trace Event Format, plain or gzipped."""

import gzip
import itertools
import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from cs336sys.errors import UsageError
from cs336sys.measure.profile.capture import Capture, empty_tables
from cs336sys.results.foreign import printable

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Triton launches through the driver.
_CALLS = ("cuda_runtime", "cuda_driver")
_RANGES = ("user_annotation",)
_OPERATIONS = ("cpu_op",)
# What older versions of torch called them.
_TODAYS_CATEGORY = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
    "Operator": "cpu_op",
}

GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_CHARACTERS = 1 << 20
_ROWS_AT_ONCE = 10_000
# An event of torch's has some hundred characters, one with a stack some thousand.
_EVENT_CHARACTERS = 1 << 24
# What strangers write in the place of numbers and texts.
_OF_VALUES = (ValueError, KeyError, TypeError, AttributeError)
_STEP = "ProfilerStep#"

# A trace is one process's, so it numbers its correlations once.
_PROCESS = 0

# What fills each table.
_STATEMENTS = {
    "work": "INSERT INTO work VALUES (?, ?, ?, ?, ?, ?)",
    "launch": "INSERT OR IGNORE INTO launch VALUES (?, ?, ?, ?)",
    "ranges": "INSERT INTO ranges VALUES (?, ?, ?, ?, ?)",
    "operation": "INSERT INTO operation VALUES (?, ?, ?, ?)",
}


def read_chrome_trace(path: Path, called: str | None = None) -> Capture:
    """Load kernels, copies, API calls and ranges of a trace, or the CPU's operations if no GPU took part.

    The file is read event by event, so it may be larger than memory.

    Args:
        called: what errors call the file instead of its path.

    Raises:
        UsageError: it is no trace or is cut off, holds several processes, or holds API calls whose kernels were not
            recorded.
    """
    tables = empty_tables()
    try:
        is_gpu = _load(tables, path)
    except UsageError as error:
        tables.close()
        raise UsageError(f"{called or path} {error}") from error
    except (OSError, EOFError, zlib.error, ArithmeticError, RecursionError, sqlite3.Error, *_OF_VALUES) as error:
        tables.close()
        raise UsageError(f"{called or path} cannot be read as a trace of torch.profiler: {error}") from error
    tables.commit()
    return Capture(tables, "torch.profiler", is_gpu)


def _load(tables: sqlite3.Connection, path: Path) -> bool:
    tables.execute("CREATE TEMP TABLE operation (start INTEGER, stop INTEGER, thread, name INTEGER)")
    name_ids: dict[str, int] = {}
    processes: set[Any] = set()
    with path.open("rb") as binary:
        is_zipped = binary.read(2) == GZIP_MAGIC
    with gzip.open(path, "rt", encoding="utf-8") if is_zipped else path.open(encoding="utf-8") as stream:
        events = (event for event in _events(stream) if event.get("ph") == "X")
        while block := list(itertools.islice(events, _ROWS_AT_ONCE)):
            rows = _rows_of(block, name_ids, processes)
            for table, statement in _STATEMENTS.items():
                tables.executemany(statement, rows[table])
    if len(processes) > 1:
        raise UsageError(
            f"holds {len(processes)} processes, and its kernels do not say whose they are: "
            "read each process's own trace"
        )
    tables.executemany("INSERT INTO name VALUES (?, ?)", [(number, name) for name, number in name_ids.items()])
    if _has_rows(tables, "work"):
        return True
    if _has_rows(tables, "launch"):
        raise UsageError("holds CUDA calls and no GPU kernels: CUPTI did not trace the GPU on that machine")
    _let_operations_be_work(tables)
    if not _has_rows(tables, "work"):
        raise UsageError("holds neither GPU kernels nor operations of the CPU")
    return False


def _rows_of(
    events: Sequence[Mapping[str, Any]], name_ids: dict[str, int], processes: set[Any]
) -> dict[str, list[tuple]]:
    """The rows of some events by table; adds names that are new, with their numbers, and processes."""
    rows: dict[str, list[tuple]] = {table: [] for table in _STATEMENTS}
    for event in events:
        category, name = str(event.get("cat")), printable(str(event.get("name", "")))
        category = _TODAYS_CATEGORY.get(category, category)
        if category in _OPERATIONS and name.startswith(_STEP):
            # Older versions of torch called their profiler's steps operations.
            category = _RANGES[0]
        start = round(float(event["ts"]) * 1e3)
        stop = start + round(float(event.get("dur", 0)) * 1e3)
        arguments = event.get("args", {})
        correlation = arguments.get("correlation")
        # Some are numbers that SQLite's integers do not hold.
        thread = str(event.get("tid"))
        if category in _WORK:
            name_id = name_ids.setdefault(name, len(name_ids))
            rows["work"].append((start, stop, _PROCESS, correlation, name_id, int(arguments.get("device", 0))))
        elif category in _OPERATIONS:
            name_id = name_ids.setdefault(name, len(name_ids))
            rows["operation"].append((start, stop, thread, name_id))
        elif category in _CALLS and correlation is not None:
            processes.add(event.get("pid"))
            rows["launch"].append((_PROCESS, correlation, start, thread))
        elif category in _RANGES:
            processes.add(event.get("pid"))
            rows["ranges"].append((name, start, stop, _PROCESS, thread))
    return rows


def _has_rows(tables: sqlite3.Connection, table: str) -> bool:
    return tables.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None


def _let_operations_be_work(tables: sqlite3.Connection) -> None:
    """Put the CPU's operations into ``work``, each as long as it ran without those that it calls.

    What an operation and those within it ran by themselves is laid end to end from the outermost one's start, so that
    all of it together covers just the time of the outermost.
    """
    operations = tables.execute("SELECT rowid, * FROM operation ORDER BY thread, start, stop DESC").fetchall()
    own = [stop - start for _, start, stop, _, _ in operations]
    outermost = []
    callers: list[int] = []
    for index, (_, start, stop, thread, _) in enumerate(operations):
        while callers and (operations[callers[-1]][3] != thread or operations[callers[-1]][2] <= start):
            callers.pop()
        outermost.append(not callers)
        if callers:
            own[callers[-1]] -= stop - start
        callers.append(index)
    rows = []
    reached = 0
    for index, (number, start, _, _, name) in enumerate(operations):
        if outermost[index]:
            reached = start
        rows.append((reached, reached + max(0, own[index]), _PROCESS, number, name, 0))
        reached += max(0, own[index])
    tables.executemany(_STATEMENTS["work"], rows)
    tables.execute(f"INSERT INTO launch SELECT {_PROCESS}, rowid, start, thread FROM operation")


def _events(stream: TextIO) -> Iterator[dict[str, Any]]:
    """The objects of the list ``traceEvents``, or of a file that is a list, decoded one at a time."""
    decoder = json.JSONDecoder()
    text, position = _find_list(stream)
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if text[position : position + 1] == "]":
            return
        try:
            event, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            more = stream.read(_CHUNK_CHARACTERS)
            if not more:
                raise UsageError("is cut off: its list of events has no end") from None
            if len(text) - position > _EVENT_CHARACTERS:
                raise UsageError(f"holds an event of more than {_EVENT_CHARACTERS:,} characters") from None
            text, position = text[position:] + more, 0
            continue
        if isinstance(event, dict):
            yield event


def _find_list(stream: TextIO) -> tuple[str, int]:
    """Text read so far, and where in it the list of events begins."""
    key = '"traceEvents"'
    text = stream.read(_CHUNK_CHARACTERS)
    if text.lstrip().startswith("["):
        return text, text.index("[") + 1
    while (found := text.find(key)) < 0 or (start := text.find("[", found)) < 0:
        more = stream.read(_CHUNK_CHARACTERS)
        if not more:
            raise UsageError("is no trace of torch.profiler: it has no list of traceEvents")
        # The key may lie across the border.
        text = text[-len(key) if found < 0 else found :] + more
    return text, start + 1
