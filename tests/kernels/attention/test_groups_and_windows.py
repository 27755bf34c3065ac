"""What all implementations of attention do: grouped queries, windows, strides, NaN and infinity, the logsumexp as a
result, and gradients by blocks of keys.

The interpreter's tiles are 32 queries by 16 keys, so that windows of 1 to 70 are smaller and larger than either.
"""

import itertools
import math

import pytest
import torch
from attention_checks import (
    FORMS,
    HOPPER_MARKS,
    ON_GPU,
    STRIDES,
    TOLERANCES,
    assert_close_to_float64,
    assert_matches_float64,
)
from torch.autograd import forward_ad

from cs336sys.kernels.attention import FlashAttentionTorch, choice, flash_attention, flash_attention_backward, reference
from cs336sys.kernels.attention.hopper.settings import HEAD_DIMS
from cs336sys.kernels.attention.operators import FlashAttentionTriton
from cs336sys.kernels.attention.reference import reference_attention
from cs336sys.kernels.attention.triton import plans
from cs336sys.kernels.attention.triton.settings import ForwardSettings, TileSettings

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


@BACKWARD_FORMS
def test_few_queries_that_share_keys_are_rows_of_a_tile(form, device, monkeypatch):
    """Of full attention, and of a single query at the end; not where heads are further apart than their queries."""
    force(monkeypatch, form)
    num_rows, make_problem = [], choice.make_problem

    def note_rows(query, *others):
        num_rows.append(query.shape[-2])
        return make_problem(query, *others)

    monkeypatch.setattr(choice, "make_problem", note_rows)
    query, *keys = (tensor.detach() for tensor in grouped_inputs(4, 2, 5, 33, device))
    padded = torch.zeros(2, 4, 7, 16, device=device)[:, :, :5].copy_(query)
    single = query[:, :, :1]
    for queries in (query, padded, single, single.transpose(1, 2).contiguous().transpose(1, 2)):
        inputs = [tensor.requires_grad_() for tensor in (queries.detach(), *keys)]
        alignment = {"causal_alignment": "end"} if queries.shape[-2] == 1 else {}
        assert_options_match_float64("triton", inputs, is_causal=bool(alignment), **alignment)
    assert num_rows == [10, 10, 5, 5, 2, 2, 2, 2]


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


ON_HOPPER = [pytest.param(f"hopper {head_dim}", marks=HOPPER_MARKS) for head_dim in HEAD_DIMS]


@pytest.fixture(params=["triton", "three splits", "tiled", *ON_HOPPER])
def special(request, device, monkeypatch):
    """An implementation's name, and query, key and value whose numbers a test changes."""
    implementation, _, head_dim = request.param.partition(" ")
    if implementation == "three":
        force(monkeypatch, "joint")
        monkeypatch.setattr(plans, "forward_settings", lambda problem: ForwardSettings(TILE, num_splits=3))
        return "triton", grouped_inputs(1, 1, 70, 70, device, batch=1)
    if implementation == "hopper":
        return "hopper", grouped_inputs(1, 1, 200, 200, device, torch.float16, batch=1, head_dim=int(head_dim))
    return implementation, grouped_inputs(1, 1, 70, 70, device, batch=1)


@pytest.mark.parametrize("layout", STRIDES.values(), ids=STRIDES)
def test_strides(layout, special):
    implementation, (query, _, _) = special
    lengths = (200, 200) if implementation == "hopper" else (40, 50)
    inputs = grouped_inputs(3, 3, *lengths, query.device, query.dtype, head_dim=query.shape[-1])
    laid_out = [layout(tensor.detach()).requires_grad_() for tensor in inputs]
    grad_out = torch.randn_like(inputs[0])
    assert_options_match_float64(implementation, laid_out, grad_out)
    assert_options_match_float64(implementation, inputs, layout(grad_out))


def test_nan_in_a_key_reaches_all_queries_that_see_it(special):
    implementation, (query, key, value) = special
    position = key.shape[-2] * 2 // 3
    key.data[..., position, 3] = math.nan
    out = flash_attention(query, key, value, True, implementation=implementation)
    assert out[..., position:, :].isnan().all()
    assert not out[..., :position, :].isnan().any()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_row_without_a_finite_score_gives_zeros(is_causal, special):
    implementation, (query, key, value) = special
    query.data[..., 7, 3] = math.inf
    key.data[..., 3] = -1.0
    out, logsumexp = attend(implementation, (query, key, value), is_causal, None)
    expected, _ = reference_attention(query.float(), key.float(), value.float(), is_causal)
    assert not out[..., 7, :].any()
    assert (logsumexp[..., 7] == -math.inf).all()
    tolerance = TOLERANCES[query.dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=max(tolerance, 1e-4))
    if implementation != "hopper":  # Where infinity meets the zeros behind the last key.
        grad_query, grad_value = torch.autograd.grad(out.sum(), (query, value))
        assert not grad_query[..., 7, :].any()
        assert not grad_value.isnan().any()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("first", "last"), [(300.0, 0.1), (0.1, 300.0)])
