"""Ideal shares of the training state under each way of sharing it out, by hand and as the handout asks for them."""

import pytest

from cs336sys.accounting.sharding.ideal import ideal_state

GB = 10**9


def test_state_of_the_zero_paper():
    # ZeRO, figure 1: 7.5 B parameters in fp16 on 64 ranks: 120 GB, 31.4 GB with stage 1; all shared out 1.9 GB.
    assert ideal_state("none", 7.5 * GB, 64, 2).total == 120 * GB
    assert ideal_state("optimizer", 7.5 * GB, 64, 2).total == pytest.approx(31.4 * GB, rel=1e-3)
    assert ideal_state("fsdp", 7.5 * GB, 64).total == pytest.approx(1.9 * GB, rel=2e-2)
