"""A profiler's capture, from whatever file, as tables of one SQLite schema. Standard library only."""

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cs336sys.measure.range_names import run_configuration

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


def empty_tables() -> sqlite3.Connection:
    """A database of the schema, in a temporary file of SQLite's own, so that a long capture need not fit in memory."""
    tables = sqlite3.connect("", uri=True)
    # It dies with the connection, so nothing of it need be safe. 100 MB of it are kept in memory.
    tables.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -100000;" + _SCHEMA)
    return tables
