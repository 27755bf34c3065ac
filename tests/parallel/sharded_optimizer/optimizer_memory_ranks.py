"""What the ranks of test_optimizer_memory run: functions that spawned processes can import."""

import torch
from optimizer_models import finish, network, on_start, replaced, sharded
from small_models import batch, share
from torch import nn

from cs336sys.parallel import collectives
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


class Sizes(nn.Module):
    """Parameters of given shapes, each of which gets a gradient."""

    def __init__(self, shapes, dtype):
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in shapes])

    def forward(self):
        return sum(part.sum() for part in self.parts)


def held_bytes(mode, shapes, dtype, master_dtype, cap_mb):
    """What this rank holds between backward pass and step, and of the optimizer after it, in bytes."""
    model = Sizes(shapes, dtype)
    options = {"master_dtype": master_dtype} if mode == "flat" else {}
    wrapped, optimizer = sharded(mode, model, lr=0.1, bucket_size_mb=cap_mb, **options)
    wrapped().backward()
    finish(wrapped)
    if mode == "flat":
        optimizer.finish_gradient_synchronization()
    local = optimizer.own_tensors
    gradients = [p.grad for p in {*model.parameters(), *local} if p.grad is not None]
    optimizer.step()
    moments = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    masters = [tensor for tensor in local if tensor.dtype != dtype]
    return {
        "parameters": storage_bytes(model.parameters()),
        "gradients": storage_bytes(gradients),
        "optimizer_state": storage_bytes(value for value in moments if value.dim()),
        "master_parameters": storage_bytes(masters),
    }


def storage_bytes(tensors):
    """Memory under tensors, each piece once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def whole_gradients_alive(cap_mb):
    """Flat: the most bytes of whole gradients alive when a bucket is launched, while nothing is communicated yet."""
    model = Sizes([(256,)] * 8, torch.float32)
    _, optimizer = sharded("flat", model, torch.optim.SGD, lr=0.1, bucket_size_mb=cap_mb)
    alive, most = {}, []
    wait = collectives._Launched.wait

    def started(operation, start, *args):
        start(*args)
        if isinstance(operation, collectives.MeanScatter):
            alive[operation] = sum(whole.nbytes for whole in args[1])
            most.append(sum(alive.values()))

    def waited(operation):
        wait(operation)
        alive.pop(operation, None)

    with on_start(started), replaced(collectives._Launched, wait=waited):
        model().backward()
    gone = all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    return max(most), gone


def communicated(mode, overlap):
    """Launches and bytes of each kind of operation in a training step."""
    counts = {}
    model = network(0)
    wrapped, optimizer = sharded(mode, model, overlap=overlap, lr=0.01)

    def count(operation, start, *args):
        start(*args)
        sent = operation._whole if isinstance(operation, collectives.SliceGather) else operation._tensors
        if isinstance(operation, collectives.MeanScatter):
            sent = args[1]
        name = type(operation).__name__
        launches, total = counts.get(name, (0, 0))
        counts[name] = launches + 1, total + sum(tensor.nbytes for tensor in sent)

    with on_start(count):
        inputs, targets = batch(0)
        nn.functional.mse_loss(wrapped(share(inputs)), share(targets)).backward()
        finish(wrapped)
        if mode == "flat":
            # What is done is not done again.
            optimizer.finish_gradient_synchronization()
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return counts


def mixed_parameters():
    """Parameters of several dtypes and orders in memory; of 3 and of 65 elements, and one with gaps between them."""
    torch.manual_seed(0)
    tensors = {
        "square": torch.randn(64, 64),
        "vector": torch.randn(64),
        "odd": torch.randn(3),
        "transposed": torch.randn(64, 6).t(),
        "half": torch.randn(64, 2).bfloat16(),
        "half vector": torch.randn(128).bfloat16(),
        "complex": torch.randn(8, 8, dtype=torch.complex64),
        "complex transposed": torch.randn(16, 4, dtype=torch.complex64).t(),
        "every other": torch.randn(6, 128)[:, ::2],
        "another square": torch.randn(64, 64),
        "nearly": torch.randn(65),
        "wide": torch.randn(2, 32),
        "image": torch.randn(4, 2, 4, 4).contiguous(memory_format=torch.channels_last),
        "scalar": torch.randn(()),
    }
    return {name: nn.Parameter(tensor) for name, tensor in tensors.items()}


def moved_together():
    """The bytes that one launch for all of :func:`mixed_parameters` sends, by sender; which parameters were moved;
    how they are after a step of 1 along themselves, and in memory."""
    parameters = mixed_parameters()
    before = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    strides = {name: parameter.stride() for name, parameter in parameters.items()}
    optimizer = ShardedOptimizer(parameters.items(), torch.optim.SGD, lr=1.0, bucket_size_mb=None)
    sent = []

    def note(operation, start, *args):
        start(*args)
        for tensor, source in zip(operation._tensors, operation._sources, strict=True):
            sent.append((source, tensor.nbytes))

    for parameter in parameters.values():
        parameter.grad = parameter.detach() * 0.5
    with on_start(note):
        optimizer.step()
    return (
        sent,
        {name for name, parameter in parameters.items() if parameter.data_ptr() != before[name]},
        {name: parameter.detach().clone() for name, parameter in parameters.items()},
        {name: parameter.stride() for name, parameter in parameters.items()} == strides,
        [parameter.storage_offset() * parameter.element_size() % 128 for parameter in parameters.values()],
    )


def held_on_gpu(modes, shapes):
    """By mode: bytes held after a step and at its peak on this GPU, beside the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    results = {}
    for mode in modes:
        model = Sizes(shapes, torch.float32).cuda()
        before = torch.cuda.memory_allocated()
        if mode == "torch":
            wrapped, optimizer = (
                NaiveDDP(model),
                ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True),
            )
        elif mode == "none":
            wrapped = NaiveDDP(model)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        else:
            wrapped, optimizer = sharded(mode, model, bucket_size_mb=16.0, fused=True)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            wrapped().backward()
            finish(wrapped)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        results[mode] = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        del model, wrapped, optimizer
        torch.cuda.empty_cache()
    return results
