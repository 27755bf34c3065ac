"""``flash_attention``: choice of an implementation, and what happens around the kernels in PyTorch."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cs336sys.errors import CapabilityError
from cs336sys.kernels.attention import FlashAttentionTriton, flash_attention
from cs336sys.kernels.attention.reference import reference_attention

# Of numpy, in the interpreter, where a query sees no key.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def inputs(device):
    torch.manual_seed(0)
    return tuple(torch.randn(2, 3, length, 32, device=device, requires_grad=True) for length in (40, 50, 50))


def triton_attention(query, key, value):
    return flash_attention(query, key, value, True, implementation="triton")


def value_and_gradients(function, inputs):
    out = function(*inputs)
    return out, *torch.autograd.grad(out.square().sum(), inputs)


def test_auto_follows_the_device(inputs, device):
    out = flash_attention(*inputs)
    assert {"cuda": "FlashAttentionTriton", "cpu": "FlashAttentionTorch"}[device.type] in out.grad_fn.name()


def test_lacking_implementation_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr("cs336sys.kernels.attention.choice.INTERPRETED", False)
    query = torch.randn(1, 4, 16)
    with pytest.raises(CapabilityError, match="run on CUDA tensors, got cpu: set TRITON_INTERPRET=1"):
        flash_attention(query, query, query, implementation="triton")
    assert flash_attention(query, query, query).shape == query.shape


def test_mixed_dtypes_are_refused_but_not_under_autocast(inputs, device):
    query, key, value = inputs
    mixed = query, key.bfloat16(), value
    with pytest.raises(TypeError, match="same dtype"):
        triton_attention(*mixed)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out, logsumexp = flash_attention(*mixed, True, return_logsumexp=True, implementation="triton")
        expected, _ = reference_attention(*(tensor.bfloat16().float() for tensor in mixed), is_causal=True)
    assert (out.dtype, logsumexp.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert torch.autograd.grad(out.sum(), query)[0].dtype == torch.float32


def test_autocast_leaves_float64_alone(inputs, device):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = flash_attention(*(tensor.double() for tensor in inputs), implementation="tiled")
    assert out.dtype == torch.float64


def attention_with_options(query, key, value):
    options = {"window": 3, "scale": 0.5, "causal_alignment": "end", "return_logsumexp": True}
    out, logsumexp = flash_attention(query, key, value, True, implementation="triton", **options)
    assert not logsumexp.requires_grad
    return out + logsumexp[..., None]


@pytest.mark.parametrize("entry", [triton_attention, FlashAttentionTriton.apply, attention_with_options])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compile_keeps_one_graph(backend, entry, inputs):
    def block(query, key, value):
        return entry(query * 2.0, key, value).sin()

    expected = value_and_gradients(block, inputs)
    torch._dynamo.reset()
    compiled = value_and_gradients(torch.compile(block, fullgraph=True, backend=backend), inputs)
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)


def test_operators_keep_the_rules_of_pytorch(inputs):
    """Schema, fake results of the same shapes and strides, and a registered backward, by torch's own checks."""
    arguments = (*inputs, True, "tf32x3", True, "triton")
    torch.library.opcheck(torch.ops.cs336sys.flash_attention_forward, arguments)
    rows_first = tuple(tensor.detach().transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs)
    torch.library.opcheck(
        torch.ops.cs336sys.flash_attention_forward,
        (*rows_first, True, "tf32x3", True, "triton", 2),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant, inputs):
    expected = value_and_gradients(triton_attention, inputs)[1:]
    checkpoint(triton_attention, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close([tensor.grad for tensor in inputs], expected, rtol=1e-5, atol=1e-5)


def test_tensors_kept_elsewhere_may_come_back_with_other_strides(device):
    """As ``torch.autograd.graph.save_on_cpu`` gives them; and of one forward plan, so only their strides differ."""
    torch.manual_seed(0)
    inputs = tuple(torch.randn(2, n, 3, 32, device=device).transpose(1, 2).requires_grad_() for n in (40, 50, 50))
    expected = value_and_gradients(triton_attention, inputs)
    for length in (40, 50):
        unpack = lambda tensor, length=length: tensor.contiguous() if tensor.shape[-2] == length else tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            actual = value_and_gradients(triton_attention, inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("entry", [flash_attention, FlashAttentionTriton.apply], ids=["function", "class"])
def test_flops_are_counted(entry, is_causal, inputs):
    options = {"implementation": "triton"} if entry is flash_attention else {}
    with FlopCounterMode(display=False) as counter:
        entry(*inputs, is_causal, **options).sum().backward()
    forward = 4 * 2 * 3 * 40 * 50 * 32 // (2 if is_causal else 1)
    assert counter.get_total_flops() == forward + forward * 5 // 2


@pytest.mark.parametrize(
    ("implementation", "name"), [("triton", "FlashAttentionTriton"), ("tiled", "FlashAttentionTorch")]
)
def test_second_derivative_is_refused(implementation, name, inputs):
    with pytest.raises(RuntimeError, match=f"{name} is differentiable once|has no second derivative"):
        torch.autograd.grad(flash_attention(*inputs, implementation=implementation).sum(), inputs, create_graph=True)


def test_every_combination_of_gradients(inputs):
    """A gradient is right whichever others are asked for."""
    expected = value_and_gradients(triton_attention, inputs)[1:]
    for needed in itertools.product([False, True], repeat=3):
        tensors = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needed, strict=True)]
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        if wanted:
            gradients = torch.autograd.grad(triton_attention(*tensors).square().sum(), wanted)
            torch.testing.assert_close(gradients, [*itertools.compress(expected, needed)], rtol=1e-5, atol=1e-5)
