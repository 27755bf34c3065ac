"""Workloads and their configurations, as results files hold them."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336sys.results.model import read_results
from cs336sys.settings.operations import AttentionWorkload, CollectiveWorkload, KernelWorkload
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.profiling import LossWorkload, MemoryWorkload, ProfileWorkload
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload

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


def test_configuration_of_8b_does_not_depend_on_its_default_precision():
    workload = Workload(SIZES["8b"], precision="fp32")
    assert Workload.from_configuration(workload.configuration()).precision == "fp32"
    assert workload.configuration()["precision"] == "fp32"
