"""A profiler's capture, from whatever file, as tables of one SQLite schema. Standard library only."""

import json
import re
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cs336sys.measure.range_names import run_configuration
from cs336sys.results.foreign import MIB

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_TO_ALL = "all_to_all"
BARRIER = "barrier"
OTHER = "other"

# The key under which torch's record of a collective's parameters names it.
COLLECTIVE_ARGUMENT = "Collective name"

# Limits of a stranger's capture. A trace of torch.profiler has 10 to 25 times as many bytes as gzip makes of it.
FILE_BYTES = 4 * 2**30
EXPANSION = 40
EXPANDED_FREELY_BYTES = 64 * MIB
EVENTS = 10_000_000
READING_S = 600.0
# Of SQLite's virtual machine: some milliseconds.
_STATEMENTS_BETWEEN_CHECKS = 100_000

# All ranks leave these together, for each needs what every other has sent.
SYNCHRONIZING = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER)

# By a name without underscores, in any case: torch's, NCCL's kernels', Gloo's.
_KINDS = (
    (ALL_REDUCE, r"allreduce|oneshotreduce|twoshotreduce|crossdevicereduce|multimemallreduce"),
    (ALL_GATHER, r"allgather"),
    (REDUCE_SCATTER, r"reducescatter"),
    (ALL_TO_ALL, r"alltoall"),
    (BARRIER, r"barrier"),
    ("broadcast", r"broadcast"),
    ("send_recv", r"send|recv"),
    ("gather", r"gather"),
    ("scatter", r"scatter"),
    ("reduce", r"reduce"),
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS)

_BYTES = {
    **dict.fromkeys(("double", "long", "float64", "int64"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "float16", "short"), 2),
}


def collective_kind(name: str) -> str:
    """Return the kind of a collective by torch's name for it, or by its kernel's."""
    plain = name.replace("_", "")
    return next((kind for kind, pattern in _COMPILED if pattern.search(plain)), OTHER)


def collective_bytes(kind: str, arguments: Mapping[str, Any]) -> int | None:
    """Return the size of a collective as nccl-tests count it: the larger of what a rank gives and gets.

    Args:
        arguments: torch's record of its parameters, or those of an annotation: the shapes of its inputs.
    """
    if (dtype := arguments.get("dtype")) is not None:
        elements = [arguments.get(f"{way} msg nelems") for way in ("In", "Out")]
        counts = [count for count in elements if isinstance(count, int) and count >= 0]
        return max(counts) * _BYTES.get(str(dtype).lower(), 1) if counts else None
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return None
    total = 0
    for shape, dtype in zip(shapes, types, strict=False):
        size = _BYTES.get(str(dtype).lower())
        if size and isinstance(shape, list) and all(isinstance(count, int) for count in shape):
            for count in shape:
                size *= count
            total += size
    return total or None


_RANKS = re.compile(r"\[([\d, ]*)\]")


def group_ranks(group: str) -> tuple[int, ...] | None:
    """Return the ranks that a group's name lists; None where it lists none, or leaves some out."""
    match = _RANKS.search(group)
    if not match or "..." in group:
        return None
    try:
        return tuple(json.loads(match[0])) or None
    except ValueError:
        return None


