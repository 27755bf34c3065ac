"""Data parallel training equals training in one process, whatever ranks do differently; what cannot work says so."""

import ddp_ranks
import pytest
import torch
from ddp_ranks import MODES, TORCH_MODES
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError

EVERY_MODE = list(MODES)


def assert_same(left, right, **tolerance):
    """Two dictionaries of tensors (or None) are equal, bitwise unless a tolerance is given."""
    assert left.keys() == right.keys()
    for name in left:
        if left[name] is None or right[name] is None:
            assert left[name] is right[name], name
        else:
            torch.testing.assert_close(left[name], right[name], **{"rtol": 0, "atol": 0} | tolerance, msg=name)


def means(results):
    """Mean over ranks of dictionaries of tensors."""
    return {name: sum(result[name] for result in results) / len(results) for name in results[0]}


def test_all_modes_and_torch_train_to_bitwise_equal_weights_on_two_ranks(ranks):
    """Possible at two ranks alone: a + b is b + a, while longer sums depend on how messages are cut."""
    results = ranks(2).run(ddp_ranks.train_all, [*MODES, *TORCH_MODES])
    for result in results:
        for weights in result.values():
            assert_same(weights, results[0]["torch"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_one_process_on_the_whole_batch(ranks, world_size):
    expected = ddp_ranks.train_alone(torch.float64)
    for result in ranks(world_size).run(ddp_ranks.train_all, EVERY_MODE, torch.float64):
        for weights in result.values():
            assert_same(weights, expected, atol=1e-12)


def test_training_in_fp32_equals_one_process_within_rounding(ranks):
    expected = ddp_ranks.train_alone()
    for weights in ranks(2).run(ddp_ranks.train_all, EVERY_MODE)[0].values():
        assert_same(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulated_gradients_equal_one_process_on_the_whole_batch(ranks, world_size):
    expected = ddp_ranks.train_alone(torch.float64)
    for result in ranks(world_size).run(ddp_ranks.train_all, EVERY_MODE, torch.float64, 4, 2):
        for weights in result.values():
            assert_same(weights, expected, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_mean_of_integer_gradients_is_exact(ranks, world_size):
    expected = [sum(parts) / world_size for parts in zip(*map(ddp_ranks.factors, range(world_size)), strict=True)]
    for result in ranks(world_size).run(ddp_ranks.average_integers):
        for mode in EVERY_MODE:
            assert all(torch.equal(ours, exact) for ours, exact in zip(result[mode], expected, strict=True)), mode


def test_launch_order_is_the_same_when_gradients_become_ready_in_another(ranks):
    """A hook that launches at once would add one branch's gradient to another's without an error."""
    results = ranks(2).run(ddp_ranks.differently_ordered, [(0, 1, 2, 3), (2, 0, 3, 1)])
    for mode in EVERY_MODE:
        (averaged, first_ready, launches), (others, second_ready, other_launches) = (result[mode] for result in results)
        assert first_ready == [3, 2, 1, 0]
        assert second_ready == [1, 3, 0, 2]
        assert launches == other_launches
        assert [name for names in launches for name in names.split(", ")] == [f"branches.{i}" for i in (3, 2, 1, 0)]
        assert_same(averaged, {f"branches.{i}": torch.full((3,), 1.5 * (i + 1)) for i in range(4)})
        assert_same(averaged, others)


def test_delays_change_nothing(ranks):
    expected = ranks(2).run(ddp_ranks.train_all, EVERY_MODE, torch.float32, 2)[0]
    for seed in range(3):
        for result in ranks(2).run(ddp_ranks.train_with_delays, seed):
            for mode in EVERY_MODE:
                assert_same(result[mode], expected[mode])


def test_launches_overlap_the_backward_pass_where_they_should(ranks):
    for result in ranks(2).run(ddp_ranks.launches_in_time):
        # In backward order: last.weight, second.bias, second.weight (tied), norm.bias, norm.weight, first.bias,
        # first.weight: 260, 52, 676, 52, 52, 52 and 364 bytes.
        sizes = {mode: [sum(elements) for _, elements, _ in launches] for mode, (_, _, launches) in result.items()}
        assert sizes["naive"] == sizes["overlap"] == [65, 13, 169, 13, 13, 13, 91]
        assert sizes["bucketed"] == [65 + 13, 169, 13 + 13 + 13, 91]
        assert sizes["one bucket"] == [65 + 13 + 169 + 13 + 13 + 13 + 91]
        # One tensor, every gradient from a multiple of 64 elements on.
        assert [elements for _, elements, _ in result["flat"][2]] == [[128 + 64 + 192 + 64 + 64 + 64 + 128]]
        for mode in ("naive", "flat"):
            assert result[mode][:2] == (0, 0)
        assert result["one bucket"][:2] == (0, 1)
        for mode, least in (("overlap", 5), ("bucketed", 2)):
            before_last, in_backward, launches = result[mode]
            assert before_last >= least
            assert in_backward == len(launches)


def test_gradients_are_averaged_where_they_are(ranks):
    for mode, (stayed, together) in ranks(2).run(ddp_ranks.gradient_memory)[0].items():
        assert stayed == [True] * 3, mode
        assert together == [mode == "flat"] * 3, mode


def test_flat_buffer_leaves_its_memory_to_the_next_forward_pass(ranks):
    assert ranks(2).run(ddp_ranks.flat_buffer_is_dropped) == [(True, False)] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameter_without_gradient_counts_as_zero_and_stays_none_if_nobody_has_one(ranks, world_size):
    whole = sum(12.0 * (rank + 1) for rank in range(world_size)) / world_size
    for result in ranks(world_size).run(ddp_ranks.unused_on_some_ranks):
        for mode in EVERY_MODE:
            on_all, on_first, on_none = result[mode]
            assert_same(on_first, dict_of(used=whole, sometimes=12.0 / world_size, never=None))
            assert_same(on_all, dict_of(used=whole, sometimes=whole, never=None))
            assert_same(on_none, dict_of(used=whole, sometimes=None, never=None))


def dict_of(**values):
    return {name: None if value is None else torch.full((3,), value) for name, value in values.items()}


def test_rank_without_a_backward_pass_takes_part(ranks):
    for result in ranks(2).run(ddp_ranks.no_backward_on_one_rank):
        for mode in EVERY_MODE:
            assert_same(result[mode], dict_of(used=4.0, sometimes=4.0, never=None))


def test_backward_function_that_returns_none_counts_as_zero(ranks):
    for result in ranks(2).run(ddp_ranks.none_gradients):
        for mode in EVERY_MODE:
            assert_same(result[mode], dict_of(used=2.0, sometimes=2.0, never=None))


def test_second_backward_is_an_error_in_every_mode_and_the_next_step_is_good(ranks):
    for result in ranks(2).run(ddp_ranks.second_backward):
        for mode in EVERY_MODE:
            errors, averaged = result[mode]
            for kind, message in errors:
                assert kind == "UsageError"
                assert "got a gradient from a second backward pass before finish_gradient_sync" in message
                assert "no_sync()" in message
            assert_same(averaged, dict_of(used=3.0, sometimes=3.0, never=None))


def test_no_sync_keeps_gradients_apart_until_finish(ranks):
    for rank, result in enumerate(ranks(2).run(ddp_ranks.accumulate_without_the_last_pass)):
        for mode in EVERY_MODE:
            error, once, alone, averaged = result[mode]
            assert error[0] == "UsageError"
            assert_same(once, dict_of(used=18.0, sometimes=18.0, never=None))
            assert_same(alone, dict_of(used=12.0 * (rank + 1), sometimes=12.0 * (rank + 1), never=None))
            assert_same(averaged, once)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(ranks, use_reentrant):
    expected = ranks(2).run(ddp_ranks.checkpointed, None)[0]["naive"]
    for result in ranks(2).run(ddp_ranks.checkpointed, use_reentrant):
        for mode in EVERY_MODE:
            assert_same(result[mode], expected)


def test_module_used_twice_under_checkpointing(ranks):
    expected = ranks(2).run(ddp_ranks.checkpointed, None, 2)[0]["naive"]
    for mode, averaged in ranks(2).run(ddp_ranks.checkpointed, False, 2)[0].items():
        assert_same(averaged, expected)
        kind, message = ranks(2).run(ddp_ranks.checkpointed, True, 2)[0][mode]
        assert (kind, "use_reentrant=False" in message) == ("UsageError", True)


def test_each_dtype_is_averaged_exactly_in_its_own(ranks):
    for result in ranks(2).run(ddp_ranks.mixed_dtypes, 2.0):
        for mode in EVERY_MODE:
            averaged, sent = result[mode]
            assert [gradient.dtype for gradient in averaged] == list(ddp_ranks.MixedDtypes.DTYPES)
            assert all((gradient == 3.0).all() for gradient in averaged)
            assert len(sent) == (6 if mode in ("naive", "overlap") else 4)


def test_parameters_that_are_not_contiguous(ranks):
    results = ranks(2).run(ddp_ranks.permuted_parameters)
    for mode in EVERY_MODE:
        expected = means([result[mode][1] for result in results])
        for averaged, _, weights in (result[mode] for result in results):
            assert_same(averaged, expected)
            assert_same(weights, results[0][mode][2])


def test_start_values_are_those_of_the_first_rank(ranks):
    first, second = ranks(2).run(ddp_ranks.start_values)
    assert first == second
    assert first["weight"] == [[1.0, 1.0]] * 3
    assert first["frozen"] == [1] * 4
    assert first["row"] == [[1.0] * 4] * 3
    assert first["column"] == [1.0] * 3
    assert first["passing"] == [1.0] * 2


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        (
            "shape",
            "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 1.weight float32 (5, ",
        ),
        ("name", "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 2.weight"),
        ("dtype", "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 1.weight int32"),
        (
            "requires_grad",
            "0.bias float32 (4,) strides (1,) trained on rank 0, parameter 0.bias float32 (4,) strides (1,)",
        ),
        (
            "strides",
            "0.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 0.weight float32 (4, 4) strides",
        ),
        (
            "tie",
            "trained on rank 0, parameter 1.weight float32 (4, 4) strides (4, 1) trained tied to 0.weight on rank 1",
        ),
        ("missing", "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, nothing on rank"),
        ("buffer", "nothing on rank 0, buffer extra float32 (2,)"),
        ("mode", "NaiveDDP with cap_bytes=0.0, gradient_dtype=None on rank 0, OverlappedDDP with"),
        ("cap", "cap_bytes=1000000.0, gradient_dtype=None on rank 0, BucketedDDP with cap_bytes=2000000.0"),
        ("gradient_dtype", "gradient_dtype=None on rank 0, NaiveDDP with cap_bytes=0.0, gradient_dtype=torch.bfloat16"),
    ],
)
def test_layout_that_differs_is_named_on_every_rank(ranks, what, difference):
    for kind, message in ranks(2).run(ddp_ranks.differing_layout, what):
        assert kind == "UsageError"
        assert message.startswith("ranks differ in what they train: ")
        assert difference in message


def test_layout_that_differs_on_the_last_of_three_ranks(ranks):
    for kind, message in ranks(3).run(ddp_ranks.differing_layout, "dtype"):
        assert (kind, message[-7:]) == ("UsageError", " rank 2")


def test_unfrozen_parameter_is_an_error_until_refresh(ranks):
    for result in ranks(2).run(ddp_ranks.unfreeze):
        for mode in EVERY_MODE:
            before, error, after = result[mode]
            assert_same(before, dict_of(used=3.0, sometimes=None, never=None))
            assert error == ("UsageError", "sometimes was unfrozen after it was wrapped: call refresh() on every rank")
            assert_same(after, dict_of(used=3.0, sometimes=3.0, never=None))


def test_state_dict_has_no_prefix_and_loads_either_way(ranks):
    (result,) = ranks(1).run(ddp_ranks.state_dicts)
    assert result.pop("nested names") == []
    assert result.pop("missing") == "RuntimeError"
    assert all(result.values()), result


def test_deep_copy_and_new_wrapper_average_once(ranks):
    for result in ranks(2).run(ddp_ranks.copies):
        for mode in EVERY_MODE:
            shares_nothing, copied, wrapped_again, hooks, launched = result[mode]
            assert shares_nothing
            assert_same(copied, dict_of(used=3.0, sometimes=3.0))
            assert_same(wrapped_again, dict_of(used=3.0, sometimes=3.0, never=None))
            assert hooks == [1, 1, 1]
            assert launched == ["never", "sometimes", "used"]


@pytest.mark.parametrize("what", ["blocks", "model", "around"])
def test_compiled_modules_give_the_same_and_blocks_overlap(ranks, what):
    eager = ranks(2).run(ddp_ranks.compiled, None)[0]
    for result in ranks(2).run(ddp_ranks.compiled, what):
        for mode in EVERY_MODE:
            launched, averaged = result[mode]
            assert_same(averaged, eager[mode][1], rtol=1e-6, atol=1e-6)
            if what == "blocks":
                # Three of four blocks, each with weight and bias; the first bucket ends in the third of them.
                assert launched == {"overlap": 6, "bucketed": 1}.get(mode, 0)


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float64])
def test_gradient_dtype_is_sent_and_the_result_keeps_its_own(ranks, gradient_dtype):
    results = ranks(2).run(ddp_ranks.smaller_traffic, gradient_dtype)
    for mode in EVERY_MODE:
        sent = [
            {name: gradient.to(gradient_dtype) for name, gradient in result[mode][1].items() if gradient is not None}
            for result in results
        ]
        expected = {name: mean.to(torch.float32) for name, mean in means(sent).items()}
        for averaged, _, launches in (result[mode] for result in results):
            assert_same({name: averaged[name] for name in expected}, expected)
            assert all(dtype == gradient_dtype and len(elements) == 1 for _, elements, dtype in launches)


