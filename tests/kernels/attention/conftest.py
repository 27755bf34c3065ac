import pytest

from cs336sys.kernels.attention import operators


@pytest.fixture
def fresh_plans():
    """Plans hold launch settings, which some tests replace."""
    operators.forget_plans()
    yield
    operators.forget_plans()
