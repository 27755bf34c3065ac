"""Steps with fused kernels: the check sees a stale copy, and what they hold is predicted."""

from dataclasses import replace

import pytest
import torch

from cs336sys.commands.memprof.measure import measure_memory
from cs336sys.commands.nsys.measure import measure_profile
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.kernels.adamw import AdamW
from cs336sys.kernels.attention import flash_attention
from cs336sys.kernels.fuse import KERNELS, fused_kernels
from cs336sys.parity import step
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.profiling import MemoryWorkload, ProfileWorkload
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.training import FUSED_KERNELS, Workload
from cs336sys.training.memory_prediction import predicted_timeline, timeline_peaks
from cs336sys.training.model import ATTENTION_FUNCTIONS, build_compared_model, plainly_trained
from cs336sys.training.step import TrainStep

# Where kernels run: on a CPU in the interpreter, where there is no GPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALLEST = ModelSize("smallest", 16, 32, num_layers=1, num_heads=2, vocab_size=32, context=4, batch_size=1)


def workload(size=SMALLEST, **settings):
    settings = {"kernels": "fused", "precision": "bf16", "optimizer": "adamw", "attention": "sdpa"} | settings
    return Workload(size, device=DEVICE.type, warmup=0, **settings)


def put_in_place_of_flash(monkeypatch, attend):
    monkeypatch.setitem(
        ATTENTION_FUNCTIONS, "flash", lambda Q, K, V, mask=None: attend(Q, K, V, is_causal=mask is not None)
    )


def silent(stage):
    pass


def test_a_stale_copy_is_wrong_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr("cs336sys.parity.training.STEPS", 1)
    checked, wrong = step.check_training(workload(), DEVICE, silent)
    assert wrong is None
    assert 0 < checked.off.relative < 0.1
    attach = AdamW.attach_copy

    def forget_one(self, parameter, copy):
        if len(parameter) == 32:
            copy.copy_(parameter.detach())
        else:
            attach(self, parameter, copy)

    monkeypatch.setattr(AdamW, "attach_copy", forget_one)
    checked, wrong = step.check_training(workload(), DEVICE, silent)
    assert wrong.status == "wrong"
    assert checked.off.parameter == "the copy of layers.0.ffn.w1.weight"
    assert wrong.reason.startswith("with our kernels: after 5 steps the copy of layers.0.ffn.w1.weight is off by inf %")


def test_a_wrong_forward_pass_is_wrong_where_its_loss_is_as_good_as_any(monkeypatch):
    cell = workload(kernels="reference", precision="bf16", optimizer="course", attention="flash", mode="forward")
    checked, wrong = step.check_training(cell, DEVICE, silent)
    assert wrong is None, checked
    put_in_place_of_flash(monkeypatch, lambda query, *args, **named: torch.ones_like(query) * query.mean())
    _, wrong = step.check_training(cell, DEVICE, silent)
    assert wrong.status == "wrong"


@pytest.mark.parametrize(
    ("settings", "checkpointing"),
    [
        ({}, "none"),
        ({"attention": "reference", "state_dtype": "split"}, "none"),
        ({"precision": "fp32", "optimizer": "fused"}, "block"),
        ({"mode": "forward", "attention": "reference"}, "none"),
        ({"update": "backward"}, "none"),
        ({"state_dtype": "bf16"}, "none"),
    ],
    ids=["copies", "split", "fp32", "forward", "updates in backward", "bf16"],
)
@pytest.mark.parametrize(
    "size",
    [
        ModelSize("inner", 32, 256, num_layers=3, num_heads=2, vocab_size=20, context=64, batch_size=2),
        ModelSize("weights", 64, 256, num_layers=3, num_heads=2, vocab_size=50, context=8, batch_size=1),
    ],
    ids=lambda size: size.name,
)
def test_memory_is_as_predicted(size, settings, checkpointing):
    cell = MemoryWorkload(workload(size, **settings), checkpointing)
    traced = max(peak.allocated for peak in timeline_peaks(predicted_timeline(cell).timeline))
    assert traced == pytest.approx(cell.training.predicted_peak(checkpointing).total, rel=0.01)


