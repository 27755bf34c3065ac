"""The ops of ``kernels``: an entry each says what goes in, what is right, who computes it, what it costs at least."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cs336sys.commands.kernels.operation import (
    DifferentiatedFunction,
    Function,
    Implementations,
    Random,
    TimedCalls,
    random_tensors,
)
from cs336sys.errors import CapabilityError
from cs336sys.kernels.adamw import AdamW, reference_adamw
from cs336sys.kernels.linear_cross_entropy import linear_cross_entropy
from cs336sys.kernels.rms_norm import reference_rms_norm, rms_norm
from cs336sys.kernels.rope import reference_rope, rope
from cs336sys.kernels.swiglu import reference_swiglu, swiglu
from cs336sys.kernels.weighted_sum import reference_weighted_sum, weighted_sum
from cs336sys.machine.device import DTYPES, choose_device
from cs336sys.settings.operations import KernelWorkload

# The op ``adamw`` of ``kernels``: one step of an optimizer.

NUM_PARAMETERS = 16  # The elements are split among so many.
STEPS = 3  # Before results are compared.

Step = tuple[torch.optim.Optimizer, Callable[[], Any]]


def our_adamw(parameters: list[Tensor], copies: list[Tensor]) -> Step:
    """Return our optimizer of the parameters, and what takes a step and writes the copies."""
    optimizer = AdamW(parameters)
    for parameter, copy in zip(parameters, copies, strict=False):  # In fp32 there are no copies.
        optimizer.attach_copy(parameter, copy)
    return optimizer, optimizer.step


def torch_adamw(parameters: list[Tensor], copies: list[Tensor], **settings: Any) -> Step:
    """Return torch's optimizer with these settings, and what takes a step and writes the copies."""
    optimizer = torch.optim.AdamW(parameters, **settings)

    @torch.no_grad()
    def step() -> None:
        optimizer.step()
        if copies:
            torch._foreach_copy_(copies, parameters)

    return optimizer, step


@dataclass(frozen=True)
class OptimizerStep:
    """AdamW of float32 parameters with float32 gradients, and of the copies in half precision that a model reads.

    Tokens x width elements in :data:`NUM_PARAMETERS` tensors. Copies are written where the dtype is not fp32. Its
    methods are those of :class:`DifferentiatedFunction`.
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
        return {name: torch.cat([part.detach().flatten() for part in parts]) for name, parts in tensors.items()}

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

    def calls(self, function: Function, workload: KernelWorkload, device: torch.device) -> TimedCalls:
        parameters, copies, random = self._tensors(workload, device)
        _, step = function(parameters, copies)
        self._set_gradients(parameters, random)
        step()  # The first step creates the states, and is not timed.
        return {"end_to_end": step}

    def moved_bytes(self, workload: KernelWorkload) -> dict[str, int]:
        # The gradient is read; parameter and both moments are read and written: 7 numbers in fp32. A copy is written.
        return {"end_to_end": 7 * 4 * workload.elements + (0 if workload.dtype == "fp32" else workload.tensor_bytes)}

    def flops(self, workload: KernelWorkload) -> dict[str, int]:
        return {}

    def _tensors(self, workload: KernelWorkload, device: torch.device) -> tuple[list[Tensor], list[Tensor], Function]:
        """Return parameters, their copies in half precision (none in fp32), and what makes random gradients."""
        random, _ = random_tensors(workload, device)
        values = random((workload.tokens, workload.width), torch.float32).tensor_split(NUM_PARAMETERS)
        parameters = [value.clone().requires_grad_() for value in values if value.numel()]  # Few rows: fewer parts.
        copied = parameters if workload.dtype != "fp32" else []
        settings: Any = {"dtype": DTYPES[workload.dtype], "requires_grad": False}
        return parameters, [torch.empty_like(parameter, **settings) for parameter in copied], random

    @staticmethod
    def _set_gradients(parameters: list[Tensor], random: Function) -> None:
        for parameter in parameters:
            parameter.grad = random(parameter.shape, torch.float32)


Operation = DifferentiatedFunction | OptimizerStep

EPS = 1e-5
CHUNK_TOKENS = 4096  # Tokens whose logits ``chunked`` holds at a time: 1.2 GB in bf16 for a vocabulary of 151,936.


def _implementations(ours: Function, reference: Function, **others: Callable[[Any], Function]) -> Implementations:
    """Return implementations of which the first three are the same for all workloads."""
    return {
        "ours": lambda workload: ours,
        "eager": lambda workload: reference,
        "compiled": lambda workload: torch.compile(reference, dynamic=False),
        **others,
    }


def _import_from(distribution: str, module: str) -> Any:
    """Import a module, or raise a CapabilityError that names the distribution to install."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise CapabilityError(f"implementation '{package}' needs the package {distribution}, which is not installed")
    return importlib.import_module(module)


def _quack_rms_norm(workload: KernelWorkload, **settings: Any) -> Function:
    return functools.partial(_import_from("quack-kernels", "quack.rmsnorm").rmsnorm, eps=EPS, **settings)


def _liger_rms_norm(workload: KernelWorkload) -> Function:
    function = _import_from("liger-kernel", "liger_kernel.ops.rms_norm").LigerRMSNormFunction
    # offset, casting_mode, in_place: repetitions of the backward pass need the incoming gradient unchanged.
    return lambda x, weight: function.apply(x, weight, EPS, 0.0, "llama", False)


def _liger_swiglu(workload: KernelWorkload) -> Function:
    function = _import_from("liger-kernel", "liger_kernel.ops.swiglu").LigerSiLUMulFunction
    return lambda gate, up: function.apply(gate, up)


