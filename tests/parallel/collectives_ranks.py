"""What the ranks of test_collectives run: functions that spawned processes can import."""

import torch
import torch.distributed as dist

from cs336sys.parallel import collectives


def mean_of(tensors_of_rank, dtype):
    """Means of tensors that hold these numbers."""
    tensors = [torch.tensor(numbers, dtype=dtype) for numbers in tensors_of_rank[dist.get_rank()]]
    reduction = collectives.MeanReduction(dtype, tensors[0].device, "tensors")
    reduction.start(tensors)
    reduction.wait()
    return [tensor.tolist() for tensor in tensors]


def gather_and_scatter():
    """Both spellings of the shims: all ranks' parts everywhere, and sums of the own parts."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    gathered = torch.zeros(2 * world_size)
    collectives.all_gather_single(gathered, torch.tensor([rank, 10.0 * rank]))
    scattered = torch.zeros(2)
    collectives.reduce_scatter_single(scattered, torch.arange(2.0 * world_size) + rank)
    return gathered.tolist(), scattered.tolist(), collectives.gather_objects({"rank": rank})


def any_rank(facts_of_rank):
    return collectives.AnyRank(facts_of_rank[dist.get_rank()], torch.device("cpu")).wait()


def warnings_of_the_shims():
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gather_and_scatter()
        mean_of([[[1.0], [2.0]]] * dist.get_world_size(), torch.float32)
    return [str(warning.message) for warning in caught if issubclass(warning.category, FutureWarning)]


def operations(dtype):
    """Scatter, gather and broadcasts of the collectives module, on integers."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = collectives.group_device()
    wholes = [torch.arange(n * world_size, dtype=dtype, device=device) * 6 + 6 * rank for n in (3, 1)]
    slices = [torch.empty(n, dtype=dtype, device=device) for n in (3, 1)]
    scatter = collectives.MeanScatter(dtype, device, "numbers")
    scatter.start(slices, wholes)
    scatter.wait()
    gathered = [torch.full((n * world_size,), -1, dtype=dtype, device=device) for n in (2, 5)]
    for tensor in gathered:
        tensor.chunk(world_size)[rank].fill_(rank)
    gather = collectives.SliceGather(gathered, "numbers")
    gather.start()
    gather.wait()
    sent = [
        torch.full((4, 3), rank, dtype=dtype, device=device).t(),
        torch.full((2, 4), rank, dtype=dtype, device=device)[:, ::2],
    ]
    broadcasts = collectives.Broadcasts(sent, [world_size - 1, 0], "numbers")
    for _ in range(2):
        broadcasts.start()
        broadcasts.wait()
    return [[tensor.cpu().tolist() for tensor in tensors] for tensors in (slices, gathered, sent)]
