"""Training with a sharded optimizer equals training with the class itself, in either mode; what cannot work says so."""

import dataclasses
import math

import pytest
import sharded_ranks
import torch
from sharded_ranks import CLASSES, MODES
from torch import nn

from cs336sys.accounting.sharding.optimizer import flat_optimizer_state, greedy_partition, sharded_optimizer_state
from cs336sys.errors import UsageError
from cs336sys.parallel.buckets import TensorSpec, assign_buckets
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.parallel.sharded_optimizer.groups import in_model_order
from cs336sys.parallel.sharded_optimizer.optimizer_class import require_elementwise

each_mode = pytest.mark.parametrize("mode", MODES)


def assert_same(left, right, **tolerance):
    """Two dictionaries of tensors are equal, bitwise unless a tolerance is given."""
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], **{"rtol": 0, "atol": 0} | tolerance, msg=name)


def assert_same_state(state, expected, **tolerance):
    """Two state dicts hold the same of every parameter and have the same groups."""
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for index, kept in state["state"].items():
        others = expected["state"][index]
        assert kept.keys() == others.keys()
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(
                    value, others[key], **{"rtol": 0, "atol": 0} | tolerance, msg=f"{key} of {index}"
                )
            else:
                assert value == others[key]


def dict_of(**values):
    return {name: torch.full((3,), value) for name, value in values.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_the_class_on_one_process(ranks, world_size):
    names = [name for name in CLASSES if name != "Adafactor"] if world_size == 2 else ["AdamW", "SGD"]
    results = ranks(world_size).run(sharded_ranks.train_all, names, MODES, torch.float64)
    for name in names:
        expected, _ = sharded_ranks.train_alone(name, torch.float64)
        for result in results:
            for mode in MODES:
                for overlap in (False, True):
                    assert_same(result[name, mode, overlap], expected, atol=1e-12)


def test_whole_parameters_serve_a_class_that_mixes_elements(ranks):
    expected, _ = sharded_ranks.train_alone("Adafactor", torch.float64)
    for result in ranks(2).run(sharded_ranks.train_all, ["Adafactor"], ["default"], torch.float64):
        for weights in result.values():
            assert_same(weights, expected, atol=1e-12)


def test_both_modes_and_torch_train_to_bitwise_equal_weights_on_two_ranks(ranks):
    expected = ranks(2).run(sharded_ranks.torch_zero, 4)[0]
    for result in ranks(2).run(sharded_ranks.train_all, ["AdamW"]):
        for weights in result.values():
            assert_same(weights, expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@each_mode
def test_step_along_integer_gradients_is_exact(ranks, mode, world_size):
    parts = zip(*map(sharded_ranks.factors, range(world_size)), strict=True)
    expected = [-sum(part) / world_size for part in parts]
    for result in ranks(world_size).run(sharded_ranks.step_of_integers, mode, [1e-9, sharded_ranks.SMALL_MB, None]):
        for parameters in result.values():
            assert all(torch.equal(ours, exact) for ours, exact in zip(parameters, expected, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulated_gradients_equal_one_process_on_the_whole_batch(ranks, world_size):
    expected, _ = sharded_ranks.train_alone("AdamW", torch.float64)
    for result in ranks(world_size).run(sharded_ranks.train_all, ["AdamW"], MODES, torch.float64, 4, 2):
        for weights in result.values():
            assert_same(weights, expected, atol=1e-12)


def test_delays_change_nothing(ranks):
    expected = ranks(2).run(sharded_ranks.train_all, ["AdamW"], MODES, torch.float32, 3)[0]
    for seed in range(3):
        for result in ranks(2).run(sharded_ranks.train_with_delays, seed, ["AdamW"]):
            for case, weights in result.items():
                assert_same(weights, expected[case])


def test_nothing_is_used_before_it_is_waited_for(ranks):
    expected = ranks(2).run(sharded_ranks.train_all, ["AdamW"], MODES, torch.float32, 3)[0]
    for result in ranks(2).run(sharded_ranks.train_with_lazy_operations, ["AdamW"]):
        for case, weights in result.items():
            assert_same(weights, expected[case])


LAYERS = ["scale", "embedding", *(f"blocks.{n}" for n in range(4))]


def forward_events(operation):
    """Every layer's parameters are waited for right before it runs; the scale's were, within the step before."""
    blocks = [event for n in range(4) for event in (f"wait for {operation} of blocks.{n}", f"block {n}")]
    return [f"wait for {operation} of embedding", *blocks]


def before_start(events, operation):
    """What happens before operations are started again, but for those of gradients."""
    before = events[: events.index(f"start {operation} of scale")]
    return [event for event in before if "MeanScatter" not in event]


def test_flat_communicates_while_the_passes_run(ranks):
    backward = []
    for place, layer in enumerate(reversed(LAYERS)):
        backward.append(f"start MeanScatter of {layer}")
        # At most three buckets of whole gradients are alive.
        backward += [f"wait for MeanScatter of {LAYERS[-1 - (place - 2)]}"] if place >= 2 else []
    expected = [
        *forward_events("SliceGather"),
        *backward,
        "backward done",
        *(f"wait for MeanScatter of {layer}" for layer in ("embedding", "scale")),
        *(f"start SliceGather of {layer}" for layer in LAYERS),
        "wait for SliceGather of scale",
        "step done",
    ]
    for events, in_state_dict, without_last in ranks(2).run(sharded_ranks.order_of_events, "flat"):
        assert events == expected
        assert in_state_dict == [f"wait for SliceGather of {layer}" for layer in LAYERS[1:]]
        assert before_start(without_last, "SliceGather") == forward_events("SliceGather")[:-1]


def test_whole_parameters_arrive_while_the_forward_pass_runs(ranks):
    expected = [
        *forward_events("Broadcasts"),
        "backward done",
        *(f"start Broadcasts of {layer}" for layer in LAYERS),
        "wait for Broadcasts of scale",
        "step done",
    ]
    for events, in_state_dict, without_last in ranks(2).run(sharded_ranks.order_of_events, "default"):
        assert events == expected
        assert in_state_dict == [f"wait for Broadcasts of {layer}" for layer in LAYERS[1:]]
        assert before_start(without_last, "Broadcasts") == forward_events("Broadcasts")[:-1]


@each_mode
@pytest.mark.parametrize("what", ["blocks", "model", "around"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_modules_wait_in_every_step(ranks, mode, what, when):
    eager, *_ = ranks(2).run(sharded_ranks.compiled, mode, None, None)[0]
    for weights, waits, recompiled in ranks(2).run(sharded_ranks.compiled, mode, what, when):
        assert_same(weights, eager, rtol=1e-6, atol=1e-6)
        # Before each block; if all is compiled as one, before the model.
        assert waits == (LAYERS if (what, when) == ("model", "before") else LAYERS[1:])
        assert recompiled == 0


@each_mode
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameter_without_gradient_is_left_alone(ranks, mode, world_size):
    model = sharded_ranks.PartlyUsed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
    whole = sum(12.0 * (rank + 1) for rank in range(world_size)) / world_size
    expected = []
    for sometimes in (whole, 12.0 / world_size, None):
        optimizer.zero_grad()
        model.used.grad = torch.full((3,), whole)
        model.sometimes.grad = None if sometimes is None else torch.full((3,), sometimes)
        optimizer.step()
        expected.append(sharded_ranks.weights(model))
    steps = {}
    for history, own_steps in ranks(world_size).run(sharded_ranks.unused_parameters, mode):
        for after, exact in zip(history, expected, strict=True):
            assert_same(after, exact, rtol=1e-6)
        steps |= own_steps
    assert steps == {"used": 3, "sometimes": 2}


@each_mode
def test_backward_function_that_returns_none_counts_as_zero(ranks, mode):
    for weights in ranks(2).run(sharded_ranks.none_gradient, mode):
        assert_same(weights, dict_of(used=-1.0, sometimes=-1.0, never=1.0))


def test_gradients_ready_in_another_order_on_each_rank(ranks):
    for weights in ranks(2).run(sharded_ranks.differently_ordered, [(0, 1, 2, 3), (2, 0, 3, 1)]):
        assert_same(weights, {f"branches.{i}": torch.full((3,), 1 - 1.5 * (i + 1)) for i in range(4)})


def test_second_backward_is_an_error_and_the_next_step_is_good(ranks):
    for (kind, message), weights in ranks(2).run(sharded_ranks.second_backward):
        assert kind == "UsageError"
        assert "got a gradient from a second backward pass before finish_gradient_synchronization()" in message
        assert "no_sync()" in message
        assert_same(weights, dict_of(used=-2.0, sometimes=-2.0, never=1.0))


def test_gradients_add_up_until_they_are_zeroed(ranks):
    """As in any optimizer: 1 - 3, then - 6, - 6 again without a new pass, and nothing after zero_grad."""
    assert ranks(2).run(sharded_ranks.gradients_without_zeroing) == [[-2.0, -8.0, -14.0, -14.0]] * 2


@each_mode
def test_closure_runs_once_with_gradients_on_every_rank(ranks, mode):
    for rank, (loss, calls, weights) in enumerate(ranks(2).run(sharded_ranks.closure_step, mode)):
        assert loss == 12.0 * (rank + 1)
        assert calls == [True]
        assert_same(weights, dict_of(used=-2.0, sometimes=-2.0, never=1.0))


@each_mode
def test_step_takes_the_class_arguments_and_calls_hooks(ranks, mode):
    for weights, calls, seen in ranks(2).run(sharded_ranks.step_arguments_and_hooks, mode):
        assert_same(weights, dict_of(used=-0.5, sometimes=-0.5, never=1.0))
        assert calls == 1 or mode == "flat"
        assert seen == [("pre", {"factor": 0.5}), ("post", {"factor": 0.5})]


@each_mode
@pytest.mark.parametrize("overlap", [False, True])
def test_groups_and_a_scheduler(ranks, mode, overlap):
    expected, rates = sharded_ranks.train_groups_alone()
    for weights, seen in ranks(2).run(sharded_ranks.train_groups, mode, overlap):
        assert_same(weights, expected, atol=1e-12)
        assert seen == rates


@each_mode
@pytest.mark.parametrize(("world_size", "overlap"), [(2, True), (3, False)])
def test_group_added_and_parameters_unfrozen_on_the_way(ranks, mode, world_size, overlap):
    expected = sharded_ranks.grow_alone()
    for weights in ranks(world_size).run(sharded_ranks.grow_sharded, mode, overlap):
        assert_same(weights, expected, atol=1e-12)


@each_mode
def test_group_that_is_refused_leaves_the_optimizer_as_it_was(ranks, mode):
    for errors, groups in ranks(2).run(sharded_ranks.failed_groups, mode):
        rate, options, shape, kind, known = errors
        assert rate == ("ValueError", "AdamW: lr is -1.0, but must be at least 0")
        assert "lr=0.1, weight_decay=0.01 on rank 0, group 1 with" in options[1]
        assert "(4,) strides (1,) trained on rank 0, parameter 3 of group 1 float32 (5,)" in shape[1]
        assert "TypeError: optimizer can only optimize Tensors, but one of the params is str on rank 1" in kind[1]
        assert known[0] == "ValueError"
        assert {error[0] for error in (options, shape, kind)} == {"UsageError"}
        assert groups == 1


@each_mode
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}, {"foreach": True}])
def test_fewer_parameters_than_ranks(ranks, mode, options):
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    for step in range(2):
        model.weight.grad = torch.full((1, 3), 2.0 * (step + 1))
        optimizer.step()
    results = ranks(3).run(sharded_ranks.few_parameters, mode, options)
    for weight, _ in results:
        torch.testing.assert_close(weight, model.weight.detach(), rtol=1e-6, atol=0)
    assert [states for _, states in results] == [1, 0, 0]


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resumed_training_is_bitwise_the_same_on_as_many_ranks(ranks, mode, dtype):
    through = ranks(2).run(sharded_ranks.train_and_save, mode, dtype, None, None, range(6))
    saved = ranks(2).run(sharded_ranks.train_and_save, mode, dtype, None, None, range(3))
    _, weights, consolidated, _ = saved[0]
    for state in (consolidated, [own for *_, own in saved]):
        resumed = ranks(2).run(sharded_ranks.train_and_save, mode, dtype, weights, state, range(3, 6))
        for rank in range(2):
            assert through[rank][0] == saved[rank][0] + resumed[rank][0]
            assert_same(resumed[rank][1], through[rank][1])
            assert_same_state(resumed[rank][3], through[rank][3])
        assert_same_state(resumed[0][2], through[0][2])
    assert [result[2] for result in saved[1:]] == [None]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (4, 2), (1, 3)])
@pytest.mark.parametrize(("mode", "other_mode"), [("default", "default"), ("flat", "flat"), ("flat", "default")])
def test_training_goes_on_with_another_number_of_ranks(ranks, mode, other_mode, before, after):
    run = sharded_ranks.train_and_save
    saved = ranks(before).run(run, mode, torch.float64, None, None, range(2))
    _, weights, consolidated, _ = saved[0]
    resumed = ranks(after).run(run, other_mode, torch.float64, weights, consolidated, range(2, 4))
    losses, expected, state = sharded_ranks.losses_alone(torch.float64, None, None, range(4))
    assert mean_loss(saved) + mean_loss(resumed) == pytest.approx(losses, abs=1e-12)
    for _, weights, *_ in resumed:
        assert_same(weights, expected, atol=1e-12)
    consolidated = resumed[0][2]
    assert consolidated.pop("parameters")[1] == {"name": "first.weight", "shape": (48, 7)}
    for group in consolidated["param_groups"]:
        del group["param_names"]
    assert_same_state(consolidated, state, atol=1e-12)


def mean_loss(results):
    """Of every step: each rank has an equal share of the batch."""
    return [sum(losses) / len(losses) for losses in zip(*(result[0] for result in results), strict=True)]


@each_mode
def test_state_moves_to_and_from_an_optimizer_on_one_process(ranks, mode):
    losses, expected, _ = sharded_ranks.losses_alone(torch.float64, None, None, range(6))
    run = sharded_ranks.train_and_save
    _, weights, consolidated, _ = ranks(3).run(run, mode, torch.float64, None, None, range(2))[0]
    alone, weights, state = sharded_ranks.losses_alone(torch.float64, weights, consolidated, range(2, 4))
    resumed = ranks(3).run(run, mode, torch.float64, weights, state, range(4, 6))
    assert alone + mean_loss(resumed) == pytest.approx(losses[2:], abs=1e-12)
    assert_same(resumed[0][1], expected, atol=1e-12)


@each_mode
@pytest.mark.parametrize("name", ["course", "SGD", "AdamW per tensor"])
def test_consolidated_state_is_that_of_the_class(ranks, mode, name):
    weights, expected = sharded_ranks.train_alone(name, torch.float64)
    _, trained, consolidated, _ = ranks(3).run(
        sharded_ranks.train_and_save, mode, torch.float64, None, None, range(4), name
    )[0]
    assert_same(trained, weights, atol=1e-12)
    assert_same_state({**consolidated, "param_groups": expected["param_groups"]}, expected, atol=1e-12)


@each_mode
def test_state_that_does_not_fit_is_refused_on_every_rank_and_nothing_is_loaded(ranks, mode):
    model = sharded_ranks.network(0)
    plain = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    wrong_shape = plain.state_dict()
    wrong_shape["state"][2]["exp_avg"] = torch.ones(5)
    wrong_shape["state"][1]["exp_avg"] = torch.ones(7, 48)
    fewer = {**plain.state_dict(), "param_groups": [{"params": [0, 1]}]}
    entries = [{"name": name, "shape": tuple(p.shape)} for name, p in model.named_parameters()]
    renamed = {**plain.state_dict(), "parameters": [{**entries[0], "name": "embedding"}, *entries[1:]]}
    reshaped = {**plain.state_dict(), "parameters": [*entries[:1], {**entries[1], "shape": (5, 5)}, *entries[2:]]}
    states = [wrong_shape, fewer, renamed, reshaped, {"model": {}}]
    for rank, (errors, kept, count) in enumerate(ranks(2).run(sharded_ranks.failed_loads, mode, states)):
        shape, groups, name, size, empty, share, options, half = (message for _, message in errors)
        assert {kind for kind, _ in errors} == {"UsageError"}
        assert shape == (
            "the state is of another model: exp_avg of first.weight is (7, 48) there, the parameter is (48, 7) here"
        )
        assert groups == "the state is of another model: groups of [2] parameters there, [9] here"
        assert name == "the state is of another model: parameter 0 is embedding(2,) there, scale(2,) here"
        assert (
            size == "the state is of another model: parameter 1 is first.weight(5, 5) there, first.weight(48, 7) here"
        )
        assert empty == "no state of an optimizer: found model, not state and param_groups"
        assert share.startswith("the state is the share of rank ") or "share of rank 1 of 2" in share
        assert "lr=0.01" in options
        assert "lr=1.01" in options
        assert "UsageError: no state of an optimizer: found nothing, not state and param_groups on rank 1" in half
        assert kept
        assert count > 0, rank


@each_mode
def test_saved_state_is_a_copy(ranks, mode):
    assert ranks(2).run(sharded_ranks.states_that_stay, mode) == [True, True]


def test_added_group_goes_where_least_is(ranks):
    results = ranks(2).run(sharded_ranks.owners_of_groups, [[5, 3, 3], [2], [4, 4]])
    # 5 against 3 + 3; then 5 + 2 against 6; then 7 + 4 against 6 + 4, the fuller one second.
    assert results[0] == [[True, False, False], [True], [False, True]]
    assert results[1] == [[False, True, True], [False], [True, False]]


def test_groups_are_taken_to_be_spread_over_the_model():
    parameters = {name: nn.Parameter(torch.ones(1)) for name in "abcdef"}
    groups = [
        {"params": [parameters[name] for name in "abcd"], "param_names": list("abcd")},
        {"params": [parameters[name] for name in "ef"], "param_names": list("ef")},
    ]
    assert list(in_model_order(groups, None)) == list("aebcfd")
    model = nn.ParameterList([parameters[name] for name in "fedcba"])
    assert in_model_order(groups, model) == {name: parameters[name] for name in "fedcba"}
    assert list(in_model_order(groups, model)) == list("fedcba")


@each_mode
def test_loading_copies(ranks, mode):
    for first, second in ranks(2).run(sharded_ranks.no_state_is_shared, mode):
        assert_same(first, second)


@each_mode
def test_hooks_of_state_dicts(ranks, mode):
    (result,) = ranks(1).run(sharded_ranks.load_hooks, mode)
    assert result == (["pre", "post", "load pre", "load post"], 0.5)


def test_wrong_arguments_are_refused(ranks):
    for errors in ranks(2).run(sharded_ranks.wrong_arguments):
        messages = {what: error[1] for what, error in errors.items()}
        assert messages["no tensor"] == "optimizer can only optimize Tensors, but one of the params is str"
        assert messages["a tensor"].startswith(
            "params argument given to the optimizer should be an iterable of Tensors"
        )
        assert messages["nothing"] == "optimizer got an empty parameter list"
        assert messages["no leaf"] == "can't optimize a non-leaf Tensor"
        assert messages["no class"] == "optimizer_cls AdamW: must be a subclass of torch.optim.Optimizer"
        assert "must be a subclass of torch.optim.Optimizer" in messages["a module"]
        assert messages["LBFGS"].startswith("LBFGS cannot be sharded: choose a class that updates each parameter by it")
        assert messages["twice"] == "w is given twice: give a tied weight once"
        assert messages["rate"] == messages["flat rate"] == "Invalid learning rate: -1.0"
        assert "unexpected keyword argument 'speed'" in messages["option"]
        assert messages["bucket"] == "bucket size 0 MB: must be positive, or None for one bucket"
        assert messages["master"] == "master_dtype torch.float32: needs flat=True and a floating-point dtype"
        assert messages["master int"] == "master_dtype torch.int32: needs flat=True and a floating-point dtype"
        assert messages["module"] == "module model: must be a torch.nn.Module"
        assert messages["not element-wise"].startswith("flat=True cannot shard Adafactor, ")
        assert messages["complex"] == (
            "parameter 0 is torch.complex64: flat=True shards real floating-point parameters only"
        )


@each_mode
@pytest.mark.parametrize(
    ("what", "difference"),
    [
        (
            "shape",
            "parameter 2 of group 0 float32 (4, 4) strides (4, 1) trained on rank 0, parameter 2 of group 0 float32",
        ),
        (
            "order",
            "parameter 0 of group 0 float32 (4, 4) strides (4, 1) trained on rank 0, parameter 0 of group 0 float32",
        ),
        ("missing", "parameter 3 of group 0 float32 (4,) strides (1,) trained on rank 0, nothing on rank"),
        ("groups", "trained on rank 0, group 1 with  on rank"),
        (
            "frozen",
            "parameter 1 of group 0 float32 (4,) strides (1,) trained on rank 0, parameter 1 of group 0 float32",
        ),
        ("no tensor", "TypeError: optimizer can only optimize Tensors, but one of the params is NoneType on rank"),
        ("class", "AdamW with flat="),
        ("option", "lr=0.1 on rank 0, AdamW with flat="),
        ("mode", "AdamW with flat="),
        ("bucket", "bucket_size_mb=250.0, master_dtype=None, lr=0.1 on rank 0, AdamW with flat="),
    ],
)
def test_construction_that_differs_is_named_on_every_rank(ranks, mode, what, difference):
    for kind, message in ranks(2).run(sharded_ranks.differing_construction, mode, what):
        assert kind == "UsageError"
        assert message.startswith("ranks differ in what they train: ")
        assert difference in message


@each_mode
def test_construction_that_differs_on_the_last_of_three_ranks(ranks, mode):
    for kind, message in ranks(3).run(sharded_ranks.differing_construction, mode, "missing"):
        assert (kind, message[-7:]) == ("UsageError", " rank 2")


@each_mode
def test_start_values_are_those_of_the_first_rank(ranks, mode):
    first, second = ranks(2).run(sharded_ranks.start_values, mode)
    assert first == ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert second == ([1.0, 2.0, 4.0], [1.0, 2.0, 3.0])


@each_mode
def test_sparse_gradient_is_named(ranks, mode):
    for kind, message in ranks(2).run(sharded_ranks.sparse_gradient, mode):
        assert kind == "UsageError"
        assert "has a sparse gradient" in message
        assert "choose sparse=False" in message


@each_mode
def test_misuse_is_refused(ranks, mode):
    for errors in ranks(2).run(sharded_ranks.misuse, mode):
        assert {kind for kind, _ in errors.values()} == {"UsageError"}
        messages = {what: message for what, (_, message) in errors.items()}
        assert messages.pop("copy").endswith("cannot be copied or pickled: choose consolidated_state_dict()")
        assert messages.pop("unfrozen") == "never was unfrozen after it was sharded: call refresh() on every rank"
        assert messages.pop("moved") == (
            "used was moved after it was sharded: build the optimizer after moving the model"
        )
        if mode == "flat":
            assert messages.pop("under way") == "gradients are under way: call step() or zero_grad() first"
            assert messages.pop("scaler").startswith("GradScaler cannot see the gradients of flat=True: choose bf16")
            assert messages.pop("wrapped").startswith("used has its gradient averaged already, by a data parallel")
        else:
            assert messages.pop("no_sync").startswith("no_sync() needs flat=True: without, call that of the data paral")
            assert messages.pop("finish").startswith("finish_gradient_synchronization() needs flat=True")
        assert not messages


def test_gradient_scaler_steps_and_skips_alike_on_all_ranks(ranks):
    for (good, scale), (skipped, smaller) in ranks(2).run(sharded_ranks.scaled_steps):
        assert good.tolist() == skipped.tolist() == [-1.0] * 3
        assert (scale, smaller) == (4.0, 2.0)


@each_mode
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_norm_is_that_of_all_gradients_and_nan_is_seen_by_all(ranks, mode, max_norm):
    expected, weights = sharded_ranks.clipped_alone(max_norm)
    results = ranks(2).run(sharded_ranks.clipped, mode, max_norm)
    for norm, after, bad, skipped, good in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert (norm, good) == (results[0][0], results[0][4])
        assert_same(after, weights, atol=1e-7)
        assert math.isnan(bad)
        assert math.isfinite(good)
        assert_same(skipped, after)


@each_mode
def test_nan_of_one_rank_is_in_the_parameters_of_all(ranks, mode):
    for weights in ranks(2).run(sharded_ranks.not_a_number, mode):
        assert weights.isnan().all()


def test_master_parameters_carry_what_bf16_rounds_away(ranks):
    expected, masters = sharded_ranks.with_masters_by_hand(5)
    straight = ranks(2).run(sharded_ranks.with_masters, 5, None)
    for _, weights, _ in straight:
        assert_same(weights, expected)
    states = straight[0][2]["state"]
    assert len(states) == len(masters)
    for state, master in zip(states.values(), masters, strict=True):
        assert state["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(state["master_parameter"], master, rtol=0, atol=0)
        assert not torch.equal(master, master.bfloat16().float())
    for (losses, weights, _), (resumed, same, _) in zip(
        straight, ranks(2).run(sharded_ranks.with_masters, 5, 2), strict=True
    ):
        assert losses == resumed
        assert_same(same, weights)


@each_mode
def test_parameters_that_are_not_contiguous(ranks, mode):
    expected, state = sharded_ranks.permuted_alone()
    for weights, consolidated in ranks(2).run(sharded_ranks.permuted_parameters, mode):
        assert_same(weights, expected, rtol=1e-6)
        if consolidated is not None:
            assert_same_state(consolidated, state, rtol=1e-5, atol=1e-7)


def test_whole_gradients_are_dropped_while_others_are_computed(ranks):
    """Eight buckets of 1024 bytes: three are alive at most, and none after the backward pass but two under way."""
    for most, gone in ranks(2).run(sharded_ranks.whole_gradients_alive, 1024e-6):
        assert most <= 3 * 1024
        assert gone


def test_each_byte_is_communicated_once_each_way(ranks):
    """Buckets of 800 bytes: last.weight alone, three vectors, the matrix alone, norm.weight, first.bias, first.weight.

    Alone is what is larger than 800 bytes. At two ranks, 240 elements are packed into 256, twice 48 into 64 each.
    """
    sizes = [240, 48 + 48 + 48, 2304, 48, 336]
    padded = [256, 64 + 64 + 64 + 64, 2304, 128, 384]
    for overlap in (False, True):
        for counts in ranks(2).run(sharded_ranks.communicated, "default", overlap):
            assert counts == {"Broadcasts": (len(sizes), 4 * sum(sizes))}
        for counts in ranks(2).run(sharded_ranks.communicated, "flat", overlap):
            once = len(padded), 4 * sum(padded)
            assert counts == {"MeanScatter": once, "SliceGather": once}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whole_parameters_of_a_rank_travel_as_one(ranks, world_size):
    """Alone stay those that are no multiple of 64 elements or have gaps, and the only one of a rank and dtype."""
    parameters = sharded_ranks.mixed_parameters()
    owners = greedy_partition([parameter.nbytes for parameter in parameters.values()], [0] * world_size)
    alone, together = [], {}
    for (name, parameter), owner in zip(parameters.items(), owners, strict=True):
        if name in ("odd", "nearly", "scalar", "every other"):
            alone.append((owner, str(parameter.dtype), parameter.numel()))
        else:
            together.setdefault((owner, str(parameter.dtype)), {})[name] = parameter.numel()
    expected_moves = {name for members in together.values() if len(members) > 1 for name in members}
    expected = sorted([*alone, *((*key, sum(members.values())) for key, members in together.items())])
    for sent, moved, after, same_strides, offsets in ranks(world_size).run(sharded_ranks.moved_together):
        assert sorted(sent) == expected
        assert moved == expected_moves
        assert_same(after, {name: parameter.detach() * 0.5 for name, parameter in parameters.items()})
        assert same_strides
        assert not any(offsets)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("mode", "dtype", "master_dtype"),
    [
        ("default", torch.float32, None),
        ("flat", torch.float32, None),
        ("flat", torch.bfloat16, None),
        ("flat", torch.bfloat16, torch.float32),
    ],
)
def test_bytes_held_are_those_on_paper(ranks, mode, dtype, master_dtype, world_size):
    shapes, cap_mb = [(16, 24), (3,), (6, 64), (129,), (1,), (8, 8), (64,)], 0.0008
    sizes = [math.prod(shape) for shape in shapes]
    if mode == "default":
        expected = sharded_optimizer_state(sizes, world_size, element_bytes=dtype.itemsize)
    else:
        specs = [TensorSpec(index, size * dtype.itemsize) for index, size in enumerate(sizes)]
        expected = flat_optimizer_state(
            [[sizes[index] for index in bucket] for bucket in assign_buckets(specs, cap_mb * 1e6)],
            world_size,
            element_bytes=dtype.itemsize,
            master_bytes=0 if master_dtype is None else master_dtype.itemsize,
        )
    results = ranks(world_size).run(sharded_ranks.held_bytes, mode, shapes, dtype, master_dtype, cap_mb)
    assert results == [dataclasses.asdict(state) for state in expected]


def test_optimizer_without_a_process_group_is_refused():
    with pytest.raises(UsageError, match="ShardedOptimizer needs a process group"):
        ShardedOptimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0)


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Adafactor"])
def test_element_wise_class_is_found_to_be_one(name):
    optimizer_cls, options = CLASSES[name]
    require_elementwise(optimizer_cls, options, torch.device("cpu"))


