"""What a rank holds at four moments of training, and what it sends in a step, for every strategy of ``shard``.

Puts together what :mod:`~cs336sys.accounting.memory` (a step's activations),
:mod:`~cs336sys.accounting.sharding.optimizer` and :mod:`~cs336sys.accounting.sharding.fsdp` (who holds which part of
the state) say on paper.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cs336sys.accounting.activations import block_activations
from cs336sys.accounting.checkpointing import saved_schedule
from cs336sys.accounting.memory import GIB, PeakMemory, SavedBlocks, TrainingState, training_state, widest_moments
from cs336sys.accounting.parameters import count_parameters, parameter_shapes, parameters_by_component
from cs336sys.accounting.sharding.fsdp import (
    fully_sharded_peak,
    fully_sharded_state,
    rows_per_rank,
    step_communication,
)
from cs336sys.accounting.sharding.ideal import sent_bytes
from cs336sys.accounting.sharding.optimizer import flat_optimizer_state, sharded_optimizer_state
from cs336sys.sizes import ELEMENT_BYTES, ModelSize

MOMENTS = ("initialized", "before the optimizer", "after the optimizer", "peak")

# Strategies of torch, by ours that share out the same.
_COUNTERPARTS = {"torch-zero": "optimizer"}

# What ShardedOptimizer communicates in one launch. Two H200, 12 blocks of 2.7b, bf16, compiled, ms a step at 100, 250
# and 500 MB: whole parameters 51.9, 47.1, 46.9 (at 100 a weight of the feed-forward network is a bucket of its own,
# which travels in one direction of the link); slices 46.5 and 39.2.
OPTIMIZER_BUCKET_MB = 250.0


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank holds at a moment; the parts add up to the total.

    Attributes:
        moment: one of :data:`MOMENTS`: the model is built; after a backward pass; after the optimizer step, when
            gradients are dropped; the most of a step. All but the first are of a step after the first.
        gradients: what the optimizer updates parameters by, and torch's buckets, of which they are views.
        rest: activations and buffers: also gathered weights, gradients under way, temporaries, batch and rotary table.
    """

    moment: str
    parameters: int
    gradients: int
    optimizer_state: int
    rest: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.rest

    @property
    def total_gib(self) -> float:
        return self.total / GIB


