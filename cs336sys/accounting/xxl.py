"""A model too large for any device, on paper: memory, sharding, and the batch that keeps a mesh busy.

Source: CS336 assignment 2 (2025), problem ``communication_accounting``, and the book that it refers to, J. Austin et
al., "How to Scale Your Model" (2025), part 5 (https://jax-ml.github.io/scaling-book/training).

The model is a stack of blocks of two linear layers, (D, F) and (F, D), without attention, embeddings or activation
function. Weights, accumulated gradients and optimizer state are fp32; activations and communicated gradients bf16.

Letters are the book's: X devices for FSDP and Y for tensor parallelism (TP), which use M_X and M_Y axes of links of
W_ici bytes/s; a device's C FLOP/s, ``alpha = C / W_ici``, and the batch B, ``b`` tokens a device.
"""

import math
from dataclasses import dataclass
from functools import partial

from cs336sys.accounting.derivation import Derived, Expression, Number, number_of, symbol, why
from cs336sys.errors import UsageError

_HANDOUT = "2025 handout, 2.4"
_BOOK = "Scaling Book, part 5"

# Stages of the pipeline in the answer to (d).
_STAGES = 4


@dataclass(frozen=True)
class FeedForwardStack:
    """Blocks of two linear layers."""

    d_model: int
    d_ff: int
    num_blocks: int


XXL = FeedForwardStack(d_model=16384, d_ff=53248, num_blocks=126)


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


def memory_answers(
    stack: FeedForwardStack, tokens: int, gpu_bytes: float, device_bytes: float, *, weight_copies: bool = False
) -> list[Derived]:
    """Answer (a) and (b) of ``communication_accounting``: bytes of states and activations, GPUs, how far to shard.

    Saved for backward, in bf16 and without checkpointing, is the input of each linear layer: its weight gradient needs
    that and nothing else. A block has one input of width D and one of width F.

    Args:
        tokens: of the batch whose activations are saved; the handout names none.
        gpu_bytes: what (a) counts GPUs of.
        device_bytes: what a device may hold in (b).
        weight_copies: count bf16 copies of the weights among what is saved for backward, as autocast keeps them.
    """
    d, f, blocks = symbol("D", stack.d_model), symbol("F", stack.d_ff), symbol("L", stack.num_blocks)
    t, gpu = symbol("T", tokens), symbol("M_GPU", gpu_bytes)
    reason = why("block_of_stack")
    parameters = _answer("parameters", 2 * d * f * blocks, "parameters", name="P", reason=reason)
    p = parameters.as_symbol()
    label = "master weights, accumulated gradients, optimizer state"
    row = partial(_answer, part="(a)", unit="decimal_bytes")
    states = row(label, 16 * p, name="S", reason=why("states"))
    copies = 2 * p if weight_copies else 0
    reason = why("saved", weight_copies)
    saved = row("saved for backward", 2 * t * blocks * (d + f) + copies, name="A", reason=reason)
    s, a = states.as_symbol(), saved.as_symbol()
    total = row("all of it", s + a, name="M")
    return [
        parameters,
        states,
        saved,
        total,
        _answer("GPUs that hold all of it", math.ceil(total.as_symbol() / gpu), "GPUs", part="(a)"),
        _answer("GPUs that hold the states alone", math.ceil(s / gpu), "GPUs"),
        *_sharding_answers(s, a, device_bytes, number_of(copies)),
    ]


def _sharding_answers(s: Expression, a: Expression, device_bytes: float, copies_bytes: float) -> list[Derived]:
    """Answer (b): states and half of what is saved for backward are sharded, ``(S + A / 2) / N + A / 2`` a device.

    ``copies_bytes`` are those of the weights' bf16 copies, which ``A`` contains.
    """
    free_bytes = symbol("M_max", device_bytes) - a / 2
    degree = (s + a / 2) / free_bytes if free_bytes > 0 else math.inf
    row = partial(_answer, unit="devices")
    exact = row("sharding at which a device is exactly full", degree, name="N_exact", reason=why("exact_sharding"))
    label = "smallest N_FSDP with less than that"
    if exact.value == math.inf:  # A / 2 by itself fills the device.
        copies_gb = f"{copies_bytes / 1e9:.1f}" if copies_bytes else ""  # Without copies nothing is said of them.
        never = why("no_sharding", f"{number_of(a) / 2e9:.1f}", f"{device_bytes / 1e9:g}", copies_gb)
        return [row(label, math.inf, part="(b)", name="N_FSDP", reason=never)]
    whole = math.floor(exact.as_symbol()) + 1
    smallest = row(label, whole, part="(b)", name="N_FSDP", reason=why("next_sharding"))
    memory = (s + a / 2) / smallest.as_symbol() + a / 2
    reason = why("memory_of_device")
    return [exact, smallest, _answer("memory of a device then", memory, "decimal_bytes", part="(b)", reason=reason)]


