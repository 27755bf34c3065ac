"""Fully sharded training equals training in one process, in a bounded piece of memory; what cannot work says so."""

from dataclasses import replace

import fsdp_ranks
import pytest
import torch

from cs336sys.accounting.sharding import fsdp
from cs336sys.errors import UsageError
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError
from cs336sys.sizes import ModelSize


def assert_same(left, right, **tolerance):
    """Two dictionaries of tensors (or None) are equal, bitwise unless a tolerance is given."""
    assert left.keys() == right.keys()
    for name in left:
        if left[name] is None or right[name] is None:
            assert left[name] is right[name], name
        else:
            torch.testing.assert_close(left[name], right[name], **{"rtol": 0, "atol": 0} | tolerance, msg=name)


VARIANTS = {
    "plain": {},
    "fetching nothing ahead": {"prefetch": 0},
    "fetching more than there is": {"prefetch": 50},
    "accumulated": {"micro_batches": 3},
    "accumulated with communication": {"micro_batches": 3, "no_sync": False},
    "checkpointed": {"checkpoints": True},
    "evaluated with gradients before each step": {"evaluates": True},
}
THROUGH_THE_HOST = {"through the host": {"host": True}}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_one_process_on_the_whole_batch(ranks, world_size):
    expected = fsdp_ranks.train_alone()
    variants = {name: settings for name, settings in VARIANTS.items() if world_size == 2 or "accumulated" not in name}
    for result in ranks(world_size).run(fsdp_ranks.train_all, variants | THROUGH_THE_HOST):
        for weights in result.values():
            assert_same(weights, expected, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["course", "fused", "sgd"])
def test_any_optimizer_steps_the_slices(ranks, optimizer):
    expected = fsdp_ranks.train_alone(optimizer)
    assert_same(ranks(2).run(fsdp_ranks.train, optimizer)[0], expected, atol=1e-12)


