"""Memory on paper against what autograd saves, and that of attention against what the allocator hands out."""

import json

import cs336_basics.model
import pytest
import torch
import torch.nn.functional as F
from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy

from cs336sys.accounting.activations import attention_memory, saved_activations
from cs336sys.kernels.attention.reference import FlashAttentionTorch, plain_attention
from cs336sys.settings.sizes import ModelSize

pytestmark = pytest.mark.usefixtures("own_attention")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ATTENTION_FUNCTIONS = {
    "reference": cs336_basics.model.scaled_dot_product_attention,
    "sdpa": lambda Q, K, V, mask: F.scaled_dot_product_attention(Q, K, V, is_causal=True),
    "flash": lambda Q, K, V, mask: FlashAttentionTorch.apply(Q, K, V, True),
}


def saved_bytes(model, loss):
    """Bytes of the storages that autograd saves, each counted once; the model's own are left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = loss()
    del kept  # Held until here, or storages would be freed and their addresses used again.
    return sum(saved.values())


@pytest.mark.parametrize(
    "size",
    [
        ModelSize("scores", d_model=32, d_ff=80, num_layers=2, num_heads=4, vocab_size=50, context=96, batch_size=2),
        ModelSize("vocab", d_model=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=999, context=17, batch_size=3),
        ModelSize("weights", d_model=96, d_ff=250, num_layers=3, num_heads=6, vocab_size=61, context=9, batch_size=1),
    ],
    ids=lambda size: size.name,
)
@pytest.mark.parametrize(("precision", "autocast"), [("fp32", True), ("bf16", True), ("bf16", False)])
@pytest.mark.parametrize("attention", ["reference", "sdpa", "flash"])
def test_autograd_saves_exactly_the_predicted_bytes(size, precision, autocast, attention, monkeypatch):
    """Under autocast, and of a model that is in half precision. What is held at once is measured in tests/training."""
    monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", ATTENTION_FUNCTIONS[attention])
    model = BasicsTransformerLM(
        size.vocab_size, size.context, size.d_model, size.num_layers, size.num_heads, size.d_ff
    ).to(torch.float32 if autocast else DTYPES[precision])
    inputs, targets = (torch.randint(size.vocab_size, (size.batch_size, size.context)) for _ in range(2))
    with torch.autocast("cpu", DTYPES[precision], enabled=autocast and precision != "fp32"):
        saved = saved_bytes(model, lambda: cross_entropy(model(inputs), targets))
    assert saved == saved_activations(size, precision, attention, autocast=autocast).total


def allocated_bytes(run, path):
    """Most bytes allocated at once while ``run`` runs, and what is left at its end, beyond what was there before.

    Without oneDNN, which on CPUs with bf16 instructions allocates reordered copies of a product's operands.
    """
    cpu = torch.profiler.ProfilerActivity.CPU
    with (
        torch.backends.mkldnn.flags(enabled=False),
        torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler,
    ):
        kept = run()
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    del kept
    return peak, now


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_eager_attention_holds_and_peaks_as_predicted(dtype, causal, tmp_path):
    batch, context, head_dim = 3, 256, 8
    qkv = [torch.randn(batch, context, head_dim, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3)]
    predicted = attention_memory(batch, context, head_dim, dtype, causal=causal, implementation="eager")
    _, held = allocated_bytes(lambda: plain_attention(*qkv, is_causal=causal), tmp_path / "forward.json")
    # A scalar of 8 bytes, the root of the head dimension, is saved too.
    assert held + predicted.inputs == predicted.held + 8
    out = plain_attention(*qkv, is_causal=causal)
    added, _ = allocated_bytes(lambda: out.backward(torch.ones_like(out)), tmp_path / "backward.json")
    # The CPU's softmax multiplies probabilities and gradient in registers, CUDA's in a temporary.
    assert added == predicted.peak - predicted.held - predicted.probabilities


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_flash_attention_holds_what_is_predicted(dtype, tmp_path):
    batch, context, head_dim = 3, 128, 8
    qkv = [torch.randn(batch, context, head_dim, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3)]
    predicted = attention_memory(batch, context, head_dim, dtype, causal=True, implementation="flash")
    _, held = allocated_bytes(lambda: FlashAttentionTorch.apply(*qkv, True), tmp_path / "trace.json")
    assert held + predicted.inputs == predicted.held
