"""What cannot work is refused by name on every rank, and a lost rank is named."""

import ddp_faults_ranks
import pytest
from ddp_modes import EVERY_MODE, MODES
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        (
            "shape",
            "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 1.weight float32 (5, ",
        ),
        ("name", "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 2.weight"),
        ("dtype", "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 1.weight int32"),
        (
            "requires_grad",
            "0.bias float32 (4,) strides (1,) trained on rank 0, parameter 0.bias float32 (4,) strides (1,)",
        ),
        (
            "strides",
            "0.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 0.weight float32 (4, 4) strides",
        ),
        (
            "tie",
            "trained on rank 0, parameter 1.weight float32 (4, 4) strides (4, 1) trained tied to 0.weight on rank 1",
        ),
        ("missing", "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, nothing on rank"),
        ("buffer", "nothing on rank 0, buffer extra float32 (2,)"),
        ("mode", "NaiveDDP with cap_bytes=0.0, gradient_dtype=None on rank 0, OverlappedDDP with"),
        ("cap", "cap_bytes=1000000.0, gradient_dtype=None on rank 0, BucketedDDP with cap_bytes=2000000.0"),
        ("gradient_dtype", "gradient_dtype=None on rank 0, NaiveDDP with cap_bytes=0.0, gradient_dtype=torch.bfloat16"),
    ],
)
def test_layout_that_differs_is_named_on_every_rank(ranks, what, difference):
    for kind, message in ranks(2).run(ddp_faults_ranks.differing_layout, what):
        assert kind == "UsageError"
        assert message.startswith("ranks differ in what they train: ")
        assert difference in message


def test_layout_that_differs_on_the_last_of_three_ranks(ranks):
    for kind, message in ranks(3).run(ddp_faults_ranks.differing_layout, "dtype"):
        assert (kind, message[-7:]) == ("UsageError", " rank 2")


def test_wrong_arguments_are_refused(ranks):
    *sizes, dtype = ranks(1).run(ddp_faults_ranks.wrong_arguments)[0]
    assert [message for _, message in sizes] == [
        f"bucket size {size} MB: must be positive, or None for one bucket" for size in ("0", "-1.0", "nan")
    ]
    assert dtype == ("UsageError", "gradient_dtype torch.int32: choose a floating-point dtype")


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_wrapper_without_a_process_group_is_refused(mode):
    with pytest.raises(UsageError, match="needs a process group"):
        MODES[mode](nn.Linear(2, 2))


def test_rank_that_hangs_in_a_step_is_named_with_the_gradients_that_wait_for_it():
    with pytest.raises(RankError) as caught:
        launch.run(ddp_faults_ranks.lost_peer, world_size=2, backend="gloo")
    heading = str(caught.value).split("\n")[0]
    assert heading.startswith("rank 0 of 2: RuntimeError: ")
    assert "in the all-reduce of gradients of " in heading
    assert heading.endswith("still running: rank 1")
    assert "in lost_peer" in str(caught.value).split("rank 1 was here")[1]
