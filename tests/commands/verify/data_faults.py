"""Wraps of ranks that share the batch: right ones, and the same with one mistake each.

Each is called as ``--wrap data_faults.py:NAME`` calls it, with the model and the process group or the mesh.
"""

import contextlib
import os
import time
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from cs336sys.settings.training import Workload
from cs336sys.training.model import build_model


class Averaged(nn.Module):
    """A right wrap: averages gradients after the backward pass, in their order."""

    def __init__(self, model, group):
        super().__init__()
        self.module, self.group, self.ranks = model, group, dist.get_world_size(group)
        self.start()

    def start(self):
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.data, 0, group=self.group)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def trained(self):
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def finish_gradient_synchronization(self):
        for parameter in self.trained():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.send(parameter)

    def send(self, parameter):
        dist.all_reduce(parameter.grad, group=self.group)
        parameter.grad /= self.ranks

    @contextlib.contextmanager
    def no_sync(self):
        yield


def _wrong(right=Averaged, **changed):
    """The right wrap with these methods in place of its own."""
    return type("Wrong", (right,), changed)


right = Averaged
InputsReversed = _wrong(forward=lambda self, inputs: self.module(inputs.flip(0) if dist.get_rank() else inputs))
Summed = _wrong(send=lambda self, parameter: dist.all_reduce(parameter.grad, group=self.group))
AveragedTwice = _wrong(send=lambda self, parameter: (Averaged.send(self, parameter), parameter.grad.div_(self.ranks)))
# Each rank divides, and none adds.
DividedAlone = _wrong(send=lambda self, parameter: parameter.grad.div_(self.ranks))
NormsLeftOut = _wrong(trained=lambda self: [weight for weight in Averaged.trained(self) if weight.dim() > 1])
LastLeftOut = _wrong(trained=lambda self: Averaged.trained(self)[:-1])
FirstRanksGradient = _wrong(send=lambda self, parameter: dist.broadcast(parameter.grad, 0, group=self.group))
LastRanksGradient = _wrong(
    send=lambda self, parameter: dist.broadcast(parameter.grad, self.ranks - 1, group=self.group)
)


def nothing_sent(model, group):
    return model


class NotWaited(Averaged):
    """The mean is computed while the sum is still on its way."""

    def send(self, parameter):
        sent = parameter.grad.clone()
        self.works = (*getattr(self, "works", ()), (dist.all_reduce(sent, group=self.group, async_op=True), sent))
        parameter.grad /= self.ranks


class OneStepLate(Averaged):
    """The mean of the step before is used."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        now = [weight.grad.clone() for weight in self.trained()]
        before = getattr(self, "before", None)
        self.before = now
        if before is not None:
            for parameter, gradient in zip(self.trained(), before, strict=True):
                parameter.grad.copy_(gradient)


class Unfinished(Averaged):
    """Sends in hooks alone."""

    def finish_gradient_synchronization(self):
        pass


class SentBeforeComplete(Unfinished):
    """A module's hook runs when its inputs have gradients; its parameters have none yet, or those of before."""

    def __init__(self, model, group):
        super().__init__(model, group)
        for parameter in self.trained():
            parameter.grad = torch.zeros_like(parameter)
        for module in model.modules():
            if parameters := list(module.parameters(recurse=False)):
                module.register_full_backward_pre_hook(lambda *_, sent=parameters: self.send_all(sent))

    def send_all(self, parameters):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.send(parameter)


