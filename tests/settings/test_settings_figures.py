"""What sizes, workloads and references are and refuse, written down in ``figures.txt`` (tests/written_figures.py)."""

# Further names are used in figures.txt.
# ruff: noqa: F401

from pathlib import Path

import pytest
from written_figures import outcome, read_figures, rows_of, write_figures

from cs336sys.settings.operations import AttentionWorkload, CollectiveWorkload, KernelWorkload
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import SIZES, choose_size
from cs336sys.settings.training import UserCode, Workload
from cs336sys.settings.user_code import source_file
from cs336sys.settings.verification import VerifiedWorkload

PATH = Path(__file__).with_name("figures.txt")


def workload(**settings):
    return outcome(Workload, SIZES["tiny"], **settings)


def settings_of(kind, *names, **choices):
    """Return the settings of these names of all cells that a command with these choices has."""
    return [tuple(cell[name] for name in names) for cell in kind.combinations(choices)]


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_figures_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


if __name__ == "__main__":
    write_figures(PATH, globals())
