"""Ideal shares of the training state under each way of sharing it out, by hand and as the handout asks for them."""

import pytest

from cs336sys.accounting.memory import TrainingState
from cs336sys.accounting.sharding.ideal import OWN_SHARDING_STRATEGIES, ideal_state, sent_bytes

GB = 10**9


def test_state_of_100_parameters_in_half_precision_on_4_ranks():
    assert [ideal_state(strategy, 100, 4, 2) for strategy in OWN_SHARDING_STRATEGIES] == [
        TrainingState(200, 200, 800, 400),
        TrainingState(200, 200, 200, 100),
        TrainingState(200, 100, 200, 100),
        TrainingState(100, 100, 200),
    ]


def test_state_of_the_zero_paper():
    # ZeRO, figure 1: 7.5 B parameters in fp16 on 64 ranks: 120 GB, 31.4 GB with stage 1; all shared out 1.9 GB.
    assert ideal_state("none", 7.5 * GB, 64, 2).total == 120 * GB
    assert ideal_state("optimizer", 7.5 * GB, 64, 2).total == pytest.approx(31.4 * GB, rel=1e-3)
    assert ideal_state("fsdp", 7.5 * GB, 64).total == pytest.approx(1.9 * GB, rel=2e-2)


def test_bytes_sent_worked_by_hand():
    # 100 parameters on 4 ranks: three quarters travel; 2 * 4 bytes, 3 * 4, 2 * 4, and 2 * 4 + 4 gathered and scattered.
    assert [sent_bytes(strategy, 100, 4) for strategy in OWN_SHARDING_STRATEGIES] == [600, 900, 600, 900]
    assert sent_bytes("fsdp", 100, 4, compute_bytes=2) == 600
    assert sent_bytes("optimizer-flat", 100, 4, element_bytes=2) == 300
    assert [sent_bytes(strategy, 100, 1) for strategy in OWN_SHARDING_STRATEGIES] == [0, 0, 0, 0]
