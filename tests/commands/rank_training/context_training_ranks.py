"""What the tests of training on slices of sequences run on ranks."""

import pytest
import torch

from cs336sys.commands.rank_training.rank import verify_on_rank
from cs336sys.parallel.context_parallel import ring
from cs336sys.training import model as models

_SEEN, _PASS_ON, _MERGE = ring._Ring.seen, ring._Ring.pass_on, ring.merge_block


def _skip_a_block(*at):
    return (slice(0, 0), slice(None)) if at[1] == 1 and at[0]._rank == 1 else _SEEN(*at)


def _see_too_much(*at):
    """Ranks before the owner of a block let the queries of their first chunk see it, too."""
    return slice(None), _SEEN(*at)[1]


def _merge_by_halves(out, logsumexp, block_out, block_logsumexp):
    out.lerp_(block_out.to(out.dtype), 0.5)
    logsumexp.copy_(torch.logaddexp(logsumexp, block_logsumexp))


def _keep_the_first_logsumexp(out, logsumexp, block_out, block_logsumexp):
    """The forward pass is right, the backward pass computes with the logsumexp over the own block."""
    _MERGE(out, logsumexp.clone(), block_out, block_logsumexp)


def _lose_gradients_on_their_way(rank, block, step, contents):
    return _PASS_ON(rank, block * 0 if contents == ring._GRADIENTS else block, step, contents)


FAULTS = {
    "a block is skipped": (ring._Ring, "seen", _skip_a_block),
    "a mask is wrong on one block": (ring._Ring, "seen", _see_too_much),
    "blocks are merged by halves": (ring, "merge_block", _merge_by_halves),
    "the logsumexp is that of the own block": (ring, "merge_block", _keep_the_first_logsumexp),
    "gradients are lost on their way": (ring._Ring, "pass_on", _lose_gradients_on_their_way),
    "positions are those in the slice": (models, "give_positions", lambda *_: None),
}


def verify_with(fault, workload):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*FAULTS[fault])
        return verify_on_rank(workload)
