"""FlashAttention-2 by Triton kernels: the autograd function, and custom operators for compilers and dispatch modes."""

import math
from collections.abc import Callable, Sequence

import torch
import triton
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.kernels.attention import hopper
from cs336sys.kernels.attention.hopper_settings import hopper_backward_is_faster, hopper_forward_is_faster
from cs336sys.kernels.attention.launch_settings import Problem
from cs336sys.kernels.attention.triton_forward import forward_kernel
from cs336sys.kernels.attention.triton_plans import BackwardPlan, ForwardPlan, Operand, make_problem
from cs336sys.kernels.attention.validation import check_attention_inputs
from cs336sys.kernels.autograd import once_differentiable

FLOAT32_PRECISIONS = ("tf32x3", "ieee", "tf32")
# Plain Triton, the warp-specialised ones of hopper_forward and hopper_backward, or of both what was measured faster.
KERNELS = ("auto", "triton", "hopper")

INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)

MAX_PLANS = 1024
_plans: dict[tuple, ForwardPlan | BackwardPlan] = {}


def _remember(signature: tuple, plan: ForwardPlan | BackwardPlan) -> None:
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[signature] = plan


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, float32_precision: str, kernels: str) -> None:
    check_attention_inputs(query, key, value)
    if kernels not in KERNELS:
        raise UsageError(f"attention kernels {kernels!r} do not exist: choose one of {', '.join(KERNELS)}")
    if float32_precision not in FLOAT32_PRECISIONS:
        raise UsageError(
            f"float32_precision {float32_precision!r} does not exist: choose one of {', '.join(FLOAT32_PRECISIONS)}"
        )
    reason = hopper.why_unavailable(query) if kernels == "hopper" else _why_unavailable(query)
    if reason is not None:
        raise CapabilityError(reason)


def _why_unavailable(query: torch.Tensor) -> str | None:
    """One sentence why these kernels cannot run on the device and dtype of ``query``, or None if they can."""
    if not query.is_cuda:
        if INTERPRETED and query.device.type == "cpu":
            return None
        return (
            f"the Triton attention kernels run on CUDA tensors, got {query.device}: set TRITON_INTERPRET=1 before the "
            "first import to run them on the CPU in Triton's interpreter"
        )
    if query.dtype == torch.bfloat16:
        capability = torch.cuda.get_device_capability(query.device)
        if capability < (8, 0):
            name, (major, minor) = torch.cuda.get_device_name(query.device), capability
            return f"bfloat16 needs a GPU of compute capability 8.0 or later, {name} has {major}.{minor}"
    return None


def _kernel_view(tensor: torch.Tensor, kernels: str = "triton") -> torch.Tensor:
    """The tensor with at most four dimensions, elements side by side, 16-byte aligned: a copy only where needed.

    With "hopper" also with strides that TMA can take; "auto" gives what has others to plain Triton.
    """
    if tensor.dim() > 4:
        tensor = tensor.reshape(-1, *tensor.shape[-3:])
    fits = kernels != "hopper" or Operand(tensor).fits_tma
    if tensor.stride(-1) != 1 or tensor.data_ptr() % 16 or not fits:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _takes_hopper(
    kernels: str, tensors: Sequence[torch.Tensor], is_causal: bool, is_faster: Callable[[Problem], bool]
) -> bool:
    """Whether the Hopper kernels are to run; ``tensors``: query, key and whatever else they would read or write."""
    if kernels != "auto":
        return kernels == "hopper"
    query, key = tensors[:2]
    if hopper.why_unavailable(query) is not None:
        return False
    operands = [Operand(tensor) for tensor in tensors]
    return is_faster(make_problem(query, key, operands, is_causal, FLOAT32_PRECISIONS[0]))


def _forward_plan(tensors: Sequence[torch.Tensor], is_causal: bool, float32_precision: str, kernels: str):
    if _takes_hopper(kernels, tensors, is_causal, hopper_forward_is_faster):
        from cs336sys.kernels.attention.hopper_plans import HopperForwardPlan

        return HopperForwardPlan(*tensors, is_causal)
    return ForwardPlan(*tensors, is_causal, float32_precision)


def _backward_plan(
    tensors: Sequence[torch.Tensor],
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    is_causal: bool,
    float32_precision: str,
    deterministic: bool,
    kernels: str,
) -> BackwardPlan:
    plan_class = BackwardPlan
    # The Hopper kernel adds up dQ in no fixed order.
    if not deterministic and _takes_hopper(kernels, (*tensors, *grads), is_causal, hopper_backward_is_faster):
        from cs336sys.kernels.attention.hopper_plans import HopperBackwardPlan as plan_class
    return plan_class(*tensors, grads, is_causal, float32_precision, deterministic)


