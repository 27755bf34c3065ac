import math

import pytest
import torch


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_empty(monkeypatch):
    """Fills uninitialised memory with NaN, so that an element that a kernel leaves unwritten shows."""

    def poisoned(allocate):
        def allocate_nan(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                # Detached, because torch itself makes empty leaves that require gradients.
                tensor.detach().fill_(math.nan)
            return tensor

        return allocate_nan

    compiled_code = torch._C._dynamo.guards
    allocators = (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (compiled_code, "_empty_strided_cuda"),
    )
    for owner, name in allocators:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
