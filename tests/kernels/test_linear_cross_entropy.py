"""linear_cross_entropy against float64, on the CPU through Triton's interpreter."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from cs336sys.kernels import linear_cross_entropy as module
from cs336sys.kernels.linear_cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("poisoned_empty")

ON_GPU = torch.cuda.is_available()
# Largest error, relative to the largest element or 1 if that is smaller, as logits are of the order of 1 and rounded to
# the dtype, as is their gradient before the products.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TOLERANCES]
OPTIONS = {
    "plain": {},
    "ignored": {"ignore_index": 0},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "all": {"ignore_index": 0, "label_smoothing": 0.3, "z_loss": 0.1},
    "sum": {"reduction": "sum", "ignore_index": 0, "z_loss": 0.01},
    "none": {"reduction": "none", "ignore_index": 0, "label_smoothing": 0.3, "z_loss": 0.01},
    "capped": {"softcap": 0.7, "label_smoothing": 0.3, "z_loss": 0.01},
    "weighted": {"class_weight": True, "ignore_index": 0},
    "weighted, smoothed sum": {"class_weight": True, "label_smoothing": 0.3, "reduction": "sum"},
    "weighted, smoothed, capped, none": {
        "class_weight": True, "label_smoothing": 0.3, "softcap": 5.0, "reduction": "none", "ignore_index": 0,
    },
}  # fmt: skip


def reference_linear_cross_entropy(
    hidden, weight, targets, *, z_loss=0.0, softcap=None, class_weight=None, return_logsumexp=False, **options
):
    """Compute linear_cross_entropy in plain PyTorch, with all logits at once, for any dtypes."""
    logits = F.linear(hidden, weight).reshape(-1, len(weight))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat_targets = targets.flatten()
    class_weight = None if class_weight is None else class_weight.to(logits.dtype)
    loss = F.cross_entropy(logits, flat_targets, weight=class_weight, **options)
    reduction = options.get("reduction", "mean")
    logsumexp = logits.logsumexp(-1)
    if z_loss:
        is_counted = flat_targets != options.get("ignore_index", -100)
        squares = z_loss * logsumexp.square().where(is_counted, 0)
        loss = loss + {"none": squares, "sum": squares.sum(), "mean": squares.sum() / is_counted.sum()}[reduction]
    if reduction == "none":
        loss = loss.view(targets.shape)
    return (loss, logsumexp.detach().view(targets.shape)) if return_logsumexp else loss


def make_inputs(leading, width, vocab_size, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*leading, width, generator=generator)
    weight = torch.randn(vocab_size, width, generator=generator) / math.sqrt(width)
    targets = torch.randint(vocab_size, leading, generator=generator)
    return hidden.to(device, dtype), weight.to(device, dtype), targets.to(device)


def run(function, hidden, weight, targets, grad_loss=1.0, **options):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss, logsumexp = function(hidden, weight, targets, return_logsumexp=True, **options)
    factors = grad_loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight), factors)
    assert not any(tensor.requires_grad for tensor in (logsumexp, grad_hidden, grad_weight))
    return {"loss": loss.detach(), "logsumexp": logsumexp, "grad_hidden": grad_hidden, "grad_weight": grad_weight}


def assert_matches_float64(hidden, weight, targets, grad_loss=1.0, **options):
    if "class_weight" in options:
        options["class_weight"] = torch.linspace(0, 2, len(weight), device=weight.device)
    actual = run(linear_cross_entropy, hidden, weight, targets, grad_loss, **options)
    expected = run(reference_linear_cross_entropy, hidden.double(), weight.double(), targets, grad_loss, **options)
    dtypes = {"grad_hidden": hidden.dtype, "grad_weight": weight.dtype}
    for name, tensor in actual.items():
        assert tensor.dtype == dtypes.get(name, torch.float32), name
        assert tensor.shape == expected[name].shape, name
        # Of a mean over N tokens the gradients are 1 / N of their sum's.
        scale = expected[name].abs().max().clamp(min=1 / max(1, targets.numel()) if name in dtypes else 1.0)
        tolerance = TOLERANCES[hidden.dtype] * scale.item()
        torch.testing.assert_close(
            tensor.double(), expected[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


SHAPES = [((), 1, 1), ((1,), 5, 2), ((2, 3), 16, 300), ((3, 1, 2), 7, 1023)]
if ON_GPU:
    SHAPES += [((4, 512), 768, 10_000), ((129,), 64, 50_257), ((3, 50), 100, 151_936)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("leading", "width", "vocab_size"), SHAPES)
def test_loss_and_gradients(leading, width, vocab_size, dtype, device):
    assert_matches_float64(*make_inputs(leading, width, vocab_size, dtype, device))


@pytest.fixture
def small_tiles(monkeypatch):
    """Rows of several tiles and tokens of several chunks, in the interpreter's time."""
    monkeypatch.setattr(module, "MAX_COLUMN_TILE", 512)
    monkeypatch.setattr(module, "CHUNK_ALIGNMENT", 2)
    monkeypatch.setattr(module, "CHUNK_BYTES", 2 * 4 * 1344)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("vocab_size", [1024, 1301])
