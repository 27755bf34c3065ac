"""What sizes, workloads and references are and refuse, written down in ``figures.txt`` (tests/written_figures.py).

And what becomes of configurations that results files hold.
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

from pathlib import Path

import pytest
from written_figures import figures_test, outcome

from cs336sys.results.model import read_results
from cs336sys.settings.operations import AttentionWorkload, CollectiveWorkload, KernelWorkload
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.profiling import LossWorkload, MemoryWorkload, ProfileWorkload
from cs336sys.settings.sizes import SIZES, choose_size
from cs336sys.settings.training import UserCode, Workload
from cs336sys.settings.user_code import source_file
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


def workload(**settings):
    return outcome(Workload, SIZES["tiny"], **settings)


def changed(**settings):
    """Return what these settings change in the configuration of a tiny step."""
    usual = workload().configuration()
    return {name: value for name, value in workload(**settings).configuration().items() if usual.get(name) != value}


def settings_of(kind, *names, **choices):
    """Return the settings of these names of all cells that a command with these choices has."""
    return [tuple(cell[name] for name in names) for cell in kind.combinations(choices)]


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
        # Settings that the file's version did not have are None.
        newer = {name for name, value in configuration.items() if value is None} - cell.configuration.keys()
        configuration = {name: value for name, value in configuration.items() if name not in newer}
        added = cell.configuration.keys() - configuration.keys()
        assert configuration == {name: value for name, value in cell.configuration.items() if name not in added}
        assert added <= ADDED | REMOVED


test_figures_are_those_written_down = figures_test(globals())
