"""FlashAttention-2 by Triton kernels: the autograd function, and custom operators for compilers and dispatch modes.

Which kernels compute it is decided in :mod:`cs336sys.kernels.attention.choice`, once for tensors of a signature.
"""

import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cs336sys.accounting.flops import attention_flops
from cs336sys.kernels.attention import native_call
from cs336sys.kernels.attention.choice import INTERPRETED, KERNELS, backward_plan, check, forward_plan
from cs336sys.kernels.attention.plan import Plan
from cs336sys.kernels.attention.problem import (
    FLOAT32_PRECISIONS,
    AttentionOptions,
    Operand,
    Options,
    check_attention_inputs,
    check_mask,
    check_scale,
)
from cs336sys.kernels.autograd import once_differentiable
from cs336sys.kernels.operators import define_gradient, define_operator, needs_operators

MAX_PLANS = 1024
_plans: dict[tuple, Plan] = {}

# The combinations of the first four options, which the C++ knows by their places here; see _option_number.
OPTIONS = tuple(itertools.product((False, True), FLOAT32_PRECISIONS, (False, True), KERNELS))
UNKNOWN_OPTIONS = -1
_option_numbers = {options: number for number, options in enumerate(OPTIONS)}
_native: ModuleType | None = None  # native_call's compiled module, loaded for the first plan that it can be given.


def _option_number(options: Options) -> int:
    """Return the number by which the C++ knows options, the index of the first four in :data:`OPTIONS`.

    A window of n keys adds n times ``len(OPTIONS)``. Options that only Python computes, or that it refuses, have
    :data:`UNKNOWN_OPTIONS`.
    """
    number, (window, scale, aligned_at_end) = _option_numbers.get(options[:4], UNKNOWN_OPTIONS), options[4:]
    if number == UNKNOWN_OPTIONS or scale is not None or aligned_at_end:
        return UNKNOWN_OPTIONS
    if window is None:
        return number
    return number + window * len(OPTIONS) if isinstance(window, int) and window > 0 else UNKNOWN_OPTIONS


def _kernel_view(tensor: Tensor, kernels: str) -> Tensor:
    """Return the tensor with at most four dimensions, the last contiguous, and 16-byte aligned: copied only if needed.

    For "hopper" its strides must also suit TMA; "auto" leaves tensors whose strides do not to plain Triton.
    """
    if tensor.dim() > 4:
        tensor = tensor.reshape(-1, *tensor.shape[-3:])
    fits = kernels != "hopper" or Operand(tensor).fits_tma
    if tensor.stride(-1) != 1 or tensor.data_ptr() % 16 or not fits:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _kernel_statistic(tensor: Tensor) -> Tensor:
    """Return one number for each query (a logsumexp or D) as kernels read it: contiguous, 16-byte aligned."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _empty_result(tensor: Tensor) -> Tensor:
    """Allocate a tensor like this one, with its strides where the kernels can write them."""
    if tensor.dim() <= 4 and tensor.stride(-1) == 1:
        result = torch.empty_like(tensor)
        if result.stride(-1) == 1:  # Of a tensor that overlaps itself it may be another dimension's.
            return result
    return tensor.new_empty(tensor.shape)


def _remember(
    signature: tuple, plan: Plan, tensors: Sequence, kernel_tensors: Sequence, results: Sequence[Tensor]
) -> None:
    """Keep a signature's plan, a direct one if kernels take its ``tensors`` (inputs and results) and no copies."""
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[signature] = plan
    plan.is_direct = tensors[0].is_cuda and all(
        tensor is kernel_tensor for tensor, kernel_tensor in zip(tensors, kernel_tensors, strict=True)
    )
    plan.result_layouts = [(tuple(result.shape), result.stride(), result.dtype) for result in results]


def forget_plans() -> None:
    """Forget how to compute each signature, so that it is chosen anew: for callers that change what decides it."""
    _plans.clear()
    if _native is not None:
        _native.forget_plans()


