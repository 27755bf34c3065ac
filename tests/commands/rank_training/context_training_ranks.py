"""What the tests of training on slices of sequences run on ranks."""

import pytest
import torch

from cs336sys.commands.rank_training.rank import verify_on_rank
from cs336sys.parallel.context_parallel import ring


def _skip_a_block(patched):
    seen = ring._Ring.seen
    patched.setattr(
        ring._Ring, "seen", lambda *at: (slice(0, 0), slice(None)) if at[1] == 1 and at[0]._rank == 1 else seen(*at)
    )


def _see_too_much(patched):
    """Ranks before the owner of a block let the queries of their first chunk see it, too."""
    seen = ring._Ring.seen
    patched.setattr(ring._Ring, "seen", lambda *at: (slice(None), seen(*at)[1]))


def _merge_by_halves(patched):
    def merge(out, logsumexp, block_out, block_logsumexp):
        out.lerp_(block_out.to(out.dtype), 0.5)
        logsumexp.copy_(torch.logaddexp(logsumexp, block_logsumexp))

    patched.setattr(ring, "merge_block", merge)


def _add_without_rescaling(patched):
    right = ring.merge_block

    def merge(out, logsumexp, block_out, block_logsumexp):
        before = logsumexp.clone()
        right(out, logsumexp, block_out, block_logsumexp)
        # The old output keeps its weight of 1.
        out += out * (1 - torch.exp(before - logsumexp)).unsqueeze(-1)

    patched.setattr(ring, "merge_block", merge)


def _keep_the_first_logsumexp(patched):
    """The forward pass is right, the backward pass computes with the logsumexp over the own block."""

    right = ring.merge_block

    def merge(out, logsumexp, block_out, block_logsumexp):
        right(out, logsumexp.clone(), block_out, block_logsumexp)

    patched.setattr(ring, "merge_block", merge)


def _lose_gradients_on_their_way(patched):
    pass_on = ring._Ring.pass_on

    def losing(rank, block, step, contents):
        return pass_on(rank, block * 0 if contents == ring._GRADIENTS else block, step, contents)

    patched.setattr(ring._Ring, "pass_on", losing)


def _keep_positions_local(patched):
    from cs336sys.training import model as models

    patched.setattr(models, "give_positions", lambda *_: None)


FAULTS = {
    "a block is skipped": _skip_a_block,
    "a mask is wrong on one block": _see_too_much,
    "blocks are merged by halves": _merge_by_halves,
    "the output is not rescaled": _add_without_rescaling,
    "the logsumexp is that of the own block": _keep_the_first_logsumexp,
    "gradients are lost on their way": _lose_gradients_on_their_way,
    "positions are those in the slice": _keep_positions_local,
}


def verify_with(fault, workload):
    with pytest.MonkeyPatch.context() as patched:
        FAULTS[fault](patched)
        return verify_on_rank(workload)
