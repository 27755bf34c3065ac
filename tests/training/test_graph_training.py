"""A workload's step in graphs: checked against launched steps, timed, profiled, its memory recorded.

On the CPU operators are recorded and replayed (``fake_cuda_graph``), which bakes in what a CUDA graph bakes in.
"""

import pytest
import torch
from cs336_basics.optimizer import AdamW
from fake_cuda_graph import OperatorRecorder

from cs336sys.commands.bench import measure as bench
from cs336sys.commands.bench.measure import measure_interleaved, measure_training
from cs336sys.commands.losses.measure import measure_losses
from cs336sys.commands.memprof.measure import measure_memory, record
from cs336sys.commands.nsys.measure import measure_profile
from cs336sys.errors import CapabilityError
from cs336sys.parity.step import check_training
from cs336sys.run.cells import release_memory
from cs336sys.settings.choices import MODES, OPTIMIZERS, Optimizer
from cs336sys.settings.profiling import LossWorkload, MemoryWorkload, ProfileWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.training import cuda_graphs
from cs336sys.training.checkpoints import MemoryStep
from cs336sys.training.step import TrainStep

SIZE = choose_size("tiny", context=8, batch_size=2, vocab_size=50, d_model=32, d_ff=64, num_heads=2)
CPU = torch.device("cpu")


def workload(**settings):
    return Workload(**{"size": SIZE, "device": "cpu", "warmup": 1, "steps": 2, "cuda_graph": "on"} | settings)


