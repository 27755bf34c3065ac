"""``memprof`` as a user runs it: tables, pictures, predictions without running, and bad input."""

import html.parser
import json
import pickle
import re
from dataclasses import replace

import pytest
from run_commands import invoke, shown, tables

from cs336sys.allocations.timeline import MEMORY_CATEGORIES
from cs336sys.commands.memprof.tables import memory_tables
from cs336sys.results.model import read_results

pytestmark = pytest.mark.usefixtures("kept_workers")

TINY = "--size tiny --device cpu --batch-size 2 --context 24 --steps 1"


def memprof(*words):
    return invoke("memprof", words, "--format json")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Forward pass, and training with two strategies."""
    directory = tmp_path_factory.mktemp("memprof")
    options = "--vocab-size 64 --mode forward,train --checkpoint none,nested"
    arguments = [TINY, options, "--snapshot", directory / "s", "--save", directory / "r.jsonl"]
    return memprof(arguments), directory, arguments


def test_peaks_of_every_cell(sweep):
    result, directory, _ = sweep
    table = tables(result)["memprof"]
    cells = [(row["mode"], row["checkpointing"], row["status"]) for row in table["rows"]]
    assert cells == [("forward", "none", "ok"), ("train", "none", "ok"), ("train", "nested", "ok")]
    forward, train, nested = table["rows"]
    assert forward["backward_gib"] is None
    for row in (forward, train, nested):
        phases = [row[f"{phase}_gib"] for phase in ("forward", "loss", "backward", "optimizer")]
        assert max(phase for phase in phases if phase is not None) == row["peak_gib"]
        assert row["predicted_over_measured"] == pytest.approx(1, abs=0.1)
        assert row["traced_gib"] == pytest.approx(row["peak_gib"], rel=0.02)
        assert row["reserved_gib"] is None, "a CPU's allocator reserves nothing"
    assert [cell.status for cell in read_results(directory / "r.jsonl").cells] == ["ok"] * 3
    assert shown(directory / "r.jsonl") == result.stdout


def test_a_cell_out_of_memory_is_a_result(tmp_path):
    found = tables(memprof(TINY, "--batch-size 1000000000000 --force --no-predict --snapshot", tmp_path / "s"))
    assert not any(note.startswith("On a CPU") for note in found["memprof"]["notes"])
    small, huge = found["memprof"]["rows"]
    assert (small["status"], huge["status"]) == ("ok", "oom")
    assert huge["peak_gib"] is None
    assert huge["predicted_gib"] > 1e8
    assert small["traced_gib"] is None
    assert any(note.startswith("oom: out of memory at building the model") for note in found["memprof"]["notes"])
    assert len(found["phases"]["rows"]) == 4, "the small cell's"
    assert len(list((tmp_path / "s").iterdir())) == 4


def test_categories_add_up_to_what_is_allocated(sweep):
    rows = tables(sweep[0])["phases"]["rows"]
    assert [row["phase"] for row in rows[:2]] == ["forward", "loss"]
    assert [row["phase"] for row in rows[2:6]] == ["forward", "loss", "backward", "optimizer"]
    parts = ("parameters", "gradients", "optimizer_state", "activations", "temporary", "other")
    for row in rows:
        assert sum(row[f"{part}_gib"] for part in parts) == pytest.approx(row["allocated_gib"])
    update = rows[5]
    assert update["gradients_gib"] == update["parameters_gib"] == pytest.approx(update["optimizer_state_gib"] / 2)


def test_largest_allocations_have_an_origin(sweep):
    rows = [row for row in tables(sweep[0])["allocations"]["rows"] if row["checkpointing"] == "none"]
    assert [row["mode"] for row in rows] == ["forward"] * 5 + ["train"] * 5
    assert rows[5]["size_bytes"] == 128 * 512 * 4, "the gradient of a feed-forward matrix"
    for row in rows:
        assert row["code"].startswith("cs336_basics/")
        assert row["operation"]
        assert row["phase"] in ("forward", "loss", "backward", "optimizer")
    assert any(row["module"].startswith("layers.*.ffn") and row["count"] % 2 == 0 for row in rows)


def test_block_and_its_saved_tensors(sweep):
    found = tables(sweep[0])
    forward, train = found["block"]["rows"]
    assert (forward["stream_bytes"], forward["stream_derivation"]) == (2 * 24 * 128 * 4, "2 x 24 x 128 x 4")
    assert forward["saved_bytes"] is None
    assert train["saved_bytes"] == train["saved_predicted_bytes"]
    assert train["gradients_bytes"] == train["gradients_expected_bytes"] == 4 * (4 * 128**2 + 3 * 128 * 512 + 2 * 128)
    assert train["gradients_by_difference_bytes"] == train["gradients_bytes"]
    saved = found["saved_tensors"]["rows"]
    assert [row["tensor"] for row in saved] == ["1", "2", "3", "4", "5", "16 others", "all"]
    assert sum(row["share_percent"] for row in saved[:-1]) == pytest.approx(100)
    assert saved[-1]["size_bytes"] == train["saved_bytes"]
    assert {row["operation"] for row in saved[:5]} == {"Sigmoid", "Mm", "Mul"}


def test_strategies_are_compared_with_their_cost_and_the_formula(sweep):
    table = tables(sweep[0])["checkpointing"]
    none, nested = table["rows"][:2]
    assert (none["recomputed_percent"], none["step_ratio"]) == (0, 1)
    assert 0 < nested["recomputed_percent"] < 34
    assert nested["predicted_activations_gib"] < none["predicted_activations_gib"]
    assert "without nesting" in table["notes"][0]
    assert "sqrt(N s / b)" in table["notes"][0]


def test_every_cell_leaves_its_files(sweep):
    _, directory, _ = sweep
    names = sorted(path.name for path in (directory / "s").iterdir())
    assert len(names) == 3 * 4, names
    assert {name.rpartition(".")[2] for name in names} == {"html", "pickle", "png", "svg"}
    nested = next(path for path in (directory / "s").glob("*train*nested.*"))
    assert nested.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    picture = nested.with_suffix(".svg").read_text()
    for word in ("forward", "loss", "backward", "optimizer", "activations", "gradients", "tiny"):
        assert f">{word}" in picture or f" {word}" in picture
    data = nested.with_suffix(".pickle").read_bytes()
    assert data[:2] == b"\x80\x04", "protocol 4, which pytorch.org/memory_viz can read"
    assert pickle.loads(data)["device_traces"][0]


def test_page_needs_no_network(sweep):
    _, directory, _ = sweep
    text = next((directory / "s").glob("*train*none.html")).read_text()
    assert not re.search(r"https?:|src=|@import|import\(|url\(|fetch|<link", text)
    tags = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.feed(text)
    assert {"canvas", "script", "table"} <= set(tags)
    # A loop's body, since a top-level const named top would be a syntax error in a browser.
    (data,) = json.loads(re.search(r"^<script>for \(const data of (.*)\) {$", text, re.MULTILINE)[1])
    assert [region["name"] for region in data["regions"]] == ["forward", "loss", "backward", "optimizer"]
    assert len(data["timeline"]["position"]) == len(data["timeline"]["activations"])
    assert "layers.*.ffn" in text


def test_an_incomplete_history_and_a_first_step_are_said(sweep):
    """A ring buffer that wrapped, and allocations that do not add up to the allocator's counters."""

    def noted(derived, **settings):
        changed = replace(cell, derived=cell.derived | derived, configuration=cell.configuration | settings)
        return [
            note for note in memory_tables([changed], None, 5)[0].notes if note.startswith(("warning", "warm-up 0"))
        ]

    cell = read_results(sweep[1] / "r.jsonl").cells[1]
    assert noted({}) == []
    (lost,) = noted({"lost_events": 7})
    assert "the history was full and lost its first 7 events" in lost
    phase = {"allocated": 2**30, "phase": "forward", "reserved": None} | dict.fromkeys(MEMORY_CATEGORIES, 2**20)
    (unequal,) = noted({"phases": [phase]})
    assert "the allocator counted 1.000 GiB" in unequal
    (first,) = noted({}, warmup=0)
    assert first.startswith("warm-up 0")


