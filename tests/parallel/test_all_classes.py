"""Rules for all parallel classes: what is refused alike, what is the same on all ranks, what can be copied."""

import all_classes_ranks
import pytest
import torch

SENTENCES = {
    "lazy": "0.weight is lazy and has no shape yet: call the module once before wrapping it",
    "coordinates": "added is sparse, which cannot be sent to other ranks: make it dense by to_dense()",
    "compressed rows": "added is sparse, which cannot be sent to other ranks: make it dense by to_dense()",
    "meta": "added is on the meta device and has no values: give it some, by to_empty() and a reset",
    "refresh": "added is sparse, which cannot be sent to other ranks: make it dense by to_dense()",
}


def test_unusable_parameters_are_refused_by_every_class_in_the_same_words(ranks):
    for errors in ranks(2).run(all_classes_ranks.unusable_parameters):
        for (kind, name), (error, message) in errors.items():
            assert error == "UsageError", (name, message)
            if name.startswith(("optimizer", "flat optimizer")):
                # Given without names.
                message = message[message.index(" is ") :]
                assert SENTENCES[kind].endswith(message)
            else:
                assert message == SENTENCES[kind], name


def test_copies_compute_the_same_or_are_refused(ranks):
    for off, errors in ranks(2).run(all_classes_ranks.copies):
        assert set(off.values()) == {0.0}, off
        for name in all_classes_ranks.DDP:
            assert "would average the same gradients once more: use copy.deepcopy()" in errors[name][1]
        assert errors["fsdp"][1].startswith("an FSDP module cannot be copied or pickled")
        assert errors["optimizer"][1].startswith("a sharded optimizer cannot be copied or pickled")


def test_norms_are_those_of_one_process_on_ranks_without_rows(ranks):
    expected = all_classes_ranks.whole_norms()
    results = ranks(2).run(all_classes_ranks.norms_without_rows)
    for norms, errors in results:
        assert norms == results[0][0]
        assert {dtype for _, dtype in norms.values()} == {torch.float64}
        assert norms["flat"][0] == pytest.approx(expected[2.0])
        for norm_type, norm in expected.items():
            assert norms["fsdp", norm_type][0] == pytest.approx(norm)
        for (_, norm_type), error in errors.items():
            assert error == ("UsageError", f"norm_type {norm_type}: must be positive, or inf")


def test_optimizers_of_slices_that_are_not_elementwise_are_refused(ranks):
    for errors in ranks(2).run(all_classes_ranks.steps_of_slices):
        assert errors.pop("AdamW") is None
        for name, (kind, message) in errors.items():
            assert kind == "UsageError"
            assert message.startswith(f"slices of FSDP or TensorParallel cannot be updated by {name}, wh")
            assert message.endswith("choose a class that updates each element by itself, as AdamW and SGD do")


def test_fsdp_gathers_frozen_integers_and_names_a_tied_weight_once(ranks):
    for off, gathered in ranks(2).run(all_classes_ranks.integers):
        assert off == [0.0, 0.0]
        for names, dtype in zip(gathered, (torch.uint8, torch.bool), strict=True):
            assert names == {"added": dtype, "layer.weight": torch.float32, "layer.bias": torch.float32}


def test_what_a_refusal_of_converted_parameters_advises_helps(ranks):
    for errors in ranks(2).run(all_classes_ranks.remedies):
        for (name, dtype), ((kind, message), refresh, afterwards) in errors.items():
            assert kind == "UsageError"
            assert afterwards is None, (name, dtype)
            if name.startswith("optimizer"):
                assert "converted" in message or "convert a module before" in message
                assert "build the optimizer" in message or "its optimizer is built" in message
                assert refresh[0] == "UsageError"
            else:
                assert message == (
                    f"first.weight was changed from torch.float32 to {dtype} after it was wrapped: call refresh() on "
                    "every rank"
                )
                assert refresh is None


def test_compiled_autograd_is_right_or_refused_in_the_same_words(ranks):
    """Where nothing is launched during the pass it is right."""
    for results in ranks(2).run(all_classes_ranks.compiled_passes):
        assert results.pop("naive") == results.pop("flat") == (None, 0.0)
        for (kind, message), _ in results.values():
            assert kind == "UsageError"
            assert message.startswith(
                "compiled autograd runs this backward pass, in which gradients cannot be averaged"
            )


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_sends_the_bytes_that_the_docs_give(ranks, world_size):
    """docs/sharded_optimizer.md and docs/fsdp.md; of broadcasts of unequal shares the mean over ranks."""
    for sent, whole, last in ranks(world_size).run(all_classes_ranks.sent_bytes):
        share = (world_size - 1) / world_size
        for name, number in sent.items():
            if name in all_classes_ranks.DDP or name.startswith("flat optimizer"):
                assert number == 2 * share * whole, name
            elif name == "fsdp":
                assert number == share * (3 * whole - last)
            else:
                # Gradients are averaged by somebody else.
                assert number == share * whole, name
