"""State dicts: any number of ranks, or one process, goes on where another stopped."""

import copy

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from optimizer_models import CLASSES, each_mode, finish, network, sharded, train_step
from same_tensors import assert_same, assert_same_state
from small_models import refusal_of, share, weights
from torch import nn

from cs336sys.parallel.collectives import gather_objects, group_device
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


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


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (4, 2), (1, 3)])
@pytest.mark.parametrize(("mode", "other_mode"), [("default", "default"), ("flat", "flat"), ("flat", "default")])
def test_training_goes_on_with_another_number_of_ranks(ranks, mode, other_mode, before, after):
    saved = ranks(before).run(train_and_save, mode, torch.float64, None, None, range(2))
    _, start, consolidated, _ = saved[0]
    resumed = ranks(after).run(train_and_save, other_mode, torch.float64, start, consolidated, range(2, 4))
    losses, expected, state = train_alone(torch.float64, None, None, range(4))
    assert mean_loss(saved) + mean_loss(resumed) == pytest.approx(losses, abs=1e-12)
    for _, trained, *_ in resumed:
        assert_same(trained, expected, atol=1e-12)
    consolidated = resumed[0][2]
    assert consolidated.pop("parameters")[1] == {"name": "first.weight", "shape": (48, 7)}
    for group in consolidated["param_groups"]:
        del group["param_names"]
    assert_same_state(consolidated, state, atol=1e-12)


@each_mode
def test_state_moves_to_and_from_an_optimizer_on_one_process(ranks, mode):
    losses, expected, _ = train_alone(torch.float64, None, None, range(6))
    _, start, consolidated, _ = ranks(3).run(train_and_save, mode, torch.float64, None, None, range(2))[0]
    alone, start, state = train_alone(torch.float64, start, consolidated, range(2, 4))
    resumed = ranks(3).run(train_and_save, mode, torch.float64, start, state, range(4, 6))
    assert alone + mean_loss(resumed) == pytest.approx(losses[2:], abs=1e-12)
    assert_same(resumed[0][1], expected, atol=1e-12)


@each_mode
@pytest.mark.parametrize("name", ["course", "SGD", "AdamW per tensor"])
def test_consolidated_state_is_that_of_the_class(ranks, mode, name):
    _, trained_alone, expected = train_alone(torch.float64, None, None, range(4), name)
    _, trained, state, _ = ranks(3).run(train_and_save, mode, torch.float64, None, None, range(4), name)[0]
    assert_same(trained, trained_alone, atol=1e-12)
    assert_same_state({**state, "param_groups": expected["param_groups"]}, expected, atol=1e-12)


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
@pytest.mark.parametrize("name", ["NAdam", "ASGD", "Adagrad"])
def test_loaded_state_of_a_parameter_without_dimensions_keeps_its_shapes(name):
    parameter, shapes = nn.Parameter(torch.ones(())), []
    optimizer = ShardedOptimizer([parameter], getattr(torch.optim, name), lr=0.01, flat=True)
    (2 * parameter).backward()
    optimizer.step()
    for _ in range(2):
        states = optimizer.state_dict()["state"].values()
        shapes += [{key: tuple(value.shape) for key, value in state.items()} for state in states]
        optimizer.load_state_dict(gather_objects(optimizer.consolidated_state_dict())[0])
    of_ranks = sorted(gather_objects(shapes), key=len)
    assert of_ranks[0] == []
    before, after = of_ranks[1]
    assert before == after
    assert set(before.values()) == {(), (1,)}


@on_ranks(2)
@each_mode
def test_saved_state_is_a_copy_and_loading_copies(mode):
    def build():
        model = network(0)
        return model, *sharded(mode, model, lr=0.01)

    model, wrapped, optimizer = build()
    train_step(wrapped, optimizer, 0)
    start, saved = copy.deepcopy(model.state_dict()), optimizer.consolidated_state_dict()
    before = copy.deepcopy(saved)
    train_step(wrapped, optimizer, 1)
    if saved is not None:
        assert_same_state(saved, before)
    state, trained = gather_objects(saved)[0], []
    for _ in range(2):
        model, wrapped, optimizer = build()
        model.load_state_dict(start)
        optimizer.load_state_dict(state)
        train_step(wrapped, optimizer, 1)
        trained.append(weights(model))
    assert_same(*trained)


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


def convolutions(device):
    """A convolutional network whose weights are stored with the channels last; in fp64, as GPUs convolve in TF32."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(24, 5)
    return nn.Sequential(*layers).to(device, torch.float64, memory_format=torch.channels_last)


def train_convolutions(mode, device, steps, start=None, state=None):
    """Train by a fused AdamW, on the first rank's values or from weights and a state: weights, whole state."""
    model = convolutions(device)
    wrapped, optimizer = sharded(mode, model, lr=0.01, fused=True)
    if start is not None:
        model.load_state_dict(start)
        optimizer.load_state_dict(state)
    for step in steps:
        seeded = torch.Generator().manual_seed(step)
        images = [torch.randn(*shape, generator=seeded).double() for shape in ((12, 3, 6, 6), (12, 5))]
        inputs, targets = images if mode == "alone" else map(share, images)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs.to(device)), targets.to(device)).backward()
        finish(wrapped)
        optimizer.step()
    return weights(model), optimizer.state_dict() if mode == "alone" else optimizer.consolidated_state_dict()


def assert_strides_survive(ranks, mode, device):
    """Fused optimizers take for granted that state is laid out as its parameter is."""
    run = train_convolutions
    expected, _ = run("alone", device, range(5))
    (start, state), _ = ranks.run(run, mode, device, range(2))
    layouts = [parameter.stride() for parameter in convolutions("cpu").parameters()]
    for index, kept in state["state"].items():
        assert kept["exp_avg"].stride() == kept["exp_avg_sq"].stride() == layouts[index], index
    # A file in which they are lost, as earlier ones, is good for a sharded optimizer.
    lost = {
        index: {key: value.contiguous() if value.dim() else value for key, value in kept.items()}
        for index, kept in state["state"].items()
    }
    for resumed in (
        ranks.run(run, mode, device, range(2, 5), start, state)[1],
        ranks.run(run, mode, device, range(2, 5), start, {**state, "state": lost})[1],
        # Last, because it goes on in the memory of the state.
        run("alone", device, range(2, 5), start, state),
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
    through = two_gpus.run(train_and_save, mode, torch.float32, None, None, range(6), name)
    saved = two_gpus.run(train_and_save, mode, torch.float32, None, None, range(3), name)
    resumed = two_gpus.run(train_and_save, mode, torch.float32, saved[0][1], saved[0][2], range(3, 6), name)
    for rank in range(2):
        assert through[rank][0] == saved[rank][0] + resumed[rank][0]
