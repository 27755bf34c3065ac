"""Count an operator's FLOPs and bytes by the shapes of its inputs, and the time a GPU needs for them."""

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs336sys.accounting.hardware import Ceilings, datasheet, peak_tflops

_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "int64"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char", "c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
}
_PRECISION = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16"}


@dataclass(frozen=True)
class OperatorWork:
    """FLOPs of one call, the bytes of its inputs and its output, each moved once, and the dtype it computes in."""

    flops: float
    bytes: float
    precision: str | None


@dataclass(frozen=True)
class Roofline:
    """Speed of an operator compared with the GPU's limits.

    Attributes:
        percent: of the shortest possible time over the measured one; None where the GPU's peaks are not known.
        bound: ``FLOPs`` or ``bytes``, whichever takes longer at the peaks.
        source: where the peaks come from.
    """

    percent: float | None
    bound: str | None
    source: str


def operator_work(operator: str, shape: str) -> OperatorWork | None:
    """The work of an operator; None where its name or its shapes do not say what it is.

    Args:
        shape: JSON of two lists, sizes and types of its inputs, as torch.profiler records them.
    """
    try:
        sizes, types = json.loads(shape)
        flops, output = _flops_and_output(operator.removeprefix("aten::"), sizes)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        return None
    widths = [_BYTES.get(str(dtype)) for dtype in types]
    tensors = [(size, width) for size, width in zip(sizes, widths, strict=False) if width and _is_size(size)]
    if not tensors:
        return None
    dtype = next((str(dtype) for dtype, width in zip(types, widths, strict=False) if width), "")
    moved = sum(math.prod(size) * width for size, width in tensors) + output * tensors[0][1]
    return OperatorWork(float(flops), float(moved), _PRECISION.get(dtype))


def _is_size(size: Any) -> bool:
    return isinstance(size, list) and bool(size) and all(isinstance(extent, int) and extent >= 0 for extent in size)


def _flops_and_output(name: str, sizes: Sequence[Any]) -> tuple[int, int]:
    """FLOPs, and elements of the output.

    Raises:
        KeyError: the operator's FLOPs are not known.
    """
    if name in ("mm", "addmm", "_addmm_activation"):
        a, b = sizes[:2] if name == "mm" else sizes[1:3]
        (m, k), (_, n) = a, b
        return 2 * m * n * k, m * n
    if name in ("bmm", "baddbmm"):
        a, b = sizes[:2] if name == "bmm" else sizes[1:3]
        (batch, m, k), (_, _, n) = a, b
        return 2 * batch * m * n * k, batch * m * n
    if name == "linear":
        *lead, k = sizes[0]
        n = sizes[1][0]
        return 2 * math.prod(lead) * n * k, math.prod(lead) * n
    if "scaled_dot_product" in name or name.startswith(("_flash_attention_", "_efficient_attention_")):
        is_backward = "backward" in name
        query, key, value = sizes[1:4] if is_backward else sizes[:3]
        batch, heads, queries, width = query
        keys = key[2]
        if not name.startswith("_scaled") and not name.startswith("scaled"):
            # (batch, sequence, heads, width)
            queries, heads, keys = heads, queries, key[1]
        forward = 2 * batch * heads * queries * keys * (width + value[3])
        # Five products instead of two; half of it where a mask is causal, which shapes do not say.
        return (forward * 5 // 2 if is_backward else forward), batch * heads * queries * value[3]
    raise KeyError(name)


def roofline(work: OperatorWork, seconds: float, gpu_name: str, ceilings: Ceilings | None = None) -> Roofline:
    """Compare a call with the longer of the times that its FLOPs and its bytes take at the peaks.

    Args:
        ceilings: measured on this GPU; None: the peaks of its datasheet.
    """
    if ceilings is not None:
        source = f"ceilings measured on {ceilings.gpu} by `cs336sys doctor --ceilings`"
        tflops = ceilings.tflops.get(work.precision) if work.precision else None
        bytes_per_s: float | None = 1e9 * ceilings.copy_gbps
    else:
        source = f"peaks of the datasheet of {gpu_name}, which no program reaches"
        tflops = peak_tflops(gpu_name, work.precision) if work.precision else None
        sheet = datasheet(gpu_name)
        bytes_per_s = None if sheet is None else sheet.memory_bytes_per_s
    if tflops is None or bytes_per_s is None:
        return Roofline(None, None, f"the peaks of {gpu_name or 'this GPU'} are not known")
    computing_s, moving_s = work.flops / tflops / 1e12, work.bytes / bytes_per_s
    bound = "FLOPs" if computing_s >= moving_s else "bytes"
    return Roofline(100 * max(computing_s, moving_s) / seconds, bound, source)


class CalledOperators:
    """The operators that launched some work.

    Args:
        operation: the number of each work's operator.
        threads: names of threads; those of operators are added.

    Attributes:
        place: of each work's operator in the other arrays; -1 for none.
        name, start, thread, shape: of operators; there is one more, of nothing, at the end.
    """

    def __init__(self, tables: sqlite3.Connection, operation: NDArray[np.int64], threads: list[str]):
        numbers = {text: number for number, text in enumerate(threads)}
        wanted = set(np.unique(operation).tolist())
        operators: dict[int, tuple[int, int, int, int]] = {}
        for number, name, start, thread, shape in tables.execute(
            "SELECT number, name, start, thread, coalesce(shape, -1) FROM operation WHERE number IS NOT NULL"
        ):
            if number in wanted:
                operators.setdefault(number, (name, start, numbers.setdefault(str(thread), len(numbers)), shape))
        threads[:] = numbers
        keys = np.array(sorted(operators), np.int64)
        rows = np.array([*(operators[key] for key in keys.tolist()), (-1, -1, -1, -1)], np.int64)
        self.name, self.start, self.thread, self.shape = rows.T
        self.place = np.full(len(operation), -1)
        if len(keys):
            place = np.minimum(np.searchsorted(keys, operation), len(keys) - 1)
            self.place = np.where(keys[place] == operation, place, -1)

    def named(self, names: Mapping[int, str], kernel_names: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
        """The operator's name of each work, as a number into ``kernel_names`` with the names of operators added."""
        ids = {text: number for number, text in enumerate(kernel_names)}
        texts = [names.get(id_, f"unnamed {id_}") for id_ in self.name.tolist()[:-1]]
        numbers = np.array([*(ids.setdefault(text, len(ids)) for text in texts), -1], np.int64)
        return numbers[self.place], list(ids)
