"""Files of strangers: read within limits, and checked or made harmless before anything shows them.

And gzip files to which one record at a time is appended, each a member of its own, so that what was written is whole.
Members one after another are one gzip file (RFC 1952, section 2.2), for every program that reads these.
"""

import gzip
import math
import os
import re
import select
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336sys.errors import UsageError

# Characters that command a terminal instead of being seen: C0 but for tab and newline, DEL, C1; marks, overrides and
# isolates that turn the direction of what follows; separators that some programs take for newlines; tags, which
# nothing shows; halves of surrogate pairs, which no file can hold.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return the text with control characters spelled out: ESC becomes ``\\x1b``. Tabs and newlines stay."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


# What a saved line may hold, so that code which shows it needs no guards of its own. The largest file in docs/results
# holds 2.3 MB in lines of at most 55 KB, nested 5 deep, texts of 982. 300,000 cells of bench reach a file's limits.
FILE_BYTES = 512 * 2**20
FILE_MEMORY_BYTES = 2 * 2**30
LINE_BYTES = 32 * 2**20
LINE_CONTAINERS = 200_000
DEPTH = 32
TEXT_CHARACTERS = 20_000

# float32 ends at 3.4e38. Squares of squares of numbers up to here are still floats, so that no mean, variance or
# standard error of samples overflows; likewise of their reciprocals.
LARGEST = 1e60
SMALLEST = 1e-60  # 1 / LARGEST is a float above it.

# How a results file spells what JSON has no number for.
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

TIME_UNITS = frozenset({"s", "ms", "us", "ns"})


class FileUsage:
    """The part of the limits that a results file uses, for its reader and its writer.

    ``text_bytes`` are uncompressed; ``memory_bytes`` estimate the records: 32 a value; 200 a list, an object or a line.
    """

    def __init__(self) -> None:
        self.text_bytes = self.memory_bytes = 0

    def add(self, text: bytes) -> None:
        self.text_bytes += len(text)
        self.memory_bytes += 32 * text.count(b",") + 200 * sum(map(text.count, (b"{", b"[", b"\n")))

    @property
    def percent(self) -> float:
        """Return the larger of both parts in percent; a file of more than 100 is not read."""
        return 100 * max(self.text_bytes / FILE_BYTES, self.memory_bytes / FILE_MEMORY_BYTES)


def _checked_text(text: str) -> str:
    if len(text) > TEXT_CHARACTERS:
        raise ValueError(f"a text has {len(text):,} characters, more than {TEXT_CHARACTERS:,}")
    # Cells share names and settings, copies of which would take 0.5 GiB in 100,000 cells of bench.
    return sys.intern(printable(text))


def checked_value(value: Any, depth: int = DEPTH) -> Any:
    """Return a value of JSON with its text :func:`printable`, and the numbers that :data:`NOT_FINITE` names.

    A ValueError names what is too large or too deep.
    """
    if isinstance(value, str):
        return NOT_FINITE[value] if value in NOT_FINITE else _checked_text(value)
    if isinstance(value, float):
        if math.isfinite(value) and abs(value) > LARGEST:
            raise ValueError(f"{value:g} is beyond {LARGEST:g}")
    elif isinstance(value, int):
        if abs(value) >= 2**64:
            raise ValueError("an integer has more than 64 bits")
    elif isinstance(value, dict | list):
        if depth == 0:
            raise ValueError(f"values are nested more than {DEPTH} deep")
        if isinstance(value, dict):
            return {_checked_text(name): checked_value(item, depth - 1) for name, item in value.items()}
        return [checked_value(item, depth - 1) for item in value]
    return value


def check_samples(name: str, unit: str, measured: list[Any], warmup: list[Any]) -> None:
    """Raise a ValueError if there is no sample, or one is no number, too small to divide by, or no time above 0."""
    if not measured:
        raise ValueError(f"{name} has no sample")
    for value in (*measured, *warmup):
        if type(value) not in (int, float):
            raise ValueError(f"a sample of {name} is no number")
        if unit in TIME_UNITS and value <= 0:
            raise ValueError(f"a sample of {name} is {value:g} {unit}, and a time is more than 0")
        if value and abs(value) < SMALLEST:
            raise ValueError(f"a sample of {name} is {value:g}, nearer to 0 than {SMALLEST:g}")


MIB = 2**20

_READ_BYTES = 2**18

_WRITER_S = 5.0  # Many times what a shell needs to start the program that writes to a pipe.


