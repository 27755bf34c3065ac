"""What a resumed sweep takes from its file, from made-up runs."""

from pathlib import Path

import pytest

from cs336sys.results.model import Cell, Results, Run, configuration_key, read_results
from cs336sys.run.sweep import known_cells, run_of_one_machine

ENVIRONMENT = {"torch_threads": 1, "git_commit": "15ad9114a32c", "source_digest": "0123456789abcdef"}


def run(run_id, torch="2.11", **environment):
    return Run(
        run_id, "2026-01-01T00:00:00+00:00", (), {"gpu": "NVIDIA H200", "torch": torch}, ENVIRONMENT | environment
    )


NOW = run("now")


def cell(run_id, status="ok", command="bench", **configuration):
    return Cell(command, configuration, status, run_id=run_id)


def known(runs, cells, configurations=({"size": "small"},), *, take_any=False):
    """The runs that the cells to skip are of, by configuration, and what is said."""
    known, notes = known_cells(
        Results({run.run_id: run for run in runs}, tuple(cells)), "bench", configurations, NOW, take_any=take_any
    )
    keys = [configuration_key(configuration) for configuration in configurations]
    return [known[key].run_id if key in known else None for key in keys], notes


@pytest.mark.parametrize(
    ("then", "named"),
    [
        (run("then", torch="2.10"), "torch (2.10 then, 2.11 now)"),
        (run("then", torch_threads=4), "torch_threads (4 then, 1 now)"),
        (run("then", OMP_NUM_THREADS="4"), "OMP_NUM_THREADS (4 then, None now)"),
        (
            run("then", source_digest="fedcba9876543210"),
            "code (commit 15ad9114a sources fedcba987 then, commit 15ad9114a sources 012345678 now)",
        ),
        (
            run("then", git_commit=None, source_digest=None),
            "code (not recorded then, commit 15ad9114a sources 012345678 now)",
        ),
    ],
)
def test_cell_of_other_conditions_is_measured_again_unless_resume_any(then, named):
    cells = [cell("then", size="small")]
    assert known([then], cells) == (
        [None],
        [f"--resume measures 1 cell again, other conditions than in the file: {named}; --resume-any takes them"],
    )
    assert known([then], cells, take_any=True) == (
        ["then"],
        [f"--resume-any takes 1 cell that the file holds from other conditions: {named}"],
    )


def test_cell_measured_alike_is_known():
    then = run("then", seed=1, gpu0_temperature_c=40.0, git_commit="another, of documents")
    assert known([then], [cell("then", size="small")]) == (["then"], [])
    assert known([then], [cell("then", size="small")], take_any=True) == (["then"], [])


def test_a_run_that_is_not_recorded_is_another():
    assert known([], [cell("lost", size="small")])[0] == [None]
    assert known([], [cell("lost", size="small")], take_any=True)[0] == ["lost"]


def test_the_latest_that_is_alike_is_taken():
    runs = [run("first"), run("second"), run("third", torch="2.10")]
    cells = [cell(run_id, size="small") for run_id in ("first", "second", "third")]
    assert known(runs, cells) == (["second"], [])
    assert known(runs, cells, take_any=True) == (["second"], [])


def test_errors_other_commands_and_other_settings_are_not_known():
    cells = [
        cell("then", "error", size="small"),
        cell("then", "timeout", size="small"),
        cell("then", command="ddp", size="small"),
        cell("then", size="medium"),
    ]
    assert known([run("then")], cells) == ([None], [])


@pytest.mark.parametrize("take_any", [False, True])
def test_settings_that_no_measurement_depends_on_are_passed_over(take_any):
    asked = [
        {"size": "small", "strategy": strategy, "timeout_s": 120.0, "trace": None} for strategy in ("flat", "torch")
    ]
    cells = [
        cell("then", **asked[0] | {"timeout_s": 300.0}),
        cell("then", **asked[1] | {"trace": "traces"}),
        # Predictions of memprof that another would lack, and other lengths of sampling.
        cell("then", size="small", trace=True),
        cell("then", size="small", steps=3),
    ]
    assert known([run("then")], cells, asked, take_any=take_any) == (["then", "then"], [])
    others = ({"size": "small", "trace": False}, {"size": "small", "steps": 4})
    assert known([run("then")], cells, others, take_any=take_any) == ([None, None], [])


@pytest.mark.parametrize("setting", ["trace", "snapshot", "keep"])
def test_files_that_are_asked_for_are_there_or_written(setting):
    runs = [run("without"), run("with"), run("elsewhere")]
    cells = [
        cell("with", size="small", **{setting: "folder"}),
        cell("elsewhere", size="small", **{setting: "another"}),
        cell("without", size="small", **{setting: None}),
    ]
    asked = {"size": "small", setting: "folder"}
    assert known(runs, cells, [asked]) == (["with"], [])
    assert known(runs, cells[1:], [asked]) == ([None], [])
    assert known(runs, cells, [asked | {setting: None}]) == (["without"], [])
    assert known(runs, cells[:1], [asked | {setting: None}]) == (["with"], [])


def in_turn(attention, **settings):
    return {"attention": attention, "interleave": "attention", "interleaved": "sdpa,flash"} | settings


PAIRS = [in_turn(attention, round=number) for number in (1, 2) for attention in ("sdpa", "flash")]


@pytest.mark.parametrize("take_any", [False, True])
def test_cells_measured_in_turn_are_known_together_or_not_at_all(take_any):
    cells = [cell("then", **configuration) for configuration in PAIRS]
    assert known([run("then")], cells, PAIRS, take_any=take_any) == (["then"] * 4, [])
    assert known([run("then")], cells[:3], PAIRS, take_any=take_any) == (
        ["then", "then", None, None],
        [
            "--resume measures 1 cell again, because the cells that --interleave pairs them with are missing or from "
            "another run"
        ],
    )


def test_cells_measured_in_turn_are_of_one_run():
    runs = [run("first"), run("second")]
    first, second = ([cell(run_id, **configuration) for configuration in PAIRS[:2]] for run_id in ("first", "second"))
    assert known(runs, first + second, PAIRS[:2])[0] == ["second", "second"]
    assert known(runs, first + second[:1], PAIRS[:2])[0] == ["first", "first"]
    assert known(runs, first[:1] + second[1:], PAIRS[:2])[0] == [None, None]


def test_a_title_names_the_machine_of_the_cells():
    other = run("other", torch="2.10")
    results = Results({"other": other, "alike": run("alike")}, ())
    assert run_of_one_machine([], results, NOW) is NOW
    assert run_of_one_machine([cell("now"), cell("alike")], results, NOW) is NOW
    assert run_of_one_machine([cell("other"), cell("other")], results, NOW) is other
    assert run_of_one_machine([cell("other"), cell("now")], results, NOW) is None
    assert run_of_one_machine([cell("lost")], results, NOW) is None


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
