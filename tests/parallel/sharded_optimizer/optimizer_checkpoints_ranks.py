"""What the ranks of test_optimizer_checkpoints run: functions that spawned processes can import."""

import copy

import torch
import torch.distributed as dist
from optimizer_models import CLASSES, finish, network, sharded, train_step
from small_models import error_of, share, weights
from torch import nn

from cs336sys.parallel import collectives
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


def train_and_save(mode, dtype, start, state, steps, name="AdamW", **options):
    """Train from given weights and state (None: from the start): losses, weights, consolidated and own state."""
    model = network(0, dtype).to(collectives.group_device())
    optimizer_cls, settings = CLASSES[name]
    wrapped, optimizer = sharded(
        mode, model, optimizer_cls, params=model.named_parameters(), overlap=True, **settings, **options
    )
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


def losses_alone(dtype, start, state, steps):
    """One process with torch's AdamW that goes on from weights and a state; losses and weights."""
    model = network(0, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **CLASSES["AdamW"][1])
    if start is not None:
        model.load_state_dict(start)
        optimizer.load_state_dict(state)
    losses = [train_step(model, optimizer, step, dtype) for step in steps]
    return losses, weights(model), optimizer.state_dict()


def failed_loads(mode, states):
    """Errors of loading wrong states; whether a state loaded before is still there after all of them."""
    model = network(0)
    wrapped, optimizer = sharded(mode, model, params=model.named_parameters(), lr=0.01)
    train_step(wrapped, optimizer, 0)
    before = copy.deepcopy(dict(optimizer.state_dict()))
    of_ranks = collectives.gather_objects(optimizer.state_dict())
    consolidated = collectives.gather_objects(optimizer.consolidated_state_dict())[0]
    rank = dist.get_rank()
    errors = [error_of(optimizer.load_state_dict, state) for state in states]
    errors.append(error_of(optimizer.load_state_dict, of_ranks[1 - rank]))
    one_differs = copy.deepcopy(consolidated)
    one_differs["param_groups"][0]["lr"] += rank
    errors.append(error_of(optimizer.load_state_dict, one_differs))
    errors.append(error_of(optimizer.load_state_dict, consolidated if rank == 0 else {}))
    after = optimizer.state_dict()
    kept = after["param_groups"] == before["param_groups"] and all(
        torch.equal(value, before["state"][index][key])
        for index, state in after["state"].items()
        for key, value in state.items()
    )
    return errors, kept, len(after["state"])


def no_state_is_shared(mode):
    """Two optimizers that load one state train apart: the second's result equals the first's."""
    model = network(0)
    wrapped, optimizer = sharded(mode, model, lr=0.01)
    train_step(wrapped, optimizer, 0)
    start, state = copy.deepcopy(model.state_dict()), collectives.gather_objects(optimizer.consolidated_state_dict())[0]
    results = []
    for _ in range(2):
        model = network(0)
        wrapped, optimizer = sharded(mode, model, lr=0.01)
        model.load_state_dict(start)
        optimizer.load_state_dict(state)
        train_step(wrapped, optimizer, 1)
        results.append(weights(model))
    return results


def states_that_stay(mode):
    """Whether a consolidated state is left alone by the next step."""
    model = network(0)
    wrapped, optimizer = sharded(mode, model, lr=0.01)
    train_step(wrapped, optimizer, 0)
    saved = optimizer.consolidated_state_dict()
    copied = copy.deepcopy(saved)
    train_step(wrapped, optimizer, 1)
    return saved is None or all(
        torch.equal(value, copied["state"][index][key])
        for index, state in saved["state"].items()
        for key, value in state.items()
    )


def shapes_after_loading(name):
    """Flat: shapes of the state of a parameter without dimensions, on the rank that updates it, and when loaded."""
    parameter = nn.Parameter(torch.ones(()))
    optimizer = ShardedOptimizer([parameter], getattr(torch.optim, name), lr=0.01, flat=True)
    (2 * parameter).backward()
    optimizer.step()
    shapes = []
    for _ in range(2):
        states = optimizer.state_dict()["state"].values()
        shapes += [{key: tuple(value.shape) for key, value in state.items()} for state in states]
        optimizer.load_state_dict(collectives.gather_objects(optimizer.consolidated_state_dict())[0])
    return shapes


def load_hooks(mode):
    """What hooks of state_dict and load_state_dict were called, and a rate that one of them changed."""
    model = network(0)
    _, optimizer = sharded(mode, model, lr=0.01)
    seen = []

    def change(optimizer, state_dict):
        seen.append("load pre")
        groups = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: seen.append("post"))
    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append("load post"))
    optimizer.load_state_dict(optimizer.state_dict())
    return seen, optimizer.param_groups[0]["lr"]


def convolutions(device):
    """A convolutional network whose weights are stored with the channels last; in fp64, as GPUs convolve in TF32."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(24, 5)
    return nn.Sequential(*layers).to(device, torch.float64, memory_format=torch.channels_last)


def images(step):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(*shape, generator=generator).double() for shape in ((12, 3, 6, 6), (12, 5)))


def train_convolutions(mode, device, steps, weights_and_state=None):
    """Train by a fused AdamW, on the first rank's values or from weights and a state: weights, whole state."""
    model = convolutions(device)
    if weights_and_state is not None:
        model.load_state_dict(weights_and_state[0])
    wrapped, optimizer = sharded(mode, model, lr=0.01, fused=True)
    if weights_and_state is not None:
        optimizer.load_state_dict(weights_and_state[1])
    for step in steps:
        inputs, targets = images(step) if mode == "alone" else map(share, images(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs.to(device)), targets.to(device)).backward()
        finish(wrapped)
        optimizer.step()
    return weights(model), optimizer.state_dict() if mode == "alone" else optimizer.consolidated_state_dict()
