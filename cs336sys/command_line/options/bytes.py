"""Reading of options that are numbers of bytes."""

import math
import re

from cs336sys.command_line.options.reading import LARGEST_NUMBER
from cs336sys.errors import UsageError

_BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTE_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def byte_count(text: str) -> int:
    """Read ``512``, ``8B``, ``1.5MB`` (1,500,000) or ``1MiB`` (1,048,576), or raise a UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B?)", text.upper())
    if match is None or match[2] not in _BYTE_UNITS:
        raise UsageError("write a size as 8B, 10KB, 1MB (1e6 bytes) or 1MiB (2^20 bytes)")
    count = float(match[1]) * _BYTE_UNITS[match[2]]
    if not 1 <= count <= LARGEST_NUMBER or count != int(count):
        raise UsageError("must be a whole number of bytes, between 1 and 1e18")
    return int(count)


def read_memory_limit(text: str, option: str = "--memory-limit") -> float:
    """Read the bytes of ``130GiB``, ``140GB`` or ``80G`` (GiB, as Slurm and Docker count), or raise a UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([KMGT])(I?B)?", text.strip().upper())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise UsageError(f"{option} '{text}': give a size such as 130GiB, 140GB, 512MiB or 80G (GiB)")
    return float(match[1]) * _BYTE_UNITS[match[2] + (match[3] or "IB")]
