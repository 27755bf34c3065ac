"""Ideal shares of the training state under each way of sharing it out, by hand and as the handout asks for them."""

import pytest

from cs336sys.accounting.memory import TrainingState
from cs336sys.accounting.sharding.ideal import (
    OWN_SHARDING_STRATEGIES,
    ideal_state,
    sent_bytes,
    state_answers,
)
from cs336sys.settings.sizes import SIZES

GB = 10**9


@pytest.mark.parametrize(
    ("strategy", "element_bytes", "state"),
    [
        ("none", 4, TrainingState(400, 400, 800)),
        ("none", 2, TrainingState(200, 200, 800, 400)),
        ("optimizer", 4, TrainingState(400, 400, 200)),
        ("optimizer", 2, TrainingState(200, 200, 200, 100)),
        ("optimizer-flat", 4, TrainingState(400, 100, 200)),
        ("optimizer-flat", 2, TrainingState(200, 100, 200, 100)),
        ("fsdp", 4, TrainingState(100, 100, 200)),
        ("fsdp", 2, TrainingState(100, 100, 200)),
    ],
)
def test_state_of_100_parameters_on_4_ranks(strategy, element_bytes, state):
    assert ideal_state(strategy, 100, 4, element_bytes) == state


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


def test_answers_are_the_ideal_shares():
    found = {answer.quantity: answer for answer in state_answers(SIZES["xl"], 2, "fsdp")}
    p = 1_998_235_200
    assert found["fsdp: after model initialization"].value == 2 * p
    assert found["fsdp: directly before the first step"].value == 4 * p
    assert found["fsdp: directly after the first step"].value == 8 * p
    assert found["fsdp: less than none"].value == 8 * p
    assert found["fsdp: less than optimizer"].value == 4 * p
    assert found["fsdp: optimizer state"].derivation(str) == f"o = 8 P / N = 8 x {p} / 2"
    found = {answer.quantity: answer for answer in state_answers(SIZES["xl"], 2, "optimizer", element_bytes=2)}
    assert found["optimizer: fp32 master parameters"].value == 2 * p
    assert found["optimizer: directly after the first step"].value == 2 * p + 2 * p + 4 * p + 2 * p
