"""Launches that cost the CPU little: small kernels run for less time than Triton takes to start them."""

import functools
import inspect
import itertools
from collections.abc import Sequence

import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg
from triton.tools.tensor_descriptor import TensorDescriptor

# More tensors of one kind than a model has layers; a descriptor takes about 1 KB.
MAX_ENCODED = 256


class Descriptors:
    """TMA descriptors of one tensor after another, all with the same shape, strides, dtype and block.

    What the GPU is given depends on nothing else but the address, so it is remembered by address: the allocator has few
    and gives them again and again.
    """

    descriptor_class = TensorDescriptor

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block_shape: list[int]):
        self._layout = (shape, strides, block_shape)
        self._encode = None
        self._encoded: dict[int, list] = {}

    def describe(self, tensor: torch.Tensor) -> TensorDescriptor:
        return self.descriptor_class(tensor, *self._layout)

    def encode_by(self, encode) -> None:
        """From now on gives what ``encode`` makes of a descriptor, which must not hold the tensor."""
        self._encode = encode

    def __call__(self, tensor: torch.Tensor) -> list:
        """The launcher's arguments for a tensor."""
        address = tensor.data_ptr()
        arguments = self._encoded.get(address)
        if arguments is None:
            descriptor = self.describe(tensor)
            if self._encode is None:
                return [descriptor]
            if len(self._encoded) >= MAX_ENCODED:
                self._encoded.clear()
            arguments = self._encoded[address] = self._encode(descriptor)
        return arguments


class Launch:
    """A kernel with its grid, its numbers and its compile-time constants; called with its tensors.

    From the second call on it bypasses Triton's binding of arguments, which takes longer than a small kernel runs. That
    is right because whatever Triton specialises on is fixed in a plan: the device, the numbers, dtypes and alignment.

    Args:
        descriptors: for the first of the tensors, which the kernel takes by TMA descriptors; the others it takes by
            address.
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
        self._grid = (num_programs, 1, 1)
        self._arguments = (*numbers, *constants)
        self._descriptors = descriptors
        self._options = options
        self._compiled = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        if self._compiled is None:
            self._compile(tensors)
            return
        # An address instead of a tensor saves a query to the CUDA driver.
        if self._descriptors:
            operands = []
            for tensor, descriptors in itertools.zip_longest(tensors, self._descriptors):
                if descriptors is None:
                    operands.append(tensor.data_ptr())
                else:
                    operands += descriptors(tensor)
        else:
            operands = map(torch.Tensor.data_ptr, tensors)
        stream = self._current_stream(self._device)
        self._start(*self._grid, stream, *self._handle, *operands, *self._arguments)

    def _compile(self, tensors: Sequence[torch.Tensor]) -> None:
        """The first call, as Triton does it. The interpreter compiles nothing: there every call is the first."""
        operands = list(tensors)
        for index, descriptors in enumerate(self._descriptors):
            operands[index] = descriptors.describe(tensors[index])
        compiled = self._kernel[self._grid](*operands, *self._arguments, **self._options)
        if compiled is None:
            return
        self._compiled = compiled
        driver = triton.runtime.driver.active
        self._device, self._current_stream = driver.get_current_device(), driver.get_current_stream
        run, no_hooks, no_scratch = compiled.run, (None, None, None), (None, None)
        self._start = run
        self._handle = (compiled.function, compiled.packed_metadata, *no_hooks)
        if _has_known_launcher(run):
            self._start = _below_descriptors(run.launch)
            attributes = run.launch_cooperative_grid, run.launch_pdl
            self._handle = (compiled.function, *attributes, *no_scratch, compiled.packed_metadata, *no_hooks)
            for descriptors, metadata in zip(self._descriptors, compiled.metadata.tensordesc_meta or (), strict=True):
                descriptors.encode_by(functools.partial(make_tensordesc_arg, metadata=metadata))


def _has_known_launcher(run) -> bool:
    """Whether a kernel is launched by triton 3.6's function in C, which needs no more than this module gives it.

    To call it saves 0.7 us of 1.1 us a launch and, by remembering, 1.1 us of 1.4 us a descriptor.
    """
    known = triton.__version__.startswith("3.6.") and isinstance(run, CudaLauncher)
    return known and not run.global_scratch_size and not run.profile_scratch_size


def _below_descriptors(launch):
    """The function in C without the one in Python around it, which encodes all descriptors at every launch."""
    return inspect.getclosurevars(launch).nonlocals["launcher"] if inspect.isfunction(launch) else launch
