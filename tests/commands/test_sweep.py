"""A sweep keeps what it measured, whatever happens to its cells."""

import json

import pytest
import typer

from cs336sys.commands.resuming import ResumeOptions
from cs336sys.commands.sweep import Sweep, run_sweep
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.results import Cell, read_results

ACTIONS = ("measure", "out of memory", "print", "kill", "measure again", "sleep", "unsupported")
RESUME = ResumeOptions(resume=True)
STATUSES = ["ok", "oom", "ok", "error", "ok", "timeout", "unsupported"]


@pytest.fixture(autouse=True)
def _find_fake_cells(monkeypatch):
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "measure"))


def sweep(actions, **options):
    return run_sweep("bench", "fake_cells:measure", [{"action": action} for action in actions], **options)


def test_failed_cells_end_neither_the_sweep_nor_the_command(tmp_path):
    path = tmp_path / "r.jsonl"
    measured = sweep(ACTIONS, save=path, cell_timeout=12)
    assert [cell.status for cell in measured.cells] == STATUSES
    measured.exit()
    results = read_results(path)
    assert list(results.runs) == [measured.run.run_id]
    assert results.cells == measured.cells


def test_resume_measures_only_what_is_missing_or_may_succeed_now(tmp_path):
    path = tmp_path / "r.jsonl"
    first = sweep(("measure", "out of memory", "raise", "unsupported"), save=path)
    second = sweep(("measure", "out of memory", "raise", "unsupported", "print"), save=path, resume=RESUME)
    assert [cell.status for cell in second.cells] == ["ok", "oom", "error", "unsupported", "ok"]
    assert second.cells[:2] == first.cells[:2]
    measured_again = read_results(path).cells[len(first.cells) :]
    assert [cell.configuration["action"] for cell in measured_again] == ["raise", "print"]


def test_resume_measures_again_what_was_measured_under_other_conditions(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    sweep(("measure",), save=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    now = lines[0]["environment"].get("OMP_NUM_THREADS")
    lines[0]["environment"]["OMP_NUM_THREADS"] = "77"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    taken = sweep(("measure",), save=path, resume=ResumeOptions(resume_any=True))
    assert len(read_results(path).cells) == 1
    assert taken.run == read_results(path).runs[taken.cells[0].run_id], "titles name the machine of the cells"
    assert capsys.readouterr().err.startswith("--resume-any takes 1 cell that the file holds from other conditions: ")
    sweep(("measure",), save=path, resume=RESUME)
    assert len(read_results(path).cells) == 2
    assert f"OMP_NUM_THREADS (77 then, {now} now)" in capsys.readouterr().err


def test_resume_on_a_file_that_is_not_there_yet_starts_it(tmp_path):
    assert sweep(("measure",), save=tmp_path / "r.jsonl", resume=RESUME).cells[0].status == "ok"


def test_fresh_worker_measures_every_cell_in_a_process_of_its_own():
    cells = sweep(("measure", "print"), fresh_worker=True).cells
    assert len({cell.derived["pid"] for cell in cells}) == 2


def test_bad_settings_are_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(UsageError, match="cannot write results"):
        sweep(("measure",), save=tmp_path)
    with pytest.raises(UsageError, match="--cell-timeout 0: must be more than 0 seconds"):
        sweep(("measure",), cell_timeout=0)
    with pytest.raises(UsageError, match="--resume needs --save"):
        sweep(("measure",), resume=RESUME)


def cells(*statuses):
    return tuple(Cell("bench", {}, status, reason="because") for status in statuses)


@pytest.mark.parametrize("statuses", [(), ("ok", "oom", "error"), ("oom", "timeout"), ("ok", "unsupported")])
def test_sweep_with_results_ends_well(statuses):
    Sweep(cells(*statuses), None, interrupted=False).exit()


def test_sweep_without_results_fails():
    with pytest.raises(typer.Exit) as ended:
        Sweep(cells("error", "oom"), None, interrupted=False).exit()
    assert ended.value.exit_code == 1


def test_sweep_that_the_machine_supports_nothing_of_says_why():
    with pytest.raises(CapabilityError, match="because"):
        Sweep(cells("unsupported", "unsupported"), None, interrupted=False).exit()


def test_interrupted_sweep_ends_with_130():
    with pytest.raises(typer.Exit) as ended:
        Sweep(cells("ok"), None, interrupted=True).exit()
    assert ended.value.exit_code == 130
