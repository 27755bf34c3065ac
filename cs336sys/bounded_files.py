"""Files of strangers read within limits: no device, no pipe that nobody writes to, no more than so many bytes."""

import os
import select
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from cs336sys.errors import UsageError

MIB = 2**20

_READ_AT_ONCE = 2**18

# What a shell needs to start the program that writes to a pipe, many times over.
_WRITER_S = 5.0


def read_chunks(path: Path, limit: int) -> Iterator[bytes]:
    """The content of a file or pipe, part by part.

    A pipe (``<(zcat results.gz)``) is waited for as long as a program has it open for writing.

    Raises:
        OSError: it cannot be read.
        UsageError: it is a device; nobody writes to the pipe; it holds more than ``limit`` bytes.
    """
    # A pipe without a writer would be opened when one comes, which may be never.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise UsageError(f"{path} is a device, not a file: give a file, or a pipe such as <(zcat FILE.gz)")
        first = b""
        if stat.S_ISFIFO(mode):
            first = _first_byte(descriptor, path)
            os.set_blocking(descriptor, True)
        read = 0
        while chunk := first + os.read(descriptor, _READ_AT_ONCE):
            first = b""
            read += len(chunk)
            if read > limit:
                raise UsageError(f"{path} holds more than {limit // MIB} MiB, which is the most that is read")
            yield chunk
    finally:
        os.close(descriptor)


def _first_byte(descriptor: int, path: Path) -> bytes:
    """Wait until a program has opened the pipe for writing; what was read of it to find that out."""
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    given_up = time.monotonic() + _WRITER_S
    # Ready, too, is a pipe whose writer has come and gone.
    while not ready.poll(50):
        try:
            if byte := os.read(descriptor, 1):
                return byte
        except BlockingIOError:
            # A program has it open and has not written yet; without one the pipe is at its end.
            return b""
        if time.monotonic() > given_up:
            raise UsageError(f"{path} is a pipe that no program writes to: give a file, or start that program first")
    return b""
