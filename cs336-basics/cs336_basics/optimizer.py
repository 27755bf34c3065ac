"""The AdamW optimizer and its learning-rate schedule."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay: Loshchilov & Hutter 2019 (https://arxiv.org/abs/1711.05101), algorithm 2.

    With bias correction as in Kingma & Ba 2015 (https://arxiv.org/abs/1412.6980), algorithm 1, step ``t`` is::

        p -= lr * weight_decay * p
        m  = beta1 * m + (1 - beta1) * g
        v  = beta2 * v + (1 - beta2) * g^2
        p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    which is what ``torch.optim.AdamW`` computes. Everything is updated in place; one temporary of a parameter's size is
    alive at a time. The state of a parameter is ``t``, an int, and ``m`` and ``v``, of its shape and dtype.

    Args:
        params: parameters, or dicts with ``params`` and their own values of the settings below.
        lr: learning rate, at least 0.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment, at least 0.
        weight_decay: at least 0.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict) -> None:
        settings = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not settings[name] >= 0:
                raise ValueError(f"AdamW: {name} is {settings[name]}, but must be at least 0")
        if not all(0 <= beta < 1 for beta in settings["betas"]):
            raise ValueError(f"AdamW: betas are {settings['betas']}, but each must be at least 0 and below 1")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients anew; its result is returned, a tensor or a number.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.layout != torch.strided:
                    raise RuntimeError("AdamW takes no sparse gradients: make them dense or use torch.optim.SparseAdam")
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                t, m, v = state["t"], state["m"], state["v"]

                p.mul_(1 - lr * group["weight_decay"])
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                # Numerator and denominator of the update are both multiplied by sqrt(1 - beta2^t), so that the
                # corrections are numbers instead of two more passes over memory (Kingma & Ba, end of section 2).
                root = math.sqrt(1 - beta2**t)
                p.addcdiv_(m, v.sqrt().add_(eps * root), value=-lr * root / (1 - beta1**t))
        return loss


def get_cosine_lr(
    it: int,
    max_learning_rate: float,
    min_learning_rate: float,
    warmup_iters: int,
    cosine_cycle_iters: int,
) -> float:
    """Learning rate of iteration ``it``: linear from 0 to the maximum, half a cosine to the minimum, then constant.

    The maximum is reached at ``warmup_iters`` and the minimum at ``cosine_cycle_iters`` (both counted from 0), as in
    SGDR (https://arxiv.org/abs/1608.03983, eq. 5) without restarts.
    """
    if it < warmup_iters:
        return max_learning_rate * it / warmup_iters
    if it >= cosine_cycle_iters:
        return min_learning_rate
    progress = (it - warmup_iters) / (cosine_cycle_iters - warmup_iters)
    return min_learning_rate + 0.5 * (1 + math.cos(math.pi * progress)) * (max_learning_rate - min_learning_rate)
