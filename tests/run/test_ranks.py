"""Sweeps on several ranks: the same cells in a worker that spawns the ranks, and in ranks that torchrun started."""

import os
import threading
from pathlib import Path

import pytest
import torch.distributed
from two_agents import run_two_agents, run_two_ranks
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.command_line.options.output import SweepOptions
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.parallel.ranks import launch
from cs336sys.processes import RankIdentity
from cs336sys.results.model import Cell, read_results
from cs336sys.run.ranks import JoinedWorker, choose_world_sizes
from cs336sys.run.sweep import Sweep, run_sweep

HERE = Path(__file__).parent
SCRIPT = HERE / "rank_sweep.py"
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture
def first_of_four(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def test_world_sizes_are_those_asked_for_or_two_or_torchruns(request):
    assert choose_world_sizes([1, 4]) == [1, 4]
    assert choose_world_sizes([]) == [2]
    request.getfixturevalue("first_of_four")
    assert choose_world_sizes([]) == [4]
    assert choose_world_sizes([2, 4]) == [2, 4]


@pytest.mark.parametrize("command", ["allreduce", "ddp", "shard"])
def test_cells_without_measuring_are_printed_by_the_first_rank_alone(command):
    first, second = (
        CliRunner().invoke(app, [command, "--device", "cpu", "--dry-run"], env={"RANK": rank, "WORLD_SIZE": "2"})
        for rank in ("0", "1")
    )
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert first.stdout.startswith(f"### {command}: cells and the memory of ")
    assert second.output == ""


@pytest.mark.usefixtures("first_of_four")
def test_cell_cannot_be_given_up_under_torchrun():
    with pytest.raises(UsageError, match="--cell-timeout: ranks that torchrun started cannot be ended"):
        run_sweep("bench", "rank_sweep:measure", [], SweepOptions(cell_timeout=1.0), across_ranks=True)


@pytest.mark.usefixtures("first_of_four")
def test_sweeps_of_one_process_do_not_look_for_ranks(monkeypatch):
    monkeypatch.setattr(JoinedWorker, "__init__", None)
    assert run_sweep("bench", "rank_sweep:measure", []).is_reported_here


def test_worker_spawns_ranks_and_keeps_them_for_the_next_cell():
    actions = ("sum", "refuse", "sum", "fail on rank 1")
    configurations = [{"action": action, "world_size": 2} for action in actions]
    cells = run_sweep("bench", "rank_sweep:measure", configurations, across_ranks=True).cells
    assert [cell.status for cell in cells] == ["ok", "oom", "ok", "error"]
    assert cells[0].samples["sum"].measured == (3.0, 3.0)
    assert cells[0].derived == cells[2].derived, "the same processes"
    assert cells[3].reason.startswith("RankError at start: rank 1 of 2: ValueError: the numbers are wrong")


def test_ranks_with_other_options_are_refused_on_every_rank(tmp_path):
    """Their collectives met with other sizes, which ended one rank by a signal."""
    ended = run_two_ranks(SCRIPT, str(tmp_path / "r.jsonl"), "sum,by rank", folder=tmp_path)
    for rank in ended:
        assert rank.exit_code == 2, rank.stderr
        assert (
            "ranks have different options: action is by rank 0 on rank 0 and by rank 1 on rank 1; start" in rank.stderr
        )
        assert "Traceback" not in rank.stderr


def test_ranks_started_from_outside_measure_the_same_cells_and_the_first_reports(tmp_path):
    """Refused cells leave the ranks as they are; a resumed sweep skips on all ranks what rank 0's file holds."""
    path = tmp_path / "r.jsonl"
    sweeps = "sum,refuse,unsupported,sum", "refuse,sum,sum"
    first, second = run_two_ranks(SCRIPT, str(path), *sweeps, folder=tmp_path)
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    measured, resumed = first.stdout.splitlines()
    assert measured == "['ok', 'oom', 'unsupported', 'ok'] [3.0, 3.0]"
    assert resumed == "['oom', 'ok', 'ok'] [3.0, 3.0]"
    assert second.stdout == ""
    assert [cell.status for cell in read_results(path).cells] == ["ok", "oom", "unsupported", "ok"]
    for rank in (first, second):
        assert rank.stderr.count("a line of a cell") == 3, "of the first sweep"


def test_rank_that_fails_alone_ends_the_job_with_its_error(tmp_path):
    """Rank 0 waits for it in an all-reduce, for ever if nobody ended it; what was measured before is in the file."""
    path = tmp_path / "r.jsonl"
    arguments = str(SCRIPT), str(path), "sum,fail on rank 1,sum"
    first, second = run_two_agents(*arguments, folder=tmp_path, environment=ENVIRONMENT)
    assert first.exit_code != 0
    assert second.exit_code == 1
    assert "ValueError: the numbers are wrong" in second.stderr
    last = [line for line in second.stderr.splitlines() if line.startswith("rank 1: error: ")]
    assert last == ["rank 1: error: ValueError at start: the numbers are wrong; 2 of 3 cells measured"]
    # Whether rank 0 still says that its peer has gone depends on who ends it first.
    assert [cell.status for cell in read_results(path).cells] in (["ok"], ["ok", "error"])


def test_ranks_that_measured_nothing_exit_after_the_first_has_reported(monkeypatch):
    """Their exit code makes torchrun end the others: rank 0 must have printed by then."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(launch, "outside_store", lambda: store)
    workers = [JoinedWorker("math:sqrt", (), RankIdentity(rank, 2, rank)) for rank in range(2)]
    cells = (Cell("bench", {}, "unsupported", reason="none of us can"),)
    sweeps = [Sweep(cells, None, ranks=worker) for worker in workers]
    ended = []

    def end(rank):
        with pytest.raises(CapabilityError, match="none of us can"):
            sweeps[rank].exit()
        ended.append(rank)

    waiting = threading.Thread(target=end, args=(1,))
    waiting.start()
    waiting.join(0.3)
    assert ended == []
    end(0)
    waiting.join()
    # Once the first has reported, either may be the first to end.
    assert sorted(ended) == [0, 1]


def test_rank_whose_first_one_is_gone_says_so_in_one_sentence(monkeypatch):
    class LostStore:
        def get(self, key):
            raise torch.distributed.DistNetworkError("Failed to recv, got 0 bytes.")

    monkeypatch.setattr(launch, "outside_store", LostStore)
    with pytest.raises(CapabilityError, match=r"^rank 1: rank 0 ended before anything was measured$"):
        JoinedWorker("math:sqrt", (), RankIdentity(1, 2, 1)).from_first_rank({})


@pytest.mark.usefixtures("time_limit")
def test_ranks_do_not_wait_long_for_a_first_one_that_hangs(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(launch, "outside_store", lambda: store)
    monkeypatch.setattr("cs336sys.run.ranks._REPORT_S", 0.1)
    # By the store's own limit of 300 s the test would not be done in time.
    JoinedWorker("math:sqrt", (), RankIdentity(1, 2, 1)).wait_for_report()
