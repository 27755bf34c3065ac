"""An op of ``kernels``: its random inputs, its right results, and the calls that are timed."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cs336sys.commands.own_kernels import OUTPUT_NAMES, calls_by_part
from cs336sys.machine.device import DTYPES
from cs336sys.settings.operations import KernelWorkload

Function = Callable[..., Any]
# What an implementation does for a workload; a CapabilityError where it cannot.
Implementations = Mapping[str, Callable[[KernelWorkload], Function]]
TimedCalls = dict[str, Callable[[], object]]
Random = Callable[..., Tensor]  # Takes a shape and perhaps a dtype, which is otherwise the workload's.


def random_tensors(
    workload: KernelWorkload, device: torch.device, seed_offset: int = 0
) -> tuple[Random, torch.Generator]:
    """Return a function that draws normal tensors of a shape, the same for every implementation, and its generator."""
    generator = torch.Generator(device).manual_seed(workload.seed + seed_offset)  # 1 for gradients.

    def random(shape: tuple[int, ...], dtype: torch.dtype = DTYPES[workload.dtype]) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return random, generator


@dataclass(frozen=True)
class DifferentiatedFunction:
    """A function of tensors, timed forward and backward.

    Attributes:
        inputs: makes its arguments by name; those of floating point are differentiated.
        reference: the function, right in float64.
        moved_tensors: how many tensors of tokens x width elements forward and backward pass read or write at least.
        products: FLOPs of the matrix products of both passes.
    """

    inputs: Callable[[KernelWorkload, Random, torch.Generator], dict[str, Tensor]]
    reference: Callable[[KernelWorkload], Function]
    implementations: Implementations
    moved_tensors: tuple[int, int] | None = None
    products: Callable[[KernelWorkload], int] | None = None

    def results(self, function: Function, workload: KernelWorkload, device: torch.device) -> dict[str, Tensor]:
        """Return what a function computes from the workload's random inputs, by name."""
        return self._results(function, self.random_inputs(workload, device), workload)

    def expected(self, workload: KernelWorkload, device: torch.device) -> dict[str, Tensor]:
        """Return the same in float64."""
        exact = {
            name: tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor
            for name, tensor in self.random_inputs(workload, device).items()
        }
        return self._results(self.reference(workload), exact, workload)

    def calls(self, function: Function, workload: KernelWorkload, device: torch.device) -> TimedCalls:
        """Return the timed calls by part; ``end_to_end`` is among them."""
        inputs = self.random_inputs(workload, device)
        call = functools.partial(function, **inputs)
        outputs = as_tuple(call())
        return calls_by_part(call, outputs, _tensors_with_gradient(inputs), self.gradients(outputs, workload))

    def moved_bytes(self, workload: KernelWorkload) -> dict[str, int]:
        """Return the least that each part must read and write; empty for matrix products."""
        if self.moved_tensors is None:
            return {}
        forward, backward = (count * workload.tensor_bytes for count in self.moved_tensors)
        return {"forward": forward, "backward": backward, "end_to_end": forward + backward}

    def flops(self, workload: KernelWorkload) -> dict[str, int]:
        """Return the FLOPs of matrix products by part."""
        # No FLOPs of single passes: an implementation may do in the forward pass what others do in the backward pass.
        return {} if self.products is None else {"end_to_end": self.products(workload)}

    def random_inputs(self, workload: KernelWorkload, device: torch.device) -> dict[str, Tensor]:
        """Return its arguments by name, those of floating point as leaves of a new graph."""
        inputs = self.inputs(workload, *random_tensors(workload, device))
        return {
            name: tensor.requires_grad_() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()
        }

    def gradients(self, outputs: tuple[Tensor, ...], workload: KernelWorkload) -> list[Tensor]:
        """Return the outputs' gradients, the same for every implementation: 1 of a loss, where training begins."""
        random, _ = random_tensors(workload, outputs[0].device, seed_offset=1)
        return [torch.ones_like(out) if out.dim() == 0 else random(out.shape).to(out.dtype) for out in outputs]

    def _results(self, function: Function, inputs: dict[str, Tensor], workload: KernelWorkload) -> dict[str, Tensor]:
        outputs = as_tuple(function(**inputs))
        grads = torch.autograd.grad(outputs, _tensors_with_gradient(inputs), self.gradients(outputs, workload))
        names = [f"d{name}" for name, tensor in inputs.items() if tensor.requires_grad]
        tensors = (*(output.detach() for output in outputs), *grads)
        return dict(zip([*OUTPUT_NAMES[: len(outputs)], *names], tensors, strict=True))


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the outputs of a function that has one or several."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _tensors_with_gradient(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in inputs.values() if tensor.requires_grad)
