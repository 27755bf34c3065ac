"""State dicts: any number of ranks, or one process, goes on where another stopped."""

import copy

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from optimizer_models import CLASSES, each_mode, network, sharded, train_step
from same_tensors import assert_same, assert_same_state
from small_models import refusal_of, weights

from cs336sys.parallel.collectives import gather_objects, group_device


def train_and_save(mode, dtype, start, state, steps, name="AdamW"):
    """Train from given weights and state (None: from the start): losses, weights, consolidated and own state."""
    model = network(0, dtype).to(group_device())
    optimizer_cls, settings = CLASSES[name]
    wrapped, optimizer = sharded(mode, model, optimizer_cls, params=model.named_parameters(), overlap=True, **settings)
    if start is not None:
        model.load_state_dict(start)
        optimizer.load_state_dict(state[dist.get_rank()] if isinstance(state, list) else state)
    losses = [train_step(wrapped, optimizer, step, dtype) for step in steps]
    # Before the parameters have arrived.
    consolidated = optimizer.consolidated_state_dict()
    own = optimizer.state_dict()
    own["state"] = {
        index: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for index, state in own["state"].items()
    }
    return losses, weights(model), consolidated, own


def train_alone(dtype, start, state, steps, name="AdamW"):
    """One process that goes on from weights and a state of torch's class; losses, weights and state."""
    model = network(0, dtype)
    optimizer_cls, settings = CLASSES[name]
    optimizer = optimizer_cls(model.parameters(), **settings)
    if start is not None:
        model.load_state_dict(start)
        optimizer.load_state_dict(state)
    losses = [train_step(model, optimizer, step, dtype) for step in steps]
    return losses, weights(model), optimizer.state_dict()


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resumed_training_is_bitwise_the_same_on_as_many_ranks(ranks, mode, dtype):
    through = ranks(2).run(train_and_save, mode, dtype, None, None, range(6))
    saved = ranks(2).run(train_and_save, mode, dtype, None, None, range(3))
    _, start, consolidated, _ = saved[0]
    for state in (consolidated, [own for *_, own in saved]):
        resumed = ranks(2).run(train_and_save, mode, dtype, start, state, range(3, 6))
        for rank in range(2):
            assert through[rank][0] == saved[rank][0] + resumed[rank][0]
            assert_same(resumed[rank][1], through[rank][1])
            assert_same_state(resumed[rank][3], through[rank][3])
        assert_same_state(resumed[0][2], through[0][2])
    assert [result[2] for result in saved[1:]] == [None]


def mean_loss(results):
    """Of every step: each rank has an equal share of the batch."""
    return [sum(losses) / len(losses) for losses in zip(*(result[0] for result in results), strict=True)]


@each_mode
def test_state_moves_to_and_from_an_optimizer_on_one_process(ranks, mode):
    losses, expected, _ = train_alone(torch.float64, None, None, range(6))
    _, start, consolidated, _ = ranks(3).run(train_and_save, mode, torch.float64, None, None, range(2))[0]
    assert consolidated["parameters"][1] == {"name": "first.weight", "shape": (48, 7)}
    alone, start, state = train_alone(torch.float64, start, consolidated, range(2, 4))
    resumed = ranks(3).run(train_and_save, mode, torch.float64, start, state, range(4, 6))
    assert alone + mean_loss(resumed) == pytest.approx(losses[2:], abs=1e-12)
    assert_same(resumed[0][1], expected, atol=1e-12)


@on_ranks(2)
@each_mode
def test_state_that_does_not_fit_is_refused_on_every_rank_and_nothing_is_loaded(mode):
    """Of states that one process can see to be wrong there are more in figures.txt."""
    model, rank = network(0), dist.get_rank()
    wrapped, optimizer = sharded(mode, model, params=model.named_parameters(), lr=0.01)
    train_step(wrapped, optimizer, 0)
    before = copy.deepcopy(dict(optimizer.state_dict()))
    of_ranks = gather_objects(optimizer.state_dict())
    consolidated = gather_objects(optimizer.consolidated_state_dict())[0]
    wrong_shape, one_differs = copy.deepcopy(consolidated), copy.deepcopy(consolidated)
    wrong_shape["state"][1]["exp_avg"] = torch.ones(7, 48)
    one_differs["param_groups"][0]["lr"] += rank
    belongs = "the state belongs to another model: "
    for state, sentences in (
        (wrong_shape, [f"{belongs}exp_avg of first.weight is (7, 48) there, the parameter is (48, 7) here"]),
        ({"model": {}}, ["no state of an optimizer: found model, not state and param_groups"]),
        (of_ranks[1 - rank], ["share of rank 1 of 2" if rank == 0 else "the state is the share of rank "]),
        (one_differs, ["lr=0.01", "lr=1.01"]),
        (
            consolidated if rank == 0 else {},
            ["UsageError: no state of an optimizer: found nothing, not state and param_groups on rank 1"],
        ),
    ):
        assert all(sentence in refusal_of(optimizer.load_state_dict, state) for sentence in sentences)
    after = optimizer.state_dict()
    assert after["state"]
    assert_same_state(after, before)


@on_ranks(2)
@each_mode
def test_saved_state_is_a_copy_and_loading_copies(mode):
    wrapped, optimizer = sharded(mode, network(0), lr=0.01)
    train_step(wrapped, optimizer, 0)
    saved = optimizer.consolidated_state_dict()
    of_first = gather_objects(saved)[0]
    saved = of_first if saved is None else saved
    before = copy.deepcopy(saved)
    train_step(wrapped, optimizer, 1)
    assert_same_state(saved, before)
    optimizer.load_state_dict(saved)
    train_step(wrapped, optimizer, 2)
    assert_same_state(saved, before)


@on_ranks(1)
@each_mode
def test_consolidated_state_keeps_that_of_parameters_frozen_since(mode):
    model = network(0)
    model.last.bias.requires_grad_(True)
    alone = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_step(model, alone, 0)
    model.last.bias.requires_grad_(False)
    _, optimizer = sharded(mode, model, params=model.named_parameters(), lr=0.01)
    optimizer.load_state_dict(alone.state_dict())
    states = [state["state"] for state in (alone.state_dict(), optimizer.consolidated_state_dict())]
    index = [name for name, _ in model.named_parameters()].index("last.bias")
    assert_same(states[1][index], states[0][index])


@on_ranks(1)
@each_mode
def test_hooks_of_state_dicts(mode):
    _, optimizer = sharded(mode, network(0), lr=0.01)
    seen = []

    def change(optimizer, state_dict):
        seen.append("load pre")
        return {**state_dict, "param_groups": [{**group, "lr": 0.5} for group in state_dict["param_groups"]]}

    optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: seen.append("post"))
    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append("load post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", "post", "load pre", "load post"]
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.multigpu
@each_mode
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_state_goes_through_the_first_rank_on_two_gpus(two_gpus, mode, name):
    through = two_gpus.run(train_and_save, mode, torch.float32, None, None, range(6), name)
    saved = two_gpus.run(train_and_save, mode, torch.float32, None, None, range(3), name)
    resumed = two_gpus.run(train_and_save, mode, torch.float32, saved[0][1], saved[0][2], range(3, 6), name)
    for rank in range(2):
        assert through[rank][0] == saved[rank][0] + resumed[rank][0]
