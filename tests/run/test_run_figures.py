"""What a resumed sweep takes from its file, and how sweeps and processes end, written down in ``figures.txt``."""

# Further names are used in figures.txt.
# ruff: noqa: F401

import signal
from pathlib import Path
from unittest.mock import patch

import typer
from written_figures import figures_test

from cs336sys.errors import INTERRUPTED, TERMINATED, CapabilityError
from cs336sys.processes import parent
from cs336sys.processes.parent import cause_of_death
from cs336sys.results.model import Cell, Results, Run, configuration_key, read_results
from cs336sys.run.sweep import Sweep, known_cells, run_of_one_machine

ENVIRONMENT = {"torch_threads": 1, "git_commit": "15ad9114a32c", "source_digest": "0123456789abcdef"}


def run(run_id, torch="2.11", **environment):
    machine = {"gpu": "NVIDIA H200", "torch": torch}
    return Run(run_id, "2026-01-01T00:00:00+00:00", (), machine, ENVIRONMENT | environment)


NOW = run("now")


def cell(run_id, status="ok", command="bench", **configuration):
    return Cell(command, configuration, status, run_id=run_id)


def known(runs, cells, configurations=({"size": "small"},), *, take_any=False):
    """Return the runs that the cells to skip are of, by configuration, and what is said."""
    results = Results({run.run_id: run for run in runs}, tuple(cells))
    known, notes = known_cells(results, "bench", configurations, NOW, take_any=take_any)
    keys = [configuration_key(configuration) for configuration in configurations]
    return tuple(known[key].run_id if key in known else None for key in keys), *notes


def both(*arguments):
    """Return what ``--resume`` and ``--resume-any`` take."""
    return [known(*arguments, take_any=take_any) for take_any in (False, True)]


def in_turn(attention, **settings):
    return {"attention": attention, "interleave": "attention", "interleaved": "sdpa,flash"} | settings


PAIRS = [in_turn(attention, round=number) for number in (1, 2) for attention in ("sdpa", "flash")]


def machine(*run_ids):
    """Return the run whose machine stands in a title of cells of these runs."""
    results = Results({"other": run("other", torch="2.10"), "alike": run("alike")}, ())
    found = run_of_one_machine([cell(run_id) for run_id in run_ids], results, NOW)
    return found and found.run_id


def files(setting, value, *run_ids):
    """Return the run whose cell is taken where a cell shall leave files in ``value``."""
    cells = {
        "with": cell("with", size="small", **{setting: "folder"}),
        "elsewhere": cell("elsewhere", size="small", **{setting: "another"}),
        "without": cell("without", size="small", **{setting: None}),
    }
    asked = {"size": "small", setting: value}
    return known([run(name) for name in cells], [cells[name] for name in run_ids], [asked])


def end(statuses, interruption=None):
    """Return how a sweep with these cells ends: its exit code, or a sentence."""
    cells = tuple(Cell("bench", {}, status, reason="because") for status in statuses.split())
    try:
        Sweep(cells, None, interruption).exit()
    except typer.Exit as ended:
        return ended.exit_code
    except CapabilityError as error:
        return str(error)
    return 0


def died(exit_code, before, now):
    """Return what is said of a process that ended so, where the kernel has killed so many before and since."""
    with patch.object(parent, "out_of_memory_kills", lambda: now):
        return cause_of_death(exit_code, before)


def test_the_results_in_the_documentation_can_be_resumed():
    """Their runs say little of the code, so only --resume-any takes them."""
    for path in sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.jsonl.gz")):
        results = read_results(path)
        command = results.cells[0].command
        wanted = [cell for cell in results.cells if cell.command == command]
        configurations = [cell.configuration for cell in wanted]
        known, _ = known_cells(results, command, configurations, NOW, take_any=True)
        assert set(known) == {configuration_key(one.configuration) for one in wanted if one.status != "error"}, path
        assert known_cells(results, command, configurations, NOW, take_any=False)[0] == {}


test_figures_are_those_written_down = figures_test(globals())