@pytest.mark.usefixtures("small_tiles")
def test_several_tiles_and_chunks(vocab_size, options, device):
    hidden, weight, targets = make_inputs((5,), 9, vocab_size, device=device)
    targets[1] = 0
    targets[2] = vocab_size - 1
    assert_matches_float64(hidden, weight, targets, grad_loss=-2.5, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sum", "none", "capped", "weighted", "weighted, smoothed, capped, none"])
def test_options_of_the_loss_in_every_dtype(name, dtype, device):
    hidden, weight, targets = make_inputs((5, 3), 16, 100, dtype, device)
    assert_matches_float64(hidden, weight, targets, grad_loss=1e-3, **OPTIONS[name])


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("offset", [100, 1_000, 10_000])
def test_an_offset_of_all_logits_costs_no_more_than_in_torch(offset, options, device):
    hidden, weight, targets = make_inputs((6,), 9, 37, device=device)
    hidden[:, 8] = 1
    weight[:, 8] = offset
    actual = run(linear_cross_entropy, hidden, weight, targets, **options)
    torch_result = run(reference_linear_cross_entropy, hidden, weight, targets, **options)
    expected = run(reference_linear_cross_entropy, hidden.double(), weight.double(), targets, **options)
    for name, tensor in actual.items():
        error, torch_error = ((one - expected[name]).norm().item() for one in (tensor, torch_result[name]))
        assert error <= 2 * torch_error + 2e-6 * expected[name].norm().item(), name


@pytest.mark.parametrize("sums_fit", [False, True])
def test_bfloat16_weight_in_several_chunks(sums_fit, monkeypatch, device):
    monkeypatch.setattr(module, "CHUNK_ALIGNMENT", 2)
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 2)
    token_bytes = module.logits_bytes_of_a_token(100, torch.bfloat16)
    monkeypatch.setattr(module, "CHUNK_BYTES", 2 * token_bytes + (4 * 100 * 8 if sums_fit else 0))
    assert_matches_float64(*make_inputs((6,), 8, 100, torch.bfloat16, device))


def test_nothing_is_computed_for_gradients_that_nobody_needs(monkeypatch, device):
    hidden, weight, targets = make_inputs((4,), 8, 48, device=device)
    products = []
    for name in ("mm", "addmm"):
        product = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, n=name, f=product, **k: products.append(n) or f(*a, **k))
    expected = {"neither": ["mm"], "hidden": ["mm", "mm"], "weight": ["mm", "addmm"], "no_grad": ["mm"]}
    reference = run(reference_linear_cross_entropy, hidden, weight, targets)
    for needed, names in expected.items():
        products.clear()
        inputs = {
            "hidden": hidden.detach().requires_grad_(needed in ("hidden", "no_grad")),
            "weight": weight.detach().requires_grad_(needed in ("weight", "no_grad")),
        }
        with torch.set_grad_enabled(needed != "no_grad"):
            loss = linear_cross_entropy(**inputs, targets=targets)
        assert products == names, needed
        torch.testing.assert_close(loss.detach(), reference["loss"])
        if needed in inputs:
            loss.backward()
            torch.testing.assert_close(inputs[needed].grad, reference[f"grad_{needed}"])


def test_backward_twice(device):
    inputs = make_inputs((4,), 8, 50, device=device)
    expected = run(linear_cross_entropy, *inputs)
    hidden, weight = (tensor.requires_grad_() for tensor in inputs[:2])
    loss = linear_cross_entropy(hidden, weight, inputs[2])
    first = torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=True)
    for gradient in first:
        gradient.zero_()
    for name, gradient in zip(("grad_hidden", "grad_weight"), torch.autograd.grad(loss, (hidden, weight)), strict=True):
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_of_stride_0_for_a_loss_of_each_token(dtype, device):
    """As the sum or the mean of the losses sends it back."""
    hidden, weight, targets = make_inputs((2, 30), 16, 50, dtype, device)
    tensors = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(*tensors, targets, reduction="none")
    three = torch.full((), 3.0, device=device).expand_as(loss)
    gradients = [torch.autograd.grad(loss, tensors, grad, retain_graph=True) for grad in (three, three.contiguous())]
    assert all(map(torch.equal, *gradients))


