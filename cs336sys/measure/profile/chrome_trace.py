"""Reads the trace that torch.profiler exports: JSON in the Chrome Trace Event Format, plain or gzipped."""

import gzip
import json
import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from cs336sys.errors import UsageError
from cs336sys.measure.profile.capture import (
    COLLECTIVE_ARGUMENT,
    EVENTS,
    EXPANDED_FREELY_BYTES,
    EXPANSION,
    FILE_BYTES,
    READING_S,
    TOO_SLOW,
    Capture,
    collective_bytes,
    collective_kind,
    empty_tables,
    is_waiting_call,
    why_unreadable,
)
from cs336sys.results.foreign import MIB, printable
from cs336sys.results.model import json_text

# Gloo's threads show a collective as an annotation.
_GLOO = "gloo:"

GZIP_MAGIC = b"\x1f\x8b"
# What strangers write instead of numbers and texts.
_OF_VALUES = (ValueError, KeyError, TypeError, AttributeError)
_CHUNK_CHARACTERS = 1 << 20
_ROWS_AT_ONCE = 10_000
# An event of torch's has some hundred characters, one with a stack some thousand.
_EVENT_CHARACTERS = 1 << 24
# Templates have names of some thousand characters; strangers may write more.
_NAME_CHARACTERS = 8000
# Sums of times are 64 bits wide.
_LATEST_NS = 1 << 61

# A trace is mostly one process's. Which one kernels belong to is known by their launches alone.
_PROCESS = 0

# What fills each table.
_STATEMENTS = {
    "work": "INSERT INTO work VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "launch": "INSERT OR IGNORE INTO launch VALUES (?, ?, ?, ?, ?)",
    "waits": "INSERT INTO waits VALUES (?, ?, ?, ?, ?)",
    "ranges": "INSERT INTO ranges VALUES (?, ?, ?, ?, ?)",
    "operation": "INSERT INTO operation VALUES (?, ?, ?, ?, ?, ?, ?)",
    "module": "INSERT INTO module VALUES (?, ?, ?, ?)",
    "collective": "INSERT INTO collective VALUES (?, ?, ?, ?, ?, ?, ?)",
}


def read_chrome_trace(path: Path, called: str | None = None) -> Capture:
    """Load kernels, copies, API calls, operators and ranges of a trace.

    The file is read event by event, so it may be larger than memory.

    Args:
        called: what errors call the file instead of its path.

    Raises:
        UsageError: it is no trace or is cut off, was merged of several processes so that kernels cannot be told apart,
            or holds API calls whose kernels were not recorded.
    """
    tables = empty_tables()
    try:
        return _load_trace(tables, path)
    except UsageError as error:
        tables.close()
        raise UsageError(f"{called or path} {error}") from error
    except (OSError, EOFError, zlib.error, sqlite3.Error, ArithmeticError, RecursionError, *_OF_VALUES) as error:
        tables.close()
        raise UsageError(f"{called or path} {why_unreadable(error, 'a trace of torch.profiler')}") from error


def _load_trace(tables: sqlite3.Connection, path: Path) -> Capture:
    with path.open("rb") as binary:
        is_zipped = binary.read(2) == GZIP_MAGIC
    if is_zipped:
        _check_expansion(path)
    loader = _Loader(tables)
    with gzip.open(path, "rt", encoding="utf-8") if is_zipped else path.open(encoding="utf-8") as stream:
        events = _Events(stream)
        for event in events:
            loader.add(event)
    loader.finish()
    is_gpu = _has_rows(tables, "work")
    if loader.foreign and not is_gpu:
        raise UsageError(
            f"holds work of an accelerator ('{loader.foreign}') whose kernels are not recorded as those of CUDA and "
            "ROCm are, and cannot be read"
        )
    if not is_gpu:
        if _has_rows(tables, "launch"):
            raise UsageError("holds CUDA calls and no GPU kernels: CUPTI did not trace the GPU on that machine")
        _let_operations_be_work(tables, loader.numbered)
        if not _has_rows(tables, "work"):
            raise UsageError("holds neither GPU kernels nor operations of the CPU")
    else:
        # What Gloo's threads do is no work of the GPU.
        tables.execute("DELETE FROM work WHERE stream LIKE 'gloo %'")
        loader.give_work_its_process()
    tables.execute("CREATE INDEX collective_of_operation ON collective (operation)")
    tables.commit()
    about = events.value("distributedInfo", {})
    devices = events.value("deviceProperties", [])
    return Capture(
        tables,
        "torch.profiler",
        is_gpu,
        rank=_integer(about.get("rank")),
        ranks=_integer(about.get("world_size")),
        gpu_names={
            int(device["id"]): printable(str(device["name"])) for device in devices if {"id", "name"} <= device.keys()
        },
        peak_bytes=loader.peak_bytes,
    )


