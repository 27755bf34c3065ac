"""Fully sharded training equals training in one process; gradients accumulate, are clipped or not finite."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from fsdp_models import OPTIMIZERS, batch, loss_of, network, recorded, train, transformer, whole_gradients
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import Products, error_of, factors, gradients, mean_over_ranks, share
from world_sizes import WORLD_SIZES

from cs336sys.parallel import collectives
from cs336sys.parallel.collectives import group_device
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.fsdp import unit as fsdp_gradients
from cs336sys.parallel.ranks import launch

VARIANTS = {"plain": {}, "accumulated": {"micro_batches": 3}, "checkpointed": {"checkpoints": True}}


def train_alone(optimizer="adamw", dtype=torch.float64):
    """The oracle: one process, the whole batch."""
    model = network(0, dtype).cpu()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(4):
        stepper.zero_grad()
        loss_of(model, *batch(step)).backward()
        stepper.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@on_ranks(2, gpus=True)
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_equals_one_process_on_the_whole_batch(variant):
    """Random programs prefetch and evaluate, too."""
    atol = 1e-12 if group_device().type == "cpu" else 1e-10
    assert_same(train(**VARIANTS[variant]), train_alone(), atol=atol)


@on_ranks(*WORLD_SIZES)
def test_training_through_the_host_and_without_equals_one_process_on_any_number_of_ranks():
    """As Gloo sends what is on GPUs."""
    assert_same(train(), train_alone(), atol=1e-12)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (collectives, fsdp_gradients):
            monkeypatch.setattr(module, "through_host", lambda tensor: True)
        assert_same(train(), train_alone(), atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("optimizer", ["course", "fused", "sgd"])
def test_any_optimizer_steps_the_slices(optimizer):
    assert_same(train(optimizer), train_alone(optimizer), atol=1e-12)


@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize(
    ("largest", "options"),
    # Products of 12 and up to 10 are exact in bf16, up to 100 in fp16.
    [
        (999, {}),
        (100, {"compute_dtype": torch.float16}),
        (10, {"compute_dtype": torch.bfloat16}),
        (10, {"compute_dtype": torch.bfloat16, "gradient_dtype": torch.float32}),
        (10, {"gradient_dtype": torch.bfloat16}),
    ],
)
def test_mean_of_integer_gradients_is_exact(largest, options):
    sharded, world_size = FSDP(Products(), **options), dist.get_world_size()
    for _ in range(2):
        sharded(factors(dist.get_rank(), largest)).backward()
    sharded.finish_gradient_synchronization()
    means, of_ranks = whole_gradients(sharded), [factors(rank, largest) for rank in range(world_size)]
    for number, parts in enumerate(zip(*of_ranks, strict=True)):
        assert means[f"parts.{number}"].dtype == torch.float32
        assert torch.equal(means[f"parts.{number}"], 2 * sum(parts) / world_size)


@on_ranks(2, 3, gpus=True)
@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_summed_in_full_precision(compute_dtype):
    tokens, targets = map(share, batch(0, 30))
    sharded, alone = FSDP(transformer(), compute_dtype), transformer()
    for part in alone.modules():
        if type(part).__name__ in ("Linear", "Embedding"):
            part.to(compute_dtype)
    for model in (sharded, alone):
        loss_of(model, tokens, targets).backward()
    sharded.finish_gradient_synchronization()
    assert {parameter.dtype for parameter in sharded.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in sharded.parameters()} == {torch.float32}
    means = mean_over_ranks({name: gradient.float() for name, gradient in gradients(alone).items()})
    averaged = whole_gradients(sharded)
    if group_device().type == "cuda":
        assert_same(averaged, means, rtol=1e-5, atol=1e-6)
        return
    assert averaged.keys() == means.keys()
    for name, mean in means.items():
        # Replicated gradients are summed in another order, with fp32's roundings of 2^-24; in half precision a sum
        # would be 2^-11 off.
        atol = 2**-22 * mean.abs().max().item() if "ln" in name else 1e-9
        torch.testing.assert_close(averaged[name], mean, rtol=0, atol=atol)


def train_variants():
    return [train(**settings) for settings in VARIANTS.values()]


@pytest.mark.gpu
def test_training_on_one_gpu_equals_training_without_ranks():
    for weights in launch.run(train_variants, world_size=1, backend="nccl")[0]:
        assert_same(weights, train_alone(), atol=1e-10)


@on_ranks(2, gpus=True)
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_no_sync_sends_nothing_until_the_last_pass_or_finish(compute_dtype):
    expected = None
    for synchronized in ((True, True, True), (False, False, True), (False, False, False), (True, False, True)):
        sharded = FSDP(transformer(), compute_dtype)
        with recorded([]) as log:
            for step, synchronize in enumerate(synchronized):
                with contextlib.nullcontext() if synchronize else sharded.no_sync():
                    loss_of(sharded, *map(share, batch(step, 30))).backward()
            sharded.finish_gradient_synchronization()
        # Units: the embedding, three blocks, the head.
        reductions = [collective for collective, _ in log if collective in ("reduce-scatter", "all-to-all")]
        assert len(reductions) == 5 * max(1, sum(synchronized))
        expected = expected or whole_gradients(sharded)
        # Kept gradients are summed in fp32 here and by autograd: the order of additions differs.
        rtol, atol = (1e-5, 1e-7) if group_device().type == "cpu" else (1e-3, 1e-5)
        assert_same(whole_gradients(sharded), expected, rtol=rtol, atol=atol)


@on_ranks(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_on_one_rank_is_seen_by_all(value):
    sharded = FSDP(network(0))
    loss_of(sharded, *map(share, batch(0))).backward()
    sharded.finish_gradient_synchronization()
    if dist.get_rank() == dist.get_world_size() - 1:
        sharded.module.blocks[0].up.weight.grad[0, 0] = value
    before = gradients(sharded.module)
    message = f"the norm of the gradients is {value}: some are NaN or infinite, on some rank"
    assert error_of(sharded.clip_grad_norm_, 1.0, error_if_nonfinite=True) == ("RuntimeError", message)
    assert_same(gradients(sharded.module), before, equal_nan=True)
    assert not sharded.clip_grad_norm_(1.0, float("inf")).isfinite()
    assert not sharded.clip_grad_norm_(1.0).isfinite()
