"""What the Triton and the Hopper kernels are both held against: the float64 reference, and sums that are exact."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336sys.kernels.attention.hopper import settings
from cs336sys.kernels.attention.operators import FlashAttentionTriton
from cs336sys.kernels.attention.problem import AttentionProblem
from cs336sys.kernels.attention.reference import reference_attention
from cs336sys.kernels.attention.triton.settings import fused, joint, separate

ON_GPU = torch.cuda.is_available()

# Largest error of an element, relative to the largest element or 1, the size of the inputs. Half dtypes round P, dS and
# the results to 11 and 8 bits; products in float32 are exact in the interpreter and three TF32 products on a GPU.
TOLERANCES = {torch.float32: 2e-5 if ON_GPU else 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# Launch settings of the backward pass, by the tile of queries and keys.
FORMS = {
    "fused": fused,
    "fused with splits": lambda tile: fused(tile, num_splits=3),
    "separate": lambda tile: separate(tile, tile),
    "joint": joint,
}

STRIDES = {
    "slices of one packed tensor": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "every second row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "elements far apart": lambda x: x.mT.contiguous().mT,
    "heads expanded": lambda x: x[:, :1].expand_as(x),
    "not 16-byte aligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
}


class Operations(TorchDispatchMode):
    """Lists the operations, views apart, and how many elements the tensor has that each of them made or changed."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.made.append((func.overloadpacket.__name__, out.numel()))
        return out

    def count(self, *names):
        return tuple([made for made, _ in self.made].count(name) for name in names)


def _why_no_hopper():
    if not ON_GPU:
        return "no CUDA GPU"
    return settings.why_unavailable(torch.empty(1, 64, dtype=torch.bfloat16, device="cuda"))


# Of a test, or of one parameter's, that needs a GPU which has the Hopper kernels.
HOPPER_MARKS = (pytest.mark.gpu, pytest.mark.skipif(_why_no_hopper() is not None, reason=str(_why_no_hopper())))


def on_hopper(function):
    for mark in HOPPER_MARKS:
        function = mark(function)
    return function


def problem_on_h200(num_sequences, num_queries, head_dim, num_keys=None, is_causal=True, **options) -> AttentionProblem:
    """Of as many keys as queries in bfloat16, but for what ``options`` say."""
    options = {"capability": (9, 0), "num_multiprocessors": 132, "tma_allowed": True} | options
    dtype, lengths = options.pop("dtype", torch.bfloat16), (num_sequences, num_queries, num_keys or num_queries)
    return AttentionProblem(head_dim, dtype, "tf32x3", is_causal, *lengths, **options)


def random_inputs(leading, num_queries, num_keys, head_dim, dtype=torch.float32, device="cpu", seed=0, group_size=1):
    """Query, key and value; ``leading`` ends with the heads of queries, of which ``group_size`` share one of keys."""
    generator = torch.Generator(device).manual_seed(seed)
    of_keys = (*leading[:-1], *(heads // group_size for heads in leading[-1:]))
    return tuple(
        torch.randn(*heads, length, head_dim, dtype=dtype, device=device, generator=generator).requires_grad_()
        for heads, length in ((leading, num_queries), (of_keys, num_keys), (of_keys, num_keys))
    )


def assert_matches_float64(
    inputs, is_causal, grad_out=None, float32_precision="tf32x3", kernels="triton", window=None, deterministic=False
):
    """Deterministic gradients also repeat to the last bit."""
    out = FlashAttentionTriton.apply(*inputs, is_causal, float32_precision, deterministic, kernels, window)
    if grad_out is None:
        grad_out = torch.randn(out.shape, dtype=out.dtype, device=out.device)
    logsumexp = out.grad_fn.saved_tensors[-1]
    gradients = torch.autograd.grad(out, inputs, grad_out, retain_graph=deterministic)
    if deterministic:
        assert all(map(torch.equal, gradients, torch.autograd.grad(out, inputs, grad_out)))
    assert_close_to_float64((out, logsumexp, *gradients), inputs, is_causal, window, grad_out)


def assert_close_to_float64(actual, inputs, is_causal, window, grad_out, **options):
    """``actual``: output, logsumexp, and the gradients of query, key and value."""
    expected_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected_out, expected_logsumexp = reference_attention(*expected_inputs, is_causal, window=window, **options)
    expected_gradients = torch.autograd.grad(expected_out, expected_inputs, grad_out.double())

    names = ("out", "logsumexp", "dq", "dk", "dv")
    expected = (expected_out, expected_logsumexp, *expected_gradients)
    for name, tensor, expected_tensor in zip(names, actual, expected, strict=True):
        assert tensor.shape == expected_tensor.shape, name
        dtype = torch.promote_types(inputs[0].dtype, torch.float32) if name == "logsumexp" else inputs[0].dtype
        assert tensor.dtype == dtype, name
        # Queries that see no key have logsumexp -inf in both.
        seen = expected_tensor.isfinite()
        assert torch.equal(tensor.isfinite(), seen), name
        error = (tensor.double() - expected_tensor)[seen].abs().max().item() if seen.any() else 0.0
        scale = expected_tensor[seen].abs().max().clamp(min=1.0).item() if seen.any() else 1.0
        tolerance = 1e-12 if dtype == torch.float64 else TOLERANCES[dtype]
        assert error <= tolerance * scale, f"{name}: {error / scale:.1e} of the largest element, {tolerance} allowed"


def assert_exact(
    num_queries, num_keys, head_dim, is_causal, dtype, device, seed=0, kernels="triton", num_heads=1, key_heads=1
):
    """Query i picks exactly one key: its score is so far ahead that all other weights underflow to 0.

    Keys are their number's binary digits as +-1, queries 2^10 times the digits of the key they pick. Values and output
    gradients are small integers, whose sums are exact in any order. A head that reads other keys gets other values.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    digits = max(1, math.ceil(math.log2(num_keys)))
    assert digits <= head_dim
    key = torch.zeros(num_keys, head_dim)
    key[:, :digits] = (torch.arange(num_keys)[:, None] >> torch.arange(digits) & 1) * 2.0 - 1.0
    last = torch.arange(num_queries).clamp(max=num_keys - 1) if is_causal else torch.full((num_queries,), num_keys - 1)
    picked = (torch.rand(num_heads, num_queries, generator=generator) * (last + 1)).long()
    query = key[picked] * 2.0**10
    value = torch.randint(-8, 9, (key_heads, num_keys, head_dim), generator=generator).float()
    grad_out = torch.randint(-2, 3, query.shape, generator=generator).float()
    inputs = tuple(side[None].to(device, dtype).requires_grad_() for side in (query, key.expand_as(value), value))
    out = FlashAttentionTriton.apply(*inputs, is_causal, "tf32x3", False, kernels)
    grad_query, grad_key, grad_value = torch.autograd.grad(out, inputs, grad_out[None].to(device, dtype))
    rows = picked + num_keys * (torch.arange(num_heads) // (num_heads // key_heads))[:, None]
    assert torch.equal(out[0].float().cpu(), value.flatten(0, 1)[rows])
    expected = torch.zeros(key_heads * num_keys, head_dim).index_add(0, rows.flatten(), grad_out.flatten(0, 1))
    assert torch.equal(grad_value[0].flatten(0, 1).float().cpu(), expected)
    # The weight is exactly 1, so dP - D = 0 exactly.
    assert not grad_query.any()
    assert not grad_key.any()
