"""A model too large for any device, on paper: memory, sharding, and the batch that keeps a mesh busy.

Source: CS336 assignment 2 (2025), problem ``communication_accounting``, and the book that it refers to, J. Austin et
al., "How to Scale Your Model" (2025), part 5 (https://jax-ml.github.io/scaling-book/training).

The model is a stack of blocks of two linear layers, (D, F) and (F, D), without attention, embeddings or activation
function. Weights, accumulated gradients and optimizer state are fp32; activations and communicated gradients bf16.

Arguments may be numbers or symbols (:mod:`cs336sys.accounting.derivation`).
"""

import math
from dataclasses import dataclass

from cs336sys.accounting.derivation import Number

BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class FeedForwardStack:
    """Blocks of two linear layers."""

    d_model: Number
    d_ff: Number
    num_blocks: Number

    @property
    def parameters(self) -> Number:
        return 2 * self.d_model * self.d_ff * self.num_blocks


XXL_SHAPE = {"d_model": 16384, "d_ff": 53248, "num_blocks": 126}
XXL = FeedForwardStack(**XXL_SHAPE)


def state_bytes(parameters: Number) -> Number:
    """Master weights, accumulated gradients and AdamW's two moments, all fp32: 16 bytes a parameter."""
    return 4 * FP32_BYTES * parameters


def saved_bytes(stack: FeedForwardStack, tokens: Number) -> Number:
    """bf16 activations saved for the backward pass without checkpointing: the input of each linear layer.

    Its weight gradient needs that and nothing else. A block has one input of width D and one of width F; the output of
    the last block is saved by no layer.
    """
    return BF16_BYTES * tokens * stack.num_blocks * (stack.d_model + stack.d_ff)


def weight_copy_bytes(parameters: Number) -> Number:
    """bf16 copies of all weights, which autocast keeps for the backward pass."""
    return BF16_BYTES * parameters


def sharded_bytes(states: Number, saved: Number, devices: Number) -> Number:
    """Bytes of a device when states and half of what is saved for backward are sharded: ``(S + A / 2) / N + A / 2``."""
    return (states + saved / 2) / devices + saved / 2


def sharding_needed(states: Number, saved: Number, capacity_bytes: Number) -> Number:
    """Devices at which :func:`sharded_bytes` is the capacity, ``(S + A / 2) / (capacity - A / 2)``, or infinity."""
    left = capacity_bytes - saved / 2
    return (states + saved / 2) / left if left > 0 else math.inf


@dataclass(frozen=True)
class TpuMesh:
    """A slice of TPUs with X devices for FSDP and Y for tensor parallelism, in the book's notation.

    Attributes:
        x, y: devices of each kind of parallelism; all devices are ``X Y``.
        m_x, m_y: axes of the hardware's mesh that each of them uses; bandwidths of axes add up.
        flops_per_s: of one device, C.
        bytes_per_s: of one axis, both directions together, W_ici.
    """

    x: Number
    y: Number
    m_x: Number
    m_y: Number
    flops_per_s: Number
    bytes_per_s: Number

    @property
    def intensity(self) -> Number:
        """``alpha = C / W_ici``: FLOPs that a device computes while one byte travels."""
        return self.flops_per_s / self.bytes_per_s


def largest_tp(d_ff: Number, alpha: Number, m_y: Number) -> Number:
    """Largest Y at which TP's communication is no longer than computing, whatever the batch: ``F M_Y / alpha``."""
    return d_ff * m_y / alpha


def batch_overlapped(alpha: Number, y: Number, m_x: Number, y_limit: Number) -> Number:
    """Tokens a device for computing to be as long as the longer communication: ``alpha / (M_X Y)``; infinity if never.

    The condition ``4 B D F / (X Y C) >= 4 D F / (Y W M_X)`` gives ``B / X >= alpha / M_X``.

    Args:
        y_limit: :func:`largest_tp`; with a larger Y no batch is enough.
    """
    return math.inf if y > y_limit else alpha / (m_x * y)


def batch_shared(overlapped: Number, y: Number, y_limit: Number) -> Number:
    """Tokens a device for computing to be as long as both communications one after the other; infinity if never.

    ``F / (Y M_X) + B / (X M_Y) = B F / (X Y alpha)`` solved for ``B / (X Y)``: the overlapped batch over
    ``1 - Y / (F M_Y / alpha)``.

    Args:
        overlapped: :func:`batch_overlapped`.
        y_limit: :func:`largest_tp`.
    """
    return math.inf if y >= y_limit else overlapped / (1 - y / y_limit)


def batch_of_best_mesh(d_ff: Number, alpha: Number, m_x: Number, m_y: Number) -> Number:
    """Tokens a device when X and Y are chosen freely, axes overlapped: ``alpha^2 / (M_X M_Y F)``.

    The best split ``X = sqrt(B / F x M_X / M_Y x N)`` makes both communications equally long, and computing is as long
    as they are at this batch.
    """
    return alpha**2 / (m_x * m_y * d_ff)
