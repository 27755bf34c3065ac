"""Plans of ``memprof --plan`` are run: they stay under the limit, and without their last change they do not."""

import functools
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs336sys.accounting.memory import GIB
from cs336sys.commands.memprof.measure import bytes_with_shared_state, measure_memory, plan_memory
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.run.cells import guarded
from cs336sys.settings.memory_changes import changed, command_line, plans, possible_changes, sharded_bytes
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import UserCode, Workload
from cs336sys.training import memory_prediction as prediction
from cs336sys.training.memory_prediction import predict_memory, predicted_timeline, timeline_peaks

MODELS = Path(__file__).parents[1] / "user_models.py"
SIZE = choose_size("tiny", vocab_size=500, batch_size=8, context=64, num_layers=2)
# For plans that are traced change by change.
ONE_BLOCK = replace(SIZE, num_layers=1)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the package transformers"
)


def user(model, **others):
    references = {name: f"{MODELS}:{value}" for name, value in others.items()}
    return UserCode(model=f"{MODELS}:{model}", **references)


# Name, workload, and the part of its memory that it may use.
CASES = [
    pytest.param({}, 0.5, id="ours"),
    pytest.param(
        {"user": user("Classifier", batch="images", loss="classes")}, 0.7, id="convolutions", marks=pytest.mark.nightly
    ),
    pytest.param({"attention": "sdpa", "precision": "bf16"}, 0.6, id="ours-bf16", marks=pytest.mark.nightly),
    pytest.param({"user": user("llama")}, 0.6, id="llama", marks=[needs_transformers, pytest.mark.nightly]),
    pytest.param({"user": user("gpt2")}, 0.5, id="gpt2", marks=[needs_transformers, pytest.mark.nightly]),
    pytest.param({"user": user("Encoder")}, 0.5, id="encoder", marks=pytest.mark.nightly),
]


def quiet(stage):
    pass


def workload(size=SIZE, **settings):
    return MemoryWorkload(Workload(size, device="cpu", warmup=1, steps=1, **settings), trace=False)


def planned(cell, limit):
    outcome = plan_memory(cell.configuration() | {"limit_bytes": limit}, quiet)
    assert outcome.status == "ok"
    return outcome.derived


def traced_peak(cell):
    return max(peak.allocated for peak in timeline_peaks(predicted_timeline(cell).timeline))


def measured(cell):
    outcome = measure_memory(cell.configuration(), quiet)
    assert outcome.status == "ok", outcome
    return outcome.derived["peak_gib"] * GIB


@pytest.mark.parametrize(("settings", "part"), CASES)
def test_plan_fits_when_it_is_run_and_not_without_its_last_change(settings, part):
    cell = workload(ONE_BLOCK, **settings)
    base = traced_peak(cell)
    limit = part * base
    derived = planned(cell, limit)
    assert derived["base_bytes"] == base
    names = [(step["setting"], step["value"]) for step in derived["plan"]]
    assert "ranks" not in dict(names)
    by_name = {(change.setting, change.value): change for change in possible_changes(cell)}
    plan = [by_name[name] for name in names]
    peak = measured(changed(cell, plan))
    assert peak <= limit
    assert derived["plan"][-1]["peak_bytes"] == pytest.approx(peak, rel=0.02)
    assert measured(changed(cell, plan[:-1])) > limit


@needs_transformers
@pytest.mark.parametrize(("model", "passes"), [("llama", 3), ("qwen3", 4)])
def test_parts_of_a_batch_choose_their_mask_as_with_values(model, passes):
    """Transformers reads from the positions whether sequences are packed; a mask for that would take 4 % more."""
    size = replace(ONE_BLOCK, batch_size=passes, context=256)
    cell = replace(workload(size, user=user(model)), micro_batches=passes)
    assert not predicted_timeline(cell).guessed
    assert traced_peak(cell) == pytest.approx(measured(cell), rel=0.001)


@pytest.mark.parametrize("refusal", [UsageError, CapabilityError])
def test_our_own_refusal_is_not_taken_for_a_model_that_does_not_run_tiny(monkeypatch, refusal):
    def step(error, *arguments):
        raise error("no")

    cell = workload(ONE_BLOCK, user=user("Encoder"))
    monkeypatch.setattr(prediction, "MemoryStep", functools.partial(step, refusal))
    with pytest.raises(refusal):
        prediction._decisions(cell, torch.device("cpu"))
    monkeypatch.setattr(prediction, "MemoryStep", functools.partial(step, ValueError))
    assert prediction._decisions(cell, torch.device("cpu")) == {}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_formulas_of_several_passes_and_ranks_are_those_of_a_trace(parts, checkpointing):
    size = choose_size("tiny", d_model=256, d_ff=1024, num_layers=4, vocab_size=1000, batch_size=8, context=256)
    cell = MemoryWorkload(Workload(size, attention="sdpa"), checkpointing)
    passes = replace(cell, micro_batches=parts)
    traced = traced_peak(passes)
    assert 0.999 * traced < passes.peak.total
    assert passes.peak.total == pytest.approx(traced, rel=0.02)
    formula = next(change for change in possible_changes(cell) if change.value == f"optimizer x {parts}")
    assert bytes_with_shared_state(cell, parts) == pytest.approx(sharded_bytes(cell, formula), rel=0.02)


