"""What the check of ``ddp`` and ``shard`` says of models that are not ours: no false alarms, and faults are found."""

import pickle
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import training_ranks
from training_ranks import outcome_of, worst

from cs336sys.commands.rank_training.rank import explaining_errors_of_rank
from cs336sys.errors import CapabilityError, UserCodeError
from cs336sys.parity.rounding import TOLERANCES
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import UserCode, Workload
from cs336sys.training.ranks.strategies import torch_fsdp
from cs336sys.training.step import TrainStep

FILE = Path(__file__).parents[2] / "user_models.py"
SIZE = choose_size("tiny", context=16, batch_size=4, vocab_size=50, d_model=32, d_ff=64, num_heads=4)


def cell(model, strategy, *, compile="off", loss=None):
    user = UserCode(f"{FILE}:{model}", loss=loss and f"{FILE}:{loss}")
    training = Workload(SIZE, device="cpu", warmup=1, steps=1, compile=compile, user=user)
    return ParallelWorkload(training, strategy, prefetch=1 if strategy == "fsdp" else None)


@pytest.mark.parametrize("strategy", ["naive", "torch", "optimizer-flat", "fsdp"])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_fault(ranks, strategy):
    ranks()
    outcome = outcome_of(cell("Attentive", strategy))
    assert outcome.status == "ok", outcome.reason
    # What is judged by its rounding is not what is reported.
    assert outcome.derived["relative_difference_percent"] < 100 * TOLERANCES["fp32"]
    (note,) = [note for note in outcome.derived["notes"] if "rounds elsewhere" in note]
    assert "key.bias" in note


def test_weights_in_bf16_are_judged_by_their_rounding(ranks):
    ranks()
    for strategy in ("naive", "fsdp"):
        assert outcome_of(cell("attentive_in_bf16", strategy)).status == "ok"


@pytest.mark.parametrize(
    ("model", "how", "parameter"),
    [
        ("Attentive", "tiny left out", "tiny"),
        ("Attentive", "query left out", "query.bias"),
        ("Attentive", "sum", None),
        ("Attentive", "stale", None),
        ("attentive_in_bf16", "query left out", "query.bias"),
        ("attentive_in_bf16", "sum", None),
        ("Recurrent", "sum", None),
    ],
)
def test_faults_are_found_in_user_code_with_such_gradients(ranks, model, how, parameter):
    """A gradient of 1e-11 moves no weight; it is found before the optimizer."""
    differences = ranks().run(training_ranks.verify_broken, cell(model, "overlap"), how)
    difference = worst(differences)
    assert difference.relative > 0.3 > difference.allowed
    assert parameter in (None, difference.parameter)
    assert difference.of_gradients == (how == "tiny left out")


@pytest.mark.parametrize("setting", [{"cuda_graph": "on"}, {"precision": "fp16"}])
def test_gradients_that_move_no_weight_are_compared_where_steps_are_replayed_or_scaled(ranks, setting):
    overlapped = cell("Attentive", "overlap")
    changed = replace(overlapped, training=replace(overlapped.training, optimizer="fused", **setting))
    difference = worst(ranks().run(training_ranks.verify_in_graphs, changed, "tiny left out"))
    assert difference.relative > 0.3 > difference.allowed
    assert (difference.parameter, difference.of_gradients) == ("tiny", True)


@pytest.mark.parametrize("strategy", ["naive", "torch-fsdp", "fsdp"])
def test_random_layers_are_compared_with_the_same_random_numbers(ranks, strategy):
    ranks()
    outcome = outcome_of(cell("Recurrent", strategy))
    assert outcome.status == "ok", outcome.reason
    assert outcome.derived["relative_difference_percent"] < 100 * TOLERANCES["fp32"]


def test_results_that_cannot_be_compared_are_named(ranks):
    ranks()
    outcome = outcome_of(cell("Unlike", "naive"))
    assert outcome.status == "ok"
    assert "built twice from one seed it is not the same model" in str(outcome.derived["notes"])
    outcome = outcome_of(cell("Attentive", "naive", loss="of_tokens_in_all"))
    assert outcome.status == "wrong"
    assert "the loss of a batch must be the mean of its parts' losses: that is " in outcome.reason


def test_a_traceback_of_a_rank_shows_the_users_line(monkeypatch):
    monkeypatch.setenv("CS336SYS_DEBUG", "1")
    with pytest.raises(UserCodeError) as raised, explaining_errors_of_rank(cell("raises", "naive")):
        TrainStep(cell("raises", "naive").training, torch.device("cpu"))
    # As it comes from a rank: without its cause.
    arrived = pickle.loads(pickle.dumps(raised.value))
    assert 'raise KeyError("no such size")' in "".join(traceback.format_exception(arrived))


def test_parameters_that_torchs_ddp_waits_for_in_vain_are_one_sentence(ranks):
    ranks()
    with pytest.raises(CapabilityError, match="and a step of this model used only some; choose another strategy"):
        outcome_of(cell("Skipping", "torch"))
    assert outcome_of(cell("Skipping", "overlap")).status == "ok"


def test_layers_that_one_rank_alone_skips_are_one_sentence_under_fsdp(ranks):
    ranks()
    with pytest.raises(CapabilityError, match="as where a model skips other layers on each rank"):
        outcome_of(cell("SkippingByRank", "fsdp"))


@pytest.mark.parametrize("text", ["Connection reset by peer", "Connection closed by peer [127.0.0.1]", "Broken pipe"])
def test_every_way_to_lose_a_rank_of_other_collectives_is_that_sentence(text):
    workload = cell("SkippingByRank", "fsdp")
    with pytest.raises(CapabilityError, match="skips other layers"), explaining_errors_of_rank(workload):
        raise RuntimeError(f"[pair.cc:553] {text}")


def test_batch_norm_in_half_precision_under_torchs_fully_shard_is_one_sentence():
    user = UserCode(f"{FILE}:Classifier", batch=f"{FILE}:images", loss=f"{FILE}:classes")
    training = Workload(SIZE, device="cpu", precision="bf16", user=user)
    with pytest.raises(CapabilityError, match="combines batch norm weights in half precision with statistics in fp32"):
        torch_fsdp(ParallelWorkload(training, "torch-fsdp"), torch.device("cpu"), None)