@dataclass(frozen=True)
class ShardedStep:
    """How ranks share a training step.

    Attributes:
        strategy: a name of ``workload.SHARDING_STRATEGIES``.
        size: its batch is that of all ranks together.
        prefetch: for ``fsdp``, units gathered ahead of use.
        bucket_mb: for ``optimizer-flat``, the most gradients in one reduce-scatter, in megabytes (1e6 bytes).
    """

    strategy: str
    size: ModelSize
    world_size: int
    precision: str
    attention: str
    checkpointing: str = "none"
    prefetch: int = 1
    bucket_mb: float = OPTIMIZER_BUCKET_MB

    @property
    def element_bytes(self) -> int:
        """Of gathered weights and of gradients as computed."""
        return ELEMENT_BYTES[self.precision]

    @property
    def share(self) -> ModelSize:
        """The size with this rank's part of the batch."""
        return replace(self.size, batch_size=self.size.batch_size // self.world_size)


def predicted_memory(step: ShardedStep) -> list[RankMemory]:
    """At each of :data:`MOMENTS`, on the fullest rank.

    Counts tensors of eager execution, as :func:`~cs336sys.accounting.memory.widest_moments` does. ``torch-fsdp`` has no
    peak: how many buffers ``fully_shard`` keeps beside the gathered weights is torch's own affair.
    """
    state = rank_state(step)
    always = 16 * step.size.batch_size * step.size.context + 4 * step.size.context * step.size.head_dim
    # torch's DDP keeps its buckets from the start, and gradients are views of them.
    kept = state.gradients if step.strategy == "torch-zero" else 0
    moments = [
        RankMemory(MOMENTS[0], state.parameters, 0, 0, always + kept),
        RankMemory(MOMENTS[1], state.parameters, state.gradients, state.optimizer_state, always),
        RankMemory(MOMENTS[2], state.parameters, kept, state.optimizer_state, always),
    ]
    if step.strategy != "torch-fsdp":
        moments.append(max(_moments_of_step(step, state), key=lambda held: held.total))
    return moments


def rank_state(step: ShardedStep) -> TrainingState:
    """Bytes of parameters, gradients and AdamW's moments between backward pass and optimizer, on the fullest rank."""
    shapes, world_size = parameter_shapes(step.size).values(), step.world_size
    sizes = [math.prod(shape) for shape in shapes]
    if step.strategy == "none":
        return training_state(step.size, step.precision)
    if step.strategy == "fsdp":
        return fully_sharded_state(step.size, 0, world_size)
    if step.strategy == "torch-fsdp":
        # Norms are cut, too.
        elements = sum(rows_per_rank(shape[0], world_size) * math.prod(shape[1:]) for shape in shapes)
        return TrainingState(4 * elements, 4 * elements, 8 * elements, 0)
    of_ranks = (
        flat_optimizer_state([sizes], world_size)
        if step.strategy == "optimizer-flat"
        else sharded_optimizer_state(sizes, world_size)
    )
    return max(of_ranks, key=lambda state: state.total)


def predicted_sent_bytes(step: ShardedStep) -> float:
    """What a rank sends in a step: ``(W - 1) / W`` of what is gathered, scattered or broadcast, twice that of what is
    all-reduced.

    torch's ``fully_shard`` gathers blocks twice and the rest once, and sends fp32 gradients.
    """
    if step.strategy == "fsdp":
        return step_communication(step.size, step.element_bytes, step.world_size).sent_bytes(step.world_size)
    count = count_parameters(step.size)
    if step.strategy == "torch-fsdp":
        outside = count_parameters(replace(step.size, num_layers=0))
        ring = (step.world_size - 1) / step.world_size
        return ring * (step.element_bytes * (2 * count - outside) + 4 * count)
    return sent_bytes(_COUNTERPARTS.get(step.strategy, step.strategy), count, step.world_size)


def _moments_of_step(step: ShardedStep, state: TrainingState) -> Iterator[RankMemory]:
    at_loss, at_blocks = saved_schedule(step.checkpointing, step.size.num_layers)
    others_batch = 16 * (step.size.batch_size - step.share.batch_size) * step.size.context
    for blocks in at_blocks:
        saved = {"loss": at_loss, "end of backward": SavedBlocks(0, 0), "optimizer": SavedBlocks(0, 0)}
        moments = widest_moments(
            step.share, step.precision, "train", step.attention, at_loss=at_loss, at_blocks=[blocks]
        )
        for moment in moments:
            gradients, buffers = _gradients_and_buffers(step, state, moment)
            activations = moment.activations + others_batch
            activations -= _autocast_copies(step, saved.get(moment.moment, blocks).saved, moment.moment == "loss")
            yield RankMemory("peak", state.parameters, gradients, state.optimizer_state, activations + buffers)


def _gradients_and_buffers(step: ShardedStep, state: TrainingState, moment: PeakMemory) -> tuple[int, int]:
    """What this rank keeps of the gradients that exist, and what is under way: whole gradients, gathered weights."""
    if step.strategy == "torch-zero":
        return state.gradients, 0
    if step.strategy in ("none", "optimizer"):
        return moment.gradients, 0
    kept = state.gradients * moment.gradients // (4 * count_parameters(step.size))
    if step.strategy == "optimizer-flat":
        # One bucket fills while two are being reduced.
        in_flight = min(3 * int(step.bucket_mb * 1e6), moment.gradients)
        return kept, 0 if moment.moment == "optimizer" else in_flight
    under_way = fully_sharded_peak(step.size, step.element_bytes, step.world_size, prefetch=step.prefetch)
    if moment.moment in ("optimizer", "end of backward"):
        return kept, 0
    if moment.moment == "loss":
        return kept, under_way.gathered
    return kept, under_way.gathered + under_way.whole_gradients + under_way.received


def _autocast_copies(step: ShardedStep, saved_blocks: int, at_loss: bool) -> int:
    """Bytes that autocast saves and a fully sharded model does not, whose matrices and stream are half already.

    Autocast keeps a cast of every weight, and casts the norm's output once for each of q, k, v, w1 and w3.
    """
    if step.strategy != "fsdp" or step.precision == "fp32":
        return 0
    tokens = step.share.batch_size * step.size.context
    casts = 3 * step.element_bytes * tokens * step.size.d_model
    copies = saved_blocks * (block_activations(step.share, step.precision, step.attention).weight_copies + casts)
    return copies + (step.element_bytes * parameters_by_component(step.size).lm_head if at_loss else 0)