class NormalizedSteps(torch.optim.SGD):
    """As LAMB, scales a step by the norm of a whole parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


class NoisySteps(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter))
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer_cls", "reason"),
    [
        (torch.optim.Adafactor, "flat=True cannot shard Adafactor, whose update is not computed element by element"),
        (torch.optim.Muon, "flat=True cannot shard Muon, which cannot step a slice"),
        (torch.optim.SparseAdam, "flat=True cannot shard SparseAdam, which cannot step a slice"),
        (NormalizedSteps, "flat=True cannot shard NormalizedSteps, whose update is not computed element by element"),
        (NoisySteps, "flat=True cannot shard NoisySteps, whose update is not computed element by element"),
    ],
)
def test_class_that_is_not_element_wise_is_found_out(optimizer_cls, reason):
    before = torch.random.get_rng_state()
    with pytest.raises(UsageError) as caught:
        require_elementwise(optimizer_cls, {"lr": 0.1}, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert str(caught.value).startswith(reason)
    assert str(caught.value).endswith("choose flat=False")


@each_mode
def test_rank_that_dies_in_a_step_is_the_error(mode):
    with pytest.raises(RankError) as caught:
        launch.run(sharded_ranks.lost_peer, mode, "raise", world_size=2, backend="gloo")
    assert str(caught.value).startswith("rank 1 of 2: ValueError: out of data\n")


@pytest.mark.parametrize(
    ("mode", "waiting"), [("default", "in the broadcast of "), ("flat", "in the reduce-scatter of gradients of ")]
)
def test_rank_that_hangs_in_a_step_is_named_with_what_waits_for_it(mode, waiting):
    with pytest.raises(RankError) as caught:
        launch.run(sharded_ranks.lost_peer, mode, "hang", world_size=2, backend="gloo", timeout_s=5)
    heading = str(caught.value).split("\n")[0]
    assert heading.startswith("rank 0 of 2: RuntimeError: ")
    assert waiting in heading
    assert "used" in heading
    assert heading.endswith("still running: rank 1")
    assert "in lost_peer" in str(caught.value).split("rank 1 was here")[1]


@pytest.mark.multigpu
def test_both_modes_and_torch_train_to_bitwise_equal_weights_on_two_gpus():
    with launch.start(2, backend="nccl") as ranks:
        expected = ranks.run(sharded_ranks.torch_zero, 4)[0]
        for result in ranks.run(sharded_ranks.train_all, ["AdamW"]):
            for weights in result.values():
                assert_same(weights, expected)


@pytest.mark.multigpu
def test_delays_change_nothing_on_two_gpus():
    with launch.start(2, backend="nccl") as ranks:
        expected = ranks.run(sharded_ranks.train_all, ["AdamW"], MODES, torch.float32, 3)[0]
        for seed in range(5):
            for result in ranks.run(sharded_ranks.train_with_delays, seed, ["AdamW"]):
                for case, weights in result.items():
                    assert_same(weights, expected[case])


@pytest.mark.multigpu
@each_mode
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_state_goes_through_the_first_rank_on_two_gpus(mode, name):
    with launch.start(2, backend="nccl") as ranks:
        run = sharded_ranks.train_and_save
        through = ranks.run(run, mode, torch.float32, None, None, range(6), name)
        saved = ranks.run(run, mode, torch.float32, None, None, range(3), name)
        resumed = ranks.run(run, mode, torch.float32, saved[0][1], saved[0][2], range(3, 6), name)
        for rank in range(2):
            assert through[rank][0] == saved[rank][0] + resumed[rank][0]


@pytest.mark.multigpu
def test_optimizer_memory_halves_on_two_gpus():
    """16 parameters of 4 MiB: beside parameters, AdamW's moments are 128 MiB on one GPU, 64 on each of two."""
    mib = 2**20
    for held in launch.run(
        sharded_ranks.held_on_gpu,
        ["none", "torch", *MODES],
        [(1024, 1024)] * 16,
        world_size=2,
        backend="nccl",
    ):
        assert 128 * mib <= held["none"][0] < 129 * mib
        for mode in MODES:
            assert 64 * mib <= held[mode][0] < 65 * mib
        # Beside whole gradients, 64 MiB; flat has its half and three buckets of 16 MiB, and no copy of anything.
        assert held["default"][1] <= held["torch"][1] + mib
        assert held["flat"][1] <= (64 + 32 + 3 * 16 + 1) * mib


