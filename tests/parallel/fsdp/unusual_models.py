"""Modules that use weights and arguments in unusual ways, and passes of them on ranks and in one process."""

import torch
from fsdp_models import WIDTH, Block, Model, batch, loss_of, whole_gradients
from small_models import gradients, share
from torch import nn
from torch.utils.checkpoint import checkpoint


class TiedByHand(Model):
    def add_parts(self):
        del self.head

    def forward(self, tokens):
        return self.body(tokens) @ self.embedding.weight.T


class TiedInACheckpoint(TiedByHand):
    def forward(self, tokens):
        return checkpoint(lambda x: x @ self.embedding.weight.T, self.body(tokens), use_reentrant=False)


class PenaltyOnAll(Model):
    def forward(self, tokens):
        return super().forward(tokens), sum(parameter.square().sum() for parameter in self.parameters())


class Probe(Model):
    def forward(self, tokens):
        with torch.no_grad():
            self.seen = self.head.weight.norm().item()
        return super().forward(tokens)


class Skipped(Block):
    """Stochastic depth: it may return what it was given."""

    def forward(self, x):
        return x


class SkipsABlock(Model):
    def add_parts(self):
        self.blocks[1].__class__ = Skipped


class AddsALoss(Block):
    def forward(self, x, loss):
        loss += self.up(x).square().mean()
        return super().forward(x)


class BlockAddsALoss(Model):
    block = AddsALoss

    def forward(self, tokens):
        x, loss = self.embedding(tokens), torch.zeros((), dtype=torch.float64)
        for block in self.blocks:
            x = block(x, loss)
        return self.head(self.norm(x)), loss


class HeadBiasHeldTwice(Model):
    """As BERT's head holds its bias."""

    def add_parts(self):
        self.outer = nn.Module()
        self.outer.decoder, self.outer.bias = self.head, self.head.bias


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class WeightGivenToAFunction(Model):
    def forward(self, tokens):
        return Product.apply(self.body(tokens), self.head.weight)


class Parametrized(Model):
    def add_parts(self):
        nn.utils.parametrizations.weight_norm(self.head)
        nn.utils.parametrizations.orthogonal(self.blocks[0].up)


class LongShortTermMemory(Model):
    """Its class has a __setattr__ of its own, and a list of its weights."""

    def add_parts(self):
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def body(self, tokens):
        return self.norm(self.memory(self.embedding(tokens))[0])


class EncoderLayerAlone(Model):
    def add_parts(self):
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def body(self, tokens):
        return self.norm(self.layer(self.embedding(tokens)))


class BackwardWithinForward(Model):
    """As models of forces have it: a backward pass through a part of the module while another computes."""

    def forward(self, tokens):
        with torch.enable_grad():
            x = self.embedding(tokens).detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.blocks[0](x).sum(), x)
        return self.head(self.body(tokens) + slope)


def passes(sharded, alone, steps=2, run=loss_of):
    """Whole gradients of the last of some steps, of both."""
    for step in range(steps):
        tokens, targets = batch(step)
        sharded.zero_grad()
        alone.zero_grad()
        run(sharded, share(tokens), share(targets)).backward()
        sharded.finish_gradient_synchronization()
        run(alone, tokens, targets).backward()
    return whole_gradients(sharded), gradients(alone)
