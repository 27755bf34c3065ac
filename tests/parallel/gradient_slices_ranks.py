"""What the ranks of test_gradient_slices run: functions that spawned processes can import."""

from functools import partial

import torch
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM
from small_models import error_of
from torch import nn

# By name, as scripts do, before there are any slices.
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from cs336sys.kernels.adamw import AdamW
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.parallel.tensor_parallel import TensorParallel


def layer():
    return nn.Linear(4, 4)


def trained(module):
    """With gradients."""
    module(torch.ones(2, 4)).sum().backward()
    if hasattr(module, "finish_gradient_synchronization"):
        module.finish_gradient_synchronization()
    return list(module.parameters())


def clippings():
    """Errors of clipping by the norm of this rank's gradients, and those norms where each rank has all gradients."""
    fully = trained(FSDP(layer()))
    flat = layer()
    optimizer = ShardedOptimizer(flat.parameters(), torch.optim.SGD, flat=True, lr=0.1)
    model = BasicsTransformerLM(
        vocab_size=10, context_length=4, d_model=8, num_layers=1, num_heads=2, d_ff=16, rope_theta=10000.0
    )
    shared = TensorParallel(model)
    cut = list(shared.parameters())
    errors = {
        "fsdp": error_of(clip_grad_norm_, fully, 0.01),
        "flat": error_of(clip_grad_norm_, trained(flat), 0.01),
        "flat, values": error_of(clip_grad_value_, flat.parameters(), 0.5),
        "tensor": error_of(clip_grad_norm_, cut, 0.01),
        "fsdp of parts": error_of(
            FSDP(
                shared.module, group=dist.new_group([dist.get_rank()], use_local_synchronization=True)
            ).clip_grad_norm_,
            0.01,
        ),
        "adamw, fsdp": error_of(partial(AdamW, fully), max_grad_norm=0.01),
        "adamw, sharded": error_of(ShardedOptimizer, layer().parameters(), AdamW, max_grad_norm=0.01),
    }
    optimizer.finish_gradient_synchronization()
    values = {}
    for name, sliced in {"fsdp": fully, "flat": optimizer.own_tensors}.items():
        clip_grad_value_(sliced, 0.5)
        values[name] = max(one.grad.max().item() for one in sliced)
        # A rank may have none.
        clip_grad_value_([nn.Parameter(torch.ones(2))], 0.5)
    optimizer.zero_grad()
    del optimizer
    AdamW(fully)
    ShardedOptimizer(layer().parameters(), AdamW, max_grad_norm=None)
    whole = {
        "ddp": trained(NaiveDDP(layer())),
        "sharded": trained(plain := layer()),
        "flat no more": trained(flat),
    }
    ShardedOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1)
    return errors, values, {name: clip_grad_norm_(parameters, 0.01).item() for name, parameters in whole.items()}
