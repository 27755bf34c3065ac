"""Numbers of ranks on which training is compared with one process."""

import pytest

# By default an even number and an odd one: one rank sends nothing, and four are cut as two and three are.
WORLD_SIZES = [2, 3, *(pytest.param(size, marks=pytest.mark.nightly) for size in (1, 4))]
