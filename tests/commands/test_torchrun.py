"""Commands on "two machines", two torchrun agents: every rank runs the command, rank 0 alone prints and saves."""

import json
import shlex
from pathlib import Path

import pytest
from two_agents import run_two_agents

from cs336sys.results.model import read_results

# Two agents that measure the same cells by default: sweep/test_ranks.py.
pytestmark = pytest.mark.nightly

SCRIPT = str(Path(__file__).with_name("commands_in_turn.py"))
ALLREDUCE = ["allreduce", "--backend", "gloo", "--world-size", "2,4", "--message", "1KB,40KB", "--steps", "3"]
ALLREDUCE += ["--collective", "all_reduce,broadcast"]
DDP = ["ddp", "--size", "tiny", "--device", "cpu", "--world-size", "2", "--context", "16", "--vocab-size", "500"]
DDP += ["--warmup", "1", "--steps", "3", "--mode", "torch,flat", "--gradient-dtype", "bf16"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """By command: the tables that rank 0 prints, by name, and the results file. One job runs both: it starts slowly."""
    folder = tmp_path_factory.mktemp("torchrun")
    commands = {"allreduce": ALLREDUCE, "ddp": DDP}
    lines = [
        shlex.join([*arguments, "--format", "json", "--save", str(folder / name)])
        for name, arguments in commands.items()
    ]
    first, second = run_two_agents(SCRIPT, *lines, folder=folder)
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert second.stdout == "", "only rank 0 reports"
    printed, found = first.stdout, {}
    for name in commands:
        tables, end = json.JSONDecoder().raw_decode(printed)
        found[name] = {table["name"]: table for table in tables["tables"]}, folder / name
        printed = printed[end:].lstrip()
    assert printed == ""
    return found


def test_cells_for_which_there_are_too_few_ranks_are_unsupported(job):
    tables, file = job["allreduce"]
    rows = [(row["world_size"], row["collective"], row["status"]) for row in tables["allreduce"]["rows"]]
    assert rows[::2] == [
        (2, "all_reduce", "ok"),
        (2, "broadcast", "ok"),
        (4, "all_reduce", "unsupported"),
        (4, "broadcast", "unsupported"),
    ]
    assert "unsupported: world size 4: 2 ranks were started, ask for those" in tables["allreduce"]["notes"]
    assert [cell.status for cell in read_results(file).cells] == ["ok"] * 4 + ["unsupported"] * 4


def test_ranks_go_on_after_a_cell_that_they_refuse_in_agreement(job):
    tables, file = job["ddp"]
    table = tables["ddp"]
    assert [(row["strategy"], row["status"]) for row in table["rows"]] == [("torch", "unsupported"), ("flat", "ok")]
    assert table["rows"][0]["step_ms_mean"] is None
    assert table["rows"][1]["communicated_bytes"] == 2 * 652_928 + 21
    assert any("sends gradients in bf16 only through NCCL" in note for note in table["notes"])
    assert len(read_results(file).cells) == 2
