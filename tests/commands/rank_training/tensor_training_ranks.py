"""What the tests of training with shared layers run on ranks."""

import pytest
import torch

from cs336sys.commands.rank_training.communication import recorded_communication
from cs336sys.commands.rank_training.rank import verify_on_rank
from cs336sys.parallel.tensor_parallel import group as tensor_group
from cs336sys.parallel.tensor_parallel import layers, wrapper
from cs336sys.training.ranks.step import ParallelStep


def verify_and_count(workloads):
    """For each, how far weights are from those of one process, and the bytes that a step sends."""
    return [(verify_on_rank(workload).relative, _sent(workload)) for workload in workloads]


def _sent(workload):
    step = ParallelStep(workload, torch.device("cpu"))
    # FSDP learns in the first step what is used after what.
    step()
    with recorded_communication() as communications:
        step()
    return sum(communication.sent_bytes for communication in communications if not communication.is_flags)


def count_block_runs(workload):
    """How often a step runs its blocks, forward or again; the compiler leaves them as they are."""
    runs = []
    with _replaced(torch, "compile", lambda function, **_: function):
        step = ParallelStep(workload, torch.device("cpu"))
    for block in step.replica.model.layers:
        block.attn.register_forward_hook(lambda *_: runs.append(1))
    step()
    return len(runs)


def verify_faulty(fault, workload):
    """How far weights are off, and of which parameter most, where something is forgotten.

    The trial of layers, which would refuse most of these models, is left out.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wrapper, "require_same_results", lambda *arguments: None)
        patched.setattr(*FAULTS[fault])
        difference = verify_on_rank(workload)
    return difference.relative, difference.parameter


def _first_row_off(model, group, shapes):
    layers.share_layers(model, group, shapes)
    model.token_embeddings.first_row += model.token_embeddings.first_row > 0


FAULTS = {
    "input gradients not summed": (tensor_group._Sum, "backward", staticmethod(lambda ctx, grad: (grad, None, None))),
    "outputs not summed": (tensor_group.TensorGroup, "leave", lambda self, x: x),
    "norms' gradients not summed": (wrapper.TensorParallel, "finish_gradient_synchronization", lambda self: None),
    "wrong first token": (wrapper, "share_layers", _first_row_off),
}
