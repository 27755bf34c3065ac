"""Count what a training step makes a GPU do: matrix products, bytes, attention, kernels.

Bytes of operations that are no products are counted operation by operation: what each one reads and writes. Eager
execution was counted by a dispatch mode over one block of ``cs336_basics`` (operations that torch launches, tensors in
and out); of compiled and fused blocks each kernel reads its inputs and writes its results once. Letters as in
:mod:`cs336sys.accounting.activations`: ``T`` tokens, ``d`` d_model, ``f`` d_ff, ``V`` vocabulary, ``BHSS`` scores.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cs336sys.accounting.checkpointing import SUBLAYERS, kept_blocks, recomputed_blocks
from cs336sys.accounting.flops import count_parameters
from cs336sys.settings.training import Workload

# What is counted, with the unit of its rate. A kernel takes time to start and end, and leaves a gap to the next.
TERMS = {
    "half_products": "FLOP/s",
    "full_products": "FLOP/s",
    "full_scores": "FLOP/s",
    "flash_forward": "FLOP/s",
    "flash_backward": "FLOP/s",
    "sdpa_forward": "FLOP/s",
    "sdpa_backward": "FLOP/s",
    "eager_bytes": "bytes/s",
    "fused_bytes": "bytes/s",
    "score_bytes": "bytes/s",
    "course_parameters": "parameters/s",
    "state_bytes": "bytes/s",
    "kernels": "kernels/s",
    "gaps": "kernels/s",
}

_OF_ATTENTION = ("full_scores", "flash_forward", "sdpa_forward", "score_bytes")  # Of the forward pass.

# Streaming multiprocessors of the GPUs that the rates were measured on (H100 and H200 SXM).
_MULTIPROCESSORS = 132
# Output tiles of matrix products, and how much slower their kernels are than those of the largest.
_TILES = ((128, 256, 1.0), (192, 192, 1.0), (128, 192, 1.0), (128, 128, 1.06), (64, 128, 1.3), (64, 64, 1.9))
# Beyond so many waves a part of one more is about half of it.
_FEW_WAVES = 4

# A third fits best: of 45 steps in CUDA graphs the mean error is 2.9 % with it, 3.6 % with all of the idle time.
_WASTE = 1 / 3
# What a tile of queries takes to start and to end, in keys: on an H200, kernels of head dimension 64 reach 389 TFLOP/s
# forward at 2048 tokens and 616 at 16,384, backward 365 and 562 (docs/results/flash-h200, flash-fa4-lengths-h200).
_ATTENTION_START = 1100


class _PassCost(NamedTuple):
    """Cost in one pass of a block's operations that are no products.

    Attributes:
        stream_bytes, inner_bytes: of an eager block, for each of ``T d`` and of ``T f``.
        score_bytes, compiled_score_bytes: of reference attention, for each score.
        kernels_with_scores, kernels: of an eager block with reference attention, and with another, as profiles count.
    """

    stream_bytes: int
    inner_bytes: int
    score_bytes: int
    compiled_score_bytes: int
    kernels_with_scores: int
    kernels: int


_HALF_COSTS = _PassCost(200, 18, 48, 8, 72, 60), _PassCost(408, 38, 60, 12, 122, 108)  # Forward and backward.
_FP32_COSTS = _PassCost(170, 32, 40, 16, 56, 46), _PassCost(350, 72, 52, 24, 103, 90)
# What calling a block takes besides its launches, in launches, forward and backward: guards of a compiled block, Python
# of fused operators. From launched steps of one host each: docs/results/bench-attention, bench-flash-sdpa, ddp-agents.
COMPILED_ENTRIES = 20.0
_FUSED_ENTRIES = (40.0, 35.0)
# Launches without autograd and autocast cost half as much.
OPTIMIZER_LAUNCH = 0.5
# Kernels that the course's AdamW launches for each parameter tensor.
_COURSE_KERNELS = 7


class Amounts(dict[str, float]):
    """Amount of each term; 0 where a term does not occur."""

    def __missing__(self, term: str) -> float:
        return 0.0

    def add(self, other: Mapping[str, float], times: float = 1.0) -> None:
        """Add so many times another's amounts."""
        for term, amount in other.items():
            self[term] += times * amount


