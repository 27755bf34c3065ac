"""Exact attention that never stores the S_q x S_k scores: one function in front of several implementations."""

from typing import Literal, overload

import torch
from torch import Tensor

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.kernels.attention.problem import (
    FLOAT32_PRECISIONS,
    check_attention_inputs,
    check_mask,
    check_row_statistics,
    check_scale,
    is_aligned_at_end,
)
from cs336sys.kernels.attention.reference import FlashAttentionTorch, reference_attention, score_rule, tiled_backward
from cs336sys.kernels.autograd import refuse_transforms
from cs336sys.machine.late_imports import why_no_triton

__all__ = [
    "IMPLEMENTATIONS",
    "FlashAttentionTorch",
    "FlashAttentionTriton",
    "flash_attention",
    "flash_attention_backward",
    "wait_until_compiled",
]

# Each says by a CapabilityError what it lacks on this machine.
IMPLEMENTATIONS = ("triton", "hopper", "tiled", "reference")

if why_no_triton() is None:
    from cs336sys.kernels.attention import native_call
    from cs336sys.kernels.attention.operators import FlashAttentionTriton, triton_attention, triton_attention_backward
else:
    native_call = None  # type: ignore[assignment]  # it translates what Triton compiled

    def triton_attention(*arguments: object) -> Tensor:  # type: ignore[misc]  # whatever it is given, it refuses
        raise CapabilityError(f"implementations 'triton' and 'hopper' need {why_no_triton()}")

    triton_attention_backward = triton_attention  # type: ignore[assignment]  # likewise


