"""Workloads and their configurations, as results files hold them."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336sys.errors import UsageError
from cs336sys.results.model import read_results
from cs336sys.settings.operations import AttentionWorkload, CollectiveWorkload, KernelWorkload
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.profiling import LossWorkload, MemoryWorkload, ProfileWorkload
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload
from cs336sys.settings.verification import VerifiedWorkload

SAVED = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.jsonl.gz"))

KINDS = {
    "bench": Workload,
    "losses": LossWorkload,
    "nsys": ProfileWorkload,
    "memprof": MemoryWorkload,
    "ddp": ParallelWorkload,
    "shard": ParallelWorkload,
    "allreduce": CollectiveWorkload,
    "flash": AttentionWorkload,
    "attn": AttentionWorkload,
    "kernels": KernelWorkload,
}

# What a sweep adds to a workload's own configuration.
ADDED = {"round", "interleave", "interleaved", "warmup", "steps", "board"}
# Of settings that were removed.
REMOVED = {"high_priority"}


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_saved_configurations_come_back_as_they_are(path):
    for cell in read_results(path).cells:
        if cell.command == "precision":
            # Sums and dtypes of the course's toy model, which no workload describes.
            continue
        if cell.configuration.get("strategy") == "bucketed-step":
            # Measured once and removed since.
            continue
        configuration = KINDS[cell.command].from_configuration(cell.configuration).configuration()
        added = cell.configuration.keys() - configuration.keys()
        assert configuration == {name: value for name, value in cell.configuration.items() if name not in added}
        assert added <= ADDED | REMOVED


def test_file_names_of_different_steps_differ():
    one = Workload(SIZES["tiny"], optimizer="adamw")
    changed = {
        "size": replace(SIZES["tiny"], context=64),
        "mode": "forward",
        "precision": "bf16",
        "tf32": True,
        "compile": "block",
        "attention": "sdpa",
        "kernels": "fused",
        "optimizer": "fused",
        "state_dtype": "bf16",
        "update": "backward",
        "cuda_graph": "on",
        "warmup": 9,
    }
    others = [replace(one, **{name: value}) for name, value in changed.items()]
    assert len({one.name, *(other.name for other in others)}) == 1 + len(others)
    assert one.name == replace(one, steps=7, seed=3, device="cpu").name


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: KernelWorkload("rope", "ours", 4, 8), "--head-dim: op 'rope' needs one"),
        (lambda: KernelWorkload("rms-norm", "chunked", 4, 8), "unknown implementation 'chunked'"),
        (lambda: AttentionWorkload("eager", 1, 2, 0, 8), "--context 0: must be at least 1"),
        (lambda: CollectiveWorkload("gloo", "all_gether", 2, "fp32", 4), "unknown collective 'all_gether'"),
        (lambda: CollectiveWorkload("gloo", "all_reduce", 2, "fp32", 4, iterations=0), "--steps 0: must be at least 1"),
        (
            lambda: VerifiedWorkload(Workload(SIZES["tiny"], device="cpu"), "ddp", backend="nccl"),
            "--backend nccl: communicates between GPUs; choose gloo, or --device cuda",
        ),
    ],
)
def test_records_refuse_what_options_refuse(make, sentence):
    with pytest.raises(UsageError, match=sentence):
        make()


def test_a_cell_has_the_default_of_what_it_cannot_have():
    choices = {"op": ["rope", "swiglu"], "tokens": [4], "width": [8], "head_dim": 64, "vocab_size": []}
    assert [(cell["op"], cell["head_dim"], cell["vocab_size"]) for cell in KernelWorkload.combinations(choices)] == [
        ("rope", 64, None),
        ("swiglu", None, None),
    ]
    buckets = {"strategy": ["naive", "bucketed"], "bucket_mb": ["block", 1.0], "mesh": "tp=2"}
    assert [tuple(cell.values()) for cell in ParallelWorkload.combinations(buckets)] == [
        ("naive", None, "tp=2"),
        ("bucketed", "block", "tp=2"),
        ("bucketed", 1.0, "tp=2"),
    ]
    # Nowhere possible: a value that somebody chose stays, and is refused; the option's own default gives way.
    (alone,) = ParallelWorkload.combinations({"strategy": ["naive"], "bucket_mb": ["block"]})
    assert alone["bucket_mb"] is None
    (chosen,) = ParallelWorkload.combinations({"strategy": ["naive"], "bucket_mb": [1.0]})
    assert chosen["bucket_mb"] == 1.0
