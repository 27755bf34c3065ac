"""The check of a step in graphs, or with our kernels: how far off is wrong, and how often what is trained for that.

Trainings are real and equal bit by bit; a test says how far off a weight is after each, in parts of how far steps move
it. Attention "flash" is torch's here, and graphs are recorded on the CPU (``fake_cuda_graph``).
"""

import functools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cs336_basics.optimizer import AdamW
from fake_cuda_graph import OperatorRecorder
from torch import nn

from cs336sys.errors import CapabilityError
from cs336sys.parity import rounding, step
from cs336sys.parity.step import check_few_blocks, check_training
from cs336sys.settings.choices import OPTIMIZERS, Optimizer
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.training import UserCode, Workload
from cs336sys.training import cuda_graphs, user_models
from cs336sys.training.model import ATTENTION_FUNCTIONS, build_model, sdpa
from cs336sys.training.step import TrainStep

SIZE = ModelSize("smallest", 8, 16, num_layers=2, num_heads=2, vocab_size=16, context=4, batch_size=2)
CPU = torch.device("cpu")
WEIGHT = "lm_head.weight"
# Of a model of one block.
PARAMETERS = 3 + 9
pytestmark = pytest.mark.usefixtures("graphs_on_a_cpu", "attention_of_torch", "own_attention", "short_trainings")


def workload(num_layers=1, **settings):
    settings = {"optimizer": "fused", "attention": "sdpa"} | settings
    return Workload(replace(SIZE, num_layers=num_layers), device="cpu", warmup=1, steps=2, **settings)


