import subprocess
import sys

import pytest
import torch

from cs336sys.commands.bench.measure import measure_training
from cs336sys.settings.choices import MODES
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.training.ranks.tensor_strategies import torch_linear
from cs336sys.training.step import TrainStep

SIZE = choose_size("tiny", context=16, batch_size=2, vocab_size=50)
CPU = torch.device("cpu")


def train(steps=1, **settings):
    step = TrainStep(Workload(SIZE, device="cpu", **settings), CPU)
    losses = []
    for _ in range(steps):
        step()
        losses.append(step.loss.item())
    return step, losses


@pytest.mark.parametrize("mode", MODES)
def test_step_has_the_phases_of_its_mode(mode):
    step, _ = train(mode=mode)
    assert tuple(step.phases) == MODES[mode].phases
    assert step.loss.requires_grad == (mode != "forward")
    assert all(parameter.grad is None for parameter in step.model.parameters()), "gradients are kept between steps"


def test_optimizers_take_the_same_steps_and_lower_the_loss_of_the_batch():
    (_, course), (_, fused) = (train(steps=8, optimizer=optimizer) for optimizer in ("course", "fused"))
    assert course[:4] == pytest.approx(fused[:4], rel=1e-5)
    assert course[-1] < course[0] - 0.5
    _, without = train(steps=3, mode="forward-backward")
    assert without[0] == without[-1]


@pytest.mark.parametrize("bias", [None, torch.nn.Parameter(torch.randn(5))])
def test_a_layer_of_torch_takes_over_weight_and_bias(bias):
    layer, inputs = torch.nn.Module(), torch.randn(2, 3)
    layer.weight, layer.bias = torch.nn.Parameter(torch.randn(5, 3)), bias
    assert torch.equal(torch_linear(layer)(inputs), torch.nn.functional.linear(inputs, layer.weight, bias))


def test_seed_decides_weights_and_batch():
    assert train(seed=1)[1] == train(seed=1)[1]
    assert train(seed=1)[1] != train(seed=2)[1]


@pytest.mark.parametrize(
    ("attention", "operation"), [("flash", "FlashAttentionTorch"), ("sdpa", "aten::scaled_dot_product_attention")]
)
def test_attention_takes_the_place_of_the_models_and_changes_no_loss(attention, operation):
    assert train(steps=4, attention=attention)[1] == pytest.approx(train(steps=4)[1], rel=1e-5)
    for chosen in (attention, "reference"):
        step, _ = train(attention=chosen)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            step()
        assert (operation in {event.key for event in profiler.key_averages()}) == (chosen == attention)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_changes_the_loss_a_little_and_keeps_fp32_parameters(precision):
    step, losses = train(steps=3, precision=precision)
    _, exact = train(steps=3)
    assert losses == pytest.approx(exact, rel=0.02)
    assert losses != exact
    assert {parameter.dtype for parameter in step.model.parameters()} == {torch.float32}
    assert step.scaler.is_enabled() == (precision == "fp16")


def test_block_mode_compiles_one_block_for_all(monkeypatch):
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    # Module.compile calls torch.compile, too.
    compile_with_inductor = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda code, **settings: compile_with_inductor(code, backend=record, **settings)
    )
    torch.compiler.reset()
    assert SIZE.num_layers == 2
    _, losses = train(steps=2, compile="block")
    assert len(graphs) == 2, "one graph for both blocks and one for the loss"
    torch.compiler.reset()
    assert losses == pytest.approx(train(steps=2)[1], rel=1e-5)


@pytest.mark.gpu
def test_gpu_cell_counts_memory_and_busy_time():
    workload = Workload(choose_size("small", context=128), precision="bf16", device="cuda", warmup=2, steps=3)
    outcome = measure_training(workload.configuration(), lambda stage: None)
    state_gib = 4 * 4 * outcome.derived["parameters"] / 2**30
    assert state_gib < outcome.derived["peak_gib"] < 3 * state_gib
    assert 0 < outcome.derived["gpu_busy_ms"] <= 1.05 * outcome.samples["wall"].median
    assert outcome.samples["step"].method == "cuda events"


def test_a_step_is_launched_without_importing_the_compiler():
    """Which takes longer than all that a tiny cell does, in every worker and every rank.

    torch's optimizers ask it, and so do modes that watch operators and torch's profiler.
    """
    script = """
import sys
import torch
import cs336sys.commands.rank_training.measure
from cs336sys.commands.rank_training.communication import recorded_communication
from cs336sys.training.ranks.tensor_strategies import torch_linear
from cs336sys.training.step import TrainStep
from cs336sys.timing.phases import TorchProfiler
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload

size = choose_size("tiny", context=8, batch_size=1, vocab_size=50, num_layers=1)
step = TrainStep(Workload(size, device="cpu"), torch.device("cpu"))
with recorded_communication(), TorchProfiler([torch.profiler.ProfilerActivity.CPU]):
    step()
    step()
print(step.loss.item() > 0, "torch._dynamo" in sys.modules, hasattr(torch, "_inductor"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True"]
