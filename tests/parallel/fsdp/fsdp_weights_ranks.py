"""What the ranks of test_fsdp_weights run: functions that spawned processes can import."""

import torch
import torch.distributed as dist
from fsdp_models import Network, batch, loss_of, network, transformer
from small_models import error_of, share
from torch import nn

from cs336sys.parallel.fsdp import FSDP


def whole_parameters():
    """Names and values right after wrapping, those of the plain module on rank 0, and what the ranks hold."""
    model = network(dist.get_rank())
    sharded = FSDP(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expected = {name: value.detach() for name, value in network(0).named_parameters()}
    return sharded.gather_full_params(), expected, shapes, model.offset


def initialize(module):
    """As the constructors of ``cs336_basics`` do."""
    if type(module).__name__ == "Linear":
        std = (2 / sum(module.weight.shape)) ** 0.5
        nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
    elif type(module).__name__ == "Embedding":
        nn.init.trunc_normal_(module.weight, a=-3.0, b=3.0)
    elif type(module).__name__ == "RMSNorm":
        nn.init.ones_(module.weight)


def from_meta():
    """Whole parameters and buffers of modules made on the meta device, and of those made as usual with that seed."""
    with torch.device("meta"):
        model = transformer()
    # Only rank 0's random numbers count.
    torch.manual_seed(7 + dist.get_rank())
    sharded = FSDP(model, initialize=initialize)
    tokens, targets = map(share, batch(0, 30))
    loss_of(sharded, tokens, targets).backward()
    sharded.finish_gradient_synchronization()
    usual = transformer(seed=7)
    results = [
        (sharded.gather_full_params(), {name: value.detach() for name, value in usual.named_parameters()}),
        (dict(model.named_buffers()), dict(usual.named_buffers())),
    ]
    with torch.device("meta"):
        model = Network()
        model.frozen.requires_grad_(False)
    error = error_of(FSDP, model)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 5))
        model[2].requires_grad_(False)
        model[3].weight = model[0].weight
    torch.manual_seed(7)
    sharded = FSDP(model)
    torch.manual_seed(7)
    usual = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 5))
    usual[3].weight = usual[0].weight
    results += [
        (sharded.gather_full_params(), {name: value.detach() for name, value in usual.named_parameters()}),
        (dict(model.named_buffers()), dict(usual.named_buffers())),
    ]
    trained = [parameter.requires_grad for parameter in sharded.parameters()]
    return results, trained, error


def state_dicts():
    """Names of a state dict, and whether loading it brings the slices back."""
    sharded = FSDP(network(0))
    saved = {name: value.clone() for name, value in sharded.state_dict().items()}
    for parameter in sharded.parameters():
        nn.init.zeros_(parameter)
    sharded.load_state_dict(saved)
    same = all(torch.equal(value, saved[name]) for name, value in sharded.state_dict().items())
    return list(saved), list(network(0).state_dict()), same
