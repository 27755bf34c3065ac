import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from cs336sys.commands.attention import measure as measurement
from cs336sys.commands.attention.measure import (
    FA4_MODULE,
    TOLERANCES,
    attention_errors,
    flash_attention_4,
    implementation,
    measure_attn,
    measure_flash,
    random_inputs,
    reference_results,
)
from cs336sys.errors import CapabilityError
from cs336sys.kernels.attention import flash_attention
from cs336sys.kernels.attention.reference import reference_attention
from cs336sys.settings.operations import FLASH_ATTENTION_4, AttentionWorkload

CPU = torch.device("cpu")


def workload(name="eager", context=48, head_dim=8, dtype="fp32", causal=True, heads=3, **more):
    return AttentionWorkload(name, 2, heads, context, head_dim, dtype, causal, device="cpu", **more)


@pytest.mark.parametrize(
    "more",
    [
        {"causal": False, "queries": 21},
        {"queries": 21},
        {"queries": 1, "window": 9},
        {"queries": 30, "window": 25},
        {"heads": 4, "kv_heads": 2, "window": 7},
        {"kv_heads": 1},
        {"window": 30},
    ],
)
def test_reference_in_row_blocks_equals_the_whole_matrix(more, monkeypatch):
    monkeypatch.setattr("cs336sys.commands.attention.measure._REFERENCE_ROWS", 20)
    shape = workload(**more)
    inputs = random_inputs(shape, CPU)
    operands = [tensor.detach().double().requires_grad_() for tensor in inputs.differentiable]
    alignment = "end" if shape.causal and shape.queries else "start"
    out, _ = reference_attention(*operands, shape.causal, window=shape.window, causal_alignment=alignment)
    gradients = torch.autograd.grad(out, operands, inputs.grad_out.double())
    reference_results.cache_clear()
    results = reference_results(shape, CPU)
    for name, expected in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        torch.testing.assert_close(results[name], expected.detach(), rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "name",
    ["eager", "model", "tiled", "deterministic", pytest.param("compiled", marks=pytest.mark.nightly), "sdpa-flash"],
)
@pytest.mark.parametrize("more", [{}, {"causal": False, "queries": 1}])
def test_implementations_agree_with_the_reference(name, more):
    shape = workload(name, **more)
    assert largest_error(shape) < TOLERANCES["fp32"]


def test_deterministic_is_what_auto_would_be_and_says_so_to_the_kernels(monkeypatch):
    called = []
    monkeypatch.setattr(measurement, "flash_attention", lambda *_, **options: called.append(options))
    for name in ("deterministic", "auto"):
        with implementation(workload(name), CPU) as attention:
            attention()
    assert called == [{"is_causal": True, "deterministic": True}, {"is_causal": True, "implementation": "auto"}]


def test_compiled_is_the_plain_attention_compiled_for_its_shape(monkeypatch):
    """Whether its results are right is tested at night: that takes a minute of compiling."""
    compiled = []

    def note(function, **options):
        compiled.append((function, options))
        return lambda *_, **mask: ("of the compiled one", mask)

    monkeypatch.setattr(torch, "compile", note)
    with implementation(workload("compiled"), CPU) as attention:
        assert attention() == ("of the compiled one", {"is_causal": True})
    assert compiled == [(measurement.plain_attention, {"dynamic": False})]


def largest_error(shape):
    with implementation(shape, CPU) as attention:
        errors = attention_errors(attention, shape, CPU)
    assert set(errors) == {"out", "dq", "dk", "dv"}
    return max(error.whole for error in errors.values())


# Where a query sees one key, gradients of scores are zero: a ratio to the reference would be of rounding errors.
@pytest.mark.parametrize(
    "more", [{"heads": 4, "kv_heads": 2, "window": 9, "queries": 20}, {"context": 1}, {"window": 1}]
)
@pytest.mark.parametrize("name", ["eager", "tiled"])
def test_groups_windows_and_single_keys_agree_with_the_reference(name, more):
    assert largest_error(workload(name, **more)) < TOLERANCES["fp32"]


