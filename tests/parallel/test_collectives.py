"""Collectives: the same results under every version's names, exact on integers, means that do not overflow."""

import collectives_ranks
import pytest
import torch
import torch.distributed as dist

from cs336sys.errors import UsageError
from cs336sys.parallel import collectives


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_mean_of_several_tensors_of_integers_is_exact(ranks, world_size):
    tensors = [[[6.0 * rank, 60.0], [-12.0 * rank], []] for rank in range(world_size)]
    mean = (world_size - 1) / 2
    results = ranks(world_size).run(collectives_ranks.mean_of, tensors, torch.float32)
    assert results == [[[6.0 * mean, 60.0], [-12.0 * mean], []]] * world_size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_mean_in_other_dtypes(ranks, dtype):
    assert ranks(2).run(collectives_ranks.mean_of, [[[1.0, 8.0]], [[3.0, 0.0]]], dtype) == [[[2.0, 4.0]]] * 2


def test_mean_in_fp16_does_not_overflow_where_the_sum_would(ranks):
    """60,000 + 40,000 is more than fp16's largest number, 65,504."""
    tensors = [[[60_000.0], [1.0]], [[40_000.0], [2.0]]]
    assert ranks(2).run(collectives_ranks.mean_of, tensors, torch.float16) == [[[49_984.0], [1.5]]] * 2


def test_gather_and_scatter_under_either_name(ranks):
    assert ranks(3).run(collectives_ranks.gather_and_scatter) == [
        (
            [0.0, 0.0, 1.0, 10.0, 2.0, 20.0],
            [6.0 * rank + 3.0, 6.0 * rank + 6.0],
            [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        )
        for rank in range(3)
    ]


def test_no_warning_of_outdated_names(ranks):
    assert ranks(2).run(collectives_ranks.warnings_of_the_shims) == [[], []]


@pytest.mark.parametrize(
    ("facts", "anywhere"),
    [
        ([[True, True], [True, True]], [True, True]),
        ([[True, False, False], [True, True, False]], [True, True, False]),
        ([[False], [False]], [False]),
    ],
)
def test_fact_holds_if_it_holds_on_any_rank(ranks, facts, anywhere):
    assert ranks(2).run(collectives_ranks.any_rank, facts) == [anywhere] * 2


def test_memory_view_sees_the_same_memory_in_memory_order():
    matrix = torch.arange(6.0).view(2, 3)
    assert collectives.memory_view(matrix).data_ptr() == matrix.data_ptr()
    view = collectives.memory_view(matrix[1:].t())
    assert view.tolist() == [[3.0], [4.0], [5.0]] or view.tolist() == [3.0, 4.0, 5.0]
    assert collectives.memory_view(matrix.t()).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_process_group_is_asked_for():
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match=r"ThisClass needs a process group: .*launch\.run"):
        collectives.require_process_group("ThisClass")


@pytest.mark.multigpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_on_two_gpus(two_gpus, dtype):
    results = two_gpus.run(collectives_ranks.operations, dtype)
    assert results == [expected_operations(rank, 2) for rank in range(2)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scatter_gather_and_broadcasts_of_integers_are_exact(ranks, world_size, dtype):
    results = ranks(world_size).run(collectives_ranks.operations, dtype)
    assert results == [expected_operations(rank, world_size) for rank in range(world_size)]


def expected_operations(rank, world_size):
    shift = 3.0 * (world_size - 1)
    slices = [[6.0 * (rank * n + i) + shift for i in range(n)] for n in (3, 1)]
    gathered = [[float(other) for other in range(world_size) for _ in range(n)] for n in (2, 5)]
    last = float(world_size - 1)
    return [slices, gathered, [[[last] * 4] * 3, [[0.0] * 2] * 2]]
