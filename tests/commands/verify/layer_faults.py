"""Wraps of ranks that share layers, sequences or stages: right ones, and the same with one mistake each."""

import torch
import torch.distributed as dist
from torch import nn


class Copy(torch.autograd.Function):
    """The same on every rank; its gradient is the sum over ranks, times ``scale``."""

    @staticmethod
    def forward(ctx, x, group, scale):
        ctx.group, ctx.scale = group, scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient * ctx.scale, None, None


class Add(torch.autograd.Function):
    """The sum over ranks, times ``scale``; its gradient is handed on, added up over ranks where ``twice``."""

    @staticmethod
    def forward(ctx, x, group, scale, twice):
        ctx.group, ctx.twice = group, twice
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        if ctx.twice:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None, None


def _slices(weight, dim, index, ranks):
    return nn.Parameter(weight.data.chunk(ranks, dim)[index].clone())


class Tensor:
    """Feed-forward layers cut by columns, then by rows, of every block."""

    adds = copies = True
    scale = 1.0
    twice = False

    def __init__(self, group):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def columns(self):
        return self.rank

    def rows(self):
        return self.rank

    def wrap(self, model):
        for block in model.layers:
            feed_forward = block.ffn
            for name in ("w1", "w3"):
                layer = getattr(feed_forward, name)
                layer.weight = _slices(layer.weight, 0, self.columns(), self.ranks)
            feed_forward.w2.weight = _slices(feed_forward.w2.weight, 1, self.rows(), self.ranks)
            feed_forward.forward = self.calling(feed_forward.forward)
        return model

    def calling(self, forward):
        def call(x):
            inner = Copy.apply(x, self.group, 1.0) if self.copies else x
            return self.add(forward(inner), x)

        return call

    def add(self, out, x):
        return Add.apply(out, self.group, self.scale, self.twice) if self.adds else out


def _wrong(**changed):
    return lambda model, group: type("Wrong", (Tensor,), changed)(group).wrap(model)


right_tensor = _wrong()


tensor_not_added = _wrong(adds=False)
tensor_gradient_not_added = _wrong(copies=False)
tensor_gradient_added_twice = _wrong(twice=True)
tensor_averaged = _wrong(scale=0.5)
tensor_rows_of_next = _wrong(rows=lambda self: (self.rank + 1) % self.ranks)
tensor_first_slices = _wrong(rows=lambda self: 0, columns=lambda self: 0)
tensor_residual_in_sum = _wrong(add=lambda self, out, x: Add.apply(out + 0.5 * x, self.group, 1.0, False))


class Gather(torch.autograd.Function):
    """Slices of sequences of all ranks joined; its gradient is that of the own slice, added up over ranks."""

    @staticmethod
    def forward(ctx, x, group, gives, order):
        ctx.group, ctx.gives = group, gives
        ranks = dist.get_world_size(group)
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts[::order], 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        if ctx.gives:
            dist.all_reduce(gradient, group=ctx.group)
        ranks, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return gradient.chunk(ranks, 1)[rank], None, None, None


def tensor_norms_not_added(model, group):
    """Norms of slices of a sequence: nothing adds their weights' gradients up."""
    model = right_tensor(model, group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for block in model.layers:
        forward = block.ln1.forward

        def norm(x, forward=forward):
            # Each token's output is used by all ranks, whose gradients for it are the same.
            return Gather.apply(forward(Split.apply(x, group, rank, ranks)), group, False, 1)

        block.ln1.forward = norm
    return model


class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, rank, ranks):
        ctx.group = group
        return x.chunk(ranks, 1)[rank].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None, None, None


