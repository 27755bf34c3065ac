"""Checkpoints from outside: same gradients, as many recomputations as predicted; and what a step holds, to the byte."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.cuda._memory_viz
from fake_cuda_allocator import DEVICE, AllocateFrom, FakeCudaAllocator
from torch.utils.flop_counter import FlopCounterMode

from cs336sys.accounting.checkpointing import recomputed_flops
from cs336sys.accounting.flops import model_flops
from cs336sys.allocations.timeline import RECOMPUTATION
from cs336sys.commands.memprof.measure import counted_peaks, measure_memory, record
from cs336sys.run.cells import guarded, release_memory
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.settings.sizes import ModelSize, choose_size
from cs336sys.settings.training import UserCode, Workload
from cs336sys.training import memory_prediction as prediction
from cs336sys.training.checkpoints import MemoryStep
from cs336sys.training.memory_prediction import block_changes, predict_memory, predicted_timeline, timeline_peaks

STRATEGIES = ("none", "block", "every=2", "nested")
INSIDE_BLOCKS = ("sublayer", "attention", "ffn")
CPU = torch.device("cpu")

# In the first size attention scores are the largest, in the second the inner layer, in the third the parameters.
SIZES = {
    "scores": ModelSize("scores", 32, 64, num_layers=3, num_heads=4, vocab_size=50, context=96, batch_size=2),
    "inner": ModelSize("inner", 32, 256, num_layers=3, num_heads=2, vocab_size=20, context=64, batch_size=2),
    "weights": ModelSize("weights", 64, 256, num_layers=3, num_heads=2, vocab_size=50, context=8, batch_size=1),
}


def workload(size="scores", checkpointing="none", layers=3, **settings):
    settings = {"device": "cpu", "warmup": 1, "steps": 1} | settings
    return MemoryWorkload(Workload(replace(SIZES[size], num_layers=layers), **settings), checkpointing)


def silent(text):
    pass


@pytest.mark.parametrize("checkpointing", [*STRATEGIES, *INSIDE_BLOCKS])
def test_checkpoints_change_no_gradient(checkpointing):
    plain = MemoryStep(workload(mode="train"), CPU)
    other = MemoryStep(workload(mode="train", checkpointing=checkpointing), CPU)
    for step in (plain, other):
        step.forward()
        step.loss.backward()
    assert torch.equal(plain.loss, other.loss)
    assert sum(1 for _ in other.model.parameters()) == sum(1 for _ in plain.model.parameters())
    for name, parameter in plain.model.named_parameters():
        module, leaf = name.rpartition(".")[::2]
        modules = {other_name: module for module, other_name in other.names.items()}
        assert torch.equal(parameter.grad, getattr(modules[module], leaf).grad), name


@pytest.mark.parametrize("checkpointing", [*STRATEGIES, *INSIDE_BLOCKS, "every=3", "every=9"])
def test_recomputed_flops_are_the_predicted_ones(checkpointing):
    step = MemoryStep(workload(checkpointing=checkpointing, layers=5), CPU)
    with FlopCounterMode(display=False) as counter:
        step.forward()
        step.loss.backward()
    size = step.workload.size
    expected = recomputed_flops(size, checkpointing, causal=False)
    assert counter.get_total_flops() == model_flops(size, causal=False) + expected


# Checkpoints of other sizes than the first run by night.
CASES = [
    pytest.param(size, attention, *how, marks=[] if size == "scores" or "none" in how else [pytest.mark.nightly])
    for size, attention in (("scores", "reference"), ("inner", "sdpa"), ("weights", "flash"))
    for how in (("forward", "none"), *(("train", strategy) for strategy in STRATEGIES))
]


@pytest.mark.parametrize(("size", "attention", "mode", "checkpointing"), CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_predictions_are_what_the_allocator_hands_out(size, attention, precision, mode, checkpointing):
    """Formula, fake tensors and the CPU allocator's own events agree.

    Moments between those that the formula counts hold up to 1 % more. On a CPU two things are different from a GPU:
    flash attention computes tiles one by one, and the loss in bf16 makes an fp32 copy of the logits.
    """
    cell = workload(size, checkpointing, mode=mode, precision=precision, attention=attention)
    traced = timeline_peaks(predicted_timeline(cell).timeline)
    peak = max(phase.allocated for phase in traced)
    predicted = cell.training.predicted_peak(checkpointing)
    assert peak == pytest.approx(predicted.total, rel=0.01)
    if attention == "flash":
        return
    step = MemoryStep(cell, CPU)
    step()
    timeline, _ = record(step, follow_operations=False)
    for phase, measured_peak in zip(traced, timeline_peaks(timeline), strict=True):
        if not (phase.phase == "loss" and precision == "bf16"):
            assert measured_peak.allocated == pytest.approx(phase.allocated, rel=0.001), phase.phase


@pytest.mark.parametrize("checkpointing", INSIDE_BLOCKS)
@pytest.mark.parametrize(
    ("size", "attention", "precision"), [("scores", "reference", "bf16"), ("inner", "sdpa", "fp32")]
)
def test_checkpoints_inside_blocks_hold_what_is_predicted(size, attention, precision, checkpointing):
    """Of two moments, at the end of the loss, where bf16 has no cast of the logits' gradient yet, and the widest."""
    cell = workload(size, checkpointing, mode="forward-backward", precision=precision, attention=attention)
    traced = {peak.phase: peak.allocated for peak in timeline_peaks(predicted_timeline(cell).timeline)}
    predicted = {moment.moment: moment.total for moment in cell.training.widest_moments(checkpointing)}
    assert traced["backward"] == pytest.approx(max(predicted.values()), rel=0.01)
    cast = 2 * cell.training.tokens * cell.training.size.vocab_size if precision == "bf16" else 0
    assert traced["loss"] == predicted["loss"] - cast


