"""Fully sharded training on paper: exact values by hand. tests/parallel/fsdp compares them with what runs."""

import math

from cs336sys.accounting.flops import count_parameters, parameter_shapes
from cs336sys.accounting.sharding import fsdp
from cs336sys.accounting.sharding.partition import gathered_layout, padded_bytes
from cs336sys.settings.sizes import ModelSize

SMALL = ModelSize("", d_model=8, d_ff=12, num_layers=2, num_heads=2, vocab_size=10)


def test_gathered_parameters_are_padded_and_aligned():
    # 4 rows of 5 fp32 elements are 80 bytes; 3 rows on 2 ranks have room for 4.
    assert padded_bytes((3, 5), 4, 2) == 80
    assert gathered_layout([((3, 5), 4), ((64, 2), 2), ((1,), 4)], 2) == ([0, 256, 512], 768)


def test_units_are_embedding_blocks_and_head():
    units = fsdp.sharded_units(parameter_shapes(SMALL))
    assert list(units) == ["token_embeddings", "layers.0", "layers.1", "lm_head"]
    assert units["layers.1"] == [(8, 8)] * 4 + [(12, 8), (8, 12), (12, 8)]
    assert fsdp.replicated_elements(parameter_shapes(SMALL)) == 5 * 8
    sharded = sum(math.prod(shape) for shapes in units.values() for shape in shapes)
    assert sharded + 5 * 8 == count_parameters(SMALL)


def test_state_of_ranks_adds_up_to_all_parameters_and_the_norms_once_more_a_rank():
    for world_size in (1, 2, 3, 4):
        states = [fsdp.fully_sharded_state(SMALL, rank, world_size) for rank in range(world_size)]
        copies = (world_size - 1) * 5 * 8
        assert sum(state.parameters for state in states) == 4 * (count_parameters(SMALL) + copies)
        assert all(state.total == 4 * state.parameters for state in states)
        assert all(state.gradients == state.parameters for state in states)
    # 10 rows over 4 ranks: 3, 3, 3, 1; 8 rows: 2 each; 12: 3 each.
    last = fsdp.fully_sharded_state(SMALL, 3, 4)
    assert last.parameters == 4 * (2 * 1 * 8 + 2 * (4 * 2 * 8 + 2 * 3 * 8 + 2 * 12) + 40)


def test_prefetching_more_holds_more():
    assert fsdp.most_gathered([1, 5, 5, 2], 0) == 5
    assert fsdp.most_gathered([1, 5, 5, 2], 1) == 10
    assert fsdp.most_gathered([1, 5, 5, 2], 2) == 12
    assert fsdp.most_gathered([1, 5, 5, 2], 9) == 13
    assert fsdp.most_gathered([1, 5, 5, 2], 0, keep_gathered=2) == 12
    assert fsdp.most_gathered([9, 1, 1, 2], 0, keep_gathered=1) == 9


def test_communication_of_a_step():
    """Weights twice but for the head's, gradients once: one and a half times what data parallel training sends."""
    sharded = count_parameters(SMALL) - 5 * 8
    shapes = parameter_shapes(SMALL)
    step = fsdp.step_communication(shapes, 2, 2)
    assert (step.all_gather, step.reduce_scatter, step.all_reduce) == (2 * (2 * sharded - 80), 2 * sharded, 4 * 40)
    assert step.sent_bytes(2) == (step.all_gather + step.reduce_scatter) / 2 + step.all_reduce
    assert step.sent_bytes(1) == 0
    # Three ranks have room for 12 of the 10 rows of embedding and head, and for 9 of 8.
    block = 4 * 9 * 8 + 2 * 12 * 8 + 9 * 12
    assert fsdp.step_communication(shapes, 4, 3).all_gather == 4 * (3 * 12 * 8 + 4 * block)
    assert fsdp.step_communication(shapes, 4, 3, keep_gathered=1).all_gather == 4 * (3 * 12 * 8 + 3 * block)
    assert fsdp.step_communication(shapes, 4, 3).reduce_scatter == 4 * sharded
