"""What cannot work is refused by name; training goes on after a failed step; a lost rank is named."""

import copy

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from small_models import error_of, refusal_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from cs336sys.errors import UsageError
from cs336sys.parallel.ddp import OverlappedDDP
from cs336sys.parallel.fsdp import FSDP


@on_ranks(2)
def test_impossible_combination_is_refused_by_name():
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sharded, sparse = FSDP(plain), FSDP(nn.Embedding(5, 3, sparse=True))
    wrapped = "is wrapped already: wrap the plain module"
    for error, beginning in (
        (error_of(FSDP, sharded), f"the module (FSDP) {wrapped}"),
        (error_of(FSDP, nn.Sequential(plain)), f"0 (Sequential) {wrapped}"),
        (error_of(FSDP, nn.Sequential(OverlappedDDP(nn.Linear(2, 2)))), f"0 (OverlappedDDP) {wrapped}"),
        (error_of(FSDP, fully_shard(nn.Sequential(nn.Linear(2, 2)))), f"the module (FSDPSequential) {wrapped}"),
        (error_of(FSDP, nn.Linear(2, 2), prefetch=-1), "prefetch -1: must be at least 0"),
        (
            error_of(FSDP, nn.Linear(2, 2), torch.int8),
            "compute_dtype torch.int8: choose a floating-point dtype",
        ),
        (
            error_of(FSDP, nn.Linear(2, 2), gradient_dtype=torch.int8),
            "gradient_dtype torch.int8: choose a floating-point dtype",
        ),
        (
            error_of(sharded.to, torch.float16),
            "an FSDP module cannot be moved or converted: do it before it is wrapped",
        ),
        (error_of(copy.deepcopy, sharded), "an FSDP module cannot be copied or pickled"),
        (
            error_of(sparse(torch.tensor([1, 2])).sum().backward),
            "weight has a sparse gradient, which cannot be averaged: choose sparse=False",
        ),
    ):
        assert error[0] == "UsageError"
        assert error[1].startswith(beginning)


@on_ranks(2)
def test_passes_in_another_group_or_outside_of_one_are_refused():
    sharded = FSDP(nn.Linear(2, 2))
    world_size = dist.get_world_size()
    for name, replacement in (("get_world_size", lambda: world_size + 1), ("is_initialized", lambda: False)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(dist, name, replacement)
            message = refusal_of(sharded, torch.ones(1, 2))
            assert message.startswith("this FSDP module was built in another process group")


def test_construction_outside_a_process_group_is_refused():
    with pytest.raises(UsageError, match="FSDP needs a process group"):
        FSDP(nn.Linear(2, 2))


@on_ranks(2)
def test_ranks_that_build_something_else_are_told_on_every_rank():
    is_first = dist.get_rank() == 0
    for outputs, prefetch, difference in (
        (5, 1, "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 1.weight float32 (5"),
        (4, 2, "gradient_dtype=None, units=['0', '1'] on rank 0, FSDP with compute_dtype=None, prefetch=2, keep_g"),
    ):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 if is_first else outputs))
        message = refusal_of(FSDP, module, prefetch=1 if is_first else prefetch)
        assert message.startswith("ranks differ in what they train: ")
        assert difference in message
