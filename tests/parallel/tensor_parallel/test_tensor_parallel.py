"""Ranks that share every layer compute what one process computes."""

import pytest
import tensor_parallel_ranks

VARIANTS = {
    "plain": {},
    "tied": {"tied": True},
    "bf16": {"half": True},
    "attention twice": {"repeated": "attn"},
    "block twice": {"repeated": ""},
}


@pytest.fixture(scope="module")
def found(ranks):
    """What both ranks found of all variants, with and without sequence parallelism."""
    variants = {
        f"{name}, sequence" if sequence else name: {**settings, "sequence_parallel": sequence}
        for name, settings in VARIANTS.items()
        for sequence in (False, True)
    }
    return ranks(2).run(tensor_parallel_ranks.gradients_of_all, variants)


# Norms of differences over norms of gradients. In bf16, products of parts are rounded before they are summed.
TOLERANCES = {"bf16": 4e-2}


@pytest.mark.parametrize("sequence", ["", ", sequence"])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_one_process(found, name, sequence):
    expected_loss, expected = tensor_parallel_ranks.alone(**VARIANTS[name])
    for of_rank in found:
        loss, gradients = of_rank[name + sequence]
        assert loss == pytest.approx(expected_loss, rel=TOLERANCES.get(name, 1e-5))
        assert gradients.keys() == expected.keys()
        for parameter, gradient in gradients.items():
            off = (gradient - expected[parameter]).norm() / expected[parameter].norm()
            assert off <= TOLERANCES.get(name, 1e-5), parameter


def test_groups_of_four(ranks):
    expected_loss, expected = tensor_parallel_ranks.alone()
    # The first rank's weights are everybody's.
    variants = {name: {"sequence_parallel": name == "sequence", "seeds": (0, 1)} for name in ("tensor", "sequence")}
    for of_rank in ranks(4).run(tensor_parallel_ranks.gradients_of_all, variants):
        for name, (loss, gradients) in of_rank.items():
            assert loss == pytest.approx(expected_loss, rel=1e-6), name
            for parameter, gradient in gradients.items():
                off = (gradient - expected[parameter]).norm() / expected[parameter].norm()
                assert off <= 1e-5, (name, parameter)


def test_gradients_add_up_however_often_they_are_completed(ranks):
    """Norms of which each rank has a part were summed again by every further call."""
    for of_rank in ranks(2).run(tensor_parallel_ranks.accumulations):
        for name, gradients in of_rank.items():
            expected = tensor_parallel_ranks.accumulated_alone(3 if name == "scaled in between" else 1)
            assert gradients.keys() == expected.keys()
            for parameter, gradient in gradients.items():
                off = (gradient - expected[parameter]).norm() / expected[parameter].norm()
                assert off <= 1e-5, (name, parameter)


def test_penalty_on_norms_divided_by_the_ranks_counts_once(ranks):
    expected = tensor_parallel_ranks.penalized_norms(wraps=False)
    for gradients in ranks(2).run(tensor_parallel_ranks.penalized_norms, True):
        for parameter, gradient in gradients.items():
            off = (gradient - expected[parameter]).norm() / expected[parameter].norm()
            assert off <= 1e-5, parameter


