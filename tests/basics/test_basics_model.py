"""The model against torch.nn.functional, complex-number rotations and its own promises."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from cs336_basics.model import (
    BasicsTransformerLM,
    CausalMultiHeadSelfAttention,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    scaled_dot_product_attention,
)
from cs336_basics.nn_utils import cross_entropy

pytestmark = pytest.mark.usefixtures("own_attention")

CONFIG = {
    "vocab_size": 31,
    "context_length": 12,
    "d_model": 24,
    "num_layers": 2,
    "num_heads": 3,
    "d_ff": 40,
    "rope_theta": 10_000.0,
}


@pytest.fixture
def model():
    return BasicsTransformerLM(**CONFIG)


@pytest.fixture
def tokens():
    return torch.randint(CONFIG["vocab_size"], (2, CONFIG["context_length"]))


def rotate_with_complex_numbers(x, positions, theta=10_000.0):
    dim = x.size(-1)
    frequencies = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    turns = torch.polar(torch.ones(()).double(), positions.double()[..., None] * frequencies)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


def functional_logits(weights, token_ids, num_heads, num_layers):
    """The whole model in fp64, written with torch.nn.functional from a state dict."""
    weights = {name: weight.double() for name, weight in weights.items()}
    x = F.embedding(token_ids, weights["token_embeddings.weight"])

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps=1e-5)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"])

    positions = torch.arange(token_ids.size(-1))
    for layer in (f"layers.{i}" for i in range(num_layers)):
        y = norm(x, f"{layer}.ln1")
        q, k, v = (linear(y, f"{layer}.attn.{n}_proj").unflatten(-1, (num_heads, -1)).transpose(1, 2) for n in "qkv")
        q, k = (rotate_with_complex_numbers(part, positions) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + linear(y, f"{layer}.attn.output_proj")
        y = norm(x, f"{layer}.ln2")
        x = x + linear(F.silu(linear(y, f"{layer}.ffn.w1")) * linear(y, f"{layer}.ffn.w3"), f"{layer}.ffn.w2")
    return linear(norm(x, "ln_final"), "lm_head")


def test_initial_weights_are_truncated_normals():
    linear, embedding = Linear(300, 500).weight, Embedding(400, 500).weight
    for weight, std in ((linear, math.sqrt(2 / 800)), (embedding, 1.0)):
        assert weight.abs().max() <= 3 * std
        # A normal distribution cut at three standard deviations has 0.9866 of the standard deviation.
        assert weight.std().item() == pytest.approx(0.9866 * std, rel=0.01)
        assert weight.mean().item() == pytest.approx(0.0, abs=0.01 * std)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
# 1e3 squared overflows fp16, 1e-4 squared underflows in it.
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_rms_norm_is_computed_in_fp32_and_returned_in_the_dtype_of_its_input(dtype, scale):
    norm = RMSNorm(64)
    torch.nn.init.normal_(norm.weight)
    norm.to(dtype)
    x = (torch.randn(3, 5, 64) * scale).to(dtype).requires_grad_()
    out = norm(x)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    expected = F.rms_norm(x64, (64,), weight64, eps=1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype))
    grad = torch.randn(3, 5, 64).to(dtype)
    out.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(x.grad, x64.grad.to(dtype), rtol=3e-3 if dtype.itemsize == 2 else 1e-5, atol=3e-2)


def test_rotary_embedding_takes_positions_of_each_sequence():
    rope = RotaryEmbedding(20, 8, 500.0)
    x = torch.randn(2, 3, 4, 8)
    positions = torch.tensor([[0, 7, 7, 19], [3, 1, 2, 0]])
    expected = rotate_with_complex_numbers(x, positions[:, None], 500.0).float()
    torch.testing.assert_close(rope(x, positions[:, None]), expected)
    torch.testing.assert_close(rope(x, positions[0])[0], expected[0])


def test_rotations_of_far_positions_are_accurate():
    rope = RotaryEmbedding(32_768, 128)
    x = torch.randn(1, 128)
    last = torch.tensor([32_767])
    torch.testing.assert_close(rope(x, last), rotate_with_complex_numbers(x, last).float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rotation_is_computed_in_fp32_and_returned_in_the_dtype_of_its_input(dtype):
    rope = RotaryEmbedding(300, 32).to(dtype)
    x = torch.randn(300, 32).to(dtype)
    assert rope.cos_sin.dtype == torch.float32
    assert rope(x).dtype == dtype
    expected = rotate_with_complex_numbers(x, torch.arange(300)).to(dtype)
    # One rounding of the exact result: half a unit in the last place, and a little for the cosines' own.
    torch.testing.assert_close(rope(x), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_rotary_embedding_refuses_odd_dimensions_and_long_sequences():
    with pytest.raises(ValueError, match="head dimension must be even, not 7"):
        RotaryEmbedding(10, 7)
    with pytest.raises(ValueError, match="11 tokens, but the model's context_length is 10"):
        RotaryEmbedding(10, 8)(torch.randn(11, 8))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_matches_torch_with_other_key_lengths_and_value_widths(masked):
    q = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 3, 9, 6, dtype=torch.float64, requires_grad=True)
    mask = None
    if masked:
        mask = torch.rand(5, 9) < 0.5
        mask[:, 0] = True
    out = scaled_dot_product_attention(Q=q, K=k, V=v, mask=mask)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    grads, expected_grads = (torch.autograd.grad(result, (q, k, v), grad) for result in (out, expected))
    torch.testing.assert_close(grads, expected_grads)


def test_attention_row_without_visible_keys_is_nan_and_leaves_the_others():
    q, k, v = torch.randn(3, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    out = scaled_dot_product_attention(q, k, v, mask)
    assert out[2].isnan().all()
    torch.testing.assert_close(out[[0, 1, 3]], F.scaled_dot_product_attention(q, k, v)[[0, 1, 3]])


def test_fp16_attention_survives_products_beyond_the_range_of_fp16():
    q = torch.full((4, 64), 40.0, dtype=torch.float16)
    k = q * torch.tensor([1.0, 1.0, 0.5, -1.0])[:, None].half()
    v = torch.randn(4, 64).half()
    assert (q @ k.mT).isinf().any()
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), (v[:2].float().mean(0).half()).expand(4, 64))


def test_self_attention_takes_token_positions_per_sequence():
    attention = CausalMultiHeadSelfAttention(24, 3, RotaryEmbedding(50, 8))
    x = torch.randn(2, 6, 24)
    # Scores depend on distances only, so a shift of all positions changes nothing, and another spacing does.
    torch.testing.assert_close(attention(x, torch.arange(6) + 40), attention(x), rtol=1e-4, atol=1e-5)
    spread = torch.stack((torch.arange(6), 3 * torch.arange(6)))
    out = attention(x, spread)
    torch.testing.assert_close(out[0], attention(x)[0])
    assert not torch.allclose(out[1], attention(x)[1], atol=1e-3)


def test_heads_that_do_not_divide_d_model_are_refused():
    with pytest.raises(ValueError, match="5 heads do not divide d_model 24"):
        CausalMultiHeadSelfAttention(24, 5)


def test_logits_and_gradients_match_a_functional_model_in_fp64(model, tokens):
    weights = {name: weight.double().requires_grad_() for name, weight in model.state_dict().items()}
    expected = functional_logits(weights, tokens, CONFIG["num_heads"], CONFIG["num_layers"])
    logits = model(tokens)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-5)
    for result in (logits, expected):
        result.square().sum().backward()
    for name, weight in weights.items():
        torch.testing.assert_close(model.get_parameter(name).grad.double(), weight.grad, rtol=1e-4, atol=1e-4)


def test_sequence_longer_than_the_context_is_refused(model):
    long = torch.zeros(1, 13, dtype=torch.long)
    with pytest.raises(ValueError, match="13 tokens, but the model's context_length is 12"):
        model(long)
    with pytest.raises(ValueError, match="13 tokens"):
        BasicsTransformerLM(**{**CONFIG, "rope_theta": None})(long)


def test_meta_model_materialises_to_the_same_model(model, tokens):
    with torch.device("meta"):
        meta = BasicsTransformerLM(**CONFIG)
    tensors = [*meta.parameters(), *meta.buffers()]
    assert RMSNorm(8, device="meta").weight.is_meta
    assert len(tensors) == 22
    assert all(tensor.is_meta for tensor in tensors)
    meta.to_empty(device="cpu")
    meta.load_state_dict(model.state_dict())
    assert torch.equal(meta(tokens), model(tokens))


def test_training_step_compiles_as_one_graph(model, tokens):
    def loss_of(tokens):
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    expected = loss_of(tokens)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    torch._dynamo.reset()
    loss = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(tokens)
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-6)


@pytest.fixture
def fixed_logits(model, monkeypatch):
    """A model that gives the same logits after any token: ids 0 to 4 are likely, 5 is all but impossible."""
    row = torch.full((CONFIG["vocab_size"],), -30.0)
    row[:5] = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(model, "forward", lambda x: row.expand(*x.shape, -1))
    return model


def test_greedy_generation_takes_the_likeliest_token_of_the_last_window(model):
    prompt = torch.randint(CONFIG["vocab_size"], (2, 10))
    new = model.generate(prompt, max_new_tokens=6, temperature=0)
    assert new.shape == (2, 6)
    tokens = torch.cat((prompt, new), dim=-1)
    for end in range(10, 16):
        assert torch.equal(tokens[:, end], model(tokens[:, max(0, end - 12) : end])[:, -1].argmax(-1))


def test_top_k_draws_exactly_from_the_k_likeliest(fixed_logits):
    prompt = torch.zeros(500, 1, dtype=torch.long)

    def drawn(**options):
        return set(fixed_logits.generate(prompt, max_new_tokens=2, **options).flatten().tolist())

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=1, temperature=5.0) == {1}
    # Ids 2, 3 and 4 are equally likely: two of them are let in, not all three.
    assert len(drawn(top_k=3)) == 3
    assert drawn(top_k=4) == {1, 2, 3, 4}
    assert drawn(top_k=10_000) == {0, 1, 2, 3, 4}


def test_temperature_divides_the_logits(fixed_logits):
    prompt = torch.zeros(4000, 1, dtype=torch.long)
    for temperature in (0.5, 2.0):
        drawn = fixed_logits.generate(prompt, max_new_tokens=1, temperature=temperature)
        expected = F.softmax(torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0]) / temperature, dim=0)
        torch.testing.assert_close(drawn.flatten().bincount(minlength=5) / 4000, expected, rtol=0, atol=0.03)


def test_generation_ends_before_the_end_of_sequence_token(model, monkeypatch):
    # The token after t is t + 1.
    monkeypatch.setattr(model, "forward", lambda x: 100.0 * F.one_hot(x + 1, CONFIG["vocab_size"]))
    prompt = torch.tensor([2])
    assert model.generate(prompt, max_new_tokens=20, eos_token_id=6).tolist() == [[3, 4, 5]]
    assert prompt.tolist() == [2]
    two = model.generate(torch.tensor([[2], [4]]), max_new_tokens=20, eos_token_id=6)
    assert two.tolist() == [[3, 4, 5], [5, 6, 6]]
    assert model.generate(torch.tensor([2]), max_new_tokens=2, eos_token_id=6).tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": -1.0}, "temperature -1.0"), ({"top_k": 0}, "top_k 0"), ({"x": torch.empty(0).long()}, "empty")],
)
def test_generate_refuses_senseless_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(**{"x": torch.tensor([1]), "max_new_tokens": 1, **options})


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_from_pretrained_loads_a_saved_model(model, tokens, tmp_path, prefix):
    (tmp_path / "model_config.json").write_text(json.dumps(model.config))
    torch.save({prefix + name: weight for name, weight in model.state_dict().items()}, tmp_path / "model.pt")
    loaded = BasicsTransformerLM.from_pretrained(str(tmp_path))
    assert loaded.config == CONFIG
    assert torch.equal(loaded(tokens), model(tokens))
