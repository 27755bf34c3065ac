"""Gzip files to which one record at a time is appended, each a member of its own, so that what was written is whole.

Members one after another are one gzip file (RFC 1952, section 2.2), for every program that reads these. The cells in
``docs/results`` take 2.4 MB record by record, and would take 1.7 MB file by file.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Each member's first read may reach into the next ones, and these are read again.
_READ_AT_ONCE = 2**14

# How a member begins, by which the next one is found after a damaged one.
GZIP_MAGIC = b"\x1f\x8b\x08"


def is_compressed(path: Path) -> bool:
    """Return whether a file of this name holds compressed records."""
    return path.suffix.lower() == ".gz"


def as_member(record: bytes) -> bytes:
    """A whole gzip member, the same for the same record at any time."""
    return gzip.compress(record, mtime=0)


@dataclass(frozen=True)
class Member:
    """One member of a file.

    Attributes:
        start, end: where in the file it lies.
        content: all of it, or of one that is cut or damaged what comes before that.
        fault: what is wrong with it; empty for a whole one.
        is_cut: the file ends before it does.
    """

    start: int
    end: int
    content: bytes
    fault: str = ""
    is_cut: bool = False


class TooLargeError(ValueError):
    """Members that hold more than was allowed."""


def members_of(compressed: bytes, limit: int | None = None) -> Iterator[Member]:
    """Decompress the members of a file one by one. After a damaged one it goes on with the next that begins.

    Args:
        limit: bytes that all of them may hold.

    Raises:
        TooLargeError: they hold more.
    """
    position = content_bytes = faults = 0
    while position < len(compressed):
        member = _member_at(compressed, position, None if limit is None else limit - content_bytes)
        content_bytes += len(member.content)
        yield member
        position = member.end
        if member.fault and not member.is_cut:
            faults += 1
            position = compressed.find(GZIP_MAGIC, position)
            # A file of more faults is not what a disk or a network did to one of ours.
            if position < 0 or faults == 100:
                return


def _member_at(compressed: bytes, start: int, limit: int | None) -> Member:
    """Decompress the member that starts here, up to a limit of bytes or its first fault."""
    # zlib's window of 2^15 bytes, with gzip's header and trailer around.
    member = zlib.decompressobj(16 + zlib.MAX_WBITS)
    parts: list[bytes] = []
    position, bytes_left = start, limit
    while position < len(compressed) and not member.eof:
        read = compressed[position : position + _READ_AT_ONCE]
        try:
            # zlib takes 0 for no limit.
            parts.append(member.decompress(read, 0 if bytes_left is None else bytes_left + 1))
        except zlib.error as error:
            # "Error -3 while decompressing data: incorrect data check"
            fault = str(error).rpartition(": ")[2]
            return Member(start, max(position, start + 1), b"".join(parts), fault)
        if bytes_left is not None:
            bytes_left -= len(parts[-1])
            if bytes_left < 0:
                raise TooLargeError
        position += len(read) - len(member.unused_data)
    if not member.eof:
        return Member(start, position, b"".join(parts), "cut off", is_cut=True)
    return Member(start, position, b"".join(parts))


def read_members(compressed: bytes) -> tuple[bytes, Member | None]:
    """Decompress a file of members, up to the first that is cut or damaged, which comes second."""
    whole: list[bytes] = []
    for member in members_of(compressed):
        if member.fault:
            return b"".join(whole), member
        whole.append(member.content)
    return b"".join(whole), None
