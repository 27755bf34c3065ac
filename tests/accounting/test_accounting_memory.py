"""Memory on paper against what autograd saves and what the allocator hands out."""

import contextlib
import json

import cs336_basics.model
import pytest
import torch
import torch.nn.functional as F
from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_basics.optimizer import AdamW

from cs336sys.accounting.activations import SavedActivations, attention_memory, saved_activations
from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.accounting.memory import GIB, TrainingState, training_state, widest_moments
from cs336sys.kernels.attention.reference import FlashAttentionTorch, plain_attention
from cs336sys.settings.sizes import SIZES, ModelSize

pytestmark = pytest.mark.usefixtures("own_attention")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ATTENTION_FUNCTIONS = {
    "reference": cs336_basics.model.scaled_dot_product_attention,
    "sdpa": lambda Q, K, V, mask: F.scaled_dot_product_attention(Q, K, V, is_causal=True),
    "flash": lambda Q, K, V, mask: FlashAttentionTorch.apply(Q, K, V, True),
}


class Step:
    """A model with its batch, and the forward pass, backward pass and update of one training step."""

    def __init__(self, size, precision, attention, monkeypatch, device="cpu", autocast=True):
        monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", ATTENTION_FUNCTIONS[attention])
        with torch.device(device):
            self.model = BasicsTransformerLM(
                size.vocab_size, size.context, size.d_model, size.num_layers, size.num_heads, size.d_ff
            )
            self.inputs = torch.randint(size.vocab_size, (size.batch_size, size.context))
            self.targets = torch.randint(size.vocab_size, (size.batch_size, size.context))
        self.autocast = (
            torch.autocast(device, dtype=DTYPES[precision])
            if autocast and precision != "fp32"
            else contextlib.nullcontext()
        )
        if not autocast:
            self.model.to(DTYPES[precision])
        self.optimizer = AdamW(self.model.parameters())

    def loss(self):
        with self.autocast:
            return cross_entropy(self.model(self.inputs), self.targets)

    def run(self, mode):
        with torch.no_grad() if mode == "forward" else contextlib.nullcontext():
            loss = self.loss()
        if mode != "forward":
            loss.backward()
        if mode == "train":
            self.optimizer.step()
        self.model.zero_grad()


