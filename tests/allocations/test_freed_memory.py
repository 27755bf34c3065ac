import pytest
import torch
from torch import nn

from cs336sys.parity import step
from cs336sys.run.cells import release_memory
from cs336sys.training.cuda_graphs import GraphedStep


@pytest.mark.parametrize(
    "free", [release_memory, lambda: step._free_memory(torch.device("cuda"))], ids=["cell", "check"]
)
def test_workspaces_of_cublas_are_given_back_before_the_cache_is_emptied(monkeypatch, free):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cache"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("workspaces"), raising=False)
    free()
    assert calls == ["workspaces", "cache"]


@pytest.mark.gpu
def test_gpu_holds_as_much_after_every_step_in_graphs():
    """Each has a stream of its own, and a product forward and backward has a workspace on it."""
    held = []
    for _ in range(3):
        layer, batch = nn.Linear(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")

        def step(layer=layer, batch=batch):
            layer.zero_grad()
            layer(batch).sum().backward()

        GraphedStep({"step": step}, (batch,))()
        del step, layer, batch
        release_memory()
        held.append(torch.cuda.memory_allocated())
    assert held == held[:1] * 3