def test_scores_that_grow_from_tile_to_tile(first, last, is_causal, special):
    """Weights relative to the maximum of the tile that is read first would be infinite."""
    implementation, (query, key, value) = special
    key.data *= torch.logspace(math.log10(first), math.log10(last), key.shape[-2], device=key.device)[:, None]
    out, logsumexp = attend(implementation, (query, key, value), is_causal, None)
    doubles = (tensor.double() for tensor in (query, key, value))
    expected, expected_logsumexp = reference_attention(*doubles, is_causal)
    # Scores near 1000 are stored to within 6e-5, which the exponential turns into a relative error.
    tolerance = max(1e-3, TOLERANCES[query.dtype] * max(1.0, expected.abs().max().item()))
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=tolerance)
    torch.testing.assert_close(logsumexp.double(), expected_logsumexp, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_scores_so_low_that_their_sum_overflows_backward(deterministic, special):
    """Keys behind the last have score 0, which is 2^300 times the weight of a row at -200: no inf may reach dQ."""
    implementation, inputs = special
    query, key, value = (tensor.detach()[..., :17, :].requires_grad_() for tensor in inputs)
    query.data.fill_(10.0)
    key.data.fill_(-5.0)
    out = flash_attention(query, key, value, deterministic=deterministic, implementation=implementation)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (query, key, value)))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("implementation", ["auto", *ANYWHERE])
def test_implementations_return_the_logsumexp(implementation, window, device):
    assert_options_match_float64(implementation, grouped_inputs(4, 2, 33, 40, device, batch=1), window=window)


def assert_options_match_float64(implementation, inputs, grad_out=None, is_causal=True, window=None, **options):
    out, logsumexp = attend(implementation, inputs, is_causal, window, **options)
    assert out.requires_grad
    assert not logsumexp.requires_grad
    grad_out = torch.randn_like(out) if grad_out is None else grad_out
    actual = out, logsumexp, *torch.autograd.grad(out, inputs, grad_out)
    assert_close_to_float64(actual, inputs, is_causal, window, grad_out, **options)


# More keys than queries, as in a chunk of a prefill, and fewer, of which the first queries see none.
@pytest.mark.parametrize("lengths", [(21, 70), (70, 21), (1, 40), (40, 41)], ids=str)
@pytest.mark.parametrize("window", [None, 9])
@BACKWARD_FORMS
def test_causal_mask_aligned_at_the_end(form, window, lengths, device, monkeypatch):
    force(monkeypatch, form)
    inputs = grouped_inputs(2, 1, *lengths, device, batch=1)
    assert_options_match_float64("triton", inputs, window=window, causal_alignment="end", scale=0.7)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("head_dim", [pytest.param(head_dim, marks=HOPPER_MARKS) for head_dim in HEAD_DIMS])
def test_a_chunk_of_a_prefill_on_hopper(head_dim, window, device):
    for lengths in ((200, 333), (64, 1000), (1, 700), (300, 301), (130, 4000)):
        inputs = grouped_inputs(4, 2, *lengths, device, torch.float16, batch=1, head_dim=head_dim)
        assert_options_match_float64("hopper", inputs, window=window, causal_alignment="end")


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
    query, key, value = (one.detach() for one in grouped_inputs(6, 2, 40, 64, device, dtype, batch=1))
    blocks = [(key[..., :24, :], value[..., :24, :], False), (key[..., 24:, :], value[..., 24:, :], True)]
    options = {"implementation": implementation}
    parts = [flash_attention(query, *block, return_logsumexp=True, **options) for block in blocks]
    logsumexp = torch.logsumexp(torch.stack([one for _, one in parts]), 0)
    out = sum(torch.exp(one - logsumexp)[..., None] * part.float() for part, one in parts)
    grad_out = torch.randn_like(query)
    statistics = grad_out, logsumexp, (grad_out.float() * out).sum(-1)
    grads = [flash_attention_backward(query, *pair, *statistics, causal, **options) for *pair, causal in blocks]
    (dq, other_dq), *grads_of_keys = zip(*grads, strict=True)
    actual = out, dq.float() + other_dq.float(), *(torch.cat(two, -2) for two in grads_of_keys)
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected, _ = reference_attention(*leaves, True, causal_alignment="end")
    expected = [expected, *torch.autograd.grad(expected, leaves, grad_out.double())]
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close([tensor.double() for tensor in actual], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", ["fused with splits", "separate", "joint"])
def test_gradients_from_an_external_logsumexp_and_delta(form, device, monkeypatch):
    """As autograd's own backward, which hands on just these two; in other layouts and under compile, too."""
    force(monkeypatch, form)
    inputs = grouped_inputs(2, 1, 40, 40, device, batch=1)
    out, logsumexp = attend("triton", inputs, True, 20)
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, grad_out)
    tensors = [*(leaf.detach() for leaf in inputs), grad_out, logsumexp, (grad_out * out.detach()).sum(-1)]
    swapped = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]

    def backward(*tensors):
        return flash_attention_backward(*tensors, True, window=20, implementation="triton")

    torch._dynamo.reset()
    compiled = torch.compile(backward, fullgraph=True, backend="eager")
    for function, arguments in ((backward, tensors), (backward, swapped), (compiled, tensors)):
        torch.testing.assert_close(function(*arguments), expected, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_outside_of_the_window_are_skipped(deterministic, special):
    """NaN in keys and queries outside would reach the sums of a tile that was only masked."""
    implementation, (query, _, _) = special
    unit = 256 if implementation == "hopper" else 64 if ON_GPU else 32  # At least a tile of keys.
    inputs = grouped_inputs(1, 1, 4 * unit, 4 * unit, query.device, query.dtype, batch=1, head_dim=query.shape[-1])
    for leaf in inputs:
        leaf.data[..., :unit, :] = math.nan
    options = {"window": unit * 3 // 4, "deterministic": deterministic, "implementation": implementation}
    out = flash_attention(*inputs, True, **options)
    assert out[..., 2 * unit :, :].isfinite().all()
    grads = torch.autograd.grad(out[..., 2 * unit :, :].sum(), inputs)
    assert all(grad[..., 3 * unit :, :].isfinite().all() for grad in grads)