@dataclass
class StepWork:
    """The work of one rank in a step, by phase and by the names of :data:`TERMS`.

    Attributes:
        launches: kernels that the CPU launches, by phase; of a compiled block, also its entry.
    """

    forward: Amounts = field(default_factory=Amounts)
    backward: Amounts = field(default_factory=Amounts)
    optimizer: Amounts = field(default_factory=Amounts)
    launches: dict[str, float] = field(default_factory=dict)

    @property
    def phases(self) -> dict[str, Amounts]:
        return {name: work for name in ("forward", "backward", "optimizer") if (work := getattr(self, name))}


def product_work(rows: int, columns: int, inner: int, device: str = "cuda") -> float:
    """Count FLOPs of ``(rows, inner) @ (inner, columns)``, and a part of what idle multiprocessors could have done.

    Whole tiles are computed by all multiprocessors in waves; the kernel whose tiles waste least is chosen. cuBLAS
    splits the inner dimension where that helps, so :data:`_WASTE` of the idle time remains. A CPU idles nowhere.
    """
    if device == "cpu":
        return 2.0 * rows * columns * inner
    least = math.inf
    for tile_rows, tile_columns, penalty in _TILES:
        waves = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns) / _MULTIPROCESSORS
        waves = math.ceil(waves) if waves < _FEW_WAVES else waves + 0.5  # As rounding up does on average.
        least = min(least, waves * _MULTIPROCESSORS * tile_rows * tile_columns * 2 * inner * penalty)
    return _WASTE * least + (1 - _WASTE) * 2 * rows * columns * inner


def attention_square(heads: int, context: int, head_dim: int, device: str = "cuda") -> int:
    """Count multiply-adds of a product of causal attention; on a GPU a query has :data:`_ATTENTION_START` more keys."""
    return heads * context * (context + (0 if device == "cpu" else _ATTENTION_START)) * head_dim


def _products(shapes: Iterable[tuple[int, int, int, int]], device: str) -> tuple[float, float]:
    """Count FLOPs of products with weights (rows, columns, inner, count), forward, and of both gradients backward."""
    forward = backward = 0.0
    for rows, columns, inner, count in shapes:
        forward += count * product_work(rows, columns, inner, device)
        backward += count * (product_work(rows, inner, columns, device) + product_work(columns, inner, rows, device))
    return forward, backward


def step_work(workload: Workload, checkpointing: str = "none", *, optimizer_share: float = 1.0) -> StepWork:
    """Count the work of a step of our model.

    Args:
        workload: its batch is what one rank computes.
        checkpointing: a strategy of :mod:`cs336sys.accounting.checkpointing`, or ``keep=N``.
        optimizer_share: the part of the parameters that this rank updates.
    """
    size, layers, tokens = workload.size, workload.size.num_layers, workload.size.tokens
    work = StepWork()
    block_forward, block_backward, block_launches = _block_work(workload)
    work.forward.add(block_forward, layers)
    work.backward.add(block_backward, layers)
    # The LM head and the loss; the bytes a logit are what their operations, one by one, read and write. Tests hold the
    # numbers of kernels to those that profiles of eager and fused steps count.
    head_forward, head_backward = _products([(tokens, size.vocab_size, size.d_model, 1)], workload.device)
    product, e = ("half_products", 2) if workload.is_half else ("full_products", 4)
    logits = tokens * size.vocab_size
    if "linear-cross-entropy" in workload.fused_kernels:
        # The forward pass makes the gradients, too.
        work.forward.add({product: head_forward + head_backward, "fused_bytes": logits * (e + 4), "kernels": 10})
        work.backward["kernels"] += 6
    elif workload.is_compiled:
        work.forward.add({product: head_forward, "fused_bytes": logits * (e + 4), "kernels": 10})
        work.backward.add({product: head_backward, "fused_bytes": logits * (e + 4), "kernels": 15})
    else:
        work.forward.add({product: head_forward, "eager_bytes": logits * (e + 24), "kernels": 20})
        work.backward.add({product: head_backward, "eager_bytes": logits * (e + 12), "kernels": 30})
    # Embeddings that are looked up, and the gradients of the whole table and of the tokens: fp32 read and written.
    work.forward["fused_bytes"] += 8 * tokens * size.d_model
    work.backward["fused_bytes"] += 8 * size.vocab_size * size.d_model + 8 * tokens * size.d_model
    if not workload.has_backward:
        work.backward.clear()
    elif checkpointing != "none":
        work.backward.add(_recomputed(workload, checkpointing, block_forward))
    if workload.updates_parameters:
        work.optimizer = optimizer_work(workload, optimizer_share)
    _add_launches(work, workload, block_launches)
    return work