def test_results_are_equal_from_run_to_run(device):
    inputs = make_inputs((700,) if ON_GPU else (7,), 64, 1000, torch.float16, device)
    first, second = (run(linear_cross_entropy, *inputs) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_float16_gradients_do_not_vanish_before_they_are_scaled(device):
    """A probability of 1e-4 over 32 tokens is 3e-6, which float16 holds to 2 % only."""
    num_tokens, scale = 32, 2.0**16
    weight = torch.tensor([[0.0], [-9.2]], dtype=torch.float16, device=device)
    hidden = torch.ones(num_tokens, 1, dtype=torch.float16, device=device)
    targets = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    actual = run(linear_cross_entropy, hidden, weight, targets, grad_loss=scale)
    expected = run(reference_linear_cross_entropy, hidden.double(), weight.double(), targets, grad_loss=scale)
    for name in ("grad_hidden", "grad_weight"):
        torch.testing.assert_close(actual[name].double(), expected[name], rtol=5e-3, atol=0)


LAYOUTS = {
    "hidden transposed": lambda h, w, t: (h.mT.contiguous().mT, w, t),
    "hidden is rows of a wider tensor": lambda h, w, t: (torch.cat([h, h], -1)[..., : h.shape[-1]], w, t),
    "weight transposed": lambda h, w, t: (h, w.T.contiguous().T, t),
    "every other row of a weight": lambda h, w, t: (h, w.repeat_interleave(2, 0)[::2], t),
    "targets transposed": lambda h, w, t: (h, w, t.T.contiguous().T),
    "every other of a row of targets": lambda h, w, t: (h, w, t.repeat_interleave(2, -1)[..., ::2]),
    "hidden and targets expanded": lambda h, w, t: (h[:1].expand_as(h), w, t[:1].expand_as(t)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_strides(layout, device):
    inputs = layout(*make_inputs((2, 3), 10, 70, device=device))
    assert not all(tensor.is_contiguous() for tensor in inputs)
    assert_matches_float64(*inputs)


def test_huge_logits(device):
    hidden, weight, targets = make_inputs((6,), 8, 600, device=device)
    hidden *= 1e4
    assert_matches_float64(hidden, weight, targets)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.usefixtures("small_tiles")
def test_nan_and_infinity_as_in_the_reference(value, device):
    """A logit of token 1 is not finite, in the last tile, and none of the others is."""
    hidden, weight, targets = make_inputs((3,), 2, 1100, device=device)
    hidden[:, 0] = torch.tensor([0.0, 1.0, 0.0])
    weight[:, 0] = 0.0
    weight[1090, 0] = value
    # 0 times infinity would be NaN everywhere.
    keep = torch.tensor([1], device=device)
    for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 0.1}):
        actual = run(linear_cross_entropy, hidden[keep], weight, targets[keep], **options)
        expected = run(reference_linear_cross_entropy, hidden[keep], weight, targets[keep], **options)
        torch.testing.assert_close(actual, expected, equal_nan=True)


def test_row_of_nothing_but_minus_infinity(device):
    hidden, weight = torch.ones(1, 1, device=device), torch.full((5, 1), -math.inf, device=device)
    targets = torch.zeros(1, dtype=torch.int64, device=device)
    loss, logsumexp = linear_cross_entropy(hidden, weight, targets, return_logsumexp=True)
    assert loss.isnan()
    assert logsumexp.tolist() == [-math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("leading", [(3,), (2, 0)], ids=["ignored", "no tokens"])
def test_without_a_counted_target_the_loss_is_nan_and_gradients_are_zero(leading, dtype, device):
    hidden, weight, targets = make_inputs(leading, 8, 40, dtype, device)
    actual = run(linear_cross_entropy, hidden, weight, targets.fill_(-100))
    assert actual["loss"].isnan()
    assert actual["grad_hidden"].shape == hidden.shape
    assert not actual["grad_hidden"].any()
    assert not actual["grad_weight"].any()


def test_ignored_token_has_no_gradient_whatever_it_is(device):
    hidden, weight, targets = make_inputs((3,), 8, 40, device=device)
    targets[1] = -100
    hidden[1] = math.nan
    actual = run(linear_cross_entropy, hidden, weight, targets)
    assert actual["loss"].isfinite()
    assert not actual["grad_hidden"][1].any()


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_a_float32_weight_a_float32_gradient(hidden_dtype, device):
    hidden, weight, targets = make_inputs((6,), 32, 200, device=device)
    hidden = hidden.to(hidden_dtype)
    with torch.autocast(device.type, torch.bfloat16):
        actual = run(linear_cross_entropy, hidden, weight, targets, label_smoothing=0.1)
    rounded = [tensor.bfloat16().double() for tensor in (hidden, weight)]
    expected = run(reference_linear_cross_entropy, *rounded, targets, label_smoothing=0.1)
    dtypes = {"grad_hidden": hidden_dtype}
    for name, tensor in actual.items():
        assert tensor.dtype == dtypes.get(name, torch.float32), name
        torch.testing.assert_close(tensor.double(), expected[name], rtol=2e-2, atol=5e-3, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(
    ("dtype", "gradient_dtype"),
    [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float16, None)],
)
def test_operator_is_what_compilers_are_told(dtype, gradient_dtype, needed, device):
    hidden, weight, targets = make_inputs((2, 3), 8, 40, dtype, device)
    hidden.requires_grad_(needed[0])
    weight.requires_grad_(needed[1])
    torch.library.opcheck(
        torch.ops.cs336sys.linear_cross_entropy.default,
        (hidden, weight, targets, -100, 0.1, 0.01, dtype, *needed, None, gradient_dtype),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_copy_is_read_in_the_weights_place(gradient_dtype, device):
    hidden, weight, targets = make_inputs((2, 3), 8, 40, torch.float32, device)
    hidden = hidden.bfloat16().requires_grad_()
    weight.requires_grad_()
    copy = (weight.detach() * 2).bfloat16()
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, copy=copy, gradient_dtype=gradient_dtype)
    kept = loss.grad_fn.saved_tensors[1]
    found = torch.autograd.grad(loss, (hidden, weight))

    wide, read = hidden.detach().double().requires_grad_(), copy.double().requires_grad_()
    expected_loss = reference_linear_cross_entropy(wide, read, targets)
    expected = torch.autograd.grad(expected_loss, (wide, read))
    assert (kept.dtype, found[1].dtype) == (gradient_dtype, torch.float32)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=0.01, atol=0)
    for one, other in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(one.double() - other) < 0.02 * torch.linalg.vector_norm(other)
    with (
        torch.autocast(device.type, torch.bfloat16),
        pytest.raises(ValueError, match=r"must be like it and torch.bfloat16, got \(39, 8\)"),
    ):
        linear_cross_entropy(hidden, weight, targets, copy=copy[1:])


def test_flops(device):
    hidden, weight, targets = make_inputs((6,), 8, 40, device=device)
    for needs_gradients, products in ((False, 1), (True, 3)):
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(hidden, weight.requires_grad_(needs_gradients), targets)
            if needs_gradients:
                linear_cross_entropy(hidden.requires_grad_(), weight, targets).backward()
        assert counter.get_total_flops() == 2 * 6 * 8 * 40 * (products + 2 if needs_gradients else 1)


@pytest.mark.skipif(ON_GPU, reason="on a GPU it is a device-side assertion, after which the process has no GPU")
@pytest.mark.parametrize("target", [5, -1])
def test_target_outside_the_vocabulary(target):
    with pytest.raises(IndexError, match=rf"target {target} is not in the vocabulary: it must be in \[0, 5\)"):
        linear_cross_entropy(torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, target]))