def _on_heads(workload: KernelWorkload, rotate: Function) -> Function:
    """Return ``rotate`` of a projection (1, tokens, width) seen as attention wants it: (1, heads, tokens, head_dim)."""
    return lambda x: rotate(x.unflatten(-1, (-1, workload.head_dim)).transpose(-3, -2))


def _rope_by_table(workload: KernelWorkload) -> Function:
    """Return a rotation as models have it, with cosines and sines prepared."""
    assert workload.head_dim is not None
    # Rotated, the pair (1, 0) is (cos, sin).
    unit = torch.zeros(workload.tokens, workload.head_dim, dtype=torch.float64, device=choose_device(workload.device))
    unit[:, ::2] = 1
    cos, sin = reference_rope(unit).float().unflatten(-1, (-1, 2)).unbind(-1)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2).to(x.dtype)

    return _on_heads(workload, rotate)


def _norm_inputs(workload: KernelWorkload, random: Random, generator: torch.Generator) -> dict[str, Tensor]:
    x = random((workload.tokens, workload.width))
    # In float32, as a model's parameters are under autocast.
    return {"x": x, "weight": random((workload.width,), torch.float32)}


def _eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), EPS)


def _eager_add_rms_norm(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _eager_rms_norm(total, weight), total


def _classifier_inputs(workload: KernelWorkload, random: Random, generator: torch.Generator) -> dict[str, Tensor]:
    assert workload.vocab_size is not None
    weight = random((workload.vocab_size, workload.width)) * workload.width**-0.5  # Logits near 1 in size.
    targets = torch.randint(workload.vocab_size, (workload.tokens,), generator=generator, device=generator.device)
    return {"hidden": random((workload.tokens, workload.width)), "weight": weight, "targets": targets}


def _cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction=reduction)


def _chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute logits of a chunk of tokens at a time, and again in the backward pass."""
    losses = [
        checkpoint(_cross_entropy, hidden_chunk, weight, target_chunk, reduction="sum", use_reentrant=False)
        for hidden_chunk, target_chunk in zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
    ]
    return torch.stack(losses).sum() / targets.numel()


def _liger_cross_entropy(workload: KernelWorkload) -> Function:
    module = _import_from("liger-kernel", "liger_kernel.ops.fused_linear_cross_entropy")
    return lambda hidden, weight, targets: module.LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets)[0]


OPERATIONS: dict[str, Operation] = {
    "rms-norm": DifferentiatedFunction(
        inputs=_norm_inputs,
        reference=lambda workload: functools.partial(reference_rms_norm, eps=EPS),
        implementations=_implementations(
            functools.partial(rms_norm, eps=EPS), _eager_rms_norm, quack=_quack_rms_norm, liger=_liger_rms_norm
        ),
        moved_tensors=(2, 3),  # Forward: x, y. Backward: x and the gradients of both.
    ),
    "add-rms-norm": DifferentiatedFunction(
        inputs=lambda workload, random, generator: {
            **_norm_inputs(workload, random, generator),
            "residual": random((workload.tokens, workload.width)),
        },
        reference=lambda workload: functools.partial(reference_rms_norm, eps=EPS),
        implementations=_implementations(
            functools.partial(rms_norm, eps=EPS),
            _eager_add_rms_norm,
            quack=functools.partial(_quack_rms_norm, prenorm=True),
        ),
        moved_tensors=(4, 4),  # Forward: x, residual, sum, y. Backward: sum, outputs' gradients, one for both inputs.
    ),
    "rope": DifferentiatedFunction(
        inputs=lambda workload, random, generator: {"x": random((1, workload.tokens, workload.width))},
        reference=lambda workload: _on_heads(workload, reference_rope),
        implementations={
            "ours": lambda workload: _on_heads(workload, rope),
            "eager": _rope_by_table,
            "compiled": lambda workload: torch.compile(_rope_by_table(workload), dynamic=False),
        },
        moved_tensors=(2, 2),  # Forward: x, y. Backward: the gradients of both.
    ),
    "swiglu": DifferentiatedFunction(
        inputs=lambda workload, random, generator: {
            "gate": random((workload.tokens, workload.width)),
            "up": random((workload.tokens, workload.width)),
        },
        reference=lambda workload: reference_swiglu,
        implementations=_implementations(swiglu, lambda gate, up: F.silu(gate) * up, liger=_liger_swiglu),
        moved_tensors=(3, 5),  # Forward: gate, up, product. Backward: gate, up, the gradients of all three.
    ),
    "linear-cross-entropy": DifferentiatedFunction(
        inputs=_classifier_inputs,
        reference=lambda workload: _chunked_cross_entropy,
        implementations=_implementations(
            linear_cross_entropy, _cross_entropy, chunked=lambda _: _chunked_cross_entropy, liger=_liger_cross_entropy
        ),
        # Three products, each of 2 FLOPs a multiplication and addition: logits, and the gradients of both inputs.
        products=lambda workload: 3 * 2 * workload.elements * (workload.vocab_size or 0),
    ),
    "adamw": OptimizerStep(
        {
            "ours": lambda workload: our_adamw,
            "eager": lambda workload: functools.partial(torch_adamw, foreach=True),
            "fused": lambda workload: functools.partial(torch_adamw, fused=True),
        }
    ),
    "weighted-sum": DifferentiatedFunction(
        inputs=lambda workload, random, generator: {
            "x": random((workload.tokens, workload.width)),
            "weight": random((workload.width,)),
        },
        reference=lambda workload: reference_weighted_sum,
        implementations=_implementations(weighted_sum, reference_weighted_sum),
        moved_tensors=(1, 2),  # Forward: x. Backward: x and its gradient.
    ),
}