def saved_bytes(step):
    """Bytes of the storages that autograd saves, each counted once; the model's own are left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*step.model.parameters(), *step.model.buffers()]}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step.loss()
    del loss  # Held until here, or storages would be freed and their addresses used again.
    return sum(saved.values())


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


def test_training_state_under_autocast_is_16_bytes_a_parameter():
    # 12,832,823,808 parameters * 16 = 205.3e9: the 10b size does not fit into an H200's 141e9 bytes.
    for precision in ("fp32", "bf16", "fp16"):
        state = training_state(SIZES["10b"], precision)
        assert state == TrainingState(51_331_295_232, 51_331_295_232, 102_662_590_464, 0)
        assert state.total == 205_325_180_928


def test_training_state_in_pure_half_precision_keeps_fp32_masters():
    size = ModelSize("hand", d_model=8, d_ff=20, num_layers=3, num_heads=2, vocab_size=50)  # 3064 parameters
    assert training_state(size, "bf16", autocast=False) == TrainingState(6128, 6128, 24512, 12256)
    assert training_state(size, "fp32", autocast=False) == training_state(size, "fp32")


def test_saved_activations_worked_by_hand():
    size = ModelSize("hand", d_model=8, d_ff=20, num_layers=3, num_heads=2, vocab_size=50, context=4, batch_size=2)
    assert saved_activations(size, "fp32", "reference") == SavedActivations(
        tokens=128,  # 16 * 8 tokens
        residual_stream=1792,  # 7 norms * 4 * 8 * 8
        norms=2016,  # 7 * (4 * 8 * 8 + 4 * 8)
        linear_inputs=2560,  # 7 norm outputs and 3 heads, each 4 * 8 * 8
        queries_keys_values=2304,  # 3 layers * 3 * 4 * 8 * 8
        mask=48,  # 3 * 4 * 4
        exponentials=768,  # 3 layers * 4 * 2 sequences * 2 heads * 4 * 4
        probabilities=768,
        attention_statistics=192,  # 3 layers * 4 * 2 * 2 * 4
        attention_output=0,
        swiglu=9600,  # 3 layers * 5 * 4 * 8 * 20
        logits=1664,  # 8 * (4 * 50 + 8)
        weight_copies=0,
    )
    assert saved_activations(size, "bf16", "flash") == SavedActivations(
        tokens=128,
        residual_stream=1792,
        norms=2016,
        linear_inputs=2432,  # 2 * 8 * 8 * (3 layers * (3 + 2 casts + 1 for the heads) + 1 LM head)
        queries_keys_values=1152,
        mask=0,
        exponentials=0,
        probabilities=0,
        attention_statistics=192,
        attention_output=384,  # 3 * 2 * 8 * 8
        swiglu=4800,
        logits=864,  # 8 * (2 * 50 + 8)
        weight_copies=5216,  # 2 * (768 + 1440 + 400), see the parameter counts
    )


@pytest.mark.parametrize(
    "size",
    [
        ModelSize("scores", d_model=32, d_ff=80, num_layers=2, num_heads=4, vocab_size=50, context=96, batch_size=2),
        ModelSize("vocab", d_model=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=999, context=17, batch_size=3),
        ModelSize("weights", d_model=96, d_ff=250, num_layers=3, num_heads=6, vocab_size=61, context=9, batch_size=1),
    ],
    ids=lambda size: size.name,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["reference", "sdpa", "flash"])
def test_autograd_saves_exactly_the_predicted_bytes(size, precision, attention, monkeypatch):
    step = Step(size, precision, attention, monkeypatch)
    assert saved_bytes(step) == saved_activations(size, precision, attention).total


@pytest.mark.parametrize("attention", ["reference", "sdpa", "flash"])
def test_a_model_in_half_precision_saves_the_predicted_bytes(attention, monkeypatch):
    size = ModelSize("hand", d_model=32, d_ff=80, num_layers=2, num_heads=4, vocab_size=50, context=96, batch_size=2)
    step = Step(size, "bf16", attention, monkeypatch, autocast=False)
    assert saved_bytes(step) == saved_activations(size, "bf16", attention, autocast=False).total


def test_half_precisions_need_the_same_memory():
    assert saved_activations(SIZES["8b"], "fp16", "flash") == saved_activations(SIZES["8b"], "bf16", "flash")
    assert training_state(SIZES["8b"], "fp16", autocast=False) == training_state(SIZES["8b"], "bf16", autocast=False)


def test_widest_moments_worked_by_hand():
    """8 tokens: 64 numbers in the stream, 160 in the inner layer, 400 logits, 64 scores of 16 queries.

    Always there: 16 * 8 bytes of batch and 4 * 4 * 4 of rotary table, 192 in all.
    """
    size = ModelSize("hand", d_model=8, d_ff=20, num_layers=3, num_heads=2, vocab_size=50, context=4, batch_size=2)

    def moments(precision, mode):
        peaks = widest_moments(size, precision, mode, "reference")
        assert {(peak.parameters, peak.optimizer_state) for peak in peaks} == {(12256, 24512 * (mode == "train"))}
        return {peak.moment: (peak.gradients, peak.activations) for peak in peaks}

    assert moments("fp32", "forward") == {
        "feed-forward": (0, 192 + 768 + 1920),  # 12 * 64, 3 * 4 * 160
        "LM head": (0, 192 + 512 + 1600),  # 8 * 64, 4 * 400
        "loss": (0, 192 + 3200 + 64),  # 8 * 400, 8 * 8
        "softmax": (0, 192 + 1280 + 16 + 768 + 64),  # 20 * 64, mask 4 * 4, 12 * 64, 4 * 16
    }
    assert moments("bf16", "forward") == {
        "feed-forward": (0, 192 + 768 + 640 + 448),  # 12 * 64, 2 * 2 * 160, casts 2 * (64 + 160)
        "LM head": (0, 192 + 512 + 800 + 928),  # 8 * 64, 2 * 400, casts 2 * (64 + 400)
        "loss": (0, 192 + 2400 + 64),  # 6 * 400, 8 * 8
        "softmax": (0, 192 + 896 + 16 + 768 + 64),  # 14 * 64, mask, 12 * 64, 4 * 16
    }
    # Saved: 5776 a layer, 2336 in last norm, LM head and loss, beside the batch. Parameters: 752 a layer, 408 in last
    # norm and LM head, 3064 in all. A feed-forward saves 768 + 32 + 1600, and 960 of weight casts.
    assert moments("bf16", "train") == {
        "loss": (0, 192 + 3 * 5776 + 2336 + 2400),  # 6 * 400
        "feed-forward backward, last block": (1632 + 640, 192 + 3 * 5776 + 256 + 640 - 320),
        "softmax backward, last block": (1632 + 2208, 192 + 3 * 5776 - 3360 - 128 + 128 + 640 + 64),
        "feed-forward backward, first block": (1632 + 2 * 3008 + 640, 192 + 5776 + 256 + 640 - 320),
        "softmax backward, first block": (1632 + 2 * 3008 + 2208, 192 + 5776 - 3360 - 128 + 128 + 640 + 64),
        "end of backward": (12256, 192 + 256),
        "optimizer": (12256, 192 + 1600),  # the LM head: 4 * 400
    }


# One size for each moment that can be the widest.
PEAKS = {
    "scores": ModelSize("scores", 64, 256, 2, 4, vocab_size=50, context=256, batch_size=2),
    "inner": ModelSize("inner", 32, 400, 2, 4, vocab_size=13, context=64, batch_size=2),
    "vocab": ModelSize("vocab", 64, 256, 2, 4, vocab_size=1000, context=64, batch_size=2),
    "weights": ModelSize("weights", 256, 1024, 3, 4, vocab_size=500, context=16, batch_size=1),
    "even": ModelSize("even", 64, 256, 4, 2, vocab_size=20, context=16, batch_size=2),
}


@pytest.mark.parametrize(
    ("size", "precision", "mode", "attention", "moment"),
    [
        ("scores", "fp32", "forward", "reference", "softmax"),
        ("scores", "bf16", "forward", "reference", "softmax"),
        ("inner", "fp32", "forward", "sdpa", "feed-forward"),
        ("inner", "bf16", "forward", "sdpa", "feed-forward"),
        ("vocab", "fp32", "forward", "sdpa", "loss"),
        ("scores", "fp32", "forward-backward", "reference", "softmax backward, last block"),
        ("scores", "bf16", "forward-backward", "reference", "softmax backward, last block"),
        ("inner", "fp32", "train", "sdpa", "feed-forward backward, last block"),
        ("inner", "bf16", "train", "reference", "feed-forward backward, last block"),
        ("even", "fp32", "forward-backward", "reference", "feed-forward backward, first block"),
        ("vocab", "fp32", "train", "reference", "loss"),
        ("weights", "fp32", "forward-backward", "sdpa", "end of backward"),
        ("weights", "bf16", "forward-backward", "reference", "end of backward"),
        ("weights", "bf16", "train", "reference", "optimizer"),
    ],
)
def test_allocator_peak_is_the_predicted_one(size, precision, mode, attention, moment, monkeypatch, tmp_path):
    """Tensors of a few numbers are not counted, and in ``even`` a moment between the counted ones holds 0.7 % more.

    The loss in bf16 is left out: subtracting fp32 from bf16 makes an fp32 copy of the logits on a CPU, not on a GPU.
    """
    tolerance = 0.01 if size == "even" else 0.002
    size = PEAKS[size]
    step = Step(size, precision, attention, monkeypatch)
    step.run("train")
    peak, left = allocated_bytes(lambda: step.run(mode), tmp_path / "trace.json")
    assert left == 0
    predicted = predicted_peak(size, precision, mode, attention)
    assert predicted.moment == moment
    before = predicted.parameters + predicted.optimizer_state + resident_bytes(step)
    assert peak == pytest.approx(predicted.total - before, rel=tolerance)


@pytest.mark.parametrize(
    ("size", "mode", "attention", "moment"),
    [
        ("scores", "forward", "reference", "softmax"),
        ("inner", "forward", "sdpa", "feed-forward"),
        ("scores", "forward-backward", "reference", "softmax backward, last block"),
        ("inner", "forward-backward", "sdpa", "feed-forward backward, last block"),
        ("weights", "forward-backward", "reference", "end of backward"),
    ],
)
def test_the_peak_of_a_model_in_half_precision_is_the_predicted_one(
    size, mode, attention, moment, monkeypatch, tmp_path
):
    step = Step(PEAKS[size], "bf16", attention, monkeypatch, autocast=False)
    step.run("train")
    peak, left = allocated_bytes(lambda: step.run(mode), tmp_path / "trace.json")
    assert left == 0
    moments = widest_moments(PEAKS[size], "bf16", mode, attention, autocast=False)
    predicted = max(moments, key=lambda moment: moment.total)
    assert predicted.moment == moment
    before = predicted.parameters + predicted.optimizer_state + resident_bytes(step)
    assert peak == pytest.approx(predicted.total - before, rel=0.002)


def resident_bytes(step):
    """What a step has beside parameters and optimizer state: the batch and the rotary table."""
    return sum(tensor.nbytes for tensor in (step.inputs, step.targets, *step.model.buffers()))


def test_peak_adds_up_in_gib():
    peak = predicted_peak(SIZES["2.7b"], "fp32", "train", "reference")
    # 3,406,809,600 parameters of 4 bytes are 12.69 GiB; AdamW holds twice that.
    assert peak.parameters / GIB == pytest.approx(12.6914, abs=1e-4)
    assert peak.optimizer_state == 2 * peak.parameters
    assert peak.total == peak.parameters + peak.gradients + peak.optimizer_state + peak.activations
    assert peak.total == peak.total_gib * GIB


def test_flash_attention_makes_the_leaderboard_context_linear():
    # 2 * 32 * 32768^2 scores, 4 bytes in exponentials and 2 in probabilities, 34 layers, and 34 masks of 32768^2.
    reference = saved_activations(SIZES["8b"], "bf16", "reference")
    flash = saved_activations(SIZES["8b"], "bf16", "flash")
    assert reference.exponentials + reference.probabilities + reference.mask == 34 * (6 * 2 * 32 + 1) * 2**30
    assert flash.exponentials + flash.probabilities + flash.mask == 0
    assert reference.total - flash.total == 34 * (6 * 2 * 32 + 1) * 2**30 - 34 * 2 * 2 * 32768 * 4096


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


def test_attention_memory_of_a_handout_cell():
    # Batch 8, 16384 x 64 in fp32: scores of 8 * 16384^2 * 4 bytes = 8 GiB, q, k, v and out of 32 MiB each.
    eager = attention_memory(8, 16384, 64, "fp32", causal=False, implementation="eager")
    assert eager.held == 8 * GIB + 5 * 32 * 2**20
    assert eager.peak == 32 * GIB + 7 * 32 * 2**20
    # Flash attention: four such tensors and a logsumexp of 8 * 16384 * 4 bytes = 512 KiB.
    flash = attention_memory(8, 16384, 64, "fp32", causal=True, implementation="flash")
    assert flash.held == 128 * 2**20 + 2**19
    # Its backward pass adds the gradients of all four, and a number a query.
    assert flash.peak == 2 * flash.held


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["forward", "forward-backward", "train"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("attention", "tolerance"), [("reference", 0.05), ("sdpa", 0.1)])
def test_gpu_peak_is_the_predicted_one(mode, precision, attention, tolerance, monkeypatch):
    """sdpa is given more room because its backends lay out their output differently, with or without a copy."""
    size = ModelSize("gpu", 512, 2048, 4, 8, vocab_size=10_000, context=512, batch_size=4)
    step = Step(size, precision, attention, monkeypatch, device="cuda")
    step.run("train")
    # cuBLAS workspaces stay allocated after the first step, so they are in both figures and cancel.
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.run(mode)
    added = torch.cuda.max_memory_allocated() - before
    predicted = predicted_peak(size, precision, mode, attention)
    expected = predicted.total - predicted.parameters - predicted.optimizer_state - resident_bytes(step)
    assert added == pytest.approx(expected, rel=tolerance)