def test_training_in_fp32_equals_one_process_within_rounding(ranks):
    expected = fsdp_ranks.train_alone("sgd", dtype=torch.float32)
    assert_same(ranks(2).run(fsdp_ranks.train, "sgd", 4, torch.float32)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_mean_of_integer_gradients_is_exact(ranks, world_size):
    # Products of 12 and up to 10 are exact in bf16, up to 100 in fp16.
    settings = {
        "fp32": (999, {}),
        "fp16": (100, {"compute_dtype": torch.float16}),
        "bf16": (10, {"compute_dtype": torch.bfloat16}),
        "bf16 sent in fp32": (10, {"compute_dtype": torch.bfloat16, "gradient_dtype": torch.float32}),
        "fp32 sent in bf16": (10, {"gradient_dtype": torch.bfloat16}),
    }
    results = ranks(world_size).run(fsdp_ranks.average_integers, settings)
    for name, (largest, _) in settings.items():
        of_ranks = [fsdp_ranks.factors(rank, largest) for rank in range(world_size)]
        expected = [2 * sum(parts) / world_size for parts in zip(*of_ranks, strict=True)]
        for result in results:
            assert [gradient.dtype for gradient in result[name].values()] == [torch.float32] * len(expected)
            assert all(torch.equal(*pair) for pair in zip(result[name].values(), expected, strict=True)), name


UNITS = ["token_embeddings", "layers.0", "layers.1", "lm_head"]
NORMS = ", ".join([*(f"layers.{layer}.ln{n}.weight" for layer in (0, 1) for n in (1, 2)), "ln_final.weight"])


@pytest.mark.parametrize(("compute_dtype", "reduction"), [(None, "reduce-scatter"), (torch.bfloat16, "all-to-all")])
def test_gathers_come_ahead_of_use_and_reductions_in_the_backward_pass(ranks, compute_dtype, reduction):
    embedding, first, second, head = UNITS
    expected_forward = [("all-gather", unit) for unit in UNITS]
    expected_backward = [
        # The head is still there; the block before it was gathered while the head ran forward.
        ("all-gather", first),
        (reduction, head),
        ("all-gather", embedding),
        (reduction, second),
        (reduction, first),
        # The backward pass ends.
        (reduction, embedding),
        ("all-reduce", NORMS),
    ]
    for forward, backward, late, evaluation in ranks(2).run(fsdp_ranks.launches, compute_dtype, 1):
        assert forward == [*expected_forward, ("all-gather", second)]
        assert backward == expected_backward
        assert late == 0
        assert evaluation == 2 * expected_forward


def test_nothing_is_gathered_ahead_of_use_if_so_asked(ranks):
    embedding, first, second, _ = UNITS
    forward, backward, _, evaluation = ranks(2).run(fsdp_ranks.launches, None, 0)[0]
    assert forward == [("all-gather", unit) for unit in UNITS]
    assert evaluation == 2 * forward
    gathers = [unit for collective, unit in backward if collective == "all-gather"]
    assert gathers == [second, first, embedding]


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_only_units_in_use_and_those_fetched_ahead_have_memory(ranks, prefetch, checkpoints):
    for moments, between, after in ranks(2).run(fsdp_ranks.held_while_running, prefetch, checkpoints, torch.bfloat16):
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


@pytest.mark.parametrize("prefetch", [1, 2])
def test_order_of_units_may_change(ranks, prefetch):
    """What was fetched in vain is freed, gradients are right, and each unit reduces once, however often it is used."""
    orders = ["012345", "543210", "5432", "0", "010123", "012345", "012345", "024", "135"]
    orders = [[int(index) for index in order] for order in orders]
    for result in ranks(2).run(fsdp_ranks.changing_order, orders, prefetch):
        for order, (most, sharded, expected, reductions) in zip(orders, result, strict=True):
            assert most <= 1 + prefetch
            assert_same(sharded, expected, atol=1e-14)
            assert sorted(reductions) == [f"blocks.{index}" for index in sorted(set(order))]


def test_weights_are_cast_and_gradients_averaged_beside_the_current_stream(ranks):
    """Waiting is "communicate", too: for the weights on the stream that computes, for half precision on another."""
    gather = ["side waits for main", "on side", "communicate", "off side", "communicate"]
    notes, gradient = ranks(2).run(fsdp_ranks.side_streams, torch.bfloat16)[0]
    exchange = ["communicate", "mean waits for main", "on mean", "communicate", "off mean", "main waits for mean"]
    # The one unit is the last: it is kept for the backward pass from the second step on.
    assert notes == [*gather, *gather, *exchange]
    assert gradient.any()
    notes, _ = ranks(2).run(fsdp_ranks.side_streams, None)[0]
    assert notes == [*gather, *gather, "communicate", "communicate"]


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_half_precision_gradients_are_summed_in_full_precision(ranks, world_size, compute_dtype):
    for averaged, means, of_gradients, of_slices in ranks(world_size).run(fsdp_ranks.mixed_precision, compute_dtype):
        assert of_gradients == of_slices == {torch.float32}
        assert averaged.keys() == means.keys()
        for name in means:
            # Replicated gradients are summed in another order, with fp32's roundings of 2^-24; in half precision a sum
            # would be 2^-11 off.
            atol = 2**-22 * means[name].abs().max().item() if "ln" in name else 1e-9
            torch.testing.assert_close(averaged[name], means[name], rtol=0, atol=atol)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_torchs_own_trains_to_the_same_weights(ranks, compute_dtype):
    for ours, theirs in ranks(2).run(fsdp_ranks.beside_fully_shard, compute_dtype):
        assert_same(ours, theirs, rtol=1e-6, atol=1e-7)


def test_delays_change_nothing(ranks):
    expected = ranks(2).run(fsdp_ranks.trained_without_delays)[0]
    for seed in range(3):
        for result in ranks(2).run(fsdp_ranks.train_with_delays, seed):
            for delayed, undisturbed in zip(result, expected, strict=True):
                assert_same(delayed, undisturbed)


def mean(parts):
    """Over ranks; None counts as zero, and is the result if there is nothing else."""
    given = [part for part in parts if part is not None]
    return sum(given) / len(parts) if given else None


def means(results):
    return {name: mean([result[name] for result in results]) for name in results[0]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameter_without_gradient_counts_as_zero_and_stays_none_if_nobody_has_one(ranks, world_size):
    everywhere = tuple(range(world_size))
    cases = [(everywhere, False), ((0,), False), ((world_size - 1,), False), ((), False), (everywhere, True)]
    results = ranks(world_size).run(fsdp_ranks.unused, cases)
    for case in range(len(cases)):
        expected = means([result[case][1] for result in results])
        assert expected["blocks.0.never.weight"] is None
        assert (expected["blocks.0.sometimes.weight"] is None) == (cases[case][0] == ())
        assert (expected["blocks.2.always.weight"] is None) == cases[case][1]
        for result in results:
            assert_same(result[case][0], expected)


def test_zeros_that_zero_grad_left_stay_zeros(ranks):
    for found in ranks(2).run(fsdp_ranks.unused_keeps_what_was_there):
        assert all(gradient is not None for gradient in found.values())
        assert not found["blocks.0.never.weight"].any()


def test_gradient_of_any_pass_of_a_step_stays(ranks):
    for found in ranks(2).run(fsdp_ranks.used_in_the_second_of_three_passes):
        assert found["blocks.0.sometimes.weight"].any()
        assert found["blocks.0.never.weight"] is None


def test_parameter_frozen_or_unfrozen_is_an_error_until_refresh(ranks):
    names = {f"blocks.{block}.{part}" for block in range(3) for part in ("always.weight", "sometimes.weight", "gain")}
    for before, after, whole, errors in ranks(2).run(fsdp_ranks.freeze_and_unfreeze):
        assert before == names - {"blocks.0.always.weight", "blocks.1.gain"}
        assert after == names - {"blocks.2.sometimes.weight"}
        assert all(whole[name] is not None for name in after)
        (kind, message), (refused, difference) = errors
        assert (kind, refused) == ("UsageError", "UsageError")
        assert message == (
            "blocks.0.always.weight was frozen or unfrozen after it was wrapped: call refresh() on every rank"
        )
        assert "blocks.2.always.weight trained on rank 0, blocks.2.always.weight frozen on rank 1" in difference


def test_gradients_pass_through_layers_that_have_none(ranks):
    for found, expected in ranks(2).run(fsdp_ranks.through_frozen_layers):
        assert [torch.equal(gradient, expected) for gradient in found] == [True, True]


def test_no_sync_sends_nothing_until_the_last_pass_or_finish(ranks):
    results = ranks(2).run(fsdp_ranks.accumulation)[0]
    for compute_dtype in (None, torch.bfloat16):
        of_dtype = [result for result in results if result[0] == compute_dtype]
        *_, expected = next(result for result in of_dtype if all(result[1]))
        for _, synchronized, reductions, found in of_dtype:
            # Units: the embedding, three blocks, the head.
            assert reductions == 5 * max(1, sum(synchronized)), synchronized
            # Kept gradients are summed in fp32 here and by autograd: the order of additions differs.
            assert_same(found, expected, rtol=1e-5, atol=1e-7)


def test_units_may_return_anything_and_be_traversed_twice(ranks):
    results, error = ranks(2).run(fsdp_ranks.outputs)[0]
    for kind in fsdp_ranks.KINDS:
        sharded, alone = results[kind]
        assert_same(sharded, alone, rtol=1e-6, atol=1e-6)
    assert error == (
        "UsageError",
        "blocks.0 returns a Hidden, in which no tensor was found: return tensors, or lists, tuples, dictionaries or "
        "dataclasses of them",
    )


def test_two_forward_passes_may_come_before_the_backward_pass(ranks):
    for results in ranks(2).run(fsdp_ranks.two_forward_passes_before_backward):
        for sharded, expected in results:
            assert_same(sharded, expected, atol=1e-12)


def test_units_may_share_layers(ranks):
    for sharded, expected, gathered in ranks(2).run(fsdp_ranks.shared_parts):
        assert_same(sharded, expected, atol=1e-14)
        assert gathered == {}


def test_layers_of_torch(ranks):
    units, (ours, plain, sharded, alone), norms, of_gradients = ranks(2).run(fsdp_ranks.layers_of_torch)[0]
    # The module has positions of its own, which makes it a unit around the others.
    assert units == ["Attention", "layers.0"]
    assert torch.equal(ours, plain)
    assert_same(sharded, alone, atol=1e-12)
    # What torch's norm gets and what leaves it.
    assert norms == [(torch.float32, torch.bfloat16)]
    assert of_gradients == {torch.float32}


def test_training_goes_on_after_a_step_that_failed_on_all_ranks(ranks):
    in_forward, in_backward, undisturbed = ranks(2).run(fsdp_ranks.recovers)[0]
    assert in_forward[0] == in_backward[0] == [("ArithmeticError", "")]
    for _, weights, gathered in (in_forward, in_backward):
        assert_same(weights, undisturbed[1])
        assert gathered == {}


def test_evaluation_frees_everything_and_needs_no_wrapper(ranks):
    for results, sharded, expected in ranks(2).run(fsdp_ranks.evaluation):
        for found, alone, gathered in results:
            assert torch.equal(found, alone)
            assert gathered == {}
        assert_same(sharded, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("norm_type", "largest"), [(2.0, 0.1), (1.0, 0.5), (float("inf"), 0.01), (2.0, 1e9)])
def test_clipping_is_that_of_the_whole_gradient(ranks, world_size, norm_type, largest):
    for norm, expected, sharded, alone in ranks(world_size).run(fsdp_ranks.clipped, norm_type, largest):
        torch.testing.assert_close(norm, expected)
        assert_same(sharded, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_on_one_rank_is_seen_by_all(ranks, value):
    for error, before, after, norm, infinite in ranks(2).run(fsdp_ranks.not_a_number, value):
        assert error == (
            "RuntimeError",
            f"the norm of the gradients is {value}: some are NaN or infinite, on some rank",
        )
        assert_same(before, after, equal_nan=True)
        assert not norm.isfinite()
        assert not infinite.isfinite()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_whole_parameters_are_those_of_the_first_rank(ranks, world_size):
    results = ranks(world_size).run(fsdp_ranks.whole_parameters)
    for rank, (whole, expected, shapes, offset) in enumerate(results):
        assert_same(whole, expected)
        assert torch.equal(offset, results[0][3])
        each = -(-15 // world_size)
        assert shapes["blocks.0.up.weight"] == (max(0, min(each, 15 - rank * each)), 7)
        assert shapes["blocks.0.norm.weight"] == (15,)
        assert shapes["narrow.weight"] == ((3, 7), (2 - rank, 7), None, (int(rank < 3), 7))[world_size - 1]
        assert shapes["gain"] == (7,)


@pytest.mark.parametrize("when", ["before", "after", "instead", "checkpointed"])
def test_compiled_blocks_share_one_graph(ranks, when):
    _, eager, _ = ranks(2).run(fsdp_ranks.compiled, None)[0]
    for graphs, weights, (kind, message) in ranks(2).run(fsdp_ranks.compiled, when):
        assert graphs == 1
        assert_same(weights, eager)
        assert (kind, message.partition(" is compiled as a whole")[0]) == ("UsageError", "BasicsTransformerLM")


def test_wrapper_that_is_compiled_runs_uncompiled(ranks):
    _, eager, _ = ranks(2).run(fsdp_ranks.compiled, None)[0]
    graphs, weights, _ = ranks(2).run(fsdp_ranks.compiled, "around")[0]
    assert graphs == 0
    assert_same(weights, eager)


def test_checkpoints_may_be_around_parts_of_units_and_around_several(ranks):
    (plain, _), *others = ranks(2).run(fsdp_ranks.checkpointed_in_parts)[0]
    for found, gathered in others:
        assert_same(found, plain)
        assert gathered == {}


@pytest.mark.parametrize("world_size", [2, 3])
def test_module_made_on_the_meta_device_starts_as_one_made_as_usual(ranks, world_size):
    for results, trained, error in ranks(world_size).run(fsdp_ranks.from_meta):
        for found, expected in results:
            assert_same(found, expected)
        assert trained == [True, True, True, True, False, False, True]
        assert error == (
            "UsageError",
            "Network is on the meta device and its class Network has no reset_parameters(): "
            "give FSDP a function to initialize it",
        )


def test_what_cannot_work_is_refused_by_name(ranks):
    for errors in ranks(2).run(fsdp_ranks.refusals):
        assert {kind for kind, _ in errors.values()} == {"UsageError"}
        messages = {what: message for what, (_, message) in errors.items()}
        assert messages["again"] == "the module (FSDP) is wrapped already: wrap the plain module"
        assert messages["the inside again"] == "0.0 (Linear) is wrapped already: wrap the plain module"
        assert messages["over DDP"] == "0 (OverlappedDDP) is wrapped already: wrap the plain module"
        assert messages["over torch's"] == "the module (FSDPSequential) is wrapped already: wrap the plain module"
        assert messages["prefetch"] == "prefetch -1: must be at least 0"
        for name in ("compute_dtype", "gradient_dtype"):
            assert messages[name] == f"{name} torch.int8: choose a floating-point dtype"
        assert messages["moved"] == "an FSDP module cannot be moved or converted: do it before it is wrapped"
        assert messages["copied"].startswith("an FSDP module cannot be copied or pickled")
        assert messages["assigned"].startswith("assign=True would replace the slices")
        assert messages["sparse"] == "weight has a sparse gradient, which cannot be averaged: choose sparse=False"
        assert messages["another group"].startswith("this FSDP module was built in another process group")


def test_forward_and_construction_outside_a_process_group_are_refused(ranks):
    for (kind, message), construction in ranks(2).run(fsdp_ranks.outside_the_group):
        assert kind == "UsageError"
        assert message.startswith("this FSDP module was built in another process group")
        assert construction[0] == "UsageError"
    with pytest.raises(UsageError, match="FSDP needs a process group"):
        FSDP(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("shape", "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 1.weight float32 (5"),
        ("settings", "prefetch=1, gradient_dtype=None, units=['0', '1'] on rank 0, FSDP with compute_dtype=None, pref"),
        ("units", "gradient_dtype=None, units=['0', '1'] on rank 0, FSDP with compute_dtype=None, prefetch=1, gradie"),
    ],
)
def test_ranks_that_build_something_else_are_told_on_every_rank(ranks, what, difference):
    for kind, message in ranks(2).run(fsdp_ranks.differing_layout, what):
        assert kind == "UsageError"
        assert message.startswith("ranks differ in what they train: ")
        assert difference in message


def test_state_dict_is_the_modules_with_slices(ranks):
    names, expected, same = ranks(2).run(fsdp_ranks.state_dicts)[0]
    assert names == expected
    assert same


def test_rank_that_dies_in_a_step_is_the_error():
    with pytest.raises(RankError) as caught:
        launch.run(fsdp_ranks.lost_peer, "raise", world_size=2, backend="gloo")
    assert str(caught.value).startswith("rank 1 of 2: ValueError: out of data\n")


def test_rank_that_hangs_in_a_step_is_named_with_the_weights_that_wait_for_it():
    with pytest.raises(RankError) as caught:
        launch.run(fsdp_ranks.lost_peer, "hang", world_size=2, backend="gloo", timeout_s=8)
    heading = str(caught.value).split("\n")[0]
    assert heading.startswith("rank 0 of 2: RuntimeError: ")
    assert "in the all-gather of weights of token_embeddings" in heading
    assert heading.endswith("still running: rank 1")


def test_lateness_is_told_for_every_gather(ranks):
    for timings in ranks(2).run(fsdp_ranks.timings):
        embedding, first, second, head = UNITS
        forward = [(name, False) for name in (embedding, first, second, head)]
        assert [(name, is_backward) for name, is_backward, _ in timings] == [
            *forward,
            *((name, True) for name in (second, first, embedding)),
        ]
        assert all(late_ms >= 0 for *_, late_ms in timings)


SIZE = ModelSize("", d_model=24, d_ff=40, num_layers=3, num_heads=2, vocab_size=30, context=8)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_memory_is_what_accounting_says(ranks, world_size, compute_dtype):
    for rank, (state, gathered) in enumerate(ranks(world_size).run(fsdp_ranks.state_memory, compute_dtype)):
        expected = fsdp.fully_sharded_state(SIZE, rank, world_size)
        assert state == (expected.parameters, expected.gradients, expected.optimizer_state)
        assert gathered == fsdp.gathered_bytes(SIZE, 2 if compute_dtype else 4, world_size)


@pytest.mark.parametrize(("compute_dtype", "element_bytes"), [(None, 4), (torch.bfloat16, 2)])
def test_communication_is_what_accounting_says(ranks, compute_dtype, element_bytes):
    expected = fsdp.step_communication(replace(SIZE, num_layers=2), element_bytes, 2)
    for sent in ranks(2).run(fsdp_ranks.sent_bytes, compute_dtype):
        gathers, scatters, exchanges, means = (
            sum(count for name, count in sent.items() if name.startswith(start))
            for start in ("allgather", "reduce_scatter", "alltoall", "allreduce_coalesced")
        )
        # The last norm is averaged alone, not as one of several; so are flags of all 21 parameters, one byte each.
        assert gathers == expected.all_gather
        assert scatters + exchanges == expected.reduce_scatter
        assert (scatters == 0) == (compute_dtype is not None)
        assert means + sent["allreduce_"] == expected.all_reduce + 21


def test_whole_parameters_are_gone_after_wrapping(ranks):
    for alive, slices, buffers in ranks(2).run(fsdp_ranks.memory_after_wrapping):
        # A generator's state and the like.
        assert slices + buffers <= alive < slices + buffers + 1000


@pytest.fixture(scope="module")
def two_gpus():
    with launch.start(2, backend="nccl") as ranks:
        yield ranks


@pytest.mark.multigpu
def test_training_on_two_gpus_equals_one_process_on_the_whole_batch(two_gpus):
    expected = fsdp_ranks.train_alone()
    for result in two_gpus.run(fsdp_ranks.train_all, VARIANTS):
        for weights in result.values():
            assert_same(weights, expected, atol=1e-10)


@pytest.mark.multigpu
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_torchs_own_trains_to_the_same_weights_on_two_gpus(two_gpus, compute_dtype):
    for ours, theirs in two_gpus.run(fsdp_ranks.beside_fully_shard, compute_dtype):
        assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.multigpu
def test_delays_change_nothing_on_two_gpus(two_gpus):
    expected = two_gpus.run(fsdp_ranks.trained_without_delays)[0]
    for seed in range(5):
        for result in two_gpus.run(fsdp_ranks.train_with_delays, seed):
            for delayed, undisturbed in zip(result, expected, strict=True):
                # Sums by atomic additions differ in the last places, here and there by one rounding to half precision.
                assert_same(delayed, undisturbed, rtol=1e-3, atol=1e-4)


@pytest.mark.multigpu
@pytest.mark.parametrize(("compute_dtype", "reduction"), [(None, "reduce-scatter"), (torch.bfloat16, "all-to-all")])
def test_half_precision_gradients_are_summed_in_full_precision_on_two_gpus(two_gpus, compute_dtype, reduction):
    _, backward, late, _ = two_gpus.run(fsdp_ranks.launches, compute_dtype, 1)[0]
    assert [collective for collective, _ in backward].count(reduction) == len(UNITS)
    assert late == 0
    if compute_dtype:
        for averaged, means, of_gradients, _ in two_gpus.run(fsdp_ranks.mixed_precision, compute_dtype):
            assert of_gradients == {torch.float32}
            assert_same(averaged, means, rtol=1e-5, atol=1e-6)


@pytest.mark.multigpu
def test_units_in_use_and_fetched_ahead_alone_have_memory_on_two_gpus(two_gpus):
    for moments, between, after in two_gpus.run(fsdp_ranks.held_while_running, 1, True, torch.bfloat16):
        assert all(unit in held and len(held) <= 2 for unit, held in moments)
        assert len(between) == 2
        assert after == [{}] * 4


@pytest.mark.multigpu
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(("compute_dtype", "element_bytes"), [(None, 4), (torch.bfloat16, 2)])
def test_peak_memory_is_within_the_formula_and_torchs(two_gpus, compute_dtype, element_bytes, prefetch):
    bound = fsdp.fully_sharded_peak(fsdp_ranks.LARGE, element_bytes, 2, prefetch=prefetch)
    for ours, torchs in two_gpus.run(fsdp_ranks.peak_memory, compute_dtype, prefetch):
        # Activations of 16 tokens, and the workspace of matrix products, 32 MiB.
        assert bound.state.total < ours < bound.total + 50 * 2**20
        assert prefetch > 1 or ours < 1.01 * torchs


@pytest.mark.multigpu
def test_compiled_blocks_on_two_gpus(two_gpus):
    for (eager, compiled), graphs in two_gpus.run(fsdp_ranks.compiled_by_inductor):
        assert graphs == 1
        assert_same(compiled, eager, rtol=1e-3, atol=1e-4)


@pytest.mark.multigpu
def test_lateness_is_told_on_two_gpus(two_gpus):
    for timings in two_gpus.run(fsdp_ranks.timings):
        assert [name for name, *_ in timings] == [*UNITS, *UNITS[-2::-1]]
        assert all(abs(late_ms) < 1000 for *_, late_ms in timings)


@pytest.mark.multigpu
def test_clipping_and_accumulation_on_two_gpus(two_gpus):
    for norm, expected, sharded, alone in two_gpus.run(fsdp_ranks.clipped, 2.0, 0.1):
        torch.testing.assert_close(norm, expected)
        assert_same(
            sharded,
            alone,
            rtol=1e-8,
            atol=1e-10,
        )
    results = two_gpus.run(fsdp_ranks.accumulation)[0]
    for compute_dtype in (None, torch.bfloat16):
        found = {synchronized: whole for dtype, synchronized, _, whole in results if dtype == compute_dtype}
        for whole in found.values():
            assert_same(whole, found[True, True, True], rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
def test_training_on_one_gpu_equals_training_without_ranks():
    expected = fsdp_ranks.train_alone()
    (result,) = launch.run(fsdp_ranks.train_all, VARIANTS, world_size=1, backend="nccl")
    for weights in result.values():
        assert_same(weights, expected, atol=1e-10)