@pytest.mark.multigpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_on_two_gpus(dtype):
    results = launch.run(sharded_ranks.operations, dtype, world_size=2, backend="nccl")
    assert results == [expected_operations(rank, 2) for rank in range(2)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scatter_gather_and_broadcasts_of_integers_are_exact(ranks, world_size, dtype):
    results = ranks(world_size).run(sharded_ranks.operations, dtype)
    assert results == [expected_operations(rank, world_size) for rank in range(world_size)]


def expected_operations(rank, world_size):
    shift = 3.0 * (world_size - 1)
    slices = [[6.0 * (rank * n + i) + shift for i in range(n)] for n in (3, 1)]
    gathered = [[float(other) for other in range(world_size) for _ in range(n)] for n in (2, 5)]
    last = float(world_size - 1)
    return [slices, gathered, [[[last] * 4] * 3, [[0.0] * 2] * 2]]


@pytest.mark.gpu
def test_fused_step_on_one_gpu_equals_the_class():
    (result,) = launch.run(
        sharded_ranks.train_all, ["AdamW fused"], MODES, torch.float64, 4, world_size=1, backend="nccl"
    )
    expected, _ = sharded_ranks.train_alone("AdamW", torch.float64)
    for weights in result.values():
        assert_same(weights, expected, atol=1e-10)
