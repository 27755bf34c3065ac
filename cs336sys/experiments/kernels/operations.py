"""The ops of ``kernels``: an entry each says what goes in, what is right, who computes it, and what it has to move."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336sys.errors import CapabilityError
from cs336sys.kernels.rms_norm import reference_rms_norm, rms_norm
from cs336sys.kernels.rope import reference_rope, rope
from cs336sys.kernels.swiglu import reference_swiglu, swiglu
from cs336sys.kernels.weighted_sum import reference_weighted_sum, weighted_sum
from cs336sys.measure.device import choose_device
from cs336sys.workload import KernelWorkload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EPS = 1e-5

Function = Callable[..., Tensor | tuple[Tensor, ...]]
# Takes a shape and perhaps a dtype, which is otherwise the workload's.
Random = Callable[..., Tensor]


@dataclass(frozen=True)
class Operation:
    """One op.

    Attributes:
        inputs: makes its arguments by name, of which all are differentiated.
        reference: the function, right in float64.
        implementations: by the names of the workload's; makes the function, or raises a CapabilityError.
        moved_tensors: how many tensors of tokens x width elements forward and backward pass read or write at least.
    """

    inputs: Callable[[KernelWorkload, Random], dict[str, Tensor]]
    reference: Callable[[KernelWorkload], Function]
    implementations: Mapping[str, Callable[[KernelWorkload], Function]]
    moved_tensors: tuple[int, int]

    def moved_bytes(self, workload: KernelWorkload) -> dict[str, int]:
        forward, backward = (count * workload.tensor_bytes for count in self.moved_tensors)
        return {"forward": forward, "backward": backward, "end_to_end": forward + backward}


def _plain(ours: Function, reference: Function, **others: Callable[[], Function]) -> dict:
    """Implementations that are the same for all workloads."""
    makers: dict[str, Callable[[], Function]] = {
        "ours": lambda: ours,
        "eager": lambda: reference,
        "compiled": lambda: torch.compile(reference, dynamic=False),
    }
    return {name: lambda workload, make=make: make() for name, make in (makers | others).items()}


def _installed(module: str, distribution: str) -> Any:
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise CapabilityError(f"implementation '{package}' needs the package {distribution}, which is not installed")
    return importlib.import_module(module)


def _quack_rms_norm() -> Function:
    return functools.partial(_installed("quack.rmsnorm", "quack-kernels").rmsnorm, eps=EPS)


def _quack_add_rms_norm() -> Function:
    return functools.partial(_quack_rms_norm(), prenorm=True)


def _liger_rms_norm() -> Function:
    function = _installed("liger_kernel.ops.rms_norm", "liger-kernel").LigerRMSNormFunction
    # Not in place: the gradient that comes in is used by every repetition.
    return lambda x, weight: function.apply(x, weight, EPS, 0.0, "llama", False)


def _liger_swiglu() -> Function:
    function = _installed("liger_kernel.ops.swiglu", "liger-kernel").LigerSiLUMulFunction
    return lambda gate, up: function.apply(gate, up)


def _on_heads(workload: KernelWorkload, rotate: Function) -> Function:
    """Of a projection (1, tokens, width), seen as attention wants it: (1, heads, tokens, head_dim)."""
    return lambda x: rotate(x.unflatten(-1, (-1, workload.head_dim)).transpose(-3, -2))


def _rope_by_table(workload: KernelWorkload) -> Function:
    """As models do it, with cosines and sines prepared."""
    assert workload.head_dim is not None
    unit = torch.zeros(workload.tokens, workload.head_dim, dtype=torch.float64, device=choose_device(workload.device))
    unit[:, ::2] = 1
    cos, sin = reference_rope(unit).float().unflatten(-1, (-1, 2)).unbind(-1)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2).to(x.dtype)

    return _on_heads(workload, rotate)


def _norm_inputs(workload: KernelWorkload, random: Random) -> dict[str, Tensor]:
    x = random((workload.tokens, workload.width))
    # In float32, as a model's parameters are under autocast.
    return {"x": x, "weight": random((workload.width,), torch.float32)}


def _add_norm_inputs(workload: KernelWorkload, random: Random) -> dict[str, Tensor]:
    return _norm_inputs(workload, random) | {"residual": random((workload.tokens, workload.width))}


def _eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), EPS)


def _eager_add_rms_norm(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _eager_rms_norm(total, weight), total


OPERATIONS = {
    "rms-norm": Operation(
        _norm_inputs,
        lambda workload: functools.partial(reference_rms_norm, eps=EPS),
        _plain(functools.partial(rms_norm, eps=EPS), _eager_rms_norm, quack=_quack_rms_norm, liger=_liger_rms_norm),
        # Forward: x, y. Backward: x and the gradients of both.
        (2, 3),
    ),
    "add-rms-norm": Operation(
        _add_norm_inputs,
        lambda workload: functools.partial(reference_rms_norm, eps=EPS),
        _plain(functools.partial(rms_norm, eps=EPS), _eager_add_rms_norm, quack=_quack_add_rms_norm),
        # Forward: x, residual, their sum, y. Backward: the sum, both outputs' gradients, one that both inputs share.
        (4, 4),
    ),
    "rope": Operation(
        lambda workload, random: {"x": random((1, workload.tokens, workload.width))},
        lambda workload: _on_heads(workload, reference_rope),
        {
            "ours": lambda workload: _on_heads(workload, rope),
            "eager": _rope_by_table,
            "compiled": lambda workload: torch.compile(_rope_by_table(workload), dynamic=False),
        },
        (2, 2),
    ),
    "swiglu": Operation(
        lambda workload, random: {name: random((workload.tokens, workload.width)) for name in ("gate", "up")},
        lambda workload: reference_swiglu,
        _plain(swiglu, lambda gate, up: F.silu(gate) * up, liger=_liger_swiglu),
        # Forward: gate, up, product. Backward: gate and up again, and the gradients of all three.
        (3, 5),
    ),
    "weighted-sum": Operation(
        lambda workload, random: {
            "x": random((workload.tokens, workload.width)),
            "weight": random((workload.width,)),
        },
        lambda workload: reference_weighted_sum,
        _plain(weighted_sum, reference_weighted_sum),
        # Forward: x. Backward: x and its gradient.
        (1, 2),
    ),
}