def _give_plan_to_native(add: str, plan: Plan, tensors: Sequence[Tensor], options: Options) -> None:
    """Give a direct plan that has run to the C++, once that is compiled, by its function ``add``."""
    global _native
    if _native is None:
        _native = native_call.library.load(_compute_forward, _compute_backward, _backward_of_node, OPTIONS)
    number = _option_number(options)
    if _native is None or number == UNKNOWN_OPTIONS or number in plan.native_options:
        return
    plan.native_options.add(number)
    native_plan = native_call.translate(_native, plan)
    if native_plan is not None:
        getattr(_native, add)(tensors, number, native_plan)


def _backward_of_node(*arguments: Any) -> Sequence[Tensor]:
    """Compute the backward pass of a node of autograd's graph: by the operator where something must see the kernels."""
    _query, _key, _value, _out, _logsumexp, grad_out, *_options = arguments
    return (_backward_operator if needs_operators(grad_out) else _compute_backward)(*arguments)


def _empty_results(plan: Plan) -> list[Tensor]:
    """Allocate a direct plan's results on the current GPU."""
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device="cuda") for shape, strides, dtype in plan.result_layouts
    ]


def _forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (..., S_q, D) in the inputs' dtype and the natural logsumexp (..., S_q) in float32.

    Take the fastest way for this signature: the compiled C++, None where it has no plan for these tensors; else a plan
    kept from an earlier call, if it takes the inputs without copies; else a plan that is chosen, run and kept now.
    """
    if _native is not None:
        results = _native.forward([query, key, value], _option_number(options))
        if results is not None:
            return results
    # Kernels need 16-byte alignment. The index of a device is hashed faster, but is -1 for all that have none.
    signature = (
        query.shape, query.stride(), query.dtype, query.device, query.data_ptr() % 16,
        key.shape, key.stride(), key.dtype, key.get_device(), key.data_ptr() % 16,
        value.shape, value.stride(), value.dtype, value.get_device(), value.data_ptr() % 16,
        options,
    )  # fmt: skip
    plan = _plans.get(signature)
    # Results of a direct plan are allocated on the current GPU.
    if plan is not None and plan.is_direct and query.get_device() == torch._C._cuda_getDevice():
        out, logsumexp = _empty_results(plan)
        plan(query, key, value, out, logsumexp)
        _give_plan_to_native("add_forward", plan, [query, key, value], options)
        return out, logsumexp
    check(query, key, value, options)
    if INTERPRETED and query.dtype == torch.bfloat16:
        # The interpreter's arithmetic in bfloat16 is wrong.
        out, logsumexp = _forward(query.float(), key.float(), value.float(), options)
        return out.to(torch.bfloat16), logsumexp
    out = _empty_result(query)
    logsumexp = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    if out.numel() == 0 or key.numel() == 0:
        return out.zero_(), logsumexp.fill_(-math.inf)
    chosen = AttentionOptions(*options)
    kernel_out = out if out.dim() <= 4 else out.view(-1, *out.shape[-3:])  # The kernels take four dimensions at most.
    tensors = *(_kernel_view(tensor, chosen.kernels) for tensor in (query, key, value)), kernel_out
    if plan is None:
        if query.is_cuda:
            native_call.library.start()  # Compiles the C++ in another process, for later calls.
        plan = forward_plan(tensors, chosen)
        _remember(signature, plan, (query, key, value, out), tensors, (out, logsumexp))
    with torch.cuda.device_of(query):
        plan(*tensors, logsumexp)
        if plan.is_direct:
            _give_plan_to_native("add_forward", plan, [query, key, value], options)
    return out, logsumexp


def _backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor, options: Options
) -> Sequence[Tensor]:
    """Return the gradients of query, key and value, in their dtype and, where possible, their strides.

    ``out`` may be D = rowsum(dO * O) instead, contiguous in float32, which has one dimension less.
    """
    saved = [query, key, value, out, logsumexp, grad_out]
    if _native is not None:
        grads = _native.backward(saved, _option_number(options))
        if grads is not None:
            return grads
    chosen = AttentionOptions(*options)
    if torch.are_deterministic_algorithms_enabled():
        chosen = chosen._replace(deterministic=True)
    # Strides may be others than in forward: what keeps tensors for backward may give copies back.
    signature = (
        query.shape, key.shape, query.dtype, query.device, chosen,
        query.stride(), query.data_ptr() % 16, key.stride(), key.data_ptr() % 16, value.stride(), value.data_ptr() % 16,
        out.stride(), out.data_ptr() % 16, grad_out.stride(), grad_out.data_ptr() % 16,
    )  # fmt: skip
    plan = _plans.get(signature)
    if plan is not None and plan.is_direct and query.get_device() == torch._C._cuda_getDevice():
        grads = _empty_results(plan)  # On the current GPU.
        plan(query, key, value, out, _kernel_statistic(logsumexp), grad_out, *grads)
        # The C++ gives plans the tensors as they are.
        if logsumexp.is_contiguous():
            _give_plan_to_native("add_backward", plan, saved, options)
        return grads
    if plan is None:
        check(query, key, value, options)  # Forward has not checked them for flash_attention_backward().
    if INTERPRETED and query.dtype == torch.bfloat16:  # Its arithmetic in bfloat16 is wrong.
        query, key, value, out, logsumexp, grad_out = (tensor.float() for tensor in saved)
        grads = _backward(query, key, value, out, logsumexp, grad_out, options)
        return [grad.to(torch.bfloat16) for grad in grads]
    grads = [_empty_result(tensor) for tensor in (query, key, value)]
    if query.numel() == 0 or key.numel() == 0:
        return [grad.zero_() for grad in grads]
    kernel_query, kernel_key, kernel_value, kernel_out, kernel_grad_out = (
        _kernel_view(tensor, chosen.kernels) for tensor in (query, key, value, out, grad_out)
    )
    if out.dim() < query.dim():  # D, a number for each query.
        kernel_out = _kernel_statistic(out)
    kernel_grads = grads if query.dim() <= 4 else [grad.view(-1, *grad.shape[-3:]) for grad in grads]
    if plan is None:
        kernel_tensors = kernel_query, kernel_key, kernel_value, kernel_out, kernel_grad_out
        plan = backward_plan(kernel_tensors, kernel_grads, chosen)
        _remember(signature, plan, (query, key, value, out, grad_out, *grads), (*kernel_tensors, *kernel_grads), grads)
    with torch.cuda.device_of(query):
        statistic = _kernel_statistic(logsumexp)
        plan(kernel_query, kernel_key, kernel_value, kernel_out, statistic, kernel_grad_out, *kernel_grads)
        if plan.is_direct and logsumexp.is_contiguous():
            _give_plan_to_native("add_backward", plan, saved, options)
    return grads


_OPTIONS_SCHEMA = (
    "bool is_causal, str float32_precision, bool deterministic, str kernels, int? window=None, float? scale=None, "
    "bool aligned_at_end=False"
)


def _compute_forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, ...]:
    # Operators leave out options that have their defaults.
    return tuple(_forward(query, key, value, (*AttentionOptions(*options),)))


def _compute_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    return tuple(_backward(query, key, value, out, logsumexp, grad_out, (*AttentionOptions(*options),)))


def _fake_forward(query, key, value, *arguments):
    options = AttentionOptions(*arguments)
    check_attention_inputs(query, key, value)
    check_mask(options.window, options.is_causal, options.aligned_at_end)
    check_scale(options.scale)
    return _empty_result(query), torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)


_forward_operator = define_operator(
    f"flash_attention_forward(Tensor query, Tensor key, Tensor value, {_OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    _compute_forward,
    fake=_fake_forward,
)
_backward_operator = define_operator(
    "flash_attention_backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor grad_out, "
    f"{_OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _compute_backward,
    fake=lambda query, key, value, *others: (_empty_result(query), _empty_result(key), _empty_result(value)),
)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output)


def _differentiate(ctx: Any, grad_out: Tensor, grad_logsumexp: Tensor) -> tuple:
    # grad_logsumexp is not read: triton_attention() detaches the logsumexp, so that no gradient flows through it.
    return *_backward_operator(*ctx.saved_tensors, grad_out, *ctx.options), *(None,) * len(ctx.options)


define_gradient("flash_attention_forward", _differentiate, _save_for_backward)


@register_flop_formula(torch.ops.cs336sys.flash_attention_forward)
def forward_flops(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, *arguments: Any, **kwargs: Any
) -> int:
    """Count FLOPs of attention forward by :func:`cs336sys.accounting.flops.attention_flops`."""
    options = AttentionOptions(*arguments)
    shape = math.prod(query_shape[:-2]), 1, query_shape[-2], key_shape[-2], query_shape[-1]
    return attention_flops(
        *shape, causal=options.is_causal, backward=False, window=options.window, aligned_at_end=options.aligned_at_end
    )


@register_flop_formula(torch.ops.cs336sys.flash_attention_backward)
def backward_flops(*arguments: Any, **kwargs: Any) -> int:
    """Count FLOPs of attention backward, 2.5 times the forward: five matrix products compared with two."""
    query_shape, key_shape, value_shape, _out_shape, _logsumexp_shape, _grad_out_shape, *options = arguments
    return forward_flops(query_shape, key_shape, value_shape, *options) * 5 // 2


class FlashAttentionTriton(torch.autograd.Function):
    """``FlashAttentionTriton.apply(query, key, value, is_causal=False)``: FlashAttention-2 by Triton kernels.

    Keeps the inputs, the output and the logsumexp (..., S_q) in float32 for backward. Differentiable once. Autocast
    does not change it; :func:`cs336sys.kernels.attention.flash_attention` casts first.

    Arguments, results and errors are those of :func:`cs336sys.kernels.attention.flash_attention`, where ``kernels`` is
    ``implementation``, one of :data:`KERNELS`, and ``aligned_at_end`` ``causal_alignment="end"``. Sums are in float32
    for every dtype. A query that sees no key, or whose scores are all -inf, gives zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        float32_precision: str = "tf32x3",
        deterministic: bool = False,
        kernels: str = "triton",
        window: int | None = None,
        scale: float | None = None,
        aligned_at_end: bool = False,
        return_logsumexp: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.options = is_causal, float32_precision, deterministic, kernels, window, scale, aligned_at_end
        if needs_operators(query):
            out, logsumexp = _forward_operator(query, key, value, *ctx.options)
        else:
            out, logsumexp = _forward(query, key, value, ctx.options)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        if not return_logsumexp:
            return out
        ctx.mark_non_differentiable(logsumexp)
        return out, logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grads = _backward_of_node(*ctx.saved_tensors, grad_out, *ctx.options)
        return *grads, *(None,) * (len(ctx.options) + 1)  # For the options and return_logsumexp.


def triton_attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options, return_logsumexp: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute :class:`FlashAttentionTriton`, as one node of the graph under ``torch.compile``."""
    if torch.compiler.is_compiling():
        out, logsumexp = _forward_operator(query, key, value, *options)
        return (out, logsumexp.detach()) if return_logsumexp else out
    # The C++ has no autograd node that also returns a logsumexp: FlashAttentionTriton, whose launches it makes, has.
    if _native is not None and not return_logsumexp:
        out = _native.attend(query, key, value, _option_number(options))
        if out is not None:
            return out
    return FlashAttentionTriton.apply(query, key, value, *options, return_logsumexp)


def triton_attention_backward(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, logsumexp: Tensor, delta: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`cs336sys.kernels.attention.flash_attention_backward`, which has checked its tensors."""
    backward: Any = _backward_operator if needs_operators(query) else _compute_backward
    # Both take D = rowsum(dO * O) in the place of the output, see _backward().
    return backward(query, key, value, delta, logsumexp, grad_out, *options)
