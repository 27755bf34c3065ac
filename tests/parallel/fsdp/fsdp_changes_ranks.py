"""What the ranks of test_fsdp_changes run: functions that spawned processes can import."""

import torch
import torch.distributed as dist
from fsdp_models import whole_gradients
from fsdp_unusual_ranks import WIDTH, Block, Model, TiedByHand, batch, gradients_alone, loss_of
from small_models import error_of, share
from torch import nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm, parametrizations, parametrize

from cs336sys.parallel.fsdp import FSDP


class Scales(Block):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.mul_(0.9)
        return super().forward(x)


class Assigns(Block):
    def forward(self, x):
        self.up.weight.data = self.up.weight.data * 0.9
        return super().forward(x)


class ReturnsItsWeight(Model):
    def forward(self, tokens):
        return super().forward(tokens), self.embedding.weight


class GivesOtherWeights(Model):
    def body(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            others = {name: torch.zeros(parameter.shape) for name, parameter in block.named_parameters()}
            x = torch.func.functional_call(block, others, x)
        return self.norm(x)


class KeepsItsWeight(TiedByHand):
    def forward(self, tokens):
        self.kept = [self.embedding.weight]
        return self.body(tokens)


class FreezesItself(Model):
    def forward(self, tokens):
        self.head.weight.requires_grad_(False)
        return super().forward(tokens)


MADE = {}


class Late(Model):
    """Computes something from a weight once, where nobody sees it."""

    def forward(self, tokens):
        if not MADE:
            MADE["scale"] = self.blocks[2].up.weight.sum() * 1
        return super().forward(tokens) * MADE["scale"]


def with_block(kind):
    model = Model()
    model.blocks[0].__class__ = kind
    return model


def refusals():
    """By what is done: the error."""
    tokens, _ = batch(0)
    errors = {
        "changed": error_of(FSDP(with_block(Scales)), tokens),
        "assigned": error_of(FSDP(with_block(Assigns)), tokens),
        "weight returned": error_of(FSDP(ReturnsItsWeight()), tokens),
        "other weights for blocks": error_of(FSDP(GivesOtherWeights()), tokens),
        "frozen in forward": error_of(FSDP(FreezesItself()), tokens),
    }
    largest = Model()
    largest.embedding.max_norm = 0.5
    errors["max_norm"] = error_of(FSDP(largest), tokens)
    keeps = FSDP(KeepsItsWeight())
    keeps(tokens)
    errors["kept"] = error_of(keeps.module.kept[0].sum)

    sharded = FSDP(Model())
    errors["vmap"] = error_of(torch.func.vmap(sharded), tokens[None])
    ones = torch.ones(2, 4)
    errors["jvp"] = error_of(torch.func.jvp, FSDP(torch.nn.Linear(4, 4)), (ones,), (ones,))
    zeros = {name: torch.zeros_like(parameter) for name, parameter in sharded.named_parameters()}
    errors["other weights"] = error_of(torch.func.functional_call, sharded, zeros, tokens)
    errors["penalty outside"] = error_of(sum(one.square().sum() for one in sharded.parameters()).backward)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    loss_of(sharded, *batch(0)).backward()
    sharded.finish_gradient_synchronization()
    parameters = [*sharded.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    errors["norm alone"] = error_of(clip_grads_with_norm_, parameters, 1.0, get_total_norm(gradients))
    clip_grad_value_(parameters, 1e-3)
    largest = max(float(gradient.abs().max()) for gradient in gradients if gradient.numel())
    loss = loss_of(sharded, *batch(0))
    optimizer.step()
    errors["step between"] = error_of(loss.backward)
    errors["unit alone"] = replaced_in_a_block(FSDP(Model()))

    hooked = Model()
    hooked.head.weight.register_hook(lambda gradient: gradient)
    errors["hook before"] = error_of(FSDP, hooked)
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        sharded = FSDP(Model())
        getattr(sharded.module.head.weight, kind)(lambda _: None)
        errors[kind] = error_of(sharded, tokens)

    cached = Model()
    parametrizations.weight_norm(cached.head)
    sharded = FSDP(cached)
    with parametrize.cached():
        sharded(tokens)
        errors["cached"] = error_of(sharded, tokens)

    late = FSDP(Late())
    for step in range(2):
        loss_of(late, *batch(step)).backward(retain_graph=True)
        errors[f"late {step}"] = error_of(late.finish_gradient_synchronization)
    return errors, largest


def replaced_in_a_block(sharded):
    sharded.module.blocks[0].up.weight = nn.Parameter(torch.zeros(10, WIDTH, dtype=torch.float64))
    return error_of(sharded.module.blocks[0], torch.ones(2, WIDTH, dtype=torch.float64))


def attributes():
    """Names of parameters with an attribute that some had before; the same in the forward pass; and of a hook."""
    model = Model()
    model.head.weight.no_decay = model.norm.weight.no_decay = True
    sharded, seen = FSDP(model), []

    def note(*_):
        seen.append([name for name, one in sharded.module.named_parameters() if hasattr(one, "no_decay")])

    note()
    model.blocks[0].register_forward_hook(note)
    model.head.register_forward_hook(note)
    sharded(batch(0)[0])
    return seen


def between_passes():
    """Whether the module holds the same slices after each of these."""

    class Raises(TiedByHand):
        def forward(self, tokens):
            out = super().forward(tokens)
            return out if self.training else 1 / 0

    sharded = FSDP(Raises(), keep_gathered=2)
    before = {name: id(parameter) for name, parameter in sharded.named_parameters()}
    same, (tokens, targets) = [], batch(0)

    def note():
        same.append(before == {name: id(parameter) for name, parameter in sharded.named_parameters()})

    loss = loss_of(sharded, tokens, targets)
    note()
    handle = sharded.module.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)
    error_of(loss_of(sharded, tokens, targets).backward)
    note()
    handle.remove()
    loss.backward()
    note()
    sharded.finish_gradient_synchronization()
    error_of(sharded.eval(), tokens)
    note()
    with torch.no_grad():
        error_of(sharded, tokens)
        note()
        sharded.module.blocks[0](torch.ones(2, WIDTH, dtype=torch.float64))
        note()
    return same


def structure_changes():
    """By change: errors before refresh(), and gradients after it, sharded and alone; slices that were lost by it."""
    torch.manual_seed(dist.get_rank())
    sharded, alone = FSDP(Model()), Model()
    both = sharded.module, alone
    results = {}

    def check(name, change, is_refused=True):
        before = {id(parameter) for parameter in sharded.parameters()}
        change()
        errors = []
        if is_refused:
            errors = [error_of(sharded, batch(0)[0]), error_of(sharded.finish_gradient_synchronization)]
            errors.append(error_of(sharded.module, batch(0)[0]))
        sharded.refresh()
        for model, inputs in ((sharded, map(share, batch(0))), (alone, batch(0))):
            model.zero_grad()
            loss_of(model, *inputs).backward()
        sharded.finish_gradient_synchronization()
        lost = len(before - {id(parameter) for parameter in sharded.parameters()})
        results[name] = errors, whole_gradients(sharded), gradients_alone(alone), lost

    def add_block():
        torch.manual_seed(5)
        alone.blocks.append(Block().double())
        # The ranks' own have other values, but that of rank 0.
        torch.manual_seed(5 + dist.get_rank())
        sharded.module.blocks.append(Block().double())

    def tie():
        for model in both:
            model.head.weight = model.embedding.weight

    def untie():
        whole = sharded.gather_full_params()["embedding.weight"]
        sharded.module.head.weight = nn.Parameter(whole.clone())
        alone.head.weight = nn.Parameter(alone.embedding.weight.detach().clone())

    def remove():
        for model in both:
            del model.blocks[1]

    def train(is_trained):
        for model in both:
            model.blocks[0].up.weight.requires_grad_(is_trained)

    check("block added", add_block)
    check("tied", tie)
    check("untied", untie)
    check("block removed", remove)
    check("frozen", lambda: train(False), is_refused=False)
    check("unfrozen", lambda: train(True))
    sharded.module.head.weight = nn.Parameter(sharded.module.head.weight.detach().clone())
    results["slice replaced"] = error_of(sharded, batch(0)[0]), error_of(sharded.refresh)
    return results
