"""An optimizer step by bucket, beside the plain class after the gradients are averaged."""

import bucket_optimizer_ranks
import torch
from same_tensors import assert_same


def _assert_same_training(plain, by_bucket):
    (weights, state), (other_weights, other_state) = plain, by_bucket
    assert_same(other_weights, weights)
    assert other_state["param_groups"] == state["param_groups"]
    assert other_state["state"].keys() == state["state"].keys()
    for number, expected in state["state"].items():
        for name, value in expected.items():
            assert torch.equal(other_state["state"][number][name], value), (number, name)


def test_training_equals_the_plain_class_after_averaging(ranks):
    for plain, by_bucket in ranks(2).run(bucket_optimizer_ranks.train_both):
        _assert_same_training(plain, by_bucket)
        # The norm had no gradient in one of five steps.
        assert {int(state["step"]) for state in by_bucket[1]["state"].values()} == {4, 5}


def test_a_class_that_counts_steps_in_its_groups_counts_each_once(ranks):
    for (expected, counts), (found, found_counts) in ranks(2).run(bucket_optimizer_ranks.counted):
        assert_same(found, expected)
        assert found_counts == counts == [3, 3]


def test_a_checkpoint_of_the_plain_class_is_resumed(ranks):
    for plain, by_bucket in ranks(2).run(bucket_optimizer_ranks.resume):
        _assert_same_training(plain, by_bucket)


def test_a_bucket_is_updated_before_the_next_is_waited_for(ranks):
    for events in ranks(2).run(bucket_optimizer_ranks.order_of_events):
        buckets = len(events) // 2
        assert buckets == 4
        assert events == [(event, number) for number in range(buckets) for event in ("wait", "update")]


def test_buckets_that_changed_are_divided_anew(ranks):
    assert ranks(2).run(bucket_optimizer_ranks.refreshed) == [True, True]


def test_what_needs_all_gradients_is_refused(ranks):
    for messages in ranks(2).run(bucket_optimizer_ranks.refusals):
        lbfgs, stranger, closure, copied, scale = messages
        assert lbfgs.startswith("LBFGS needs all gradients before it updates a parameter")
        assert "of shape (3,) is not one of the wrapped module" in stranger
        assert "step without one" in closure
        assert "choose state_dict()" in copied
        assert "choose bf16" in scale