class SwappedInBucket(Averaged):
    """Gradients of one shape are copied back in another order."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        named = dict(self.module.named_parameters())
        query, key = (named[f"layers.0.attn.{name}_proj.weight"].grad for name in "qk")
        query[:], key[:] = key.clone(), query.clone()


class AddedAtEachMicroBatch(Averaged):
    """Sums in hooks, and divides at the end: what was summed before is summed again."""

    def __init__(self, model, group):
        super().__init__(model, group)
        for parameter in self.trained():
            parameter.register_post_accumulate_grad_hook(lambda weight: dist.all_reduce(weight.grad, group=group))

    def send(self, parameter):
        parameter.grad /= self.ranks


class Hooked(Unfinished):
    """A right wrap: averages in hooks, unless under no_sync."""

    def __init__(self, model, group):
        super().__init__(model, group)
        self.sends = True
        for parameter in self.trained():
            parameter.register_post_accumulate_grad_hook(lambda weight: self.send(weight) if self.sends else None)

    @contextlib.contextmanager
    def no_sync(self):
        self.sends = False
        yield
        self.sends = True


class NeverInEvaluation(Hooked):
    """Sending is switched off by eval(), and not on again by train()."""

    def train(self, mode=True):
        if not mode:
            self.sends = False
        return super().train(mode)


class Trainer:
    """A right trainer: runs whole steps, each sequence counting alike."""

    def __init__(self, model, group):
        self.module, self.group, self.ranks = model, group, dist.get_world_size(group)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0, group=group)
        self.optimizer = self.build()

    def build(self):
        return torch.optim.AdamW(self.module.parameters(), lr=1e-2)

    def step(self, batch):
        self.optimizer.zero_grad()
        inputs, targets = batch
        logits = self.module(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss * self.share(inputs)).backward()
        self.average()
        self.optimizer.step()
        return loss.item()

    def share(self, inputs):
        count = torch.tensor(float(len(inputs)))
        dist.all_reduce(count, group=self.group)
        return len(inputs) * self.ranks / count.item()

    def average(self):
        for parameter in self.module.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= self.ranks

    def state_dict(self):
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


right_trainer = Trainer
UnevenAveragedEvenly = _wrong(Trainer, share=lambda self, inputs: 1.0)


class GradientsKept(Trainer):
    """Nothing sets gradients to zero."""

    def build(self):
        optimizer = super().build()
        optimizer.zero_grad = lambda *_: None
        return optimizer


WithoutOptimizerState = _wrong(
    Trainer,
    state_dict=lambda self: {"model": self.module.state_dict()},
    load_state_dict=lambda self, state: self.module.load_state_dict(state["model"]),
)


class UnusedCounted(Averaged):
    """Divides by the ranks that have a gradient."""

    def finish_gradient_synchronization(self):
        for parameter in self.trained():
            has = torch.tensor(float(parameter.grad is not None))
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.group)
            dist.all_reduce(has, group=self.group)
            parameter.grad /= has.item()


class UnusedNotSent(Averaged):
    """A rank without a gradient sends nothing, and the others wait, or add what comes next."""

    def finish_gradient_synchronization(self):
        for parameter in self.trained():
            if parameter.grad is not None:
                self.send(parameter)


def unfreezes(model, group):
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return Averaged(model, group)


NotBroadcast = _wrong(start=lambda self: None)


class BuffersNotBroadcast(Averaged):
    def start(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, 0, group=self.group)


def same_masks(model, group):
    torch.manual_seed(0)
    return Averaged(model, group)


class SentInBf16(Averaged):
    def send(self, parameter):
        sent = parameter.grad.bfloat16()
        dist.all_reduce(sent, group=self.group)
        parameter.grad.copy_(sent / self.ranks)


class Holder:
    """Holds the wrapped module, and gives its attributes as its own: its state dicts, too."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        return getattr(self.module, name)


def right_holder(model, group):
    return Holder(Averaged(model, group))


class OwnAdamW(torch.optim.AdamW):
    """An optimizer of the wrap's file."""


class Copied:
    """Updates float32 copies of the weights, as engines that train in lower precision do."""

    def __init__(self, parameters):
        self.weights = list(parameters)
        self.optimizer = OwnAdamW([weight.detach().float() for weight in self.weights], lr=0.1, eps=1.0)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self):
        copies = self.optimizer.param_groups[0]["params"]
        for copy_, weight in zip(copies, self.weights, strict=True):
            copy_.grad = weight.grad.float()
        self.optimizer.step()
        for copy_, weight in zip(copies, self.weights, strict=True):
            weight.copy_(copy_)


def updated_in_float32(model, group):
    wrapped = Averaged(model, group)
    return wrapped, Copied(wrapped.parameters())


def half_of_the_ranks(model, group):
    """Averages among neighbours alone."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(group), 2)]
    return NotBroadcast(model, pairs[dist.get_rank(group) // 2])


class CountedCalls(Averaged):
    """Divides a block's gradients by how often its forward pass ran, which checkpoints do twice."""

    def __init__(self, model, group):
        super().__init__(model, group)
        self.calls = Counter()
        for block in model.layers:
            block.attn.register_forward_pre_hook(lambda *_, counted=block: self.calls.update([counted]))

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for block, calls in self.calls.items():
            for parameter in block.parameters():
                parameter.grad /= calls
        self.calls.clear()


class WaitsBySleeping(Averaged):
    def finish_gradient_synchronization(self):
        sent = []
        for parameter in self.trained():
            copy = parameter.grad.clone()
            sent.append((parameter, copy, dist.all_reduce(copy, group=self.group, async_op=True)))
        time.sleep(0.02)
        for parameter, copy, _ in sent:
            parameter.grad.copy_(copy / self.ranks)
        for *_, work in sent:
            work.wait()


def optimizer_of_half(model, group):
    wrapped = Averaged(model, group)
    return wrapped, torch.optim.AdamW(list(model.parameters())[:-1], lr=1e-2)


def _only_on_rank_0(change):
    def trained(self):
        parameters = Averaged.trained(self)
        return change(parameters) if dist.get_rank(self.group) == 0 else parameters

    return _wrong(trained=trained)


# One rank leaves its last gradient out, and hangs the others; or sends in the order in which they became ready.
FewerCollectivesOnOne = _only_on_rank_0(lambda parameters: parameters[:-1])
OtherOrderOnOne = _only_on_rank_0(lambda parameters: parameters[::-1])


class rank_dies(Averaged):
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        if dist.get_rank(self.group) == self.ranks - 1:
            os._exit(7)


def raises(model, group):
    return Averaged(model, group).no_such_method()


# Models that some cases need.


def buffered(size):
    model = build_model(Workload(size, seed=torch.initial_seed()), torch.device("cpu"))
    model.register_buffer("scale", torch.rand(3))
    return model


def dropping(size):
    return nn.Sequential(
        nn.Embedding(size.vocab_size, size.d_model), nn.Dropout(0.3), nn.Linear(size.d_model, size.vocab_size)
    )


def partly_frozen(size):
    model = dropping(size)
    model[0].weight.requires_grad_(False)
    return model
