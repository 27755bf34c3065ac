"""A profiler's capture, from whatever file, as tables of one SQLite schema. Standard library only."""

import sqlite3
from dataclasses import dataclass
from typing import Any

from cs336sys.measure.range_names import run_configuration

# Times are nanoseconds on one clock. ``work`` is what ran on a GPU: kernels, copies, fills, each on the GPU of that
# number. Names are printable: strangers choose them. ``launch`` are the API
# calls on a CPU that asked for it, found by the number that CUPTI counts anew in each process. ``ranges`` are NVTX
# ranges, or those of torch.profiler; their threads are numbered as those of the launches.
_SCHEMA = """
CREATE TABLE work (start INTEGER, stop INTEGER, process INTEGER, correlation INTEGER, name INTEGER,
                   gpu INTEGER);
CREATE TABLE launch (process INTEGER, correlation INTEGER, start INTEGER, thread,
                     PRIMARY KEY (process, correlation)) WITHOUT ROWID;
CREATE TABLE ranges (name TEXT, start INTEGER, stop INTEGER, process INTEGER, thread);
CREATE TABLE name (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Capture:
    """An open capture.

    Attributes:
        tables: the database, see the top of this module.
        profiler: what made it: ``Nsight Systems`` or ``torch.profiler``.
        is_gpu: False where no GPU took part, and the CPU's operations stand in ``work``, each launched by itself and as
            long as it ran without those that it calls.
    """

    tables: sqlite3.Connection
    profiler: str
    is_gpu: bool = True

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