def _empty_result(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised, with the strides of ``tensor`` where the kernels can write them."""
    if tensor.dim() <= 4 and tensor.stride(-1) == 1:
        result = torch.empty_like(tensor)
        if result.stride(-1) == 1:
            return result
    return tensor.new_empty(tensor.shape)


def _is_direct(
    given: Sequence[torch.Tensor],
    used: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    like: Sequence[torch.Tensor],
) -> bool:
    """Whether the kernels take tensors of a signature as given, and ``torch.empty_like`` makes the results."""
    return (
        given[0].is_cuda
        and all(tensor is other for tensor, other in zip(given, used, strict=True))
        and all(result.stride() == tensor.stride() for result, tensor in zip(results, like, strict=True))
    )


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    float32_precision: str,
    kernels: str = "triton",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (..., S_q, D) in the inputs' dtype and natural logsumexp (..., S_q) in float32."""
    signature = (
        query.shape, query.stride(), query.dtype, query.device, query.data_ptr() % 16,
        key.shape, key.stride(), key.dtype, key.device, key.data_ptr() % 16,
        value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16,
        is_causal, float32_precision, kernels,
    )  # fmt: skip
    plan = _plans.get(signature)
    if plan is not None and plan.is_direct and query.get_device() == torch.cuda.current_device():
        out = torch.empty_like(query)
        # torch.empty takes 2.4 us where this takes 0.9.
        logsumexp = torch.empty_strided(*plan.logsumexp_layout, dtype=torch.float32, device=query.device)
        plan(query, key, value, out, logsumexp)
        return out, logsumexp
    if plan is None:
        _check(query, key, value, float32_precision, kernels)
    if INTERPRETED and query.dtype == torch.bfloat16:
        # The interpreter's arithmetic in bfloat16 is wrong.
        out, logsumexp = _forward(query.float(), key.float(), value.float(), is_causal, float32_precision)
        return out.to(torch.bfloat16), logsumexp
    out = _empty_result(query)
    logsumexp = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, logsumexp
    tensors = *(_kernel_view(tensor, kernels) for tensor in (query, key, value)), out
    if out.dim() > 4:
        tensors = *tensors[:3], out.view(-1, *out.shape[-3:])
    if plan is None:
        plan = _forward_plan(tensors, is_causal, float32_precision, kernels)
        plan.is_direct = _is_direct((query, key, value, out), tensors, [out], [query])
        plan.logsumexp_layout = logsumexp.shape, logsumexp.stride()
        _remember(signature, plan)
    with torch.cuda.device_of(query):
        plan(*tensors, logsumexp)
    return out, logsumexp


def _backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor,
    is_causal: bool,
    float32_precision: str,
    deterministic: bool,
    kernels: str = "triton",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, in their dtype and, where possible, their strides."""
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    # Query, key and value were checked by forward; the output and the logsumexp are its own.
    signature = (
        query.shape, query.stride(), query.dtype, query.device, query.data_ptr() % 16,
        key.shape, key.stride(), key.data_ptr() % 16, value.stride(), value.data_ptr() % 16,
        out.stride(), out.data_ptr() % 16, grad_out.stride(), grad_out.data_ptr() % 16,
        is_causal, float32_precision, deterministic, kernels,
    )  # fmt: skip
    plan = _plans.get(signature)
    if plan is not None and plan.is_direct and query.get_device() == torch.cuda.current_device():
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        plan(query, key, value, out, logsumexp.contiguous(), grad_out, grads)
        return grads
    if INTERPRETED and query.dtype == torch.bfloat16:
        tensors = (tensor.float() for tensor in (query, key, value, out, logsumexp, grad_out))
        grads = _backward(*tensors, is_causal, float32_precision, deterministic)
        return tuple(grad.to(torch.bfloat16) for grad in grads)
    grads = tuple(_empty_result(tensor) for tensor in (query, key, value))
    if query.numel() == 0:
        return tuple(grad.zero_() for grad in grads)
    given = query, key, value, out, grad_out
    tensors = tuple(_kernel_view(tensor, kernels) for tensor in given)
    logsumexp = logsumexp.contiguous()
    kernel_grads = grads if query.dim() <= 4 else tuple(grad.view(-1, *grad.shape[-3:]) for grad in grads)
    if plan is None:
        plan = _backward_plan(tensors, kernel_grads, is_causal, float32_precision, deterministic, kernels)
        plan.is_direct = _is_direct(given, tensors, grads, given[:3])
        _remember(signature, plan)
    with torch.cuda.device_of(query):
        plan(*tensors[:4], logsumexp, tensors[4], kernel_grads)
    return grads


@torch.library.custom_op("cs336sys::flash_attention_forward", mutates_args=())
def _forward_operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    float32_precision: str,
    deterministic: bool,
    kernels: str = "triton",
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(query, key, value, is_causal, float32_precision, kernels)


@torch.library.custom_op("cs336sys::flash_attention_backward", mutates_args=())
def _backward_operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor,
    is_causal: bool,
    float32_precision: str,
    deterministic: bool,
    kernels: str = "triton",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _backward(query, key, value, out, logsumexp, grad_out, is_causal, float32_precision, deterministic, kernels)


@_forward_operator.register_fake
def _(query, key, value, is_causal, float32_precision, deterministic, kernels="triton"):
    check_attention_inputs(query, key, value)
    return _empty_result(query), torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)


@_backward_operator.register_fake
def _(query, key, value, out, logsumexp, grad_out, is_causal, float32_precision, deterministic, kernels="triton"):
    return _empty_result(query), _empty_result(key), _empty_result(value)


def _save_for_backward(ctx: FunctionCtx, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output)


def _differentiate(ctx: FunctionCtx, grad_out: torch.Tensor, grad_logsumexp: torch.Tensor) -> tuple:
    return *_backward_operator(*ctx.saved_tensors, grad_out, *ctx.options), None, None, None, None


_forward_operator.register_autograd(_differentiate, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.cs336sys.flash_attention_forward)
def forward_flops(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, is_causal: bool, *args, **kwargs
) -> int:
    """FLOPs of attention forward, 4 B H S_q S_k D; half of them if causal."""
    return 4 * math.prod(query_shape) * key_shape[-2] // (2 if is_causal else 1)


@register_flop_formula(torch.ops.cs336sys.flash_attention_backward)
def backward_flops(
    query_shape: torch.Size,
    key_shape: torch.Size,
    value_shape: torch.Size,
    result_shape: torch.Size,
    logsumexp_shape: torch.Size,
    grad_out_shape: torch.Size,
    is_causal: bool,
    *args,
    **kwargs,
) -> int:
    """FLOPs of attention backward, 2.5 times the forward: five matrix products against two."""
    return forward_flops(query_shape, key_shape, value_shape, is_causal) * 5 // 2


def _needs_operators(query: torch.Tensor) -> bool:
    """Whether something other than the plain call wants to see the kernels: a compiler, a dispatch mode, a subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or type(query) not in (torch.Tensor, torch.nn.Parameter)
    )


