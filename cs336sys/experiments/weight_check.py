"""Whether two ways of training the same model end at the same weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cs336sys.workload import Workload

STEPS = 5

# AdamW divides a gradient by its own size, which hides a sum where a mean should be, and turns the rounding error of a
# gradient that should be 0 into a full step. With this eps its steps are proportional to the gradients: the whole
# optimizer is in use, and weights differ by as much as gradients do.
OPTIMIZER_SETTINGS = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}

# How far a parameter may be from where it should be, relative to how far it should be moved (both Euclidean norms).
# bf16 rounds by up to 2^-8, fp16 and TF32 by 2^-11. Measured at size tiny: up to 9e-6 in fp32 (mostly because the
# weights themselves are rounded), 1e-3 in fp16 and 8e-3 in bf16. Wrong strategies were off by 0.2 to 3: one parameter
# left out, a sum instead of a mean, the gradients of the step before.
TOLERANCES = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1}


@dataclass(frozen=True)
class Difference:
    """How far weights are from those expected after some steps.

    Attributes:
        largest: of all weights, the largest absolute difference.
        relative: of all parameters, the largest ratio of the difference's norm to the norm of how far it was moved.
        parameter: which one that is.
        num_layers: of the model that was compared; fewer than the workload's where that does not fit into memory.
    """

    largest: float
    relative: float
    parameter: str
    num_layers: int


def tolerance(workload: Workload) -> float:
    """The largest :attr:`Difference.relative` that rounding explains, for the precision of the workload."""
    precision = "tf32" if workload.tf32 and workload.precision == "fp32" else workload.precision
    return max(TOLERANCES[precision], TOLERANCES["bf16" if workload.state_dtype == "bf16" else "fp32"])


def plainly_trained(workload: Workload) -> Workload:
    """What a workload is checked against: steps that are launched, and PyTorch's operations in place of our kernels."""
    plain = replace(workload, cuda_graph="off")
    if workload.attention == "flash" and workload.is_ours:
        # With scores in memory a long context would not fit.
        plain = replace(plain, attention="sdpa", compile="off")
    if workload.optimizer == "adamw":
        # torch's: that of another cs336_basics may add eps before it corrects the bias, and eps is large here.
        plain = replace(plain, optimizer="fused", state_dtype="fp32", update="step", compile="off")
    if workload.fused_kernels:
        plain = replace(plain, kernels="reference", compile="off")
    return plain


def difference(
    start: Mapping[str, Tensor], expected: Mapping[str, Tensor], found: Mapping[str, Tensor], num_layers: int
) -> Difference:
    """Compare all weights; each parameter on the device where ``found`` has it.

    Args:
        start: before the first step.
    """
    largest, relative = [], []
    with torch.no_grad():
        for name, anywhere in expected.items():
            own = found[name]
            weight = anywhere.to(own.device)
            off, moved = own - weight, weight - start[name].to(own.device)
            largest.append(off.abs().max())
            distance = torch.linalg.vector_norm(off)
            # A parameter that no step moves must not be moved by the other way either.
            relative.append(torch.where(distance == 0, 0.0, distance / torch.linalg.vector_norm(moved)))
    # A weight that is NaN is farther off than any other.
    relatives = torch.stack(relative).nan_to_num(nan=torch.inf, posinf=torch.inf).tolist()
    worst = max(range(len(relatives)), key=relatives.__getitem__)
    return Difference(torch.stack(largest).max().item(), relatives[worst], list(expected)[worst], num_layers)
