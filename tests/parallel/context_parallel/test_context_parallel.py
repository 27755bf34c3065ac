"""Attention and training on slices of sequences equal those on whole sequences; what cannot be is refused."""

import context_ranks
import pytest
import torch

from cs336sys.errors import LostProcessError, UsageError
from cs336sys.parallel.context_parallel import ContextGroup, SequenceSplit
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
LAYOUTS = tuple(context_ranks.LAYOUTS)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_attention_is_that_of_the_whole_sequence(ranks, world_size):
    """Any length from a token a rank, grouped heads, every layout: to the last digits of float64."""
    heads = 2 * world_size
    cases = [
        (kind, length, FP64, heads, world_size, layout)
        for kind in ("ring", "all-to-all")
        for length, layout in ((world_size, LAYOUTS[0]), (2 * world_size + 1, LAYOUTS[1]), (37, LAYOUTS[2]))
    ]
    for of_rank in ranks(world_size).run(context_ranks.differences, cases):
        for case, difference in zip(cases, of_rank, strict=True):
            assert difference < 1e-13, case


def test_groups_of_a_mesh_split_sequences_of_their_own(ranks):
    for of_rank in ranks(4).run(context_ranks.differences_on_a_mesh):
        assert max(of_rank) < 1e-13


def test_half_precision_is_merged_in_float32(ranks):
    """Rounding of bf16 alone: 2^-9 of the output, a few times that of gradients."""
    cases = [("ring", 37, dtype, 4, 4, LAYOUTS[1]) for dtype in (BF16, FP16, FP32)]
    for bf16, fp16, fp32 in ranks(4).run(context_ranks.differences, cases):
        assert bf16 < 2e-2
        assert fp16 < 2e-3
        assert fp32 < 2e-6


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_training_has_loss_and_every_gradient_of_one_process(ranks, world_size):
    """Uneven slices, micro-batches under no_sync, and evaluation after it; a test of the engine has checkpoints."""
    cases = [("ring", 37, 1), ("ring", 24, 2)] if world_size < 4 else [("ring", 37, 1)]
    cases.append(("ring", 37, 2, True))
    # Three ranks do not divide its heads.
    cases += {2: [("all-to-all", 37, 1), ("all-to-all", 40, 2, True)], 4: [("all-to-all", 37, 1)]}.get(world_size, [])
    for of_rank in ranks(world_size).run(context_ranks.train_all, cases):
        for case, (loss, evaluated, expected, gradients) in zip(cases, of_rank, strict=True):
            assert loss == pytest.approx(expected, rel=1e-6), case
            assert evaluated == pytest.approx(expected, rel=1e-6), case
            for name, (found, wanted) in gradients.items():
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=f"{case}: {name}")


def test_impossible_setting_is_refused_on_every_rank(ranks):
    for of_rank in ranks(2).run(context_ranks.refusals):
        assert {kind for kind, _ in of_rank} == {"UsageError"}
        tokens, heads, order, zigzag, number, differing, twice, *shapes = (message for _, message in of_rank)
        takes = "tokens: this rank holds 8 of 16; take the tokens of context.positions()"
        assert tokens == f"ring attention of 3 {takes}"
        *batches, wide, also_wide, few, one_head, one_key_head = shapes
        for kind, message in zip(("ring", "all-to-all"), batches, strict=True):
            of_ranks = (f"{kind} attention of torch.float32 ({size}, 4, S, 8)" for size in (1, 2))
            assert all(part in message for part in of_ranks)
        for message in (wide, also_wide):
            assert "of shapes (1, 4, 8, 8), (1, 4, 8, 8), (1, 4, 8, 4): give all of them one width" in message
        assert few == f"all-to-all attention of 5 {takes}"
        assert one_head.endswith("2 ranks do not divide 1 head; choose 1 rank, or ring attention")
        assert one_key_head == one_head
        assert heads == "all-to-all attention: 2 ranks do not divide 3 heads; choose 1 or 3 ranks, or ring attention"
        assert order.startswith("ring attention needs a zigzag split")
        assert zigzag.endswith("choose is_zigzag=False")
        assert number == "a sequence split over 3 ranks: the process group has 2; choose the same number"
        assert "16 tokens zigzag" in differing
        assert "17 tokens zigzag" in differing
        assert twice.startswith("ring attention is differentiable once, so create_graph=True is refused")


def test_without_communication_a_rank_computes_alone(ranks):
    first, second = ranks(2).run(context_ranks.without_communication)
    assert first == [[(1, 4, 19, 8)] * 4] * 2
    assert second == []


def test_without_a_process_group_it_is_refused():
    with pytest.raises(UsageError, match="context parallelism needs a process group"):
        ContextGroup(SequenceSplit(16, 2))


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankError) as caught:
        launch.run(context_ranks.lost_peer, "ring", world_size=2, backend="gloo")
    # Rank 0's broken connection follows, unless it is noticed later than the death is reported.
    heading, *others = str(caught.value).split("\n\n")
    assert heading == "rank 1 of 2: ended with exit code 3"
    assert all(other.startswith("rank 0: ") for other in others)
    assert caught.value.rank == 1
    assert isinstance(caught.value, LostProcessError)


@pytest.mark.multigpu
def test_attention_on_gpus_is_that_of_the_whole_sequence(two_gpus):
    """Triton's and Hopper's kernels, an odd length, and grouped heads."""
    from cs336sys.training.ranks.tensor_strategies import KernelBlocks

    cases = [
        ("ring", length, BF16, 8, key_value_heads, layout, head_dim, KernelBlocks())
        for length, key_value_heads, head_dim in ((2048, 8, 64), (2048, 8, 128), (1023, 8, 80), (515, 2, 64))
        for layout in LAYOUTS
    ]
    for of_rank in two_gpus.run(context_ranks.differences, cases):
        for case, difference in zip(cases, of_rank, strict=True):
            assert difference < 2e-2, case


@pytest.mark.multigpu
def test_training_on_gpus_has_loss_and_every_gradient_of_one_process(two_gpus):
    cases = [("ring", 37, 2), ("all-to-all", 40, 2)]
    for of_rank in two_gpus.run(context_ranks.train_all, cases):
        for loss, evaluated, expected, gradients in of_rank:
            assert loss == pytest.approx(expected, rel=1e-5)
            assert evaluated == pytest.approx(expected, rel=1e-5)
            for name, (found, wanted) in gradients.items():
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=name)
