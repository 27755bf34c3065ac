"""Exact attention that never stores the S_q x S_k scores: one function in front of several implementations."""

import importlib.util

import torch

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.kernels.attention.reference import reference_attention
from cs336sys.kernels.attention.tiled import FlashAttentionTorch

__all__ = ["IMPLEMENTATIONS", "FlashAttentionTorch", "FlashAttentionTriton", "flash_attention"]

# Each says itself, by a CapabilityError, what it lacks on this machine.
IMPLEMENTATIONS = ("triton", "hopper", "tiled", "reference")

if importlib.util.find_spec("triton") is not None:
    from cs336sys.kernels.attention.operators import FlashAttentionTriton, triton_attention
else:

    def triton_attention(*arguments: object) -> torch.Tensor:  # type: ignore[misc]  # whatever it is given, it refuses
        raise CapabilityError("implementations 'triton' and 'hopper' need the package triton, which is not installed")


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    *,
    implementation: str = "auto",
    float32_precision: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Softmax attention O = softmax(Q K^T / sqrt(D)) V in memory linear in the sequence, forward and backward.

    FlashAttention-2 (Dao, 2023; handout, section on FlashAttention-2). Differentiable once in query, key and value,
    except for "reference", which is differentiable any number of times. Under ``torch.autocast`` the inputs are cast to
    its dtype first, as for ``scaled_dot_product_attention``. ``torch.compile`` keeps it in one graph.

    Args:
        query: (..., S_q, D), float32, float16 or bfloat16, D <= 256, any strides. The result has the same layout where
            it is dense, so a (B, S, H, D) tensor seen as (B, H, S, D) gives one again.
        key: (..., S_k, D) with the leading dimensions, dtype and device of ``query``.
        value: (..., S_k, D).
        is_causal: query i sees the keys j <= i, counted from the first of each as in
            ``torch.nn.functional.scaled_dot_product_attention``: with S_q > S_k the queries from S_k on see all keys,
            with S_q < S_k no query sees the keys from S_q on.
        implementation: "triton" (CUDA, or a CPU in Triton's interpreter), "hopper" (warp-specialised for H100 and H200:
            float16 and bfloat16, D 16, 32, 64, 128 and 256, the backward of 256 being that of "triton"), "tiled"
            (FlashAttention-2 in PyTorch), "reference" (plain attention, memory S_q x S_k) or "auto": "tiled" except for
            CUDA tensors, for them in either pass "hopper" where it can run and was measured to be faster, else
            "triton".
        float32_precision: matrix products of float32 inputs in "triton": "tf32x3" (the default; three TF32 products,
            about float32), "ieee" (no tensor cores) or "tf32" (10 bits of mantissa).
        deterministic: gradients equal from run to run to the last bit, as also under
            ``torch.use_deterministic_algorithms``; costs speed in "triton", the others always are.

    Returns:
        (..., S_q, D) in the inputs' dtype.

    Raises:
        ValueError: shapes or devices do not fit together, D > 256, no keys; as :class:`UsageError` an implementation or
            precision that does not exist.
        TypeError: dtypes differ or are not supported.
        CapabilityError: the implementation does not run on this machine; the message says why.
        RuntimeError: it is differentiated twice, or transformed by ``torch.func``.
    """
    if implementation != "auto" and implementation not in IMPLEMENTATIONS:
        names = ", ".join(("auto", *IMPLEMENTATIONS))
        raise UsageError(f"attention implementation {implementation!r} does not exist: choose one of {names}")
    device_type = "cuda" if query.is_cuda else query.device.type  # the latter takes 0.2 us
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = (_autocast(tensor, dtype) for tensor in (query, key, value))
    if implementation == "auto" and not query.is_cuda:
        implementation = "tiled"
    if float32_precision is not None and implementation not in ("auto", "triton"):
        raise UsageError(
            f"float32_precision {float32_precision!r} cannot be had from implementation {implementation!r}: only "
            "'triton' takes it, PyTorch's own matrix products follow torch.set_float32_matmul_precision"
        )
    if implementation == "tiled":
        return FlashAttentionTorch.apply(query, key, value, is_causal)
    if implementation == "reference":
        return reference_attention(query, key, value, is_causal)[0]
    return triton_attention(query, key, value, is_causal, float32_precision, deterministic, implementation)


def _autocast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Autocast lowers every floating dtype but float64.
    is_castable = tensor.dtype != dtype and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_castable else tensor
