"""Predict the memory of a step as the CUDA allocator counts it, for every configuration whose time is predicted.

Eager steps, fused ones and shared states have formulas of their own (:mod:`cs336sys.accounting.memory`, ``.fused``,
``.sharding``). Here compiled steps are added, and what the allocator and cuBLAS take besides the tensors.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cs336sys.accounting.checkpointing import kept_blocks, saved_schedule
from cs336sys.accounting.flops import count_parameters, parameter_shapes
from cs336sys.accounting.fused import FusedStep
from cs336sys.accounting.memory import PeakMemory, SavedBlocks, always_held_bytes, largest_parameter
from cs336sys.accounting.sharding.fsdp import fully_sharded_peak
from cs336sys.accounting.sharding.selective_checkpointing import KeptStep, kept_moments
from cs336sys.accounting.sharding.step import ShardedStep, fullest_state, rank_moments
from cs336sys.accounting.step_time.prediction import StepConfiguration
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize
from cs336sys.settings.training import Workload

_MIB = 2**20
# cuBLAS's workspaces on Hopper: two streams of 32 MiB.
_WORKSPACES = 64 * _MIB
# The CUDA allocator: what is smaller comes from blocks of 20 MiB, the rest has blocks of its own of whole 2 MiB. What
# is left of a block is given to others if it is more than 1 MiB.
_OWN_BLOCK, _SHARED_BLOCK, _WHOLE, _LEAST_REST = 10 * _MIB, 20 * _MIB, 2 * _MIB, _MIB


def allocated_bytes(size: int) -> float:
    """Bytes that the allocator counts for a tensor in new blocks, of which it shares one with others of its size."""
    if size < _LEAST_REST:
        return size
    if size < _OWN_BLOCK:
        tensors_per_block = _SHARED_BLOCK // size
        unused_bytes = _SHARED_BLOCK - tensors_per_block * size
        return _SHARED_BLOCK / tensors_per_block if unused_bytes <= _LEAST_REST else size
    whole = -(-size // _WHOLE) * _WHOLE
    return whole if whole - size <= _LEAST_REST else size


def _rounding(size: ModelSize) -> float:
    """Bytes by which the allocator counts more than fp32 parameters have."""
    tensors = parameter_shapes(replace(size, num_layers=1))
    outside = parameter_shapes(replace(size, num_layers=0))

    def rounding_bytes(shapes: Iterable[tuple[int, ...]]) -> float:
        return sum(allocated_bytes(4 * math.prod(shape)) - 4 * math.prod(shape) for shape in shapes)

    block = rounding_bytes(shape for name, shape in tensors.items() if name not in outside)
    return size.num_layers * block + rounding_bytes(outside.values())


@dataclass(frozen=True)
class StepMemory:
    """The most that one rank holds in a step.

    Attributes:
        peak: the widest moment, by component.
        overhead: what the allocator's blocks and cuBLAS take besides.
    """

    peak: PeakMemory
    overhead: float

    @property
    def total(self) -> float:
        return self.peak.total + self.overhead


def step_memory(configuration: StepConfiguration) -> StepMemory:
    """Predict the peak of a second or later step, as ``torch.cuda.max_memory_allocated`` counts it.

    Gradients of earlier micro-batches are there from the start: with several, all moments hold all gradients.
    """
    training, size = configuration.training, configuration.training.size
    moments = _moments(configuration)
    if configuration.accumulation > 1:
        all_gradients = max(moment.gradients for moment in moments)
        moments = [replace(moment, gradients=all_gradients) for moment in moments]
    peak = max(moments, key=lambda moment: moment.total)
    share = peak.optimizer_state / max(1, 8 * count_parameters(size))
    copies = 0.0 if configuration.strategy_record.gathers_ahead else 1.0 + 2 * min(1.0, share)
    if training.splits_weights:
        copies = 1.0
    overhead = _WORKSPACES + copies * _rounding(size)
    if training.cuda_graph == "on":
        # Captures have a stream, with workspaces, and a pool of their own: logits and their gradient are in both.
        logits = training.tokens * size.vocab_size
        overhead += _WORKSPACES + 2 * ELEMENT_BYTES[training.precision] * logits
    return StepMemory(peak, overhead)


def _moments(configuration: StepConfiguration) -> list[PeakMemory]:
    training, checkpointing = configuration.training, configuration.checkpointing
    strategy, ranks = configuration.strategy, configuration.world_size
    whole = replace(training.size, batch_size=training.size.batch_size * ranks)
    if kept_blocks(checkpointing) is not None:
        blocks = kept_blocks(checkpointing) or 0
        return kept_moments(KeptStep(whole, ranks, training.precision, training.state_dtype, blocks))
    gathered = configuration.strategy_record.gathers_ahead and ranks > 1
    # Fused blocks whose weights are gathered have no copies of them, and save what compiled ones do.
    if training.is_compiled or (gathered and training.is_fused):
        moments = _compiled_moments(training, checkpointing, gathers_weights=gathered)
    elif training.is_fused or strategy is None or ranks == 1:
        moments = training.widest_moments(checkpointing)
    else:
        step = ShardedStep(strategy, whole, ranks, training.precision, training.attention, checkpointing)
        return _with_batch(_averaged(rank_moments(step), configuration), training.size, ranks)
    if strategy is None or ranks == 1:
        return moments
    return _with_batch(_shared(moments, configuration, whole), training.size, ranks)


def _averaged(moments: list[PeakMemory], configuration: StepConfiguration) -> list[PeakMemory]:
    """Add what averaging whole gradients over ranks holds besides them (:mod:`cs336sys.parallel.buckets`).

    - In place (``naive``, ``overlap``, ``bucketed``, with or without a CUDA graph): nothing, if sent in their own
      dtype. Gradients of bf16 that fused kernels leave, but sent in another: twice their bytes.
    - ``flat``: one tensor of all gradients, ``4 N``, from the first gradient on, when everything is still saved.
    - Sent in half precision: a copy of each bucket, ``2 N``, from its launch until all are waited for.
    """
    training, record, sent_in = configuration.training, configuration.strategy_record, configuration.gradient_dtype
    if record.shares_updates:
        return moments
    leaves_half = training.leaves_half_gradients
    if leaves_half and sent_in != "bf16":
        moments = [replace(moment, gradients=2 * moment.gradients) for moment in moments]
    whole = max(moment.gradients for moment in moments)
    if record.averages_at_once:
        moments = [replace(moment, gradients=whole) for moment in moments]
    if sent_in == "fp32" or (leaves_half and sent_in == "bf16"):
        return moments
    # Of activations, only the batch and the rotary table exist when all gradients are sent.
    left = always_held_bytes(training.size)
    sent = replace(moments[-1], moment="gradients sent", gradients=whole, activations=left + whole // 2)
    if record.overlaps:
        # The optimizer comes when all have been waited for.
        moments = [
            replace(moment, activations=moment.activations + moment.gradients // 2 * (moment.moment != "optimizer"))
            for moment in moments
        ]
    return [*moments, sent]


def _with_batch(moments: list[PeakMemory], size: ModelSize, ranks: int) -> list[PeakMemory]:
    """Add the other ranks' parts of the batch, which every rank holds."""
    other_bytes = 16 * size.tokens * (ranks - 1)
    return [replace(moment, activations=moment.activations + other_bytes) for moment in moments]


