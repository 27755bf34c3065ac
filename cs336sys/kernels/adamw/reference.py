"""The ground truth of the AdamW kernels."""

import math

import torch


def reference_adamw(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step number ``step`` (the first is 1) of one parameter in plain PyTorch, as ``torch.optim.AdamW`` takes it.

    All tensors have one shape and dtype, any; returns the new parameter and moments.
    """
    beta1, beta2 = betas
    exp_avg = exp_avg.lerp(gradient, 1 - beta1)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient * gradient
    denominator = exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step) + eps
    parameter = (1 - lr * weight_decay) * parameter - lr / (1 - beta1**step) * exp_avg / denominator
    return parameter, exp_avg, exp_avg_sq
