"""State dicts: any number of ranks, or one process, goes on where another stopped."""

import optimizer_checkpoints_ranks
import optimizer_models
import optimizer_training_ranks
import pytest
import torch
from optimizer_models import MODES
from same_tensors import assert_same, assert_same_state

from cs336sys.parallel.ranks import launch

each_mode = pytest.mark.parametrize("mode", MODES)


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resumed_training_is_bitwise_the_same_on_as_many_ranks(ranks, mode, dtype):
    through = ranks(2).run(optimizer_checkpoints_ranks.train_and_save, mode, dtype, None, None, range(6))
    saved = ranks(2).run(optimizer_checkpoints_ranks.train_and_save, mode, dtype, None, None, range(3))
    _, weights, consolidated, _ = saved[0]
    for state in (consolidated, [own for *_, own in saved]):
        resumed = ranks(2).run(optimizer_checkpoints_ranks.train_and_save, mode, dtype, weights, state, range(3, 6))
        for rank in range(2):
            assert through[rank][0] == saved[rank][0] + resumed[rank][0]
            assert_same(resumed[rank][1], through[rank][1])
            assert_same_state(resumed[rank][3], through[rank][3])
        assert_same_state(resumed[0][2], through[0][2])
    assert [result[2] for result in saved[1:]] == [None]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (4, 2), (1, 3)])
@pytest.mark.parametrize(("mode", "other_mode"), [("default", "default"), ("flat", "flat"), ("flat", "default")])
def test_training_goes_on_with_another_number_of_ranks(ranks, mode, other_mode, before, after):
    run = optimizer_checkpoints_ranks.train_and_save
    saved = ranks(before).run(run, mode, torch.float64, None, None, range(2))
    _, weights, consolidated, _ = saved[0]
    resumed = ranks(after).run(run, other_mode, torch.float64, weights, consolidated, range(2, 4))
    losses, expected, state = optimizer_checkpoints_ranks.losses_alone(torch.float64, None, None, range(4))
    assert mean_loss(saved) + mean_loss(resumed) == pytest.approx(losses, abs=1e-12)
    for _, weights, *_ in resumed:
        assert_same(weights, expected, atol=1e-12)
    consolidated = resumed[0][2]
    assert consolidated.pop("parameters")[1] == {"name": "first.weight", "shape": (48, 7)}
    for group in consolidated["param_groups"]:
        del group["param_names"]
    assert_same_state(consolidated, state, atol=1e-12)


def mean_loss(results):
    """Of every step: each rank has an equal share of the batch."""
    return [sum(losses) / len(losses) for losses in zip(*(result[0] for result in results), strict=True)]


@each_mode
def test_state_moves_to_and_from_an_optimizer_on_one_process(ranks, mode):
    losses, expected, _ = optimizer_checkpoints_ranks.losses_alone(torch.float64, None, None, range(6))
    run = optimizer_checkpoints_ranks.train_and_save
    _, weights, consolidated, _ = ranks(3).run(run, mode, torch.float64, None, None, range(2))[0]
    alone, weights, state = optimizer_checkpoints_ranks.losses_alone(torch.float64, weights, consolidated, range(2, 4))
    resumed = ranks(3).run(run, mode, torch.float64, weights, state, range(4, 6))
    assert alone + mean_loss(resumed) == pytest.approx(losses[2:], abs=1e-12)
    assert_same(resumed[0][1], expected, atol=1e-12)


@each_mode
@pytest.mark.parametrize("name", ["course", "SGD", "AdamW per tensor"])
def test_consolidated_state_is_that_of_the_class(ranks, mode, name):
    weights, expected = optimizer_training_ranks.train_alone(name, torch.float64)
    _, trained, consolidated, _ = ranks(3).run(
        optimizer_checkpoints_ranks.train_and_save, mode, torch.float64, None, None, range(4), name
    )[0]
    assert_same(trained, weights, atol=1e-12)
    assert_same_state({**consolidated, "param_groups": expected["param_groups"]}, expected, atol=1e-12)


