"""Checkpoints inside of blocks change no numbers, and compute again what they say."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336sys.accounting.sharding.selective_checkpointing import KeptStep, flops_again
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.training import Workload
from cs336sys.training.model import build_model
from cs336sys.training.ranks.strategies import keep_by_parts

SIZE = ModelSize("odd", d_model=16, d_ff=24, num_layers=3, num_heads=2, vocab_size=40, context=8, batch_size=2)


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products, those of compiled code as well."""

    flops = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.mm.default:
            self.flops += 2 * args[0].numel() * args[1].shape[1]
        return operator(*args, **(kwargs or {}))


def trained(model):
    """The loss, all gradients, and the FLOPs of both passes' matrix products."""
    tokens = torch.arange(16).view(2, 8) % 40
    with Products() as products:
        loss = model(tokens).square().mean()
        loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()], products.flops


@pytest.mark.parametrize("compiles", [False, True])
def test_gate_and_up_alone_are_computed_again(compiles):
    plain = build_model(Workload(SIZE, attention="sdpa", device="cpu"), torch.device("cpu"))
    loss, gradients, flops = trained(copy.deepcopy(plain))
    for blocks in (1,) if compiles else (1, 3):
        model = copy.deepcopy(plain)
        keep_by_parts(model, SIZE, blocks)
        if compiles:
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
            for layer in model.layers:
                layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        trained_loss, trained_gradients, trained_flops = trained(model)
        torch.testing.assert_close(trained_loss, loss)
        for gradient, expected in zip(trained_gradients, gradients, strict=True):
            torch.testing.assert_close(gradient, expected)
        if compiles:
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one for each kind of block"
        assert trained_flops - flops == flops_again(KeptStep("fsdp", SIZE, 1, "fp32", "flash", blocks=blocks))