def _check_expansion(path: Path) -> None:
    """Refuse a gzip file that holds far more than traces do, before anything in it is decoded: which takes far longer.

    Raises:
        UsageError: it holds more than FILE_BYTES, or more than EXPANSION times its own size.
    """
    size = path.stat().st_size
    limit = min(FILE_BYTES, max(EXPANDED_FREELY_BYTES, EXPANSION * size))
    expanded = 0
    with gzip.open(path) as stream:
        while part := stream.read(_CHUNK_CHARACTERS):
            expanded += len(part)
            if expanded > limit:
                raise UsageError(
                    f"has {size / MIB:.1f} MiB and holds more than {limit // MIB:,}, which is the most that is read of "
                    "such a file"
                )


def _integer(value: Any) -> int | None:
    """The value; None where a stranger wrote something else than a whole number that is not negative.

    Raises:
        ValueError: it is larger than tables hold.
    """
    if not isinstance(value, int) or value < 0:
        return None
    if value >= 1 << 62:
        raise ValueError("a whole number has more than 62 bits")
    return value


class _Loader:
    """Sorts events into tables."""

    def __init__(self, tables: sqlite3.Connection):
        self.tables = tables
        self.rows: dict[str, list[tuple]] = {table: [] for table in _STATEMENTS}
        self.waiting = 0
        self.name_ids: dict[str, int] = {}
        self.shape_ids: dict[str, int] = {}
        self.processes: dict[Any, int] = {}
        self.launching: set[int] = set()
        self.numbered = 0
        self.foreign = ""
        self.peak_bytes: dict[int, int] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        if event.get("ph") != "X":
            if event.get("name") == "[memory]":
                self._add_memory(event.get("args", {}))
            return
        category = str(event.get("cat"))
        if category in ("mtia_ccp_events", "hpu_op", "npu"):
            # An accelerator whose work is recorded in other ways.
            self.foreign = category
        add = _ADD.get(category)
        if add is None:
            return
        start = round(float(event["ts"]) * 1e3)
        length = round(float(event.get("dur", 0)) * 1e3)
        if abs(start) > _LATEST_NS or not 0 <= length <= _LATEST_NS:
            raise ValueError(f"an event begins at {event['ts']} us and takes {event.get('dur')}")
        # Some threads are numbers that SQLite's integers do not hold.
        add(self, event, start, start + length, str(event.get("tid")))
        self.waiting += 1
        if self.waiting == _ROWS_AT_ONCE:
            self._flush()

    def finish(self) -> None:
        self._flush()
        for table, ids in (("name", self.name_ids), ("shape", self.shape_ids)):
            rows = [(number, printable(text)) for text, number in ids.items()]
            self.tables.executemany(f"INSERT INTO {table} VALUES (?, ?)", rows)

    def give_work_its_process(self) -> None:
        """Find the process of each kernel by its launch, in a trace that several have launched in.

        Raises:
            UsageError: two processes have launches of one number, so that nobody can say whose a kernel is.
        """
        if len(self.launching) <= 1:
            process = next(iter(self.launching), None)
            if process not in (None, _PROCESS):
                self.tables.execute("UPDATE work SET process = ?", (process,))
            return
        self.tables.execute("CREATE INDEX launch_by_number ON launch (correlation)")
        collision = self.tables.execute(
            "SELECT correlation FROM launch WHERE correlation IN (SELECT correlation FROM work) "
            "GROUP BY correlation HAVING count(*) > 1 LIMIT 1"
        ).fetchone()
        if collision:
            raise UsageError(
                f"was merged of {len(self.launching)} processes, and launches of several of them have the number "
                f"{collision[0]}, so that its kernels do not say whose they are: read each process's own trace"
            )
        self.tables.execute(
            """UPDATE work SET process = coalesce(
                   (SELECT process FROM launch WHERE launch.correlation = work.correlation), process)"""
        )

    def _flush(self) -> None:
        for table, statement in _STATEMENTS.items():
            if self.rows[table]:
                self.tables.executemany(statement, self.rows[table])
                self.rows[table] = []
        self.waiting = 0

    def _name(self, event: Mapping[str, Any]) -> int:
        name = str(event.get("name", ""))
        if len(name) > _NAME_CHARACTERS:
            name = f"{name[:_NAME_CHARACTERS]}..."
        return self.name_ids.setdefault(name, len(self.name_ids))

    def _process(self, event: Mapping[str, Any]) -> int:
        return self.processes.setdefault(str(event.get("pid")), len(self.processes))

    def _add_work(self, event: Mapping[str, Any], start: int, stop: int, thread: str) -> None:
        arguments = event.get("args", {})
        number = self.numbered = self.numbered + 1
        operation = _integer(arguments.get("External id", arguments.get("external id")))
        of_launch = (
            _PROCESS,
            _integer(arguments.get("correlation")),
            self._name(event),
            int(arguments.get("device", 0)),
        )
        stream = str(arguments.get("stream", thread))
        self.rows["work"].append((number, start, stop, *of_launch, stream, _integer(arguments.get("bytes")), operation))
        if COLLECTIVE_ARGUMENT in arguments:
            self._add_collective(arguments, number, None)

    def _add_operation(self, event: Mapping[str, Any], start: int, stop: int, thread: str) -> None:
        arguments = event.get("args", {})
        name = str(event.get("name", ""))
        if name.startswith("ProfilerStep#"):
            # Older versions of torch called their profiler's steps operations.
            self._add_range(event, start, stop, thread)
            return
        shape = None
        if (sizes := arguments.get("Input Dims", arguments.get("Input dims"))) is not None:
            types = arguments.get("Input type", arguments.get("Input Type", []))
            text = json_text([sizes, types])
            shape = self.shape_ids.get(text)
            # Shapes beyond these are not told apart.
            if shape is None and len(self.shape_ids) < 200_000 and len(text) <= _NAME_CHARACTERS:
                shape = self.shape_ids[text] = len(self.shape_ids)
        number = _integer(arguments.get("External id", arguments.get("external id")))
        sequence = _integer(arguments.get("Sequence number"))
        self.rows["operation"].append((number, start, stop, thread, self._name(event), shape, sequence))
        if COLLECTIVE_ARGUMENT in arguments:
            self._add_collective(arguments, None, number)

    def _add_collective(self, arguments: Mapping[str, Any], work: int | None, operation: int | None) -> None:
        kind = collective_kind(str(arguments[COLLECTIVE_ARGUMENT]))
        group = printable(f"{arguments.get('Process Group Name', '')} {arguments.get('Process Group Ranks', '')}")
        size = collective_bytes(kind, arguments)
        sequence = _integer(arguments.get("Seq", arguments.get("seq")))
        row = (work, operation, kind, group, sequence, size, _integer(arguments.get("Group size")))
        self.rows["collective"].append(row)

    def _add_call(self, event: Mapping[str, Any], start: int, stop: int, thread: str) -> None:
        process, name = self._process(event), str(event.get("name", ""))
        if is_waiting_call(name):
            self.rows["waits"].append((process, start, stop, thread, printable(name)))
        correlation = _integer(event.get("args", {}).get("correlation"))
        if correlation is not None:
            self.launching.add(process)
            self.rows["launch"].append((process, correlation, start, stop, thread))

    def _add_range(self, event: Mapping[str, Any], start: int, stop: int, thread: str) -> None:
        name = str(event.get("name", ""))
        if name.startswith(_GLOO):
            self._add_gloo(event, name, start, stop, thread)
            return
        self.rows["ranges"].append((printable(name), start, stop, self._process(event), thread))

    def _add_gloo(self, event: Mapping[str, Any], name: str, start: int, stop: int, thread: str) -> None:
        """A collective of Gloo ran in a thread of its own, as one of NCCL does on a stream."""
        number = self.numbered = self.numbered + 1
        kind = collective_kind(name.removeprefix(_GLOO))
        row = (number, start, stop, self._process(event), -number, self._name(event), 0, f"gloo {thread}", None, None)
        self.rows["work"].append(row)
        size = collective_bytes(kind, event.get("args", {}))
        self.rows["collective"].append((number, None, kind, "", None, size, None))

    def _add_module(self, event: Mapping[str, Any], start: int, stop: int, thread: str) -> None:
        if str(event.get("name", "")).startswith("nn.Module: "):
            self.rows["module"].append((start, stop, thread, self._name(event)))

    def _add_memory(self, arguments: Mapping[str, Any]) -> None:
        # Device types of torch: 0 is the CPU.
        allocated = arguments.get("Total Allocated")
        if arguments.get("Device Type") and isinstance(allocated, int):
            gpu = int(arguments.get("Device Id", 0))
            self.peak_bytes[gpu] = max(allocated, self.peak_bytes.get(gpu, 0))