class Sequence(nn.Module):
    """Each rank embeds its tokens, and the rest sees those of all ranks; logits are of its own."""

    gives, order = True, 1

    def __init__(self, model, group):
        super().__init__()
        self.module, self.group = model, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def forward(self, tokens):
        model = self.module
        x = self.gather(model.token_embeddings(tokens))
        for layer in model.layers:
            x = layer(x)
        x = x.chunk(x.shape[1] // tokens.shape[1], 1)[self.own(x, tokens)]
        return model.lm_head(model.ln_final(x))

    def own(self, x, tokens):
        return self.rank if x.shape[1] > tokens.shape[1] else 0

    def gather(self, x):
        return Gather.apply(x, self.group, self.gives, self.order)

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.send(parameter)

    def send(self, parameter):
        dist.all_reduce(parameter.grad, group=self.group)
        parameter.grad /= self.ranks


def _wrong_context(**changed):
    return type("Wrong", (Sequence,), changed)


right_context = Sequence


context_keys_not_gathered = _wrong_context(gather=lambda self, x: x)
context_order_reversed = _wrong_context(order=-1)
context_gradient_not_given = _wrong_context(gives=False)
context_not_averaged = _wrong_context(send=lambda self, parameter: None)
context_summed = _wrong_context(send=lambda self, parameter: dist.all_reduce(parameter.grad, group=self.group))
context_own_slice_of_next = _wrong_context(own=lambda self, x, tokens: (self.rank + 1) % self.ranks)


class ToNext(torch.autograd.Function):
    """Sends activations to the second stage, and waits for its logits; then for the gradient."""

    @staticmethod
    def forward(ctx, x, stage, logits):
        ctx.stage = stage
        dist.send(stage.sent(x).contiguous(), 1, group=stage.group)
        dist.recv(logits, 1, group=stage.group)
        ctx.like = x
        return logits

    @staticmethod
    def backward(ctx, gradient):
        received = torch.empty_like(ctx.like)
        if ctx.stage.returns:
            dist.recv(received, 1, group=ctx.stage.group)
        else:
            received.zero_()
        return received * ctx.stage.factor, None, None


class FromBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, start, stage, shape):
        ctx.stage = stage
        received = torch.empty(shape, dtype=start.dtype)
        dist.recv(received, 0, group=stage.group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        if ctx.stage.returns:
            dist.send(gradient.contiguous(), 0, group=ctx.stage.group)
        return None, None, None


class Stage(nn.Module):
    """The first rank has the embedding and the first blocks, the second the rest."""

    returns, factor, first_blocks, second_from = True, 1.0, 1, 1

    def __init__(self, model, group):
        super().__init__()
        self.group, self.rank = group, dist.get_rank(group)
        self.first = self.rank == 0
        self.embedding = model.token_embeddings if self.first else None
        kept = range(self.first_blocks) if self.first else range(self.second_from, len(model.layers))
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in kept})
        self.norm, self.head = (None, None) if self.first else (model.ln_final, model.lm_head)
        self.width, self.vocabulary = model.ln_final.weight.shape[0], model.lm_head.weight.shape[0]

    def sent(self, x):
        return x

    def forward(self, tokens):
        if self.first:
            x = self.embedding(tokens)
            for layer in self.layers.values():
                x = layer(x)
            logits = x.new_empty(*tokens.shape, self.vocabulary)
            return ToNext.apply(x, self, logits)
        start = torch.zeros((), dtype=self.head.weight.dtype, requires_grad=True)
        x = FromBefore.apply(start, self, (*tokens.shape, self.width))
        for layer in self.layers.values():
            x = layer(x)
        logits = self.head(self.norm(x))
        dist.send(logits.detach().contiguous(), 0, group=self.group)
        return logits


def _wrong_stage(**changed):
    return type("Wrong", (Stage,), changed)


right_pipeline = Stage
# Embedding and head are one parameter, and each stage has a part of its gradient.
pipeline_tied_apart = Stage


pipeline_without_gradient = _wrong_stage(returns=False)
pipeline_gradient_halved = _wrong_stage(factor=0.5)
pipeline_block_left_out = _wrong_stage(second_from=2)
