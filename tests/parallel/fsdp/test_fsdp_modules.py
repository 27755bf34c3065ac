"""Unusual, compiled and checkpointed modules train as they do unwrapped."""

import fsdp_modules_ranks
import pytest
import torch
from same_tensors import assert_same


def test_units_may_return_anything_and_be_traversed_twice(ranks):
    results, error = ranks(2).run(fsdp_modules_ranks.outputs)[0]
    for kind in fsdp_modules_ranks.KINDS:
        sharded, alone = results[kind]
        assert_same(sharded, alone, rtol=1e-6, atol=1e-6)
    assert error == (
        "UsageError",
        "blocks.0 returns a Hidden, in which no tensor was found: return tensors, or lists, tuples, dictionaries or "
        "dataclasses of them",
    )


def test_two_forward_passes_may_come_before_the_backward_pass(ranks):
    for results in ranks(2).run(fsdp_modules_ranks.two_forward_passes_before_backward):
        for sharded, expected in results:
            assert_same(sharded, expected, atol=1e-12)


def test_units_may_share_layers(ranks):
    for sharded, expected, gathered in ranks(2).run(fsdp_modules_ranks.shared_parts):
        assert_same(sharded, expected, atol=1e-14)
        assert gathered == {}


def test_layers_of_torch(ranks):
    units, (ours, plain, sharded, alone), norms, of_gradients = ranks(2).run(fsdp_modules_ranks.layers_of_torch)[0]
    # The module has positions of its own, which makes it a unit around the others.
    assert units == ["Attention", "layers.0"]
    assert torch.equal(ours, plain)
    assert_same(sharded, alone, atol=1e-12)
    # What torch's norm gets and what leaves it.
    assert norms == [(torch.float32, torch.bfloat16)]
    assert of_gradients == {torch.float32}


@pytest.fixture(scope="module")
def trained_in_eager_mode(ranks):
    _, weights, _ = ranks(2).run(fsdp_modules_ranks.compiled, None)[0]
    return weights


@pytest.mark.parametrize(
    "when",
    ["before", "checkpointed", *(pytest.param(when, marks=pytest.mark.nightly) for when in ("after", "instead"))],
)
def test_compiled_blocks_share_one_graph(ranks, when, trained_in_eager_mode):
    for graphs, weights, (kind, message) in ranks(2).run(fsdp_modules_ranks.compiled, when):
        assert graphs == 1
        assert_same(weights, trained_in_eager_mode)
        assert (kind, message.partition(" is compiled as a whole")[0]) == ("UsageError", "BasicsTransformerLM")


def test_wrapper_that_is_compiled_runs_uncompiled(ranks, trained_in_eager_mode):
    graphs, weights, _ = ranks(2).run(fsdp_modules_ranks.compiled, "around")[0]
    assert graphs == 0
    assert_same(weights, trained_in_eager_mode)


def test_checkpoints_may_be_around_parts_of_units_and_around_several(ranks):
    (plain, _), *others = ranks(2).run(fsdp_modules_ranks.checkpointed_in_parts)[0]
    for found, gathered in others:
        assert_same(found, plain)
        assert gathered == {}


@pytest.mark.multigpu
def test_compiled_blocks_on_two_gpus(two_gpus):
    for (eager, compiled), graphs in two_gpus.run(fsdp_modules_ranks.compiled_by_inductor):
        assert graphs == 1
        assert_same(compiled, eager, rtol=1e-3, atol=1e-4)
