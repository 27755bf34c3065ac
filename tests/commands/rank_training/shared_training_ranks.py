"""What the tests of training with shared layers or slices of sequences run on ranks."""

import pytest
import torch

from cs336sys.commands.rank_training.rank import verify_on_rank
from cs336sys.parallel.context_parallel import attention
from cs336sys.parallel.tensor_parallel import layers, wrapper
from cs336sys.training.ranks import tensor_strategies
from cs336sys.training.ranks.step import ParallelStep

_SEEN, _PASS_ON, _MERGE = attention._Ring.seen, attention._Ring.pass_on, attention.merge_block


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
    return _PASS_ON(rank, block * 0 if contents == attention._GRADIENTS else block, step, contents)


def _first_row_off(model, group, shapes):
    layers.share_layers(model, group, shapes)
    model.token_embeddings.first_row += model.token_embeddings.first_row > 0


OF_RINGS = {
    "a block is skipped": (attention._Ring, "seen", _skip_a_block),
    "a mask is wrong on one block": (attention._Ring, "seen", _see_too_much),
    "blocks are merged by halves": (attention, "merge_block", _merge_by_halves),
    "the logsumexp is that of the own block": (attention, "merge_block", _keep_the_first_logsumexp),
    "gradients are lost on their way": (attention._Ring, "pass_on", _lose_gradients_on_their_way),
    "positions are those in the slice": (tensor_strategies, "give_positions", lambda *_: None),
}
OF_LAYERS = {
    "input gradients not summed": (layers._Sum, "backward", staticmethod(lambda ctx, grad: (grad, None, None))),
    "outputs not summed": (layers.TensorGroup, "leave", lambda self, x: x),
    "norms' gradients not summed": (wrapper.TensorParallel, "finish_gradient_synchronization", lambda self: None),
    "wrong first token": (wrapper, "share_layers", _first_row_off),
}


def count_block_runs(workload):
    """How often a step runs its blocks, forward or again; the compiler leaves them as they are."""
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        step = ParallelStep(workload, torch.device("cpu"))
    for block in step.replica.model.layers:
        block.attn.register_forward_hook(lambda *_: runs.append(1))
    step()
    return len(runs)


def verify_faulty(fault, workload):
    """The check where something is forgotten; the trial of layers, which would refuse most models, is left out."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wrapper, "require_same_results", lambda *arguments: None)
        patched.setattr(*(OF_RINGS | OF_LAYERS)[fault])
        return verify_on_rank(workload)