@pytest.fixture
def graphs_on_a_cpu(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", OperatorRecorder)
    monkeypatch.setattr(cuda_graphs, "require_graphs", lambda device: None)


@pytest.fixture
def short_trainings(monkeypatch):
    """One step after one of warm-up is as good as five after three: how many there are, another test counts."""
    monkeypatch.setattr("cs336sys.parity.training.STEPS", 1)
    monkeypatch.setattr(TrainStep, "warmup_of_capture", 1)


@pytest.fixture
def attention_of_torch(monkeypatch):
    monkeypatch.setitem(ATTENTION_FUNCTIONS, "flash", sdpa)


@functools.cache
def start(num_layers, seed):
    return build_model(workload(num_layers, seed=seed), CPU).get_parameter(WEIGHT).detach().clone()


class Trainings:
    """The steps that were trained, in order; each may leave the weight some way off, or have another loss."""

    def __init__(self):
        self.steps, self.off, self.loss_factor = [], lambda step, count: 0.0, lambda step: 1.0

    def describe(self, *names):
        """Return of each training the settings of these names."""
        return [tuple(getattr(step.workload, name) for name in names) for step in self.steps]

    @property
    def graphs(self):
        return [step.workload.cuda_graph for step in self.steps]

    @property
    def scales(self):
        """The scale of each training's loss; None for a disabled scaler."""
        return [round(step.scaler.get_scale(), 3) if step.scaler.is_enabled() else None for step in self.steps]


@pytest.fixture
def trainings(monkeypatch):
    done, weights, compute_loss = Trainings(), TrainStep.weights, TrainStep.compute_loss

    def weights_off(step, parameters):
        count = sum(other.workload.cuda_graph == step.workload.cuda_graph for other in done.steps)
        done.steps.append(step)
        trained, copies = weights(step, parameters)
        off = done.off(step, count)
        if off and WEIGHT in trained:
            moved = trained[WEIGHT] - start(step.workload.size.num_layers, step.workload.seed)
            trained[WEIGHT] = trained[WEIGHT] + off * moved
        return trained, copies

    def other_loss(step):
        compute_loss(step)
        step.loss = step.loss * done.loss_factor(step)

    monkeypatch.setattr(TrainStep, "weights", weights_off)
    monkeypatch.setattr(TrainStep, "compute_loss", other_loss)
    return done


def check(stages=None, **settings):
    return check_training(workload(**settings), CPU, (lambda stage: None) if stages is None else stages.append)


def is_flash(step):
    return step.workload.attention == "flash"


def test_a_plain_step_is_not_checked(trainings):
    assert check() == (None, None)
    assert check(optimizer="course", attention="reference") == (None, None)
    assert trainings.steps == []


def test_attention_is_checked_on_one_block(trainings):
    stages = []
    checked, wrong = check(stages, num_layers=2, attention="flash")
    assert wrong is None
    assert (checked.off.relative, checked.off.num_layers, checked.off.notes) == (0, 1, ())
    assert (checked.replayed, checked.repeated) == (None, None)
    assert stages == ["checking: PyTorch's operations", "checking: our kernels"]
    assert trainings.describe("attention", "mode", "size") == [
        (attention, "train", replace(SIZE, num_layers=1)) for attention in ("sdpa", "flash")
    ]
    assert trainings.scales == [None, None]


def test_more_than_rounding_explains_is_wrong(trainings):
    trainings.off = lambda step, count: 0.05 * is_flash(step)
    checked, wrong = check(num_layers=2, attention="flash", cuda_graph="on")
    assert wrong.status == "wrong"
    assert checked.off.relative == pytest.approx(0.05, rel=1e-4)
    assert wrong.reason == (
        f"with our kernels: after 5 steps {WEIGHT} is off by 5 % of how far launched steps move it, "
        "more than rounding explains (0.1 %)"
    )
    assert wrong.derived == checked.columns()
    assert checked.replayed is None
    assert trainings.graphs == ["off"] * 5, "of the reference and ours, and of the reference scaled"


@pytest.mark.parametrize("graph", ["off", "on"])
def test_a_distance_that_is_just_allowed_is_right(trainings, monkeypatch, graph):
    trainings.off = lambda step, count: 0.01 * is_flash(step)
    checked, wrong = check(attention="flash", cuda_graph=graph)
    assert wrong is not None
    monkeypatch.setitem(rounding.TOLERANCES, "fp32", checked.off.relative)
    allowed, wrong = check(attention="flash", cuda_graph=graph)
    assert (wrong, allowed.off) == (None, checked.off)
    monkeypatch.setitem(rounding.TOLERANCES, "fp32", math.nextafter(checked.off.relative, 0))
    explained, wrong = check(attention="flash", cuda_graph=graph)
    assert wrong is None
    assert explained.off.notes, "the reference is farther from itself than that by its last bit"


def scaled(step):
    return step.scaler.is_enabled()


def test_what_the_scaled_reference_explains_is_right_and_noted(trainings):
    trainings.off = lambda step, count: 0.05 * (is_flash(step) or scaled(step))
    checked, wrong = check(num_layers=2, attention="flash")
    assert wrong is None
    assert checked.off.parameter != WEIGHT
    assert checked.off.notes == (
        f"1 of {PARAMETERS} parameters ({WEIGHT}) are off by more than 0.1 %, as those of one process are that rounds "
        "elsewhere",
    )
    assert trainings.scales == [None, None, 1.1, 0.9, 0.7]
    assert trainings.describe("attention") == [("sdpa",), ("flash",), ("sdpa",), ("sdpa",), ("sdpa",)]


@pytest.mark.parametrize(("factor", "explains"), [(1.0005, True), (0.9995, True), (1.003, False), (0.997, False)])
def test_a_reference_whose_loss_runs_away_explains_nothing(trainings, factor, explains):
    trainings.off = lambda step, count: 0.05 * (is_flash(step) or scaled(step))
    trainings.loss_factor = lambda step: factor if scaled(step) else 1.0
    _, wrong = check(attention="flash")
    assert (wrong is None) == explains


def test_losses_that_are_off_are_wrong_at_once(trainings):
    trainings.loss_factor = lambda step: 1.01 if is_flash(step) else 1.0
    checked, wrong = check(attention="flash")
    assert wrong is not None
    assert checked.off.relative > 0.005
    assert len(trainings.steps) == 2, "no rounding explains it"


def test_a_scaled_loss_is_scaled_further(trainings):
    trainings.off = lambda step, count: 0.5 * is_flash(step)
    check(attention="flash", precision="fp16")
    assert trainings.scales == pytest.approx([65536, 65536, 72089.6, 58982.4, 45875.2])


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"mode": "forward"}, ("train", "fused")),
        ({"mode": "forward-backward"}, ("train", "fused")),
        ({"mode": "forward", "optimizer": "course"}, ("train", "fused")),
        ({"mode": "train", "optimizer": "course"}, ("train", "course")),
    ],
    ids=str,
)
def test_modes_without_an_optimizer_are_checked_with_one(trainings, settings, trained):
    checked, wrong = check(num_layers=2, attention="flash", cuda_graph="on", **settings)
    assert wrong is None
    assert set(trainings.describe("mode", "optimizer")) == {trained}
    assert checked.off.num_layers == 1
    assert checked.replayed.num_layers == (1 if settings["mode"] == "forward" else 2)


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({"optimizer": "adamw", "attention": "sdpa"}, "adamw"),
        ({"kernels": "rope"}, "fused"),
        ({"kernels": "fused", "precision": "bf16"}, "adamw"),
    ],
    ids=str,
)
def test_our_optimizer_trains_what_reads_its_copies(trainings, settings, optimizer):
    """Or what has it anyway; elsewhere torch's."""
    _, wrong = check(mode="forward-backward", **settings)
    assert wrong is None
    assert trainings.describe("mode", "optimizer") == [("train", "fused"), ("train", optimizer)]


