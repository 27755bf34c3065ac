"""Every implementation of attention that ``flash`` and ``attn`` know, as a function of query, key and value."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336sys.errors import CapabilityError
from cs336sys.experiments.attention.inputs import Attention
from cs336sys.experiments.models import model_attention
from cs336sys.kernels.attention import flash_attention, wait_until_compiled
from cs336sys.kernels.attention.reference import plain_attention
from cs336sys.workload import FLASH_ATTENTION_4, AttentionWorkload

# Attention of packages that a user may have installed next to torch: FlashAttention 4 in the CuTe DSL.


FA4_MODULE = "flash_attn.cute.interface"
_DTYPES = ("bf16", "fp16")


def flash_attention_4(workload: AttentionWorkload, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``flash_attn_func`` of the package ``flash-attn-4``, on (batch, heads, context, head_dim).

    It takes (batch, context, heads, head_dim) of any strides but the last, so it is given views, and nothing is copied.

    Raises:
        CapabilityError: the package is not installed or does not load, or the device or dtype is not one of its.
    """
    name = workload.implementation
    if device.type != "cuda":
        raise CapabilityError(f"implementation '{name}' needs a CUDA GPU")
    if workload.dtype not in _DTYPES:
        raise CapabilityError(f"implementation '{name}' takes {' and '.join(_DTYPES)}, got {workload.dtype}")
    try:
        function = importlib.import_module(FA4_MODULE).flash_attn_func
    except ModuleNotFoundError as error:
        raise CapabilityError(
            f"implementation '{name}' needs the package flash-attn-4, which is not there: "
            f"no module named {error.name!r}"
        ) from error
    except Exception as error:  # its imports load compilers and drivers, which fail in their own ways
        raise CapabilityError(f"implementation '{name}': the package flash-attn-4 does not load: {error}") from error
    options: dict[str, Any] = {"causal": workload.causal, "deterministic": name == "fa4-deterministic"}
    if workload.window is not None:
        # How many keys to the left and to the right of the query's own.
        options |= {"causal": False, "window_size": (workload.window - 1, 0)}
    return functools.partial(_transposed, functools.partial(function, **options))


def _transposed(function: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result = function(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
    out = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


_SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@contextlib.contextmanager
def implementation(workload: AttentionWorkload, device: torch.device):
    """The workload's implementation as a function of query, key and value.

    What an implementation needs once (a backend choice, a compiled function, a block mask) is done on entry, so that it
    is not timed with every call. A compiled backward pass may be repeated on one graph: it keeps its saved tensors
    instead of writing its results into them.

    Raises:
        CapabilityError: this machine does not have it, or it has no window; some say so only when they are called.
    """
    name = workload.implementation
    if name in _SDPA_BACKENDS:
        if workload.window is not None:
            raise CapabilityError(f"implementation '{name}' has no sliding window: choose flex or fa4")
        with sdpa_kernel(_SDPA_BACKENDS[name]):
            grouped = workload.key_heads != workload.heads
            yield functools.partial(F.scaled_dot_product_attention, is_causal=workload.causal, enable_gqa=grouped)
    elif name in ("compiled", "flex"):
        with torch._functorch.config.patch(donated_buffer=False):
            yield _flex(workload, device) if name == "flex" else _compiled(workload)
    elif name == "model":
        yield functools.partial(model_attention, is_causal=workload.causal)
    elif name == "eager":
        yield functools.partial(plain_attention, **_mask(workload))
    elif name in FLASH_ATTENTION_4:
        yield flash_attention_4(workload, device)
    else:
        wait_until_compiled()
        chosen = {"deterministic": True} if name == "deterministic" else {"implementation": name}
        yield functools.partial(flash_attention, **_mask(workload), **chosen)


def _mask(workload: AttentionWorkload) -> dict[str, Any]:
    return {"is_causal": workload.causal} | ({} if workload.window is None else {"window": workload.window})


def _compiled(workload: AttentionWorkload) -> Attention:
    return functools.partial(torch.compile(plain_attention, dynamic=False), **_mask(workload))


def _flex(workload: AttentionWorkload, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device.type != "cuda":
        raise CapabilityError("implementation 'flex' needs a CUDA GPU: its backward pass does not run on a CPU")
    mask, context = None, workload.context
    if workload.causal:
        window = context if workload.window is None else workload.window

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (query - key < window)

        # Without a window what torch's own examples compile, as one comparison.
        rule = _sees if workload.window is None else sees
        mask = create_block_mask(rule, None, None, context, context, device=device.type, _compile=True)
    grouped = workload.key_heads != workload.heads
    return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, enable_gqa=grouped)


def _sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