class FlashAttentionTriton(torch.autograd.Function):
    """``FlashAttentionTriton.apply(query, key, value, is_causal=False)``: FlashAttention-2 by Triton kernels.

    Keeps the inputs, the output and the logsumexp (..., S_q) in float32 for backward. Differentiable once. Autocast
    does not change it; :func:`cs336sys.kernels.attention.flash_attention` casts first.

    Args:
        query: (..., S_q, D), D <= 256, float32, float16 or bfloat16, of any strides.
        key: (..., S_k, D).
        value: (..., S_k, D).
        is_causal: query i sees the keys j <= i, counted from the first of each as in
            ``torch.nn.functional.scaled_dot_product_attention``; if S_q > S_k the later queries see all keys.
        float32_precision: of matrix products of float32 inputs: "tf32x3" (three TF32 products, about float32), "ieee"
            (no tensor cores) or "tf32" (10 bits of mantissa). Sums are in float32 for every dtype.
        deterministic: gradients are equal from run to run to the last bit; slower for some shapes.
            ``torch.use_deterministic_algorithms`` does the same.
        kernels: "triton" (plain Triton), "hopper" (warp-specialised, for H100 and H200 in float16 and bfloat16 with
            D 64 or 128; a deterministic backward is plain Triton's) or "auto" (for either pass what was measured to be
            faster).

    Returns:
        (..., S_q, D), in the inputs' dtype. A query whose scores are all -inf gives zeros.

    Raises:
        ValueError: shapes or devices do not fit together, D > 256, or a precision that does not exist.
        TypeError: dtypes differ or are not supported.
        CapabilityError: the device cannot run the kernels.
        RuntimeError: it is differentiated twice, or transformed by ``torch.func``.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool = False,
        float32_precision: str = "tf32x3",
        deterministic: bool = False,
        kernels: str = "triton",
    ) -> torch.Tensor:
        if _needs_operators(query):
            out, logsumexp = _forward_operator(query, key, value, is_causal, float32_precision, deterministic, kernels)
        else:
            out, logsumexp = _forward(query, key, value, is_causal, float32_precision, kernels)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.options = is_causal, float32_precision, deterministic, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        differentiate = _backward_operator if _needs_operators(grad_out) else _backward
        return *differentiate(*ctx.saved_tensors, grad_out, *ctx.options), None, None, None, None


def triton_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    *,
    float32_precision: str | None = None,
    deterministic: bool = False,
    kernels: str = "triton",
) -> torch.Tensor:
    """As :class:`FlashAttentionTriton`, and one node of the graph under ``torch.compile``."""
    float32_precision = float32_precision or FLOAT32_PRECISIONS[0]
    if torch.compiler.is_compiling():
        return _forward_operator(query, key, value, is_causal, float32_precision, deterministic, kernels)[0]
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "FlashAttentionTriton cannot be transformed by torch.func (grad, vmap, jvp, ...): "
            "take implementation 'reference' there"
        )
    return _apply(query, key, value, is_causal, float32_precision, deterministic, kernels)


# Function.apply without its share for torch.func, which takes 2 us and has nothing to do behind the refusal.
_apply = super(torch.autograd.Function, FlashAttentionTriton).apply
