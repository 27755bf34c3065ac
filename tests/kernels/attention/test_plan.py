"""Launches from the second one on: what the launcher is given."""

from types import SimpleNamespace

import pytest
import torch

from cs336sys.kernels.attention.plan import Descriptors, Launch


class RecordedKernel:
    """Compiles and launches like a kernel of Triton, but only takes down the arguments."""

    def __init__(self):
        self.first, self.later = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.first.append((grid, arguments, options))
            run = lambda *all_arguments: self.later.append(all_arguments)  # noqa: E731
            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        return launch


@pytest.mark.usefixtures("active_driver")
def test_first_call_gets_tensors_and_later_ones_addresses():
    kernel = RecordedKernel()
    launch = Launch(kernel, 5, (1.5, (2, 3)), (64,), num_warps=4)
    tensors = [torch.empty(4), torch.empty(4)]
    launch(*tensors)
    launch(*tensors)
    ((grid, (one, other, *numbers), options),) = kernel.first
    assert one is tensors[0]
    assert other is tensors[1]
    assert (grid, numbers, options) == ((5, 1, 1), [1.5, (2, 3), 64], {"num_warps": 4})
    addresses = [tensor.data_ptr() for tensor in tensors]
    handle = ["function", "metadata", None, None, None]
    assert kernel.later == [(5, 1, 1, "stream of 3", *handle, *addresses, 1.5, (2, 3), 64)]


@pytest.mark.usefixtures("active_driver")
def test_first_tensors_are_given_as_descriptors():
    kernel = RecordedKernel()
    launch = Launch(kernel, 1, (), (), [Descriptors((32, 64), (64, 1), [16, 64])])
    for _ in range(2):
        described, plain = torch.empty(32, 64), torch.empty(1)
        launch(described, plain)
    descriptor, address = kernel.later[0][-2:]
    assert descriptor.base is described
    assert (descriptor.shape, descriptor.strides, descriptor.block_shape) == ((32, 64), (64, 1), [16, 64])
    assert address == plain.data_ptr()
