"""Ranks that hold slices of gradients skip a step together, as one process does; scalers that cannot are refused."""

import gradient_scaler_ranks
import pytest
import torch
from same_tensors import assert_same

from cs336sys.errors import UsageError
from cs336sys.parallel.gradient_slices import ShardedGradScaler

# Settings of AdamW; whether gradients are unscaled first and clipped, by one optimizer, or there are two.
CASES = [({"lr": 0.5}, False), ({"lr": 0.5, "fused": True}, False), ({"lr": 0.5}, True)]


def assert_like_one_process(results, device="cpu"):
    for number, (settings, clips) in enumerate(CASES):
        expected = gradient_scaler_ranks.alone(settings, clips, device)
        assert [scale for _, scale in expected] == [8.0, 4.0, 4.0, 4.0]
        assert torch.equal(expected[0][0]["wide.weight"], expected[1][0]["wide.weight"])
        for rank, result in enumerate(results):
            for kind, history in result[number].items():
                for step, ((weights, scale), (alone, its_scale)) in enumerate(zip(history, expected, strict=True)):
                    assert scale == its_scale, (kind, rank, step)
                    assert_same(weights, alone, rtol=1e-6, atol=1e-6)


def test_overflow_on_one_rank_is_skipped_by_all_and_the_next_steps_equal_one_process(ranks):
    assert_like_one_process(ranks(2).run(gradient_scaler_ranks.train_all, CASES))


def test_scalers_that_decide_alone_are_refused_before_anything_is_changed(ranks):
    for errors, unchanged, steps_unscaled in ranks(2).run(gradient_scaler_ranks.refusals):
        for what, (kind, message) in errors.items():
            assert kind == "UsageError", what
            name = "ShardedGradScaler" if "torch's" in what else "GradScaler"
            assert message == (
                f"{name} would skip a step on the rank that finds an overflow and not on the others, because each has "
                "slices of the gradients: choose cs336sys.parallel.gradient_slices.ShardedGradScaler, or bf16"
            )
        assert unchanged
        assert steps_unscaled


def test_plain_scaler_still_scales_a_plain_module():
    gradient_scaler_ranks.alone(*CASES[0])


def test_scaler_without_a_process_group_is_refused_unless_it_is_off():
    with pytest.raises(UsageError, match="ShardedGradScaler needs a process group"):
        ShardedGradScaler("cpu")
    assert not ShardedGradScaler("cpu", enabled=False).is_enabled()


@pytest.mark.multigpu
def test_overflow_on_one_of_two_gpus(two_gpus):
    assert_like_one_process(two_gpus.run(gradient_scaler_ranks.train_all, CASES), "cuda")
