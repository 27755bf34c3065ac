"""Workloads and their configurations, as results files hold them."""

from pathlib import Path

import pytest

from cs336sys.results import LATER_SETTINGS, configuration_key, read_results
from cs336sys.sizes import choose_size
from cs336sys.workload import (
    AttentionWorkload,
    CollectiveWorkload,
    KernelWorkload,
    LossWorkload,
    MemoryWorkload,
    ParallelWorkload,
    ProfileWorkload,
    Workload,
)

SAVED = sorted((Path(__file__).parents[1] / "docs" / "results").glob("*.jsonl.gz"))

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


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_saved_configurations_come_back_as_they_are(path):
    for cell in read_results(path).cells:
        if cell.command == "precision":
            # Sums and dtypes of the course's toy model, which no workload describes.
            continue
        configuration = KINDS[cell.command].from_configuration(cell.configuration).configuration()
        for name, value in LATER_SETTINGS.items():
            if name not in cell.configuration:
                assert configuration.pop(name, value) == value
        saved = list(cell.configuration.items())
        assert saved[: len(configuration)] == list(configuration.items())
        assert {name for name, _ in saved[len(configuration) :]} <= ADDED


def test_a_file_saved_before_a_setting_means_what_it_was_then():
    now = Workload(choose_size("tiny")).configuration()
    before = {name: value for name, value in now.items() if name not in LATER_SETTINGS}
    assert before != now
    assert configuration_key(before) == configuration_key(now)
    assert configuration_key(before) != configuration_key(now | {"cuda_graph": "on"})
    assert configuration_key(before, ignore=("cuda_graph",)) == configuration_key(
        now | {"cuda_graph": "on"}, ("cuda_graph",)
    )
