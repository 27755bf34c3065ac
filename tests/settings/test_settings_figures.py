"""What sizes, workloads and references are and refuse, written down in ``figures.txt`` (tests/written_figures.py)."""

# Further names are used in figures.txt.
# ruff: noqa: F401

from written_figures import figures_test, outcome

from cs336sys.settings.operations import AttentionWorkload, CollectiveWorkload, KernelWorkload
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import SIZES, choose_size
from cs336sys.settings.training import UserCode, Workload
from cs336sys.settings.user_code import source_file
from cs336sys.settings.verification import VerifiedWorkload


def workload(**settings):
    return outcome(Workload, SIZES["tiny"], **settings)


def settings_of(kind, *names, **choices):
    """Return the settings of these names of all cells that a command with these choices has."""
    return [tuple(cell[name] for name in names) for cell in kind.combinations(choices)]


test_figures_are_those_written_down = figures_test(globals())
