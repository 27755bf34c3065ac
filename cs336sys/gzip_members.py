"""Gzip files to which one record at a time is appended, each a member of its own, so that what was written is whole.

Members one after another are one gzip file (RFC 1952, section 2.2), for every program that reads these. The cells in
``docs/results`` take 2.4 MB record by record, and would take 1.7 MB file by file.
"""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

# Each member's first read may reach into the next ones, and these are read again.
_READ_AT_ONCE = 2**14

# zlib's window of 2^15 bytes, with gzip's header and trailer around.
_GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS


def is_compressed(path: Path) -> bool:
    """Whether a file of this name holds compressed records."""
    return path.suffix.lower() == ".gz"


def as_member(record: bytes) -> bytes:
    """A whole gzip member, the same for the same record at any time."""
    return gzip.compress(record, mtime=0)


@dataclass(frozen=True)
class Members:
    """What a file of members holds.

    Attributes:
        whole: the content of the whole members.
        cut: what can be read of one after them that is cut, or damaged.
        end: where in the file the whole members end.
        is_damaged: what follows them is no member, or one whose data are wrong.
    """

    whole: bytes
    cut: bytes
    end: int
    is_damaged: bool


def read_members(compressed: bytes) -> Members:
    """Decompress a file of members, as far as that goes."""
    contents: list[bytes] = []
    position = end = 0
    while position < len(compressed):
        member = zlib.decompressobj(_GZIP_WINDOW_BITS)
        parts: list[bytes] = []
        while position < len(compressed) and not member.eof:
            read = compressed[position : position + _READ_AT_ONCE]
            try:
                parts.append(member.decompress(read))
            except zlib.error:
                return Members(b"".join(contents), b"".join(parts), end, is_damaged=True)
            position += len(read) - len(member.unused_data)
        if not member.eof:
            return Members(b"".join(contents), b"".join(parts), end, is_damaged=False)
        contents += parts
        end = position
    return Members(b"".join(contents), b"", end, is_damaged=False)
