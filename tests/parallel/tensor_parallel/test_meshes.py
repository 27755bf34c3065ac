"""Layers shared in one dimension of a mesh and the batch in the other: training, clipping, checkpoints."""

import functools

import pytest
import torch
from cs336_basics.nn_utils import cross_entropy
from same_tensors import assert_same
from tensor_models import batch, model, run_pass
from torch.distributed.device_mesh import init_device_mesh

from cs336sys.parallel.ddp import BucketedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.tensor_parallel import TensorParallel
from cs336sys.parallel.tensor_parallel.checkpoint import load_checkpoint, save_checkpoint

MAX_NORM = 0.05
WRAPPERS = {
    "ddp": lambda module, mesh: BucketedDDP(module, 0.001, group=mesh["data"]),
    "fsdp": lambda module, mesh: FSDP(module, group=mesh["data"]),
}


@functools.cache
def trained_alone():
    """Norms of the gradients, and weights, of one process that clips."""
    plain, norms = model(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        cross_entropy(plain(inputs), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in plain.named_parameters()}


def train(data_ranks, tensor_ranks, outer, sequence_parallel, save=None, load=None):
    """Train two steps as one process does.

    Args:
        save: write a checkpoint after the first step.
        load: read one in place of the first step.
    """
    mesh = init_device_mesh("cpu", (data_ranks, tensor_ranks), mesh_dim_names=("data", "tp"))
    shared = TensorParallel(model(seed=0 if load is None else 1), mesh["tp"], sequence_parallel=sequence_parallel)
    wrapped = WRAPPERS[outer](shared.module, mesh) if outer else shared
    sharded = wrapped if outer == "fsdp" else None
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    share = slice(*(4 // data_ranks * (mesh.get_local_rank("data") + end) for end in (0, 1)))
    norms, weights = trained_alone()
    for step in range(2):
        if step == 0 and load is not None:
            assert load_checkpoint(load, shared, optimizer, sharded=sharded) == {"step": 1}
            continue
        optimizer.zero_grad()
        run_pass(shared, step, wrapped, share)
        wrapped.finish_gradient_synchronization()
        if wrapped is not shared:
            shared.finish_gradient_synchronization()
        assert shared.clip_grad_norm_(MAX_NORM, sharded=sharded).item() == pytest.approx(norms[step], rel=1e-5)
        optimizer.step()
        if step == 0 and save is not None:
            save_checkpoint(save, shared, optimizer, sharded=sharded, extra={"step": 1})
    whole = shared.full_state_dict(None if sharded is None else sharded.gather_full_params())
    # AdamW divides by the root of a square: a gradient of rounding errors moves a weight as far as any.
    assert_same(whole, weights, rtol=1e-4, atol=1e-5)


def train_and_save(folder):
    train(2, 2, "ddp", False, save=f"{folder}/ddp")
    train(2, 2, "fsdp", True, save=f"{folder}/fsdp")


def test_meshes_train_as_one_process_and_read_each_others_checkpoints(ranks, tmp_path):
    ranks(4).run(train_and_save, tmp_path)
    ranks(4).run(train, 4, 1, "fsdp", False, None, f"{tmp_path}/ddp")
    ranks(2).run(train, 1, 2, "", True, None, f"{tmp_path}/fsdp")