@pytest.mark.parametrize("state", ["fp32", "split"])
def test_copies_and_gradients_are_counted_to_the_byte(state):
    """The head's, too, which the blocks' drown where a vocabulary is small."""
    cell = workload(state_dtype=state)
    step = TrainStep(cell, DEVICE)
    copies = sum(copy.nbytes for copy in fused_kernels(step.model).copies.tensors)
    predicted = cell.widest_moments()[-1]
    assert sum(parameter.nbytes for parameter in step.model.parameters()) + copies == predicted.parameters
    step.forward()
    step.backward()
    assert sum(parameter.grad.nbytes for parameter in step.model.parameters()) == predicted.gradients


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float32)])
def test_gradients_are_as_autocast_rounds_them(precision, dtype):
    step = TrainStep(workload(precision=precision, mode="forward-backward"), DEVICE)
    step.forward()
    step.loss.backward()
    block = step.model.layers[0]
    assert {block.attn.q_proj.weight.grad.dtype, block.ffn.w2.weight.grad.dtype} == {dtype}
    assert block.ln1.weight.grad.dtype == torch.float32


def test_some_of_the_kernels():
    step = TrainStep(workload(kernels="swiglu+rms-norm"), DEVICE)
    assert step.workload.kernels == "rms-norm+swiglu"
    assert list(step.phases_with_loss) == ["forward", "loss", "backward", "optimizer"]
    replaced = {type(module).__name__ for module in step.model.modules() if "forward" in module.__dict__}
    assert replaced == {"RMSNorm", "TransformerBlock", "SwiGLU"}
    step()
    # They read weights as autocast casts them: AdamW has no copies to write.
    assert step.loss.isfinite()
    assert fused_kernels(step.model).copies is None
    assert tuple(KERNELS) == FUSED_KERNELS
    for refuse in (MemoryWorkload, lambda training: ParallelWorkload(training, "naive", 1)):
        with pytest.raises(UsageError, match=r"--kernels rms-norm\+swiglu and --update step: memory is not predicted"):
            refuse(step.workload)


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"optimizer": "course"}, "--kernels fused"), ({"kernels": "reference"}, "--optimizer adamw")],
)
def test_without_triton(settings, what, monkeypatch):
    reason = "the package triton, which is not installed"
    monkeypatch.setattr("cs336sys.training.model.why_no_triton", lambda: reason)
    with pytest.raises(CapabilityError, match=f"{what} needs the package triton, which is not installed"):
        TrainStep(workload(**settings), DEVICE)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "split"])
def test_every_state_is_compared_with_a_plain_model(state_dtype):
    plain = plainly_trained(workload(state_dtype=state_dtype, compile="block"))
    assert (plain.kernels, plain.optimizer, plain.state_dtype, plain.compile) == ("reference", "fused", "fp32", "off")
    started = dict(build_compared_model(workload(state_dtype=state_dtype), DEVICE).named_parameters())
    in_bf16 = [name for name, weight in started.items() if weight.dim() > 1 and torch.equal(weight, weight.bfloat16())]
    assert len(in_bf16) == (7 if state_dtype == "split" else 0)
    assert {weight.dtype for weight in started.values()} == {torch.float32}


@pytest.mark.parametrize("command", ["nsys", "memprof"])
def test_commands_that_look_into_steps_check_kernels_first(command, monkeypatch):
    """Neither compared anything: it would have profiled wrong attention, and shown it."""
    cell = workload(kernels="reference", precision="fp32", optimizer="course", attention="flash")
    cell = replace(cell, size=replace(SMALLEST, num_layers=3), steps=1)
    measure, cell = {
        "nsys": (measure_profile, ProfileWorkload(cell, "torch")),
        "memprof": (measure_memory, MemoryWorkload(cell, trace=False)),
    }[command]
    right = measure(cell.configuration(), silent)
    assert right.status == "ok"
    assert any(note.startswith("checked first, 1 block against") for note in right.derived["notes"])
    monkeypatch.setattr(step, "_checked_few_blocks", {})
    negative_gradient = lambda query, *args, **named: flash_attention(2 * query.detach() - query, *args, **named)  # noqa: E731
    put_in_place_of_flash(monkeypatch, negative_gradient)
    wrong = measure(cell.configuration(), silent)
    assert (wrong.status, wrong.samples) == ("wrong", {})
    assert "layers.0.attn.q_proj.weight is off by" in wrong.reason
