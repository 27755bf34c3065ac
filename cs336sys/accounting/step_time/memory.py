"""Predict the memory of a step as the CUDA allocator counts it, for every configuration whose time is predicted.

Eager steps, fused ones and shared states have formulas of their own (:mod:`cs336sys.accounting.memory`, ``.fused``,
``.sharding``). Here compiled steps are added, and what the allocator and cuBLAS take besides the tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from cs336sys.accounting.checkpointing import SavedBlocks, kept_blocks, saved_schedule
from cs336sys.accounting.flops import count_parameters, parameter_shapes
from cs336sys.accounting.fused import FusedStep
from cs336sys.accounting.memory import PeakMemory, always_held_bytes, largest_parameter
from cs336sys.accounting.sharding.selective_checkpointing import kept_moments
from cs336sys.accounting.sharding.step import ShardedStep, rank_moments, shared_moments, widest_blocks
from cs336sys.accounting.step_time.prediction import StepConfiguration
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize
from cs336sys.settings.training import Workload

_MIB = 2**20
# cuBLAS's workspaces on Hopper: two streams of 32 MiB.
_WORKSPACES = 64 * _MIB
# kMinLargeAlloc, large_segment_size, kRoundLarge and kSmallSize of c10/core/AllocatorConfig.h.
_MIN_LARGE_ALLOC, _LARGE_SEGMENT, _ROUND_LARGE, _SMALL_SIZE = 10 * _MIB, 20 * _MIB, 2 * _MIB, _MIB


def allocated_bytes(size: int) -> float:
    """Return the bytes that the CUDA allocator counts for a tensor: with what is left of its block if nobody gets it.

    Tensors under 10 MiB share blocks of 20 MiB, larger ones have their own, of whole 2 MiB. The rest of a block goes to
    other tensors if it is more than 1 MiB.
    """
    if size < _SMALL_SIZE:
        return size
    if size < _MIN_LARGE_ALLOC:
        tensors_per_block = _LARGE_SEGMENT // size
        unused_bytes = _LARGE_SEGMENT - tensors_per_block * size
        return _LARGE_SEGMENT / tensors_per_block if unused_bytes <= _SMALL_SIZE else size
    block_bytes = -(-size // _ROUND_LARGE) * _ROUND_LARGE
    return block_bytes if block_bytes - size <= _SMALL_SIZE else size


def _rounding_of_parameters(size: ModelSize) -> float:
    """Return the bytes by which the allocator counts more than fp32 parameters have."""
    in_block = outside = 0.0
    for name, shape in parameter_shapes(replace(size, num_layers=1)).items():
        tensor_bytes = 4 * math.prod(shape)
        rounding_bytes = allocated_bytes(tensor_bytes) - tensor_bytes
        if name.startswith("layers."):
            in_block += rounding_bytes
        else:
            outside += rounding_bytes
    return size.num_layers * in_block + outside


def step_peak_bytes(configuration: StepConfiguration) -> float:
    """Predict the peak of a rank in a later step, as ``torch.cuda.max_memory_allocated`` counts it.

    Gradients of earlier micro-batches are there from the start: with several, all moments hold all gradients.
    """
    training, size = configuration.training, configuration.training.size
    moments = step_moments(configuration)
    if configuration.accumulation > 1:
        all_gradients = max(moment.gradients for moment in moments)
        moments = [replace(moment, gradients=all_gradients) for moment in moments]
    peak = max(moments, key=lambda moment: moment.total)
    if training.splits_weights:  # ``rounded_copies``: of how many sets as large as fp32 parameters rounding counts.
        rounded_copies = 1.0  # An estimate: docs/results has no peak of such a step alone.
    elif configuration.strategy_record.gathers_ahead:
        # The peak of fsdp is an upper bound already; without rounding it meets those of docs/results within 1.3 %.
        rounded_copies = 0.0
    else:
        # Parameters, and as much of both moments (8 bytes in fp32) as there is.
        moment_share = peak.optimizer_state / max(1, 8 * count_parameters(size))
        rounded_copies = 1.0 + 2 * min(1.0, moment_share)
    overhead_bytes = _WORKSPACES + rounded_copies * _rounding_of_parameters(size)
    if training.uses_graphs:
        # Captures have a stream, with workspaces, and a pool of their own: logits and their gradient are in both.
        logits = training.tokens * size.vocab_size
        overhead_bytes += _WORKSPACES + 2 * ELEMENT_BYTES[training.precision] * logits
    return peak.total + overhead_bytes


def step_moments(configuration: StepConfiguration) -> list[PeakMemory]:
    """Return the moments of a step that can be its peak on one rank, by the formulas that fit its settings."""
    training, checkpointing = configuration.training, configuration.checkpointing
    ranks = configuration.world_size
    strategy = configuration.strategy if ranks > 1 else None
    whole = replace(training.size, batch_size=training.size.batch_size * ranks)
    settings = training.precision, training.attention, checkpointing
    if kept_blocks(checkpointing) is not None:  # These moments count the other ranks' parts of the batch already.
        return kept_moments(ShardedStep("fsdp", whole, ranks, *settings, state_dtype=training.state_dtype))
    step = ShardedStep(strategy or "none", whole, ranks, *settings)
    record, is_eager = configuration.strategy_record, not (training.is_compiled or training.is_fused)
    gathered = record.gathers_ahead and ranks > 1
    # Fused blocks whose weights are gathered have no copies of them, and save what compiled ones do.
    if training.is_compiled or (gathered and training.is_fused):
        moments = _compiled_moments(training, checkpointing, widest_blocks(step), gathers_weights=gathered)
    elif is_eager and strategy is not None:
        moments = rank_moments(step)
    else:
        moments = training.widest_moments(checkpointing)
    if strategy is None:
        return moments
    if not record.shares_updates:
        moments = _averaged(moments, configuration)
    elif not is_eager:  # Those of an eager step are of a rank already.
        moments = shared_moments(step, moments, gradient_bytes=4)
    # Every rank holds the other ranks' parts of the batch, too: two int64 a token.
    other_bytes = 16 * training.size.tokens * (ranks - 1)
    return [replace(moment, activations=moment.activations + other_bytes) for moment in moments]


def _averaged(moments: list[PeakMemory], configuration: StepConfiguration) -> list[PeakMemory]:
    """Add what averaging whole gradients over ranks holds besides them (:mod:`cs336sys.parallel.buckets`).

    - In place (``naive``, ``overlap``, ``bucketed``, with or without a CUDA graph): nothing, if sent in their own
      dtype. Gradients of bf16 that fused kernels leave become fp32, twice their bytes, to be sent in another.
    - ``flat``: one tensor of all gradients, ``4 N``, from the first gradient on, when everything is still saved.
    - Sent in half precision: a copy of each bucket, ``2 N``, from its launch until all are waited for.
    """
    training, record, sent_in = configuration.training, configuration.strategy_record, configuration.gradient_dtype
    leaves_half = training.leaves_half_gradients
    if leaves_half and sent_in != "bf16":
        moments = [replace(moment, gradients=2 * moment.gradients) for moment in moments]
    all_gradients = max(moment.gradients for moment in moments)
    if record.averages_at_once:
        moments = [replace(moment, gradients=all_gradients) for moment in moments]
    if sent_in == "fp32" or (leaves_half and sent_in == "bf16"):  # In their own dtype they are sent without a copy.
        return moments
    # When all are sent, only the batch, the rotary table and copies (fp32 / 2) are left; state as in the last moment.
    activations = always_held_bytes(training.size) + all_gradients // 2
    sent = replace(moments[-1], moment="gradients sent", gradients=all_gradients, activations=activations)
    if record.overlaps:
        # The optimizer comes when all have been waited for.
        moments = [
            moment
            if moment.moment == "optimizer"
            else replace(moment, activations=moment.activations + moment.gradients // 2)
            for moment in moments
        ]
    return [*moments, sent]


def _compiled_moments(
    training: Workload, checkpointing: str, at_blocks: Sequence[SavedBlocks], *, gathers_weights: bool
) -> list[PeakMemory]:
    """Return the moments of a compiled step that can be its peak; without ``at_blocks``, at those of its checkpoints.

    A block saves what a fused one without copies of weights does: inputs of both norms in fp32 and their outputs, q, k,
    v, attention's output, gate, up and their product, casts of the weights (:attr:`.FusedStep.block`). Reference
    attention saves two tensors of scores instead of its output. Weights that fsdp gathers in half precision have no
    casts to save, and the residual stream is in half precision, too.

    - Loss: everything saved; the last norm's input and output; logits, their gradient in fp32 and its cast.
    - Blocks of the backward pass: gradients of those after it, of the stream (fp32), twice its gate's.
    - Optimizer: all gradients; the course's AdamW makes a temporary of one parameter.
    """
    size, count = training.size, count_parameters(training.size)
    # torch's fused AdamW writes no copies of weights.
    step = FusedStep(size, "train", training.precision, attention="flash", optimizer="fused", state_dtype="fp32")
    e, stream, logits = step.e, size.stream, size.tokens * size.vocab_size
    block = step.block
    if training.keeps_scores:
        block += 2 * e * size.scores - e * stream
    if gathers_weights and e == 2:
        block -= 2 * step.block_matrices + 4 * stream  # No casts; the inputs of both norms take 2 bytes, not 4.

    def saved_bytes(blocks: SavedBlocks) -> int:
        return blocks.saved * block + blocks.inputs * 4 * stream

    at_loss, checkpointed_blocks = saved_schedule(checkpointing, size.num_layers)
    head_cast = 2 * step.head if e == 2 and not gathers_weights else 0
    around_loss = (4 + e) * stream + (4 + 2 * e) * logits + head_cast
    if training.is_compiled_whole:
        # Logits and their gradient once more, which the loss, compiled by itself, gets from the model.
        around_loss += 2 * e * logits
    moments = [("loss", 0, saved_bytes(at_loss) + around_loss)]
    for blocks in at_blocks or checkpointed_blocks:
        gradients = 4 * (step.head + (size.num_layers - blocks.block) * step.block_matrices)
        moments.append((f"backward, {blocks.name}", gradients, saved_bytes(blocks) + 4 * stream + 2 * e * size.inner))
    # The course's AdamW's, or what the end of the backward pass leaves: the gradient of the embedded tokens.
    temporary = largest_parameter(size) if training.optimizer_record.is_plain else stream
    moments.append(("optimizer", 4 * count, 4 * temporary))
    always, optimizer_state = always_held_bytes(size), training.moment_bytes * count
    return [
        PeakMemory(name, 4 * count, gradients, optimizer_state, activations + always)
        for name, gradients, activations in moments
    ]
