"""The board's step on Gloo ranks: its gradients, and what the check of them finds."""

from dataclasses import replace

import board_ranks
import pytest
import torch

from cs336sys.accounting.sharding.selective_checkpointing import computed_flops, flops_again, kept_step
from cs336sys.commands.rank_training import measure as measurement
from cs336sys.commands.rank_training.gradient_check import with_few_blocks
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import ModelSize, choose_size
from cs336sys.settings.training import Workload

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
    for difference in ranks().run(board_ranks.check, checked):
        assert difference.is_rounding("fp32")
        assert 0 < difference.relative < 1e-5
        assert difference.num_layers == 2
    for differences in ranks().run(board_ranks.check_with_faults, checked):
        for fault, difference in differences.items():
            assert not difference.is_rounding("bf16"), fault


def test_gradients_of_torchs_strategy_are_checked_too(ranks):
    plain = workload("keep=0", attention="sdpa", kernels="reference")
    plain = with_few_blocks(replace(plain, strategy="torch-fsdp", prefetch=None))
    for difference in ranks().run(board_ranks.check, plain):
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


def test_recomputed_flops_count_beside_the_model_s():
    size = choose_size("8b")
    cells = [
        workload(f"keep={blocks}", size=size, precision="bf16", optimizer="adamw", state_dtype="bf16")
        for blocks in (34, 24)
    ]
    everything, some = cells
    assert kept_step(everything).blocks == 34
    assert kept_step(everything).state_dtype == "bf16"
    # Attention's backward pass computes the scores again.
    assert computed_flops(everything) / everything.training.flops == pytest.approx(5.044 / 4.745, rel=1e-3)
    assert computed_flops(some) - computed_flops(everything) == flops_again(kept_step(some))