def test_dry_run_predicts_what_no_machine_here_could_hold():
    """38 GiB in the widest cell."""
    sizes = "--size 2.7b --num-layers 4 --context 2048"
    found = tables(memprof(sizes, "--checkpoint none,every=2 --dry-run --top 2"))
    assert list(found) == ["plan", "phases", "allocations", "checkpointing"]
    rows = found["plan"]["rows"]
    assert [row["checkpointing"] for row in rows] == ["none", "every=2"]
    for row in rows:
        parts = [row[f"{part}_gib"] for part in ("parameters", "gradients", "optimizer_state", "activations")]
        assert row["predicted_peak_gib"] == pytest.approx(sum(parts))
        assert row["traced_peak_gib"] == pytest.approx(row["predicted_peak_gib"], rel=0.001)
        assert row["status"] is None
    assert len(found["allocations"]["rows"]) == 4
    strategies = found["checkpointing"]
    assert [(row["checkpointing"], row["status"], row["step_ratio"]) for row in strategies["rows"]] == [
        ("none", None, None),
        ("every=2", None, None),
    ]
    assert [row["predicted_gib"] for row in strategies["rows"]] == [row["predicted_peak_gib"] for row in rows]
    assert all("4 blocks" in note for note in strategies["notes"])


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ("--size 10b --mode forward,train --bf16", [("forward", "none"), ("train", "none")]),
        # A forward pass has nothing to checkpoint.
        (f"{TINY} --mode forward --checkpoint none,block,nested", [("forward", "none")]),
    ],
)
def test_dry_run_without_trace_is_arithmetic(options, rows, monkeypatch):
    monkeypatch.setattr("cs336sys.run.cells.Worker.measure", None)
    found = tables(memprof(options, "--dry-run --no-predict"))
    assert list(found) == ["plan"]
    assert [(row["mode"], row["checkpointing"]) for row in found["plan"]["rows"]] == rows
    assert {row["traced_peak_gib"] for row in found["plan"]["rows"]} == {None}


def test_own_snapshots_have_the_categories_that_were_recorded(sweep):
    _, directory, _ = sweep
    read = tables(memprof("--from", directory / "s"))
    assert next(iter(read)) == "verdict"
    peaks = {}
    for cell in read_results(directory / "r.jsonl").cells:
        widest = max(cell.derived["phases"], key=lambda phase: phase["allocated"])
        peaks[cell.derived["snapshot"].rpartition("/")[2]] = widest
    assert len(read["memory"]["rows"]) == len(peaks) == 3
    # A line of a forward pass, too, of which a gradient is computed, is of the phase in which it was made.
    assert "causes" not in read
    for row in read["memory"]["rows"]:
        assert (row["steps"] or 0) <= 1
        widest = peaks[row["snapshot"]]
        assert row["held_bytes"] == row["peak_bytes"] == widest["allocated"]
        for category in MEMORY_CATEGORIES:
            assert (row[f"{category.replace(' ', '_')}_bytes"] or 0) == widest[category], category
