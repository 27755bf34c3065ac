"""Choose the kernels of an attention call, or say why none can compute it, and make their plan."""

import functools
from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.kernels.attention.hopper import settings
from cs336sys.kernels.attention.plan import Plan
from cs336sys.kernels.attention.problem import (
    AMD,
    FLOAT32_PRECISIONS,
    AttentionOptions,
    AttentionProblem,
    Operand,
    Options,
    check_attention_inputs,
    check_mask,
    check_scale,
    gpu_capability,
    group_size,
    make_problem,
)
from cs336sys.kernels.attention.triton.forward import forward_kernel
from cs336sys.kernels.attention.triton.plans import BackwardPlan, ForwardPlan

# Plain Triton, the warp-specialised ones of hopper/, or of both what was measured faster.
KERNELS = ("auto", "triton", "hopper")

# Queries that a tile of any kernel holds.
SHARED_ROWS = 64

INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)


def check(query: Tensor, key: Tensor, value: Tensor, options: Options) -> None:
    """Refuse, in one sentence, what no kernel computes, or not the kernels that the options name."""
    is_causal, float32_precision, _, kernels, window, scale, aligned_at_end = options
    check_attention_inputs(query, key, value)
    check_mask(window, is_causal, aligned_at_end)
    check_scale(scale)
    if scale is not None and scale <= 0:
        raise UsageError(
            f"scale {scale} is not positive, as attention kernels {kernels!r} need it: multiply the query by its sign"
        )
    if kernels not in KERNELS:
        raise UsageError(f"attention kernels {kernels!r} do not exist: choose one of {', '.join(KERNELS)}")
    if float32_precision not in FLOAT32_PRECISIONS:
        raise UsageError(
            f"float32_precision {float32_precision!r} does not exist: choose one of {', '.join(FLOAT32_PRECISIONS)}"
        )
    reason = settings.why_unavailable(query) if kernels == "hopper" else _why_unavailable(query)
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    if kernels == "hopper" and aligned_at_end and num_queries > num_keys:
        reason = (
            f"implementation 'hopper' has causal_alignment 'end' for no more queries than keys, got {num_queries} and "
            f"{num_keys}: choose 'triton' or 'auto'"
        )
    if reason is not None:
        raise CapabilityError(reason)


def _why_unavailable(query: Tensor) -> str | None:
    """Return why plain Triton's kernels cannot run on the query's device and dtype, a sentence; None if they can."""
    if not query.is_cuda:
        if INTERPRETED and query.device.type == "cpu":
            return None
        return (
            f"the Triton attention kernels run on CUDA tensors, got {query.device}: set TRITON_INTERPRET=1 before the "
            "first import to run them on the CPU in Triton's interpreter"
        )
    if query.dtype == torch.bfloat16:
        capability = gpu_capability(query.device)
        # AMD, below all compute capabilities, is not refused.
        if AMD < capability < (8, 0):
            name, (major, minor) = torch.cuda.get_device_name(query.device), capability
            return f"bfloat16 needs a GPU of compute capability 8.0 or later, {name} has {major}.{minor}"
    return None


def _takes_hopper(
    kernels: str, query: Tensor, problem: AttentionProblem, is_faster: Callable[[AttentionProblem], bool]
) -> bool:
    """Return whether the Hopper kernels compute this: if asked for, or of "auto" where they can and are faster."""
    if kernels != "auto":
        return kernels == "hopper"
    return settings.why_unavailable(query) is None and is_faster(problem)


def share_rows(
    of_queries: Sequence[Tensor], key: Tensor, options: AttentionOptions
) -> tuple[Sequence[Tensor], AttentionOptions]:
    """Return tensors of queries with the heads that share a head of keys as rows of one, where a tile holds them all.

    Then a program reads these keys once. All queries must see the same keys, as a single one at the end does.
    """
    num_queries = of_queries[0].shape[-2]
    num_rows = group_size(of_queries[0], key) * num_queries
    sees_all = not options.is_causal or (options.aligned_at_end and num_queries == 1 and options.window is None)
    if not (sees_all and num_queries < num_rows <= SHARED_ROWS):
        return of_queries, options
    if num_queries > 1 and any(tensor.stride(1) != num_queries * tensor.stride(2) for tensor in of_queries):
        return of_queries, options
    views = [tensor.view(len(tensor), -1, num_rows, tensor.shape[-1]) for tensor in of_queries]
    return views, options._replace(is_causal=False, aligned_at_end=False)


def forward_plan(tensors: Sequence[Tensor], options: AttentionOptions) -> Plan:
    """Plan the forward pass of these tensors: query, key, value and output."""
    query, key, value, out = tensors
    (query, out), options = share_rows((query, out), key, options)
    operands = [Operand(tensor) for tensor in (query, key, value, out)]
    problem = make_problem(query, key, operands, options)
    if problem.diagonal >= 0 and _takes_hopper(options.kernels, query, problem, settings.hopper_forward_is_faster):
        from cs336sys.kernels.attention.hopper.plans import HopperForwardPlan  # Gluon, imported only where it runs.

        return HopperForwardPlan(problem, operands, query.device)
    return ForwardPlan(problem, operands, query.device)


def backward_plan(tensors: Sequence[Tensor], grads: Sequence[Tensor], options: AttentionOptions) -> BackwardPlan:
    """Plan the backward pass.

    Args:
        tensors: query, key, value, output, and its gradient; the output may be D = rowsum(dO * O) instead, which has
            one dimension less.
        grads: of query, key and value.
    """
    query, key, value, out_or_delta, grad_out = tensors
    of_queries = query, grad_out, grads[0], *([out_or_delta] if out_or_delta.dim() == query.dim() else [])
    (query, grad_out, grad_query, *outs), options = share_rows(of_queries, key, options)
    operands = [Operand(tensor) for tensor in (query, key, value, grad_out)]
    out = Operand(outs[0]) if outs else None
    results = [Operand(grad) for grad in (grad_query, *grads[1:])]
    problem = make_problem(query, key, operands, options)
    plan_class = BackwardPlan
    # The Hopper kernels read and write these by TMA, and count a window's tiles from the first query and key on.
    fits_hopper = all(operand.fits_tma for operand in (*results, out) if operand is not None)
    fits_hopper = fits_hopper and (problem.diagonal == 0 or (problem.diagonal > 0 and problem.window is None))
    is_faster = functools.partial(settings.hopper_backward_is_faster, deterministic=options.deterministic)
    if fits_hopper and _takes_hopper(options.kernels, query, problem, is_faster):
        from cs336sys.kernels.attention.hopper.plans import HopperBackwardPlan as plan_class
    return plan_class(problem, operands, out, results, query.device, options.deterministic)