def test_groups_of_sdpa_agree_with_the_reference_and_windows_are_unsupported():
    for queries in (None, 20):
        assert largest_error(workload("sdpa-flash", heads=4, kv_heads=2, queries=queries)) < TOLERANCES["fp32"]
    with pytest.raises(CapabilityError, match="'sdpa-flash' has no sliding window: choose flex or fa4"):
        largest_error(workload("sdpa-flash", window=9))
    with pytest.raises(CapabilityError, match="'sdpa-cudnn' has no causal mask at the end: choose sdpa-flash"):
        largest_error(workload("sdpa-cudnn", queries=20))


def fake_flash_attn_4(monkeypatch, **expected):
    """A module with the package's function: (batch, context, heads, head_dim), and its logsumexp beside the output."""

    def flash_attn_func(query, key, value, **options):
        assert query.shape[1] == key.shape[1] == 48
        assert options == expected
        left = options.get("window_size", (None,))[0]
        window = None if left is None else left + 1
        tensors = (tensor.transpose(1, 2) for tensor in (query, key, value))
        is_causal = options["causal"] or window is not None
        return flash_attention(*tensors, is_causal, window=window, implementation="tiled").transpose(1, 2), None

    module = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, FA4_MODULE, module)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"causal": True}),
        ({"causal": False}, {"causal": False}),
        ({"heads": 4, "kv_heads": 2, "window": 9}, {"causal": False, "window_size": (8, 0)}),
    ],
    ids=["causal", "full", "groups and window"],
)
@pytest.mark.parametrize("name", FLASH_ATTENTION_4)
def test_flash_attention_4_is_given_its_layout(name, more, expected, monkeypatch):
    fake_flash_attn_4(monkeypatch, **expected, deterministic=name == "fa4-deterministic")
    shape = workload(name, dtype="fp16", **more)
    attention = flash_attention_4(shape, torch.device("cuda"))
    assert max(attention_errors(attention, shape, CPU).values()).whole < TOLERANCES["fp16"]


@pytest.mark.parametrize(
    ("dtype", "device", "loaded", "reason"),
    [
        ("fp16", "cpu", True, "needs a CUDA GPU"),
        ("fp32", "cuda", True, "takes bf16 and fp16, got fp32"),
        ("fp16", "cuda", False, "needs the package flash-attn-4, which is not there: no module named 'flash_attn"),
    ],
)
def test_flash_attention_4_is_refused_with_the_reason(dtype, device, loaded, reason, monkeypatch):
    if loaded:
        fake_flash_attn_4(monkeypatch)
    elif importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("the package is installed here")
    with pytest.raises(CapabilityError, match=reason):
        flash_attention_4(workload("fa4", dtype=dtype), torch.device(device))


@pytest.mark.parametrize("reason", [NotImplementedError("head dim 8 on sm_90"), AssertionError("head dim 8 on sm_90")])
def test_flash_attention_4_says_itself_what_it_cannot_do(reason):
    def refuse(*tensors):
        raise reason

    with pytest.raises(CapabilityError, match="fa4 does not take this: head dim 8 on sm_90"):
        measurement._errors_if_supported(refuse, workload("fa4", dtype="fp16"), CPU)
    with pytest.raises(type(reason)):
        measurement._errors_if_supported(refuse, workload("eager"), CPU)


def test_attention_is_checked_on_the_strides_that_are_timed():
    seen = []

    def attention(query, key, value):
        seen.append([tensor.stride() for tensor in (query, key, value)])
        return reference_attention(query, key, value, is_causal=True)[0]

    reference_results.cache_clear()
    for name in ("fa4", "eager"):
        errors = attention_errors(attention, workload(name), CPU)
        assert max(error.whole for error in errors.values()) < TOLERANCES["fp32"]
        timed = [tensor.stride() for tensor in random_inputs(workload(name), CPU).differentiable]
        assert seen == [timed, timed]
        seen.clear()
    assert reference_results.cache_info().misses == 1
    assert random_inputs(workload("fa4"), CPU).query.transpose(1, 2).is_contiguous(), "tokens before heads"


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "more",
    [{}, {"causal": False, "queries": 5}, {"queries": 70}, {"heads": 4, "kv_heads": 2}, {"kv_heads": 1, "window": 9}],
)
def test_gpu_flash_attention_4_agrees_with_the_reference(head_dim, more):
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("the package flash-attn-4 is not installed")
    device = torch.device("cuda")
    shape = AttentionWorkload("fa4", 1, **{"heads": 2} | more, context=1000, head_dim=head_dim, dtype="bf16")
    try:
        with implementation(shape, device) as attention:
            errors = attention_errors(attention, shape, device)
    except CapabilityError as reason:
        pytest.skip(str(reason))
    assert max(error.whole for error in errors.values()) < TOLERANCES["bf16"]


