"""Read a pickle of plain data so that nothing in it can run, hang or fill memory.

An unpickler whose ``find_class`` refuses every name is not enough: one memo index makes Python's allocate 64 GiB, and
nested tuples as keys are hashed for ever. So a file is read twice: first its opcodes, which must be those that
dictionaries, lists, pairs of small integers, texts, numbers, bools and None are made of, and then its values, part by
part while the process has room for more. Keys cannot be made to collide: texts are hashed with a random seed, and
integers have at most 64 bits, those of pairs 32.
"""

import gc
import os
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

from cs336sys.errors import UsageError
from cs336sys.results.foreign import MIB, printable, read_chunks

FILE_BYTES = 512 * MIB  # A snapshot of 400,000 events with 30 frames each has 75 MiB and takes 350 MiB of memory.
MEMORY_BYTES = 1536 * MIB

# What the unpickler takes at a time: it can make 70 times as many bytes of it before it asks for more.
_PART_BYTES = 2**17
_FRAME_BYTES = 2**20  # Python's pickler ends a frame after 64 KiB, or after one value that is larger.

_SMALL_INTEGER = rb"(?:K.|M..|J.{4})"
_LONG_INTEGER = rb"\x8a(?:\x06.{6}|\x05.{5}|\x00|\x01.|\x02.{2}|\x03.{3}|\x04.{4}|\x07.{7}|\x08.{8}|\x09.{8}\x00)"
# Opcodes of a fixed length: references; pairs of integers; integers of at most 64 bits; those that memorize;
# containers and those that fill them; None, bools and floats; the protocol.
_FIXED_LENGTH = re.compile(
    rb"(?:h.|j.{4}|" + _SMALL_INTEGER + rb"{2}\x86|" + _SMALL_INTEGER + b"|" + _LONG_INTEGER
    + rb"|\x94|q.|[}\](uesaN\x88\x89)]|G.{8}|\x80[\x02-\x05]){0,10000}",
    re.DOTALL,
)  # fmt: skip
_TEXT_LENGTH_BYTES = {0x8C: 1, 0x58: 4, 0x8D: 8}  # Opcodes of texts, with the bytes of the length that follows.
# The module and the name that STACK_GLOBAL takes.
_TWO_TEXTS = re.compile(rb"\x8c.([^\x8c]*?)\x94?\x8c.([^\x8c]*?)\x94?\Z", re.DOTALL)
_ASKS_FOR_CODE = {*b"ciRob\x81\x92PQ\x82\x83\x84\x93"}


def read_plain_pickle(path: Path, *, memory_bytes: int = MEMORY_BYTES) -> Any:
    """Read a file of plain data, written with pickle's protocols 2 to 5 or by torch's pickler in C++.

    Args:
        memory_bytes: the most by which the process may grow.

    Raises:
        UsageError: the file asks for code, holds anything else than plain data, is damaged, or is too large.
        OSError: the file cannot be read.
    """
    most_resident = _resident_bytes() + memory_bytes
    data = bytearray()
    for chunk in read_chunks(path, FILE_BYTES):
        data += chunk
    if data[:2] == b"PK":
        raise UsageError(f"{path} is a zip archive, such as torch.save writes, and no pickle of _dump_snapshot")
    if data[:1] != b"\x80":
        raise UsageError(f"{path} is damaged, or not a pickle of protocol 2 to 5")
    # Millions of containers that are all alive: the collector would look at them again and again.
    collects = gc.isenabled()
    gc.disable()
    try:
        _check_opcodes(data, path)
        return _PlainUnpickler(_MemoryCheckedFile(data, path, most_resident)).load()
    except UsageError:
        raise
    except MemoryError:
        raise UsageError(_too_large(path)) from None
    except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError, OverflowError):
        raise UsageError(f"{path} is damaged, or no pickle: it cannot be read to its end") from None
    finally:
        if collects:
            gc.enable()


class _PlainUnpickler(pickle.Unpickler):
    """Refuses what :func:`_check_opcodes` has let through by mistake."""

    def find_class(self, module: str, name: str) -> Any:
        raise UsageError(f"the file asks for {module}.{name}, which could run code: do not trust it")

    def persistent_load(self, pid: Any) -> Any:
        raise UsageError("the file asks for an object outside of itself: do not trust it")


