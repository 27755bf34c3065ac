"""Without a GPU, Triton kernels run in Triton's interpreter, and tests that need one are skipped with the reason."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it must be set before the first import of a kernel module.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    count = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and count < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("multigpu") and count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA GPUs, found {count}"))
