"""The strategies that split sequences, on Gloo ranks that all tests share."""

from dataclasses import replace

import context_training_ranks
import pytest
import torch
import training_ranks
from training_ranks import largest, outcome_of

from cs336sys.accounting.sharding.step import MOMENTS, predicted_memory, predicted_sent_bytes, sharded_step
from cs336sys.commands.shard.tables import shard_plan
from cs336sys.errors import CapabilityError
from cs336sys.parity.rounding import TOLERANCES
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.training.ranks.tensor_strategies import torch_context

# Divides by no number of ranks.
SIZE = choose_size("tiny", context=37, batch_size=2, vocab_size=100, d_model=32, d_ff=64, num_heads=4)
# Activations are most of this one's memory.
WIDE = choose_size("tiny", context=387, batch_size=1, vocab_size=2000)

RING, ALL_TO_ALL = "context-ring", "context-all-to-all"


def workload(strategy, checkpointing="none", world_size=2, **settings):
    training = Workload(**{"size": SIZE, "device": "cpu", "warmup": 1, "steps": 2} | settings)
    return ParallelWorkload(training, strategy, world_size, checkpointing=checkpointing)


@pytest.mark.parametrize("fault", context_training_ranks.FAULTS)
def test_the_check_finds_a_ring_that_is_wrong_in_one_thing(ranks, fault):
    """In the precision with the widest tolerance."""
    cell = workload(RING, precision="bf16", size=replace(SIZE, num_layers=1))
    assert largest(ranks().run(context_training_ranks.verify_with, fault, cell)) > 2 * TOLERANCES["bf16"]


def test_ranks_hold_and_send_as_predicted(ranks):
    cells = [workload(RING, size=WIDE, attention="flash"), workload(ALL_TO_ALL, size=WIDE, attention="sdpa")]
    of_ranks = ranks().run(training_ranks.observe_all, cells)
    for cell, by_rank in zip(cells, zip(*of_ranks, strict=True), strict=True):
        step = sharded_step(cell)
        assert max(sent for _, sent in by_rank) == predicted_sent_bytes(step), cell.strategy
        memory = {
            moment.moment: moment
            for moment in max((of_rank[0] for of_rank in by_rank), key=lambda moment: moment[-1].total)
        }
        predicted = {moment.moment: moment for moment in predicted_memory(step)}
        assert list(memory) == list(predicted) == list(MOMENTS)
        for part in ("parameters", "gradients", "optimizer_state"):
            assert getattr(memory["before the optimizer"], part) == getattr(predicted["before the optimizer"], part)
        assert 0.99 <= memory["peak"].total / predicted["peak"].total <= 1.01, (cell.strategy, cell.checkpointing)


def test_a_cell_is_measured_beside_the_same_step_without_communication(ranks):
    ranks()
    # What travels is in half precision forward and in float32 back.
    cell = workload(RING, "block", precision="bf16")
    outcome = outcome_of(cell)
    assert outcome.status == "ok"
    assert outcome.derived["relative_difference_percent"] < 100 * TOLERANCES["bf16"] / 4
    assert {"step", "forward", "unsynchronized", "communication"} <= outcome.samples.keys()
    assert outcome.derived["sent_bytes"] == predicted_sent_bytes(sharded_step(cell))


def test_torchs_own_is_refused_where_it_has_no_kernels():
    def reason(device="cpu", **settings):
        with pytest.raises(CapabilityError) as refusal:
            torch_context(workload("torch-context", **settings), torch.device(device), None)
        return str(refusal.value)

    assert reason().endswith("supports only SDPA's CUDA kernels")
    assert reason("cuda").endswith("--attention reference is not torch's; choose sdpa")
    assert reason("cuda", attention="sdpa").endswith("equal chunks: context 37 is no multiple of that")
    assert reason("cuda", attention="sdpa", compile="block").endswith("choose --compile off and --cuda-graph off")


def test_a_ring_of_torchs_attention_has_no_logsumexp(ranks):
    with pytest.raises(CapabilityError, match="which --attention sdpa does not return; choose flash or reference"):
        ranks().run(training_ranks.verify_all, [workload(RING, attention="sdpa")])


def test_a_plan_says_what_a_rank_has_of_each_sequence():
    (row,) = shard_plan([workload(RING, world_size=4)]).rows
    assert (row["share"], row["tokens"]) == (2, 10)
    assert row["predicted_sent_bytes"] == predicted_sent_bytes(sharded_step(workload(RING, world_size=4)))