class CountsElsewhere(AdamW):
    """Somebody's, which goes another way where it counts on the device: it moves this much farther."""

    off = 0.0

    def __init__(self, params, lr=1e-3, eps=1e-8, weight_decay=0.01, capturable=False):
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay, capturable=capturable)
        self.further = self.off if capturable else 0.0

    def step(self, closure=None):
        before = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]
        super().step()
        with torch.no_grad():
            for parameter, old in zip(self.param_groups[0]["params"], before, strict=True):
                parameter += self.further * (parameter - old)


@pytest.mark.parametrize("off", [0.0, 0.25])
def test_an_optimizer_that_counts_elsewhere_is_compared_with_itself(trainings, monkeypatch, off):
    monkeypatch.setitem(OPTIMIZERS, "course", Optimizer(f"{__name__}.CountsElsewhere"))
    monkeypatch.setattr(CountsElsewhere, "off", off)
    stages = []
    checked, wrong = check(stages, num_layers=2, optimizer="course", cuda_graph="on")
    assert stages[:2] == ["checking: launched steps", "checking: the optimizer"]
    layers = [size.num_layers for (size,) in trainings.describe("size")]
    if off:
        assert wrong.reason.startswith("counting on the GPU, as for a graph: after 5 steps ")
        assert (checked.off.num_layers, checked.replayed) == (1, None)
        assert layers == [1, 1]
    else:
        assert wrong is None
        assert stages[2:] == ["checking: launched steps", "checking: replayed steps"]
        assert layers == [1, 1, 2, 2]
    assert [step.optimizer.param_groups[0]["capturable"] for step in trainings.steps][:2] == [False, True]


def test_optimizers_of_torch_are_trusted(trainings):
    stages = []
    check(stages, cuda_graph="on")
    assert stages == ["checking: launched steps", "checking: replayed steps"]
    assert [step.optimizer.param_groups[0]["capturable"] for step in trainings.steps] == [True, True]
    assert not any(step.optimizer.param_groups[0]["weight_decay"] for step in trainings.steps)


def test_steps_that_trained_all_blocks_are_not_trained_again(trainings):
    checked, wrong = check(attention="flash", cuda_graph="on")
    assert wrong is None
    assert (checked.off, checked.replayed) == (checked.replayed, checked.off)
    assert trainings.describe("attention", "cuda_graph") == [("sdpa", "off"), ("flash", "off"), ("flash", "on")]
    trainings.steps.clear()
    check(num_layers=2, attention="flash", cuda_graph="on")
    assert trainings.graphs == ["off", "off", "off", "on"]
    assert [size.num_layers for (size,) in trainings.describe("size")] == [1, 1, 2, 2]


