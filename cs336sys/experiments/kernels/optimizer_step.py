"""The op ``adamw`` of ``kernels``: one step of an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cs336sys.experiments.kernels.operation import Function, Implementations, random_tensors
from cs336sys.kernels.adamw import AdamW, reference_adamw
from cs336sys.measure.dtypes import DTYPES
from cs336sys.workload import KernelWorkload

# As many parameters share the elements out; steps are taken before results are compared.
NUM_PARAMETERS = 16
STEPS = 3

Step = tuple[torch.optim.Optimizer, Callable[[], Any]]


def ours(parameters: list[Tensor], copies: list[Tensor]) -> Step:
    """Our optimizer of the parameters, and what takes a step and writes the copies."""
    optimizer = AdamW(parameters)
    for parameter, copy in zip(parameters, copies, strict=False):
        optimizer.attach_copy(parameter, copy)
    return optimizer, optimizer.step


def foreach(parameters: list[Tensor], copies: list[Tensor]) -> Step:
    """The same with PyTorch's default."""
    return _torchs(torch.optim.AdamW(parameters, foreach=True), parameters, copies)


def fused(parameters: list[Tensor], copies: list[Tensor]) -> Step:
    """The same with PyTorch's fused kernels."""
    return _torchs(torch.optim.AdamW(parameters, fused=True), parameters, copies)


def _torchs(optimizer: torch.optim.Optimizer, parameters: list[Tensor], copies: list[Tensor]) -> Step:
    @torch.no_grad()
    def step() -> None:
        optimizer.step()
        if copies:
            torch._foreach_copy_(copies, parameters)

    return optimizer, step


@dataclass(frozen=True)
class OptimizerStep:
    """AdamW of float32 parameters with float32 gradients, and of the copies in half precision that a model reads.

    Tokens x width elements in :data:`NUM_PARAMETERS` tensors. Copies are written where the dtype is not fp32.
    """

    implementations: Implementations

    def results(self, function: Function, workload: KernelWorkload, device: torch.device) -> dict[str, Tensor]:
        parameters, copies, random = self._tensors(workload, device)
        optimizer, step = function(parameters, copies)
        for _ in range(STEPS):
            self._set_gradients(parameters, random)
            step()
        states = [optimizer.state[parameter] for parameter in parameters]
        tensors = {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")}
        tensors |= {"parameter": parameters} | ({"copy": copies} if copies else {})
        return {name: torch.cat([one.detach().flatten() for one in several]) for name, several in tensors.items()}

    def expected(self, workload: KernelWorkload, device: torch.device) -> dict[str, Tensor]:
        parameters, copies, random = self._tensors(workload, device)
        exact = torch.cat([parameter.detach().flatten() for parameter in parameters]).double()
        exp_avg, exp_avg_sq = torch.zeros_like(exact), torch.zeros_like(exact)
        for number in range(STEPS):
            self._set_gradients(parameters, random)
            gradient = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
            exact, exp_avg, exp_avg_sq = reference_adamw(exact, gradient.double(), exp_avg, exp_avg_sq, number + 1)
        results = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "parameter": exact}
        return results | ({"copy": exact} if copies else {})

    def calls(
        self, function: Function, workload: KernelWorkload, device: torch.device
    ) -> dict[str, Callable[[], object]]:
        parameters, copies, random = self._tensors(workload, device)
        _, step = function(parameters, copies)
        self._set_gradients(parameters, random)
        # The first makes the states.
        step()
        return {"end_to_end": step}

    def moved_bytes(self, workload: KernelWorkload) -> dict[str, int]:
        # The gradient is read; parameter and both moments are read and written, the copy is written.
        elements = workload.tokens * workload.width
        return {"end_to_end": 7 * 4 * elements + (0 if workload.dtype == "fp32" else workload.tensor_bytes)}

    def flops(self, workload: KernelWorkload) -> dict[str, int]:
        return {}

    def _tensors(self, workload: KernelWorkload, device: torch.device) -> tuple[list[Tensor], list[Tensor], Function]:
        """Parameters, their copies, and what makes random gradients."""
        random, _ = random_tensors(workload, device)
        values = random((workload.tokens, workload.width), torch.float32).tensor_split(NUM_PARAMETERS)
        parameters = [value.clone().requires_grad_() for value in values if value.numel()]
        copies = []
        if workload.dtype != "fp32":
            copies = [torch.empty_like(one, dtype=DTYPES[workload.dtype], requires_grad=False) for one in parameters]
        return parameters, copies, random

    @staticmethod
    def _set_gradients(parameters: list[Tensor], random: Function) -> None:
        for parameter in parameters:
            parameter.grad = random(parameter.shape, torch.float32)
