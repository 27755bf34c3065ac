"""Gzip files to which one record at a time is appended, each a member of its own, so that what was written is whole.

Members one after another are one gzip file (RFC 1952, section 2.2), for every program that reads these.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Bytes decompressed at once: the last of a member's reads reaches into the next ones, which are read again.
_READ_BYTES = 2**14

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
        part = compressed[position : position + _READ_BYTES]
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
