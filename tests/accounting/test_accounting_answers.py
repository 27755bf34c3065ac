"""Answers about one model, its checkpoints, and buckets: worked by hand, and against the formulas they build on."""

from dataclasses import asdict, replace

import pytest

from cs336sys.accounting.activations import (
    ATTENTION,
    SavedActivations,
    attention_memory,
    block_activations,
    saved_activations,
)
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
from cs336sys.settings.sizes import PRECISIONS, SIZES, ModelSize

MIB = 2**20
# The 2026 handout's xl at its reference batch of 4 and context of 512.
XL = SIZES["2.7b"]


def by_quantity(answers):
    return {answer.quantity: answer.value for answer in answers}


def test_tensors_of_the_reference_model():
    found = by_quantity(tensor_answers(XL, "fp32"))
    assert found == {
        "tensor of the residual stream": 20 * MIB,  # 4 * 512 * 2560 * 4 bytes
        "attention scores": 128 * MIB,  # 4 * 32 * 512 * 512 * 4
        "feed-forward activations": 80 * MIB,  # 4 * 512 * 10240 * 4
        "logits": 81_920_000,  # 4 * 512 * 10000 * 4
    }
    half = by_quantity(tensor_answers(XL, "bf16"))
    assert (half["tensor of the residual stream"], half["attention scores"]) == (20 * MIB, 64 * MIB)


def test_largest_tensor_stands_first():
    short = tensor_answers(replace(XL, context=128), "fp32")
    assert [answer.quantity for answer in short[1:]] == ["feed-forward activations", "logits", "attention scores"]
    long = tensor_answers(replace(XL, context=2048), "fp32")
    assert long[1].quantity == "attention scores"
    assert long[1].value == 2048 * MIB


def test_block_activations_worked_by_hand():
    size = ModelSize("hand", d_model=8, d_ff=20, num_layers=3, num_heads=2, vocab_size=50, context=4, batch_size=2)
    assert block_activations(size, "fp32", "reference") == SavedActivations(
        residual_stream=512,  # 2 norms * 4 * 8 tokens * 8
        norms=576,  # 2 * (256 + 4 * 8)
        linear_inputs=768,  # 2 norm outputs and the heads, 256 each
        queries_keys_values=768,
        mask=16,
        exponentials=256,  # 4 * 2 * 2 * 16
        probabilities=256,
        attention_statistics=64,
        swiglu=3200,  # 5 * 4 * 8 * 20
    )
    assert block_activations(size, "bf16", "flash") == SavedActivations(
        residual_stream=512,
        norms=576,
        linear_inputs=768,  # 5 casts and the heads, 128 each
        queries_keys_values=384,
        attention_statistics=64,
        attention_output=128,
        swiglu=1600,
        weight_copies=1472,  # 2 * (4 * 64 + 3 * 160)
    )


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


@pytest.mark.parametrize("name", ["tiny", "2.7b", "8b"])
def test_flops_add_up_to_the_models(name):
    size = SIZES[name]
    found = by_quantity(flops_answers(size))
    assert found["forward pass"] == model_flops(size, backward=False, causal=False)
    assert found["training step"] == model_flops(size, causal=False)


def test_softmax_beside_the_products_of_attention():
    found = by_quantity(flops_answers(XL))
    # 4 * 32 * 512^2 scores in 32 layers, five operations each; products 4 * 80 / 5 = 64 times as many.
    assert found["softmax of attention"] == 5 * 4 * 32 * 512 * 512 * 32
    assert found["attention's products over softmax, FLOPs"] == 64
    assert found["matrix products in the forward pass"] == 289
    assert found["bytes that AdamW reads and writes in a step"] == 28 * 3_406_809_600


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


def test_checkpoints_worked_by_hand():
    # Hardly an inner layer: 100 blocks with inputs of 4 * 64 * 64 bytes save 11 tensors of that size and a few numbers.
    size = ModelSize("hand", d_model=64, d_ff=2, num_layers=100, num_heads=1, vocab_size=10, context=64, batch_size=1)
    found = by_quantity(checkpointing_answers(size, "fp32", "sdpa"))
    s, b = found["input of a block, which a checkpoint keeps"], found["what a block saves for backward"]
    assert (s, b // s) == (16384, 11)
    assert found["group with the least memory, one recomputation"] == pytest.approx((100 * s / b) ** 0.5)
    # K is 3.0: 33 inputs and three blocks, the least of all groups of whole blocks; seven levels of halves.
    assert found["held with a checkpoint for every 3 blocks"] == pytest.approx(100 * s / 3 + 3 * b)
    assert all(100 * s / group + group * b > 100 * s / 3 + 3 * b for group in (1, 2, 4, 5))
    assert found["held with halves inside halves"] == b + 7 * s


@pytest.mark.parametrize("layers", [2, 4, 8, 32, 128])
def test_nested_recomputation_grows_as_n_log_n(layers):
    answers = by_quantity(checkpointing_answers(replace(XL, num_layers=layers), "fp32", "flash"))
    assert answers["blocks computed again with halves inside halves"] == recomputed_blocks(layers, "nested")[0]


def test_checkpointing_answers_of_the_handouts_model():
    size = replace(XL, context=2048)
    found = by_quantity(checkpointing_answers(size, "fp32", "reference"))
    # The handout prints 160 MiB for two checkpoints of this shape.
    assert found["input of a block, which a checkpoint keeps"] == 80 * MIB
    block = block_activations(size, "fp32", "reference").total
    assert found["held without checkpoints"] == 32 * block
    assert found["held with a checkpoint for every 1 block"] == 32 * 80 * MIB + block
    assert found["held with halves inside halves"] == block + 5 * 80 * MIB
    assert found["group with the least memory, one recomputation"] == pytest.approx((32 * 80 * MIB / block) ** 0.5)


def test_rings_answer_the_alternate_all_reduce():
    answers = {answer.quantity: answer for answer in ring_answers(10**9, 4, 450e9)}
    alternate = answers["alternate ring all-reduce"]
    assert alternate.derivation(str) == "T_alternate = (N - 1) S / W = (4 - 1) x 1000000000 / 450000000000.0"
    assert alternate.value == pytest.approx(3 / 450)
    assert answers["alternate over usual"].value == pytest.approx(2)
    assert "alternate over usual" not in {answer.quantity for answer in ring_answers(10**9, 1, 450e9)}


def test_bucket_answers_worked_by_hand():
    answers = {answer.quantity: answer for answer in bucket_answers(9e9, 10, 1e11, 1e-6)}
    # The last of 10 buckets is 0.9 GB, 9 ms; ten calls 10 us.
    assert answers["overhead of 10 buckets"].value == pytest.approx(9.01e-3)
    assert answers["overhead of 10 buckets"].expression.formula == "s / (n_b w) + n_b o"
    best = answers["bucket size with the least overhead"]
    assert best.value == pytest.approx(3e7)
    assert best.expression.formula == "min(s, sqrt(s w o))"
    assert answers["buckets of that size"].value == pytest.approx(300)
    assert answers["overhead of these"].value == pytest.approx(6e-4)  # 2 sqrt(9e9 * 1e-6 / 1e11)


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
