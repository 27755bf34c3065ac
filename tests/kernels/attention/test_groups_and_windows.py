"""Grouped queries, sliding windows, the logsumexp as a result, and gradients by blocks of keys, in all implementations.

The interpreter's tiles are 32 queries by 16 keys, so that windows of 1 to 70 are smaller and larger than either.
"""

import itertools
import math

import pytest
import torch
from attention_checks import FORMS, HOPPER_MARKS, ON_GPU, assert_close_to_float64, assert_matches_float64
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from cs336sys.kernels.attention import FlashAttentionTorch, flash_attention, flash_attention_backward, reference
from cs336sys.kernels.attention.operators import FlashAttentionTriton
from cs336sys.kernels.attention.reference import reference_attention
from cs336sys.kernels.attention.triton import plans
from cs336sys.kernels.attention.triton.settings import ForwardSettings, TileSettings, separate

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty", "fresh_plans"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, in the interpreter, where a query sees no key
]

ANYWHERE = ("triton", "tiled", "reference")
LONG = 150 if ON_GPU else 70
TILE = TileSettings(64, 32, 4, 1) if ON_GPU else TileSettings(32, 16, 4, 1)
BACKWARD_FORMS = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several in both directions for the implementation in PyTorch, too."""
    monkeypatch.setattr(reference, "CPU_TILE", (32, 16))
    monkeypatch.setattr(reference, "GPU_TILE", (32, 16))


def force(monkeypatch, form):
    monkeypatch.setattr(plans, "backward_settings", lambda problem, deterministic: FORMS[form](TILE))


def grouped_inputs(heads, key_heads, num_queries, num_keys, device, dtype=torch.float32, batch=2, head_dim=16):
    generator = torch.Generator(device).manual_seed(0)
    shapes = (heads, num_queries), (key_heads, num_keys), (key_heads, num_keys)
    return tuple(
        torch.randn(batch, *shape, head_dim, device=device, dtype=dtype, generator=generator).requires_grad_()
        for shape in shapes
    )


def attend(implementation, inputs, is_causal, window, **options):
    out, logsumexp = flash_attention(
        *inputs, is_causal, window=window, return_logsumexp=True, implementation=implementation, **options
    )
    return out, logsumexp


@BACKWARD_FORMS
def test_grouped_queries(form, device, monkeypatch):
    force(monkeypatch, form)
    assert_matches_float64(grouped_inputs(4, 2, 20, 33, device), True)
    assert_matches_float64(grouped_inputs(3, 1, 33, 20, device, batch=1), False)


# Less than a tile, as long as one of keys, longer than one of queries, and all keys that there are.
@pytest.mark.parametrize("window", [1, 16, 37, LONG + 5])
@BACKWARD_FORMS
def test_windows(form, window, device, monkeypatch):
    force(monkeypatch, form)
    assert_matches_float64(grouped_inputs(1, 1, LONG, LONG, device, batch=1), True, window=window)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(45, 21), (21, 45), (1, 5)])
@pytest.mark.parametrize("form", ["fused", "separate"])
def test_windows_of_grouped_queries_with_other_lengths_than_keys(form, num_queries, num_keys, device, monkeypatch):
    """Queries far behind the last key see none: zeros, logsumexp -inf, no share in any gradient."""
    force(monkeypatch, form)
    assert_matches_float64(grouped_inputs(2, 1, num_queries, num_keys, device), True, window=9)


@pytest.mark.parametrize(
    ("num_queries", "options"),
    [(LONG, {"window": 3}), (LONG, {"window": 40}), (20, {"causal_alignment": "end"})],
    ids=str,
)
def test_programs_that_share_keys(num_queries, options, device, monkeypatch):
    monkeypatch.setattr(plans, "forward_settings", lambda problem: ForwardSettings(TILE, num_splits=3))
    assert_options_match_float64("triton", grouped_inputs(2, 1, num_queries, LONG, device, batch=1), **options)


@pytest.mark.skipif(ON_GPU, reason="the GPU runs descriptors in every other test")
def test_descriptors_address_the_heads_of_keys(device, monkeypatch):
    tile = TileSettings(32, 16, num_warps=4, num_stages=1, use_tma=True)
    monkeypatch.setattr(plans, "forward_settings", lambda problem: ForwardSettings(tile))
    monkeypatch.setattr(plans, "backward_settings", lambda problem, deterministic: separate(tile, tile))
    inputs = grouped_inputs(4, 2, 40, 33, device)
    in_rows = tuple(one.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for one in inputs)
    assert_matches_float64(in_rows, True, window=7)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("implementation", ["auto", *ANYWHERE])
def test_implementations_return_the_logsumexp(implementation, window, device):
    inputs = grouped_inputs(4, 2, 33, 40, device, batch=1)
    out, logsumexp = attend(implementation, inputs, True, window)
    assert out.requires_grad
    assert not logsumexp.requires_grad
    grad_out = torch.randn_like(out)
    actual = out, logsumexp, *torch.autograd.grad(out, inputs, grad_out)
    assert_close_to_float64(actual, inputs, True, window, grad_out)


def assert_options_match_float64(implementation, inputs, is_causal=True, **options):
    out, logsumexp = flash_attention(
        *inputs, is_causal, return_logsumexp=True, implementation=implementation, **options
    )
    grad_out = torch.randn_like(out)
    actual = out, logsumexp, *torch.autograd.grad(out, inputs, grad_out)
    assert_close_to_float64(actual, inputs, is_causal, options.pop("window", None), grad_out, **options)


# More keys than queries, as in a chunk of a prefill, and fewer, of which the first queries see none.
@pytest.mark.parametrize("lengths", [(21, 70), (70, 21), (1, 40), (40, 41)], ids=str)
@pytest.mark.parametrize("window", [None, 9])
@BACKWARD_FORMS
def test_causal_mask_aligned_at_the_end(form, window, lengths, device, monkeypatch):
    force(monkeypatch, form)
    inputs = grouped_inputs(2, 1, *lengths, device, batch=1)
    assert_options_match_float64("triton", inputs, window=window, causal_alignment="end", scale=0.7)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("implementation", ["auto", *ANYWHERE])
def test_alignment_at_the_end_equals_that_of_torch(implementation, window, device):
    query, key, value = grouped_inputs(2, 2, 21, 50, device, batch=1)
    out = flash_attention(
        query, key, value, True, window=window, causal_alignment="end", scale=0.3, implementation=implementation
    )
    mask = torch.ones(21, 50, dtype=torch.bool, device=device).tril(29)
    if window is not None:
        mask = mask.triu(30 - window)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.3, 0.0, -0.4])
@pytest.mark.parametrize("implementation", ANYWHERE)
def test_any_finite_scale(implementation, scale, device):
    assert_options_match_float64(implementation, grouped_inputs(2, 1, 33, 20, device, batch=1), scale=scale)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("implementation", ["auto", *ANYWHERE])
def test_without_keys_the_output_is_zero_as_in_torch(implementation, is_causal, device):
    query, key, value = grouped_inputs(2, 1, 5, 0, device, batch=1)
    out, logsumexp = attend(implementation, (query, key, value), is_causal, None)
    assert out.shape == query.shape
    assert not out.any()
    assert (logsumexp == -math.inf).all()
    out.sum().backward()
    assert not query.grad.any()
    assert key.grad.shape == key.shape
    detached = [one.detach() for one in (query, key, value)]
    grads = flash_attention_backward(*detached, detached[0], logsumexp, logsumexp, implementation=implementation)
    assert not grads[0].any()


@pytest.mark.parametrize("implementation", ["triton", "tiled"])
def test_forward_mode_derivatives_are_refused(implementation, device):
    """A graph captured in C++ lost the tangent of tensors that need no gradient."""
    query, key, value = (one.detach() for one in grouped_inputs(2, 1, 5, 5, device))
    with forward_ad.dual_level():
        flash_attention(query, key, value, implementation=implementation)
        dual = forward_ad.make_dual(key, torch.ones_like(key))
        with pytest.raises(
            RuntimeError, match="flash_attention has no derivative in forward mode: take implementation"
        ):
            flash_attention(query, dual, value, implementation=implementation)
    with pytest.raises(RuntimeError, match=r"flash_attention cannot be transformed by torch\.func"):
        torch.func.vmap(lambda one: flash_attention(one, key, value, implementation=implementation))(query)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        *itertools.product(ANYWHERE, [torch.float32, torch.float16]),
        pytest.param("hopper", torch.float16, marks=HOPPER_MARKS),
    ],
    ids=str,
)
def test_gradients_of_blocks_of_keys_add_up(implementation, dtype, device):
    """Two blocks of keys, the second of which the queries see causally: as a rank of a context parallel group does."""
    query, key, value = grouped_inputs(6, 2, 40, 64, device, dtype, batch=1)
    query, grad_out = query.detach(), torch.randn_like(query)
    blocks = list(zip(*(one.detach().split((24, 40), -2) for one in (key, value)), strict=True))
    parts = [
        flash_attention(query, *block, is_causal, return_logsumexp=True, implementation=implementation)
        for block, is_causal in zip(blocks, (False, True), strict=True)
    ]
    logsumexp = torch.logsumexp(torch.stack([one for _, one in parts]), 0)
    out = sum(torch.exp(one - logsumexp)[..., None] * part.float() for part, one in parts)
    delta = (grad_out.float() * out).sum(-1)
    grads = [
        flash_attention_backward(query, *block, grad_out, logsumexp, delta, is_causal, implementation=implementation)
        for block, is_causal in zip(blocks, (False, True), strict=True)
    ]
    leaves = [one.detach().double().requires_grad_() for one in (query, key, value)]
    mask = torch.ones(40, 64, dtype=torch.bool, device=device).tril(24)
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    expected_grads = torch.autograd.grad(expected, leaves, grad_out.double())
    actual = (
        out,
        grads[0][0].float() + grads[1][0].float(),
        *(torch.cat(two, -2) for two in list(zip(*grads, strict=True))[1:]),
    )
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for name, one, other in zip(("out", "dq", "dk", "dv"), actual, (expected, *expected_grads), strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("form", ["fused with splits", "separate", "unprepared"])
def test_gradients_from_an_external_logsumexp_and_delta(form, device, monkeypatch):
    """As autograd's own backward, which hands on just these two."""
    force(monkeypatch, form)
    inputs = grouped_inputs(2, 1, 40, 40, device, batch=1)
    out, logsumexp = attend("triton", inputs, True, 20)
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, grad_out)
    delta = (grad_out * out.detach()).sum(-1)
    detached = [one.detach() for one in inputs]
    actual = flash_attention_backward(*detached, grad_out, logsumexp, delta, True, window=20, implementation="triton")
    for name, one, other in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_external_gradients_in_any_layout_and_under_compile(device):
    inputs = [one.detach() for one in grouped_inputs(2, 1, 5, 5, device)]
    out, logsumexp = attend("triton", inputs, True, None)
    grad_out = torch.randn_like(out)
    delta = (grad_out * out).sum(-1)

    def backward(query, key, value, grad_out, logsumexp, delta):
        return flash_attention_backward(query, key, value, grad_out, logsumexp, delta, True, implementation="triton")

    expected = backward(*inputs, grad_out, logsumexp, delta)
    swapped = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in (*inputs, grad_out)]
    apart = [one.mT.contiguous().mT for one in (logsumexp, delta)]
    torch._dynamo.reset()
    for function, arguments in (
        (backward, (*swapped, *apart)),
        (torch.compile(backward, fullgraph=True, backend="eager"), (*inputs, grad_out, logsumexp, delta)),
    ):
        for one, other in zip(function(*arguments), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_compile_keeps_one_graph(device):
    inputs = grouped_inputs(2, 1, 5, 9, device)
    options = {"window": 3, "scale": 0.5, "causal_alignment": "end", "return_logsumexp": True}

    def block(query, key, value):
        out, logsumexp = flash_attention(query * 2.0, key, value, True, implementation="triton", **options)
        return out.sin(), logsumexp

    expected, expected_logsumexp = block(*inputs)
    torch._dynamo.reset()
    out, logsumexp = torch.compile(block, fullgraph=True, backend="eager")(*inputs)
    assert not logsumexp.requires_grad
    torch.testing.assert_close((out, logsumexp), (expected, expected_logsumexp))
    for one, other in zip(*(torch.autograd.grad(result.sum(), inputs) for result in (out, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_operators_keep_the_rules_of_pytorch(device):
    inputs = grouped_inputs(2, 1, 5, 5, device)
    arguments = (*inputs, True, "tf32x3", True, "triton", 2)
    torch.library.opcheck(
        torch.ops.cs336sys.flash_attention_forward, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("function", [FlashAttentionTorch, FlashAttentionTriton], ids=["tiled", "triton"])
def test_one_logsumexp_is_saved_and_has_no_gradient(function, device):
    inputs = grouped_inputs(2, 1, 20, 20, device)
    options = (None, True) if function is FlashAttentionTorch else ("tf32x3", False, "triton", None, None, False, True)
    out, logsumexp = function.apply(*inputs, True, *options)
    assert sum(tensor.shape == (2, 2, 20) for tensor in out.grad_fn.saved_tensors) == 1
    with pytest.raises(RuntimeError, match="does not require grad"):
        logsumexp.sum().backward()


def test_logsumexp_of_float64_and_of_half_precision(device):
    inputs = [one.detach() for one in grouped_inputs(2, 1, 40, 40, device)]
    assert attend("tiled", [one.double() for one in inputs], True, None)[1].dtype == torch.float64
    expected = reference_attention(*(one.bfloat16().double() for one in inputs), True)[1]
    for implementation in ("tiled", "reference"):
        out, logsumexp = attend(implementation, [one.bfloat16() for one in inputs], True, None)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(logsumexp.double(), expected, rtol=1e-5, atol=1e-5)


def test_tiles_outside_of_the_window_are_skipped(device, monkeypatch):
    """NaN in keys that no query sees within its window would reach the sums of a tile that was only masked."""
    query, key, value = (one.detach() for one in grouped_inputs(1, 1, 128, 128, device, batch=1))
    key[..., :32, :] = value[..., :32, :] = math.nan
    for implementation in ("triton", "tiled"):
        leaves = [one.clone().requires_grad_() for one in (query, key, value)]
        out = flash_attention(*leaves, True, window=32, implementation=implementation, deterministic=True)
        assert out[..., 96:, :].isfinite().all()
        grads = torch.autograd.grad(out[..., 96:, :].sum(), leaves)
        assert grads[0][..., 96:, :].isfinite().all()
        assert grads[1][..., 96:, :].isfinite().all()


def count_flops(num_queries, num_keys, *options):
    """FLOPs under a causal mask for each pair of a query and a key, of two sequences of four heads of dimension 16."""
    shapes = (4, num_queries), (2, num_keys), (2, num_keys)
    inputs = [torch.empty(2, *shape, 16, device="meta") for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        torch.ops.cs336sys.flash_attention_forward(*inputs, True, "tf32x3", False, "triton", *options)
    return counter.get_total_flops() / (4 * 16 * 2 * 4)


def test_flops_of_masks():
    """Half of the visible pairs of a square, of which the half of the diagonal is not counted."""
    assert [count_flops(40, 40, window) for window in (None, 7, 1000)] == [40**2 / 2, (40**2 - 33**2) / 2, 40**2 / 2]
    aligned_at_end = None, None, True
    assert count_flops(10, 40, *aligned_at_end) == (40**2 - 30**2) / 2
    assert count_flops(40, 10, *aligned_at_end) == 10**2 / 2