@each_mode
def test_state_that_does_not_fit_is_refused_on_every_rank_and_nothing_is_loaded(ranks, mode):
    model = optimizer_models.network(0)
    plain = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    wrong_shape = plain.state_dict()
    wrong_shape["state"][2]["exp_avg"] = torch.ones(5)
    wrong_shape["state"][1]["exp_avg"] = torch.ones(7, 48)
    fewer = {**plain.state_dict(), "param_groups": [{"params": [0, 1]}]}
    entries = [{"name": name, "shape": tuple(p.shape)} for name, p in model.named_parameters()]
    renamed = {**plain.state_dict(), "parameters": [{**entries[0], "name": "embedding"}, *entries[1:]]}
    reshaped = {**plain.state_dict(), "parameters": [*entries[:1], {**entries[1], "shape": (5, 5)}, *entries[2:]]}
    states = [wrong_shape, fewer, renamed, reshaped, {"model": {}}]
    for rank, (errors, kept, count) in enumerate(ranks(2).run(optimizer_checkpoints_ranks.failed_loads, mode, states)):
        shape, groups, name, size, empty, share, options, half = (message for _, message in errors)
        assert {kind for kind, _ in errors} == {"UsageError"}
        assert shape == (
            "the state belongs to another model: exp_avg of first.weight is (7, 48) there, the parameter is (48, 7) "
            "here"
        )
        assert groups == "the state belongs to another model: groups of [2] parameters there, [9] here"
        assert name == "the state belongs to another model: parameter 0 is embedding(2,) there, scale(2,) here"
        assert (
            size
            == "the state belongs to another model: parameter 1 is first.weight(5, 5) there, first.weight(48, 7) here"
        )
        assert empty == "no state of an optimizer: found model, not state and param_groups"
        assert share.startswith("the state is the share of rank ") or "share of rank 1 of 2" in share
        assert "lr=0.01" in options
        assert "lr=1.01" in options
        assert "UsageError: no state of an optimizer: found nothing, not state and param_groups on rank 1" in half
        assert kept
        assert count > 0, rank


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "Adagrad"])
def test_loaded_state_of_a_parameter_without_dimensions_keeps_its_shapes(ranks, name):
    results = ranks(2).run(optimizer_checkpoints_ranks.shapes_after_loading, name)
    (before, after), nothing = sorted(results, reverse=True, key=len)
    assert before == after
    assert set(before.values()) == {(), (1,)}
    assert not nothing


@each_mode
def test_saved_state_is_a_copy(ranks, mode):
    assert ranks(2).run(optimizer_checkpoints_ranks.states_that_stay, mode) == [True, True]


@each_mode
def test_loading_copies(ranks, mode):
    for first, second in ranks(2).run(optimizer_checkpoints_ranks.no_state_is_shared, mode):
        assert_same(first, second)


@each_mode
def test_hooks_of_state_dicts(ranks, mode):
    (result,) = ranks(1).run(optimizer_checkpoints_ranks.load_hooks, mode)
    assert result == (["pre", "post", "load pre", "load post"], 0.5)


def assert_strides_survive(ranks, mode, device):
    """Fused optimizers take for granted that state is laid out as its parameter is."""
    run = optimizer_checkpoints_ranks.train_convolutions
    expected, _ = run("alone", device, range(5))
    (saved_weights, state), _ = ranks.run(run, mode, device, range(2))
    layouts = [parameter.stride() for parameter in optimizer_checkpoints_ranks.convolutions("cpu").parameters()]
    for index, kept in state["state"].items():
        assert kept["exp_avg"].stride() == kept["exp_avg_sq"].stride() == layouts[index], index
    # A file in which they are lost, as earlier ones, is good for a sharded optimizer.
    lost = {
        index: {key: value.contiguous() if value.dim() else value for key, value in kept.items()}
        for index, kept in state["state"].items()
    }
    for resumed in (
        ranks.run(run, mode, device, range(2, 5), (saved_weights, state))[1],
        ranks.run(run, mode, device, range(2, 5), (saved_weights, {**state, "state": lost}))[1],
        # Last, because it goes on in the memory of the state.
        run("alone", device, range(2, 5), (saved_weights, state)),
    ):
        assert_same(resumed[0], expected, atol=1e-9)


@each_mode
def test_training_of_channels_last_weights_goes_on_with_a_fused_optimizer(ranks, mode):
    assert_strides_survive(ranks(2), mode, "cpu")


@pytest.mark.gpu
def test_training_of_channels_last_weights_goes_on_on_a_gpu():
    with launch.start(2, backend="gloo") as ranks:
        assert_strides_survive(ranks, "default", "cuda")


@pytest.mark.multigpu
@each_mode
def test_training_of_channels_last_weights_goes_on_on_two_gpus(two_gpus, mode):
    assert_strides_survive(two_gpus, mode, "cuda")


@pytest.mark.multigpu
@each_mode
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_state_goes_through_the_first_rank_on_two_gpus(two_gpus, mode, name):
    run = optimizer_checkpoints_ranks.train_and_save
    through = two_gpus.run(run, mode, torch.float32, None, None, range(6), name)
    saved = two_gpus.run(run, mode, torch.float32, None, None, range(3), name)
    resumed = two_gpus.run(run, mode, torch.float32, saved[0][1], saved[0][2], range(3, 6), name)
    for rank in range(2):
        assert through[rank][0] == saved[rank][0] + resumed[rank][0]