def _block_work(workload: Workload) -> tuple[Amounts, Amounts, tuple[float, float]]:
    """Return the work of one block, forward and backward, and the cost of calling it in each, in launches."""
    size, half, has_scores = workload.size, workload.is_half, workload.keeps_scores
    tokens, d, f = size.tokens, size.d_model, size.d_ff
    stream, inner, scores = size.stream, size.inner, size.scores
    weights = 4 * d * d + 3 * d * f
    costs = _HALF_COSTS if half else _FP32_COSTS
    forward, backward = Amounts(), Amounts()
    product = "half_products" if half else "full_products"
    products = [(tokens, d, d, 4), (tokens, f, d, 2), (tokens, d, f, 1)]
    forward[product], backward[product] = _products(products, workload.device)
    if has_scores:
        product = "half_products" if half else "full_scores"
        # Two products of the whole square, 2 FLOPs a multiply-add; backward four.
        forward[product] += 4 * scores * size.head_dim
        backward[product] += 8 * scores * size.head_dim
    else:
        # Half of the square, two products forward and five backward (FlashAttention-2, 4.1).
        square = attention_square(size.batch_size * size.num_heads, size.context, size.head_dim, workload.device)
        forward[f"{workload.attention_record.work}_forward"] += 2 * square
        backward[f"{workload.attention_record.work}_backward"] += 5 * square
    entries = (0.0, 0.0)
    if workload.is_compiled or workload.is_fused:
        kernels = _add_fused_work(workload, forward, backward, weights)
        if not workload.is_compiled:
            entries = _FUSED_ENTRIES
        elif workload.compiles_blocks:
            entries = (COMPILED_ENTRIES, COMPILED_ENTRIES)
    else:
        kernels = [cost.kernels_with_scores if has_scores else cost.kernels for cost in costs]
        for work, cost in zip((forward, backward), costs, strict=True):
            work["eager_bytes"] += cost.stream_bytes * stream + cost.inner_bytes * inner
            work["eager_bytes"] += 6 * weights if half else 0  # Autocast's casts, as of fused blocks.
    for work, count, cost in zip((forward, backward), kernels, costs, strict=True):
        work["kernels"] += count
        if has_scores:
            work["score_bytes"] += scores * (cost.compiled_score_bytes if workload.is_compiled else cost.score_bytes)
    return forward, backward, entries


def _add_fused_work(workload: Workload, forward: Amounts, backward: Amounts, weights: int) -> list[int]:
    """Add the bytes of a compiled or fused block of so many weights, and return its kernels forward and backward.

    Bytes for T d in half precision, with an fp32 stream: a norm (6), sum and norm (12), rotation of q and k (8);
    backward two norms (32), rotation (8), the sum of three gradients (6), casts of the stream's (12). For T f the
    gate's product is of three tensors, backward of five. In fp32 each number has 4 bytes, and nothing is cast.
    """
    stream, inner, half = workload.size.stream, workload.size.inner, workload.is_half
    forward["fused_bytes"] += 26 * stream + 6 * inner if half else 40 * stream + 12 * inner
    backward["fused_bytes"] += 58 * stream + 10 * inner if half else 68 * stream + 20 * inner
    if half and not (workload.is_fused and workload.optimizer_record.is_ours):  # Else AdamW wrote copies.
        for work in (forward, backward):  # Autocast's casts of the weights: 4 bytes read and 2 written.
            work.add({"fused_bytes": 6 * weights, "kernels": 7})
    without_scores = (7, 12) if workload.is_compiled else (3, 3)
    other_forward, other_backward = (8, 15) if workload.keeps_scores else without_scores
    # Those of seven products, each of which has two in the backward pass, and all others as profiles count them.
    return [7 + other_forward, 14 + other_backward]