def test_recorded_step_names_modules_as_without_checkpoints():
    step = MemoryStep(workload(checkpointing="every=2"), CPU)
    step()
    timeline, _ = record(step, follow_operations=True)
    recomputed = [region for region in timeline.regions if region.name == RECOMPUTATION]
    assert len(recomputed) == 2
    exponentials = [a for a in timeline.allocations if a.origin.operation == "exp" and a.phase == "backward"]
    assert ("activations", "layers.1.attn") in {(a.category, a.origin.module) for a in exponentials}
    gradients = {a.parameter for a in timeline.allocations if a.category == "gradients"}
    assert gradients == {f"{name}.weight" for module, name in step.names.items() if hasattr(module, "weight")}
    assert len(gradients) == 3 * 9 + 3
    modules = {a.origin.module for a in timeline.allocations if a.origin.code.endswith(" forward")}
    assert "layers.2.attn" in modules
    assert "positional_encoder" not in modules, "all blocks share it, so it says nothing"


@pytest.mark.parametrize(
    ("checkpointing", "layers", "micro_batches", "settings"),
    [
        ("none", 10, 1, {}),
        ("none", 11, 1, {"optimizer": "adamw", "precision": "bf16", "attention": "sdpa", "kernels": "fused"}),
        ("block", 10, 2, {"optimizer": "fused", "attention": "flash"}),
        pytest.param("every=2", 23, 1, {"precision": "bf16"}, marks=pytest.mark.nightly),
        pytest.param("sublayer", 10, 1, {"mode": "forward-backward"}, marks=pytest.mark.nightly),
    ],
)
def test_many_blocks_are_traced_as_few(checkpointing, layers, micro_batches, settings, monkeypatch):
    """The same prediction as of all blocks, from steps of a dozen."""
    cell = replace(workload("inner", checkpointing, layers, **settings), micro_batches=micro_batches)
    built = []

    def counted(workload, *args):
        built.append(workload.training.size.num_layers)
        return whole(workload, *args)

    whole = prediction._traced_whole
    monkeypatch.setattr(prediction, "_traced_whole", counted)
    repeated = predict_memory(cell.configuration(), silent)
    assert len(built) == 3
    assert sum(built) < layers
    monkeypatch.setattr(prediction, "repeated", lambda timelines, times: None)
    assert predict_memory(cell.configuration(), silent) == repeated
    assert built[-1] == layers


