"""What the ranks of test_ddp_changes run: functions that spawned processes can import."""

import torch
import torch.distributed as dist
from ddp_modes import by_mode, finish
from small_models import batch, error_of, share, weights
from torch import nn

from cs336sys.parallel.ddp import FlatDDP, NaiveDDP
from cs336sys.parallel.gradient_slices import mark_slice


class Adaptable(nn.Module):
    """Has a tied bias, a frozen bias and places for adapters."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = nn.Linear(7, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.third.bias = self.second.bias
        self.last = nn.Linear(6, 5)
        self.last.bias.requires_grad_(False)
        self.adapters = nn.ModuleList()
        self.double()

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for adapter in self.adapters:
            x = x + adapter(x)
        return self.last(torch.tanh(self.third(torch.tanh(self.second(x)))))


def add(model):
    model.adapters.append(nn.Linear(6, 6).double())
    model.adapters.append(nn.Linear(6, 6).double().requires_grad_(False))
    model.register_buffer("added", torch.rand(3))


def assign(model):
    state = {"weight": torch.randn(6, 6).double(), "bias": torch.randn(6).double()}
    model.second.load_state_dict(state, assign=True)


def tie(model):
    model.third.weight = model.second.weight


def untie(model):
    model.third.bias = nn.Parameter(torch.randn(6).double())


def remove(model):
    model.third = nn.Identity()


def unfreeze(model):
    model.last.bias.requires_grad_(True)


def resize(model):
    model.last.weight.data = model.last.weight.data[:4].clone()
    model.last.bias.data = model.last.bias.data[:4].clone()


CHANGES = {change.__name__: change for change in (add, assign, tie, untie, remove, unfreeze, resize)}


def loss(model, inputs, targets):
    outputs = model(inputs)
    return nn.functional.mse_loss(outputs, targets[:, : outputs.size(1)])


def train_step(model, number):
    inputs, targets = batch(number, torch.float64)
    if dist.is_initialized():
        inputs, targets = share(inputs), share(targets)
    loss(model, inputs, targets).backward()
    if dist.is_initialized():
        finish(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    model.zero_grad()


def train_alone(change):
    """The oracle: one process, the whole batch, rank 0's values."""
    model = Adaptable(0)
    train_step(model, 0)
    torch.manual_seed(100)
    CHANGES[change](model)
    for number in (1, 2):
        train_step(model, number)
    return weights(model)


@by_mode
def change_in_training(wrap, change):
    """By mode: errors of the next passes: forward, without gradients, through the module itself; and weights."""
    model = Adaptable(dist.get_rank())
    wrapped = wrap(model)
    train_step(wrapped, 0)
    torch.manual_seed(100 + dist.get_rank())
    CHANGES[change](model)
    x = torch.ones(2, 7).double()
    errors = [error_of(wrapped, x)]
    with torch.no_grad():
        errors.append(error_of(wrapped, x))

    def pass_through_module():
        wrapped.module(x).sum().backward()
        finish(wrapped)

    errors.append(error_of(pass_through_module))
    wrapped.zero_grad()
    wrapped.refresh()
    for number in (1, 2):
        train_step(wrapped, number)
    return errors, weights(model)


def changed_on_one_rank():
    """The errors of refresh() where one rank has an adapter more, or replaced a weight by one of the same shape."""
    errors = []
    for change in (add, assign):
        wrapped = NaiveDDP(Adaptable(0))
        if dist.get_rank() == 1:
            change(wrapped.module)
        errors.append(error_of(wrapped.refresh))
    wrapped = NaiveDDP(Adaptable(0))
    wrapped.head = nn.Linear(2, 2)
    return [*errors, error_of(wrapped.refresh)]


@by_mode
def freeze_in_turns(wrap):
    """Weights of a discriminator that is frozen in every other pass, as in a GAN, without refresh()."""
    model = Adaptable(0)
    wrapped = wrap(model)
    for number in range(4):
        model.second.requires_grad_(number % 2 == 0)
        train_step(wrapped, number)
    return weights(model)


def freeze_in_turns_alone():
    model = Adaptable(0)
    for number in range(4):
        model.second.requires_grad_(number % 2 == 0)
        train_step(model, number)
    return weights(model)


def not_the_same_on_all_ranks():
    """Errors of wrapping slices, slices that other ranks have too, and an embedding that shortens its rows."""
    errors = []
    for ranks in (None, range(dist.get_world_size()), [dist.get_rank()]):
        module = nn.Linear(2, 2)
        mark_slice(module.weight, ranks)
        errors.append(error_of(NaiveDDP, module))
    errors.append(error_of(NaiveDDP, nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))))
    return errors


def kept_gradients():
    """Gradients that the caller keeps while others stay in place, before and after the next step."""
    wrapped = FlatDDP(Adaptable(0))
    x = torch.ones(2, 7).double()
    wrapped(x).sum().backward()
    finish(wrapped)
    kept = {name: one.grad for name, one in wrapped.module.named_parameters() if name.startswith("second")}
    before = {name: gradient.clone() for name, gradient in kept.items()}
    wrapped.module.second.zero_grad()
    for _ in range(2):
        wrapped(x).sum().backward()
        finish(wrapped)
    return before, kept