@pytest.fixture
def graphs_on_a_cpu(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", OperatorRecorder)
    monkeypatch.setattr(cuda_graphs, "require_graphs", lambda device: None)


@pytest.fixture(autouse=True)
def memory_as_in_a_worker():
    """What a test before has left behind, in cycles, would be counted."""
    yield
    if torch.cuda.is_available():
        release_memory()


def silent(stage):
    pass


def check(**settings):
    return check_training(workload(**settings), CPU, silent)


@pytest.mark.usefixtures("graphs_on_a_cpu")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", ["fused", "course"])
def test_replayed_steps_are_launched_ones_bit_by_bit(mode, optimizer):
    checked, wrong = check(mode=mode, optimizer=optimizer)
    assert wrong is None
    assert checked.off == checked.replayed
    assert (checked.off.largest, checked.off.relative, checked.repeated) == (0, 0, None)


@pytest.mark.usefixtures("graphs_on_a_cpu")
@pytest.mark.parametrize("steps", [2, 6])
def test_a_training_in_a_graph_has_the_losses_of_launched_steps_from_the_first_on(tmp_path, steps):
    text = tmp_path / "text.md"
    text.write_bytes(bytes(number % 50 for number in range(200)))

    def losses(graph):
        cell = workload(optimizer="fused", cuda_graph=graph, warmup=0, steps=steps)
        configuration = LossWorkload(cell, str(text), 1e-2, 0.1).configuration()
        return measure_losses(configuration, silent).samples["loss"].measured

    launched = losses("off")
    assert len(launched) == steps
    assert losses("on") == launched


class BakesItsCorrectionIn(torch.optim.AdamW):
    """Says that it can be captured, and counts where nobody looks."""

    def __init__(self, params, capturable=False, **settings):
        super().__init__(params, **settings)
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            parameter -= parameter.grad / (1 - 0.9**self.count)


def keeps_gradients(monkeypatch):
    """Gradients are reset between steps, which launched steps notice and replays do not."""
    monkeypatch.setattr(TrainStep, "optimizer_step", lambda step: step.optimizer.step())
    call = TrainStep.__call__

    def step_and_reset(step):
        call(step)
        step.optimizer.zero_grad()

    monkeypatch.setattr(TrainStep, "__call__", step_and_reset)


FAULTS = {
    "bias correction baked in": lambda monkeypatch: monkeypatch.setitem(
        OPTIMIZERS, "fused", Optimizer(f"{__name__}.BakesItsCorrectionIn")
    ),
    "batch not copied in": lambda monkeypatch: monkeypatch.setattr(
        cuda_graphs.GraphedStep, "load", lambda step, *inputs: None
    ),
    "gradients not reset": keeps_gradients,
}


@pytest.mark.usefixtures("graphs_on_a_cpu")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replays_that_do_something_else_are_wrong_and_not_timed(monkeypatch, fault, precision):
    FAULTS[fault](monkeypatch)
    outcome = measure_training(workload(optimizer="fused", precision=precision).configuration(), silent)
    assert (outcome.status, outcome.samples) == ("wrong", {})
    assert outcome.reason.startswith("replayed: after 5 steps ")
    assert outcome.derived["relative_difference_percent"] > 20


@pytest.mark.usefixtures("graphs_on_a_cpu")
def test_a_cell_is_checked_captured_and_timed():
    stages = []
    outcome = measure_training(workload(optimizer="fused").configuration(), stages.append)
    assert outcome.status == "ok"
    checking = ["checking: launched steps", "checking: replayed steps"]
    assert stages == [*checking, "building the model", "capturing", "warm-up 1/1", "step 1/2", "step 2/2"]
    assert set(outcome.samples) == {"forward", "backward", "optimizer", "step", "wall"}
    assert outcome.derived["relative_difference_percent"] == 0
    assert 0 < outcome.derived["capture_s"] < outcome.derived["first_step_s"]
    assert outcome.derived["graph_pool_gib"] == 0


@pytest.mark.usefixtures("graphs_on_a_cpu")
def test_launched_and_replayed_steps_are_taken_in_turn(monkeypatch):
    together = {"interleave": "cuda_graph", "interleaved": "off,on"}
    cells = [workload(optimizer="fused", cuda_graph=value).configuration() | together for value in ("off", "on")]
    stages = []
    off, on = (measure_interleaved(cell, stages.append) for cell in cells)
    assert (off.status, on.status) == ("ok", "ok")
    assert stages[0] == "on: checking: launched steps"
    assert stages[-2:] == ["step 1/2 of each", "step 2/2 of each"]
    assert "capture_s" in on.derived
    assert "capture_s" not in off.derived
    FAULTS["batch not copied in"](monkeypatch)
    monkeypatch.setattr(bench, "_unclaimed_outcomes", {})
    assert [measure_interleaved(cell, stages.append).status for cell in cells] == ["ok", "wrong"]


@pytest.mark.usefixtures("graphs_on_a_cpu")
def test_a_step_can_be_captured_again_and_launched_again():
    step = TrainStep(workload(optimizer="fused"), CPU)
    other = TrainStep(workload(optimizer="fused", cuda_graph="off"), CPU)
    step.capture(with_loss=True)
    assert list(step.phases) == ["forward", "loss", "backward", "optimizer"]
    step.capture()
    assert list(step.phases) == ["forward", "backward", "optimizer"]
    step.use_batch(1)
    step()
    step.release_graphs()
    step()
    for number in (0,) * 6 + (1, 1):
        other.use_batch(number)
        other()
    assert all(map(torch.equal, step.model.parameters(), other.model.parameters()))


@pytest.mark.usefixtures("graphs_on_a_cpu")
def test_a_profile_is_of_replayed_phases():
    outcome = measure_profile(ProfileWorkload(workload(optimizer="fused")).configuration(), silent)
    assert outcome.status == "ok"
    assert set(outcome.samples) == {"forward", "loss", "backward", "optimizer", "step", "wall", "annotated"}
    phases = {phase["name"] for phase in outcome.derived["profile"]["phases"]}
    assert {"forward", "loss", "backward", "optimizer"} <= phases


@pytest.mark.usefixtures("graphs_on_a_cpu")
def test_memory_is_recorded_while_the_step_is_captured():
    cell = MemoryWorkload(workload(optimizer="fused"), trace=False)
    outcome = measure_memory(cell.configuration(), silent)
    assert outcome.status == "ok"
    assert [phase["phase"] for phase in outcome.derived["phases"]] == ["forward", "loss", "backward", "optimizer"]
    assert "capture_s" in outcome.derived
    step = MemoryStep(cell, CPU)
    step()
    timeline, _ = record(step, follow_operations=False)
    gradients = {allocation.parameter for allocation in timeline.allocations if allocation.parameter}
    assert gradients == {name for name, _ in step.model.named_parameters()}


class SomebodysAdamW(AdamW):
    """Cannot be told to be captured."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr=lr)


@pytest.mark.usefixtures("graphs_on_a_cpu")
def test_optimizers_that_cannot_be_captured_are_refused_by_name(monkeypatch):
    with pytest.raises(CapabilityError, match=r"^AdamW with fp16: the CPU looks at the gradients"):
        TrainStep(workload(optimizer="course", precision="fp16"), CPU).capture()
    monkeypatch.setitem(OPTIMIZERS, "course", Optimizer(f"{__name__}.SomebodysAdamW"))
    with pytest.raises(CapabilityError, match=r"^SomebodysAdamW keeps its state 't' on the CPU, so a graph"):
        TrainStep(workload(optimizer="course"), CPU).capture()
    TrainStep(workload(optimizer="course", cuda_graph="off"), CPU)()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "fused"},
        {"optimizer": "course"},
        {"optimizer": "fused", "mode": "forward"},
        {"optimizer": "fused", "mode": "forward-backward"},
        {"optimizer": "fused", "precision": "fp16"},
        {"optimizer": "fused", "precision": "bf16", "attention": "sdpa"},
        {"optimizer": "fused", "precision": "bf16", "attention": "flash", "compile": "block"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_gpu_replays_equal_launches(settings):
    size = choose_size("small", context=128, num_layers=2, vocab_size=500)
    checked, wrong = check_training(workload(size=size, device="cuda", **settings), torch.device("cuda"), print)
    assert wrong is None
    assert checked.replayed.largest == 0 or checked.repeated is not None
    assert checked.off.relative < 1e-2


def both(measure, cell):
    """What is measured of replayed and of launched steps."""
    outcomes = []
    for graph in ("on", "off"):
        release_memory()
        outcomes.append(measure(cell(graph).configuration(), silent))
    return outcomes


@pytest.mark.gpu
def test_gpu_cell_counts_the_pool_in_its_peak():
    settings = {"size": choose_size("small", context=256), "device": "cuda", "optimizer": "fused", "steps": 5}
    on, off = both(measure_training, lambda graph: workload(**settings, cuda_graph=graph))
    assert on.derived["peak_gib"] == pytest.approx(off.derived["peak_gib"], rel=0.1)
    assert 0 < on.derived["graph_pool_gib"] < on.derived["peak_gib"]
    assert on.samples["wall"].median < 1.1 * off.samples["wall"].median


@pytest.mark.gpu
def test_gpu_memory_of_a_captured_step_is_that_of_a_launched_one():
    settings = {"size": choose_size("small", context=128, num_layers=2), "device": "cuda", "optimizer": "fused"}
    outcomes = both(measure_memory, lambda graph: MemoryWorkload(workload(**settings, cuda_graph=graph), trace=False))
    on, off = ({phase["phase"]: phase["allocated"] for phase in outcome.derived["phases"]} for outcome in outcomes)
    assert on == pytest.approx(off, rel=0.1)


@pytest.mark.gpu
def test_gpu_kernels_of_replays_belong_to_the_phases_of_launches():
    """Kernels of a step are counted: their times depend on what else the GPU computes."""
    settings = {"size": choose_size("small", context=256), "device": "cuda", "optimizer": "fused"}
    outcomes = both(measure_profile, lambda graph: ProfileWorkload(workload(**settings, cuda_graph=graph), "torch"))
    profiles = [outcome.derived["profile"]["phases"] for outcome in outcomes]
    on, off = ({phase["name"]: phase["kernels"] / phase["count"] for phase in phases} for phases in profiles)
    assert on == pytest.approx(off, rel=0.02)
