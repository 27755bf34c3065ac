"""``allreduce`` as a user runs it, on the CPU."""

from dataclasses import replace

import pytest
from run_commands import invoke, shown, tables

from cs336sys.commands.allreduce.tables import allreduce_tables, fit_of, groups_of, plot_collectives
from cs336sys.results.model import Cell, Samples, read_results
from cs336sys.settings.operations import CollectiveWorkload
from cs336sys.tables.table import with_rows

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
            assert row["algbw_gbps"] == pytest.approx(row["size_bytes"] / row["time_us_mean"] / 1e3)
            assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] / 2)
    assert [(row["wrong_elements"], row["in_place"]) for row in rows[1:4]] == [(0, False)] * 3
    assert rows[0]["time_us_mean"] is rows[4]["time_us_mean"] is None
    average = sum(row["busbw_gbps"] for row in rows[1:4]) / 3
    notes = found["allreduce"]["notes"]
    assert notes[:2] == [
        "link of 2 ranks of gloo: TCP within one machine",
        "mean ± standard deviation of 4 calls after 5 warm-up, each the slowest rank's",
    ]
    assert notes[2].startswith("average bus bandwidth: ")
    assert float(notes[2].split()[3]) == pytest.approx(average, rel=1e-2, abs=1e-4)
    assert notes[3].startswith("unsupported: message of 4 bytes: too small for all_gather of fp32 over 2 ranks; choose")
    assert notes[4].startswith("oom: out of memory at checking and timing: rank ")
    assert "you tried to allocate 1000000000000000 bytes" in notes[4]
    less = (
        "less than asked for, to have whole elements that all ranks share equally: 20000 of 20002 bytes (fp32, 2 ranks)"
    )
    assert less in notes
    assert [row["timing"] for row in found["fit"]["rows"]] == ["back to back", "synchronized"]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert shown(tmp_path / "r.jsonl") == result.stdout
    cell = read_results(tmp_path / "r.jsonl").cells[1]
    assert (len(cell.samples["back_to_back"].warmup), len(cell.samples["synchronized"].measured)) == (5, 4)
    assert cell.samples["back_to_back"].unit == "us"
    assert CollectiveWorkload(**cell.configuration).size_bytes == 1000


def test_dry_run_shows_sizes_and_memory_and_runs_nothing(monkeypatch):
    monkeypatch.setattr("cs336sys.run.cells.Worker.measure", None)
    options = "--collective all_reduce,reduce_scatter --world-size 3 --message 8B:1MB --factor 50000"
    rows = tables(invoke("allreduce --device cpu", options, "--dry-run --format json"))["plan"]["rows"]
    assert [(row["collective"], row["size_bytes"], row["elements"], row["tensors_bytes"]) for row in rows] == [
        ("all_reduce", 8, 2, 8),
        ("all_reduce", 400_000, 100_000, 400_000),
        ("reduce_scatter", 8, None, None),
        ("reduce_scatter", 399_996, 99_999, 533_328),
    ]
    assert rows[1]["all_ranks_bytes"] == 1_200_000
    assert rows[2]["reason"].endswith("choose at least 12 bytes")