def batch_answers(stack: FeedForwardStack, mesh: TpuMesh) -> list[Derived]:
    """Answer (c) and (d): the batch from which the forward pass is compute-bound, and what lowers it.

    TP communicates no longer than it computes up to ``Y = F M_Y / alpha``, whatever the batch. FSDP does where
    ``4 B D F / (X Y C) >= 4 D F / (Y W M_X)``, that is ``B / X >= alpha / M_X``. One after the other, both do where
    ``F / (Y M_X) + B / (X M_Y) = B F / (X Y alpha)``: for ``B / (X Y)`` that is the overlapped batch over
    ``1 - Y / (F M_Y / alpha)``. A rate that is not positive is a UsageError.
    """
    for name in ("flops_per_s", "bytes_per_s"):
        value = number_of(getattr(mesh, name))
        if not 0 < value < math.inf:
            raise UsageError(f"{name.replace('_', ' ')} {value:g}: must be positive")
    names = ("X", "Y", "M_X", "M_Y", "C", "W_ici")  # In the order of the fields.
    named = TpuMesh(*(symbol(name, value) for name, value in zip(names, vars(mesh).values(), strict=True)))
    f = symbol("F", stack.d_ff)
    rate = named.flops_per_s / named.bytes_per_s
    intensity = _answer("FLOPs a byte of communication", rate, "FLOPs/byte", name="alpha", source=_BOOK)
    alpha = intensity.as_symbol()
    reason = why("most_tp")
    limit = _answer("most TP", f * named.m_y / alpha, "devices", name="Y_max", reason=reason, source=_BOOK)
    y_max = limit.as_symbol()

    reason = why("overlapped_batch", mesh.y <= limit.value)
    needed = _overlapped_batch(alpha, named.y, named.m_x, y_max)
    row = partial(_answer, part="(c)", unit="tokens", source=_BOOK, relation=">=")
    overlapped = row("per-device batch, axes overlapped", needed, name="b", reason=reason)
    b = overlapped.as_symbol()
    is_possible = mesh.y < limit.value
    needed, reason = b / (1 - named.y / y_max) if is_possible else math.inf, why("shared_batch", is_possible)
    shared = row("per-device batch, axes sharing the links", needed, name="b_shared", reason=reason)
    devices = named.x * named.y
    return [
        intensity,
        limit,
        overlapped,
        row("overall batch, axes overlapped", devices * b, name="B"),
        shared,
        row("overall batch, axes sharing the links", devices * shared.as_symbol(), name="B"),
        *_change_answers(named, f, alpha, b, y_max),
    ]


def _overlapped_batch(alpha: Number, y: Number, m_x: Number, y_limit: Number) -> Number:
    """Return the tokens a device at which computing is as long as communication; beyond the most TP none are enough."""
    return math.inf if y > y_limit else alpha / (m_x * y)


def _change_answers(
    mesh: TpuMesh, f: Expression, alpha: Expression, batch_per_device: Expression, y_max: Expression
) -> list[Derived]:
    """Return rows of part (d): the overall batch, in tokens, after one change to (c) alone, on as many devices."""
    widest = 2 ** math.floor(math.log2(max(y_max.value, 1)))  # The largest power of two up to Y_max.
    more_links = symbol("M_X", number_of(mesh.m_x) + 1)
    devices = symbol("N", number_of(mesh.x * mesh.y))

    def row(change: str, value: Number, reason: str, source: str = _BOOK) -> Derived:
        return _answer(f"overall batch with {change}", value, "tokens", part="(d)", reason=reason, source=source)

    of_widest = _overlapped_batch(alpha, symbol("Y", widest), mesh.m_x, y_max)
    # b = alpha / (M_X Y) is least with the most TP, Y_max = F M_Y / alpha: alpha^2 / (M_X M_Y F).
    of_best = devices * alpha**2 / (mesh.m_x * mesh.m_y * f)
    of_links = _overlapped_batch(alpha, mesh.y, more_links, y_max)
    of_bytes, of_stages = devices * batch_per_device / 2, devices * batch_per_device / symbol("Z", _STAGES)
    return [
        row(f"Y = {widest}", devices * of_widest, why("widest_tp")),
        row("the best mesh", of_best, why("best_mesh")),
        row("one more axis of links for FSDP", devices * of_links, why("more_links")),
        row("weights sent in 8 bits", of_bytes, why("half_bytes"), "ZeRO++, arXiv:2306.10209"),
        row(f"a pipeline of {_STAGES} stages", of_stages, why("stages"), "GPipe, arXiv:1811.06965"),
    ]


def _answer(
    quantity: str, value: Number, unit: str, *, part: str = "", name: str = "", reason: str = "", **details: str
) -> Derived:
    """Return a row; ``part``, as ``(a)``, is that of the problem which it answers, the handout its default source."""
    question = f"communication_accounting {part}" if part else ""
    return Derived(quantity, value, unit, name, reason=reason, question=question, **{"source": _HANDOUT} | details)
