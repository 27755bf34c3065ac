"""A reader of the trace that torch.profiler exports: JSON in the Chrome Trace Event Format, plain or compressed."""

import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import math
import re
import time
import zipfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from cs336sys.capture import capture as captures
from cs336sys.capture.capture import LATEST_NS, Calls, Capture, DeviceWork, Operations, Ranges, Texts, say_capture
from cs336sys.capture.intervals import Nested, first_rows
from cs336sys.errors import UsageError
from cs336sys.results.foreign import MIB, printable
from cs336sys.results.model import json_text

_GLOO = "gloo:"  # Gloo's threads show a collective as an annotation.

GZIP_MAGIC, ZIP_MAGIC = b"\x1f\x8b", b"PK\x03\x04"
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_MOST_EXPANSION = 40  # A trace of torch.profiler has 10 to 25 times as many bytes as gzip makes of it.
_EXPANDED_FREELY_BYTES = 64 * MIB
_CHUNK_CHARACTERS = 1 << 20
_MOST_EVENT_CHARACTERS = 1 << 24  # An event of torch's has some hundred characters, one with a stack some thousand.
_MOST_SHAPE_CHARACTERS = 8000
_PROCESS = 0  # The process of most traces. Which of several a kernel belongs to is known by its launch alone.

# How torch's profiler before Kineto marked its events, which had no category.
_LEGACY_CATEGORIES = {"CPU functions": "cpu_op", "CUDA functions": "kernel"}


def load_trace(path: Path) -> Capture:
    """Load kernels, copies, API calls, operators and ranges of a trace.

    The file is read event by event, so it may be larger than memory. Events without a time, or no JSON, are counted.

    Raises:
        UsageError: it is no trace, was merged of several processes so that kernels cannot be told apart, or holds API
            calls whose kernels were not recorded.
        OSError, EOFError, zlib.error, zipfile.BadZipFile, ValueError, ArithmeticError: it is damaged.
    """
    _check_expansion(path)  # Refuses a small file that is large when decompressed.
    loader = _Loader()
    with _open_decompressed(path) as binary:
        buffered = io.BufferedReader(binary)
        encoding = "utf-16" if buffered.peek(2)[:2] in UTF16_MARKS else "utf-8-sig"
        events = _Events(io.TextIOWrapper(buffered, encoding=encoding, errors="replace"), binary)
        for event in events:
            try:
                loader.add(event)
            except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError):  # It makes no sense.
                loader.leave_out(event)
    distributed = events.value("distributedInfo", {})
    rank = _column_value(distributed.get("rank"))
    return loader.capture(
        unreadable=loader.unreadable + events.unreadable,
        is_cut=events.is_cut,
        rank=rank if rank >= 0 else None,
        ranks=max(_column_value(distributed.get("world_size")), 0),
        gpu_names={
            device["id"]: printable(str(device["name"]))
            for device in events.value("deviceProperties", [])
            if isinstance(device, dict) and type(device.get("id")) is int and "name" in device
        },
    )


class _GzipStream(gzip.GzipFile):
    """A gzip stream; one that is cut ends behind its whole part, of which a read returns all that it has decoded."""

    is_cut = False

    def read(self, size: int | None = -1) -> bytes:
        try:
            return self.read1(size or -1)
        except EOFError:
            self.is_cut = True
            return b""


def _open_decompressed(path: Path) -> Any:
    """Open the trace's bytes: those of a plain file, of a gzip stream, or of the only file in a zip archive."""
    with path.open("rb") as binary:
        magic = binary.read(4)
    if magic.startswith(GZIP_MAGIC):
        return _GzipStream(path)
    if not magic.startswith(ZIP_MAGIC):
        return path.open("rb", buffering=0)
    archive = zipfile.ZipFile(path)
    names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
    if len(names) != 1:
        raise UsageError(f"is a zip archive of {len(names)} files: unpack it, and give their folder")
    return archive.open(names[0])


