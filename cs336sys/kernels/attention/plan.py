"""Plans of attention calls, and the launches that they consist of.

A plan is made once for tensors of given shapes, strides, dtype and device, and then called with such tensors, all of
them 16-byte aligned and contiguous in the last dimension. Its launches cost the CPU little: small kernels run for less
time than Triton takes to start them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# The tensors that the plans of a pass are called with.
FORWARD_TENSORS = ("query", "key", "value", "out", "logsumexp")
GRADIENTS = ("grad_query", "grad_key", "grad_value")
BACKWARD_TENSORS = ("query", "key", "value", "out", "logsumexp", "grad_out", *GRADIENTS)

# What FlashAttention-3 lets the operands that concurrent programs stream fill of the L2 cache, 50 MB on H100 and H200.
FORWARD_L2_BYTES = 32 * 2**20
BACKWARD_L2_BYTES = 40 * 2**20

# Tensors of plans, which CUDA graphs read by address: they outlive the plans, some KiB a signature.
_OWNED: list[Tensor] = []


def sequences_per_group(num_sequences: int, bytes_per_sequence: int, l2_bytes: int) -> int:
    """Return how many sequences fit in L2 together, so that groups have about the same size."""
    num_groups = triton.cdiv(num_sequences, max(1, l2_bytes // bytes_per_sequence))
    return triton.cdiv(num_sequences, num_groups)


class Descriptors:
    """TMA descriptors for one tensor after another, all with the same shape, strides, dtype and block."""

    descriptor_class = TensorDescriptor

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block_shape: list[int]):
        self.shape_and_strides = tuple(shape), tuple(strides)
        self._layout: tuple[Any, ...] = (shape, strides, block_shape)

    def describe(self, tensor: Tensor) -> TensorDescriptor:
        return self.descriptor_class(tensor, *self._layout)


class Launch:
    """A kernel with its grid, its numbers and its compile-time constants; called with its tensors.

    From the second call on it bypasses Triton's binding of arguments, which takes longer than a small kernel runs. That
    is right because whatever Triton specialises on is fixed in a plan: the device, the numbers, dtypes and alignment.

    Args:
        descriptors: for the first of the tensors, which the kernel takes by TMA descriptors; the others it takes by
            address.

    Attributes:
        arguments: what follows the tensors: the numbers and the constants.
        compiled: Triton's compiled kernel, after the first call; none in the interpreter.
    """

    def __init__(
        self,
        kernel,
        num_programs: int,
        numbers: Sequence,
        constants: Sequence,
        descriptors: Sequence[Descriptors] = (),
        **options,
    ):
        self._kernel = kernel
        self.num_programs = num_programs
        self.arguments = (*numbers, *constants)
        self.descriptors = descriptors
        self._options = options
        self.compiled: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        if self.compiled is None:
            self._compile(tensors)
            return
        # An address instead of a tensor saves a query to the CUDA driver.
        operands = [
            tensor.data_ptr() if descriptors is None else descriptors.describe(tensor)
            for tensor, descriptors in itertools.zip_longest(tensors, self.descriptors)
        ]
        stream, grid = self._current_stream(self._device), (self.num_programs, 1, 1)
        self.compiled.run(*grid, stream, *self._handle, *operands, *self.arguments)

    def _compile(self, tensors: Sequence[Tensor]) -> None:
        """Launch as Triton does, and keep what it compiled; the interpreter compiles nothing: each call comes here."""
        operands = list(tensors)
        for index, descriptors in enumerate(self.descriptors):
            operands[index] = descriptors.describe(tensors[index])
        compiled = self._kernel[self.num_programs, 1, 1](*operands, *self.arguments, **self._options)
        if compiled is None:
            return
        self.compiled = compiled
        driver = triton.runtime.driver.active
        self._device, self._current_stream = driver.get_current_device(), driver.get_current_stream
        # In place of metadata for hooks, and of the hooks before and after a launch.
        no_hooks = None, None, None
        self._handle = compiled.function, compiled.packed_metadata, *no_hooks


@dataclass(frozen=True)
class Scratch:
    """A float32 tensor (rows, columns) that lives for one call of a plan."""

    shape: tuple[int, int]

    @property
    def strides(self) -> tuple[int, int]:
        return self.shape[1], 1

    def allocate(self, device: torch.device) -> Tensor:
        # torch.empty takes 2.4 us where this takes 0.9.
        return torch.empty_strided(self.shape, self.strides, dtype=torch.float32, device=device)


class Plan:
    """Launches over named tensors: those that the plan is called with, in the order of ``tensor_names``, and its own.

    Attributes:
        additions: what follows these tensors: scratch tensors and constants.
        steps: every launch with the slots of its tensors: their places among those of the call and ``additions``.
        is_direct: tensors of this signature are on a GPU and go to the kernels as they are.
        result_layouts: shape, strides and dtype of each result.
        native_options: numbers of the options under which the C++ was given the plan.
    """

    tensor_names: Sequence[str]
    is_direct: bool
    result_layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]

    def __init__(self, device: torch.device):
        self._device = device
        self._slots = {name: slot for slot, name in enumerate(self.tensor_names)}
        self.additions: list[Scratch | Tensor] = []
        self.steps: list[tuple[Launch, tuple[int, ...]]] = []
        self.native_options: set[int] = set()

    def _add_tensor(self, name: str, tensor: Scratch | Tensor) -> str:
        """Add a tensor that is the plan's own, and return its name."""
        self._slots[name] = len(self._slots)
        self.additions.append(tensor)
        if isinstance(tensor, Tensor):
            _OWNED.append(tensor)
        return name

    def _add_launch(self, launch: Launch, *names: str) -> None:
        """Add a launch with the tensors of these names, behind those that are there."""
        self.steps.append((launch, tuple(self._slots[name] for name in names)))

    def __call__(self, *tensors: Tensor) -> None:
        all_tensors = [
            *tensors,
            *(tensor.allocate(self._device) if isinstance(tensor, Scratch) else tensor for tensor in self.additions),
        ]
        for launch, slots in self.steps:
            launch(*[all_tensors[slot] for slot in slots])
