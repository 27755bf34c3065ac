"""Pickles of strangers: plain data is read as pickle reads it, and nothing else is."""

import io
import pickle
import pickletools
import random
import struct

import pytest

from cs336sys.errors import UsageError
from cs336sys.results import plain_pickle
from cs336sys.results.plain_pickle import read_plain_pickle

PLAIN = {
    "segments": [{"pool": (0, 1), "address": 2**63 + 7, "back": -5, "text": "é" * 70_000, "part": 1.5, "none": None}]
    * 3,
    "more": [[True, False, (), 2**40, -(2**40), 2**63 - 1, 70_000, 2**31, -1, 255, 0], [{"a": i} for i in range(3000)]],
}
# Opcodes that load, call or look up: each with arguments that would do so.
CODE = {
    "GLOBAL": b"cos\nsystem\n",
    "INST": b"(ios\nsystem\n",
    "STACK_GLOBAL": b"\x8c\x02os\x94\x8c\x06system\x94\x93",
    "REDUCE": b"cos\nsystem\n(X\x01\x00\x00\x00xtR",
    "OBJ": b"(cos\nsystem\no",
    "BUILD": b"}}b",
    "NEWOBJ": b"cos\nsystem\n)\x81",
    "NEWOBJ_EX": b"cos\nsystem\n)}\x92",
    "PERSID": b"Pos.system\n",
    "BINPERSID": b"\x8c\x01xQ",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00",
    "EXT4": b"\x84\x01\x00\x00\x00",
}
OTHERS = sorted(code.name for code in pickletools.opcodes if code.name not in CODE)


def read(tmp_path, data):
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    return read_plain_pickle(path)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_data_is_read_as_by_pickle(tmp_path, protocol):
    assert read(tmp_path, pickle.dumps(PLAIN, protocol)) == PLAIN
    stream = io.BytesIO()
    pickle._Pickler(stream, protocol).dump(PLAIN)
    assert read(tmp_path, stream.getvalue()) == PLAIN


@pytest.mark.parametrize("name", CODE)
def test_every_opcode_that_loads_or_calls_is_refused(tmp_path, name):
    for before in (b"\x80\x04", b"\x80\x04]("):
        with pytest.raises(UsageError, match="which could run code"):
            read(tmp_path, before + CODE[name] + b".")


def test_name_that_commands_a_terminal_is_spelled_out(tmp_path):
    with pytest.raises(UsageError) as refused:
        read(tmp_path, b"\x80\x04\x8c\x05o\x1b[2J\x94\x8c\x03a\nb\x94\x93.")
    assert r"asks for o\x1b[2J.a b, which could run code" in str(refused.value)


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_opcode_does_harm(tmp_path, name):
    code = next(code for code in pickletools.opcodes if code.name == name)
    draw = random.Random(name)
    for _ in range(5):
        data = b"\x80\x04]]](" + code.code.encode("latin1") + draw.randbytes(draw.randrange(40)) + b"u."
        try:
            read(tmp_path, data)
        except UsageError:
            continue


def test_values_that_would_hang_or_fill_memory_are_refused(tmp_path):
    nested = b"\x80\x04)" + b"\x94h\x00h\x00\x86" * 60 + b"."
    memo = b"\x80\x02]r" + struct.pack("<I", 2**32 - 1) + b"."
    frame = b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"]."
    text = b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x."
    long = b"\x80\x04\x8a\x20" + b"\xff" * 32 + b"."
    for data in (nested, memo, frame, text, long, b"\x80\x04\x96" + b"\xff" * 8 + b"."):
        with pytest.raises(UsageError):
            read(tmp_path, data)


def test_memory_is_bounded(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(b"\x80\x02](" + b"]" * 4_000_000 + b"e.")
    with pytest.raises(UsageError, match="needs more than 1536 MiB of memory"):
        read_plain_pickle(path, memory_bytes=100 * 2**20)


def test_deep_nesting_is_read_and_freed(tmp_path):
    deep = read(tmp_path, b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".")
    assert len(deep) == 1
    del deep


def test_unpickler_behind_the_check_refuses_names_too():
    """Two locks: what the opcodes let through by mistake."""
    unpickler = plain_pickle._PlainUnpickler(io.BytesIO(b"cos\nsystem\n."))
    with pytest.raises(UsageError, match=r"asks for os\.system"):
        unpickler.load()
    with pytest.raises(UsageError, match="outside of itself"):
        plain_pickle._PlainUnpickler(io.BytesIO(b"Pos.system\n.")).load()
