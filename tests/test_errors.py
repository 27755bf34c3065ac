import pytest
from torch import nn

from cs336sys.errors import a_value


@pytest.mark.parametrize(("value", "called"), [([], "a list"), (nn.Identity(), "an Identity"), (None, "None")])
def test_a_value_is_called_by_its_type_with_the_right_article(value, called):
    assert a_value(value) == called
