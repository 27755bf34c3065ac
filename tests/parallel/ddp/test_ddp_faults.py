"""What cannot work is refused by name on every rank, and a lost rank is named."""

import pytest
import torch
import torch.distributed as dist
from ddp_modes import MODES, each_mode
from on_ranks import on_ranks
from small_models import error_of, refusal_of
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP


def two_layers(outputs=4):
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, outputs))


# What rank 0 builds, what the last rank does, and the difference, of the lines in figures.txt.
DIFFERENCES = {
    "shape": (
        lambda: NaiveDDP(two_layers()),
        lambda: NaiveDDP(two_layers(outputs=5)),
        "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 1.weight float32 (5, ",
    ),
    "mode": (
        lambda: NaiveDDP(two_layers()),
        lambda: OverlappedDDP(two_layers()),
        "NaiveDDP with cap_bytes=0.0, gradient_dtype=None on rank 0, OverlappedDDP with",
    ),
    "cap and gradient_dtype": (
        lambda: BucketedDDP(two_layers(), 1.0),
        lambda: BucketedDDP(two_layers(), 2.0, gradient_dtype=torch.bfloat16),
        "cap_bytes=1000000.0, gradient_dtype=None on rank 0, BucketedDDP with cap_bytes=2000000.0, gradient_dtype=t",
    ),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_layout_that_differs_on_the_last_rank_is_named_on_every_rank(name):
    first, last, difference = DIFFERENCES[name]
    last_rank = dist.get_world_size() - 1
    message = refusal_of(last if dist.get_rank() == last_rank else first)
    assert message.startswith("ranks differ in what they train: ")
    assert difference in message
    assert message.endswith(f" on rank {last_rank}")


@on_ranks(1)
def test_wrong_arguments_are_refused():
    for size in (0, -1.0, float("nan")):
        message = f"bucket size {size} MB: must be positive, or None for one bucket"
        assert error_of(BucketedDDP, nn.Linear(2, 2), size) == ("UsageError", message)
    error = error_of(NaiveDDP, nn.Linear(2, 2), gradient_dtype=torch.int32)
    assert error == ("UsageError", "gradient_dtype torch.int32: choose a floating-point dtype")


@each_mode
def test_wrapper_without_a_process_group_is_refused(mode):
    with pytest.raises(UsageError, match="needs a process group"):
        MODES[mode](nn.Linear(2, 2))
