"""Saved tensors of code whose residuals are known, among them the 2026 handout's own example."""

import gc
import weakref

import torch
from torch import nn

from cs336sys.allocations.recorder import saved_tensors


class HandoutNorm(nn.Module):
    """RMSNorm as the handout's section 3.1 writes it."""

    def __init__(self, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x):
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * rms
        return self.weight * x


def test_handouts_norm():
    """The handout's hooks see six: x twice, rms twice, x * rms, and the weight, which is there anyway."""
    model = nn.Sequential(HandoutNorm(10))
    x = torch.randn(4, 5, 10, requires_grad=True)
    names = {module: name for name, module in model.named_modules()}
    found = saved_tensors(lambda: model(x), model.parameters(), names)
    assert [(t.shape, t.size, t.operation, t.module) for t in found] == [
        ((4, 5, 10), 800, "input", "0"),
        ((4, 5, 10), 800, "Mul", "0"),
        ((4, 5, 1), 80, "Rsqrt", "0"),
    ]
    assert all(t.dtype == "float32" and " forward" in t.code for t in found)
    assert "allocations/test_saved_tensors.py:" in found[0].code


def test_nothing_stays_alive():
    """A node that saves its own result, as exp does, must not be kept alive by it."""
    made = []

    def run():
        result = torch.ones(3, requires_grad=True).exp()
        made.append(weakref.ref(result.untyped_storage()))
        return result

    assert len(saved_tensors(run, [])) == 1
    gc.collect()
    assert made[0]() is None


def test_views_of_parameters_do_not_count_and_other_views_count_whole():
    """A transposed weight is the parameter's own storage; of a slice the whole storage lives on."""
    weight = nn.Parameter(torch.randn(6, 4))
    x = torch.randn(5, 6, requires_grad=True)
    assert [t.shape for t in saved_tensors(lambda: x @ weight.T.T, [weight])] == [(5, 6)]
    (found,) = saved_tensors(lambda: x.exp()[:2].sin(), [])
    assert (found.shape, found.size, found.operation) in {((5, 6), 120, "Exp"), ((2, 6), 120, "Exp")}


def test_operation_is_found_behind_views():
    x = torch.randn(8, 3, requires_grad=True)
    (found,) = saved_tensors(lambda: (x * 2).view(4, 6).T.sin(), [])
    assert (found.shape, found.operation) == ((6, 4), "Mul")
