"""Classes whose update is not computed element by element are found out; for made up rules see figures.txt."""

import pytest
import torch
from optimizer_models import CLASSES, SwitchedNorm
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel.elementwise import require_elementwise
from cs336sys.parallel.gradient_slices import mark_slice

CPU = torch.device("cpu")


def of_a_slice(optimizer_cls, **options):
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.grad = torch.ones(3, 4)
    mark_slice(parameter)
    return optimizer_cls([parameter], **options)


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Adafactor"])
def test_element_wise_class_is_found_to_be_one_and_steps_slices(name):
    optimizer_cls, options = CLASSES[name]
    require_elementwise(optimizer_cls, options, CPU, {})
    optimizer = of_a_slice(optimizer_cls, **options)
    for _ in range(2):
        optimizer.step()


class OfOneRate(torch.optim.Optimizer):
    """Keeps what it is made with to itself."""

    def __init__(self, params, rate):
        super().__init__(params, {})
        self.rate = rate

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=self.rate)


@pytest.mark.parametrize(
    ("optimizer_cls", "options", "sentence"),
    [
        (torch.optim.Muon, {}, "Muon, whose update is not computed element by element"),
        (torch.optim.SparseAdam, {}, "SparseAdam, which cannot step a slice"),
        (OfOneRate, {"rate": 0.1}, "OfOneRate, which cannot be tried on a small matrix .*: set updates_elementwise = "),
    ],
)
def test_other_classes_refuse_to_step_slices(optimizer_cls, options, sentence):
    optimizer, before = of_a_slice(optimizer_cls, **options), torch.random.get_rng_state()
    for _ in range(2):
        with pytest.raises(UsageError, match=f"slices of FSDP or TensorParallel cannot be updated by {sentence}"):
            optimizer.step()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3, 4))


def test_options_that_change_between_steps_are_tried():
    optimizer = of_a_slice(SwitchedNorm, lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["by_norm"] = True
    with pytest.raises(UsageError, match="SwitchedNorm, whose update is not computed element by element"):
        optimizer.step()
