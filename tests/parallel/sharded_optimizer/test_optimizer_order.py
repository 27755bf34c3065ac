"""Communication runs in one order on all ranks, beside the passes; nothing is used before it has arrived."""

import optimizer_order_ranks
import optimizer_training_ranks
import pytest
import torch
from optimizer_models import MODES
from same_tensors import assert_same

each_mode = pytest.mark.parametrize("mode", MODES)


def test_delays_change_nothing(ranks):
    expected = ranks(2).run(optimizer_training_ranks.train_all, ["AdamW"], MODES, torch.float32, 3)[0]
    for seed in range(3):
        for result in ranks(2).run(optimizer_order_ranks.train_with_delays, seed, ["AdamW"]):
            for case, weights in result.items():
                assert_same(weights, expected[case])


def test_nothing_is_used_before_it_is_waited_for(ranks):
    expected = ranks(2).run(optimizer_training_ranks.train_all, ["AdamW"], MODES, torch.float32, 3)[0]
    for result in ranks(2).run(optimizer_order_ranks.train_with_lazy_operations, ["AdamW"]):
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
    for events, in_state_dict, without_last in ranks(2).run(optimizer_order_ranks.order_of_events, "flat"):
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
    for events, in_state_dict, without_last in ranks(2).run(optimizer_order_ranks.order_of_events, "default"):
        assert events == expected
        assert in_state_dict == [f"wait for Broadcasts of {layer}" for layer in LAYERS[1:]]
        assert before_start(without_last, "Broadcasts") == forward_events("Broadcasts")[:-1]


@each_mode
@pytest.mark.parametrize(
    ("what", "when"),
    [
        *(("blocks", "before"), ("model", "after")),
        *(
            pytest.param(what, when, marks=pytest.mark.nightly)
            for what, when in (("model", "before"), ("around", "before"), ("blocks", "after"), ("around", "after"))
        ),
    ],
)
def test_compiled_modules_wait_in_every_step(ranks, mode, what, when):
    eager, *_ = ranks(2).run(optimizer_order_ranks.compiled, mode, None, None)[0]
    for weights, waits, recompiled in ranks(2).run(optimizer_order_ranks.compiled, mode, what, when):
        assert_same(weights, eager, rtol=1e-6, atol=1e-6)
        # Before each block; if all is compiled as one, before the model.
        assert waits == (LAYERS if (what, when) == ("model", "before") else LAYERS[1:])
        assert recompiled == 0


def test_gradients_ready_in_another_order_on_each_rank(ranks):
    for weights in ranks(2).run(optimizer_order_ranks.differently_ordered, [(0, 1, 2, 3), (2, 0, 3, 1)]):
        assert_same(weights, {f"branches.{i}": torch.full((3,), 1 - 1.5 * (i + 1)) for i in range(4)})


@pytest.mark.multigpu
def test_delays_change_nothing_on_two_gpus(two_gpus):
    expected = two_gpus.run(optimizer_training_ranks.train_all, ["AdamW"], MODES, torch.float32, 3)[0]
    for seed in range(5):
        for result in two_gpus.run(optimizer_order_ranks.train_with_delays, seed, ["AdamW"]):
            for case, weights in result.items():
                assert_same(weights, expected[case])
