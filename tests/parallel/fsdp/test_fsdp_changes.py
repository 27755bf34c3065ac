"""Modules hold slices between passes; what was changed is refused by name until refresh() takes it up."""

import fsdp_changes_ranks
import pytest
from same_tensors import assert_same

BEGINNINGS = {
    "changed": "blocks.0.up.weight was changed in the forward pass, which is lost when its rows are freed",
    "assigned": "blocks.0.up.weight was changed in the forward pass, which is lost when its rows are freed",
    "max_norm": "embedding.weight was changed in the forward pass",
    "weight returned": "the module returns a weight, or a view of one, of shape (11, 6), whose memory is freed",
    "other weights for blocks": "blocks.0.",
    "frozen in forward": "head.weight is frozen or unfrozen in the forward pass: do it between two steps",
    "kept": "a weight of embedding was kept from a forward pass and is used after it",
    "vmap": "FSDP cannot see the backward pass of a function that torch.func transforms (vmap, jvp, grad)",
    "jvp": "FSDP cannot see the backward pass of a function that torch.func transforms (vmap, jvp, grad)",
    "other weights": "embedding.weight was replaced",
    "penalty outside": "",
    "norm alone": "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's share of the gradients",
    "step between": "head.",
    "unit alone": "blocks.0.up.weight is no longer the parameter that was wrapped (assigned, or given to functional",
    "hook before": "head.weight has a hook, which would not be called",
    "register_hook": "head.weight has a hook, which would not be called",
    "register_post_accumulate_grad_hook": "head.weight has a hook, which would not be called",
    "cached": "parametrize.cached() has kept a weight of another forward pass",
    "late 1": "blocks.2.up.weight got a gradient after the backward pass had left blocks.2",
}
PARTS = {
    "penalty outside": " got a gradient outside of the forward pass, where this rank holds a slice of it",
    "step between": " was changed between the forward and the backward pass",
    "other weights for blocks": " is no longer the parameter that was wrapped (assigned, or given to functional_call)",
}


def test_changes_that_would_be_lost_are_refused_by_name(ranks):
    for errors, largest in ranks(2).run(fsdp_changes_ranks.refusals):
        assert errors.pop("late 0") is None
        assert errors.keys() == BEGINNINGS.keys()
        for what, error in errors.items():
            assert error is not None, what
            kind, message = error
            assert kind == "UsageError", what
            assert message.startswith(BEGINNINGS[what]), message
            assert PARTS.get(what, "") in message
        # Gradients can be clipped by value.
        assert largest == pytest.approx(1e-3)


def test_attributes_of_parameters_are_those_of_slices(ranks):
    for seen in ranks(2).run(fsdp_changes_ranks.attributes):
        assert seen == [["norm.weight", "head.weight"]] * 3


def test_module_holds_its_slices_after_every_pass(ranks):
    for same in ranks(2).run(fsdp_changes_ranks.between_passes):
        assert same == [True] * 6


@pytest.mark.parametrize("world_size", [2, 3])
def test_refresh_takes_up_what_was_added_removed_tied_and_frozen(ranks, world_size):
    changed = {
        "block added": ("blocks.3.up.weight was added", 0),
        "tied": ("head.weight was tied to embedding.weight", 1),
        "untied": ("head.weight was untied from embedding.weight", 0),
        "block removed": ("blocks.", 4),
        "unfrozen": ("blocks.0.up.weight was unfrozen", 0),
    }
    for results in ranks(world_size).run(fsdp_changes_ranks.structure_changes):
        before, after = results.pop("slice replaced")
        assert "was replaced (as load_state_dict() with assign=True does)" in before[1]
        assert "was replaced by a tensor of the shape of a slice: copy slices into those that are there" in after[1]
        for name, (errors, sharded, alone, lost) in results.items():
            assert_same(sharded, alone, atol=1e-14)
            message, expected = changed.get(name, ("", 0))
            assert lost == expected, name
            for kind, found in errors:
                assert kind == "UsageError"
                assert found.startswith(message)
                assert found.endswith("after it was wrapped: call refresh() on every rank")
