"""Which parameters are sharded, and which are gathered together."""

import cProfile
import pstats

import pytest
import torch
from cs336_basics.model import BasicsTransformerLM
from torch import nn

from cs336sys.parallel.fsdp.plan import plan_sharding


def planned(module, unit_modules=None):
    """Names of the sharded parameters, by unit, and of the replicated ones."""
    plan = plan_sharding(module, unit_modules)
    names = [parameter for name, parameter in module.named_parameters(remove_duplicate=False)]
    assert len(names) == sum(len(entry.names) for entry in (*plan.all_sharded, *plan.replicated))
    return {unit.name: first_names(unit.sharded) for unit in plan.units}, first_names(plan.replicated)


def first_names(entries):
    return [entry.names[0] for entry in entries]


class Sum(nn.Module):
    """Calls all of its parts."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def test_transformer_has_embedding_blocks_and_head():
    units, rest = planned(BasicsTransformerLM(10, 4, d_model=8, num_layers=2, num_heads=2, d_ff=12))
    assert list(units) == ["token_embeddings", "layers.0", "layers.1", "lm_head"]
    attention = [f"layers.1.attn.{name}_proj.weight" for name in ("q", "k", "v", "output")]
    assert units["layers.1"] == [*attention, *(f"layers.1.ffn.w{n}.weight" for n in (1, 2, 3))]
    assert units["lm_head"] == ["lm_head.weight"]
    assert rest == [*(f"layers.{layer}.ln{n}.weight" for layer in (0, 1) for n in (1, 2)), "ln_final.weight"]


def test_biases_go_with_their_layer_and_norms_do_not():
    units, rest = planned(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv1d(4, 5, 3), nn.PReLU()))
    assert units == {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}
    assert rest == ["1.weight", "1.bias", "3.weight"]


def test_module_alone_is_a_unit():
    assert planned(nn.Linear(3, 4)) == ({"": ["weight", "bias"]}, [])


@pytest.mark.parametrize("parameter", [torch.zeros(()), torch.zeros(0, 3)])
def test_parameter_without_rows_is_replicated(parameter):
    module = nn.Linear(3, 4)
    module.scale = nn.Parameter(parameter)
    assert planned(module) == ({"": ["weight", "bias"]}, ["scale"])


def test_layer_with_children_is_one_unit_with_them():
    """Attention of torch hands the weight of its output projection to a function, without calling it."""
    units, rest = planned(nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4)))
    assert list(units) == ["0", "1"]
    assert units["0"] == ["0.in_proj_weight", "0.in_proj_bias", "0.out_proj.weight", "0.out_proj.bias"]
    assert rest == []


def test_module_with_a_matrix_of_its_own_is_a_unit_around_its_blocks():
    module = Sum(blocks=nn.ModuleList([nn.Linear(2, 2)]), norm=nn.LayerNorm(2), head=nn.Linear(2, 3))
    module.positions = nn.Parameter(torch.zeros(5, 2))
    units, rest = planned(module)
    assert list(units) == ["", "blocks.0"]
    assert units[""] == ["positions", "head.weight", "head.bias"]
    assert rest == ["norm.weight", "norm.bias"]
    assert [unit.contains_units for unit in plan_sharding(module).units] == [True, False]


def test_lists_in_blocks_are_part_of_them_and_lists_of_lists_are_not_blocks():
    block = Sum(experts=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    pair = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])
    units, _ = planned(Sum(layers=nn.ModuleList([block, block, pair, nn.ReLU()])))
    assert list(units) == ["layers.0", "layers.2.0", "layers.2.1"]
    assert len(units["layers.0"]) == 4


def test_tied_weights_join_units():
    module = Sum(embedding=nn.Embedding(5, 2), blocks=nn.ModuleList([nn.Linear(2, 2)]), head=nn.Linear(2, 5))
    module.head.weight = module.embedding.weight
    plan = plan_sharding(module)
    assert [unit.name for unit in plan.units] == ["embedding", "blocks.0"]
    assert plan.units[0].modules == [module.embedding, module.head]
    tied = plan.units[0].sharded[0]
    assert tied.names == ["embedding.weight", "head.weight"]
    assert tied.owners == [(module.embedding, "weight"), (module.head, "weight")]


def test_three_units_that_share_in_pairs_are_one():
    module = Sum(a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 3))
    module.a.weight, module.b.bias = module.c.weight, module.c.bias
    assert list(planned(module)[0]) == ["a"]


def test_layer_shared_between_units_joins_them():
    shared = nn.Linear(2, 2)
    blocks = [Sum(own=nn.Linear(2, 2), shared=shared), Sum(own=nn.Linear(2, 2)), Sum(shared=shared)]
    module = Sum(blocks=nn.ModuleList([*blocks, blocks[1]]), again=shared)
    plan = plan_sharding(module)
    assert [unit.name for unit in plan.units] == ["blocks.0", "blocks.1"]
    assert plan.units[0].modules == [blocks[0], blocks[2], shared]
    assert len(plan.units[0].sharded) == 4


def test_norm_shared_between_blocks_does_not_join_them():
    shared = nn.LayerNorm(2)
    blocks = [Sum(linear=nn.Linear(2, 2), norm=shared), Sum(linear=nn.Linear(2, 2), norm=shared)]
    units, rest = planned(Sum(blocks=nn.ModuleList(blocks)))
    assert units["blocks.1"] == ["blocks.1.linear.weight", "blocks.1.linear.bias"]
    assert rest == ["blocks.0.norm.weight", "blocks.0.norm.bias"]


def test_bias_that_a_module_outside_of_units_uses_too_is_cut():
    module = Sum(linear=nn.Linear(2, 2), norm=nn.LayerNorm(2))
    module.norm.bias = module.linear.bias
    units, rest = planned(module)
    assert units == {"linear": ["linear.weight", "linear.bias"]}
    assert rest == ["norm.weight"]


def test_blocks_without_matrices_are_no_units():
    units, rest = planned(Sum(blocks=nn.ModuleList([nn.LayerNorm(2)])))
    assert units == {}
    assert rest == ["blocks.0.weight", "blocks.0.bias"]


def test_units_may_be_chosen():
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    units, _ = planned(module, unit_modules=[module[0]])
    assert {name: len(sharded) for name, sharded in units.items()} == {"0": 4, "1": 2}
    units, _ = planned(module, unit_modules=[module])
    assert list(units) == [""]


def test_calls_grow_with_the_units():
    few, many = cProfile.Profile(), cProfile.Profile()
    few.runcall(plan_sharding, nn.ModuleList(nn.Linear(2, 2) for _ in range(60)))
    many.runcall(plan_sharding, nn.ModuleList(nn.Linear(2, 2) for _ in range(240)))
    assert pstats.Stats(many).total_calls < 5 * pstats.Stats(few).total_calls