# Times are nanoseconds on one clock. Names are printable: strangers choose them.
#
# ``work`` is what ran on a GPU: kernels, copies, fills. ``launch`` are the API calls on a CPU that asked for it, found
# by the number that CUPTI counts anew in each process. ``waits`` are calls that return when the GPU has done something.
# ``ranges`` are NVTX ranges, or those of torch.profiler; their threads are numbered as those of the launches.
# ``operation`` are torch's operators with the number under which their kernels name them, the shapes of their inputs,
# and the number that a forward operator shares with its backward one. ``module`` are calls of ``nn.Module``.
# ``collective`` says of work (or of the operator that launched it) which collective it is.
_SCHEMA = """
CREATE TABLE work (number INTEGER PRIMARY KEY, start INTEGER, stop INTEGER, process INTEGER, correlation INTEGER,
                   name INTEGER, gpu INTEGER, stream, bytes INTEGER, operation INTEGER);
CREATE TABLE launch (process INTEGER, correlation INTEGER, start INTEGER, stop INTEGER, thread,
                     PRIMARY KEY (process, correlation)) WITHOUT ROWID;
CREATE TABLE waits (process INTEGER, start INTEGER, stop INTEGER, thread, name TEXT);
CREATE TABLE ranges (name TEXT, start INTEGER, stop INTEGER, process INTEGER, thread);
CREATE TABLE operation (number INTEGER, start INTEGER, stop INTEGER, thread, name INTEGER, shape INTEGER,
                        sequence INTEGER);
CREATE TABLE module (start INTEGER, stop INTEGER, thread, name INTEGER);
CREATE TABLE collective (work INTEGER, operation INTEGER, kind TEXT, grp TEXT, sequence INTEGER, bytes INTEGER,
                         ranks INTEGER);
CREATE TABLE name (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE shape (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
"""

# Calls that wait for the GPU, of CUDA and HIP; plain cudaMemcpy returns when the copy is done.
WAITING_CALLS = (
    "DeviceSynchronize",
    "StreamSynchronize",
    "EventSynchronize",
    "CtxSynchronize",
    "cudaMemcpy_",
    "cuMemcpyDtoH_",
    "hipMemcpyWithStream",
)


def is_waiting_call(name: str) -> bool:
    """Return whether an API call of this name returns only when the GPU has done something."""
    return name in ("cudaMemcpy", "hipMemcpy") or any(part in name for part in WAITING_CALLS)


@dataclass(frozen=True)
class Capture:
    """An open capture.

    Attributes:
        tables: the database, see the top of this module.
        profiler: what made it: ``Nsight Systems`` or ``torch.profiler``.
        is_gpu: False where no GPU took part, and the CPU's operations stand in ``work``, each launched by itself and as
            long as it ran without those that it calls.
        rank, ranks: of the process, and how many there are, where the file says so.
        gpu_names: by number.
        peak_bytes: the most memory that torch's allocator held allocated on each GPU.
    """

    tables: sqlite3.Connection
    profiler: str
    is_gpu: bool = True
    rank: int | None = None
    ranks: int | None = None
    gpu_names: Mapping[int, str] = field(default_factory=dict)
    peak_bytes: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tables.set_progress_handler(None, 0)

    def close(self) -> None:
        self.tables.close()

    def range_names(self) -> dict[str, int]:
        """Count the occurrences of each range, the most frequent first."""
        rows = self.tables.execute("SELECT name, count(*) FROM ranges GROUP BY name ORDER BY 2 DESC, 1")
        return dict(rows.fetchall())

    def configuration(self) -> dict[str, Any] | None:
        """Return the configuration that ``cs336sys nsys`` ran; None for a capture of another program."""
        rows = self.tables.execute("SELECT name FROM ranges WHERE name LIKE 'cs336sys {%' ORDER BY start LIMIT 1")
        row = rows.fetchone()
        return run_configuration(row[0]) if row else None


TOO_SLOW = f"is not read within {READING_S:g} s of CPU time: profile fewer steps"


def why_unreadable(error: Exception, kind: str) -> str:
    """Say why a file cannot be read as that kind of capture, to follow its name."""
    is_interrupted = getattr(error, "sqlite_errorname", None) == "SQLITE_INTERRUPT"
    return TOO_SLOW if is_interrupted else f"cannot be read as {kind}: {error}"


def empty_tables() -> sqlite3.Connection:
    """Make a database of the schema, in a temporary file of SQLite's own: a long capture need not fit in memory.

    Its statements are interrupted after READING_S seconds of CPU time, until a :class:`Capture` is made of it.
    """
    tables = sqlite3.connect("", uri=True)
    # It dies with the connection, so nothing of it need be safe. 100 MB of it are kept in memory.
    tables.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -100000;" + _SCHEMA)
    deadline = time.process_time() + READING_S
    tables.set_progress_handler(lambda: time.process_time() > deadline, _STATEMENTS_BETWEEN_CHECKS)
    return tables