# Tolerance 0.1: without a difference of launched steps none of replays is right, else a hundredth of it always is, and
# no more than all of it; between, three times as far as launched steps are off.
@pytest.mark.parametrize(
    ("replayed", "launched", "is_right", "trained"),
    [
        (1e-2, [0] * 9, False, 3),
        (1e-2, [0, 0, 0, 9], False, 3),
        (1e-2, [0, 0, 5e-3], True, 3),
        (0.9e-3, [1e-4], True, 1),
        (1.1e-3, [1e-4] * 99, False, 16),
        (2.9e-2, [1e-2], True, 1),
        (3.1e-2, [1e-2, 1e-3, 1.1e-2], True, 3),
        (3.1e-2, [1e-2] * 15 + [1.1e-2], True, 16),
        (3.1e-2, [1e-2] * 16 + [1.1e-2], False, 16),
        (9.9e-2, [4e-2], True, 1),
    ],
)
def test_replays_may_be_off_as_far_as_launched_steps(trainings, replayed, launched, is_right, trained):
    offs = [0, *launched]
    trainings.off = lambda step, count: replayed if step.workload.cuda_graph == "on" else offs[count]
    stages = []
    checked, wrong = check(stages, precision="bf16", cuda_graph="on")
    assert trainings.graphs == ["off", "on"] + ["off"] * trained
    assert stages[2:] == ["checking: launched steps again"] * trained
    assert (wrong is None) == is_right
    assert checked.replayed.relative == pytest.approx(replayed, rel=1e-2)
    farthest = max(launched[:trained])
    assert (0 if checked.repeated is None else checked.repeated.relative) == pytest.approx(farthest, rel=1e-2)
    if not is_right:
        same = "bit by bit" if not farthest else f"within {100 * checked.repeated.relative:.3g} %"
        assert wrong.reason == (
            f"replayed: after 5 steps {WEIGHT} is off by {100 * checked.replayed.relative:.3g} % of how far launched "
            f"steps move it, and those repeat {same}"
        )


@pytest.mark.parametrize("off_again", [0.0, 0.11])
def test_replays_farther_off_than_rounding_are_wrong_unless_launched_steps_are(trainings, off_again):
    offs = [0.0, *[off_again] * 3]
    trainings.off = lambda step, count: 0.11 if step.workload.cuda_graph == "on" else offs[count]
    checked, wrong = check(precision="bf16", cuda_graph="on")
    assert trainings.graphs == ["off", "on", "off", "off", "off"]
    assert trainings.scales == [None] * 5, "replays repeat launched steps, not scaled ones"
    if off_again:
        assert wrong is None
        assert checked.off.notes[0].startswith(f"1 of {PARAMETERS} parameters ({WEIGHT}) ")
    else:
        assert wrong.reason.endswith("move it, more than rounding explains (10 %)")
        assert checked.repeated is None


def test_a_step_that_cannot_be_captured_is_refused_before_it_is_trained(trainings, monkeypatch):
    def refuse(device):
        raise CapabilityError(f"no graphs on {device}")

    monkeypatch.setattr(cuda_graphs, "require_graphs", refuse)
    with pytest.raises(CapabilityError, match="no graphs on cpu"):
        check(attention="flash", cuda_graph="on")
    assert trainings.steps == []


PEAK = workload().predicted_peak().total


@pytest.mark.parametrize(
    ("free_bytes", "user", "waits"),
    [(PEAK * 5 // 4 + 1, None, False), (PEAK * 5 // 4, None, True), (0, None, True), (1 << 40, "Somebodys", True)],
)
def test_weights_wait_in_host_memory_where_a_gpu_lacks_room(monkeypatch, free_bytes, user, waits):
    """Of its free memory training may take four fifths; of the memory of a user's model nothing is known."""
    freed = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 100 * PEAK))
    monkeypatch.setattr(step, "free_gpu_memory", lambda: freed.append("memory"))
    check, weights = SimpleNamespace(device=torch.device("cuda")), {"w": torch.ones(2)}
    trained = dict(weights)
    waiting = step._StepCheck._free_for_training(check, trained, workload(**({"user": USER} if user else {})))
    assert (waiting is trained) == (not waits)
    assert waiting.keys() == weights.keys()
    assert trained.keys() == (set() if waits else weights.keys()), "nothing else may keep them on the GPU"
    assert len(freed) == (2 if waits else 1)


