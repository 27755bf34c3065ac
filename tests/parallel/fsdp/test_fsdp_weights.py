"""Modules made on the meta device start as others do."""

import torch
import torch.distributed as dist
from fsdp_models import Network, batch, loss_of, transformer
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, share
from torch import nn

from cs336sys.parallel.fsdp import FSDP


def initialize(module):
    """As the constructors of ``cs336_basics`` do."""
    if type(module).__name__ == "Linear":
        std = (2 / sum(module.weight.shape)) ** 0.5
        nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
    elif type(module).__name__ == "Embedding":
        nn.init.trunc_normal_(module.weight, a=-3.0, b=3.0)
    elif type(module).__name__ == "RMSNorm":
        nn.init.ones_(module.weight)


def assert_as_made_as_usual(sharded, usual):
    assert_same(sharded.gather_full_params(), {name: value.detach() for name, value in usual.named_parameters()})
    assert_same(dict(sharded.module.named_buffers()), dict(usual.named_buffers()))


def layers():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 5))


@on_ranks(2, 3)
def test_module_made_on_the_meta_device_starts_as_one_made_as_usual():
    with torch.device("meta"):
        model, without_reset, tied = transformer(), Network(), layers()
    # Only rank 0's random numbers count.
    torch.manual_seed(7 + dist.get_rank())
    sharded = FSDP(model, initialize=initialize)
    loss_of(sharded, *map(share, batch(0, 30))).backward()
    sharded.finish_gradient_synchronization()
    assert_as_made_as_usual(sharded, transformer(seed=7))
    assert error_of(FSDP, without_reset) == (
        "UsageError",
        "Network is on the meta device and its class Network has no reset_parameters(): give FSDP a function to "
        "initialize it",
    )
    tied[2].requires_grad_(False)
    tied[3].weight = tied[0].weight
    torch.manual_seed(7)
    sharded = FSDP(tied)
    torch.manual_seed(7)
    usual = layers()
    usual[3].weight = usual[0].weight
    assert_as_made_as_usual(sharded, usual)
    assert [parameter.requires_grad for parameter in sharded.parameters()] == [True] * 4 + [False] * 2 + [True]
