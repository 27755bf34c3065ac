"""A model too large for any device, on paper: memory, sharding, and the batch that keeps a mesh busy.

Source: CS336 assignment 2 (2025), problem ``communication_accounting``, and the book that it refers to, J. Austin et
al., "How to Scale Your Model" (2025), part 5 (https://jax-ml.github.io/scaling-book/training).

The model is a stack of blocks of two linear layers, (D, F) and (F, D), without attention, embeddings or activation
function. Weights, accumulated gradients and optimizer state are fp32; activations and communicated gradients bf16.

Arguments may be numbers or symbols (:mod:`cs336sys.accounting.derivation`).
"""

import math
from dataclasses import dataclass

from cs336sys.accounting.derivation import Derived, Expression, Number, number_of, symbol
from cs336sys.errors import UsageError

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


# The 2025 handout's problem ``communication_accounting``, answered by the formulas of ``accounting.xxl``.


_HANDOUT = "2025 handout, 2.4"
_BOOK = "Scaling Book, part 5"

# Stages of the pipeline in the answer to (d).
_STAGES = 4


def memory_answers(
    stack: FeedForwardStack, tokens: int, gpu_bytes: float, device_bytes: float, *, weight_copies: bool = False
) -> list[Derived]:
    """Parts (a) and (b): bytes of states and saved activations, how many GPUs hold them, how far to shard.

    Args:
        tokens: of the batch whose activations are saved; the handout names none.
        gpu_bytes: what (a) counts GPUs of.
        device_bytes: what a device may hold in (b).
        weight_copies: count bf16 copies of the weights among what is saved for backward.

    Raises:
        UsageError: a size is not positive.
    """
    _check_positive(tokens=tokens, gpu_bytes=gpu_bytes, device_bytes=device_bytes, **vars(stack))
    named = FeedForwardStack(symbol("D", stack.d_model), symbol("F", stack.d_ff), symbol("L", stack.num_blocks))
    parameters = _answer("", "parameters", named.parameters, "parameters", "P", "A block is (D, F) and (F, D).")
    p = parameters.as_symbol()
    states = _answer(
        "(a)",
        "master weights, accumulated gradients, optimizer state",
        state_bytes(p),
        "decimal_bytes",
        "S",
        "fp32: 4 bytes each of weights and gradients, 8 of AdamW's two moments.",
    )
    saved = _answer(
        "(a)",
        "saved for backward",
        saved_bytes(named, symbol("T", tokens)) + (weight_copy_bytes(p) if weight_copies else 0),
        "decimal_bytes",
        "A",
        "bf16: the inputs of both linear layers of each block"
        + (", and a copy of all weights." if weight_copies else ", which their weight gradients need."),
    )
    s, a = states.as_symbol(), saved.as_symbol()
    total = _answer("(a)", "all of it", s + a, "decimal_bytes", "M")
    gpu = symbol("M_GPU", gpu_bytes)
    return [
        parameters,
        states,
        saved,
        total,
        _answer("(a)", "GPUs that hold all of it", math.ceil(total.as_symbol() / gpu), "GPUs"),
        _answer("", "GPUs that hold the states alone", math.ceil(s / gpu), "GPUs"),
        *_sharding(s, a, device_bytes, number_of(weight_copy_bytes(p)) if weight_copies else 0),
    ]


def _sharding(s: Expression, a: Expression, device_bytes: float, copies_bytes: float) -> list[Derived]:
    """Part (b), of states S and saved activations A."""
    exact = _answer(
        "",
        "sharding at which a device is exactly full",
        sharding_needed(s, a, symbol("M_max", device_bytes)),
        "devices",
        "N_exact",
        "The memory per device, solved for N_FSDP.",
    )
    if exact.value == math.inf:
        never = (
            f"Never: half of what is saved for backward is not sharded, {number_of(a) / 2e9:.1f} GB, which is "
            "more than "
            f"the {device_bytes / 1e9:g} GB of a device."
        )
        if copies_bytes:
            never += (
                f" Assumed: bf16 copies of all weights, {copies_bytes / 1e9:.1f} GB, are saved whole for "
                "backward and shared "
                "out like activations, every second layer's; copies that are sharded as their weights would fit."
            )
        return [_answer("(b)", "smallest N_FSDP with less than that", math.inf, "devices", "N_FSDP", never)]
    smallest = _answer(
        "(b)",
        "smallest N_FSDP with less than that",
        math.floor(exact.as_symbol()) + 1,
        "devices",
        "N_FSDP",
        "The next whole number.",
    )
    per_device = _answer(
        "(b)",
        "memory of a device then",
        sharded_bytes(s, a, smallest.as_symbol()),
        "decimal_bytes",
        reason="States and half of the activations are sharded, the other half, of every second layer, is not.",
    )
    return [exact, smallest, per_device]


