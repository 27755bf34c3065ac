"""Wraps of ranks that hold slices of weights or of optimizer state: right ones, and the same with one mistake each."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def _shard(model, mesh, **settings):
    for block in model.layers:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


right_fsdp = _shard


def _divided_by(model, mesh, factor):
    for unit in (*_shard(model, mesh).layers, model):
        unit.set_gradient_divide_factor(factor)
    return model


def fsdp_summed(model, mesh):
    return _divided_by(model, mesh, 1.0)


def fsdp_divided_twice(model, mesh):
    return _divided_by(model, mesh, float(mesh.size() ** 2))


def fsdp_never_sent(model, mesh):
    _shard(model, mesh).set_requires_gradient_sync(False)
    return model


def fsdp_head_ignored(model, mesh):
    return _shard(model, mesh, ignored_params={model.lm_head.weight})


def fsdp_blocks_alone(model, mesh):
    """What is outside of blocks belongs to no unit, and nothing averages it."""
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    return model


def fsdp_reduces_in_bf16(model, mesh):
    return _shard(model, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


class Zero:
    """A right sharded optimizer over averaged gradients: each rank updates every n-th parameter, and sends it."""

    def __init__(self, model, group):
        self.module, self.group = model, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.every = list(model.parameters())
        for parameter in self.every:
            dist.broadcast(parameter.data, 0, group=group)
        self.optimizer = torch.optim.AdamW(self.own(), lr=1e-2)
        plain_step, zero = self.optimizer.step, self.optimizer.zero_grad
        self.optimizer.step = lambda *_: (plain_step(), self.send())
        self.optimizer.zero_grad = lambda *_: (zero(), self.module.zero_grad())

    def own(self):
        return self.every[self.rank :: self.ranks]

    def owner(self, number):
        return number % self.ranks

    def send(self):
        for number, parameter in enumerate(self.every):
            dist.broadcast(parameter.data, self.owner(number), group=self.group)

    def finish_gradient_synchronization(self):
        for parameter in self.every:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= self.ranks

    def clip_grad_norm_(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.every, max_norm)


def _wrong(right=Zero, **changed):
    """The right wrap with these methods in place of its own."""
    return type("Wrong", (right,), changed)


right_zero = Zero
ZeroNotSent = _wrong(send=lambda self: None)
ZeroSentByNext = _wrong(owner=lambda self, number: (number + 1) % self.ranks)
ZeroClipsOwn = _wrong(clip_grad_norm_=lambda self, norm: torch.nn.utils.clip_grad_norm_(self.own(), norm))


class Flat:
    """A right trainer that reduces and updates slices of the flattened weights, and gathers them."""

    shift = 0

    def __init__(self, model, group):
        self.module, self.group = model, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.every = list(model.parameters())
        for parameter in self.every:
            dist.broadcast(parameter.data, 0, group=group)
        size = sum(parameter.numel() for parameter in self.every)
        self.each = -(-size // self.ranks)
        weights = self.flat([parameter.data for parameter in self.every])
        self.master = nn.Parameter(self.slice(weights, self.rank).clone())
        self.optimizer = self
        self.inner = torch.optim.AdamW([self.master], lr=1e-2)
        self.param_groups = [{"params": self.every, "lr": 1e-2}]

    def flat(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.nn.functional.pad(flat, (0, self.each * self.ranks - len(flat)))

    def slice(self, flat, rank):
        return flat[rank * self.each : (rank + 1) * self.each]

    def step(self, batch):
        inputs, targets = batch
        self.module.zero_grad()
        loss = nn.functional.cross_entropy(self.module(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        grads = self.flat([torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self.every])
        dist.all_reduce(grads, group=self.group)
        self.master.grad = self.slice(grads / self.ranks, (self.rank + self.shift) % self.ranks).clone()
        self.inner.step()
        self.publish()
        return loss.item()

    def publish(self):
        whole = self.master.data.new_empty(self.each * self.ranks)
        dist.all_gather_into_tensor(whole, self.master.data, group=self.group)
        self.put(whole)

    def put(self, whole):
        first = 0
        for parameter in self.every:
            parameter.data.copy_(whole[first : first + parameter.numel()].view_as(parameter))
            first += parameter.numel()


def _flat(**changed):
    """The parts that ``verify`` asks for, with an optimizer that it can build again."""

    def wrap(model, group):
        flat = _wrong(Flat, **changed)(model, group)
        optimizer = torch.optim.AdamW(flat.every, lr=1e-2)
        return SimpleNamespace(module=flat.module, step=flat.step, optimizer=optimizer)

    return wrap


def _put_those_of_before(self, whole):
    """The weights that are computed with are those of the step before."""
    before, self.before = getattr(self, "before", None), whole
    if before is not None:
        Flat.put(self, before)


right_flat = _flat()
flat_other_slice = _flat(shift=1)
flat_off_by_one = _flat(put=lambda self, whole: Flat.put(self, whole.roll(1)))
flat_weights_late = _flat(put=_put_those_of_before)
