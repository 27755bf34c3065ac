"""Attention of packages that a user may have installed beside torch: FlashAttention 4 in the CuTe DSL."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cs336sys.errors import CapabilityError
from cs336sys.workload import AttentionWorkload

FLASH_ATTENTION_4 = "flash_attn.cute.interface"
_DTYPES = ("bf16", "fp16")


def flash_attention_4(workload: AttentionWorkload, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``flash_attn_func`` of the package ``flash-attn-4``, on (batch, heads, context, head_dim).

    It takes (batch, context, heads, head_dim) of any strides but the last, so it is given views, and nothing is copied.

    Raises:
        CapabilityError: the package is not installed or does not load, or the device or dtype is not one of its.
    """
    if device.type != "cuda":
        raise CapabilityError("implementation 'fa4' needs a CUDA GPU")
    if workload.dtype not in _DTYPES:
        raise CapabilityError(f"implementation 'fa4' takes {' and '.join(_DTYPES)}, got {workload.dtype}")
    try:
        function = importlib.import_module(FLASH_ATTENTION_4).flash_attn_func
    except ModuleNotFoundError as error:
        raise CapabilityError(
            f"implementation 'fa4' needs the package flash-attn-4, which is not there: no module named {error.name!r}"
        ) from error
    except Exception as error:  # its imports load compilers and drivers, which fail in their own ways
        raise CapabilityError(f"implementation 'fa4': the package flash-attn-4 does not load: {error}") from error
    options: dict[str, Any] = {"causal": workload.causal}
    if workload.window is not None:
        # How many keys to the left and to the right of the query's own.
        options = {"causal": False, "window_size": (workload.window - 1, 0)}
    return functools.partial(_transposed, functools.partial(function, **options))


def _transposed(function: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result = function(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
    out = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)
