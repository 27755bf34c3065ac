"""What cannot work is refused by name; training goes on after a failed step; a lost rank is named."""

import fsdp_faults_ranks
import pytest
import torch
from same_tensors import assert_same

from cs336sys.errors import UsageError
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError


def test_training_goes_on_after_a_step_that_failed_on_all_ranks(ranks):
    in_forward, in_backward, undisturbed = ranks(2).run(fsdp_faults_ranks.recovers)[0]
    assert in_forward[0] == in_backward[0] == [("ArithmeticError", "")]
    for _, weights, gathered in (in_forward, in_backward):
        assert_same(weights, undisturbed[1])
        assert gathered == {}


def test_impossible_combination_is_refused_by_name(ranks):
    for errors in ranks(2).run(fsdp_faults_ranks.refusals):
        assert {kind for kind, _ in errors.values()} == {"UsageError"}
        messages = {what: message for what, (_, message) in errors.items()}
        assert messages["again"] == "the module (FSDP) is wrapped already: wrap the plain module"
        assert messages["the inside again"] == "0 (Sequential) is wrapped already: wrap the plain module"
        assert messages["over DDP"] == "0 (OverlappedDDP) is wrapped already: wrap the plain module"
        assert messages["over torch's"] == "the module (FSDPSequential) is wrapped already: wrap the plain module"
        assert messages["prefetch"] == "prefetch -1: must be at least 0"
        for name in ("compute_dtype", "gradient_dtype"):
            assert messages[name] == f"{name} torch.int8: choose a floating-point dtype"
        assert messages["moved"] == "an FSDP module cannot be moved or converted: do it before it is wrapped"
        assert messages["copied"].startswith("an FSDP module cannot be copied or pickled")
        assert messages["assigned"].startswith("assign=True would replace the slices")
        assert messages["sparse"] == "weight has a sparse gradient, which cannot be averaged: choose sparse=False"
        assert messages["another group"].startswith("this FSDP module was built in another process group")


def test_forward_and_construction_outside_a_process_group_are_refused(ranks):
    for (kind, message), construction in ranks(2).run(fsdp_faults_ranks.outside_the_group):
        assert kind == "UsageError"
        assert message.startswith("this FSDP module was built in another process group")
        assert construction[0] == "UsageError"
    with pytest.raises(UsageError, match="FSDP needs a process group"):
        FSDP(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("shape", "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 1.weight float32 (5"),
        (
            "settings",
            "keep_gathered=0, gradient_dtype=None, units=['0', '1'] on rank 0, FSDP with compute_dtype=None, pref",
        ),
        ("units", "gradient_dtype=None, units=['0', '1'] on rank 0, FSDP with compute_dtype=None, prefetch=1, keep_g"),
    ],
)
def test_ranks_that_build_something_else_are_told_on_every_rank(ranks, what, difference):
    for kind, message in ranks(2).run(fsdp_faults_ranks.differing_layout, what):
        assert kind == "UsageError"
        assert message.startswith("ranks differ in what they train: ")
        assert difference in message


def test_rank_that_hangs_in_a_step_is_named_with_the_weights_that_wait_for_it():
    with pytest.raises(RankError) as caught:
        launch.run(fsdp_faults_ranks.lost_peer, world_size=2, backend="gloo")
    heading = str(caught.value).split("\n")[0]
    assert heading.startswith("rank 0 of 2: RuntimeError: ")
    assert "in the all-gather of weights of token_embeddings" in heading
    assert heading.endswith("still running: rank 1")