def batch_answers(stack: FeedForwardStack, mesh: TpuMesh) -> list[Derived]:
    """Parts (c) and (d): the batch from which the forward pass is compute-bound, and what lowers it.

    Raises:
        UsageError: a value is not positive.
    """
    _check_positive(d_ff=stack.d_ff, **vars(mesh))
    named = TpuMesh(
        *(
            symbol(name, value)
            for name, value in zip(("X", "Y", "M_X", "M_Y", "C", "W_ici"), vars(mesh).values(), strict=True)
        )
    )
    f = symbol("F", stack.d_ff)
    intensity = _answer("", "FLOPs a byte of communication", named.intensity, "FLOPs/byte", "alpha", source=_BOOK)
    alpha = intensity.as_symbol()
    limit = _answer(
        "",
        "most TP",
        largest_tp(f, alpha, named.m_y),
        "devices",
        "Y_max",
        "TP's communication grows with the batch as computing does, so it limits Y alone.",
        source=_BOOK,
    )
    y_max = limit.as_symbol()
    overlapped = _answer(
        "(c)",
        "per-device batch, axes overlapped",
        batch_overlapped(alpha, named.y, named.m_x, y_max),
        "tokens",
        "b",
        "4 B D F / (X Y C) >= 4 D F / (Y W_ici M_X), with b = B / (X Y): FSDP's all-gathers must be hidden."
        if mesh.y <= limit.value
        else "Never: Y is more than Y_max, so TP communicates longer than it computes, whatever the batch.",
        relation=">=",
    )
    shared = _answer(
        "(c)",
        "per-device batch, axes sharing the links",
        batch_shared(overlapped.as_symbol(), named.y, y_max),
        "tokens",
        "b_shared",
        "Both communications one after the other, as the book's first edition has it: "
        "F / (Y M_X) + B / (X M_Y) <= B F / (X Y alpha)."
        if mesh.y < limit.value
        else "Never: TP's communication leaves no time for FSDP's.",
        relation=">=",
    )
    devices = named.x * named.y
    return [
        intensity,
        limit,
        overlapped,
        _answer(
            "(c)", "overall batch, axes overlapped", devices * overlapped.as_symbol(), "tokens", "B", relation=">="
        ),
        shared,
        _answer(
            "(c)", "overall batch, axes sharing the links", devices * shared.as_symbol(), "tokens", "B", relation=">="
        ),
        *_tricks(named, f, alpha, overlapped.as_symbol(), y_max),
    ]


def _tricks(mesh: TpuMesh, f: Expression, alpha: Expression, b: Expression, y_max: Expression) -> list[Derived]:
    """Part (d): what lowers the batch of (c), each alone."""
    widest = 2 ** math.floor(math.log2(max(y_max.value, 1)))
    more_links = symbol("M_X", number_of(mesh.m_x) + 1)
    tricks = [
        (
            f"per-device batch with Y = {widest}",
            batch_overlapped(alpha, symbol("Y", widest), mesh.m_x, y_max),
            "More TP splits the weights that FSDP gathers; up to Y_max it costs no time.",
            _BOOK,
        ),
        (
            "per-device batch with the best mesh",
            batch_of_best_mesh(f, alpha, mesh.m_x, mesh.m_y),
            "X = sqrt(B / F x M_X / M_Y x X Y) makes both communications equally long.",
            _BOOK,
        ),
        (
            "per-device batch with one more axis of links for FSDP",
            batch_overlapped(alpha, mesh.y, more_links, y_max),
            "The bandwidths of axes add up.",
            _BOOK,
        ),
        (
            "per-device batch with weights sent in 8 bits",
            b / 2,
            "Half the bytes need half the time.",
            "ZeRO++, arXiv:2306.10209",
        ),
        (
            f"overall batch with a pipeline of {_STAGES} stages",
            mesh.x * mesh.y * b / symbol("Z", _STAGES),
            "On as many devices FSDP has X / Z of them, and B / X >= alpha / M_X asks for less. m micro-batches leave "
            "(Z - 1) / (m + Z - 1) of the time idle, and what is gathered must be kept for all of them.",
            "GPipe, arXiv:1811.06965",
        ),
    ]
    return [
        _answer("(d)", quantity, value, "tokens", reason=reason, source=source)
        for quantity, value, reason, source in tricks
    ]


def _answer(
    part: str, quantity: str, value: Number, unit: str, name: str = "", reason: str = "", **details: str
) -> Derived:
    """A row that answers this part of the problem, or none; (a) and (b) need no more than the handout."""
    return Derived(
        quantity,
        value,
        unit,
        name,
        reason=reason,
        question=f"communication_accounting {part}" if part else "",
        **{"source": _BOOK if part == "(c)" else _HANDOUT} | details,
    )


def _check_positive(**values: Number) -> None:
    for name, number in values.items():
        value = number_of(number)
        if not 0 < value < math.inf:
            raise UsageError(f"{name.replace('_', ' ')} {value:g}: must be positive")
