"""What a program changes between steps is used, as in one process, or refused by name on every rank."""

import optimizer_changes_ranks
import pytest
import torch
from optimizer_models import MODES
from same_tensors import assert_same

each_mode = pytest.mark.parametrize("mode", MODES)

NOT_DROPPED = (
    "UsageError",
    "used still has the gradient of the last step, which is kept in slices: call zero_grad() of the optimizer, or of "
    "the model, on every rank after each step()",
)


def test_gradients_in_slices_are_dropped_by_the_optimizer_and_by_the_model(ranks):
    expected = optimizer_changes_ranks.zeroed_alone()
    for histories in ranks(2).run(optimizer_changes_ranks.zeroed):
        for case, history in histories.items():
            for after, exact in zip(history, expected[case], strict=True):
                assert_same(after, exact, rtol=1e-6)


def test_passes_of_one_rank_are_dropped_and_what_cannot_be_dropped_is_refused(ranks):
    for found, errors in ranks(2).run(optimizer_changes_ranks.dropped):
        assert found == {
            "a pass of one rank": -1.0,
            "after a step, by PartlyUsed": -3.0,
            "after a step, by ShardedOptimizer": -5.0,
            "after that": -7.0,
            "after all": -2.0,
        }
        assert errors.pop("accumulated over a step") == errors.pop("dropped by hand") == NOT_DROPPED
        for what, sentence in {
            "by the model, under way": "call zero_grad() of the optimizer instead, on every rank",
            "after clipping": "a parameter got a gradient after the gradients of this step were completed",
            "and a step": "a parameter got a gradient after the gradients of this step were completed",
        }.items():
            kind, message = errors.pop(what)
            assert kind == "UsageError"
            assert sentence in message
        assert not errors


def test_passes_of_one_rank_are_dropped_whatever_buckets_it_has_launched(ranks):
    for norms in ranks(2).run(optimizer_changes_ranks.passes_of_one_rank):
        assert norms.pop("refusal") == "UsageError"
        assert len(set(norms.values())) == 1


@each_mode
def test_backward_pass_through_weights_that_a_step_changed_is_an_error_on_every_rank(ranks, mode):
    for (kind, message), untouched in ranks(2).run(optimizer_changes_ranks.stepped_before_backward, mode):
        assert kind == "RuntimeError"
        assert "has been modified by an inplace operation" in message
        assert untouched is None


def test_slices_are_refused(ranks):
    for errors in ranks(2).run(optimizer_changes_ranks.slices):
        for kind, message in errors:
            assert kind == "UsageError"
            assert message.startswith("module.0.weight is a slice that this rank has of a parameter, made by FSDP or")


@each_mode
def test_state_that_is_dropped_begins_anew(ranks, mode):
    expected = optimizer_changes_ranks.resets("alone")
    assert not torch.equal(expected["cleared"]["first.weight"], expected["some"]["first.weight"])
    for found in ranks(2).run(optimizer_changes_ranks.resets, mode):
        for how, weights in found.items():
            assert_same(weights, expected[how], atol=1e-12)


def test_weights_set_between_steps_are_what_master_copies_become(ranks):
    for found in ranks(2).run(optimizer_changes_ranks.masters):
        for how, master in found.items():
            assert torch.equal(master, torch.full((4, 64), 2.0) - 0.001), how


def test_options_that_mix_elements_or_differ_between_ranks_are_refused(ranks):
    for errors in ranks(2).run(optimizer_changes_ranks.options):
        for what, error in errors.items():
            assert error == (
                "UsageError",
                "ranks differ in what they train: nothing on rank 0, group 0 with lr=0.2 on rank 1"
                if what.startswith("differ")
                else "flat=True cannot shard Normed, whose update is not computed element by element: choose "
                "flat=False",
            )


@each_mode
def test_parameters_that_come_and_go_are_refused_or_taken_up(ranks, mode):
    for errors, adapter, is_trained in ranks(2).run(optimizer_changes_ranks.parameters, mode):
        assert {kind for kind, _ in errors.values()} == {"UsageError"}
        assert {what: message for what, (_, message) in errors.items()} == {
            "added": "adapter.weight was added after it was wrapped: call refresh() on every rank",
            "listed": "parameters were put into a group after it was sharded: call refresh() on every rank",
            "replaced": "first.weight was replaced (as load_state_dict() with assign=True does) after it was wrapped: "
            "call refresh() on every rank",
            "replaced, refreshed": "first.weight was replaced in the module by a parameter that is in no group: build "
            "the optimizer anew",
            "taken out": "parameter 1 was taken out of its group after it was sharded: freeze it by "
            "requires_grad_(False), or build the optimizer anew",
        }
        assert (adapter == 1.0).all()
        assert is_trained


def test_adapter_whose_gradients_nothing_averages_is_refused(ranks):
    for first, (kind, message) in ranks(2).run(optimizer_changes_ranks.adapters):
        assert first is None
        assert kind == "UsageError"
        assert message.startswith("sometimes of the module is in no group and was changed, by a gradient that nothing ")


@each_mode
def test_part_that_is_saved_after_a_step_waits_for_its_parameters(ranks, mode):
    for parts, later in ranks(2).run(optimizer_changes_ranks.saved_parts, mode):
        assert_same(parts, later)


@each_mode
def test_weights_changed_while_updates_arrive_are_refused(ranks, mode):
    for kind, message in ranks(2).run(optimizer_changes_ranks.changed_on_the_way, mode):
        assert kind == "UsageError"
        assert "was changed while the last step's updates arrived: call wait_for_parameters()" in message


@each_mode
def test_modules_of_a_part_that_is_never_called_wait_for_their_parameters(ranks, mode):
    for overlapped, expected in ranks(2).run(optimizer_changes_ranks.called_inside, mode):
        assert_same(overlapped, expected, atol=1e-12)


def test_optimizers_of_parts_keep_the_order_of_their_collectives(ranks):
    assert ranks(2).run(optimizer_changes_ranks.parts_apart) == [[-1.0, -1.0, -5.0, -3.0]] * 2
