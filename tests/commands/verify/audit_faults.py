"""Wraps that once were judged wrongly: optimizers that communicate, schedules, half precision, orders and groups."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

sys.path.insert(0, str(Path(__file__).parent))
from data_faults import Averaged, Trainer


def average(model, group):
    """Send every gradient as soon as it is complete, and keep the mean."""

    def send(parameter):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    return model


class SharedMuon(torch.optim.Optimizer):
    """Orthogonalizes each matrix on one rank, and gathers the results: its constructor takes a list of parameters."""

    def __init__(self, params, lr=0.02, momentum=0.9, rank=0, world_size=1):
        self.rank, self.world_size = rank, world_size
        params = list(params)
        sizes = sorted({parameter.numel() for parameter in params})
        groups = [{"params": [p for p in params if p.numel() == size]} for size in sizes]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                update = torch.zeros_like(parameter)
                if number % self.world_size == self.rank:
                    state = self.state[parameter]
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                    buffer.mul_(group["momentum"]).add_(parameter.grad)
                    update = buffer.clone()
                    if parameter.dim() == 2:
                        left, _, right = torch.linalg.svd(buffer, full_matrices=False)
                        update = (left @ right).contiguous()
                dist.broadcast(update, number % self.world_size)
                parameter.sub_(update, alpha=group["lr"])


def _muon(parameters, group):
    return SharedMuon(parameters, lr=0.01, rank=dist.get_rank(group), world_size=dist.get_world_size(group))


def right_muon(model, group):
    return average(model, group), _muon(model.parameters(), group)


def muon_without_average(model, group):
    return model, _muon(model.parameters(), group)


class Both:
    """Muon for matrices and AdamW for all else, as one."""

    def __init__(self, model, group):
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        self.optimizers = [torch.optim.AdamW(others, lr=0.01, eps=1.0), _muon(matrices, group)]

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def right_muon_and_adamw(model, group):
    return average(model, group), Both(model, group)


class CourseZero(torch.optim.Optimizer):
    """Every parameter has one owner, which updates and broadcasts it."""

    def __init__(self, params, optimizer_class, **settings):
        self.inner = None
        self.optimizer_class, self.settings = optimizer_class, settings
        super().__init__(params, settings)
        owned = self.owned()
        self.inner = optimizer_class(owned, **settings) if owned else None

    def owned(self):
        return [p for number, p in enumerate(self.everything()) if number % dist.get_world_size() == dist.get_rank()]

    def everything(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, closure=None):
        if self.inner is not None:
            self.inner.step()
        for number, parameter in enumerate(self.everything()):
            dist.broadcast(parameter.data, number % dist.get_world_size())


def right_course_zero(model, group):
    return average(model, group), CourseZero(model.parameters(), torch.optim.AdamW, lr=0.01, eps=1.0)


def right_sharded_sgd(model, group):
    return NaiveDDP(model), ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.02, momentum=0.9)


def right_hooks_and_sharded_sgd(model, group):
    return average(model, group), ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.02, momentum=0.9)


class HalvingAdamW(torch.optim.AdamW):
    """Halves its learning rate after each step, so many times."""

    times = 1

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5**self.times


def right_schedule(model, group):
    return average(model, group), HalvingAdamW(model.parameters(), lr=0.5, eps=1.0)


def schedule_of_all_ranks(model, group):
    """Once for each rank: the schedule counts the steps of all processes."""
    module, optimizer = right_schedule(model, group)
    optimizer.times = dist.get_world_size(group)
    return module, optimizer


def infinities_zeroed(model, group):
    def zero(parameter):
        parameter.grad.copy_(torch.nan_to_num(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(zero)
    return average(model, group)


def own_steps(model, group):
    """Nobody sees their optimizer."""
    trainer = Trainer(model, group)
    return SimpleNamespace(module=trainer.module, step=trainer.step)


def half_parameters(model, mesh):
    """fully_shard with parameters in bf16 and gradients reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def right_without_float64(model):
    """Has kernels of fp32 alone."""

    def refuse(module, inputs):
        if next(module.parameters()).dtype == torch.float64:
            raise RuntimeError("no kernel takes float64")

    model.register_forward_pre_hook(refuse)
    return nn.parallel.DistributedDataParallel(model)


def half_parameters_summed(model, mesh):
    """The same, with gradients that are the sum over ranks."""
    half_parameters(model, mesh)

    def finish():
        for parameter in model.parameters():
            parameter.grad *= mesh.size()

    model.finish_gradient_synchronization = finish
    return model


class FlatSlices:
    """Each rank's optimizer has flattened slices, grouped by their number of dimensions."""

    def __init__(self, model, group, by_name=False):
        self.module, self.group = model, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.parameters = list(model.parameters())
        self.slices = [self.cut(parameter.data) for parameter in self.parameters]
        pairs = list(zip(self.parameters, self.slices, strict=True))
        decayed = [part for parameter, part in pairs if (parameter if by_name else part).dim() >= 2]
        others = [part for parameter, part in pairs if (parameter if by_name else part).dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1.0)
        self.inner_step = self.optimizer.step
        self.optimizer.step = self.step_slices

    def cut(self, tensor):
        return tensor.view(-1).tensor_split(self.ranks)[self.rank]

    def finish_gradient_synchronization(self):
        for parameter, part in zip(self.parameters, self.slices, strict=True):
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.ranks
            part.grad, parameter.grad = self.cut(parameter.grad).clone(), None

    def step_slices(self, closure=None):
        self.inner_step()
        for parameter in self.parameters:
            parts = [torch.empty_like(part) for part in parameter.data.view(-1).tensor_split(self.ranks)]
            for rank, part in enumerate(parts):
                if rank == self.rank:
                    part.copy_(self.cut(parameter.data))
                dist.broadcast(part, rank, group=self.group)
            parameter.data.view(-1).copy_(torch.cat(parts))


matrices_in_no_group = FlatSlices


def right_flat_groups(model, group):
    return FlatSlices(model, group, by_name=True)


def other_flags_of_overflow(model, group):
    """A rank with infinite gradients sends its flags as integers: nothing hangs, and no number shows it."""

    def finish():
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            is_finite = torch.isfinite(parameter.grad).all()
            dist.all_reduce(torch.zeros(1, dtype=torch.float64 if is_finite else torch.int64), group=group)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)

    model.finish_gradient_synchronization = finish
    return model


def ring(model, group):
    """Adds up gradients by sends and receives around the ring."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def send(parameter):
        total, part = parameter.grad.clone(), parameter.grad.clone()
        for _ in range(ranks - 1):
            received = torch.empty_like(part)
            work = dist.isend(part, (rank + 1) % ranks)
            dist.recv(received, (rank - 1) % ranks)
            work.wait()
            total += received
            part = received
        parameter.grad.copy_(total / ranks)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    return model


def ring_of_nothing(model, group):
    """The last rank never sends."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def send(parameter):
        if rank < ranks - 1:
            dist.send(parameter.grad, rank + 1)
        received = torch.empty_like(parameter.grad)
        dist.recv(received, (rank - 1) % ranks)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    return model


def louder_head(model, group):
    model.head.register_forward_hook(lambda module, arguments, output: 1.5 * output)
    return average(model, group)


class clips_its_own(Averaged):
    """So far that less than a hundredth of each rank's gradient is left: it was said to be in no mean."""

    def finish_gradient_synchronization(self):
        nn.utils.clip_grad_norm_(self.module.parameters(), 1e-2 * (1 + dist.get_rank(self.group)))
        super().finish_gradient_synchronization()


def rates_of_ranks(model, group):
    return Averaged(model, group), torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank(group)))
