"""Launches from the second one on: what the launcher is given."""

import weakref
from types import SimpleNamespace

import torch
import triton

from cs336sys.kernels.attention.plan import Descriptors, Launch, Plan


class RecordedKernel(dict):
    """Compiles and launches like a kernel of Triton, but only takes down the arguments, by the grid."""

    def __missing__(self, grid):
        def launch(*arguments, **options):
            self[grid] = arguments, options
            run = lambda *all_arguments: self.update(later=all_arguments)  # noqa: E731
            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        return launch


def test_first_call_gets_tensors_and_later_ones_addresses_and_descriptors(monkeypatch):
    driver = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    kernel = RecordedKernel()
    layout = (32, 64), (64, 1), [16, 64]
    launch = Launch(kernel, 5, (1.5, (2, 3)), (64,), [Descriptors(*layout)], num_warps=4)
    for _ in range(2):
        tensors = described, plain = torch.empty(32, 64), torch.empty(4)
        launch(*tensors)
        if "later" not in kernel:
            (first, tensor, *numbers), options = kernel[5, 1, 1]
            assert (first.base, tensor) == (described, plain)
            assert (numbers, options) == ([1.5, (2, 3), 64], {"num_warps": 4})
    *where, descriptor, address, number, pair, constant = kernel["later"]
    assert where == [5, 1, 1, "stream of 3", "function", "metadata", None, None, None]
    assert descriptor.base is described
    assert (descriptor.shape, descriptor.strides, descriptor.block_shape) == layout
    assert (address, number, pair, constant) == (plain.data_ptr(), 1.5, (2, 3), 64)


def test_graphs_may_read_the_tables_of_a_plan_that_is_forgotten():
    plan = type("Plan", (Plan,), {"tensor_names": ()})(torch.device("cpu"))
    plan._add_tensor("schedule", torch.zeros(3))
    table = weakref.ref(plan.additions[0])
    del plan
    assert table() is not None
