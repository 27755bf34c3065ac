"""AdamW against torch.optim.AdamW, and the learning-rate schedule at its joints."""

import copy
import math

import pytest
import torch
from cs336_basics.optimizer import AdamW, get_cosine_lr


def make_parameters():
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (7,), ())]


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for i, parameter in enumerate(parameters):
        # From 1e-8, where eps decides, to 10.
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (1 - 3 * ((i + step) % 4))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3},
        {"lr": 0.01, "betas": (0.0, 0.0), "weight_decay": 0.0},
    ],
)
def test_many_steps_match_torch(settings):
    ours = make_parameters()
    theirs = copy.deepcopy(ours)
    optimizer, reference = AdamW(ours, **settings), torch.optim.AdamW(theirs, **{"weight_decay": 0.01, **settings})
    for step in range(50):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for parameter, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
        assert optimizer.state[parameter]["t"] == 50


@pytest.mark.parametrize("saved_as", [False, True])
def test_counting_on_the_device_changes_nothing_and_states_can_be_exchanged(saved_as):
    ours = make_parameters()
    theirs = copy.deepcopy(ours)
    settings = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3}
    optimizers = [AdamW(ours, **settings), AdamW(theirs, **settings, capturable=True)]
    for step in range(20):
        for optimizer, parameters in zip(optimizers, (ours, theirs), strict=True):
            set_gradients(parameters, step)
            optimizer.step()
    for parameter, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
    counts = [optimizer.state[optimizer.param_groups[0]["params"][0]]["t"] for optimizer in optimizers]
    assert (counts[0], counts[1].item(), counts[1].dtype, counts[1].shape) == (20, 20, torch.float64, ())
    # In bf16, the dtype of these parameters, 257 would be 256.
    halves = [torch.nn.Parameter(parameter.detach().bfloat16()) for parameter in ours]
    state = optimizers[saved_as].state_dict()
    for one in state["state"].values():
        one["t"] += 237
    for capturable in (False, True):
        loaded = AdamW(halves, capturable=capturable)
        groups = [{**group, "capturable": capturable} for group in state["param_groups"]]
        loaded.load_state_dict(state | {"param_groups": groups})
        assert {type(one["t"]) for one in loaded.state.values()} == {torch.Tensor if capturable else int}
        assert {float(one["t"]) for one in loaded.state.values()} == {257.0}


def test_groups_have_their_own_settings_and_follow_a_schedule():
    ours = make_parameters()
    theirs = copy.deepcopy(ours)
    for parameters, kind in ((ours, AdamW), (theirs, torch.optim.AdamW)):
        groups = [
            {"params": parameters[:1], "lr": 0.05, "weight_decay": 0.5},
            {"params": parameters[1:], "betas": (0.5, 0.6), "eps": 1e-3},
        ]
        optimizer = kind(groups, lr=0.01, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
        for step in range(20):
            set_gradients(parameters, step)
            optimizer.step()
            schedule.step()
    for parameter, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_parameters_without_gradient_are_left_alone():
    parameters = make_parameters()
    before = parameters[1].detach().clone()
    set_gradients(parameters, 0)
    parameters[1].grad = None
    optimizer = AdamW(parameters, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(parameters[1], before)
    assert parameters[1] not in optimizer.state


def test_closure_runs_with_gradients_and_its_loss_is_returned():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = AdamW([parameter], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 5.0
    assert parameter.grad.tolist() == [2.0, 4.0]
    assert optimizer.step() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"betas": (1.0, 0.9)}, r"betas are \(1.0, 0.9\)"),
        ({"betas": (0.9, -0.1)}, r"betas are \(0.9, -0.1\)"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AdamW(make_parameters(), **settings)
    with pytest.raises(ValueError, match=message):
        AdamW([{"params": make_parameters(), **settings}])


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="AdamW takes no sparse gradients"):
        AdamW(embedding.parameters()).step()


def test_cosine_schedule_at_its_joints():
    def lr(it):
        return get_cosine_lr(it, max_learning_rate=1.0, min_learning_rate=0.1, warmup_iters=10, cosine_cycle_iters=30)

    assert [lr(0), lr(5), lr(10)] == [0.0, 0.5, 1.0]
    assert lr(15) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert lr(20) == pytest.approx(0.55)
    assert lr(29) > 0.1
    assert [lr(30), lr(31), lr(1000)] == [0.1, 0.1, 0.1]
    assert all(lr(it) > lr(it + 1) for it in range(10, 30))


def test_cosine_schedule_without_warmup_or_without_cosine():
    assert get_cosine_lr(0, 1.0, 0.1, warmup_iters=0, cosine_cycle_iters=10) == 1.0
    assert get_cosine_lr(4, 1.0, 0.1, warmup_iters=5, cosine_cycle_iters=5) == pytest.approx(0.8)
    assert get_cosine_lr(5, 1.0, 0.1, warmup_iters=5, cosine_cycle_iters=5) == 0.1


def test_state_saved_before_there_was_capturable_is_loaded():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    del state["param_groups"][0]["capturable"]
    other = AdamW([parameter])
    other.load_state_dict(state)
    other.step()
    assert other.state[parameter]["t"] == 2
