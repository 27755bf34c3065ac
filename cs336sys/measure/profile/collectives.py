"""Collectives by name and size: their kinds, the bytes that they move, and the factor of bus bandwidth."""

import json
import re
from collections.abc import Mapping
from typing import Any

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_TO_ALL = "all_to_all"
BARRIER = "barrier"
OTHER = "other"

# The key under which torch's record of a collective's parameters names it.
COLLECTIVE_ARGUMENT = "Collective name"

# All ranks leave these together, for each needs what every other has sent.
SYNCHRONIZING = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER)

# By a name without underscores, in any case: torch's, NCCL's kernels', Gloo's.
_KINDS = (
    (ALL_REDUCE, r"allreduce|oneshotreduce|twoshotreduce|crossdevicereduce|multimemallreduce"),
    (ALL_GATHER, r"allgather"),
    (REDUCE_SCATTER, r"reducescatter"),
    (ALL_TO_ALL, r"alltoall"),
    (BARRIER, r"barrier"),
    ("broadcast", r"broadcast"),
    ("send_recv", r"send|recv"),
    ("gather", r"gather"),
    ("scatter", r"scatter"),
    ("reduce", r"reduce"),
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS)

_BYTES = {
    **dict.fromkeys(("double", "long", "float64", "int64"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "float16", "short"), 2),
}


def collective_kind(name: str) -> str:
    """Return the kind of a collective by torch's name for it, or by its kernel's."""
    plain = name.replace("_", "")
    return next((kind for kind, pattern in _COMPILED if pattern.search(plain)), OTHER)


def collective_bytes(kind: str, arguments: Mapping[str, Any]) -> int | None:
    """Return the size of a collective as nccl-tests count it: the larger of what a rank gives and gets.

    Args:
        arguments: torch's record of its parameters, or those of an annotation: the shapes of its inputs.
    """
    if (dtype := arguments.get("dtype")) is not None:
        elements = [arguments.get(f"{way} msg nelems") for way in ("In", "Out")]
        counts = [count for count in elements if isinstance(count, int) and count >= 0]
        return max(counts) * _BYTES.get(str(dtype).lower(), 1) if counts else None
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return None
    total = 0
    for shape, dtype in zip(shapes, types, strict=False):
        size = _BYTES.get(str(dtype).lower())
        if size and isinstance(shape, list) and all(isinstance(count, int) for count in shape):
            for count in shape:
                size *= count
            total += size
    return total or None


_RANKS = re.compile(r"\[([\d, ]*)\]")


def group_ranks(group: str) -> tuple[int, ...] | None:
    """Return the ranks that a group's name lists; None where it lists none, or leaves some out."""
    found = _RANKS.search(group)
    if not found or "..." in group:
        return None
    try:
        return tuple(json.loads(found[0])) or None
    except ValueError:
        return None
