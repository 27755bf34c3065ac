"""What the tests of the board run on ranks, and the faults that they plant there."""

import pytest

from cs336sys.board import transformer_block
from cs336sys.commands.rank_training.gradient_check import check_gradients
from cs336sys.parallel.fsdp.unit import ShardedUnit
from cs336sys.training.ranks.step import ParallelStep


def check_with_faults(workload):
    """What the check finds, by the fault that was planted."""
    differences = {}
    for plant in (wrong_recomputation, stale_gather):
        with pytest.MonkeyPatch.context() as monkeypatch:
            plant(monkeypatch)
            differences[plant.__name__] = check_gradients(workload)
    return differences


def check_with_wrong_gradient(workload):
    """What the check finds where one weight's gradient is a tenth too large."""
    backward = ParallelStep.backward

    def wrong(step):
        backward(step)
        gradient = step.model.layers[0].ffn.w1.weight.grad.to_local()
        gradient *= 1.1

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ParallelStep, "backward", wrong)
        return check_gradients(workload)


def wrong_recomputation(monkeypatch):
    """The backward pass computes gate and up of another input."""
    backward = transformer_block.TransformerBlock.backward

    def wrong(ctx, grad):
        total, gate = ctx.saved_tensors[2], ctx.saved_tensors[4]
        if gate is None:
            # Behind autograd's back, which would refuse.
            total.data.mul_(1.1).add_(0.1)
        return backward(ctx, grad)

    monkeypatch.setattr(transformer_block.TransformerBlock, "backward", staticmethod(wrong))


def stale_gather(monkeypatch):
    """In the backward pass, the first block's weights are those of another step."""
    gather, gathered = ShardedUnit.gather, []

    def gather_stale(unit):
        if unit.name == "layers.0" and not unit.is_gathered:
            gathered.append(None)
            if len(gathered) > 1:
                fresh, unit._shards = unit._shards, [shard.detach() * 0.9 for shard in unit._shards]
                gather(unit)
                unit._shards = fresh
                return
        gather(unit)

    monkeypatch.setattr(ShardedUnit, "gather", gather_stale)
