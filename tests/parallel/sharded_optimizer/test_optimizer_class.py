"""Classes whose update is not computed element by element are found out."""

import pytest
import torch
from optimizer_models import CLASSES

from cs336sys.errors import UsageError
from cs336sys.parallel.elementwise import require_elementwise


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Adafactor"])
def test_element_wise_class_is_found_to_be_one(name):
    optimizer_cls, options = CLASSES[name]
    require_elementwise(optimizer_cls, options, torch.device("cpu"))


class NormalizedSteps(torch.optim.SGD):
    """As LAMB, scales a step by the norm of a whole parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


class NoisySteps(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter))
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer_cls", "reason"),
    [
        (torch.optim.Adafactor, "flat=True cannot shard Adafactor, whose update is not computed element by element"),
        (torch.optim.Muon, "flat=True cannot shard Muon, which cannot step a slice"),
        (torch.optim.SparseAdam, "flat=True cannot shard SparseAdam, which cannot step a slice"),
        (NormalizedSteps, "flat=True cannot shard NormalizedSteps, whose update is not computed element by element"),
        (NoisySteps, "flat=True cannot shard NoisySteps, whose update is not computed element by element"),
    ],
)
def test_class_that_is_not_element_wise_is_found_out(optimizer_cls, reason):
    before = torch.random.get_rng_state()
    with pytest.raises(UsageError) as caught:
        require_elementwise(optimizer_cls, {"lr": 0.1}, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert str(caught.value).startswith(reason)
    assert str(caught.value).endswith("choose flat=False")