PREDICT_BEYOND_THE_VOCABULARY = """
import torch
from cs336sys.kernels.linear_cross_entropy import linear_cross_entropy
torch.set_default_device("cuda")
linear_cross_entropy(torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 5]))
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_target_outside_the_vocabulary_is_a_device_side_assertion():
    result = subprocess.run(
        [sys.executable, "-c", PREDICT_BEYOND_THE_VOCABULARY], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    # Whatever is called next says that something failed before.
    assert "_assert_async_cuda_kernel" in result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_memory_is_one_chunk_of_logits(weight_dtype):
    hidden, weight, targets = make_inputs((16384,), 1024, 151_936, torch.bfloat16, "cuda")
    weight = weight.to(weight_dtype).requires_grad_()
    hidden.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16, enabled=weight_dtype == torch.float32):
        linear_cross_entropy(hidden, weight, targets).backward()
    beyond = torch.cuda.max_memory_allocated() - before - hidden.grad.nbytes - weight.grad.nbytes
    rounded_weight = 0 if weight_dtype == torch.bfloat16 else 2 * weight.numel()
    # cuBLAS keeps a workspace of 32 MiB.
    assert beyond - rounded_weight <= module.CHUNK_BYTES + 2**26


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Without waiting for the GPU, also for the number of targets that count."""
    hidden, weight, targets = make_inputs((256,), 64, 1000, torch.bfloat16, "cuda")
    hidden.requires_grad_()
    weight.requires_grad_()

    def step():
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, targets)
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad():
        targets[:100] = -100
        hidden.mul_(0.5)
    graph.replay()
    replayed = [loss.clone(), hidden.grad.clone(), weight.grad.clone()]
    for tensor, expected in zip(replayed, [step(), hidden.grad, weight.grad], strict=True):
        assert torch.equal(tensor, expected)