def test_gradients_add_up_on_meshes(ranks):
    expected = tensor_parallel_ranks.accumulated_alone()
    for of_rank in ranks(4).run(tensor_parallel_ranks.accumulations_on_mesh):
        for outer, gradients in of_rank.items():
            for parameter, gradient in gradients.items():
                off = (gradient - expected[parameter]).norm() / expected[parameter].norm()
                assert off <= 1e-5, (outer, parameter)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_whole_state_dict_comes_out_as_it_went_in(ranks, sequence_parallel):
    expected = tensor_parallel_ranks.model(seed=2).state_dict()
    for whole in ranks(2).run(tensor_parallel_ranks.round_trip, sequence_parallel):
        assert whole.keys() == expected.keys()
        assert all(value.equal(expected[name]) for name, value in whole.items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_module_on_meta_device_goes_to_device_of_process_group(ranks, world_size):
    expected = tensor_parallel_ranks.model(seed=2).state_dict()
    for whole in ranks(world_size).run(tensor_parallel_ranks.round_trip_from_meta_device):
        assert all(value.equal(expected[name]) for name, value in whole.items())


@pytest.mark.parametrize("world_size", [2, 4])
def test_integers_of_any_width_are_tokens(ranks, world_size):
    for losses, expected, has_all_logits in ranks(world_size).run(tensor_parallel_ranks.losses_of_integers):
        assert losses == pytest.approx([expected] * 4, rel=1e-6)
        assert has_all_logits


def test_refusals_name_the_rule_and_the_choices(ranks):
    first, told = ranks(2).run(tensor_parallel_ranks.refusals)
    assert first == told
    hidden = {name: told.pop(name) for name in tensor_parallel_ranks.HIDDEN}
    rule = " computes something else where 2 tensor parallel ranks share its layers, in a trial with random weights: "
    assert {name: message.partition(rule)[0] for name, message in hidden.items()} == {
        "scale": "layers.1.attn",
        "norm": "layers.0.ffn",
        "block": "layers.0",
        "logits": "the model",
        "tied by hand": "token_embeddings",
        "padding": "token_embeddings",
        "frequency": "token_embeddings",
        "largest norm": "token_embeddings",
    }
    assert told == {
        "heads": "layers.0.attn: 1 attention head cannot be shared by 2 tensor parallel ranks: choose 1 rank",
        "tokens": "2 tensor parallel ranks cannot share 1 tokens: choose at most 1",
        "a bias": "parameter layers.1.ffn.w2.bias: tensor parallelism can only cut parameters of cs336_basics, "
        "layers.N.*, token_embeddings.weight, ln_final.weight and lm_head.weight",
        "no heads": "layers.0.attn (CausalMultiHeadSelfAttention) has no num_heads, by which it splits projections "
        "into heads: name that attribute so",
        "another model": "parameter 0.weight: tensor parallelism can only cut parameters of cs336_basics, "
        "layers.N.*, token_embeddings.weight, ln_final.weight and lm_head.weight",
        "no feed-forward network": "layers.0 (TransformerBlock) has no module ffn.w1, which cs336_basics has",
        "sequence": "a sequence of 7 tokens cannot be shared by 2 ranks: choose a multiple of 2, or "
        "sequence_parallel=False",
        "state dict": "the state dict belongs to another model: layers.0.ffn.w1.weight is (24, 16) there and (23, "
        "16) here; "
        "layers.0.ffn.w2.weight is (16, 24) there and (16, 23) here; layers.0.ffn.w3.weight is (24, 16) there and "
        "(23, 16) here, and 3 more",
    }


def test_steps_that_would_be_wrong_are_refused(ranks):
    """Numbers outside of the vocabulary, -100 of other libraries among them, were nobody's, and counted as 0."""
    for told in ranks(2).run(tensor_parallel_ranks.wrong_steps):
        for number in (19, -1):
            assert told[f"input {number}"].startswith("IndexError: index"), told
        for number in (19, -1, -100):
            assert "is out of bounds" in told[f"target {number}"], told
        assert told["twice"].startswith("UsageError: tensor parallel layers are differentiated once")
        for name in ("other tokens", "other tokens on a mesh"):
            assert "ranks differ in what they train: tokens (4, 8) of digest" in told[name]
        assert "ranks differ in what they train: targets (4, 8) of digest" in told["other targets"]
        for name in ("other seeds", "other shares"):
            assert "ranks differ in what they train: random numbers from generator state " in told[name]
        assert "same random numbers" not in told
        assert told["float targets"] == "UsageError: targets are torch.float32: choose token ids, int64"
        assert told["generate"].startswith("UsageError: generate() of the module would take the logits of this rank's")
        for name in ("inputs", "grad", "grad of a sum"):
            assert told[name].startswith("UsageError: torch.autograd.grad() and backward(inputs=...) would leave out")


def test_changed_modules_are_right_or_refused(ranks):
    _, expected = tensor_parallel_ranks.alone()
    replaced = "was replaced (as load_state_dict() with assign=True does) after it was wrapped: call refresh() on every"
    for told, found in ranks(2).run(tensor_parallel_ranks.changed_modules):
        for change, gradients in found.items():
            frozen = {"ln_final.weight"} if change in ("frozen", "copied") else set()
            assert gradients.keys() == expected.keys() - frozen
            for parameter, gradient in gradients.items():
                off = (gradient - expected[parameter]).norm() / expected[parameter].norm()
                assert off <= 1e-5, (change, parameter)
        clipped = "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's share of the gradients"
        assert told.pop("copied").startswith(clipped)
        assert told.pop("assigned, clipped").startswith(clipped)
        assert told.pop("within FSDP").endswith("after it was wrapped: call refresh() on every rank")
        assert told == {
            "within FSDP, refreshed": "FSDP holds slices of the parts: call refresh() of the FSDP module instead",
            "hook": "lm_head.weight has a hook, which would be lost: register it on the parameter of the wrapped "
            "module, where it sees the gradient of this rank's part",
            "pickled": "a TensorParallel module cannot be pickled: save its full_state_dict()",
            "unfrozen": "ln_final.weight was unfrozen after it was wrapped: call refresh() on every rank",
            "assigned": f"token_embeddings.weight {replaced} rank",
            "assigned, module called": f"token_embeddings.weight {replaced} rank",
            "adapter": "layers.0.ffn.adapter.weight was added after it was wrapped: call refresh() on every rank",
            "adapter, refreshed": "layers.0.ffn.adapter.weight was added after ranks had shared out the module: change "
            "the module before it is wrapped",
        }
