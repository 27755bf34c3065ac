"""Gradients are averaged where they are, and no mode needs more memory than torch's."""

import ddp_memory_ranks
import pytest

from cs336sys.parallel.ranks import launch


def test_gradients_are_averaged_where_they_are(ranks):
    for mode, (stayed, together) in ranks(2).run(ddp_memory_ranks.gradient_memory)[0].items():
        assert stayed == [True] * 3, mode
        assert together == [mode == "flat"] * 3, mode


def test_flat_buffer_leaves_its_memory_to_the_next_forward_pass(ranks):
    assert ranks(2).run(ddp_memory_ranks.flat_buffer_is_dropped) == [(True, False)] * 2


@pytest.mark.multigpu
def test_no_mode_needs_more_memory_than_torch():
    for peaks in launch.run(ddp_memory_ranks.peak_memory_mib, world_size=2, backend="nccl"):
        # Weights, gradients and AdamW's two moments are 128 MiB; a second copy of the gradients would be 32 more.
        assert peaks["torch"] > 128
        assert all(peak < peaks["torch"] + 4 for peak in peaks.values()), peaks