def test_unlike_blocks_are_traced_all(monkeypatch):
    """Where a step of one block more does not repeat what the last added."""
    few, more, most = (predicted_timeline(workload("weights", "nested", layers=n)).timeline for n in (2, 3, 4))
    assert prediction.repeated((few, more, most), 10) is None


def test_first_step_makes_the_optimizers_state():
    """Without warm-up; and one block has no neighbour to compare with."""
    step = MemoryStep(workload("weights", "nested", layers=1), CPU)
    timeline, _ = record(step, follow_operations=True)
    parameters = sum(parameter.nbytes for parameter in step.model.parameters())
    assert timeline.bytes_by_category()["optimizer state"][0] == 0
    assert timeline.bytes_by_category()["optimizer state"][-1] == 2 * parameters
    assert block_changes(timeline, ["layers.0"]) is None


def test_cuda_path_sees_what_the_fake_trace_predicts(monkeypatch):
    """Counters and history of a fake CUDA allocator, from which the step's tensors are said to come."""
    cell = workload("weights", "every=2")
    allocator = FakeCudaAllocator(monkeypatch)
    with AllocateFrom(allocator):
        step = MemoryStep(cell, CPU)
        step()
        step.device = DEVICE
        counted = counted_peaks(step)
        timeline, history = record(step, follow_operations=True)
    listed = {peak.phase: peak.allocated for peak in timeline_peaks(timeline)}
    traced = {peak.phase: peak.allocated for peak in timeline_peaks(predicted_timeline(cell).timeline)}
    assert timeline.lost_events == 0
    for peak in counted:
        assert peak.reserved == 2 * peak.allocated
        # Counters round every allocation up to 512 bytes; the history's beginning is the counters'.
        assert listed[peak.phase] == pytest.approx(peak.allocated, rel=0.05)
        assert listed[peak.phase] == pytest.approx(traced[peak.phase], rel=0.1)
    by_category = timeline.bytes_by_category()
    parameters = sum(parameter.nbytes for parameter in step.model.parameters())
    assert by_category["parameters"][0] == parameters
    assert by_category["optimizer state"][0] == 2 * parameters
    assert max(by_category["gradients"]) == parameters
    assert sum(sizes[0] for sizes in by_category.values()) == allocator.allocated - 512, "less the loss"
    assert len([region for region in timeline.regions if region.name == RECOMPUTATION]) == 2
    assert history.snapshot["device_traces"][1]
    backward = [a for a in timeline.allocations if a.phase == "backward" and a.category == "gradients"]
    assert {a.origin.module for a in backward} >= {"layers.0.ffn.w1", "layers.2.attn.q_proj", "lm_head"}


def test_compiled_cell(monkeypatch):
    """Compiled code is recorded without looking into it: phases, gradients, and a block that saves less."""
    compile_with_inductor = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda code, **settings: compile_with_inductor(code, backend="aot_eager_decomp_partition")
    )
    torch.compiler.reset()
    compiled, eager = (
        measure_memory(workload("inner", compile=mode).configuration(), silent).derived for mode in ("block", "off")
    )
    torch.compiler.reset()
    assert [phase["phase"] for phase in compiled["phases"]] == ["forward", "loss", "backward", "optimizer"]
    assert {group["operation"] for group in compiled["largest"]} == {""}
    assert compiled["block"] == {
        "gradients": eager["block"]["gradients"],
        "forward_growth": None,
        "backward_change": None,
    }
    sizes = [sum(tensor["size"] for tensor in derived["saved_tensors"]) for derived in (compiled, eager)]
    assert sizes[0] < sizes[1]
    assert compiled["peak_gib"] < eager["peak_gib"]
    assert compiled["traced"] == eager["traced"]


