"""Launches that cost the CPU little: small kernels run for less time than Triton takes to start them."""

import itertools
from collections.abc import Sequence

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


class Descriptors:
    """How to describe to TMA one tensor after another, all with the same shape, strides, dtype and block."""

    descriptor_class = TensorDescriptor

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block_shape: list[int]):
        self.shape_and_strides = tuple(shape), tuple(strides)
        self._layout = (shape, strides, block_shape)

    def describe(self, tensor: torch.Tensor) -> TensorDescriptor:
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
        self.compiled = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        if self.compiled is None:
            self._compile(tensors)
            return
        # An address instead of a tensor saves a query to the CUDA driver.
        operands = [
            tensor.data_ptr() if descriptors is None else descriptors.describe(tensor)
            for tensor, descriptors in itertools.zip_longest(tensors, self.descriptors)
        ]
        stream = self._current_stream(self._device)
        self.compiled.run(self.num_programs, 1, 1, stream, *self._handle, *operands, *self.arguments)

    def _compile(self, tensors: Sequence[torch.Tensor]) -> None:
        """The first call, as Triton does it. The interpreter compiles nothing: there every call is the first."""
        operands = list(tensors)
        for index, descriptors in enumerate(self.descriptors):
            operands[index] = descriptors.describe(tensors[index])
        compiled = self._kernel[self.num_programs, 1, 1](*operands, *self.arguments, **self._options)
        if compiled is None:
            return
        self.compiled = compiled
        driver = triton.runtime.driver.active
        self._device, self._current_stream = driver.get_current_device(), driver.get_current_stream
        no_hooks = None, None, None
        self._handle = compiled.function, compiled.packed_metadata, *no_hooks
