from dataclasses import replace

import pytest

from cs336sys.kernels.attention import operators
from cs336sys.kernels.attention.triton import plans


@pytest.fixture
def fresh_plans():
    """Plans hold launch settings, which some tests replace."""
    operators.forget_plans()
    yield
    operators.forget_plans()


@pytest.fixture
def settings_of_a100(fresh_plans, monkeypatch):
    """Tiles by pointers, as GPUs without the resources of Hopper get them, here and on any GPU."""
    forward_settings, backward_settings = plans.forward_settings, plans.backward_settings

    def on_a100(problem):
        return replace(problem, capability=(8, 0), tma_allowed=False)

    monkeypatch.setattr(plans, "forward_settings", lambda problem: forward_settings(on_a100(problem)))
    monkeypatch.setattr(
        plans, "backward_settings", lambda problem, deterministic: backward_settings(on_a100(problem), deterministic)
    )