def content_digest(path: Path) -> bytes:
    """Return a digest of what a file holds once it is decompressed."""
    with io.BufferedReader(_open_decompressed(path)) as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _check_expansion(path: Path) -> None:
    """Refuse a compressed file that holds far more than traces do, before anything in it is decoded."""
    size = path.stat().st_size
    limit = min(captures.FILE_BYTES, max(_EXPANDED_FREELY_BYTES, _MOST_EXPANSION * size))
    expanded_bytes = 0
    with _open_decompressed(path) as stream:
        is_compressed = not isinstance(stream, io.FileIO)  # A plain file is opened as one.
        while is_compressed and (part := stream.read(MIB)):
            expanded_bytes += len(part)
            if expanded_bytes > limit:
                raise UsageError(say_capture("expanded too large", size_mib=size / MIB, limit_mib=limit // MIB))


def _column_value(value: Any) -> int:
    """Return a whole number for a column of int64, or raise ValueError if it is damaged; -1 for none or another."""
    if type(value) is not int or value < 0:
        return -1
    if value >= 1 << 62:  # So large that sums of two still fit into int64.
        raise ValueError("a whole number has more than 62 bits")
    return value


class _Loader:
    """Sorts events into columns: values of all rows, one row after another, in the order of the fields of their class.

    Where an argument of an event has several keys, they are of different versions of torch.
    """

    def __init__(self) -> None:
        self.work, self.gloo, self.calls = array("q"), array("q"), array("q")
        self.ranges, self.operations, self.modules = array("q"), array("q"), array("q")
        self.texts = Texts()
        self.processes: dict[Any, int] = {}
        self.collectives: list[captures.CollectiveRecord] = []
        # Places in `collectives` by the number of the operator that launched the collective.
        self.collective_of_operator: dict[int, int] = {}
        self.foreign_accelerator = ""
        self.peak_bytes: dict[int, int] = {}
        # Why a trace has no work: it has no events, holds counters alone, or is JAX's.
        self.has_events = self.has_counters = self.is_jax = False
        self.unreadable, self.incomplete_launches = 0, set[int]()
        self._open_begins: dict[tuple[Any, Any], list[dict[str, Any]]] = {}  # By process and thread, the inner last.

    def add(self, event: dict[str, Any]) -> None:
        """Sort one event by its phase ("ph": X is complete, B and E begin and end) and category."""
        phase = event.get("ph")
        self.has_events |= phase is not None  # Objects without a phase are of another program.
        if phase in ("B", "E"):
            event = self._join_begin_and_end(event)
        elif phase != "X":
            # An instant, of which those of torch's allocator are read.
            arguments = event.get("args", {}) if event.get("name") == "[memory]" else {}
            allocated_bytes = arguments.get("Total Allocated")
            # Device types of torch: 0 is the CPU.
            if arguments.get("Device Type") and type(allocated_bytes) is int:
                gpu = int(arguments.get("Device Id", 0))
                self.peak_bytes[gpu] = max(allocated_bytes, self.peak_bytes.get(gpu, 0))
            return
        category = str(event.get("cat", _LEGACY_CATEGORIES.get(event.get("pid", ""))))
        if category in ("mtia_ccp_events", "hpu_op", "npu"):
            self.foreign_accelerator = category
        add = _ADD_BY_CATEGORY.get(category)
        if add is None:  # It is not read, but tells why a trace has no work.
            self.has_counters |= category == "cuda_profiler_range"
            self.is_jax |= "hlo_op" in (event.get("args") or {})
            return
        start_us, length_us = float(event["ts"]), float(event["dur"])
        if not math.isfinite(start_us) or not 0 <= 1e3 * length_us <= LATEST_NS or abs(1e3 * start_us) > LATEST_NS:
            raise ValueError(f"an event begins at {start_us} us and takes {length_us}")
        start = round(start_us * 1e3)
        event["name"] = str(event.get("name", ""))
        if not isinstance(event.get("args"), dict):
            event["args"] = {}
        add(self, event, start, start + round(length_us * 1e3), str(event.get("tid")))  # Threads are numbers or texts.

    def leave_out(self, event: Any) -> None:
        """Count an event that cannot be read; of work, note the launch that lacks it, as one of a graph's does."""
        self.unreadable += 1
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            if _ADD_BY_CATEGORY.get(event["cat"]) is _Loader._add_work:
                self.incomplete_launches.add(int(event["args"]["correlation"]))

    def _join_begin_and_end(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return the complete event of an end and its begin; for a begin, an event of a category that is not read.

        An end without a begin raises a KeyError, and so is unreadable.
        """
        open_begins = self._open_begins.setdefault((event.get("pid"), event.get("tid")), [])
        if event["ph"] == "B":
            open_begins.append(event)
            return {"cat": "begin"}
        begin = open_begins.pop() if open_begins else {}
        arguments = (begin.get("args") or {}) | (event.get("args") or {})
        return event | begin | {"dur": float(event["ts"]) - float(begin["ts"]), "args": arguments}

    def capture(self, *, unreadable: int, **about: Any) -> Capture:
        """Return the capture, or raise a UsageError: nothing in it is work, or nobody can say whose work it is."""
        work, calls, ranges = DeviceWork.of(self.work), Calls.of(self.calls), Ranges.of(self.ranges)
        operations = Operations.of(self.operations)
        is_gpu = len(work) > 0
        if is_gpu:  # Without what Gloo's threads do, which is no work of the GPU.
            _give_work_its_process(work, calls)
        else:
            reasons = {
                "foreign accelerator": self.foreign_accelerator,
                "jax": self.is_jax,
                "counters": self.has_counters,
                "calls alone": len(calls),
                "no operations": not len(self.operations),
            }
            for reason, applies in reasons.items():
                if applies:  # There are no operations that could replace work, and this is why, if it shows.
                    refusal = UsageError if self.has_events or unreadable else captures.ForeignFileError
                    raise refusal(say_capture(reason, category=self.foreign_accelerator, unreadable=unreadable))
            work, calls = _operations_as_work(operations, DeviceWork.of(self.gloo))
            ranges.process[:] = _PROCESS  # As the operations, whose process is not kept.
        # Where the kernel does not describe its collective, the operator that launched it may.
        for place in np.flatnonzero((work.collective < 0) & np.isin(work.operation, list(self.collective_of_operator))):
            work.collective[place] = self.collective_of_operator[work.operation[place]]
        return Capture(
            profiler="torch.profiler", texts=self.texts.list, work=work, calls=calls, ranges=ranges,
            operations=operations, modules=Ranges.of(self.modules), collectives=self.collectives, is_gpu=is_gpu,
            peak_bytes=self.peak_bytes, unreadable=unreadable, incomplete_launches=self.incomplete_launches, **about,
        )  # fmt: skip

    def _name(self, event: Mapping[str, Any]) -> int:
        return self.texts[event["name"]]

    def _process(self, event: Mapping[str, Any]) -> int:
        return self.processes.setdefault(str(event.get("pid")), len(self.processes))

    def _add_work(self, event: Mapping[str, Any], start: int, stop: int, thread: str) -> None:
        """Add a kernel, copy or fill; :func:`_give_work_its_process` corrects the process."""
        arguments = event["args"]
        operation = _column_value(arguments.get("External id", arguments.get("external id")))
        correlation, size = _column_value(arguments.get("correlation")), _column_value(arguments.get("bytes"))
        gpu = _column_value(int(arguments.get("device", 0)))
        name, stream = self._name(event), self.texts[str(arguments.get("stream", thread))]
        collective = self._add_collective(arguments)
        self.work.extend((name, start, stop, _PROCESS, correlation, gpu, stream, size, operation, collective))

    def _add_collective(self, arguments: Mapping[str, Any]) -> int:
        """Note the collective that an event's arguments describe, and return its place; -1 if they describe none."""
        if captures.COLLECTIVE_ARGUMENT not in arguments:
            return -1
        kind = captures.collective_kind(str(arguments[captures.COLLECTIVE_ARGUMENT]))
        peers = _column_value(arguments.get("Src Rank")), _column_value(arguments.get("Dst Rank"))
        record = captures.CollectiveRecord(
            kind=kind,
            group=printable(f"{arguments.get('Process Group Name', '')} {arguments.get('Process Group Ranks', '')}"),
            sequence=_column_value(arguments.get("Seq", arguments.get("seq"))),
            bytes=captures.collective_bytes(arguments),
            ranks=_column_value(arguments.get("Group size")),
            communication=printable(str(arguments.get("Comms Id", ""))),
            peers=peers if min(peers) >= 0 and kind in (captures.SEND, captures.RECEIVE) else None,
        )
        self.collectives.append(record)
        return len(self.collectives) - 1

    def _add_operation(self, event: Mapping[str, Any], start: int, stop: int, thread: str) -> None:
        """Add an operator with the shapes and dtypes of its inputs as JSON."""
        arguments = event["args"]
        if event["name"].startswith("ProfilerStep#"):
            # Older versions of torch called their profiler's steps operations.
            self._add_range(event, start, stop, thread)
            return
        shape = -1
        if (shapes := arguments.get("Input Dims", arguments.get("Input dims"))) is not None:
            text = json_text([shapes, arguments.get("Input type", arguments.get("Input Type", []))])
            if len(text) <= _MOST_SHAPE_CHARACTERS:
                shape = self.texts[text]
        number = _column_value(arguments.get("External id", arguments.get("external id")))
        sequence = _column_value(arguments.get("Sequence number"))
        self.operations.extend((self._name(event), start, stop, number, self.texts[thread], shape, sequence))
        if (collective := self._add_collective(arguments)) >= 0 and number >= 0:
            self.collective_of_operator[number] = collective

    def _add_call(self, event: Mapping[str, Any], start: int, stop: int, thread: str) -> None:
        correlation = _column_value(event["args"].get("correlation"))
        process, thread_number = self._process(event), self.texts[thread]
        self.calls.extend((self._name(event), start, stop, process, correlation, thread_number))

    def _add_range(self, event: Mapping[str, Any], start: int, stop: int, thread: str) -> None:
        if not event["name"].startswith(_GLOO):
            self.ranges.extend((self._name(event), start, stop, self._process(event), self.texts[thread]))
            return
        # A collective of Gloo ran in a thread of its own, as one of NCCL does on a stream.
        stream, collective = self.texts[f"gloo {thread}"], len(self.collectives)
        launch, gpu, size, operation = -1, 0, -1, -1  # And _PROCESS, as the operations with which it is analysed.
        row = (self._name(event), start, stop, _PROCESS, launch, gpu, stream, size, operation, collective)
        self.gloo.extend(row)
        kind = captures.collective_kind(event["name"].removeprefix(_GLOO))
        self.collectives.append(captures.CollectiveRecord(kind, bytes=captures.collective_bytes(event["args"])))

    def _add_module(self, event: Mapping[str, Any], start: int, stop: int, thread: str) -> None:
        if event["name"].startswith("nn.Module: "):
            self.modules.extend((self._name(event), start, stop, _PROCESS, self.texts[thread]))


# Capitals are those of older versions of torch; Triton launches through the driver.
_ADD_BY_CATEGORY: dict[str, Callable[[_Loader, Mapping[str, Any], int, int, str], None]] = {
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"), _Loader._add_work),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver"), _Loader._add_call),
    **dict.fromkeys(("Runtime", "privateuse1_runtime", "privateuse1_driver"), _Loader._add_call),
    **dict.fromkeys(("cpu_op", "Operator"), _Loader._add_operation),
    "user_annotation": _Loader._add_range,
    "python_function": _Loader._add_module,
}


def _give_work_its_process(work: DeviceWork, calls: Calls) -> None:
    """Set the process of each kernel to that of its launch, or refuse processes whose launches share numbers."""
    launches = calls.select(np.isin(calls.correlation, work.correlation) & (calls.correlation >= 0))
    pairs = np.unique(np.column_stack((launches.correlation, launches.process)), axis=0)
    repeated = np.flatnonzero(np.diff(pairs[:, 0]) == 0)
    if len(repeated):
        launch_number, process_count = pairs[repeated[0], 0], len(np.unique(calls.process))
        raise UsageError(say_capture("merged processes", processes=process_count, launch=launch_number))
    # Work whose launch is missing is given to the process with most launches.
    processes, counts = np.unique(launches.process, return_counts=True)
    busiest = processes[counts.argmax()] if len(processes) else _PROCESS  # -1, the row of no launch, points at it.
    work.process[:] = np.append(launches.process, busiest)[first_rows(launches.correlation, work.correlation)]


def _operations_as_work(operations: Operations, gloo: DeviceWork) -> tuple[DeviceWork, Calls]:
    """Return the operations of a trace without a GPU as if they were its work, so that it is analysed like others.

    Each is as long as it ran itself, without those it called, and has a launch where it began. Gloo's work is added.
    """
    nested = Nested(operations.start, operations.stop, operations.thread)
    is_inner = nested.parent >= 0
    exclusive_ns = operations.stop - operations.start
    np.subtract.at(exclusive_ns, nested.parent[is_inner], operations.length[is_inner])
    chosen, is_outermost = operations.select(nested.order), ~is_inner[nested.order]
    # Below 0 where inner ones, by rounding, take longer than the one around them.
    exclusive_ns = np.maximum(exclusive_ns, 0)[nested.order]
    # End to end, in order of start: without the time of those it calls, an operation would else overlap them. Then each
    # outermost one, with those inside it (which follow it: cumsum numbers the outermost), is moved to where it began.
    ends = np.cumsum(exclusive_ns)
    begins = ends - exclusive_ns
    shift = (chosen.start - begins)[is_outermost][np.cumsum(is_outermost) - 1]
    count = len(chosen)
    unknown, process, gpu = np.full(count, -1), np.full(count, _PROCESS), np.zeros(count, np.int64)
    launch_numbers = np.arange(count)
    work = DeviceWork(
        start=begins + shift, stop=ends + shift, process=process, correlation=launch_numbers, name=chosen.name, gpu=gpu,
        stream=chosen.thread, bytes=unknown, operation=chosen.number, collective=unknown,
    )  # fmt: skip
    launches = Calls(
        process=process, correlation=launch_numbers, start=chosen.start, stop=chosen.start, thread=chosen.thread,
        name=unknown,
    )  # fmt: skip
    return DeviceWork.joined(work, gloo), launches


class _Events:
    """The objects of the list ``traceEvents``, or of a file that is a list, decoded one at a time.

    Attributes:
        unreadable: how many were no JSON and could not be mended, once all are decoded.
        is_cut: the file ends within an event or within the list, which may lack its "]" where the file is the list.
    """

    def __init__(self, stream: TextIO, binary: Any):
        self._stream, self._binary = stream, binary
        self._outside_events = ""
        self._deadline = time.process_time() + captures.READING_S
        self.unreadable = 0
        self.is_cut = self._is_array = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the events; on an error of JSON read more text if the event is incomplete, else mend or skip it."""
        text, position = self._find_list()
        self._outside_events = text[:position]  # Which value() searches.
        count = 0
        while True:
            position = _SEPARATORS.match(text, position).end()  # type: ignore[union-attr]  # it also matches ""
            try:
                event, position = _decode_value(text, position)
            except json.JSONDecodeError as error:
                if text[position : position + 1] == "]":
                    break
                # The text may end within a literal, a number or an escape: none has more than 16 characters.
                is_incomplete = error.pos >= len(text) - 16 or error.msg.startswith("Unterminated string")
                # Behind a wrong escape the text may end in mid-event, too.
                is_incomplete |= _EVENT_END.search(text, position) is None
                # Twice as much each time, for an event of many chunks is decoded from its start again.
                more = self._read(max(_CHUNK_CHARACTERS, len(text) - position)) if is_incomplete else ""
                if len(text) - position > _MOST_EVENT_CHARACTERS:
                    raise UsageError(f"holds an event of more than {_MOST_EVENT_CHARACTERS:,} characters") from None
                if more:
                    text, position = text[position:] + more, 0
                    continue
                event, position = self._mend(text, position)
                if event is None:  # It could not be mended, and is skipped.
                    if position >= len(text):
                        text, position = self._read(_CHUNK_CHARACTERS), 0
                        if not text:
                            # The format lets a list end without its bracket.
                            self.is_cut |= not self._is_array or getattr(self._binary, "is_cut", False)
                            break
                    continue
            count += 1
            if count > captures.EVENTS:
                most = f"{captures.EVENTS:,} events, the most that are read"
                raise UsageError(f"holds more than {most}: profile fewer steps")
            if isinstance(event, dict):
                yield event
        # After the events come a few lines, of which 4 MiB are more than all.
        self._outside_events += text[position:] + self._stream.read(1 << 22)

    def _mend(self, text: str, position: int) -> tuple[Any, int]:
        """Return an event with its wrong escapes corrected, None where that does not help, and where it ends."""
        # The event's own text may look like its end, so that the next three are tried, too.
        ends = [match.start() + 1 for match in itertools.islice(_EVENT_END.finditer(text, position), 4)]
        for end in ends:
            with contextlib.suppress(json.JSONDecodeError):
                return _decode_value(_WRONG_ESCAPE.sub(r"\\\\", text[position:end]), 0)[0], end
        if text[position:].strip():
            self.unreadable += 1
            self.is_cut |= not ends  # The text ends within this event.
        return None, ends[0] if ends else len(text)

    def _read(self, characters: int) -> str:
        if time.process_time() > self._deadline:
            raise UsageError(captures.TOO_SLOW)
        return self._stream.read(characters)

    def value(self, key: str, default: Any) -> Any:
        """Return the value of a key outside the events, once these are read; the default if it has another type."""
        match = re.search(rf'"{key}"\s*:\s*', self._outside_events)
        try:
            value = json.JSONDecoder().raw_decode(self._outside_events, match.end())[0] if match else default
        except json.JSONDecodeError:
            return default
        return value if isinstance(value, type(default)) else default

    def _find_list(self) -> tuple[str, int]:
        """Return the text read so far, and where in it the list of events begins."""
        key = re.compile(r'"traceEvents"\s*:\s*\[')
        text = self._read(_CHUNK_CHARACTERS)
        if not text:
            raise UsageError(captures.EMPTY)  # Of a compressed file.
        if text.lstrip().startswith("["):
            self._is_array = True
            return text, text.index("[") + 1
        while not (list_begin := key.search(text)):
            more = self._read(_CHUNK_CHARACTERS)
            if not more or len(text) > _MOST_EVENT_CHARACTERS:
                raise captures.ForeignFileError("is no trace of torch.profiler: it has no list of traceEvents")
            text += more
        return text, list_begin.end()


_decode_value = json.JSONDecoder(strict=False).raw_decode  # Control characters stand in names that torch writes.
_SEPARATORS = re.compile(r"[ \t\r\n,]*")
# An event ends before the next one, or at the end of the list.
_EVENT_END = re.compile(r'\}(?=\s*(,\s*\{\s*"|\]|$))')
_WRONG_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
