"""What changes after wrapping is refused until refresh(), which takes it up as one process would."""

import ddp_changes_ranks
import pytest
from ddp_modes import EVERY_MODE
from same_tensors import assert_same

REFUSALS = {
    "add": "adapters.0.weight was added",
    "assign": "second.weight was replaced (as load_state_dict() with assign=True does)",
    "tie": "third.weight was tied to second.weight",
    "untie": "third.bias was untied from second.bias",
    "remove": "third.weight was removed",
    "unfreeze": "last.bias was unfrozen",
    "resize": "last.weight was changed from (5, 6) to (4, 6)",
}


@pytest.mark.parametrize("change", REFUSALS)
def test_changed_module_is_refused_and_trains_after_refresh(ranks, change):
    expected = ddp_changes_ranks.train_alone(change)
    first, second = ranks(2).run(ddp_changes_ranks.change_in_training, change)
    for mode in EVERY_MODE:
        sentence = f"{REFUSALS[change]} after it was wrapped: call refresh() on every rank"
        refusal = ("UsageError", sentence)
        # Without gradients, functional_call() may have given the module other values.
        evaluated = None if change in ("assign", "untie") else refusal
        assert first[mode][0] == second[mode][0] == [refusal, evaluated, refusal]
        # Buffers and frozen parameters that were added are rank 0's, too.
        assert_same(first[mode][1], expected, rtol=1e-12, atol=1e-12)
        assert_same(second[mode][1], first[mode][1])


def test_refresh_is_refused_on_every_rank_if_they_changed_differently(ranks):
    for added, assigned, of_wrapper in ranks(2).run(ddp_changes_ranks.changed_on_one_rank):
        for error, new in ((added, "adapters.0.weight, adapters.0.bias"), (assigned, "second.weight, second.bias")):
            assert error[0] == "UsageError"
            assert error[1].startswith(f"ranks differ in what they train: new: nothing on rank 0, new: {new}")
        assert of_wrapper == ("UsageError", "head.weight was added to the wrapper: add it to the module in it")


def test_parameters_frozen_in_turns_need_no_refresh(ranks):
    expected = ddp_changes_ranks.freeze_in_turns_alone()
    for result in ranks(2).run(ddp_changes_ranks.freeze_in_turns):
        for mode in EVERY_MODE:
            assert_same(result[mode], expected, rtol=1e-12, atol=1e-12)


def test_parameters_that_ranks_do_not_have_in_common_are_refused(ranks):
    for of_each, of_all, own, shortened in ranks(2).run(ddp_changes_ranks.not_the_same_on_all_ranks):
        assert of_each == of_all
        assert of_each == (
            "UsageError",
            "weight is a slice, and other ranks hold other slices of it: wrap a module whose parameters are whole, or "
            "give a group of ranks that hold the same slice",
        )
        assert own is None
        assert shortened == (
            "UsageError",
            "0 (Embedding) has max_norm=1.0, by which each rank would shorten other rows in its forward pass: choose "
            "max_norm=None, and shorten rows after each step",
        )


def test_gradients_that_the_caller_keeps_do_not_change(ranks):
    before, kept = ranks(1).run(ddp_changes_ranks.kept_gradients)[0]
    assert_same(kept, before)
