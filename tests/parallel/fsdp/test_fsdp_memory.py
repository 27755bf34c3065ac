"""Only units in use and those fetched ahead have memory; memory and traffic are what accounting says."""

from dataclasses import replace

import fsdp_memory_ranks
import pytest
import torch
from same_tensors import assert_same

from cs336sys.accounting.flops import parameter_shapes
from cs336sys.accounting.sharding import fsdp
from cs336sys.parallel.ranks import launch
from cs336sys.settings.sizes import ModelSize


@pytest.fixture(scope="module")
def two_gpus():
    """Ranks of their own: memory is counted to the last tensor."""
    with launch.start(2, backend="nccl") as ranks:
        yield ranks


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_only_units_in_use_and_those_fetched_ahead_have_memory(ranks, prefetch, checkpoints):
    for moments, between, after in ranks(2).run(
        fsdp_memory_ranks.held_while_running, prefetch, checkpoints, torch.bfloat16
    ):
        # Seven linear layers a block, and two others, forward and backward. Checkpointed blocks run forward again, and
        # stop when the input of their last layer is there.
        assert len(moments) == 5 * (7 + 7 + (6 if checkpoints else 0)) + 2 * 2
        for unit, held in moments:
            assert unit in held
            assert len(held) <= 1 + prefetch
        assert any(len(held) == 1 + prefetch for _, held in moments)
        assert len(between) == 1 + prefetch
        assert "lm_head" in between
        assert after == [{}] * 4


def test_evaluation_frees_everything_and_needs_no_wrapper(ranks):
    for results, sharded, expected in ranks(2).run(fsdp_memory_ranks.evaluation):
        for found, alone, gathered in results:
            assert torch.equal(found, alone)
            assert gathered == {}
        assert_same(sharded, expected, rtol=1e-5, atol=1e-7)


SIZE = ModelSize("", d_model=24, d_ff=40, num_layers=3, num_heads=2, vocab_size=30, context=8)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_memory_is_what_accounting_says(ranks, world_size, compute_dtype):
    for rank, (state, gathered) in enumerate(ranks(world_size).run(fsdp_memory_ranks.state_memory, compute_dtype)):
        expected = fsdp.fully_sharded_state(SIZE, rank, world_size)
        assert state == (expected.parameters, expected.gradients, expected.optimizer_state)
        assert gathered == fsdp.gathered_bytes(SIZE, 2 if compute_dtype else 4, world_size)


@pytest.mark.parametrize(("compute_dtype", "element_bytes"), [(None, 4), (torch.bfloat16, 2)])
def test_communication_is_what_accounting_says(ranks, compute_dtype, element_bytes):
    expected = fsdp.step_communication(parameter_shapes(replace(SIZE, num_layers=2)), element_bytes, 2)
    for sent in ranks(2).run(fsdp_memory_ranks.sent_bytes, compute_dtype):
        gathers, scatters, exchanges, means = (
            sum(count for name, count in sent.items() if name.startswith(start))
            for start in ("allgather", "reduce_scatter", "alltoall", "allreduce_coalesced")
        )
        # The last norm is averaged alone, not as one of several; so are flags of all 21 parameters, one byte each.
        assert gathers == expected.all_gather
        assert scatters + exchanges == expected.reduce_scatter
        assert (scatters == 0) == (compute_dtype is not None)
        assert means + sent["allreduce_"] == expected.all_reduce + 21


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_whole_parameters_are_gone_after_wrapping(ranks, tensor_ranks):
    found = ranks(2 * tensor_ranks).run(fsdp_memory_ranks.memory_after_wrapping, tensor_ranks)
    for alive, slices, buffers in found:
        assert slices + buffers <= alive < slices + buffers + 1000


@pytest.mark.multigpu
def test_units_in_use_and_fetched_ahead_alone_have_memory_on_two_gpus(two_gpus):
    for moments, between, after in two_gpus.run(fsdp_memory_ranks.held_while_running, 1, True, torch.bfloat16):
        assert all(unit in held and len(held) <= 2 for unit, held in moments)
        assert len(between) == 2
        assert after == [{}] * 4


@pytest.mark.multigpu
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(("compute_dtype", "element_bytes"), [(None, 4), (torch.bfloat16, 2)])
def test_peak_memory_is_within_the_formula_and_torchs(two_gpus, compute_dtype, element_bytes, prefetch):
    state = fsdp.fully_sharded_state(fsdp_memory_ranks.LARGE, 0, 2)
    bound = fsdp.fully_sharded_peak(fsdp_memory_ranks.LARGE, element_bytes, 2, prefetch=prefetch)
    beside_state = bound.gathered + bound.whole_gradients + bound.received
    for ours, torchs in two_gpus.run(fsdp_memory_ranks.peak_memory, compute_dtype, prefetch):
        # Activations of 16 tokens, and the workspace of matrix products, 32 MiB.
        assert state.total < ours < state.total + beside_state + 50 * 2**20
        assert prefetch > 1 or ours < 1.01 * torchs
