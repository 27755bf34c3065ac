"""The AdamW optimizer and its learning-rate schedule."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay: Loshchilov & Hutter 2019 (https://arxiv.org/abs/1711.05101), algorithm 2.

    With bias correction as in Kingma & Ba 2015 (https://arxiv.org/abs/1412.6980), algorithm 1, step ``t`` is::

        p -= lr * weight_decay * p
        m  = beta1 * m + (1 - beta1) * g
        v  = beta2 * v + (1 - beta2) * g^2
        p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    which is what ``torch.optim.AdamW`` computes. Everything is updated in place; one temporary of a parameter's size is
    alive at a time. The state of a parameter is ``t``, and ``m`` and ``v``, of its shape and dtype.

    Args:
        params: parameters, or dicts with ``params`` and their own values of the settings below.
        lr: learning rate, at least 0.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment, at least 0.
        weight_decay: at least 0.
        capturable: as of ``torch.optim.AdamW``: count steps on the parameter's device, so that a CUDA graph of a step
            counts, too. ``t`` is then a tensor (), float64, otherwise an int.

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
        *,
        capturable: bool = False,
    ):
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(params, settings)

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
            params = [(p, p.grad) for p in group["params"] if p.grad is not None]
            for p, grad in params:
                if grad.layout != torch.strided:
                    raise RuntimeError("AdamW takes no sparse gradients: make them dense or use torch.optim.SparseAdam")
                if not self.state[p]:
                    t = _count(0, p, group["capturable"])
                    self.state[p].update(t=t, m=torch.zeros_like(p), v=torch.zeros_like(p))
            update = self._update_counted_on_device if group["capturable"] else self._update
            update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[tuple[Tensor, Tensor]]) -> None:
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        for p, grad in params:
            state = self.state[p]
            state["t"] += 1
            t, m, v = state["t"], state["m"], state["v"]

            p.mul_(1 - lr * group["weight_decay"])
            m.lerp_(grad, 1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            # Numerator and denominator of the update are both multiplied by sqrt(1 - beta2^t), so that the
            # corrections are numbers instead of two more passes over memory (Kingma & Ba, end of section 2).
            root = math.sqrt(1 - beta2**t)
            p.addcdiv_(m, v.sqrt().add_(eps * root), value=-lr * root / (1 - beta1**t))

    def _update_counted_on_device(self, group: dict[str, Any], params: list[tuple[Tensor, Tensor]]) -> None:
        """As :meth:`_update`; the numbers that depend on ``t`` are tensors (), made for all parameters at once."""
        if not params:
            return
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        counts = [self.state[p]["t"] for p, _ in params]
        torch._foreach_add_(counts, 1)
        roots = torch._foreach_pow(beta2, counts)
        torch._foreach_neg_(roots)
        torch._foreach_add_(roots, 1)
        torch._foreach_sqrt_(roots)
        # -lr * root / (1 - beta1^t), and one over it, because addcdiv_ takes no tensor for its factor.
        divisors = torch._foreach_pow(beta1, counts)
        torch._foreach_sub_(divisors, 1)
        torch._foreach_div_(divisors, roots)
        torch._foreach_div_(divisors, lr)
        torch._foreach_mul_(roots, eps)
        for (p, grad), eps_root, divisor in zip(params, roots, divisors, strict=True):
            m, v = self.state[p]["m"], self.state[p]["v"]
            p.mul_(1 - lr * group["weight_decay"])
            m.lerp_(grad, 1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            p.addcdiv_(m, v.sqrt().add_(eps_root).mul_(divisor))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            # Missing in state dicts of earlier versions.
            group.setdefault("capturable", False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer; steps are counted on exactly, whichever ``capturable`` the state was saved with."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [(p, group) for group in self.param_groups for p in group["params"]]
        for index, (p, group) in zip(saved, own, strict=True):
            if "t" in state_dict["state"].get(index, {}):
                # The base class may have made it a tensor of the parameter's dtype: bf16 cannot count to 1000.
                self.state[p]["t"] = _count(int(state_dict["state"][index]["t"]), p, group["capturable"])


def _count(t: int, p: Tensor, capturable: bool) -> int | Tensor:
    return torch.full((), t, dtype=torch.float64, device=p.device) if capturable else t


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