class Somebodys(nn.Module):
    """A user's model, which calls torch's attention, and drops numbers."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.dropout = nn.Dropout(0.5)
        self.lm_head = nn.Linear(size.d_model, size.vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)[:, None]
        attended = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.lm_head(self.dropout(attended[:, 0]))


USER = UserCode(f"{Path(__file__)}:Somebodys")


@pytest.mark.parametrize("mode", ["forward", "forward-backward", "train"])
def test_models_of_users_are_checked_whole(trainings, mode):
    """And dropping nothing, and in mode ``forward`` by their losses."""
    checked, wrong = check(num_layers=2, user=USER, mode=mode, cuda_graph="on")
    assert wrong is None
    assert checked.replayed.num_layers == 2
    assert set(trainings.describe("mode")) == {("forward" if mode == "forward" else "train",)}
    assert all((step.optimizer is None) == (mode == "forward") for step in trainings.steps)
    assert trainings.graphs == ["off", "on"]


def test_optimizers_that_count_elsewhere_train_all_of_a_users_model(trainings, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "course", Optimizer(f"{__name__}.CountsElsewhere"))
    _, wrong = check(num_layers=2, user=USER, optimizer="course", cuda_graph="on")
    assert wrong is None
    assert [size.num_layers for (size,) in trainings.describe("size")] == [2, 2, 2, 2]


@pytest.mark.parametrize(("settings", "resets"), [({"compile": "model"}, 1), ({}, 0)], ids=str)
def test_what_was_compiled_without_dropout_is_compiled_again(trainings, monkeypatch, settings, resets):
    calls = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: None)
    dropped, nothing_dropped = [], user_models.nothing_dropped
    monkeypatch.setattr(user_models, "nothing_dropped", lambda: dropped.append("nothing") or nothing_dropped())
    assert check(user=USER, cuda_graph="on", **settings)[1] is None
    assert dropped == ["nothing"]
    assert len(calls) == resets
    check(cuda_graph="on", **settings)
    assert dropped == ["nothing"], "our models drop nothing anyway"
    assert len(calls) == resets


def few_blocks(**settings):
    stages = []
    return check_few_blocks(workload(**settings), CPU, stages.append), stages


def test_few_blocks_are_checked_once(trainings):
    settings = {"num_layers": 3, "attention": "flash", "cuda_graph": "on", "seed": 11}
    (sentences, failure), _ = few_blocks(**settings)
    assert failure is None
    (sentence,) = sentences
    assert sentence.startswith(
        "checked first, 1 block against PyTorch's operations: after 5 steps off by at most 0 % ("
    )
    assert max(size.num_layers for (size,) in trainings.describe("size")) == 2
    assert set(trainings.describe("warmup", "steps")) == {(0, 1)}, "what does not matter is left out"
    trained = len(trainings.steps)
    again = check_few_blocks(replace(workload(**settings), warmup=7, steps=9), CPU, lambda stage: None)
    assert again == (sentences, failure)
    assert len(trainings.steps) == trained
    few_blocks(**settings | {"seed": 12})
    assert len(trainings.steps) == 2 * trained


def test_few_blocks_say_how_far_they_are_off(trainings):
    trainings.off = lambda step, count: 0.05 * (is_flash(step) or scaled(step))
    (sentences, failure), _ = few_blocks(num_layers=3, attention="flash", kernels="rope", seed=13)
    assert failure is None
    assert sentences[0].startswith("checked first, 2 blocks against PyTorch's operations: after 5 steps off by ")
    assert sentences[1:] == [sentences[1]]
    assert sentences[1].startswith(f"1 of {PARAMETERS + 9} parameters ({WEIGHT}) are off by more than 0.1 %")
    trainings.off = lambda step, count: 0.05 * is_flash(step)
    (sentences, failure), _ = few_blocks(attention="flash", seed=14)
    assert failure.status == "wrong"
    assert sentences == [
        f"checked first, 1 block against PyTorch's operations: after 5 steps off by at most 5 % ({WEIGHT})"
    ]


def test_few_blocks_of_a_plain_step_say_nothing_and_of_a_users_model_are_all(trainings):
    assert few_blocks(seed=15) == (([], None), [])
    assert trainings.steps == []
    (sentences, _), _ = few_blocks(num_layers=3, user=USER, cuda_graph="on", seed=16)
    assert sentences[0].startswith("checked first, 3 blocks against ")
