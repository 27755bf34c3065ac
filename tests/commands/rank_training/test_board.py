"""The board's step on Gloo ranks, what the check of it finds, and checkpoints that compute again what they say."""

import copy
from dataclasses import replace

import board_ranks
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336sys.accounting.checkpointing import recomputed_flops
from cs336sys.commands.rank_training import measure as measurement
from cs336sys.commands.rank_training.gradient_check import check_gradients, with_few_blocks
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.training import Workload
from cs336sys.training.model import build_model
from cs336sys.training.ranks.strategies import keep_by_parts

SIZE = ModelSize("odd", d_model=16, d_ff=24, num_layers=3, num_heads=2, vocab_size=24, context=5, batch_size=2)


def workload(checkpointing="keep=1", **settings):
    training = {"size": SIZE, "device": "cpu", "attention": "flash", "kernels": "fused", "optimizer": "fused"}
    return ParallelWorkload(Workload(**training | settings), "fsdp", prefetch=1, checkpointing=checkpointing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_gradients_are_those_of_one_process_and_faults_are_found(ranks):
    checked = with_few_blocks(replace(workload("keep=3"), keep_gathered=3))
    assert (checked.checkpointing, checked.training.size.num_layers, checked.keep_gathered) == ("keep=1", 2, 1)
    # What was found once holds for them.
    assert with_few_blocks(workload("keep=2", warmup=3, steps=9)) == with_few_blocks(workload("keep=1"))
    for difference in ranks().run(check_gradients, checked):
        assert difference.is_rounding("fp32")
        assert 0 < difference.relative < 1e-5
        assert difference.num_layers == 2
    for differences in ranks().run(board_ranks.check_with_faults, checked):
        for fault, difference in differences.items():
            assert not difference.is_rounding("bf16"), fault


def test_gradients_of_torchs_strategy_are_checked_too(ranks):
    plain = workload("keep=0", attention="sdpa", kernels="reference")
    plain = with_few_blocks(replace(plain, strategy="torch-fsdp", prefetch=None))
    for difference in ranks().run(check_gradients, plain):
        assert 0 < difference.relative < 1e-5
    for difference in ranks().run(board_ranks.check_with_wrong_gradient, plain):
        assert not difference.is_rounding("bf16")
        assert difference.parameter == "layers.0.ffn.w1.weight"


def test_the_loss_of_every_step_is_kept(ranks, tmp_path):
    """Of the first step, of the warm-up and of the timed steps, and of none for a profile or a trace; they train."""
    trace = tmp_path / "trace.json.gz"
    cell = workload("keep=0", attention="sdpa", kernels="reference", warmup=1, steps=3)
    for rank in ranks().run(measurement.measure_board_on_rank, cell, trace):
        assert len(rank.losses) == 5
        assert rank.losses == sorted(set(rank.losses), reverse=True)
        assert {len(samples.measured) for samples in rank.samples.values()} == {3}
    assert trace.stat().st_size > 1000


EVEN = replace(SIZE, vocab_size=40, context=8)


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
    plain = build_model(Workload(EVEN, attention="sdpa", device="cpu"), torch.device("cpu"))
    loss, gradients, flops = trained(copy.deepcopy(plain))
    for blocks in (1,) if compiles else (1, 3):
        model = copy.deepcopy(plain)
        keep_by_parts(model, EVEN, blocks)
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
        assert trained_flops - flops == recomputed_flops(EVEN, f"keep={blocks}")
