"""Models of the user's on Gloo ranks that all tests share."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import sharding_ranks

from cs336sys.experiments.weight_check import TOLERANCES
from cs336sys.sizes import choose_size
from cs336sys.workload import ParallelWorkload, UserCode, Workload

SIZE = choose_size("tiny", context=16, batch_size=4, vocab_size=50, d_model=32, d_ff=64, num_heads=4)
FILE = Path(__file__).parents[2] / "user_models.py"
IMAGES = {"batch": f"{FILE}:images", "loss": f"{FILE}:classes"}


def cell(model, strategy, checkpointing="none", *, precision="fp32", optimizer="course", attention="reference", **user):
    training = Workload(
        SIZE,
        device="cpu",
        precision=precision,
        optimizer=optimizer,
        attention=attention,
        user=UserCode(f"{FILE}:{model}", **user),
    )
    bucket, prefetch = ("block" if strategy == "bucketed" else None), (1 if strategy == "fsdp" else None)
    return ParallelWorkload(training, strategy, bucket_mb=bucket, prefetch=prefetch, checkpointing=checkpointing)


def test_ranks_train_what_one_process_trains(ranks):
    """With dropout, batch norm, tied weights, an optimizer of the user's, layers that only the whole model fills."""
    cells = [
        *(cell("Encoder", strategy) for strategy in ("bucketed", "torch", "optimizer", "fsdp", "torch-fsdp")),
        cell("Encoder", "fsdp", "block", attention="flash"),
        *(cell("Classifier", strategy, optimizer=f"{FILE}:sgd", **IMAGES) for strategy in ("bucketed", "optimizer")),
        cell("Classifier", "fsdp", optimizer=f"{FILE}:sgd", **IMAGES),
        cell("ours", "fsdp"),
    ]
    if importlib.util.find_spec("transformers") is not None:
        cells += [cell("gpt2", strategy) for strategy in ("torch", "optimizer", "fsdp")]
        cells += [cell("llama", "bucketed"), cell("llama", "fsdp", "block")]
    found = zip(*ranks().run(sharding_ranks.verify_all, cells), strict=True)
    for one, differences in zip(cells, found, strict=True):
        largest = max(difference.relative for difference in differences)
        assert largest < TOLERANCES["fp32"] / 10, (one.training.user.model, one.strategy)


def test_in_half_precision_norms_of_the_users_return_what_matrices_expect(ranks):
    models = ["Encoder"] + (["llama"] if importlib.util.find_spec("transformers") is not None else [])
    cells = [cell(model, "fsdp", precision="bf16") for model in models]
    for one, differences in zip(cells, zip(*ranks().run(sharding_ranks.verify_all, cells), strict=True), strict=True):
        largest = max(difference.relative for difference in differences)
        assert largest < TOLERANCES["bf16"], one.training.user.model
        # Checked against one that computes in half precision as well: in fp32 it is farther off.
        assert largest < 0.05, replace(one, strategy="unsynchronized")