@pytest.mark.parametrize("name", ["eager", pytest.param("compiled", marks=pytest.mark.nightly)])
def test_flash_cell_is_checked_and_timed(name):
    outcome = measure_flash(workload(name, queries=16).configuration() | {"repetition_ms": 5}, lambda stage: None)
    assert outcome.status == "ok"
    assert set(outcome.samples) == {"forward", "backward", "end_to_end"}
    pairs = 2 * 3 * (48 * 48 - 32 * 32) * 8  # The last 16 rows of a square.
    # 4 B H S^2 D forward, half of it if causal, 2.5 times that backward.
    expected = {"forward": 2 * pairs, "backward": 5 * pairs, "end_to_end": 7 * pairs}
    for part, flops in expected.items():
        seconds = outcome.samples[part].median / 1e3
        assert outcome.derived[f"{part}_tflops"] == pytest.approx(flops / seconds / 1e12)


@pytest.mark.parametrize(
    ("measure", "name", "attention"),
    [(measure_flash, "eager", "plain_attention"), (measure_attn, "model", "model_attention")],
)
def test_wrong_implementation_gets_no_time(measure, name, attention, monkeypatch):
    """A cell of attn was timed, whatever it computed; of ``model`` the user may have written the softmax."""
    monkeypatch.setattr(
        measurement, attention, lambda q, *rest, **mask: reference_attention(1.01 * q, *rest, **mask)[0]
    )
    outcome = measure(workload(name).configuration() | {"warmup": 1, "steps": 3}, lambda stage: None)
    assert (outcome.status, outcome.samples) == ("wrong", {})
    assert outcome.reason.startswith("relative error over 0.0001: out by ")
    assert outcome.derived["out_error"] > 1e-3


def test_a_row_that_nobody_wrote_gets_no_time(monkeypatch):
    def without_last_row(query, key, value, is_causal):
        out = reference_attention(query, key, value, is_causal)[0]
        return torch.cat((out[..., :-1, :], out[..., -1:, :] * 0), -2)

    monkeypatch.setattr(measurement, "plain_attention", without_last_row)
    outcome = measure_flash(workload(context=1024, dtype="bf16").configuration(), lambda stage: None)
    assert outcome.status == "wrong"
    assert outcome.reason.startswith("relative error of a row over 0.2: out by ")
    assert outcome.derived["out_error"] < TOLERANCES["bf16"] < outcome.derived["error_of_a_row"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("name", ["sdpa-cudnn", "flex", "triton"])
def test_feature_that_a_cpu_lacks_is_a_capability_error(name, monkeypatch):
    monkeypatch.setattr("cs336sys.kernels.attention.choice.INTERPRETED", False)
    with pytest.raises(CapabilityError):
        measure_flash(workload(name).configuration(), lambda stage: None)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_gpu_attn_cell_holds_what_the_accounting_predicts(causal):
    from cs336sys.accounting.activations import attention_memory

    shape = AttentionWorkload("eager", 8, 1, 2048, 64, "fp32", causal, device="cuda")
    outcome = measure_attn(shape.configuration() | {"warmup": 1, "steps": 2}, lambda stage: None)
    predicted = attention_memory(8, 2048, 64, "fp32", causal=causal, implementation="eager")
    # random_inputs also holds the output's gradient.
    grad_out = 8 * 2048 * 64 * 4
    assert outcome.derived["held_gib"] == pytest.approx((predicted.held + grad_out) / 2**30, rel=0.02)
    assert outcome.derived["peak_gib"] == pytest.approx((predicted.peak + grad_out) / 2**30, rel=0.02)