def _recomputed(workload: Workload, checkpointing: str, block: Amounts) -> Amounts:
    """Return what checkpoints compute again in the backward pass; ``block`` is the forward work of one block."""
    size, tokens = workload.size, workload.tokens
    product = "half_products" if workload.is_half else "full_products"
    kept = kept_blocks(checkpointing)
    if kept is not None:
        # Gate and up of the other blocks, and their product, which reads two tensors and writes one, 2 bytes each.
        gate_and_up, _ = _products([(tokens, size.d_ff, size.d_model, 2)], workload.device)
        blocks = size.num_layers - kept
        return Amounts({product: blocks * gate_and_up, "fused_bytes": blocks * 6 * size.inner, "kernels": blocks * 5})
    if checkpointing in SUBLAYERS:
        # A block's products are 4 d d of attention and 3 d f; the last of each layer is not computed again.
        has_attention, has_feed_forward = (layer in SUBLAYERS[checkpointing] for layer in ("attn", "ffn"))
        attention, _ = _products([(tokens, size.d_model, size.d_model, 3)], workload.device)
        feed_forward, _ = _products([(tokens, size.d_ff, size.d_model, 2)], workload.device)
        if workload.is_half and workload.keeps_scores:  # In fp32 they are a term of their own.
            attention += 4 * size.scores * size.head_dim
        # What is neither a product nor attention itself: about two thirds of it belong to attention's layer.
        share = 0.65 * has_attention + 0.35 * has_feed_forward
        shares = dict.fromkeys(_OF_ATTENTION, float(has_attention))
        amounts = Amounts({name: size.num_layers * shares.get(name, share) * amount for name, amount in block.items()})
        amounts[product] = size.num_layers * (attention * has_attention + feed_forward * has_feed_forward)
        return amounts
    blocks, blocks_without_w2 = recomputed_blocks(size.num_layers, checkpointing)
    amounts = Amounts({name: blocks * amount for name, amount in block.items()})
    w2_product, _ = _products([(tokens, size.d_model, size.d_ff, 1)], workload.device)
    amounts[product] -= blocks_without_w2 * w2_product
    return amounts


def optimizer_work(workload: Workload, share: float = 1.0) -> Amounts:
    """Count an optimizer step over ``share`` of the parameters.

    Bytes of a parameter: it, its gradient and both moments read, all but the gradient written (28 in fp32: the
    parameter 8, moments 16, gradient 4); ours also writes copies in half precision, of gradients in half precision.
    """
    count = share * count_parameters(workload.size)
    if workload.optimizer_record.is_plain:
        # Of parameters: nine in a block, the embedding, the last norm and the LM head.
        tensors = 9 * workload.size.num_layers + 3
        return Amounts({"course_parameters": count, "kernels": share * _COURSE_KERNELS * tensors})
    if workload.optimizer_record.is_ours:
        gradient_bytes, copy_bytes = (2, 2) if workload.is_fused and workload.is_half else (4, 0)
        parameter_bytes = 8 + 2 * workload.moment_bytes + gradient_bytes + copy_bytes
        # One kernel prepares factors, and parameters of each combination of dtypes have an update of their own.
        return Amounts({"state_bytes": parameter_bytes * count, "kernels": 4})
    # torch's fused AdamW updates lists of tensors, a few million elements at a launch.
    return Amounts({"state_bytes": 28 * count, "kernels": count / 2e6})


def _add_launches(work: StepWork, workload: Workload, entries: tuple[float, float]) -> None:
    """Add gaps between kernels, and launches, to each phase; ``entries``: what calling a block adds, by pass."""
    # A step without a backward pass has fewer phases.
    for (phase, amounts), entry in zip(work.phases.items(), (*entries, 0.0), strict=False):
        amounts["gaps"] = amounts["kernels"]
        cost = 1.0 if phase != "optimizer" else OPTIMIZER_LAUNCH
        work.launches[phase] = cost * amounts["kernels"] + workload.size.num_layers * entry


# Of our model, half precision against fp32 in eager execution: bytes and kernels.
_HALF_BYTES, _HALF_KERNELS = 0.89, 1.24
# Of our model, a compiled block against an eager one.
_COMPILED_BYTES, _COMPILED_KERNELS = 0.18, 0.24


