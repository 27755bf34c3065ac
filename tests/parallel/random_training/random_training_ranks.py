"""Trains random models by every wrapper and optimizer on ranks, and by plain PyTorch on the whole batch."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from random_models import Case, Pass, RandomModel, random_case
from torch import Tensor, nn

from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    # A large eps: where a gradient is zero but for rounding, an ordinary one would make steps of the rounding.
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}),
}
DDP_CLASSES = {
    "naive": lambda model, case: NaiveDDP(model),
    "flat": lambda model, case: FlatDDP(model),
    "overlap": lambda model, case: OverlappedDDP(model),
    "bucketed": lambda model, case: BucketedDDP(model, case.cap_mb),
    "optimizer": lambda model, case: BucketedDDP(model, case.cap_mb),
}
WRAPPERS = (*DDP_CLASSES, "optimizer-flat", "fsdp")
DROPS_GRADIENTS = ("optimizer-flat",)


def train_all(seeds: range, every_wrapper: bool) -> list[str]:
    """What went wrong, a line for each case and wrapper; empty if nothing did.

    Args:
        every_wrapper: train each model by all of :data:`WRAPPERS`, not by two that change from seed to seed.
    """
    cases = {seed: random_case(seed, dist.get_world_size()) for seed in seeds}
    shifts = range(len(WRAPPERS)) if every_wrapper else (0, 3)
    trained = [(seed, WRAPPERS[(seed + shift) % len(WRAPPERS)]) for seed in seeds for shift in shifts]
    expected = _references(cases, trained)
    wrong = []
    for seed, wrapper in trained:
        case = cases[seed]
        found = train(case, wrapper)
        errors = {
            name: (found[name].double() - whole.double()).abs().max().item()
            for name, whole in expected[seed, wrapper in DROPS_GRADIENTS].items()
        }
        worst = max(errors, key=errors.__getitem__)
        if not errors[worst] <= case.tolerance:
            wrong.append(f"{wrapper}: {worst} is {errors[worst]:.1e} off; {case}")
    return wrong


def _references(cases: dict[int, Case], trained: list[tuple[int, str]]) -> dict[tuple[int, bool], dict[str, Tensor]]:
    """What each case is compared with, by seed and whether gradients are dropped; each rank computes a share of it."""
    wanted = dict.fromkeys((seed, wrapper in DROPS_GRADIENTS) for seed, wrapper in trained)
    share = list(wanted)[dist.get_rank() :: dist.get_world_size()]
    shares: list = [None] * dist.get_world_size()
    dist.all_gather_object(shares, {(seed, drops): reference(cases[seed], drops) for seed, drops in share})
    return {key: weights for one in shares for key, weights in one.items()}


def train(case: Case, wrapper: str) -> dict[str, Tensor]:
    """All parameters after the history, whole, by name."""
    model = case.model()
    optimizer_class, options = OPTIMIZERS[case.optimizer]
    synchronizer, optimizer = _wrap(case, wrapper, model, optimizer_class, options)
    called = synchronizer if isinstance(synchronizer, nn.Module) else model
    rank = dist.get_rank()
    reverse = rank % 2 == 1 and wrapper != "fsdp"
    for step in case.steps:
        optimizer.zero_grad(set_to_none=step.set_to_none or wrapper in DROPS_GRADIENTS)
        if step.toggled is not None:
            _toggle(case, model, step.toggled)
            synchronizer.refresh()
            if wrapper == "optimizer":
                optimizer.refresh()
        if step.evaluated:
            with torch.no_grad():
                _loss(case, called, step.passes[0], rank, reverse)
        for number, one in enumerate(step.passes):
            is_last = number + 1 == len(step.passes)
            with nullcontext() if is_last else synchronizer.no_sync():
                loss = _loss(case, called, one, rank, reverse) / len(step.passes)
                if loss.requires_grad:
                    loss.backward()
        synchronizer.finish_gradient_synchronization()
        optimizer.step()
    if isinstance(synchronizer, FSDP):
        return synchronizer.gather_full_params()
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


def _wrap(case: Case, wrapper: str, model: RandomModel, optimizer_class: Callable, options: dict):
    if wrapper == "fsdp":
        sharded = FSDP(model, prefetch=case.prefetch)
        return sharded, optimizer_class(sharded.parameters(), **options)
    if wrapper == "optimizer-flat":
        optimizer = ShardedOptimizer(
            model.named_parameters(), optimizer_class, flat=True, bucket_size_mb=case.cap_mb, **options
        )
        return optimizer, optimizer
    wrapped = DDP_CLASSES[wrapper](model, case)
    if wrapper == "optimizer":
        return wrapped, ShardedOptimizer(wrapped.parameters(), optimizer_class, bucket_size_mb=case.cap_mb, **options)
    return wrapped, optimizer_class(wrapped.parameters(), **options)


def _toggle(case: Case, model: RandomModel, part: int) -> None:
    for parameter in model.parts[part].parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def _loss(case: Case, model: nn.Module, one: Pass, rank: int, reverse: bool) -> Tensor:
    x, tokens, targets = (whole[rank * case.batch :][: case.batch] for whole in case.data(one))
    if x.requires_grad:
        x = x.detach().requires_grad_()
    return F.mse_loss(model(x, tokens, one.choices[rank], reverse), targets)


def reference(case: Case, drops_gradients: bool) -> dict[str, Tensor]:
    """Parameters after plain training on one process, in float64; gradients are added without sharing memory."""
    model = case.model().double()
    optimizer_class, options = OPTIMIZERS[case.optimizer]
    optimizer = optimizer_class(model.parameters(), **options)
    for step in case.steps:
        optimizer.zero_grad(set_to_none=step.set_to_none or drops_gradients)
        if step.toggled is not None:
            _toggle(case, model, step.toggled)
        for one in step.passes:
            losses = [_loss(case, model, one, rank, False) for rank in range(case.world_size)]
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            loss = sum(losses) / case.world_size / len(step.passes)
            if not (trained and loss.requires_grad):
                continue
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            for parameter, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