class _MemoryCheckedFile:
    """A file for the unpickler, which looks at the process's memory before each part that it hands out."""

    def __init__(self, data: bytearray, path: Path, most_resident: int):
        self._data = memoryview(data)
        self._path = path
        self._most_resident = most_resident
        self._at = 0

    def peek(self, size: int) -> memoryview:
        self._check_memory()
        return self._data[self._at : self._at + _PART_BYTES]

    def read(self, size: int) -> bytes:
        self._check_memory()
        part = bytes(self._data[self._at : self._at + size])
        self._at += len(part)
        return part

    def _check_memory(self) -> None:
        if _resident_bytes() > self._most_resident:
            raise UsageError(_too_large(self._path))

    def readline(self) -> bytes:
        return b""  # Opcodes with lines are refused before.


def _check_opcodes(data: bytearray, path: Path) -> None:
    """Raise a UsageError at the first opcode that plain data does not need, or that would fill memory."""
    at = memorized = 0
    while True:
        match = _FIXED_LENGTH.match(data, at)
        assert match is not None, "it also matches the empty text"
        at = match.end()
        if at >= len(data):
            raise UsageError(f"{path} is damaged, or no pickle: it ends within a value")
        op = data[at]
        if op in _TEXT_LENGTH_BYTES:
            length_bytes = _TEXT_LENGTH_BYTES[op]
            at += 1 + length_bytes + int.from_bytes(data[at + 1 : at + 1 + length_bytes], "little")
        elif op == 0x72:  # LONG_BINPUT: Python's memo has room for as many as the largest index.
            memorized += 1
            # Picklers number values in turn, the first 256 with a shorter opcode.
            if int.from_bytes(data[at + 1 : at + 5], "little") > 256 + memorized:
                raise UsageError(f"{path} numbers its values in another order than any pickler")
            at += 5
        elif op == 0x95:  # FRAME: the unpickler reads it whole.
            if int.from_bytes(data[at + 1 : at + 9], "little") > _FRAME_BYTES:
                raise UsageError(f"{path} has a frame of more than {_FRAME_BYTES // MIB} MiB, as no pickler writes")
            at += 9
        elif op == 0x2E:  # STOP
            return
        elif match.end() == match.start():  # Else the match may have ended at its limit of 10,000, and goes on here.
            raise UsageError(_refusal(data, at, path))


def _refusal(data: bytearray, at: int, path: Path) -> str:
    """Return the sentence that refuses the opcode at a byte, naming the code that it asks for."""
    op = data[at]
    name = next((code.name for code in pickletools.opcodes if ord(code.code) == op), None)
    if name is None:
        return f"{path} is damaged, or no pickle: byte {at:,} is no opcode"
    # Those of _FIXED_LENGTH with bytes after them, 9 at most: they did not match because the file ends within these.
    if at + 10 > len(data) and op in b"hjKMJ\x8aqG\x80":
        return f"{path} is damaged, or no pickle: it ends within a value"
    if op not in _ASKS_FOR_CODE:
        return f"{path} holds what no snapshot of torch does ({name} at byte {at:,})"
    request = f"an object ({name})"  # Or its module and name, for which 400 bytes are enough.
    if op in b"ci":  # GLOBAL and INST, which two lines follow: the module and the name.
        request = ".".join(_decoded_text(part) for part in data[at + 1 : at + 400].split(b"\n")[:2])
    elif op == 0x93 and (texts := _TWO_TEXTS.search(data, max(0, at - 400), at)):
        request = ".".join(map(_decoded_text, texts.groups()))  # STACK_GLOBAL takes the two texts before it.
    return f"{path} asks for {request}, which could run code and is in no snapshot that torch writes: do not trust it"


def _decoded_text(part: bytes | bytearray) -> str:
    return " ".join(printable(part.decode("utf-8", "replace")[:100]).splitlines())


def _too_large(path: Path) -> str:
    return (
        f"{path} needs more than {MEMORY_BYTES // MIB} MiB of memory to be read: record fewer events, such as "
        "_record_memory_history(max_entries=400_000)"
    )


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # The second number: resident pages.
    except OSError:
        import resource

        # Elsewhere than on Linux: the peak so far, on macOS in bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
