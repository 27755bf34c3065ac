"""Data parallel training equals training in one process; gradients are averaged in place, or named."""

import copy
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from ddp_modes import MODES, TORCH_MODES, each_mode, finish, recorded_launches, train, train_alone
from on_ranks import on_ranks
from same_tensors import assert_same, dict_of
from small_models import (
    PartlyUsed,
    Permuted,
    Products,
    WithoutGradient,
    batch,
    error_of,
    factors,
    gradients,
    mean_over_ranks,
    network,
    penalized_loss,
    share,
    weights,
)
from torch import nn
from world_sizes import WORLD_SIZES

from cs336sys.parallel.collectives import gather_objects, group_device
from cs336sys.parallel.ddp import FlatDDP
from cs336sys.parallel.ranks import launch


@on_ranks(2, gpus=True)
def test_all_modes_and_torch_train_to_bitwise_equal_weights():
    """Possible at two ranks alone: a + b is b + a, while longer sums depend on how messages are cut."""
    expected = gather_objects(train("torch"))[0]
    for mode in [*MODES, *TORCH_MODES]:
        assert_same(train(mode), expected)


@on_ranks(*WORLD_SIZES)
@each_mode
def test_mean_of_integer_gradients_is_exact(mode):
    world_size = dist.get_world_size()
    wrapped = MODES[mode](Products())
    wrapped(factors(dist.get_rank())).backward()
    finish(wrapped)
    for part, *parts in zip(wrapped.module.parts, *map(factors, range(world_size)), strict=True):
        assert torch.equal(part.grad, sum(parts) / world_size)


def train_in_fp64():
    return [train(mode, torch.float64) for mode in MODES]


@pytest.mark.gpu
def test_training_on_one_gpu_equals_training_without_ranks():
    for trained in launch.run(train_in_fp64, world_size=1, backend="nccl")[0]:
        assert_same(trained, train_alone(torch.float64), atol=1e-10)


@on_ranks(2)
@each_mode
def test_gradients_are_averaged_where_they_are(mode):
    wrapped = MODES[mode](network(0))
    for step in range(3):
        wrapped.zero_grad(set_to_none=step != 1)
        wrapped(batch(step)[0]).sum().backward()
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        before = [parameter.grad.data_ptr() for parameter in trained]
        finish(wrapped)
        assert [parameter.grad.data_ptr() for parameter in trained] == before
        blocks = {parameter.grad.untyped_storage().data_ptr() for parameter in trained}
        assert (len(blocks) == 1) == (mode == "flat")


@on_ranks(2)
def test_flat_buffer_leaves_its_memory_to_the_next_forward_pass():
    wrapped = FlatDDP(network(0))
    wrapped(batch(0)[0]).sum().backward()
    finish(wrapped)
    buffer = weakref.ref(next(parameter.grad._base for parameter in wrapped.parameters() if parameter.requires_grad))
    assert buffer() is not None
    wrapped.zero_grad()
    # Gloo's thread holds what it communicated a moment longer.
    deadline = time.monotonic() + 60
    while buffer() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert buffer() is None


@on_ranks(2, 3, gpus=True)
@each_mode
def test_parameter_without_gradient_counts_as_zero_and_stays_none_if_nobody_has_one(mode):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = sum(12.0 * (number + 1) for number in range(world_size)) / world_size
    wrapped = MODES[mode](PartlyUsed().to(group_device()))
    for used_on, sometimes in ((range(world_size), whole), ((0,), 12.0 / world_size), ((), None)):
        wrapped.zero_grad()
        wrapped(12.0 * (rank + 1), rank in used_on).backward()
        finish(wrapped)
        assert_same(gradients(wrapped.module), dict_of(used=whole, sometimes=sometimes, never=None))


@on_ranks(2)
@each_mode
def test_backward_function_that_returns_none_counts_as_zero(mode):
    wrapped = MODES[mode](PartlyUsed())
    through = WithoutGradient.apply if dist.get_rank() == 1 else torch.clone
    ((through(wrapped.module.sometimes) * 4.0).sum() + (wrapped.module.used * 2.0).sum()).backward()
    finish(wrapped)
    assert_same(gradients(wrapped.module), dict_of(used=2.0, sometimes=2.0, never=None))