@dataclass(frozen=True)
class CountedPass:
    """Work of a pass with batches of 1 and of 2 sequences, from which other batches follow.

    Attributes:
        products: rows, columns and inner dimension of each product, by batch.
        bytes: of operations that are no products, in fp32.
        kernels: operations.
    """

    products: tuple[Sequence[tuple[int, int, int]], Sequence[tuple[int, int, int]]]
    bytes: tuple[float, float]
    kernels: int

    def product_flops(self, batch: int, device: str) -> float:
        """Return the FLOPs of a batch's products, with what idle multiprocessors of a GPU waste."""
        flops = 0.0
        for of_one, of_two in zip(*self.products, strict=True):
            rows, columns, inner = (max(1, _extrapolated(*pair, batch)) for pair in zip(of_one, of_two, strict=True))
            flops += product_work(rows, columns, inner, device)
        return flops


def _extrapolated(of_one: Any, of_two: Any, batch: int) -> Any:
    """Return the value for ``batch`` sequences, on the line through those for one and for two."""
    return of_one + (of_two - of_one) * (batch - 1)


@dataclass(frozen=True)
class CountedModel:
    """A user's model, by a step of it on tensors without values.

    Attributes:
        parameters: how many.
        tensors: of parameters.
        forward, backward: passes in fp32, without torch's attention.
        attention: heads of one sequence, queries and head dimension of each call of torch's attention.
        peaks: bytes at the peak, by checkpointing, of batches of 1 and of 2 sequences.
    """

    parameters: int
    tensors: int
    forward: CountedPass
    backward: CountedPass
    attention: Sequence[tuple[int, int, int]]
    peaks: Mapping[str, tuple[float, float]]

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> "CountedModel":
        """Build it of what the counting process returned."""
        return cls(**{**columns, **{name: CountedPass(**columns[name]) for name in ("forward", "backward")}})

    def work(self, workload: Workload, checkpointing: str) -> StepWork:
        """Count the work of a step of the user's model with this workload's batch and settings."""
        half, batch, compiled = workload.is_half, workload.size.batch_size, workload.is_compiled
        work = StepWork()
        for amounts, counted in ((work.forward, self.forward), (work.backward, self.backward)):
            amounts["half_products" if half else "full_products"] += counted.product_flops(batch, workload.device)
            moved = _extrapolated(*counted.bytes, batch) * (_HALF_BYTES if half else 1.0)
            kernels = counted.kernels * (_HALF_KERNELS if half else 1.0)
            if compiled:
                moved, kernels = moved * _COMPILED_BYTES, kernels * _COMPILED_KERNELS
            moved += 6 * self.parameters if half else 0  # Autocast's casts of all weights.
            amounts.add({"fused_bytes" if compiled else "eager_bytes": moved, "kernels": kernels})
        name = workload.attention_record.work
        for heads, queries, dimension in self.attention:
            square = attention_square(batch * heads, queries, dimension, workload.device)
            work.forward.add({f"{name}_forward": 2 * square, "kernels": 1})  # Two products, and five backward.
            work.backward.add({f"{name}_backward": 5 * square, "kernels": 3})  # Row sums, gradients, dQ's cast.
        if checkpointing != "none":
            work.backward.add(work.forward)  # As if checkpoints covered the whole model.
        if workload.optimizer_record.is_plain:
            kernels = _COURSE_KERNELS * self.tensors
            work.optimizer.add({"course_parameters": self.parameters, "kernels": kernels})
        else:  # The fp32 parameter is read and written, its gradient read, its moments read and written.
            work.optimizer.add({"state_bytes": (12 + 2 * workload.moment_bytes) * self.parameters, "kernels": 4})
        entry = COMPILED_ENTRIES if workload.compiles_blocks else 0.0
        _add_launches(work, workload, (entry, entry))
        return work

    def memory(self, workload: Workload, checkpointing: str, passes: int = 1) -> float:
        """Return bytes at the peak, by the dry run's batches; compiled steps hold less than this."""
        peak = _extrapolated(*self.peaks[checkpointing], workload.size.batch_size)
        # With several passes, of micro-batches, all gradients are there from the start.
        gradients = 4 * self.parameters if passes > 1 else 0
        # The dry run has AdamW's moments in fp32.
        return peak + gradients - (8 - workload.moment_bytes) * self.parameters
