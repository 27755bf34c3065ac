"""All-reduces run in one order on all ranks, while the backward pass runs, whoever comes late."""

import ddp_order_ranks
import ddp_training_ranks
import pytest
import torch
from ddp_modes import EVERY_MODE
from same_tensors import assert_same


def test_launch_order_is_the_same_when_gradients_become_ready_in_another(ranks):
    """A hook that launches at once would add one branch's gradient to another's without an error."""
    results = ranks(2).run(ddp_order_ranks.differently_ordered, [(0, 1, 2, 3), (2, 0, 3, 1)])
    for mode in EVERY_MODE:
        (averaged, first_ready, launches), (others, second_ready, other_launches) = (result[mode] for result in results)
        assert first_ready == [3, 2, 1, 0]
        assert second_ready == [1, 3, 0, 2]
        assert launches == other_launches
        assert [name for names in launches for name in names.split(", ")] == [f"branches.{i}" for i in (3, 2, 1, 0)]
        assert_same(averaged, {f"branches.{i}": torch.full((3,), 1.5 * (i + 1)) for i in range(4)})
        assert_same(averaged, others)


def test_delays_change_nothing(ranks):
    expected = ranks(2).run(ddp_training_ranks.train_all, EVERY_MODE, torch.float32, 2)[0]
    for seed in range(3):
        for result in ranks(2).run(ddp_order_ranks.train_with_delays, seed):
            for mode in EVERY_MODE:
                assert_same(result[mode], expected[mode])


def test_launches_overlap_the_backward_pass_where_they_should(ranks):
    for result in ranks(2).run(ddp_order_ranks.launches_in_time):
        # In backward order: last.weight, second.bias, second.weight (tied), norm.bias, norm.weight, first.bias,
        # first.weight: 260, 52, 676, 52, 52, 52 and 364 bytes.
        sizes = {mode: [sum(elements) for _, elements, _ in launches] for mode, (_, _, launches) in result.items()}
        assert sizes["naive"] == sizes["overlap"] == [65, 13, 169, 13, 13, 13, 91]
        assert sizes["bucketed"] == [65 + 13, 169, 13 + 13 + 13, 91]
        assert sizes["one bucket"] == [65 + 13 + 169 + 13 + 13 + 13 + 91]
        # One tensor, every gradient from a multiple of 64 elements on.
        assert [elements for _, elements, _ in result["flat"][2]] == [[128 + 64 + 192 + 64 + 64 + 64 + 128]]
        for mode in ("naive", "flat"):
            assert result[mode][:2] == (0, 0)
        assert result["one bucket"][:2] == (0, 1)
        for mode, least in (("overlap", 5), ("bucketed", 2)):
            before_last, in_backward, launches = result[mode]
            assert before_last >= least
            assert in_backward == len(launches)


def test_collective_of_the_caller_comes_in_order_though_ranks_lack_other_gradients(ranks):
    alone = [ddp_order_ranks.chained_alone(rank) for rank in range(2)]
    expected = [
        {name: sum(0 if one[name] is None else one[name] for one in of_ranks) / 2 for name in of_ranks[0]}
        for of_ranks in zip(*alone, strict=True)
    ]
    results = ranks(2).run(ddp_order_ranks.collective_between)
    for mode in results[0]:
        for steps in zip(*(result[mode] for result in results), strict=True):
            losses = [loss for loss, *_ in steps]
            for _, total, averages in steps:
                assert (total == sum(losses)).all(), mode
                for average, wanted in zip(averages, expected, strict=True):
                    assert_same(average, wanted)


def test_second_pass_over_other_parameters_is_refused_where_the_first_has_launched(ranks):
    for result in ranks(2).run(ddp_order_ranks.separate_passes):
        for mode in EVERY_MODE:
            error, averaged = result[mode]
            if mode in ("naive", "flat"):
                assert error is None
            else:
                assert error[0] == "UsageError"
                assert "run all passes of a step but the last under no_sync()" in error[1]
            assert_same(averaged, {f"branches.{i}": torch.full((3,), 1.5 * (i + 1)) for i in range(4)})


@pytest.mark.multigpu
def test_delays_change_nothing_on_two_gpus(two_gpus):
    expected = two_gpus.run(ddp_training_ranks.train_all, EVERY_MODE, torch.float32, 2)[0]
    for seed in range(5):
        for result in two_gpus.run(ddp_order_ranks.train_with_delays, seed):
            for mode in EVERY_MODE:
                assert_same(result[mode], expected[mode])
