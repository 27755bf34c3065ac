"""Several ranks together: clocks, collectives, waiting, and who holds the others up."""

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from rank_captures import KERNEL_NS, LAYERS, TRANSFER_NS, backward_step, write_overlapping_ranks, write_ranks

from cs336sys.capture.ranks import RankMatching, _t_quantile, find_stragglers
from cs336sys.capture.reading import read_captures
from cs336sys.commands.trace.tables import rank_sentence, verdict

DATA = Path(__file__).parent / "data"


def answer_of(read):
    return find_stragglers(read.analyses, read.ranks.matching)


def stragglers(findings):
    return [finding.where for finding in findings if finding.cause == "straggler"]


@pytest.fixture(scope="module")
def with_straggler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return read_captures(write_ranks(folder, straggler=5, seed=1)), folder


def test_the_straggler_is_found_with_what_it_does_longer(with_straggler):
    (straggler,) = answer_of(with_straggler[0])
    assert (straggler.cause, straggler.where) == ("straggler", "rank 5")
    assert straggler.facts["percent"] == pytest.approx(1.0, abs=0.3)
    assert "matmul" in rank_sentence(8, [straggler])


def test_no_rank_is_named_in_whole_captures_of_equal_ranks(tier, tmp_path):
    """Numbers of ranks and steps, noise, clocks and marks of collectives are drawn; prints how many end in what."""
    draw = random.Random(tier.seed)
    answers = Counter()
    for number in range(tier.choose(3, 1000)):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths = write_ranks(
            folder,
            ranks=draw.choice((2, 3, 4, 8, 16) if tier.is_nightly else (2, 3)),
            steps=draw.randint(3, 16),
            noise=draw.choice((0.001, 0.003, 0.01, 0.03)),
            skewed=draw.random() < 0.7,
            sequence=draw.random() < 0.5,
            seed=draw.randrange(10**9),
        )
        captures = read_captures(paths)
        shutil.rmtree(folder)
        answer = answer_of(captures)
        assert not any(analysis.damage for analysis in captures.analyses)
        answers[answer[0].certainty if answer[0].certainty == "cannot tell" else answer[0].cause] += 1
    print(dict(answers))
    assert answers["straggler"] == 0


def test_time_in_collectives_is_waiting_and_transfer(with_straggler):
    for one in with_straggler[0].analyses:
        (row,) = one.collectives
        assert (row.kind, row.count, row.bytes, row.ranks) == ("all_reduce", 10 * LAYERS, 10**8, 8)
        assert (row.ms - row.waiting_ms) / row.count == pytest.approx(TRANSFER_NS / 1e6, rel=0.05)
        assert one.mean("waiting for ranks") + one.mean("communication alone") == pytest.approx(row.ms / 10, rel=0.01)
    waiting = [one.collectives[0].waiting_ms for one in with_straggler[0].analyses]
    assert min(waiting) == waiting[5]
    assert one.mean("computing") == pytest.approx(LAYERS * KERNEL_NS / 1e6, rel=0.01)


def test_a_missing_rank_is_named_and_may_be_the_straggler(tmp_path):
    paths = write_ranks(tmp_path, ranks=4, straggler=2, excess=0.1)
    others = read_captures([path for number, path in enumerate(paths) if number != 2])
    assert others.ranks.matching.missing == "rank 2 of 4 has no file"
    (answer,) = answer_of(others)
    assert (answer.cause, answer.where) == ("missing ranks", "rank 2 of 4 has no file")
    assert others.ranks.matching == RankMatching.from_json(json.loads(json.dumps(others.ranks.matching.to_json())))
    sentences = verdict(others.analyses, others.ranks.matching)
    assert sentences[0] == "Rank 2 of 4 has no file: waiting for ranks is a lower bound."
    assert sentences[1].startswith("Cannot tell whether a rank holds the others up, because rank 2 of 4 has no file")


@pytest.mark.parametrize(
    ("late", "sleep_us", "ms", "why"),
    [
        (backward_step(), 1500, 1.5, r"launching 1\.[45]\d ms"),
        (backward_step(before=4), 0, 2.0, r"computing [12]\.\d+ ms \(matmul [12]\.\d+ ms\)"),
        (backward_step(scale=1.1), 0, 1.3, r"computing 1\.\d+ ms \(matmul 0\.\d+ ms, elementwise 0\.\d+ ms\)"),
    ],
    ids=["sleeps", "computes more", "has a longer batch"],
)
def test_kernels_slowed_next_to_a_waiting_collective_hide_no_straggler(tmp_path, late, sleep_us, ms, why):
    read = read_captures(write_overlapping_ranks(tmp_path, [backward_step(), late], (0, sleep_us)))
    (straggler,) = answer_of(read)
    assert (straggler.where, straggler.amount) == ("rank 1", pytest.approx(ms, rel=0.15))
    assert re.search(rf"ms\): {why}", rank_sentence(2, [straggler]))
    waiting = [analysis.mean("waiting for ranks") for analysis in read.analyses]
    assert waiting == pytest.approx([ms, 0], abs=0.15 * ms)


def test_the_last_stage_of_a_balanced_pipeline_is_no_straggler():
    (answer,) = answer_of(read_captures([DATA / "pipeline_balanced"]))
    assert answer.cause == "no straggler"


@pytest.mark.parametrize("degrees", [2, 3, 9, 30, 10_000])
@pytest.mark.parametrize("tail", [0.05, 1e-3, 1e-5])
def test_quantiles_are_those_of_students_t(degrees, tail):
    stats = pytest.importorskip("scipy.stats")
    assert _t_quantile(degrees, tail) == pytest.approx(stats.t.isf(tail, degrees), rel=1e-3)
