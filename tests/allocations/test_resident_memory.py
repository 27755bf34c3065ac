"""Peak main memory of a stretch of work, in a process that held more before; and memory that a GPU gets back."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from cs336sys.machine import device
from cs336sys.parity import step
from cs336sys.run.cells import release_memory
from cs336sys.training.cuda_graphs import GraphedStep

# In a process of its own: where an allocator has kept what others freed, new memory may raise no peak.
PEAKS = """
import json
from cs336sys.machine import device

def hold(mib):
    return bytearray(b"\\1" * (mib << 20))

block = [hold(400)]
del block[:]
before_gib = device.reset_peak_resident()
after_reset_gib = device.peak_resident_gib()
block.append(hold(100))
del block[:]
print(json.dumps([before_gib, after_reset_gib, device.peak_resident_gib()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a stretch of work")
def test_a_peak_is_that_of_the_work_since_the_reset_and_not_of_the_process():
    found = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    before_gib, after_reset_gib, peak_gib = json.loads(found.stdout)
    assert after_reset_gib == pytest.approx(before_gib, abs=0.02), "what was held before is forgotten"
    assert 0.09 < peak_gib - before_gib < 0.25


def test_without_linux_no_peak_is_made_up(monkeypatch):
    def refused(self, text):
        raise PermissionError

    monkeypatch.setattr(device.Path, "write_text", refused)
    assert device.reset_peak_resident() is None


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