# By category. Capitals are those of older versions of torch; Triton launches through the driver.
_ADD: dict[str, Callable[[_Loader, Mapping[str, Any], int, int, str], None]] = {
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"), _Loader._add_work),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "xpu_runtime", "privateuse1_runtime"), _Loader._add_call),
    **dict.fromkeys(("cpu_op", "Operator"), _Loader._add_operation),
    "Runtime": _Loader._add_call,
    "user_annotation": _Loader._add_range,
    "python_function": _Loader._add_module,
}


def _has_rows(tables: sqlite3.Connection, table: str) -> bool:
    beside_gloo = "WHERE stream NOT LIKE 'gloo %'" if table == "work" else ""
    return tables.execute(f"SELECT 1 FROM {table} {beside_gloo} LIMIT 1").fetchone() is not None


def _let_operations_be_work(tables: sqlite3.Connection, numbered: int) -> None:
    """Put the CPU's operations into ``work``, each as long as it ran without those that it calls.

    What an operation and those within it ran by themselves is laid end to end from the outermost one's start, so that
    all of it together covers just the time of the outermost.
    """
    operations = tables.execute(
        "SELECT rowid, start, stop, thread, name, number FROM operation ORDER BY thread, start, stop DESC"
    ).fetchall()
    exclusive_ns = [stop - start for _, start, stop, *_ in operations]
    outermost = []
    callers: list[int] = []
    for index, (_, start, stop, thread, *_) in enumerate(operations):
        while callers and (operations[callers[-1]][3] != thread or operations[callers[-1]][2] <= start):
            callers.pop()
        outermost.append(not callers)
        if callers:
            exclusive_ns[callers[-1]] -= stop - start
        callers.append(index)
    rows = []
    reached = 0
    for index, (number, start, _, thread, name, operation) in enumerate(operations):
        if outermost[index]:
            reached = start
        ends = reached + max(0, exclusive_ns[index])
        rows.append((numbered + index + 1, reached, ends, _PROCESS, number, name, 0, thread, None, operation))
        reached = ends
    tables.executemany(_STATEMENTS["work"], rows)
    tables.execute(f"INSERT INTO launch SELECT {_PROCESS}, rowid, start, start, thread FROM operation")
    tables.execute(f"UPDATE work SET process = {_PROCESS}")
    tables.execute(f"UPDATE ranges SET process = {_PROCESS}")


