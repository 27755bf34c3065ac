"""Memory of a rank in a training step, and bytes sent, for every strategy of ``shard`` and ``account memory``.

First as formulas of P and N, for ideal shares ``P / N`` (ZeRO, https://arxiv.org/abs/1910.02054, sections 5 and 7), of
numbers or symbols:

- ``none``: data parallel; all state on every rank, gradients all-reduced.
- ``optimizer``: each rank has the optimizer state of some whole parameters (ZeRO stage 1 but for the communication:
  gradients are all-reduced as before, and updated parameters then sent to all).
- ``optimizer-flat``: each rank has a slice of every parameter; gradients are reduce-scattered and parameters
  all-gathered, so a rank keeps the gradients of its slice alone (ZeRO stage 2).
- ``fsdp``: parameters are in slices too, gathered for use in both passes (ZeRO stage 3).

Then exactly, with whole parameters and padding: puts together what :mod:`~cs336sys.accounting.memory` (a step's
activations) and :mod:`~cs336sys.accounting.sharding.fsdp` (who holds which part of the state) say on paper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cs336sys.accounting import memory
from cs336sys.accounting.checkpointing import SavedBlocks, kept_blocks
from cs336sys.accounting.derivation import Derived, Number, number_of, symbol, why
from cs336sys.accounting.flops import count_parameters, parameter_shapes
from cs336sys.accounting.memory import MomentMemory, PeakMemory, TrainingState
from cs336sys.accounting.sharding import context, partition
from cs336sys.accounting.sharding.fsdp import fully_sharded_peak, fully_sharded_state, most_sent_bytes
from cs336sys.settings.choices import StepChoices
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize
from cs336sys.settings.strategies import STRATEGIES, HasStrategy

OWN_SHARDING_STRATEGIES = ("none", "optimizer", "optimizer-flat", "fsdp")


def ideal_state(strategy: str, parameters: Any, ranks: Any, element_bytes: int = 4) -> TrainingState:
    """Return the bytes that a rank holds with ideal shares between backward pass and optimizer step.

    Args:
        strategy: one of :data:`OWN_SHARDING_STRATEGIES`.
        parameters: of the model, P.
        ranks: N.
        element_bytes: of parameters and gradients. Less than 4 needs fp32 master parameters next to them; with fsdp the
            master parameters are the slices themselves, and gradients are fp32 as they are.
    """
    record, whole = STRATEGIES[strategy], element_bytes * parameters
    share = parameters / ranks if record.shares_updates else parameters
    moments = 8 * share  # AdamW's two moments, fp32.
    if record.shards_weights:
        return TrainingState(4 * share, 4 * share, moments)
    gradients = 4 * share if record.reduces_slices else whole  # Slices are fp32, as the optimizer steps them.
    return TrainingState(whole, gradients, moments, 0 if element_bytes == 4 else 4 * share)


def sent_bytes(
    strategy: str, parameters: Number, ranks: Number, element_bytes: int = 4, compute_bytes: int = 4
) -> Number:
    """Return the bytes that a rank sends in a step: ``(N - 1) / N`` of what is gathered, scattered or broadcast.

    An all-reduce is a scatter and a gather; of fsdp nothing stays gathered between the passes. ``element_bytes`` are of
    parameters and gradients, ``compute_bytes`` of what fsdp gathers. ``optimizer`` all-reduces, and broadcasts.
    """
    share = (ranks - 1) / ranks * parameters
    if STRATEGIES[strategy].shards_weights:
        return (2 * compute_bytes + 4) * share  # Gathered in both passes; gradients scattered in fp32.
    return {"none": 2, "optimizer": 3, "optimizer-flat": 2}[strategy] * element_bytes * share


def state_answers(
    size: ModelSize, world_size: int, strategy: str, *, element_bytes: int = 4, compute_bytes: int = 4
) -> list[Derived]:
    """Answer ``optimizer_state_sharding_accounting`` (a), (c) and ``fsdp_accounting`` (a) for one strategy.

    Ideal shares of the state, what there is at the handout's three times, and the bytes that a rank sends in a step.
    """
    p, n = symbol("P", count_parameters(size)), symbol("N", world_size)
    state = ideal_state(strategy, p, n, element_bytes)
    problem = (
        "fsdp_accounting (a)" if STRATEGIES[strategy].shards_weights else "optimizer_state_sharding_accounting (a)"
    )

    def row(quantity: str, value: Number, reason: str = "", name: str = "", question: str = problem) -> Derived:
        named = f"{strategy}: {quantity}"
        return Derived(named, value, "bytes", name, reason=reason, source="ZeRO, arXiv:1910.02054", question=question)

    parts = [
        row("parameters", state.parameters, name="p"),
        row("gradients", state.gradients, name="g"),
        row("optimizer state", state.optimizer_state, why("moments"), "o"),
    ]
    if number_of(state.master_parameters):
        parts.append(row("fp32 master parameters", state.master_parameters, name="m"))
    symbols = {part.symbol: part.as_symbol() for part in parts}
    model = symbols["p"] + symbols.get("m", 0)
    before, after = model + symbols["g"], model + symbols["g"] + symbols["o"]
    rows = [
        *parts,
        row("after model initialization", model),
        row("directly before the first step", before, why("before_first_step")),
        row("directly after the first step", after, why("after_first_step")),
    ]
    # All are compared with data parallelism, and fsdp also with sharing the optimizer's state alone.
    for other in {"none": (), "fsdp": ("none", "optimizer")}.get(strategy, ("none",)):
        other_bytes = symbol(f"M_{other}", number_of(ideal_state(other, p, n, element_bytes).total))
        rows.append(row(f"less than {other}", other_bytes - after, why("less_than", other)))
    part_c = "optimizer_state_sharding_accounting (c)" if strategy.startswith("optimizer") else ""
    sends = sent_bytes(strategy, p, n, element_bytes, compute_bytes)
    return [*rows, row("sent in a step", sends, why("sent", strategy), question=part_c)]


def sharded_optimizer_state(
    sizes: Sequence[int], world_size: int, *, element_bytes: int = 4, master_bytes: int = 0
) -> list[TrainingState]:
    """Return the bytes that each rank holds between backward pass and step if a parameter's state lies on one rank.

    Parameters and gradients are whole on every rank; moments are of the dtype that is stepped (ZeRO stage 1,
    https://arxiv.org/abs/1910.02054, section 5.1). The 4 bytes in which torch's AdamW counts steps are left out.

    Args:
        sizes: elements of each parameter.
        element_bytes: of parameters and gradients.
        master_bytes: of a master parameter's element, 0 without master parameters.
    """
    elements_of_ranks = [0] * world_size
    for size, owner in zip(sizes, partition.greedy_partition(sizes, elements_of_ranks), strict=True):
        elements_of_ranks[owner] += size
    whole = element_bytes * sum(sizes)
    stepped_bytes = master_bytes or element_bytes
    return [
        TrainingState(whole, whole, 2 * stepped_bytes * elements, master_bytes * elements)  # AdamW's two moments.
        for elements in elements_of_ranks
    ]


def flat_optimizer_state(
    buckets: Sequence[Sequence[int]], world_size: int, *, element_bytes: int = 4, master_bytes: int = 0
) -> list[TrainingState]:
    """Return the bytes that each rank holds between backward pass and step if every parameter is cut into slices.

    Parameters are whole on every rank, packed ones with their padding. Of the gradients a rank has its slices of every
    bucket in which it owns anything. They and moments are of the dtype that is stepped.

    Args:
        buckets: elements of each parameter, bucket by bucket.
        element_bytes, master_bytes: as in :func:`sharded_optimizer_state`.
    """
    stepped_bytes = master_bytes or element_bytes
    parameters = 0
    gradients, elements_of_ranks = [0] * world_size, [0] * world_size
    for sizes in buckets:
        pieces = partition.flat_pieces(sizes, world_size)
        slices = sum(piece.slice_size for piece in pieces)
        parameters += element_bytes * world_size * slices
        # Every rank owns a whole slice of a piece that is not packed. Of packed ones only the ranks that a tensor
        # reaches are asked: all of thousands would take seconds.
        bucket_elements = [sum(piece.slice_size for piece in pieces if not piece.is_packed)] * world_size
        for piece in pieces:
            for index, start in piece.starts.items() if piece.is_packed else ():
                for rank in range(start // piece.slice_size, (start + sizes[index] - 1) // piece.slice_size + 1):
                    bucket_elements[rank] += len(piece.owned(index, sizes[index], rank))
        for rank, elements in enumerate(bucket_elements):
            elements_of_ranks[rank] += elements
            gradients[rank] += stepped_bytes * slices if elements else 0
    return [
        TrainingState(parameters, gradient_bytes, 2 * stepped_bytes * elements, master_bytes * elements)  # Two moments.
        for gradient_bytes, elements in zip(gradients, elements_of_ranks, strict=True)
    ]


MOMENTS = (
    *("initialized", "before the first optimizer step", "after the first optimizer step"),
    *("before the optimizer", "after the optimizer", "peak"),
)


@dataclass(frozen=True)
class ShardedStep(StepChoices, HasStrategy):
    """A training step that ranks share.

    Attributes:
        strategy: a name of :data:`~cs336sys.settings.strategies.STRATEGIES`, without groups of ranks that share layers.
        size: its batch is that of all ranks together, of which each has an equal part, or a slice of every sequence.
        precision: what is computed in.
        prefetch: for ``fsdp``, units gathered ahead of use.
        keep_gathered: for ``fsdp``, units besides the last that stay gathered between forward and backward pass.
        bucket_mb: for ``optimizer-flat``, the most gradients in one reduce-scatter, in megabytes (1e6 bytes).
        mode: ``forward``, ``forward-backward`` or ``train``.
        parameter_bytes: of an element of parameters and gradients. With 2 the model is not under autocast, and AdamW
            keeps fp32 master parameters and moments; weights in slices do not depend on it.
        state_dtype: for ``fsdp``, of its slices and of AdamW's state, see :data:`.fsdp.STATE_BYTES`.

    Raises:
        UsageError: there is no rank, or the ranks do not divide the batch.
    """

    strategy: str
    size: ModelSize
    world_size: int
    precision: str
    attention: str
    checkpointing: str = "none"
    prefetch: int = 1
    bucket_mb: float = partition.OPTIMIZER_BUCKET_MB
    mode: str = "train"
    parameter_bytes: int = 4
    state_dtype: str = "fp32"
    keep_gathered: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1 or not self.strategy_record.splits_sequences:
            partition.check_batch(self.size.batch_size, self.world_size)

    @property
    def share(self) -> ModelSize:
        """Return the size with this rank's part of the batch, or of every sequence."""
        if self.strategy_record.splits_sequences:
            longest_slice = max(context.split_of(self.strategy, self.size, self.world_size).lengths)
            return replace(self.size, context=longest_slice)
        return replace(self.size, batch_size=self.size.batch_size // self.world_size)

    @property
    def kept_blocks(self) -> int:
        """Return how many blocks, the last ones, keep gate and up: the ``N`` of ``keep=N``."""
        return kept_blocks(self.checkpointing) or 0

    @property
    def uses_autocast(self) -> bool:
        """Return whether half precision is autocast's."""
        return self.parameter_bytes == 4 and not self.strategy_record.shards_weights

    @property
    def computed_bytes(self) -> int:
        """Return the bytes of an element of the weights with which the model computes, and of their gradients."""
        return 4 if self.uses_autocast else ELEMENT_BYTES[self.precision]


def sharded_step(workload: ParallelWorkload) -> ShardedStep:
    """Describe the step of a cell whose ranks share the batch or sequences."""
    training = workload.training
    return ShardedStep(
        workload.strategy,
        training.size,
        workload.world_size,
        precision=training.precision,
        attention=training.attention,
        checkpointing=workload.checkpointing,
        prefetch=1 if workload.prefetch is None else workload.prefetch,
        state_dtype=training.state_dtype if workload.has_half_weights else "fp32",
        keep_gathered=workload.keep_gathered,
    )


@dataclass(frozen=True)
class RankMemory(MomentMemory):
    """Bytes that one rank holds at a moment.

    Attributes:
        moment: one of :data:`MOMENTS`: the model is built; directly before and after the first optimizer step, when
            gradients are there; in a later step before the optimizer, after it, without gradients, and the most.
        gradients: what the optimizer updates parameters by, and torch's buckets, of which they are views.
        rest: activations and buffers: also gathered weights, gradients under way, temporaries, batch and rotary table.
    """

    rest: int


def predicted_memory(step: ShardedStep) -> list[RankMemory]:
    """Predict what ``shard`` measures, on the fullest rank, at each of :data:`MOMENTS`.

    Every rank holds the whole batch, of which :func:`rank_peak` counts this rank's part alone, or the tokens of its
    slices and their positions. ``torch-fsdp`` and ``torch-context`` have no peak, as torch's buffers are unknown; nor
    has all-to-all attention that keeps the scores of its heads.
    """
    state = fullest_state(step)
    always = memory.always_held_bytes(step.size)
    if step.strategy_record.splits_sequences:
        # Token ids and targets of its slices, the positions of their tokens, and the whole rotary table.
        tokens = step.share.context
        always = 16 * step.size.batch_size * tokens + 8 * tokens + 4 * step.size.context * step.size.head_dim
    # torch's DDP keeps its buckets from the start, and gradients are views of them.
    kept_bytes = state.gradients if step.strategy_record.uses_torch_ddp else 0
    moments = memory_of_state(state, always, kept_gradient_bytes=kept_bytes)
    keeps_scores = step.strategy_record.trades_heads and step.keeps_scores
    if step.strategy_record.has_known_peak and not keeps_scores:
        peak = rank_peak(step)
        rest = peak.activations + always - memory.always_held_bytes(step.share)  # rank_peak() counted the share's.
        moments.append(RankMemory("peak", peak.parameters, peak.gradients, peak.optimizer_state, rest))
    return moments


def memory_of_state(state: TrainingState, always_held_bytes: int, *, kept_gradient_bytes: int = 0) -> list[RankMemory]:
    """Return what a rank holds at all of :data:`MOMENTS` but the peak; kept gradients live from step to step."""
    initialized, before_first, after_first, before, after, _peak = MOMENTS
    everything = state.parameters, state.gradients, state.optimizer_state, always_held_bytes
    return [
        # No gradients and no optimizer's state; memory that is kept for gradients holds none yet.
        RankMemory(initialized, state.parameters, 0, 0, always_held_bytes + kept_gradient_bytes),
        RankMemory(before_first, state.parameters, state.gradients, 0, always_held_bytes),
        RankMemory(after_first, *everything),
        RankMemory(before, *everything),
        RankMemory(after, state.parameters, kept_gradient_bytes, state.optimizer_state, always_held_bytes),
    ]


def fullest_state(step: ShardedStep) -> TrainingState:
    """Return the bytes of the training state between backward pass and optimizer, on the rank that holds most of it."""
    return step.strategy_record.load("holds")(step)


def whole_state(step: ShardedStep) -> TrainingState:
    """Return the whole state, which every rank holds."""
    return memory.training_state(step.size, step.precision, autocast=step.parameter_bytes == 4)


def optimizer_state(step: ShardedStep) -> TrainingState:
    """Return the state of the rank that holds most: of some whole parameters, or of a slice of each."""
    sizes = [math.prod(shape) for shape in parameter_shapes(step.size).values()]
    stored = {"element_bytes": step.parameter_bytes, "master_bytes": 0 if step.parameter_bytes == 4 else 4}
    if step.strategy_record.reduces_slices:
        of_ranks = flat_optimizer_state([sizes], step.world_size, **stored)
    else:
        of_ranks = sharded_optimizer_state(sizes, step.world_size, **stored)
    return max(of_ranks, key=lambda state: state.total)


def sliced_state(step: ShardedStep) -> TrainingState:
    """Return the state of the first rank: rows of every matrix, with their gradients and moments."""
    return fully_sharded_state(step.size, rank=0, world_size=step.world_size, state_dtype=step.state_dtype)


def torch_sliced_state(step: ShardedStep) -> TrainingState:
    """Return the state of the first rank with torch's ``fully_shard``, which cuts rows of norms, too; all is fp32."""
    shapes = parameter_shapes(step.size).values()
    elements = sum(partition.rows_per_rank(shape[0], step.world_size) * math.prod(shape[1:]) for shape in shapes)
    return TrainingState(4 * elements, 4 * elements, 8 * elements)


def rank_peak(step: ShardedStep) -> PeakMemory:
    """Return the widest of :func:`rank_moments`."""
    return max(rank_moments(step), key=lambda moment: moment.total)


def widest_blocks(step: ShardedStep) -> list[SavedBlocks]:
    """Return the blocks at which a backward pass may be the widest, where that may be any; else none."""
    if not step.strategy_record.reduces_slices or step.checkpointing != "none":
        return []
    layers = step.size.num_layers
    # Until buckets are full, a block may leave more gradients than it frees.
    return [SavedBlocks(block, block, name=f"block {block} of {layers}") for block in range(layers, 0, -1)]


def rank_moments(step: ShardedStep) -> list[PeakMemory]:
    """Return the moments of an eager step that can be its peak, on the fullest rank; an upper bound for ``fsdp``."""
    # Ring attention keeps no scores, whatever computes its blocks; all-to-all attention that does has no known peak.
    attention = "flash" if step.strategy_record.splits_sequences else step.attention
    settings = step.share, step.precision, step.mode, attention, step.checkpointing
    moments = memory.widest_moments(*settings, autocast=step.uses_autocast, at_blocks=widest_blocks(step))
    moments_of_rank = shared_moments(step, moments, step.computed_bytes)
    if step.strategy_record.uses_torch_ddp:
        # DDP orders its buckets by the first backward pass: the second step begins with the old ones next to the new.
        last, gradients = moments_of_rank[-1], fullest_state(step).gradients
        activation_bytes = memory.always_held_bytes(step.share) + gradients
        new_buckets = replace(last, moment="new buckets", gradients=gradients, activations=activation_bytes)
        moments_of_rank.append(new_buckets)
    return moments_of_rank


def shared_moments(step: ShardedStep, moments: Sequence[PeakMemory], gradient_bytes: int) -> list[PeakMemory]:
    """Give moments of a rank that shares nothing what the fullest rank has of the state, and what is under way.

    They are of a step after the first: the optimizer's state exists. Buffers count as activations, master parameters as
    parameters. ``gradient_bytes`` is what the moments count for an element of the gradients.
    """
    state = fullest_state(step)
    parameters = state.parameters + state.master_parameters
    optimizer_state = state.optimizer_state if step.updates_parameters else 0
    moments_of_rank = []
    for moment in moments:
        done = moment.gradients // gradient_bytes  # How many of all elements have their gradients by then.
        gradients, buffers = _gradients_and_buffers(step, state, done, is_update=moment.moment == "optimizer")
        activation_bytes = moment.activations + buffers
        moments_of_rank.append(PeakMemory(moment.moment, parameters, gradients, optimizer_state, activation_bytes))
    return moments_of_rank


def _gradients_and_buffers(step: ShardedStep, state: TrainingState, done: int, *, is_update: bool) -> tuple[int, int]:
    """Return the bytes of gradients that this rank keeps, and of whole gradients and gathered weights under way.

    ``done`` elements of the model have their gradients; in the optimizer's step (``is_update``) none is under way.
    """
    count = count_parameters(step.size)
    if step.strategy_record.uses_torch_ddp:
        return state.gradients, 0  # Views of its buckets, which exist from the start.
    if step.strategy_record.reduces_slices:
        # One bucket fills while two are being reduced; slices get memory when their bucket is full.
        bucket = int(step.bucket_mb * 1e6) // step.parameter_bytes
        full, filling = divmod(done, bucket)
        if done < count:  # The bucket that fills has no slices yet; at the end the last is reduced, full or not.
            done = full * bucket
        under_way = 0 if is_update else step.parameter_bytes * (filling + min(full, 2) * bucket)
        return state.gradients * done // count, under_way
    kept = state.gradients * done // count
    # Units are gathered in both passes, which are over once all gradients are done. Whole gradients and what ranks have
    # sent exist in the backward pass alone, from its first gradient on.
    if not step.strategy_record.gathers_ahead or done == count:
        return kept, 0
    peak = fully_sharded_peak(
        step.size, step.computed_bytes, step.world_size, prefetch=step.prefetch, keep_gathered=step.keep_gathered
    )
    return kept, peak.gathered + (peak.whole_gradients + peak.received if done else 0)


def predicted_sent_bytes(step: ShardedStep) -> float:
    """Return the bytes that a rank sends: ``(W - 1) / W`` of gathers, scatters, broadcasts; twice of all-reduces."""
    return step.strategy_record.load("sends")(step)


def all_reduced_bytes(step: ShardedStep) -> float:
    """Count bytes where gradients are all-reduced, or reduce-scattered and updated parameters all-gathered."""
    return number_of(sent_bytes("none", count_parameters(step.size), step.world_size))


def broadcast_bytes(step: ShardedStep) -> float:
    """Count bytes where gradients are all-reduced, and updated parameters sent by their owners."""
    return number_of(sent_bytes("optimizer", count_parameters(step.size), step.world_size))


def fully_sharded_bytes(step: ShardedStep) -> float:
    """Count bytes where weights are gathered in both passes, unless they stay, and gradients reduce-scattered."""
    shapes = parameter_shapes(step.size)
    return most_sent_bytes(shapes, step.computed_bytes, step.world_size, step.keep_gathered)


def torch_gathered_bytes(step: ShardedStep) -> float:
    """Count bytes of torch's ``fully_shard``: it gathers blocks twice and the rest once, and sends fp32 gradients."""
    outside, count = count_parameters(replace(step.size, num_layers=0)), count_parameters(step.size)
    return (step.world_size - 1) / step.world_size * (step.computed_bytes * (2 * count - outside) + 4 * count)


def context_bytes(step: ShardedStep) -> float:
    """Count bytes of the busiest rank of ring or all-to-all attention, and of the all-reduce of fp32 gradients."""
    settings = step.strategy, step.size, step.world_size, step.precision, step.checkpointing
    return context.attention_sent_bytes(*settings) + all_reduced_bytes(step)
