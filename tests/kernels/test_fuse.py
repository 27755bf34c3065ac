"""A model with fused kernels trains as without, and is the same model before and after."""

import copy
import functools

import pytest
import torch
from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.kernels.fuse import fuse
from cs336sys.kernels.linear_cross_entropy import linear_cross_entropy


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    with device:
        return BasicsTransformerLM(23, context_length=12, d_model=24, num_layers=2, num_heads=2, d_ff=40)


@pytest.fixture
def tokens(device):
    return torch.arange(8, device=device)[None]


def losses(model, loss_of):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in torch.randint(23, (4, 2, 13), device=next(model.parameters()).device):
        loss = loss_of(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def test_trains_as_without(model, called):
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    handle = fuse(model)
    expected = list(losses(plain, lambda tokens, targets: cross_entropy(plain(tokens), targets)))
    assert list(losses(model, functools.partial(handle.loss, model))) == pytest.approx(expected, abs=1e-5)
    assert called == {"rms_norm": 4 * 5, "rope": 4 * 4, "swiglu": 4 * 2, "linear_cross_entropy": 4}
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=1e-4, atol=1e-5)


KERNELS = {"rms-norm": 5, "rope": 4, "swiglu": 2, "linear-cross-entropy": 1}


@pytest.mark.parametrize("only", [*([name] for name in KERNELS), ["rope", "linear-cross-entropy"]], ids="+".join)
def test_each_kernel_by_itself(model, called, only, tokens):
    expected = cross_entropy(model(tokens), tokens)
    handle = fuse(model, only=only)
    if "linear-cross-entropy" in only:
        loss = handle.loss(model, tokens, tokens)
    else:
        loss = cross_entropy(model(tokens), tokens)
        with pytest.raises(UsageError, match="fused without it"):
            handle.loss(model, tokens, tokens)
    torch.testing.assert_close(loss, expected)
    assert called == {name.replace("-", "_"): KERNELS[name] for name in only}
    with pytest.raises(UsageError, match=r"copies of weights need all fused kernels: .* is left out"):
        handle.keep_copies(torch.bfloat16)
    for _ in range(2):
        handle.undo()
    called.clear()
    assert torch.equal(cross_entropy(model(tokens), tokens), expected)
    assert called == {}
    assert not {"forward", "copy"} & {name for part in model.modules() for name in part.__dict__}


def _replace_forward(name, change):
    """Let all modules of a class with this name compute something else, as a subclass of the same name."""

    def replace(model):
        for part in model.modules():
            if type(part).__name__ == name:
                forward = type(part).forward
                changed = {"forward": lambda self, *inputs, forward=forward: change(self, forward, *inputs)}
                part.__class__ = type(name, (type(part),), changed)

    return replace


def _post_norm(block, _, x):
    x = block.ln1(x + block.attn(x))
    return block.ln2(x + block.ffn(x))


def _halves(rotation, _, x, positions=None):
    """Rotate element i with i + D / 2."""
    cos, sin = rotation.cos_sin[:, : x.size(-2)]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def _normalize_queries(model):
    for block in model.layers:
        block.attn.scale = nn.Parameter(torch.full((), 0.5))
    _replace_forward("CausalMultiHeadSelfAttention", lambda attn, forward, x: attn.scale * forward(attn, x))(model)


@pytest.mark.parametrize(
    "change",
    [
        _replace_forward("RMSNorm", lambda norm, forward, x: forward(norm, x) * (1 + norm.weight)),
        _replace_forward("SwiGLU", lambda ffn, _, x: ffn.w2(torch.nn.functional.gelu(ffn.w1(x)) * ffn.w3(x))),
        _replace_forward("Embedding", lambda embedding, forward, ids: 4 * forward(embedding, ids)),
        _replace_forward("TransformerBlock", _post_norm),
        _replace_forward("RotaryEmbedding", _halves),
        _replace_forward("BasicsTransformerLM", lambda model, forward, tokens: forward(model, tokens).mul_(0.25)),
        _normalize_queries,
    ],
    ids=["norm", "gate", "embedding", "block", "rotation", "logits in place", "attention"],
)
def test_modules_that_compute_something_else_under_the_same_name_are_left_alone(model, change, tokens):
    change(model)

    def loss_of(model):
        return cross_entropy(model(tokens), tokens)

    expected = loss_of(model)
    handle = fuse(model)
    torch.testing.assert_close(handle.loss(model, tokens, tokens) if handle.computes_loss else loss_of(model), expected)
    handle.keep_copies(torch.bfloat16)
    with torch.autocast(tokens.device.type, torch.bfloat16):
        torch.testing.assert_close(loss_of(model), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "none"}, {"softcap": 0.5, "ignore_index": 3}])
def test_loss_takes_the_options_of_the_kernel(model, options, tokens):
    hidden = []
    hook = model.lm_head.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    model(tokens)
    expected = linear_cross_entropy(hidden[0], model.lm_head.weight, tokens, **options)
    hook.remove()
    handle = fuse(model)
    torch.testing.assert_close(handle.loss(model, tokens, tokens, **options), expected)
    # Options are one call's.
    torch.testing.assert_close(handle.loss(model, tokens, tokens), cross_entropy(model(tokens), tokens))
    handle.undo()
    with pytest.raises(UsageError, match="BasicsTransformerLM is no longer fused: fuse it again"):
        handle.loss(model, tokens, tokens)


def test_copies_are_fused_by_themselves(model, called, tokens):
    handle = fuse(model)
    other = copy.deepcopy(model)
    handle.undo()
    with torch.no_grad():
        other.layers[0].ln1.weight.zero_()
    assert not torch.equal(other(tokens), model(tokens))
    assert called["swiglu"] == 2


def test_theta_may_be_the_models(model, tokens):
    expected = model(tokens)
    del model.positional_encoder.theta
    fuse(model)
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize(
    ("change", "only", "sentence"),
    [
        (lambda model: delattr(model.layers[1].ffn, "w3"), None, r"layers.1.ffn \(SwiGLU\) has no w3: fused kernels"),
        (lambda model: delattr(model.layers[0].ln2, "eps"), None, r"layers.0.ln2 \(RMSNorm\) has no eps"),
        (
            lambda model: [delattr(model.positional_encoder, "theta"), model.config.pop("rope_theta")], None,
            r"positional_encoder \(RotaryEmbedding\) has no theta",
        ),
        (fuse, None, "has a forward pass of its own already"),
        (_replace_forward("RotaryEmbedding", _halves), ["rope"], "cs336_basics, but none of its .* computes what rope"),
        (id, ["rmsnorm"], r"kernel 'rmsnorm': choose from rms-norm, rope, .*; did you mean rms-norm?"),
        (id, [], "kernel '': choose from rms-norm, rope"),
    ],
    ids=["attribute", "eps", "theta", "twice", "other rotation", "other name", "no kernel"],
)  # fmt: skip
def test_model_that_fuse_does_not_know_is_refused(model, change, only, sentence):
    change(model)
    changed = [module for module in model.modules() if "forward" in module.__dict__]
    with pytest.raises(UsageError, match=sentence):
        fuse(model, only=only)
    assert [module for module in model.modules() if "forward" in module.__dict__] == changed
