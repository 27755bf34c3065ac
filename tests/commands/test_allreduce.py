"""``allreduce`` as a user runs it, on the CPU."""

import json

import pytest
from run_commands import invoke, shown, tables
from two_agents import run_two_agents

from cs336sys.results.model import read_results
from cs336sys.settings.operations import CollectiveWorkload

pytestmark = pytest.mark.usefixtures("kept_workers")


def test_every_cell_is_checked_and_timed(tmp_path):
    """Three sizes of all-gather between one that two ranks cannot share and one that no machine has room for."""
    options = "--device cpu --world-size 2 --steps 4 --collective all_gather"
    messages = "--message 4B,1KB,20002B,400KB --message 1000TB"
    files = ["--save", tmp_path / "r.jsonl", "--plot", tmp_path / "r.png"]
    result = invoke("allreduce", options, messages, files, "--format json")
    found = tables(result)
    rows = found["allreduce"]["rows"]
    assert [row["status"] for row in rows] == ["unsupported", "ok", "ok", "ok", "oom"]
    sizes = [(row["size_bytes"], row["elements"]) for row in rows[1:4]]
    assert sizes == [(1000, 250), (20_000, 5000), (400_000, 100_000)]
    for name in ("allreduce", "latency"):
        for row in [row for row in found[name]["rows"] if row.get("status", "ok") == "ok"]:
            assert row["min_us"] <= row["time_us_mean"] <= row["max_us"]
            assert row["time_us_median"] <= row["p99_us"] <= row["max_us"]
            assert row["busbw_gbps"] == pytest.approx(row["size_bytes"] / row["time_us_mean"] / 1e3 / 2)
    assert [(row["wrong_elements"], row["in_place"]) for row in rows[1:4]] == [(0, False)] * 3
    assert rows[0]["time_us_mean"] is rows[4]["time_us_mean"] is None
    notes = found["allreduce"]["notes"]
    assert notes[:2] == [
        "link of 2 ranks of gloo: TCP within one machine",
        "mean ± standard deviation of 4 calls after 5 warm-up, each the slowest rank's",
    ]
    assert notes[2].startswith("average bus bandwidth: ")
    average = sum(row["busbw_gbps"] for row in rows[1:4]) / 3
    assert float(notes[2].split()[3]) == pytest.approx(average, rel=1e-2, abs=1e-4)
    assert notes[3].startswith("unsupported: message of 4 bytes: too small for all_gather of fp32 over 2 ranks; choose")
    assert notes[4].startswith("oom: out of memory at checking and timing: rank ")
    assert "you tried to allocate 1000000000000000 bytes" in notes[4]
    (less,) = [note for note in notes if note.startswith("less than asked for")]
    assert less.endswith("have whole elements that all ranks share equally: 20000 of 20002 bytes (fp32, 2 ranks)")
    assert [row["timing"] for row in found["fit"]["rows"]] == ["back to back", "synchronized"]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert shown(tmp_path / "r.jsonl") == result.stdout
    cell = read_results(tmp_path / "r.jsonl").cells[1]
    assert (len(cell.samples["back_to_back"].warmup), len(cell.samples["synchronized"].measured)) == (5, 4)
    assert CollectiveWorkload(**cell.configuration).size_bytes == 1000


# Two agents that measure the same cells by default: run/test_ranks.py.
@pytest.mark.nightly
def test_under_torchrun_cells_for_which_there_are_too_few_ranks_are_unsupported(tmp_path):
    file = tmp_path / "allreduce"
    options = "allreduce --backend gloo --world-size 2,4 --message 1KB,40KB --steps 3 --format json --save"
    target = ["-m", "cs336sys", *options.split(), str(file)]
    first, second = run_two_agents(*target, folder=tmp_path)
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert second.stdout == "", "only rank 0 reports"
    table = json.loads(first.stdout)["tables"][0]
    statuses = [(2, "ok"), (2, "ok"), (4, "unsupported"), (4, "unsupported")]
    assert [(row["world_size"], row["status"]) for row in table["rows"]] == statuses
    assert "unsupported: world size 4: 2 ranks were started, ask for those" in table["notes"]
    assert [cell.status for cell in read_results(file).cells] == [status for _, status in statuses]