def test_trace_of_compiled_and_fp16_workloads():
    """Compiled code is traced eagerly, fp16 as bf16: neither would run on fake CPU tensors."""
    bf16 = predicted_timeline(workload(precision="bf16")).timeline.totals()
    assert predicted_timeline(workload(precision="fp16", compile="block")).timeline.totals() == bf16


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [*STRATEGIES, *INSIDE_BLOCKS])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpu_cell(checkpointing, precision, tmp_path):
    """Counters, history and predictions agree on a GPU, and the snapshot opens."""
    # As between the cells of a sweep: a step's modules and hooks refer to each other, so only the collector frees them.
    release_memory()
    size = ModelSize("gpu", 512, 2048, num_layers=6, num_heads=8, vocab_size=10_000, context=512, batch_size=4)
    training = Workload(size, precision=precision, device="cuda", warmup=1, steps=1)
    cell = MemoryWorkload(training, checkpointing, snapshot=str(tmp_path))
    outcome = measure_memory(cell.configuration(), silent)
    derived = outcome.derived
    assert derived["lost_events"] == 0
    for phase in derived["phases"]:
        parts = ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")
        assert sum(phase[part] for part in parts) == pytest.approx(phase["allocated"], rel=0.02)
        assert phase["reserved"] >= phase["allocated"]
    # Workspaces of cuBLAS and what other tests left are as large as this small model.
    of_the_step = derived["peak_gib"] - max(phase["other"] for phase in derived["phases"]) / 2**30
    assert derived["predicted_gib"] == pytest.approx(of_the_step, rel=0.1)
    assert max(peak["allocated"] for peak in derived["traced"]) / 2**30 == pytest.approx(of_the_step, rel=0.1)
    backward = [group for group in derived["largest"] if group["phase"] == "backward" and group["category"] != "other"]
    assert any("layers." in group["module"] and "Backward" in group["operation"] for group in backward)
    assert any("model.py:" in group["code"] for group in derived["largest"])
    snapshot = pickle.loads(Path(derived["snapshot"]).read_bytes())
    assert "entries" in torch.cuda._memory_viz.trace(snapshot)


FILE = Path(__file__).parents[1] / "user_models.py"


def users(model, **settings):
    size = choose_size("tiny", context=64, batch_size=2, vocab_size=50, d_model=32, d_ff=64, num_heads=4)
    training = Workload(size, device="cpu", warmup=1, steps=1, user=UserCode(f"{FILE}:{model}"), **settings)
    return MemoryWorkload(training, "none", trace=True)


@pytest.mark.parametrize("model", ["Converted", "Deciding"])
def test_models_that_convert_copy_and_decide_are_traced(model):
    """What a model decides by its tokens is as with real ones: a mask that it does not make is not counted."""
    outcome = measure_memory(users(model).configuration(), silent)
    traced = max(peak["allocated"] for peak in outcome.derived["traced"]) / 2**30
    assert traced == pytest.approx(outcome.derived["peak_gib"], rel=0.06)
    guesses = [note for note in outcome.derived["notes"] if "with zeros where its step reads numbers" in note]
    # But a number is not known.
    assert len(guesses) == (model == "Deciding")
    assert any("without oneDNN" in note for note in outcome.derived["notes"]) == torch.backends.mkldnn.is_available()


def test_our_attention_in_another_model_holds_what_torchs_does():
    cells = [users("causal_by_flag", attention=attention) for attention in ("flash", "sdpa")]
    flash, torchs = (max(predicted_timeline(cell).timeline.totals()) for cell in cells)
    assert flash == pytest.approx(torchs, rel=0.06)
    assert torch.nn.functional.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_failing_prediction_is_one_sentence_and_the_rest_is_measured():
    configuration = users("Counting").configuration()
    refused = guarded(predict_memory, configuration, silent)
    assert refused.status == "unsupported"
    sentence = "user_models.py:Counting: no memory is predicted, as its step does not run on tensors without values ("
    assert sentence in refused.reason
    assert "\n" not in refused.reason
    measured = measure_memory(configuration, silent)
    assert measured.status == "ok"
    assert refused.reason in measured.derived["notes"]
