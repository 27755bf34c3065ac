"""The bridge from the names of the course's tests, of both years, to this project.

Put it in the place of the course's ``tests/adapters.py`` and run its tests as they are: CS336 assignment 2 (systems),
https://github.com/stanford-cs336/assignment2-systems, 2025 and 2026.
"""

import atexit
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from cs336sys.parallel.ddp import BucketedDDP, OverlappedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

# The course's ranks exit right after a barrier. Gloo's thread may still be releasing the barrier's work, for which it
# needs Python; once Python shuts down, torch (2.11 and 2.13) aborts the rank: "terminate called without an active
# exception". On two busy cores 4 of 250 runs of the course's test ended so with gradients averaged by plain
# dist.all_reduce, and none of 250 with our wrapper and this pause.
atexit.register(time.sleep, 0.05)


def get_flashattention_autograd_function_pytorch() -> type:
    """FlashAttention-2 in PyTorch operations alone, as a ``torch.autograd.Function``."""
    from cs336sys.kernels.attention.reference import FlashAttentionTorch

    return FlashAttentionTorch


def get_flashattention_autograd_function_triton() -> type:
    """FlashAttention-2 in Triton kernels, as a ``torch.autograd.Function``.

    The environment variable CS336SYS_TRITON_ENGINE chooses between "triton" (the default) and "hopper", the
    warp-specialised kernels for H100 and H200.

    Raises:
        ValueError: the variable names another engine.
    """
    from cs336sys.kernels.attention import FlashAttentionTriton

    engines = {"triton": FlashAttentionTriton, "hopper": FlashAttentionHopper}
    engine = os.environ.get("CS336SYS_TRITON_ENGINE") or "triton"
    if engine not in engines:
        raise ValueError(f"CS336SYS_TRITON_ENGINE={engine!r} does not exist: choose one of {', '.join(engines)}")
    return engines[engine]


class FlashAttentionHopper(torch.autograd.Function):
    """``FlashAttentionHopper.apply(query, key, value, is_causal=False)``: float32 (..., S, D) by the Hopper kernels.

    The course's tests give float32 and expect it back, within 1e-2; the kernels take 16 bits only. So everything is
    cast to float16, which rounds less than bfloat16, on the way in, and back on the way out.
    """

    kernels = "hopper"

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = False
    ) -> torch.Tensor:
        from cs336sys.kernels.attention import FlashAttentionTriton

        options = is_causal, "tf32x3", False, FlashAttentionHopper.kernels
        return FlashAttentionTriton.forward(ctx, query.half(), key.half(), value.half(), *options).float()

    @staticmethod
    def backward(ctx: FunctionCtx, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from cs336sys.kernels.attention import FlashAttentionTriton

        dq, dk, dv, *_ = FlashAttentionTriton.backward(ctx, grad_out.half())
        return dq.float(), dk.float(), dv.float(), None


def get_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """2026: the wrapper that averages each gradient as soon as it is ready."""
    return OverlappedDDP(module)


def ddp_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def get_ddp_individual_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """2025's name for :func:`get_ddp`."""
    return OverlappedDDP(module)


def ddp_individual_parameters_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: torch.nn.Module, bucket_size_mb: float | None) -> torch.nn.Module:
    """2025: the wrapper that averages gradients in buckets; None is one bucket."""
    return BucketedDDP(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing to do: a step begins where the last one was finished."""


def get_sharded_optimizer(
    params: Iterable[torch.nn.Parameter], optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """An optimizer of this class whose state is shared out over ranks by whole parameters."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    """2026: the wrapper that shards parameters, gradients and with them the optimizer's state."""
    return FSDP(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return fsdp_model.gather_full_params()
