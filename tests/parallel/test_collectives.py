"""Collectives: the same results under every version's names, exact on integers, means that do not overflow."""

import warnings

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from cs336sys.parallel import collectives


def mean_of(of_rank, dtype=torch.float32):
    """Means of tensors that hold these numbers."""
    tensors = [torch.tensor(numbers, dtype=dtype) for numbers in of_rank[dist.get_rank()]]
    reduction = collectives.MeanReduction(dtype, tensors[0].device, "tensors")
    reduction.start(tensors)
    reduction.wait()
    return [tensor.tolist() for tensor in tensors]


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_mean_in_other_dtypes(dtype):
    assert mean_of([[[1.0, 8.0]], [[3.0, 0.0]]], dtype) == [[2.0, 4.0]]


@on_ranks(2)
def test_mean_in_fp16_does_not_overflow_where_the_sum_would():
    """60,000 + 40,000 is more than fp16's largest number, 65,504."""
    assert mean_of([[[60_000.0], [1.0]], [[40_000.0], [2.0]]], torch.float16) == [[49_984.0], [1.5]]


@on_ranks(3)
def test_gather_and_scatter_under_either_name_without_a_warning():
    rank, gathered, scattered = dist.get_rank(), torch.zeros(6), torch.zeros(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        collectives.all_gather_single(gathered, torch.tensor([rank, 10.0 * rank]))
        collectives.reduce_scatter_single(scattered, torch.arange(6.0) + rank)
        mean_of([[[1.0], [2.0]]] * 3)
    assert gathered.tolist() == [0.0, 0.0, 1.0, 10.0, 2.0, 20.0]
    assert scattered.tolist() == [6.0 * rank + 3.0, 6.0 * rank + 6.0]
    assert collectives.gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


@on_ranks(1, 2, 3, gpus=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scatter_gather_and_broadcasts_of_integers_are_exact(dtype):
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), collectives.group_device()
    options = {"dtype": dtype, "device": device}
    wholes = [torch.arange(n * world_size, **options) * 6 + 6 * rank for n in (3, 1)]
    slices = [torch.empty(n, **options) for n in (3, 1)]
    scatter = collectives.MeanScatter(dtype, device, "numbers")
    scatter.start(slices, wholes)
    scatter.wait()
    shift = 3.0 * (world_size - 1)
    assert [part.tolist() for part in slices] == [[6.0 * (rank * n + i) + shift for i in range(n)] for n in (3, 1)]
    gathered = [torch.full((n * world_size,), -1, **options) for n in (2, 5)]
    for tensor in gathered:
        tensor.chunk(world_size)[rank].fill_(rank)
    gather = collectives.SliceGather(gathered, "numbers")
    gather.start()
    gather.wait()
    for tensor, n in zip(gathered, (2, 5), strict=True):
        assert tensor.tolist() == [float(number) for number in range(world_size) for _ in range(n)]
    sent = [torch.full((4, 3), rank, **options).t(), torch.full((2, 4), rank, **options)[:, ::2]]
    broadcasts = collectives.Broadcasts(sent, [world_size - 1, 0], "numbers")
    for _ in range(2):
        broadcasts.start()
        broadcasts.wait()
    assert [tensor.tolist() for tensor in sent] == [[[world_size - 1.0] * 4] * 3, [[0.0] * 2] * 2]
