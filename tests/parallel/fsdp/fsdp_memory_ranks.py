"""What the ranks of test_fsdp_memory run: functions that spawned processes can import."""

import copy
import gc

import torch
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM
from fsdp_models import batch, gathered_units, loss_of, transformer, whole_gradients
from fsdp_training_ranks import shard_like_torch
from running import wait_until
from small_models import share
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cs336sys.parallel import collectives
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.tensor_parallel import TensorParallel
from cs336sys.settings.sizes import ModelSize


def held_while_running(prefetch, checkpoints=False, compute_dtype=None):
    """For every moment of a unit's forward and backward: the unit, and the units with memory; then after the passes."""
    model = transformer(layers=5)
    names = {part: name for name, part in model.named_modules()}
    blocks = [*model.layers, model.token_embeddings, model.lm_head]
    moments = []
    sharded = FSDP(model, compute_dtype, prefetch=prefetch)
    for block in blocks:
        for part in block.modules():
            if type(part).__name__ in ("Linear", "Embedding"):
                part.register_forward_hook(
                    lambda *_, name=names[block]: moments.append((name, gathered_units(sharded)))
                )
                part.register_full_backward_hook(
                    lambda *_, name=names[block]: moments.append((name, gathered_units(sharded)))
                )
    if checkpoints:
        for block in model.layers:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    tokens, targets = map(share, batch(0, 30))
    after = []
    for step in range(3):
        moments.clear()
        loss = loss_of(sharded, tokens, targets)
        between = gathered_units(sharded)
        loss.backward()
        after.append(gathered_units(sharded))
        sharded.finish_gradient_synchronization()
        if step == 1:
            with torch.no_grad():
                sharded(tokens)
            after.append(gathered_units(sharded))
    return moments, between, after


def evaluation():
    """Outputs without gradients, through the wrapper and the module itself, and what stays gathered."""
    model = transformer()
    alone = copy.deepcopy(model)
    sharded = FSDP(model)
    tokens, _ = batch(0, 30)
    results = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            results.append((sharded(tokens), alone(tokens), gathered_units(sharded)))
    results.append((sharded.module.generate(tokens[0], 5, 0.0), alone.generate(tokens[0], 5, 0.0), {}))
    out = sharded.module(tokens)
    results.append((out, alone(tokens), gathered_units(sharded)))
    out.sum().backward()
    sharded.finish_gradient_synchronization()
    alone(tokens).sum().backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return results, whole_gradients(sharded), expected


def state_memory(compute_dtype):
    """Bytes of slices, their gradients and AdamW's moments on this rank, and of the widest gathered unit."""
    model = transformer()
    sharded = FSDP(model, compute_dtype)
    optimizer = torch.optim.AdamW(sharded.parameters())
    loss_of(sharded, *map(share, batch(0, 30))).backward()
    sharded.finish_gradient_synchronization()
    optimizer.step()
    parameters = list(sharded.parameters())
    moments = [values[key] for values in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    gathered = {unit.name: unit.gathered_bytes for unit in sharded.units}
    return tuple(map(bytes_of, (parameters, [p.grad for p in parameters], moments))), gathered


def bytes_of(tensors):
    """Of the memory that holds the tensors, which may be more than they fill."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def sent_bytes(compute_dtype):
    """By collective: bytes of the whole arrays that a third step communicates."""
    sharded = FSDP(transformer(layers=2), compute_dtype)
    sent = {}
    for step in range(3):
        sent.clear()
        with recorded_bytes(sent):
            loss_of(sharded, *map(share, batch(step, 30))).backward()
            sharded.finish_gradient_synchronization()
    return sent


class recorded_bytes(TorchDispatchMode):
    """Adds up what goes through torch's dispatcher to the process group."""

    def __init__(self, sent):
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "c10d":
            # Outputs come first; of what all ranks get they are the larger, of what each gets its part of the inputs.
            sizes = [bytes_of_argument(argument) for argument in args]
            name = operator.name().removeprefix("c10d::").lstrip("_").partition(".")[0]
            self.sent[name] = self.sent.get(name, 0) + max(sizes)
        return operator(*args, **(kwargs or {}))


def bytes_of_argument(argument):
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.itemsize
    if isinstance(argument, list | tuple):
        return sum(bytes_of_argument(part) for part in argument)
    return 0


def memory_after_wrapping(tensor_ranks=1):
    """Bytes of tensors that are alive because of a wrapped module, whose layers so many ranks share."""
    gc.collect()
    # Held, so that what an earlier test left cannot be freed meanwhile.
    earlier = alive_tensors()
    known = {tensor.untyped_storage().data_ptr() for tensor in earlier}
    plain, group, shared = transformer(), None, None
    if tensor_ranks > 1:
        shape = dist.get_world_size() // tensor_ranks, tensor_ranks
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tp"))
        shared, group = TensorParallel(plain, mesh["tp"]), mesh["data"]
    sharded = FSDP(plain, group=group)
    del plain
    slices, buffers = bytes_of(list(sharded.parameters())), bytes_of(list(sharded.module.buffers()))

    def alive():
        gc.collect()
        return bytes_of([tensor for tensor in alive_tensors() if tensor.untyped_storage().data_ptr() not in known])

    # A generator's state and the like. Gloo's thread lets go of what it sent a moment after the wait for it has ended.
    wait_until(lambda: alive() < slices + buffers + 1000, 60)
    assert shared is None or shared.module is sharded.module
    return alive(), slices, buffers


def alive_tensors():
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device.type == "cpu" and not is_fake(tensor)]


# 12 blocks of 16.8 M parameters: 3.2 GB of state in all, and hardly any activations of a batch of 16 tokens.
LARGE = ModelSize("", d_model=1024, d_ff=4096, num_layers=12, num_heads=16, vocab_size=4096, context=16, batch_size=1)


def peak_memory(compute_dtype, prefetch):
    """Most bytes of GPU memory in a training step: with our wrapper and with torch's."""
    peaks = []
    for wrapper in ("ours", "torch's"):
        with torch.device(collectives.group_device()):
            model = BasicsTransformerLM(
                LARGE.vocab_size, LARGE.context, LARGE.d_model, LARGE.num_layers, LARGE.num_heads, LARGE.d_ff
            )
        if wrapper == "ours":
            model = FSDP(model, compute_dtype, prefetch=prefetch)
        else:
            shard_like_torch(model, model.layers, compute_dtype)
        # Fused, because others need memory of their own.
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(LARGE.vocab_size, (1, LARGE.context), device=collectives.group_device())
        for step in range(4):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            loss_of(model, tokens, tokens).backward()
            if wrapper == "ours":
                model.finish_gradient_synchronization()
            optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated())
        del model, optimizer
        gc.collect()
        torch.cuda.empty_cache()
    return peaks
