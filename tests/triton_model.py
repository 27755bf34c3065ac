"""A model with a kernel of Triton, as users write them; named on command lines by this file's path."""

import torch
import triton
import triton.language as tl
from torch import nn


@triton.autotune([triton.Config({"BLOCK": 64})], key=[])
@triton.jit
def double_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + positions, mask=positions < count)
    tl.store(y_ptr + positions, 2 * x, mask=positions < count)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        double_kernel[lambda settings: (triton.cdiv(x.numel(), settings["BLOCK"]),)](x, y, x.numel())
        return y

    @staticmethod
    def backward(ctx, gradient):
        return Double.apply(gradient)


class Doubled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.layers = nn.ModuleList(nn.Linear(size.d_model, size.d_model) for _ in range(size.num_layers))
        self.head = nn.Linear(size.d_model, size.vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = Double.apply(layer(x))
        return self.head(x)