def cell(message_bytes, time_us, world_size=2, backend="nccl", collective="all_reduce", status="ok"):
    configuration = CollectiveWorkload(backend, collective, world_size, "fp32", message_bytes).configuration()
    if status != "ok":
        return Cell("allreduce", configuration, status, reason="none here")
    times = Samples("us", "cuda events", (time_us,) * 3)
    bandwidth = message_bytes / time_us / 1e3
    derived = {"size_bytes": message_bytes, "elements": message_bytes // 4, "in_place": True, "link": "NV18"}
    derived |= {"wrong_elements": 0}
    for timing in ("back_to_back", "synchronized"):
        derived |= {f"{timing}_algbw_gbps": bandwidth, f"{timing}_busbw_gbps": bandwidth if world_size > 1 else None}
    return Cell("allreduce", configuration, "ok", {"back_to_back": times, "synchronized": times}, derived)


def test_fit_finds_the_latency_and_bandwidth_of_each_backend_and_world_size():
    # 20 us and 300 GB/s on two ranks of NCCL; 1 ms and 1 GB/s on Gloo.
    cells = [cell(size, 20 + size / 300e3) for size in (10**6, 10**9, 10**7)]
    cells += [cell(size, 1000 + size / 1e3, 4, "gloo") for size in (10**6, 10**7)]
    cells += [cell(10**6, 50.0, 4), cell(10**6, 0, 8, status="unsupported")]
    found = {table.name: table for table in allreduce_tables(cells, None)}
    rows = [row for row in found["fit"].rows if row["timing"] == "back to back"]
    assert [(row["backend"], row["world_size"]) for row in rows] == [("nccl", 2), ("gloo", 4)]
    assert rows[0]["latency_us"] == pytest.approx(20)
    assert rows[0]["bandwidth_gbps"] == pytest.approx(300)
    assert rows[0]["half_bandwidth_bytes"] == pytest.approx(6e6)
    assert rows[0]["deviation_percent"] < 1e-6
    assert rows[1]["latency_us"] == pytest.approx(1000)
    assert rows[1]["bus_bandwidth_gbps"] == pytest.approx(1.5)
    assert rows[1]["deviation_percent"] is None, "a line through two points says nothing"
    assert {row["status"] for row in found["allreduce"].rows} == {"ok", "unsupported"}
    groups = groups_of(cells)
    assert [len(of_group) for of_group in groups.values()] == [3, 2, 1]
    assert fit_of(groups[next(iter(groups))], "synchronized").latency_s == pytest.approx(20e-6)
    assert fit_of([cells[-2]], "back_to_back") is None


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    writer = "cs336sys.commands.allreduce.tables.write_figure"
    monkeypatch.setattr(writer, lambda figure, *arguments, **options: figures.append(figure))
    return figures


def test_picture_shows_backends_side_by_side_and_time_over_ranks(tmp_path, drawn):
    cells = [
        cell(size, 10.0 * ranks + size / 1e5, ranks, backend)
        for backend in ("gloo", "nccl")
        for ranks in (1, 2, 4)
        for size in (10**3, 10**6)
    ]
    plot_collectives(cells, tmp_path / "r.png")
    axes = drawn[0].axes
    assert [drawing.get_title() for drawing in axes[:2]] == ["all_reduce fp32 gloo", "all_reduce fp32 nccl"]
    labels = [[line.get_label() for line in drawing.get_lines() if line.get_label()[0] != "_"] for drawing in axes]
    assert labels[0] == labels[1] == ["1 ranks", "2 ranks", "4 ranks"]
    assert labels[2] == labels[3] == ["2 ranks", "4 ranks"], "one rank has no bus"
    assert labels[4] == labels[5] == ["1.00 MB", "1.00 KB"]
    over_ranks = axes[5].get_lines()[0]
    assert list(over_ranks.get_xdata()) == [1, 2, 4]
    assert list(over_ranks.get_ydata()) == [20.0, 30.0, 50.0]


def test_bandwidths_of_the_picture_are_those_of_median_calls(tmp_path, drawn):
    # A stall: the mean of 100, 100 and 400 us is 200, and its bandwidth half of the median's.
    stalled = Samples("us", "cuda events", (100.0, 100.0, 400.0))
    cells = [replace(cell(size, 200.0), samples={"back_to_back": stalled}) for size in (10**6, 10**7)]
    plot_collectives(cells, tmp_path / "r.png")
    (line,) = drawn[0].axes[1].get_lines()
    assert list(line.get_ydata()) == pytest.approx([10.0, 100.0])


def test_nothing_measured_is_a_picture_and_a_table_too(tmp_path):
    cells = [cell(10**6, 0, status="unsupported")]
    plot_collectives(cells, tmp_path / "r.svg")
    assert (tmp_path / "r.svg").exists()
    assert [table.name for table in with_rows(*allreduce_tables(cells, None))] == ["allreduce"]
    assert allreduce_tables([], None)[0].title == "allreduce: nothing measured"
