"""``ddp`` as a user runs it, on the CPU."""

from itertools import product

import pytest
from run_commands import invoke, shown, tables

from cs336sys.results.model import read_results
from cs336sys.run.sweep import Sweep

pytestmark = pytest.mark.usefixtures("kept_workers")

TINY = "--size tiny --device cpu --world-size 2 --context 16 --vocab-size 500 --warmup 1 --steps 3"


def ddp(*words):
    return invoke("ddp", *words, env={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Every mode, and two bucket sizes."""
    folder = tmp_path_factory.mktemp("ddp")
    arguments = [TINY, "--bucket-mb 1,1000 --save", folder / "r.jsonl"]
    pictures = ["--plot", folder / "t.png", "--plot-buckets", folder / "b.svg"]
    return ddp(arguments, pictures, "--format json"), folder, arguments


def test_every_mode_is_checked_and_timed(sweep):
    result, folder, _ = sweep
    found = tables(result)
    rows = found["ddp"]["rows"]
    assert [(row["strategy"], row["bucket_mb"], row["status"]) for row in rows] == [
        ("naive", None, "ok"),
        ("flat", None, "ok"),
        ("overlap", None, "ok"),
        ("bucketed", 1.0, "ok"),
        ("bucketed", 1000.0, "ok"),
        ("torch", None, "ok"),
    ]
    assert all(row["parameters"] == 652_928 and row["relative_difference_percent"] < 0.1 for row in rows)
    assert len({row["unsynchronized_ms_median"] for row in rows}) == 1, "one baseline serves all"
    assert [row["calls"] for row in rows[:3]] == [22, 2, 22]
    assert [row["communicated_bytes"] for row in rows[:3]] == 3 * [4 * 652_928 + 21]
    synchronize = [row["synchronize_ms_mean"] for row in found["phases"]["rows"]]
    assert all(value is not None for value in synchronize[:5])
    assert synchronize[5:] == [None], "torch's DDP has no phase of its own"
    buckets = found["buckets"]["rows"]
    assert [(row["bucket_mb"], row["buckets"]) for row in buckets] == [(1.0, 4), (1000.0, 1)]
    predicted_ms = [row["predicted_ms"] for row in buckets]
    assert all(ms is None or ms > 0 for ms in predicted_ms)
    # On a busy machine all-reduces of more bytes may take no longer.
    told = ("w not found",) if None in predicted_ms else ("least overhead", "calls look free")
    assert any(words in note for note in found["buckets"]["notes"] for words in told)
    assert (folder / "t.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "b.svg").read_bytes()
    assert shown(folder / "r.jsonl") == result.stdout
    for cell in read_results(folder / "r.jsonl").cells:
        timeline = cell.derived["timeline"]
        assert timeline["compute"]
        assert timeline["communicate"]
        assert 0 <= timeline["overlap_ms"] <= timeline["communication_ms"]
        assert list(timeline["phases"].values()) == sorted(timeline["phases"].values())


def test_resume_measures_nothing_again_and_shows_the_same(sweep):
    result, folder, arguments = sweep
    before = (folder / "r.jsonl").read_bytes()
    # How long ranks would have waited makes no other cells.
    again = ddp(arguments, "--resume --timeout 300 --format json")
    assert tables(again) == tables(result)
    assert (folder / "r.jsonl").read_bytes() == before


def test_rounds_go_to_and_fro(monkeypatch):
    given = []

    def not_measured(command, measure, configurations, *arguments, **settings):
        given.extend((one.get("round"), one["precision"], one["strategy"]) for one in configurations)
        return Sweep((), None)

    monkeypatch.setattr("cs336sys.commands.ddp.options.run_sweep", not_measured)
    assert ddp(TINY, "--mode naive,flat --rounds 3").exit_code == 0
    to = ["naive", "flat"]
    rounds = [(number, "fp32", name) for number, names in ((1, to), (2, to[::-1]), (3, to)) for name in names]
    assert given == rounds
    given.clear()
    assert ddp(TINY, "--mode naive,flat --precision fp32,bf16").exit_code == 0
    assert given == list(product((None,), ("fp32", "bf16"), to))
