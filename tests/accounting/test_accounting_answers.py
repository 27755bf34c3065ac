"""Answers about one model, its checkpoints, and buckets: worked by hand, and against the formulas they build on."""

from dataclasses import asdict, replace

import pytest

from cs336sys.accounting.activations import ATTENTION, attention_memory, block_activations, saved_activations
from cs336sys.accounting.checkpointing import recomputed_blocks
from cs336sys.accounting.communication import bucket_answers, ring_answers
from cs336sys.accounting.flops import count_parameters, model_flops
from cs336sys.accounting.one_device import (
    attention_answers,
    block_answers,
    checkpointing_answers,
    flops_answers,
    tensor_answers,
)
from cs336sys.settings.sizes import PRECISIONS, SIZES

MIB = 2**20
# The 2026 handout's xl at its reference batch of 4 and context of 512.
XL = SIZES["2.7b"]


def by_quantity(answers):
    return {answer.quantity: answer.value for answer in answers}


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_block_is_the_difference_of_one_more_layer(precision, attention):
    size = SIZES["small"]
    two, one = (asdict(saved_activations(replace(size, num_layers=layers), precision, attention)) for layers in (2, 1))
    assert asdict(block_activations(size, precision, attention)) == {name: two[name] - one[name] for name in two}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_block_answers_add_up(precision, attention):
    answers = block_answers(XL, precision, attention)
    found = by_quantity(answers)
    parts = [answer.value for answer in answers[:-3]]
    assert parts == sorted(parts, reverse=True)
    assert sum(parts) == found["saved for backward by one block"]
    assert sum(parts) == block_activations(XL, precision, attention).total
    without, with_one = (count_parameters(replace(XL, num_layers=layers)) for layers in (0, 1))
    gradients = found["gradients of one block's parameters"]
    assert gradients == 4 * (with_one - without)
    assert found["change of memory over the block's backward pass"] == gradients - sum(parts)


def test_shares_of_the_block():
    answers = block_answers(XL, "fp32", "reference")
    # SwiGLU 5 * 80 MiB of 856.5 MiB; with both softmax matrices and two of 60 MiB 776 MiB.
    assert answers[0].value == 400 * MIB
    assert answers[0].reason == "46.7% of the block."
    (saved,) = [answer for answer in answers if answer.quantity == "saved for backward by one block"]
    assert saved.reason.startswith("The five largest of these kinds, each all tensors of its kind, are 90.6% of it;")


def test_flops_add_up_to_the_models():
    found = by_quantity(flops_answers(XL))
    assert found["forward pass"] == model_flops(XL, backward=False, causal=False)
    assert found["training step"] == model_flops(XL, causal=False)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "flash"])
def test_attention_answers_are_its_memory(implementation, causal):
    shape = (8, 1024, 64, "bf16")
    answers = attention_answers(*shape, causal=causal, implementation=implementation)
    memory = attention_memory(*shape, causal=causal, implementation=implementation)
    found = by_quantity(answers)
    assert found["held before the backward pass"] == memory.held
    assert found["peak"] == memory.peak
    assert sum(answer.value for answer in answers[:-3]) == memory.held
    assert ("causal mask" in found) == (causal and implementation == "eager")


def test_nested_recomputation_grows_as_n_log_n():
    for layers in (2, 8, 128):
        answers = by_quantity(checkpointing_answers(replace(XL, num_layers=layers), "fp32", "flash"))
        assert answers["blocks computed again with halves inside halves"] == recomputed_blocks(layers, "nested")[0]


def test_every_answer_names_its_source():
    answers = [
        *tensor_answers(XL, "fp32"),
        *block_answers(XL, "bf16", "flash"),
        *flops_answers(XL),
        *attention_answers(8, 64, 16, "fp32", causal=True, implementation="eager"),
        *checkpointing_answers(XL, "fp32", "sdpa"),
        *ring_answers(8, 2, 1.0),
        *bucket_answers(1e9, 2, 1e9, 1e-6),
    ]
    assert [answer.quantity for answer in answers if not answer.source] == []
