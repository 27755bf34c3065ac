"""Bus bandwidths between the sizes that ``allreduce`` measured, of saved results."""

from pathlib import Path

import pytest

from cs336sys.accounting.communication import BusBandwidths
from cs336sys.results.model import read_results

SAVED = Path(__file__).parents[2] / "docs" / "results" / "allreduce-x4-h200.jsonl.gz"


@pytest.fixture(scope="module")
def bandwidths():
    return BusBandwidths.of_cells(read_results(SAVED).cells, "nccl")


def test_beyond_the_largest_size_the_rate_stays_and_below_the_smallest_none_is_known(bandwidths):
    sizes = [size for size, _ in bandwidths.points["all_gather", 2]]
    assert bandwidths.gbps_at("all_gather", 2, 10 * max(sizes)) == bandwidths.gbps_at("all_gather", 2, max(sizes))
    assert bandwidths.gbps_at("all_gather", 2, min(sizes) // 2) is None


def test_other_ranks_kinds_and_backends_are_not_taken_for_these(bandwidths):
    assert bandwidths.gbps_at("all_reduce", 3, 10**6) is None
    assert bandwidths.gbps_at("reduce", 4, 10**6) is None
    assert BusBandwidths.of_cells(read_results(SAVED).cells, "gloo").points == {}


def test_saved_bandwidths_are_read_as_they_were(bandwidths):
    assert BusBandwidths.from_json(bandwidths.to_json()) == bandwidths
