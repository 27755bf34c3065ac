"""Only units in use and those fetched ahead have memory; memory and traffic are what accounting says."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM
from fsdp_models import batch, gathered_units, loss_of, transformer
from on_ranks import on_ranks
from running import wait_until
from small_models import share
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cs336sys.accounting.sharding import fsdp
from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.tensor_parallel import TensorParallel
from cs336sys.settings.sizes import ModelSize


@pytest.fixture(scope="module")
def two_gpus():
    """Ranks of their own: memory is counted to the last tensor."""
    with launch.start(2, backend="nccl") as ranks:
        yield ranks


@on_ranks(2, gpus=True)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_only_units_in_use_and_those_fetched_ahead_have_memory(prefetch, checkpoints):
    model = transformer(layers=5)
    names, moments = {part: name for name, part in model.named_modules()}, []
    sharded = FSDP(model, torch.bfloat16, prefetch=prefetch)
    for block in [*model.layers, model.token_embeddings, model.lm_head]:

        def note(*_, name=names[block]):
            moments.append((name, gathered_units(sharded)))

        for part in block.modules():
            if type(part).__name__ in ("Linear", "Embedding"):
                part.register_forward_hook(note)
                part.register_full_backward_hook(note)
    if checkpoints:
        for block in model.layers:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    tokens, targets = map(share, batch(0, 30))
    for step in range(3):
        moments.clear()
        loss = loss_of(sharded, tokens, targets)
        between = gathered_units(sharded)
        loss.backward()
        assert gathered_units(sharded) == {}
        sharded.finish_gradient_synchronization()
        if step == 1:
            with torch.no_grad():
                sharded(tokens)
            assert gathered_units(sharded) == {}
    # Seven linear layers a block, and two others, forward and backward. Checkpointed blocks run forward again, and stop
    # when the input of their last layer is there.
    assert len(moments) == 5 * (7 + 7 + (6 if checkpoints else 0)) + 2 * 2
    assert all(unit in held and len(held) <= 1 + prefetch for unit, held in moments)
    assert any(len(held) == 1 + prefetch for _, held in moments)
    assert len(between) == 1 + prefetch
    assert "lm_head" in between
    sharded(tokens)
    sharded.finish_gradient_synchronization()
    assert gathered_units(sharded) == {}, "a step without a backward pass ends, too"


SIZE = ModelSize("", d_model=24, d_ff=40, num_layers=3, num_heads=2, vocab_size=30, context=8)


def bytes_of(tensors):
    """Of the memory that holds the tensors, which may be more than they fill."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_memory_is_what_accounting_says(compute_dtype):
    sharded, world_size = FSDP(transformer(), compute_dtype), dist.get_world_size()
    optimizer = torch.optim.AdamW(sharded.parameters())
    loss_of(sharded, *map(share, batch(0, 30))).backward()
    sharded.finish_gradient_synchronization()
    optimizer.step()
    parameters = list(sharded.parameters())
    moments = [values[key] for values in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    expected = fsdp.fully_sharded_state(SIZE, dist.get_rank(), world_size)
    assert bytes_of(parameters) == expected.parameters
    assert bytes_of([parameter.grad for parameter in parameters]) == expected.gradients
    assert bytes_of(moments) == expected.optimizer_state
    gathered = {unit.name: unit.gathered_bytes for unit in sharded.units}
    assert gathered == fsdp.gathered_bytes(SIZE, 2 if compute_dtype else 4, world_size)
    # Gradients of slices are views of the tensor in which they were averaged.
    averaged = [weakref.ref(unit.parameters[0].shard.grad._base) for unit in sharded.units]
    optimizer.zero_grad()
    wait_until(lambda: not any(tensor() is not None for tensor in averaged), 60)


def alive_tensors():
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device.type == "cpu" and not is_fake(tensor)]


@on_ranks(2, 4)
def test_whole_parameters_are_gone_after_wrapping():
    """Of four ranks two share the layers."""
    gc.collect()
    # Held, so that what an earlier test left cannot be freed meanwhile.
    earlier = alive_tensors()
    known = {tensor.untyped_storage().data_ptr() for tensor in earlier}
    plain, group, shared = transformer(), None, None
    if dist.get_world_size() > 2:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        shared, group = TensorParallel(plain, mesh["tp"]), mesh["data"]
    sharded = FSDP(plain, group=group)
    del plain
    held = bytes_of(list(sharded.parameters())) + bytes_of(list(sharded.module.buffers()))

    def alive():
        gc.collect()
        return bytes_of([tensor for tensor in alive_tensors() if tensor.untyped_storage().data_ptr() not in known])

    # A generator's state and the like. Gloo's thread lets go of what it sent a moment after the wait for it has ended.
    wait_until(lambda: alive() < held + 1000, 60)
    assert shared is None or shared.module is sharded.module
    assert held <= alive() < held + 1000


# 12 blocks of 16.8 M parameters: 3.2 GB of state in all, and hardly any activations of a batch of 16 tokens.
LARGE = ModelSize("", d_model=1024, d_ff=4096, num_layers=12, num_heads=16, vocab_size=4096, context=16, batch_size=1)


@on_ranks(gpus=True)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(("compute_dtype", "element_bytes"), [(None, 4), (torch.bfloat16, 2)])
def test_peak_memory_is_within_the_formula(compute_dtype, element_bytes, prefetch):
    gc.collect()
    torch.cuda.empty_cache()
    sizes = LARGE.vocab_size, LARGE.context, LARGE.d_model, LARGE.num_layers, LARGE.num_heads, LARGE.d_ff
    with torch.device(group_device()):
        sharded = FSDP(BasicsTransformerLM(*sizes), compute_dtype, prefetch=prefetch)
    # Fused, because others need memory of their own.
    optimizer = torch.optim.AdamW(sharded.parameters(), fused=True)
    tokens = torch.randint(LARGE.vocab_size, (1, LARGE.context), device=group_device())
    for step in range(4):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss_of(sharded, tokens, tokens).backward()
        sharded.finish_gradient_synchronization()
        optimizer.step()
    state = fsdp.fully_sharded_state(LARGE, 0, 2)
    bound = fsdp.fully_sharded_peak(LARGE, element_bytes, 2, prefetch=prefetch)
    beside_state = bound.gathered + bound.whole_gradients + bound.received
    # Activations of 16 tokens, and the workspace of matrix products, 32 MiB.
    assert state.total < torch.cuda.max_memory_allocated() < state.total + beside_state + 50 * 2**20