@on_ranks(2)
@each_mode
def test_parameters_that_are_not_contiguous(mode):
    wrapped, x = MODES[mode](Permuted(dist.get_rank())), torch.tensor(dist.get_rank() + 1.0)
    alone = copy.deepcopy(wrapped.module)
    for module in (alone, wrapped):
        module(x).backward()
    if dist.get_rank() == 1 and mode in ("naive", "flat"):
        # As a caller may leave it: the same numbers in another order in memory.
        parameter = wrapped.module.transposed
        parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
    finish(wrapped)
    assert_same(gradients(wrapped.module), mean_over_ranks(gradients(alone)))
    assert_same(weights(wrapped.module), gather_objects(weights(wrapped.module))[0])


@on_ranks(2)
@each_mode
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float64])
def test_gradient_dtype_is_sent_and_the_result_keeps_its_own(mode, gradient_dtype):
    wrapped, inputs = MODES[mode](network(0), gradient_dtype=gradient_dtype), batch(dist.get_rank())[0]
    alone = copy.deepcopy(wrapped.module)
    alone(inputs).sum().backward()
    with recorded_launches() as launches:
        for _ in range(2):
            wrapped.zero_grad()
            launches.clear()
            wrapped(inputs).sum().backward()
            finish(wrapped)
    sent = {name: value.to(gradient_dtype) for name, value in gradients(alone).items() if value is not None}
    expected = {name: mean.to(torch.float32) for name, mean in mean_over_ranks(sent).items()}
    averaged = gradients(wrapped.module)
    assert_same({name: averaged[name] for name in expected}, expected)
    assert all(dtype == gradient_dtype and len(elements) == 1 for _, elements, dtype in launches)


@on_ranks(2)
@each_mode
def test_sparse_gradient_is_named(mode):
    wrapped = MODES[mode](nn.Embedding(5, 3, sparse=True))

    def step():
        wrapped(torch.tensor([1, 2])).sum().backward()
        finish(wrapped)

    message = "weight has a sparse gradient, which cannot be averaged: choose sparse=False"
    assert error_of(step) == ("UsageError", message)


@on_ranks(2, gpus=True)
@each_mode
def test_gradient_penalty_is_that_of_one_process_and_gradients_in_a_graph_are_refused(mode):
    alone = network(0, torch.float64)
    penalized_loss(alone, *batch(0, torch.float64)).backward()
    wrapped = MODES[mode](network(0, torch.float64).to(group_device()))
    penalized_loss(wrapped, *map(share, batch(0, torch.float64))).backward()
    finish(wrapped)
    assert_same(gradients(wrapped.module), gradients(alone), atol=1e-12)

    partly = MODES[mode](PartlyUsed().to(group_device()))
    errors = [error_of(partly(1.0, True).backward, create_graph=True)]
    partly.zero_grad()
    with partly.no_sync():
        errors.append(error_of(partly(1.0, True).square().backward, create_graph=True))
    partly.zero_grad()
    used = partly.module.used
    (used.grad,) = torch.autograd.grad(used.square().sum(), used, create_graph=True)
    errors.append(error_of(finish, partly))
    for kind, message in errors:
        assert kind == "UsageError"
        assert message.partition(" got its gradient with ")[2] == (
            "create_graph=True, and the average over ranks is in no graph: take gradients to differentiate again by "
            "torch.autograd.grad, and call backward() without it"
        )


@on_ranks(gpus=True)
def test_no_mode_needs_more_memory_than_torch():
    """Of 8 layers with 4 MiB of fp32 weights each."""
    gc.collect()
    before, peaks = torch.cuda.memory_allocated(), {}
    for mode in (*MODES, "torch"):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda()
        wrapped = (MODES | TORCH_MODES)[mode](model)
        # Fused, because others need memory of their own.
        optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
        for step in range(4):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            wrapped(torch.ones(16, 1024, device="cuda")).sum().backward()
            finish(wrapped)
            optimizer.step()
        peaks[mode] = (torch.cuda.max_memory_allocated() - before) / 2**20
        del model, wrapped, optimizer
        gc.collect()
    # Weights, gradients and AdamW's two moments are 128 MiB; a second copy of the gradients would be 32 more.
    assert peaks["torch"] > 128
    assert all(peak < peaks["torch"] + 4 for peak in peaks.values()), peaks