def test_nan_of_one_rank_is_seen_by_all(ranks):
    for result in ranks(2).run(ddp_ranks.not_a_number):
        for mode in EVERY_MODE:
            assert result[mode]["used"].isnan().all()


def test_sparse_gradient_is_named(ranks):
    for result in ranks(2).run(ddp_ranks.sparse_gradient):
        assert set(result.values()) == {
            ("UsageError", "weight has a sparse gradient, which cannot be averaged: choose sparse=False")
        }


def test_module_without_anything_to_train(ranks):
    ranks(2).run(ddp_ranks.nothing_to_train)


def test_wrong_arguments_are_refused(ranks):
    *sizes, dtype = ranks(1).run(ddp_ranks.wrong_arguments)[0]
    assert [message for _, message in sizes] == [
        f"bucket size {size} MB: must be positive, or None for one bucket" for size in ("0", "-1.0", "nan")
    ]
    assert dtype == ("UsageError", "gradient_dtype torch.int32: choose a floating-point dtype")


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_wrapper_without_a_process_group_is_refused(mode):
    with pytest.raises(UsageError, match="needs a process group"):
        MODES[mode](nn.Linear(2, 2))


def test_rank_that_dies_in_a_step_is_the_error():
    with pytest.raises(RankError) as caught:
        launch.run(ddp_ranks.lost_peer, "raise", world_size=2, backend="gloo")
    assert str(caught.value).startswith("rank 1 of 2: ValueError: out of data\n")


