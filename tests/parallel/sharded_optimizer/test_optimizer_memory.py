"""Bytes held and communicated are those on paper."""

import dataclasses
import math

import optimizer_memory_ranks
import pytest
import torch
from optimizer_models import MODES
from same_tensors import assert_same

from cs336sys.accounting.sharding.partition import greedy_partition
from cs336sys.accounting.sharding.step import flat_optimizer_state, sharded_optimizer_state
from cs336sys.parallel.buckets import TensorSpec, assign_buckets
from cs336sys.parallel.ranks import launch


def test_whole_gradients_are_dropped_while_others_are_computed(ranks):
    """Eight buckets of 1024 bytes: three are alive at most, and none after the backward pass but two under way."""
    for most, gone in ranks(2).run(optimizer_memory_ranks.whole_gradients_alive, 1024e-6):
        assert most <= 3 * 1024
        assert gone


def test_each_byte_is_communicated_once_each_way(ranks):
    """Buckets of 800 bytes: last.weight alone, three vectors, the matrix alone, norm.weight, first.bias, first.weight.

    Alone is what is larger than 800 bytes. At two ranks, 240 elements are packed into 256, twice 48 into 64 each.
    """
    sizes = [240, 48 + 48 + 48, 2304, 48, 336]
    padded = [256, 64 + 64 + 64 + 64, 2304, 128, 384]
    for overlap in (False, True):
        for counts in ranks(2).run(optimizer_memory_ranks.communicated, "default", overlap):
            assert counts == {"Broadcasts": (len(sizes), 4 * sum(sizes))}
        for counts in ranks(2).run(optimizer_memory_ranks.communicated, "flat", overlap):
            once = len(padded), 4 * sum(padded)
            assert counts == {"MeanScatter": once, "SliceGather": once}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whole_parameters_of_a_rank_travel_as_one(ranks, world_size):
    """Alone stay those that are no multiple of 64 elements or have gaps, and the only one of a rank and dtype."""
    parameters = optimizer_memory_ranks.mixed_parameters()
    owners = greedy_partition([parameter.nbytes for parameter in parameters.values()], [0] * world_size)
    alone, together = [], {}
    for (name, parameter), owner in zip(parameters.items(), owners, strict=True):
        if name in ("odd", "nearly", "scalar", "every other"):
            alone.append((owner, parameter.nbytes))
        else:
            together.setdefault((owner, parameter.dtype), {})[name] = parameter.nbytes
    expected_moves = {name for members in together.values() if len(members) > 1 for name in members}
    expected = sorted([*alone, *((owner, sum(members.values())) for (owner, _), members in together.items())])
    for sent, moved, after, same_strides, offsets in ranks(world_size).run(optimizer_memory_ranks.moved_together):
        assert sorted(sent) == expected
        assert moved == expected_moves
        assert_same(after, {name: parameter.detach() * 0.5 for name, parameter in parameters.items()})
        assert same_strides
        assert not any(offsets)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("mode", "dtype", "master_dtype"),
    [
        ("default", torch.float32, None),
        ("flat", torch.float32, None),
        ("flat", torch.bfloat16, None),
        ("flat", torch.bfloat16, torch.float32),
    ],
)
def test_bytes_held_are_those_on_paper(ranks, mode, dtype, master_dtype, world_size):
    shapes, cap_mb = [(16, 24), (3,), (6, 64), (129,), (1,), (8, 8), (64,)], 0.0008
    sizes = [math.prod(shape) for shape in shapes]
    if mode == "default":
        expected = sharded_optimizer_state(sizes, world_size, element_bytes=dtype.itemsize)
    else:
        specs = [TensorSpec(index, size * dtype.itemsize) for index, size in enumerate(sizes)]
        expected = flat_optimizer_state(
            [[sizes[index] for index in bucket] for bucket in assign_buckets(specs, cap_mb * 1e6)],
            world_size,
            element_bytes=dtype.itemsize,
            master_bytes=0 if master_dtype is None else master_dtype.itemsize,
        )
    results = ranks(world_size).run(optimizer_memory_ranks.held_bytes, mode, shapes, dtype, master_dtype, cap_mb)
    assert results == [dataclasses.asdict(state) for state in expected]


@pytest.mark.multigpu
def test_optimizer_memory_halves_on_two_gpus():
    """16 parameters of 4 MiB: beside parameters, AdamW's moments are 128 MiB on one GPU, 64 on each of two."""
    mib = 2**20
    for held in launch.run(
        optimizer_memory_ranks.held_on_gpu,
        ["none", "torch", *MODES],
        [(1024, 1024)] * 16,
        world_size=2,
        backend="nccl",
    ):
        assert 128 * mib <= held["none"][0] < 129 * mib
        for mode in MODES:
            assert 64 * mib <= held[mode][0] < 65 * mib
        # Beside whole gradients, 64 MiB; flat has its half and three buckets of 16 MiB, and no copy of anything.
        assert held["default"][1] <= held["torch"][1] + mib
        assert held["flat"][1] <= (64 + 32 + 3 * 16 + 1) * mib