@pytest.mark.parametrize(
    ("vocabulary", "precision", "checkpointing"),
    [(500, "fp32", "none"), (500, "fp32", "block"), (8000, "fp32", "none"), (8000, "bf16", "none")],
)
def test_formula_of_one_sequence_a_part_is_exact(vocabulary, precision, checkpointing):
    size = choose_size("tiny", vocab_size=vocabulary, batch_size=4, context=64, num_layers=2)
    cell = MemoryWorkload(Workload(size, precision=precision), checkpointing, micro_batches=4)
    assert cell.peak.total == pytest.approx(traced_peak(cell), abs=64)


def test_sparse_gradients_are_refused_in_one_sentence():
    cell = workload(ONE_BLOCK, user=user("sparse_embedding"), mode="forward-backward")
    for measure in (predict_memory, measure_memory):
        outcome = guarded(measure, cell.configuration(), quiet)
        assert outcome.status == "unsupported"
        assert outcome.reason == (
            "a step makes a tensor of torch.sparse_coo, whose memory is not followed; make it dense, as with "
            "nn.Embedding(sparse=False)"
        )


def test_several_passes_train_as_one_does():
    from cs336sys.training.checkpoints import MemoryStep

    weights = []
    for passes in (1, 4):
        torch.manual_seed(0)
        step = MemoryStep(replace(workload(), micro_batches=passes), torch.device("cpu"))
        step()
        step()
        weights.append([parameter.detach().clone() for parameter in step.model.parameters()])
    torch.testing.assert_close(*weights, rtol=1e-3, atol=2e-5)


def test_plan_of_another_model_takes_more_gpus_last():
    """With so few sequences, in bf16 and checkpointed, little else is left to change."""
    training = Workload(replace(ONE_BLOCK, batch_size=2), precision="bf16", user=user("Encoder"))
    cell = MemoryWorkload(training, "block", trace=False)
    passes, moments, ranks = planned(cell, 1e15)["changes"]
    assert [change["setting"] for change in (passes, moments, ranks)] == ["micro_batches", "state_dtype", "ranks"]
    assert ranks["peak_bytes"] < moments["peak_bytes"] < passes["peak_bytes"]
    derived = planned(cell, ranks["peak_bytes"])
    assert [step["value"] for step in derived["plan"]] == ["optimizer x 2"]
    assert derived["command"].startswith("cs336sys shard --world-size 2 --strategy optimizer --model ")
    on_cpu = replace(cell, training=replace(training, device="cpu"))
    assert {change.setting for change in possible_changes(on_cpu)} == {"micro_batches"}


def test_a_step_that_fits_needs_no_plan_and_where_nothing_fits_the_least_is_told():
    on_paper = replace(workload(), training=replace(workload().training, device="auto"))
    assert planned(on_paper, 1e15)["plan"] == []
    derived = planned(on_paper, 1e5)
    assert (derived["plan"], derived.get("command")) == (None, None)
    assert 1e5 < derived["least_bytes"] < derived["base_bytes"]


def test_plans_are_ordered_by_price_and_have_one_change_for_each_setting():
    changes = possible_changes(replace(workload(), training=replace(workload().training, device="auto")))
    plans_by_price = plans(changes)
    prices = [sum(change.price for change in plan) for plan in plans_by_price]
    assert prices == sorted(prices)
    assert all(len({change.setting for change in plan}) == len(plan) for plan in plans_by_price)
    assert {change.setting for change in changes} == {
        "micro_batches", "attention", "kernels", "checkpointing", "precision", "state_dtype", "ranks",
    }  # fmt: skip


def test_command_line_says_what_differs_from_defaults():
    cell = replace(workload(attention="sdpa"), checkpointing="block", micro_batches=4)
    assert command_line(cell) == (
        "cs336sys memprof --size tiny --vocab-size 500 --context 64 --batch-size 8 --attention sdpa "
        "--device cpu --checkpoint block --micro-batches 4"
    )
    theirs = command_line(workload(user=user("llama")))
    assert theirs.startswith(f"cs336sys memprof --model {MODELS}:llama --size tiny")
