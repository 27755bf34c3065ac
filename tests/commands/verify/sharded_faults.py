"""Wraps of ranks that hold slices of weights or of optimizer state: right ones, and the same with one mistake each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def _shard(model, mesh, **settings):
    for block in model.layers:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def right_fsdp(model, mesh):
    return _shard(model, mesh)


def _units(model):
    return [*model.layers, model]


def fsdp_summed(model, mesh):
    _shard(model, mesh)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
    return model


def fsdp_divided_twice(model, mesh):
    _shard(model, mesh)
    for unit in _units(model):
        unit.set_gradient_divide_factor(float(mesh.size() ** 2))
    return model


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


def fsdp_clips_slices(model, mesh):
    class Wrong:
        module = _shard(model, mesh)

        def clip_grad_norm_(self, max_norm):
            slices = [parameter.grad.to_local() for parameter in model.parameters()]
            norm = torch.nn.utils.get_total_norm(slices)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
            return norm

    return Wrong()


def fsdp_loads_first_slices(model, mesh):
    """Every rank loads the slices of the first."""

    class Wrong:
        module = _shard(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def state_dict(self):
            return {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}

        def load_state_dict(self, state):
            for name, parameter in model.named_parameters():
                slice_ = state[name]
                dist.broadcast(slice_, 0)
                parameter.to_local().data.copy_(slice_)

    return Wrong()


def fsdp_optimizer_of_before(model, mesh):
    """The optimizer holds the parameters that were sharded, not the slices."""
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2)
    return _shard(model, mesh), optimizer


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


def right_zero(model, group):
    return Zero(model, group)


class ZeroNotSent(Zero):
    def send(self):
        pass


class ZeroSentByNext(Zero):
    def owner(self, number):
        return (number + 1) % self.ranks


class ZeroLastHasNoOwner(Zero):
    """Parameters are shared out by whole division, and those left over are nobody's."""

    def own(self):
        each = (len(self.every) - 1) // self.ranks
        return self.every[self.rank * each : (self.rank + 1) * each]

    def owner(self, number):
        return min(number // ((len(self.every) - 1) // self.ranks), self.ranks - 1)


class ZeroClipsOwn(Zero):
    def clip_grad_norm_(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.own(), max_norm)


class ZeroSentBeforeTheStep(Zero):
    def __init__(self, model, group):
        super().__init__(model, group)
        plain = torch.optim.AdamW.step
        self.optimizer.step = lambda *_: (self.send(), plain(self.optimizer))


class ZeroResumesFromFirst(Zero):
    """Every rank loads the optimizer state of the first rank, whose parameters are others."""

    def state_dict(self):
        state = {"model": self.module.state_dict(), "moments": {}}
        for number, parameter in enumerate(self.own()):
            state["moments"][number] = {key: value.clone() for key, value in self.optimizer.state[parameter].items()}
        return state

    def load_state_dict(self, state):
        self.module.load_state_dict(state["model"])
        for number, parameter in enumerate(self.own()):
            moments = state["moments"].get(number, {})
            value = moments.get("exp_avg", torch.zeros_like(parameter))
            dist.broadcast(
                value.resize_(parameter.shape) if value.shape != parameter.shape else value, 0, group=self.group
            )
            self.optimizer.state[parameter] = {
                "step": torch.tensor(2.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


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
        self.master = nn.Parameter(
            self.slice(self.flat([parameter.data for parameter in self.every]), self.rank).clone()
        )
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
        grads = self.flat(
            [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self.every]
        )
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


def flat_other_slice(model, group):
    class Wrong(Flat):
        shift = 1

    return _trainer(Wrong(model, group))


def right_flat(model, group):
    return _trainer(Flat(model, group))


def flat_off_by_one(model, group):
    class Wrong(Flat):
        def put(self, whole):
            super().put(whole.roll(1))

    return _trainer(Wrong(model, group))


def flat_weights_late(model, group):
    """The weights that are computed with are those of the step before."""

    class Wrong(Flat):
        def publish(self):
            whole = self.master.data.new_empty(self.each * self.ranks)
            dist.all_gather_into_tensor(whole, self.master.data, group=self.group)
            before, self.before = getattr(self, "before", None), whole
            if before is not None:
                self.put(before)

    return _trainer(Wrong(model, group))


def _trainer(flat):
    """The parts that ``verify`` asks for, with an optimizer that it can build again."""

    class Trained:
        module, step = flat.module, staticmethod(flat.step)
        optimizer = torch.optim.AdamW(flat.every, lr=1e-2)

    return Trained()