def test_rank_that_hangs_in_a_step_is_named_with_the_gradients_that_wait_for_it():
    with pytest.raises(RankError) as caught:
        launch.run(ddp_ranks.lost_peer, "hang", world_size=2, backend="gloo", timeout_s=8)
    heading = str(caught.value).split("\n")[0]
    assert heading.startswith("rank 0 of 2: RuntimeError: ")
    assert "in the all-reduce of gradients of " in heading
    assert heading.endswith("still running: rank 1")
    assert "in lost_peer" in str(caught.value).split("rank 1 was here")[1]


@pytest.mark.multigpu
def test_all_modes_and_torch_train_to_bitwise_equal_weights_on_two_gpus():
    for result in launch.run(ddp_ranks.train_all, [*MODES, *TORCH_MODES], world_size=2, backend="nccl"):
        for weights in result.values():
            assert_same(weights, result["torch"])


@pytest.mark.multigpu
def test_parameter_without_gradient_on_two_gpus():
    for result in launch.run(ddp_ranks.unused_on_some_ranks, world_size=2, backend="nccl"):
        for mode in EVERY_MODE:
            on_all, on_first, on_none = result[mode]
            assert_same(on_first, dict_of(used=18.0, sometimes=6.0, never=None))
            assert_same(on_all, dict_of(used=18.0, sometimes=18.0, never=None))
            assert_same(on_none, dict_of(used=18.0, sometimes=None, never=None))


@pytest.mark.multigpu
def test_delays_change_nothing_on_two_gpus():
    with launch.start(2, backend="nccl") as ranks:
        expected = ranks.run(ddp_ranks.train_all, EVERY_MODE, torch.float32, 2)[0]
        for seed in range(5):
            for result in ranks.run(ddp_ranks.train_with_delays, seed):
                for mode in EVERY_MODE:
                    assert_same(result[mode], expected[mode])


@pytest.mark.multigpu
def test_no_mode_needs_more_memory_than_torch():
    for peaks in launch.run(ddp_ranks.peak_memory_mib, world_size=2, backend="nccl"):
        # Weights, gradients and AdamW's two moments are 128 MiB; a second copy of the gradients would be 32 more.
        assert peaks["torch"] > 128
        assert all(peak < peaks["torch"] + 4 for peak in peaks.values()), peaks


@pytest.mark.gpu
def test_training_on_one_gpu_equals_training_without_ranks():
    expected = ddp_ranks.train_alone(torch.float64)
    (result,) = launch.run(ddp_ranks.train_all, EVERY_MODE, torch.float64, world_size=1, backend="nccl")
    for weights in result.values():
        assert_same(weights, expected, atol=1e-10)
