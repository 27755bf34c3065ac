"""Answers about one model, its checkpoints, and buckets: worked by hand, and against the formulas they build on."""

import pytest

from cs336sys.accounting.activations import attention_memory
from cs336sys.accounting.checkpointing import best_group_size, parse_checkpointing, predicted_peak
from cs336sys.accounting.communication import bucket_answers, ring_answers
from cs336sys.accounting.one_device import (
    attention_answers,
    block_answers,
    checkpointing_answers,
    flops_answers,
    tensor_answers,
)
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import SIZES, ModelSize

MIB = 2**20
# The 2026 handout's xl at its reference batch of 4 and context of 512.
XL = SIZES["2.7b"]


def by_quantity(answers):
    return {answer.quantity: answer.value for answer in answers}


def test_shares_of_the_block():
    answers = block_answers(XL, "fp32", "reference")
    # SwiGLU 5 * 80 MiB of 856.5 MiB; with both softmax matrices and two of 60 MiB 776 MiB.
    assert answers[0].value == 400 * MIB
    assert answers[0].reason == "46.7% of the block."
    (saved,) = [answer for answer in answers if answer.quantity == "saved for backward by one block"]
    assert saved.reason.startswith("The five largest of these kinds, each all tensors of its kind, are 90.6% of it;")


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


def test_strategies_have_one_spelling():
    assert [parse_checkpointing(text) for text in ("every=1", "every=04", "nested")] == ["block", "every=4", "nested"]


@pytest.mark.parametrize("text", ["every=0", "every=two", "nested=2", ""])
def test_unknown_strategy_is_refused(text):
    with pytest.raises(UsageError, match=r"choose from none, block, every=K|a whole number of blocks"):
        parse_checkpointing(text)


def test_best_group_is_larger_where_inputs_outweigh_activations():
    """With hardly an inner layer a block saves 11 tensors as large as its input: norms (6), q, k, v, output, heads."""
    size = ModelSize("wide", d_model=64, d_ff=2, num_layers=100, num_heads=1, vocab_size=10, context=64, batch_size=99)
    found = best_group_size(size, "fp32", "forward-backward", "sdpa")
    peaks = {k: predicted_peak(size, "fp32", "forward-backward", "sdpa", f"every={k}").total for k in range(1, 101)}
    assert peaks[found.best] == min(peaks.values())
    assert found.rule == pytest.approx((100 / 11) ** 0.5, rel=0.01)
    assert found.best in (2, 3, 4)