def _shared(moments: list[PeakMemory], configuration: StepConfiguration, whole: ModelSize) -> list[PeakMemory]:
    """Let moments of one rank alone hold this rank's part of the state, and what is gathered or under way."""
    training, ranks = configuration.training, configuration.world_size
    if not configuration.strategy_record.shares_updates:
        return _averaged(moments, configuration)
    step = ShardedStep(configuration.strategy or "none", whole, ranks, training.precision, training.attention)
    state, count = fullest_state(step), count_parameters(training.size)
    shared = []
    for moment in moments:
        done = moment.gradients / (4 * count)
        gradients, buffers = state.gradients * done, 0.0
        if step.strategy_record.gathers_ahead and 0 <= done < 1:
            under_way = fully_sharded_peak(training.size, step.computed_bytes, ranks, prefetch=1)
            buffers = under_way.gathered + (under_way.whole_gradients + under_way.received if done else 0)
        parameters = state.parameters + state.master_parameters
        activations = round(moment.activations + buffers)
        shared.append(PeakMemory(moment.moment, parameters, round(gradients), state.optimizer_state, activations))
    return shared


def _compiled_moments(training: Workload, checkpointing: str, *, gathers_weights: bool) -> list[PeakMemory]:
    """Return the moments of a compiled step that can be its peak.

    A block saves what a fused one without copies of weights does: inputs of both norms in fp32 and their outputs, q, k,
    v, attention's output, gate, up and their product, casts of the weights (:attr:`.FusedStep.block`). Reference
    attention saves two tensors of scores instead of its output. Weights that fsdp gathers in half precision have no
    casts to save, and the residual stream is in half precision, too.

    - Loss: everything saved; the last norm's input and output; logits, their gradient in fp32 and its cast.
    - First and last block of the backward pass: gradients of those after it, and twice its gate's.
    - Optimizer: all gradients; the course's AdamW makes a temporary of one parameter.
    """
    size, count = training.size, count_parameters(training.size)
    step = FusedStep(size, "train", training.precision, "flash", "fused", "fp32")
    e, stream, head = step.e, size.stream, step.head
    logits = size.tokens * size.vocab_size
    block = step.block
    if training.keeps_scores:
        block += 2 * e * size.scores - e * stream
    if gathers_weights and e == 2:
        block -= 2 * step.block_matrices + 4 * stream

    def saved_bytes(blocks: SavedBlocks) -> int:
        return blocks.saved * block + blocks.inputs * 4 * stream

    at_loss, at_blocks = saved_schedule(checkpointing, size.num_layers)
    cast = 2 * head if e == 2 and not gathers_weights else 0
    around_loss = (4 + e) * stream + (4 + 2 * e) * logits + cast
    if training.is_compiled_whole:
        # Logits and their gradient once more, which the loss, compiled by itself, gets from the model.
        around_loss += 2 * e * logits
    moments = [("loss", 0, saved_bytes(at_loss) + around_loss)]
    for blocks in at_blocks:
        gradients = 4 * (head + (size.num_layers - blocks.block) * step.block_matrices)
        moments.append((f"backward, {blocks.name}", gradients, saved_bytes(blocks) + 4 * stream + 2 * e * size.inner))
    temporary = largest_parameter(size) if training.optimizer_record.is_plain else stream
    moments.append(("optimizer", 4 * count, 4 * temporary))
    always, moments_bytes = always_held_bytes(size), training.moment_bytes * count
    return [
        PeakMemory(name, 4 * count, gradients, moments_bytes, activations + always)
        for name, gradients, activations in moments
    ]