def read_chunks(path: Path, limit: int) -> Iterator[bytes]:
    """Yield the content of a file or pipe, part by part.

    A pipe (``<(zcat results.gz)``) is waited for as long as a program has it open for writing.

    Raises:
        OSError: it cannot be read.
        UsageError: it is a device; nobody writes to the pipe; it holds more than ``limit`` bytes.
    """
    # A pipe without a writer would be opened when one comes, which may be never.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise UsageError(f"{path} is a device, not a file: give a file, or a pipe such as <(zcat FILE.gz)")
        first = b""
        if stat.S_ISFIFO(mode):
            first = _first_byte(descriptor, path)
            os.set_blocking(descriptor, True)
        bytes_left = limit
        while chunk := first + os.read(descriptor, _READ_BYTES):
            first = b""
            bytes_left -= len(chunk)
            if bytes_left < 0:
                raise UsageError(f"{path} holds more than {limit // MIB} MiB, which is the most that is read")
            yield chunk
    finally:
        os.close(descriptor)


def _first_byte(descriptor: int, path: Path) -> bytes:
    """Wait until a program has opened a pipe for writing, and return the byte that was read meanwhile, or none."""
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + _WRITER_S
    while not ready.poll(50):  # In ms. A pipe whose writer has come and gone is ready, too.
        try:
            if byte := os.read(descriptor, 1):
                return byte
        except BlockingIOError:
            # A program has it open and has not written yet; without one the pipe is at its end.
            return b""
        if time.monotonic() > deadline:
            raise UsageError(f"{path} is a pipe that no program writes to: give a file, or start that program first")
    return b""


# Bytes decompressed at once: the last of a member's reads reaches into the next ones, which are read again.
_MEMBER_READ_BYTES = 2**14

GZIP_MAGIC = b"\x1f\x8b\x08"  # How a member begins, by which the next one is found after a damaged one.


def is_compressed(path: Path) -> bool:
    """Return whether a file of this name holds compressed records."""
    return path.suffix.lower() == ".gz"


def as_member(record: bytes) -> bytes:
    """Compress a record as a whole gzip member: the same bytes for the same record at any time."""
    return gzip.compress(record, mtime=0)


@dataclass(frozen=True)
class Member:
    """One member of a file, from byte ``start`` to before ``end``."""

    start: int
    end: int
    content: bytes  # Decompressed, as far as it is whole.
    fault: str = ""  # How it is cut or damaged; empty for a whole one.
    is_cut: bool = False  # The file ends before it does.


class TooLargeError(ValueError):
    """Members that hold more than was allowed."""


def members_of(compressed: bytes, limit: int | None = None) -> Iterator[Member]:
    """Decompress members, after a damaged one the next that begins; raise TooLargeError beyond ``limit`` bytes."""
    position = content_bytes = faults = 0
    while position < len(compressed):
        member = _member_at(compressed, position, None if limit is None else limit - content_bytes)
        content_bytes += len(member.content)
        yield member
        position = member.end
        if member.fault and not member.is_cut:
            faults += 1
            position = compressed.find(GZIP_MAGIC, position)
            if position < 0 or faults == 100:  # No disk or network damages one of our files so often.
                return


def _member_at(compressed: bytes, start: int, limit: int | None) -> Member:
    """Decompress the member that starts here to its end or its first fault, up to a limit of bytes."""
    decompressor = zlib.decompressobj(16 + zlib.MAX_WBITS)  # 16: with gzip's header and trailer around the data.
    content = bytearray()
    position = start
    while position < len(compressed) and not decompressor.eof:
        part = compressed[position : position + _MEMBER_READ_BYTES]
        try:
            # One byte more than the limit shows that it is exceeded; zlib takes 0 for no limit.
            content += decompressor.decompress(part, 0 if limit is None else limit + 1 - len(content))
        except zlib.error as error:
            fault = str(error).rpartition(": ")[2]  # "Error -3 while decompressing data: incorrect data check"
            # It ends a byte after its start or later, so that the search for the next one, from there, gets on.
            return Member(start, max(position, start + 1), bytes(content), fault=fault)
        if limit is not None and len(content) > limit:
            raise TooLargeError
        position += len(part) - len(decompressor.unused_data)
    if not decompressor.eof:
        return Member(start, position, bytes(content), fault="cut off", is_cut=True)
    return Member(start, position, bytes(content))


def read_members(compressed: bytes) -> tuple[bytes, Member | None]:
    """Return the content of a file's members up to the first that is cut or damaged, and that one, if any."""
    whole: list[bytes] = []
    for member in members_of(compressed):
        if member.fault:
            return b"".join(whole), member
        whole.append(member.content)
    return b"".join(whole), None
