"""Count an operator's FLOPs and bytes by the shapes of its inputs, and the time a GPU needs for them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cs336sys.accounting.hardware import Ceilings, datasheet, peak_tflops
from cs336sys.capture.capture import tensors_of

_PRECISION = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16"}
# Kernels that torch.compile made, whose arguments are their inputs and outputs; what they compute is not recorded.
_POINTWISE = ("triton_poi_", "triton_red_", "triton_per_")


@dataclass(frozen=True)
class OperatorWork:
    """FLOPs of one call, the bytes of its inputs and outputs, each moved once, and the dtype it computes in.

    FLOPs of 0 are not known; then only moving the bytes bounds the time.
    """

    flops: float
    bytes: float
    precision: str | None


@dataclass(frozen=True)
class Roofline:
    """Speed of an operator compared with the GPU's limits."""

    percent: float | None  # The shortest possible time over the measured one; None where the GPU's peaks are not known.
    bound: str | None  # "FLOPs" or "bytes", whichever takes longer at the peaks.
    source: str  # Where the peaks come from.


def operator_work(operator: str, shape: str) -> OperatorWork | None:
    """Return the work of an operator; None where its name or its shapes do not say what it is.

    ``shape`` is JSON of two lists, sizes and types of its inputs, as torch.profiler records them.
    """
    try:
        shapes, dtypes = json.loads(shape)
        is_pointwise = operator.startswith(_POINTWISE)
        flops, outputs = (0, 0) if is_pointwise else _flops_and_outputs(operator.removeprefix("aten::"), shapes)
        # Numbers have the empty shape, and are no tensors.
        tensors = tensors_of([size or None for size in shapes], dtypes)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        return None
    if not tensors:
        return None
    dtype, _, element_bytes = tensors[0]
    # The outputs have the dtype of the first input.
    moved_bytes = sum(count * width for _, count, width in tensors) + outputs * element_bytes
    return OperatorWork(float(flops), float(moved_bytes), _PRECISION.get(dtype))


def _flops_and_outputs(name: str, shapes: Sequence[Any]) -> tuple[int, int]:
    """Return FLOPs and the elements of all outputs; raise KeyError for an operator whose FLOPs are not known."""
    if name in ("mm", "bmm", "addmm", "baddbmm", "_addmm_activation"):
        a, b = shapes[:2] if name in ("mm", "bmm") else shapes[1:3]  # What is added to the product comes first.
        (*batch, m, k), (*_, n) = a, b
        return 2 * math.prod(batch) * m * n * k, math.prod(batch) * m * n
    if name == "linear":
        *lead, k = shapes[0]
        n = shapes[1][0]
        return 2 * math.prod(lead) * n * k, math.prod(lead) * n
    if "scaled_dot_product" in name or name.startswith(("_flash_attention_", "_efficient_attention_")):
        is_backward = "backward" in name
        # The backward pass has the output's gradient before them.
        query, key, value = shapes[1:4] if is_backward else shapes[:3]
        batch, heads, queries, width = query
        keys = key[2]
        if not name.startswith(("_scaled", "scaled")):
            # (batch, sequence, heads, width) instead of (batch, heads, sequence, width)
            queries, heads, keys = heads, queries, key[1]
        # With a causal mask it is half of this, but shapes do not say so.
        forward_flops = 2 * batch * heads * queries * keys * (width + value[3])
        if is_backward:
            # Five products instead of two; the outputs are the gradients of query, key and value.
            return forward_flops * 5 // 2, sum(map(math.prod, (query, key, value)))
        return forward_flops, batch * heads * queries * value[3]
    raise KeyError(name)


def roofline(work: OperatorWork, seconds: float, gpu_name: str, ceilings: Ceilings | None = None) -> Roofline:
    """Compare a call with the longer of its FLOPs' and bytes' times, at measured ``ceilings`` or a datasheet's."""
    if ceilings is not None:
        source = f"ceilings measured on {ceilings.gpu} by `cs336sys doctor --ceilings`"
        tflops = ceilings.tflops.get(work.precision) if work.precision else None
        bytes_per_s: float | None = 1e9 * ceilings.copy_gbps
    else:
        source = f"peaks of the datasheet of {gpu_name}, which no program reaches"
        tflops = peak_tflops(gpu_name, work.precision) if work.precision else None
        sheet = datasheet(gpu_name)
        bytes_per_s = None if sheet is None else sheet.memory_bytes_per_s
    if bytes_per_s is None or (tflops is None and work.flops):
        return Roofline(percent=None, bound=None, source=f"the peaks of {gpu_name or 'this GPU'} are not known")
    # Without a peak there are no FLOPs either, as was checked: 0 over any number is 0.
    computing_s, moving_s = work.flops / (tflops or 1.0) / 1e12, work.bytes / bytes_per_s
    bound = "FLOPs" if computing_s >= moving_s else "bytes"
    return Roofline(100 * max(computing_s, moving_s) / seconds, bound, source)
