"""Several ranks together: clocks, collectives, waiting, and who holds the others up."""

import json

import pytest
from rank_captures import KERNEL_NS, LAYERS, TRANSFER_NS, write_ranks

from cs336sys.errors import UsageError
from cs336sys.measure.profile.ranks import _upper_tail, find_straggler
from cs336sys.measure.profile.reading import read_captures


@pytest.fixture(scope="module")
def with_straggler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return read_captures(write_ranks(folder, straggler=5, seed=1)), folder


def test_the_straggler_is_found_with_what_it_does_longer(with_straggler):
    found = find_straggler(with_straggler[0].analyses)
    assert found.label == "rank 5"
    assert found.percent == pytest.approx(1.0, abs=0.3)
    assert "matmul" in found.why


@pytest.mark.parametrize("seed", range(3))
def test_no_rank_is_named_where_all_are_equal(tmp_path, seed):
    assert find_straggler(read_captures(write_ranks(tmp_path, seed=seed)).analyses) is None


def test_clocks_are_aligned_by_the_ends_of_collectives(with_straggler):
    ranks = with_straggler[0].ranks
    assert ranks.matched == 10 * LAYERS
    # They end within 3 us of each other.
    assert ranks.clocks.error_ns < 3000
    assert max(abs(ranks.clocks.drift)) > 1e-6


def test_time_in_collectives_is_waiting_and_transfer(with_straggler):
    for one in with_straggler[0].analyses:
        (row,) = one.collectives
        assert (row.kind, row.count, row.bytes, row.ranks) == ("all_reduce", 10 * LAYERS, 10**8, 8)
        assert (row.ms - row.waiting_ms) / row.count == pytest.approx(TRANSFER_NS / 1e6, rel=0.05)
        assert one.mean("waiting for ranks") + one.mean("communication alone") == pytest.approx(row.ms / 10, rel=0.01)
    waiting = [one.collectives[0].waiting_ms for one in with_straggler[0].analyses]
    assert min(waiting) == waiting[5]
    assert one.mean("computing") == pytest.approx(LAYERS * KERNEL_NS / 1e6, rel=0.01)


def test_recorded_sequence_numbers_match_collectives_of_captures_that_begin_apart(tmp_path):
    paths = write_ranks(tmp_path, ranks=2, steps=6, sequence=True, noise=0.02)
    document = json.loads(paths[1].read_text())
    # The second rank's capture lacks the first step.
    first = min(event["ts"] for event in document["traceEvents"] if event["name"] == "ProfilerStep#1")
    document["traceEvents"] = [event for event in document["traceEvents"] if event["ts"] >= first]
    paths[1].write_text(json.dumps(document))
    ranks = read_captures(paths).ranks
    assert (ranks.matched, ranks.notes) == (5 * LAYERS, ())
    assert ranks.clocks.error_ns < 3000


def test_ranks_are_those_of_the_files_and_else_of_their_names(tmp_path):
    paths = write_ranks(tmp_path, ranks=2, steps=4)
    assert [one.label for one in read_captures(paths[::-1]).analyses] == ["rank 0", "rank 1"]
    document = json.loads(paths[1].read_text())
    document["distributedInfo"]["rank"] = 0
    paths[1].write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"trace_0.json and .*trace_1.json are both of rank 0"):
        read_captures(paths)
    named = [path.rename(tmp_path / f"run-rank{3 - number}.json") for number, path in enumerate(paths)]
    found = read_captures(named)
    assert ([one.label for one in found.analyses], found.notes) == (
        ["rank 2", "rank 3"],
        ("ranks by the names of the files",),
    )


def test_a_folder_is_its_captures(with_straggler, tmp_path):
    assert len(read_captures([with_straggler[1]]).analyses) == 8
    with pytest.raises(UsageError, match="is a folder without captures"):
        read_captures([tmp_path])


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 30])
@pytest.mark.parametrize("t", [0.0, 0.5, 2.0, 6.0])
def test_the_tail_is_that_of_students_t(degrees, t):
    stats = pytest.importorskip("scipy.stats")
    assert _upper_tail(degrees, t) == pytest.approx(stats.t.sf(t, degrees), rel=1e-9, abs=1e-13)