class _Events:
    """The objects of the list ``traceEvents``, or of a file that is a list, decoded one at a time."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._around = ""
        self._deadline = time.process_time() + READING_S

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder().raw_decode
        skip = re.compile(r"[ \t\r\n,]*").match
        text, position = self._find_list()
        self._around = text[:position]
        count = 0
        while True:
            position = skip(text, position).end()  # type: ignore[union-attr]  # it matches nothing, too
            try:
                event, position = decode(text, position)
            except json.JSONDecodeError:
                if text[position : position + 1] == "]":
                    break
                # As much again of an event of many chunks, which is decoded from its start each time.
                more = self._read(max(_CHUNK_CHARACTERS, len(text) - position))
                if not more:
                    raise UsageError("is cut off: its list of events has no end") from None
                if len(text) - position > _EVENT_CHARACTERS:
                    raise UsageError(f"holds an event of more than {_EVENT_CHARACTERS:,} characters") from None
                text, position = text[position:] + more, 0
                continue
            count += 1
            if count > EVENTS:
                raise UsageError(f"holds more than {EVENTS:,} events, the most that are read: profile fewer steps")
            if isinstance(event, dict):
                yield event
        # What follows the events is a few lines.
        self._around += text[position:] + self._stream.read(1 << 22)

    def _read(self, characters: int) -> str:
        if time.process_time() > self._deadline:
            raise UsageError(TOO_SLOW)
        return self._stream.read(characters)

    def value(self, key: str, default: Any) -> Any:
        """The value of a key that stands before or after the events; the default if it is missing or of another type.

        Read when all events are.
        """
        match = re.search(rf'"{key}"\s*:\s*', self._around)
        try:
            value = json.JSONDecoder().raw_decode(self._around, match.end())[0] if match else default
        except json.JSONDecodeError:
            return default
        return value if isinstance(value, type(default)) else default

    def _find_list(self) -> tuple[str, int]:
        """Text read so far, and where in it the list of events begins."""
        key = re.compile(r'"traceEvents"\s*:\s*\[')
        text = self._stream.read(_CHUNK_CHARACTERS)
        if text.lstrip().startswith("["):
            return text, text.index("[") + 1
        while not (match := key.search(text)):
            more = self._read(_CHUNK_CHARACTERS)
            if not more or len(text) > _EVENT_CHARACTERS:
                raise UsageError("is no trace of torch.profiler: it has no list of traceEvents")
            text += more
        return text, match.end()