@overload
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = ..., *, window: int | None = ...,
    scale: float | None = ..., causal_alignment: str = ..., deterministic: bool = ...,
    return_logsumexp: Literal[False] = ..., implementation: str = ..., float32_precision: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = ..., *, window: int | None = ...,
    scale: float | None = ..., causal_alignment: str = ..., deterministic: bool = ...,
    return_logsumexp: Literal[True], implementation: str = ..., float32_precision: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    *,
    window: int | None = None,
    scale: float | None = None,
    causal_alignment: str = "start",
    deterministic: bool = False,
    return_logsumexp: bool = False,
    implementation: str = "auto",
    float32_precision: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax attention O = softmax(scale Q K^T) V in memory linear in the sequence, forward and backward.

    FlashAttention-2 (Dao, 2023; handout, section on FlashAttention-2). Differentiable once in query, key and value,
    except for "reference", which is differentiable any number of times. Under ``torch.autocast`` the inputs are cast to
    its dtype first, as for ``scaled_dot_product_attention``. ``torch.compile`` keeps it in one graph.

    Args:
        query: (..., H, S_q, D), float32, float16 or bfloat16, D <= 256, any strides; (S_q, D) and (batch, S_q, D) have
            no heads. The result has the same layout where it is dense, so a (B, S, H, D) tensor seen as (B, H, S, D)
            gives one again.
        key: (..., H_kv, S_k, D) with the dtype and device of ``query``, and with its leading dimensions but for the
            number of heads: H_kv divides H (grouped-query attention, Ainslie et al., 2023). Query head h reads key head
            h // (H / H_kv), without a copy, and the gradients of key and value are sums over its group.
        value: (..., H_kv, S_k, D). Without keys (S_k = 0) the output is 0, as in torch.
        is_causal: query i sees the keys j <= i, counted from the first of each as in
            ``torch.nn.functional.scaled_dot_product_attention``: with S_q > S_k the queries from S_k on see all keys,
            with S_q < S_k no query sees the keys from S_q on.
        window: with is_causal, query i sees the keys i - window < j <= i (sliding window attention); work grows with
            S_q * window. With S_q >= S_k + window the last queries see no key: their output is 0.
        scale: what the scores Q K^T are multiplied by, any finite number; None is 1 / sqrt(D).
        causal_alignment: of is_causal and window: "start", as above, or "end", where the last query and the last key
            are at the same position, as in FlashAttention and ``torch.nn.attention.bias.causal_lower_right``: query i
            is at position i + S_k - S_q (chunked prefill). With S_q > S_k the first queries see no key. "hopper" has
            "end" for S_q <= S_k; where S_q < S_k, its gradients in a window are those of "triton".
        deterministic: gradients equal from run to run to the last bit, as also under
            ``torch.use_deterministic_algorithms``; costs speed in "triton" and "hopper", the others always are.
        return_logsumexp: return the logsumexp of each query's scores as well.
        implementation: "triton" (CUDA, or a CPU in Triton's interpreter), "hopper" (warp-specialised for H100 and H200:
            float16 and bfloat16, D 16, 32, 64, 128 and 256), "tiled" (FlashAttention-2 in PyTorch), "reference" (plain
            attention, memory S_q x S_k) or "auto": "tiled" except for CUDA tensors, for them in either pass "hopper"
            where it can run and was measured to be faster, else "triton".
        float32_precision: matrix products of float32 inputs in "triton": "tf32x3" (the default; three TF32 products,
            about float32), "ieee" (no tensor cores) or "tf32" (10 bits of mantissa).

    Returns:
        (..., H, S_q, D) in the inputs' dtype. With ``return_logsumexp`` also log sum_j exp(S_ij) of the scores S that a
        query sees, natural, (..., H, S_q), float32 (float64 of float64 inputs), not differentiable; -inf for a query
        that sees no key.

    Raises:
        ValueError: shapes or devices do not fit together, D > 256; as :class:`UsageError` an implementation,
            precision, window, scale or alignment that does not exist.
        TypeError: dtypes differ or are not supported, the window is no whole number.
        CapabilityError: the implementation does not run on this machine or cannot do this; the message says why.
        RuntimeError: it is differentiated twice or in forward mode, or transformed by ``torch.func``.
    """
    query, key, value = _autocast(query, key, value)
    implementation = _resolved_implementation(implementation, query, float32_precision)
    if implementation == "reference":
        # In float32, because the logsumexp of half precision scores has their few digits.
        dtype = torch.promote_types(query.dtype, torch.float32) if return_logsumexp else None
        out, logsumexp = reference_attention(
            query, key, value, is_causal, window=window, scale=scale, causal_alignment=causal_alignment,
            compute_dtype=dtype,
        )  # fmt: skip
        return (out.to(query.dtype), logsumexp.detach()) if return_logsumexp else out
    refuse_transforms("flash_attention", "take implementation 'reference' there", query, key, value)
    if implementation == "tiled":
        return FlashAttentionTorch.apply(
            query, key, value, is_causal, window, return_logsumexp, scale, causal_alignment
        )
    precision = float32_precision or FLOAT32_PRECISIONS[0]  # The first is the default.
    check_scale(scale)
    if scale is not None and scale <= 0:
        # The kernels take the maximum of the scores before they scale them: by a positive scale, so that it stays the
        # maximum. The query takes the sign, or the zero.
        query, scale = query * (-1 if scale else 0), -scale or 1.0
    aligned_at_end = causal_alignment != "start" and is_aligned_at_end(causal_alignment, is_causal, query, key)
    options = is_causal, precision, deterministic, implementation, window, scale, aligned_at_end
    return triton_attention(query, key, value, options, return_logsumexp)


def flash_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    logsumexp: Tensor,
    delta: Tensor,
    is_causal: bool = False,
    *,
    window: int | None = None,
    scale: float | None = None,
    causal_alignment: str = "start",
    deterministic: bool = False,
    implementation: str = "auto",
    float32_precision: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one block of keys, where the softmax goes over more keys than these.

    Where the keys of a sequence are split into blocks (ring attention, Liu et al., 2023: a block on each GPU of a
    context parallel group), P = exp(S - L) of a block needs the logsumexp L over all keys, and dS = P (dP - delta)
    the D of the whole output. With both given, blocks are independent:

        out_b, logsumexp_b = flash_attention(query, key_b, value_b, return_logsumexp=True)    # of each block b
        logsumexp = torch.logsumexp(torch.stack(all logsumexp_b), 0)
        out = sum_b exp(logsumexp_b - logsumexp) out_b
        delta = (grad_out.float() * out.float()).sum(-1)
        dq_b, dk_b, dv_b = flash_attention_backward(query, key_b, value_b, grad_out, logsumexp, delta)

    dq is the sum of all dq_b, dk and dv are dk_b and dv_b side by side. Not differentiable; nothing is recorded.

    Args:
        query: (..., H, S_q, D), as in :func:`flash_attention`.
        key: (..., H_kv, S_k, D), the block.
        value: (..., H_kv, S_k, D).
        grad_out: (..., H, S_q, D), the gradient of the whole output, of the inputs' dtype.
        logsumexp: (..., H, S_q), natural, over the keys of all blocks; -inf for a query that sees none.
        delta: (..., H, S_q), D = rowsum(dO * O) of the whole output (FlashAttention-2, algorithm 2).
        is_causal, window, scale, causal_alignment, deterministic, implementation, float32_precision: as in
            :func:`flash_attention`, positions counted in the queries and keys given here; "triton" and "hopper" take a
            scale greater than 0. In ring attention a block before the queries' own is seen in full, the own one
            causally, and later ones not at all.

    Returns:
        dq (..., H, S_q, D), dk and dv (..., H_kv, S_k, D) in the inputs' dtype.

    Raises:
        ValueError, TypeError, CapabilityError: as in :func:`flash_attention`; also if ``grad_out``, ``logsumexp`` or
            ``delta`` do not fit the query.
    """
    implementation = _resolved_implementation(implementation, query, float32_precision)
    check_attention_inputs(query, key, value, for_kernel=implementation in ("auto", "triton", "hopper"))
    check_mask(window, is_causal)
    check_row_statistics(query, grad_out, logsumexp, delta)
    dtype = torch.promote_types(query.dtype, torch.float32)
    logsumexp, delta = logsumexp.to(dtype), delta.to(dtype)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        if implementation in ("tiled", "reference"):
            # "reference" is a single tile.
            tile = (max(1, query.shape[-2]), max(1, key.shape[-2])) if implementation == "reference" else None
            rule = score_rule(query, key, value, is_causal, window, scale, causal_alignment)
            grads = tiled_backward(query, key, value, logsumexp, grad_out, delta, rule, tile)
        else:
            precision = float32_precision or FLOAT32_PRECISIONS[0]  # The first is the default.
            aligned_at_end = is_aligned_at_end(causal_alignment, is_causal, query, key)
            options = is_causal, precision, deterministic, implementation, window, scale, aligned_at_end
            grads = triton_attention_backward(query, key, value, grad_out, logsumexp, delta, options)
    grad_query, grad_key, grad_value = grads
    return grad_query, grad_key, grad_value


def wait_until_compiled() -> None:
    """Wait until the C++ behind calls is compiled, for whoever times them; return at once without a CUDA GPU."""
    if native_call is not None and torch.cuda.is_available():
        native_call.library.wait()


def _resolved_implementation(implementation: str, query: Tensor, float32_precision: str | None) -> str:
    """Return the implementation to call: "auto" stays "auto" for CUDA tensors, and is "tiled" for all others."""
    if implementation != "auto" and implementation not in IMPLEMENTATIONS:
        names = ", ".join(("auto", *IMPLEMENTATIONS))
        raise UsageError(f"attention implementation {implementation!r} does not exist: choose one of {names}")
    if implementation == "auto" and not query.is_cuda:
        implementation = "tiled"
    if float32_precision is not None and implementation not in ("auto", "triton"):
        raise UsageError(
            f"float32_precision {float32_precision!r} cannot be had from implementation {implementation!r}: only "
            "'triton' takes it, PyTorch's own matrix products follow torch.set_float32_matmul_precision"
        )
    return implementation


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does where it is on: every floating dtype but float64."""
    first = tensors[0]
    device_type = "cuda" if first.is_cuda else first.device.type  # the latter takes 0.2 us
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )
