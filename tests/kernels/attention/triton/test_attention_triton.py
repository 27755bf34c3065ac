"""The Triton kernels against the float64 reference: on a GPU the compiled ones, elsewhere in Triton's interpreter.

The interpreter's tiles are 32 rows by 16, so that lengths around 64 take several in both directions; those of GPUs are
larger.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from attention_checks import (
    FORMS,
    ON_GPU,
    TOLERANCES,
    assert_exact,
    assert_matches_float64,
    problem_on_h200,
    random_inputs,
)

from cs336sys.kernels.attention import operators as triton_attention
from cs336sys.kernels.attention.operators import FlashAttentionTriton
from cs336sys.kernels.attention.problem import AttentionProblem
from cs336sys.kernels.attention.reference import reference_attention
from cs336sys.kernels.attention.triton import plans
from cs336sys.kernels.attention.triton.settings import (
    ForwardSettings,
    TileSettings,
    backward_settings,
    forward_settings,
)

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty", "fresh_plans"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, in the interpreter
]

DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TOLERANCES]
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
# Several tiles in both directions, the last of them one row.
LONG = 129 if ON_GPU else 65
# The interpreter takes as long for two sequences as for two tests; test_leading_dimensions has more everywhere.
SEQUENCES = 2 if ON_GPU else 1


BACKWARD_FORMS = pytest.mark.parametrize("backward_form", FORMS, indirect=True)


@pytest.fixture
def backward_form(request, monkeypatch):
    """Forces one form of the backward on shapes for which the launch settings may choose another."""

    def settings(problem, deterministic):
        tile = backward_settings(problem, deterministic).passes[0].tile
        if problem.head_dim > 128 and "fused" in request.param:
            # The sum of dQ needs shared memory too.
            tile = replace(tile, query_rows=min(32, tile.query_rows))
        return FORMS[request.param](tile)

    monkeypatch.setattr(plans, "backward_settings", settings)
    return request.param


@CAUSAL
@BACKWARD_FORMS
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1, 1), (1, LONG), (LONG, 1), (17, LONG - 2), (LONG - 2, 17), (LONG, LONG), (64, 128)]
)
def test_lengths(num_queries, num_keys, is_causal, backward_form, device):
    assert_matches_float64(random_inputs((SEQUENCES,), num_queries, num_keys, 16, torch.float32, device), is_causal)


@pytest.fixture
def three_splits(monkeypatch):
    """Three programs share the keys of every tile of queries."""
    monkeypatch.setattr(plans, "forward_settings", lambda problem: replace(forward_settings(problem), num_splits=3))


@CAUSAL
@pytest.mark.usefixtures("three_splits")
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, LONG), (LONG - 2, 17), (LONG, LONG), (64, 128)])
def test_programs_that_share_keys(num_queries, num_keys, is_causal, device):
    """With few keys some of the splits see none."""
    assert_matches_float64(random_inputs((2, SEQUENCES), num_queries, num_keys, 24, torch.float32, device), is_causal)


@pytest.mark.usefixtures("three_splits")
def test_programs_that_share_keys_write_any_strides(device):
    inputs = tuple(_transposed_heads(2, 3, length, 32, device).requires_grad_() for length in (40, 150, 150))
    assert_matches_float64(inputs, False, _transposed_heads(2, 3, 40, 32, device))


@BACKWARD_FORMS
@pytest.mark.parametrize("head_dim", [1, 16, 24, 32, 64, 80, 128, 256])
def test_head_dims(head_dim, backward_form, device):
    dtype = torch.float16 if ON_GPU else torch.float32
    assert_matches_float64(random_inputs((SEQUENCES,), 50, 40, head_dim, dtype, device), True)


@CAUSAL
@BACKWARD_FORMS
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, is_causal, backward_form, device):
    assert_matches_float64(random_inputs((1, SEQUENCES), 70, 50, 64, dtype, device), is_causal)


# What reaches the kernels has one leading dimension or two, whatever they compute.
LEADING = [((), "fused"), ((3,), "joint"), ((2, 1, 3), "separate"), ((2, 1, 2, 2), "joint")]


@pytest.mark.parametrize(
    ("leading", "backward_form"), [*(((2, 3), form) for form in FORMS), *LEADING], indirect=["backward_form"]
)
def test_leading_dimensions(leading, backward_form, device):
    assert_matches_float64(random_inputs(leading, 33, 20, 16, torch.float32, device), True)


def _transposed_heads(batch, heads, length, head_dim, device):
    return torch.randn(batch, length, heads, head_dim, device=device).transpose(1, 2)


@BACKWARD_FORMS
def test_heads_behind_rows_are_used_in_place_and_kept(backward_form, device):
    inputs = tuple(_transposed_heads(2, 3, length, 32, device).requires_grad_() for length in (40, 50, 50))
    assert all(triton_attention._kernel_view(tensor, "triton") is tensor for tensor in inputs)
    assert_matches_float64(inputs, True, _transposed_heads(2, 3, 40, 32, device))
    out = FlashAttentionTriton.apply(*inputs, True)
    assert out.stride() == inputs[0].stride()
    for tensor, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert gradient.stride() == tensor.stride()


@pytest.mark.parametrize("position", range(3), ids=["query", "key", "value"])
def test_aligned_and_unaligned_tensors_do_not_share_a_plan(position, device):
    """An unaligned tensor is copied, so it reaches the kernel with other strides than an aligned one of its layout."""
    packed = torch.randn(2, 40, 3 * 24 + 1, device=device)
    aligned, unaligned = packed[..., :-1].split(24, -1), packed[..., 1:].split(24, -1)
    mixed = (*aligned[:position], unaligned[position], *aligned[position + 1 :])
    for inputs in (mixed, aligned, mixed):
        assert_matches_float64(tuple(tensor.detach().requires_grad_() for tensor in inputs), True)


@BACKWARD_FORMS
@pytest.mark.parametrize("sequences_in_l2", [1, 2, 1000])
def test_groups_of_sequences(sequences_in_l2, backward_form, device, monkeypatch):
    """Five sequences in groups of 1, 2 + 2 + 1, 5: each tile of each must be computed, and by one program only."""
    length = 70 if ON_GPU else 40
    bytes_per_sequence = 2 * length * 16 * 4
    monkeypatch.setattr(plans, "FORWARD_L2_BYTES", sequences_in_l2 * bytes_per_sequence)
    monkeypatch.setattr(plans, "BACKWARD_L2_BYTES", sequences_in_l2 * 2 * bytes_per_sequence)
    assert_matches_float64(random_inputs((5,), length, length, 16, torch.float32, device), True)


EXACT = [(100, 100, 32), (40, 130, 32), (130, 40, 32)]
EXACT += [(2000, 1500, 64), (2000, 1500, 128)] if ON_GPU else []


@CAUSAL
@BACKWARD_FORMS
@pytest.mark.parametrize(("num_queries", "num_keys", "head_dim"), EXACT)
def test_exact_integer_data(num_queries, num_keys, head_dim, is_causal, backward_form, device):
    """P in registers is what ptxas 12.9 can overwrite before the tensor core has read it (triton-lang/triton#11781)."""
    for seed, dtype in (
        itertools.product(range(20), (torch.float16, torch.bfloat16)) if ON_GPU else [(0, torch.float16)]
    ):
        assert_exact(num_queries, num_keys, head_dim, is_causal, dtype, device, seed)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_query_reaches_its_own_row_only(bad, device):
    query, key, value = (tensor.detach() for tensor in random_inputs((1,), 40, 40, 16, torch.float32, device))
    query[0, 7, 3] = bad
    key[0, :, 3] = 1.0
    out = FlashAttentionTriton.apply(query, key, value, False)
    expected, _ = reference_attention(query, key, value)
    assert out[0, 7].isnan().all()
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 0, 16), (0, 3, 16), (0, 2, 5, 16)])
def test_nothing_to_compute(shape, device):
    query = torch.randn(shape, device=device, requires_grad=True)
    key = torch.randn(*shape[:-2], 3, 16, device=device, requires_grad=True)
    out = FlashAttentionTriton.apply(query, key, key)
    assert out.shape == shape
    grad_query, grad_key = torch.autograd.grad(out.sum(), (query, key))
    assert grad_query.shape == shape
    assert not grad_key.any()


def _last_backward_is_fused():
    remembered = triton_attention._plans.values()
    return [plan for plan in remembered if isinstance(plan, plans.BackwardPlan)][-1].fused


def test_deterministic_is_never_fused(device):
    inputs = random_inputs((1,), 20, 20, 16, torch.float32, device)
    FlashAttentionTriton.apply(*inputs).sum().backward()
    assert _last_backward_is_fused()
    FlashAttentionTriton.apply(*inputs, False, "tf32x3", True).sum().backward()
    assert not _last_backward_is_fused()
    triton_attention.forget_plans()
    torch.use_deterministic_algorithms(True)
    try:
        FlashAttentionTriton.apply(*inputs).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not _last_backward_is_fused()


@pytest.mark.skipif(ON_GPU, reason="the GPU runs descriptors in every other test")
@CAUSAL
@pytest.mark.parametrize(
    ("head_dim", "form", "key_heads"),
    [(16, FORMS["separate"], 3), (16, FORMS["separate"], 1), (80, FORMS["joint"], 3)],
    ids=["separate", "grouped", "joint"],
)
def test_descriptors_address_the_same_rows_as_pointers(head_dim, form, key_heads, is_causal, device, monkeypatch):
    """The interpreter has descriptors but for atomic_add; nothing else here would run them without a GPU."""
    tile = TileSettings(32, 16, num_warps=4, num_stages=1, use_tma=True)
    monkeypatch.setattr(plans, "forward_settings", lambda problem: ForwardSettings(tile))
    monkeypatch.setattr(plans, "backward_settings", lambda problem, deterministic: form(tile))
    shapes = (3, 40), (key_heads, 50), (key_heads, 50)
    inputs = tuple(_transposed_heads(2, *shape, head_dim, device).requires_grad_() for shape in shapes)
    window = 7 if is_causal and key_heads == 1 else None
    assert_matches_float64(inputs, is_causal, _transposed_heads(2, 3, 40, head_dim, device), window=window)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tiles_of_other_gpus(dtype, head_dim, settings_of_a100, device):
    inputs = random_inputs((SEQUENCES,), LONG, LONG + 5, head_dim, dtype, device)
    assert_matches_float64(inputs, True)


def gpu_problems():
    sizes = (16, 24, 64, 96, 128, 256), (1, 128, 1000, 16384)
    for capability, dtype, head_dim, length in itertools.product(((8, 0), (9, 0), (10, 0)), TOLERANCES, *sizes):
        for tma_allowed in {False, capability >= (9, 0)}:
            lengths = 16, length, length
            yield AttentionProblem(head_dim, dtype, "tf32x3", True, *lengths, capability, 132, tma_allowed)


def test_settings_keep_their_promises():
    for problem in gpu_problems():
        tiles = [forward_settings(problem).tile]
        for deterministic in (False, True):
            settings = backward_settings(problem, deterministic)
            assert not (settings.fused and deterministic)
            assert settings.num_splits == 1 or settings.fused
            assert sum(one.computes_dkv for one in settings.passes) == 1
            assert sum(one.computes_dq for one in settings.passes) == (0 if settings.fused else 1)
            tiles += [one.tile for one in settings.passes]
        for tile in tiles:
            assert problem.tma_allowed or not tile.use_tma
            assert all(rows >= 16 and rows & (rows - 1) == 0 for rows in (tile.query_rows, tile.key_rows))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_few_programs_share_keys_and_one_launch_behind_that_which_prepares_them(head_dim):
    def num_splits(num_sequences, length):
        return forward_settings(problem_on_h200(num_sequences, length, head_dim)).num_splits

    assert num_splits(1, 512) == 1  # a second launch would take longer than it saves
    assert num_splits(1, 1024) > num_splits(1, 8192) > 1
    assert num_splits(16, 1024) == num_splits(16, 2048) == num_splits(1, 65536) == 1
    for num_sequences, length in ((1, 1024), (16, 128), (16, 1024), (1, 2048)):
        settings = backward_settings(problem_on_h200(num_sequences, length, head_dim), True)
        assert len(settings.passes) == 1, (num_sequences, length)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_few_tiles_of_keys_are_shared_until_every_multiprocessor_has_work(head_dim):
    """A tile of keys for each program would leave some idle; more splits than tiles of queries would have none."""
    for num_sequences, length in ((1, 64), (1, 2048), (1, 8192), (4, 1024)):
        problem = problem_on_h200(num_sequences, length, head_dim, dtype=torch.float32)
        settings = backward_settings(problem, False)
        tile = settings.passes[0].tile
        query_tiles, key_tiles = -(-length // tile.query_rows), num_sequences * -(-length // tile.key_rows)
        assert 1 <= settings.num_splits <= query_tiles
        assert settings.num_splits * key_tiles >= min(problem.num_multiprocessors, query_tiles * key_tiles)


@pytest.mark.gpu
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gpu_many_programs(deterministic, head_dim, dtype, is_causal):
    """Enough tiles that the settings for large shapes, with descriptors, are the ones that run."""
    inputs = tuple(
        tensor.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_()
        for tensor in random_inputs((2, 16), 1111, 1000, head_dim, dtype, "cuda")
    )
    assert_matches_float64(inputs, is_causal, deterministic=deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("float32_precision", ["ieee", "tf32"])
def test_gpu_float32_precisions(float32_precision, monkeypatch):
    monkeypatch.setitem(TOLERANCES, torch.float32, {"ieee": 5e-6, "tf32": 5e-3}[float32_precision])
    inputs = random_inputs((2,), 257, 257, 64, torch.float32, "cuda")
    assert_matches_float64(inputs, True, float32_precision=float32_precision)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_gpu_long_sequence(dtype):
    inputs = random_inputs((1, 1), 65536, 65536, 64, dtype, "cuda")
    out = FlashAttentionTriton.apply(*inputs, True)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    grad_out = torch.randn_like(out)
    actual = out, *torch.autograd.grad(out, inputs, grad_out)
    expected = expected, *torch.autograd.grad(expected, inputs, grad_out)
    for name, one, other in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        error = ((one.float() - other.float()).norm() / other.float().norm()).item()
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-4), f"{name}: {error:.1e}"


@pytest.mark.gpu
def test_gpu_more_sequences_than_a_grid_has_in_its_second_dimension():
    assert_matches_float64(random_inputs((35000, 2), 17, 17, 16, torch.float16, "cuda"), True)


@pytest.mark.gpu
@pytest.mark.parametrize("strides", [(2**31, 64, 1), (64, 2**26, 1)], ids=["sequences", "rows"])
def test_gpu_offsets_beyond_32_bits(strides):
    """The last element lies 2^31 elements and more behind the first."""
    torch.manual_seed(0)
    storage = torch.zeros(2**32, dtype=torch.bfloat16, device="cuda")
    # Query, key and value lie side by side in it, 2 x 64 x 64 elements each.
    inputs = [storage.as_strided((2, 64, 64), strides, offset).normal_() for offset in (0, 8192, 16384)]
    assert_matches_float64(tuple(tensor.detach().requires_grad_() for tensor in inputs), True)


@pytest.mark.gpu
def test_gpu_memory_grows_linearly():
    def peak_bytes(length):
        inputs = random_inputs((1, 2), length, length, 64, torch.bfloat16, "cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        FlashAttentionTriton.apply(*inputs, True).sum().backward()
        return torch.cuda.max_memory_allocated()

    peak_bytes(8192)
    assert peak_bytes(32768) < 4.2 * peak_bytes(8192)
