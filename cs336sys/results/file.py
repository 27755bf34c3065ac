"""Appending to a results file: on a full disk, after a killed run, next to another process, under an editor."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from cs336sys.errors import OutputError, UsageError
from cs336sys.results.foreign import FILE_BYTES, FileUsage, Member, as_member, is_compressed, read_members
from cs336sys.results.model import SCHEMA_VERSION, Cell, Run, check_version, configuration_key, json_text, read_record

_WARNED_PERCENT = 80  # How much of the limits within which a file is read may be used without a warning.

# Names that promise something else than JSON lines to whoever opens the file.
_OTHER_ENDINGS = (".csv", ".tsv", ".json", ".md", ".markdown", ".txt", ".tex", ".typ", ".html", ".png", ".svg", ".pdf")


def check_name(path: Path) -> None:
    """Raise a UsageError if a file of this name should hold something else than JSON lines."""
    if path.name.lower().removesuffix(".gz").endswith(_OTHER_ENDINGS):
        raise UsageError(
            f"--save {path}: holds JSON lines, whose names end in .jsonl or .jsonl.gz; give one of these (tables are "
            "asked for by --output)"
        )


def check_appendable(path: Path) -> None:
    """Raise a UsageError as :class:`ResultsFile` would, without making or changing a file."""
    check_name(path)
    if not path.exists():
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise UsageError(f"cannot write results to {path}: {nearest} is no folder that can be written to")
        return
    with _refusing_faults(path), path.open("r+b") as stream:  # "+" fails if the file is read-only.
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):  # A device or a pipe holds nothing to check.
            return
        _read_records(path, stream)


@contextlib.contextmanager
def _refusing_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write results to {path}: {error.strerror or error}") from error


class ResultsFile:
    """A JSON-lines file to which this process appends runs and cells, and no other may meanwhile.

    Where its name ends in ``.gz``, each record is compressed on its own (:mod:`cs336sys.results.foreign`). If
    somebody removes, replaces or rewrites the file meanwhile, the records that it lacks are appended again.

    Attributes:
        fault: why the file, of whole records alone, lacks the last ones (its disk is full); they wait for the next.
        notices: sentences for the user on what others have done to the file.

    Raises:
        UsageError: the file cannot be opened for appending, holds something else than results, or another process is
            appending to it; raised by the constructor, before anything is measured.
    """

    def __init__(self, path: Path):
        self.path = path
        self.fault: OutputError | None = None
        self.notices: list[str] = []
        self._records: list[tuple[str, bytes]] = []  # All that were appended, with their _key().
        self._unwritten: list[bytes] = []  # Those that are not in the file, because it is full or was changed.
        check_name(path)
        self._open()

    def _open(self) -> None:
        """Open the file, keep other processes out, and check what it holds; it is closed where one of these fails."""
        with _refusing_faults(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that a failed write has written what the file's size says.
            self._stream = self.path.open("a+b", buffering=0)
            try:
                self._lock()
                self._read_existing()
            except BaseException:
                self._stream.close()
                raise

    def _read_existing(self) -> None:
        """Check and measure what the file holds, and end a record that an earlier, killed run left half written."""
        self._usage = FileUsage()
        whole, cut = _read_records(self.path, self._stream)
        self._usage.add(whole)
        if self._usage.percent > 100:
            raise _full(self.path)
        rest = b"" if cut is None else cut.content
        if not (whole + rest or b"\n").endswith(b"\n"):  # An empty file has no line to end.
            rest += b"\n"
        if cut is not None:  # Beyond a member that is half written no program reads: a whole one replaces it.
            self._stream.truncate(cut.start)
        if rest:
            self._stream.write(self._encoded(rest))
        self._size = os.fstat(self._stream.fileno()).st_size

    def _encoded(self, text: bytes) -> bytes:
        """Return a record as the file holds it."""
        return as_member(text) if is_compressed(self.path) else text

    def append(self, record: Run | Cell) -> None:
        """Write a record, after those that could not be written before; see :attr:`fault`."""
        line = {"schema_version": SCHEMA_VERSION, "kind": type(record).__name__.lower()} | asdict(record)
        text = json_text(line).encode() + b"\n"
        earlier_percent = self._usage.percent
        self._usage.add(text)
        if earlier_percent <= _WARNED_PERCENT < self._usage.percent:
            self.notices.append(
                f"{self.path} holds {_WARNED_PERCENT} % of what can be read again: give another file next time"
            )
        self._unwritten.append(self._encoded(text))
        self._records.append((_key(line), self._unwritten[-1]))  # Kept, for others may remove it from the file.
        self.catch_up()

    def close(self) -> None:
        self.catch_up()
        with self._noting_fault():
            self._stream.close()

    @contextlib.contextmanager
    def _noting_fault(self) -> Iterator[None]:
        try:
            with _refusing_faults(self.path):
                yield
        except UsageError as error:
            self.fault = OutputError(str(error))

    def catch_up(self) -> None:
        """Write the records that could not be written before, or that others have removed; set :attr:`fault`."""
        self.fault = None
        with self._noting_fault():
            self._follow_changes()
            while self._unwritten:
                line, size = self._unwritten[0], self._stream.seek(0, os.SEEK_END)
                try:
                    while line:  # Without a buffer a write may take only a part.
                        line = line[self._stream.write(line) :]
                except OSError:
                    with contextlib.suppress(OSError):  # No half record stays, where that can be helped.
                        self._stream.truncate(size)
                    raise
                del self._unwritten[0]
        self._size = self._stream.seek(0, os.SEEK_END)

    def _follow_changes(self) -> None:
        """Open the file again where its name names another one now, and plan to write the records that it lacks."""
        opened = os.fstat(self._stream.fileno())
        if not stat.S_ISREG(opened.st_mode):
            return  # A device or a pipe holds nothing that could be lost.
        try:
            present = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            self._stream.seek(0)  # The removed file can still be read by its descriptor.
            content = self._stream.read()
            self._open_again()
            self._unwritten.insert(0, content)
            self.notices.append(f"{self.path} was removed while cells were appended to it: it is written again")
            return
        is_replaced = not os.path.samestat(present, opened)
        if is_replaced:
            self._open_again()
        elif present.st_size != self._size:
            self._read_existing()  # Its size, which others have changed.
        else:
            return
        content, _ = _read_records(self.path, self._stream)
        keys = {_key(record) for record in map(read_record, content.splitlines()) if record is not None}
        unwritten_count = len(self._unwritten)
        self._unwritten = [line for key, line in self._records if key not in keys]
        is_record_lost = len(self._unwritten) > unwritten_count  # Otherwise others have only added or changed lines.
        if is_replaced or is_record_lost:
            change = "replaced" if is_replaced else "rewritten"
            self.notices.append(
                f"{self.path} was {change} while cells were appended to it: the missing ones are appended again"
            )

    def _open_again(self) -> None:
        """Open the file that has the name now; the earlier stream stays where that fails."""
        earlier = self._stream
        try:
            self._open()
        except BaseException:
            self._stream = earlier
            raise
        earlier.close()

    def _lock(self) -> None:
        """Keep other processes out until the file is closed, where its file system has locks."""
        if not stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode):
            return  # Several processes may write to a device or a pipe.
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _lock_holder(os.fstat(self._stream.fileno()))
            raise UsageError(
                f"cannot write results to {self.path}: {holder} is writing to it; wait for that or give another file"
            ) from None
        except OSError:
            return  # Some network file systems have no locks.


def _read_records(path: Path, stream: BinaryIO) -> tuple[bytes, Member | None]:
    """Read the text of a file from its start, and of a compressed one the last member where that is cut.

    Raise a UsageError where the file holds something else than results, or more than can be read.
    """
    if os.fstat(stream.fileno()).st_size > FILE_BYTES:
        raise _full(path)
    stream.seek(0)
    text, faulty = stream.read(), None
    if is_compressed(path):
        text, faulty = read_members(text)
    first_line = (text + (faulty.content if faulty else b""))[: 2**20].partition(b"\n")[0]  # A run's, which is short.
    record = read_record(first_line)
    if record is not None:
        check_version(path, record["schema_version"])
    # A killed run may have left half of its first line.
    is_other = bool(first_line) and record is None and not first_line.startswith(b'{"schema_version"')
    if is_other or (faulty is not None and not faulty.is_cut):
        raise UsageError(f"cannot write results to {path}: it holds something else; give another file")
    return text, faulty


def _full(path: Path) -> UsageError:
    return UsageError(f"cannot write results to {path}: it holds as much as can be read; give another file")


def _key(record: Mapping[str, Any]) -> str:
    """Return a key that tells a record from the others of its file, even after somebody edited its measurements."""
    configuration = record.get("configuration")
    key = configuration_key(configuration) if isinstance(configuration, Mapping) else ""
    return f"{record['kind']} {record.get('run_id')} {record.get('command')} {key}"


def _lock_holder(file: os.stat_result) -> str:
    """Return the process that has locked a file, as far as the system says."""
    inode = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            match line.split():  # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:2367490 0 EOF
                case [_, "FLOCK", _, _, process_id, locked, *_] if locked == inode:
                    command = Path("/proc", process_id, "cmdline").read_bytes().replace(b"\0", b" ")
                    return f"process {process_id} ({command.decode(errors='replace').strip()})"
    return "another process"
