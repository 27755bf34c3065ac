"""Cells of ``shard`` on paper: what a rank holds at each moment, and what it sends."""

from dataclasses import replace

from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.accounting.flops import parameter_shapes
from cs336sys.accounting.memory import always_held_bytes
from cs336sys.accounting.sharding import step as sharded
from cs336sys.accounting.sharding.context import attention_sent_bytes
from cs336sys.accounting.sharding.fsdp import fully_sharded_state, most_sent_bytes
from cs336sys.accounting.sharding.selective_checkpointing import kept_memory
from cs336sys.accounting.sharding.tensor import TensorStep, tensor_moments
from cs336sys.results.model import Cell
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import ELEMENT_BYTES


def _tensor_step(workload: ParallelWorkload) -> TensorStep:
    """Describe a cell whose ranks share layers."""
    training = workload.training
    return TensorStep(
        workload.strategy,
        training.size,
        tensor_ranks=workload.group_ranks,
        data_ranks=workload.data_ranks,
        precision=training.precision,
        checkpointing=workload.checkpointing,
        compiles=training.is_compiled,
    )


def sharding_sent_bytes(workload: ParallelWorkload) -> float | None:
    """Return the bytes that a rank sends in a step; None where torch decides, and no function ``sends`` counts them."""
    record = workload.strategy_record
    if not record.sends:
        return None
    if record.shares_layers:
        return _tensor_step(workload).sent_bytes
    if record.splits_sequences and record.outer:
        # As in fsdp+context-ring: groups of ranks split sequences, and all ranks share the weights.
        training, ranks = workload.training, workload.world_size
        group = replace(training.size, batch_size=workload.sequences_per_rank)
        settings = training.precision, workload.checkpointing
        weights = most_sent_bytes(parameter_shapes(training.size), ELEMENT_BYTES[training.precision], ranks)
        return weights + attention_sent_bytes(workload.strategy, group, workload.group_ranks, *settings)
    return sharded.predicted_sent_bytes(sharded.sharded_step(workload))


def predicted_rank_memory(workload: ParallelWorkload) -> list[sharded.RankMemory]:
    """Predict what the fullest rank holds at each moment that formulas know."""
    if workload.strategy_record.shares_layers:
        return _memory_where_layers_are_shared(workload)
    if workload.strategy_record.splits_sequences and workload.strategy_record.outer:  # As in fsdp+context-ring.
        state = fully_sharded_state(workload.training.size, rank=0, world_size=workload.world_size)
        return sharded.memory_of_state(state, always_held_bytes(workload.share_size))
    step = sharded.sharded_step(workload)
    if workload.has_own_block_backward:
        return kept_memory(step)
    if kept_blocks(workload.checkpointing) is None:
        return sharded.predicted_memory(step)
    # How much torch's selective checkpoints hold at once is torch's own affair.
    moments = sharded.predicted_memory(replace(step, checkpointing="none"))
    return [rank_memory for rank_memory in moments if rank_memory.moment != "peak"]


def _memory_where_layers_are_shared(workload: ParallelWorkload) -> list[sharded.RankMemory]:
    """Predict the moments; no peak with torch's classes, nor where FSDP gathers weights: it has no autocast."""
    step, size = _tensor_step(workload), workload.training.size
    moments = sharded.memory_of_state(step.state, always_held_bytes(size))
    if not workload.strategy_record.is_torchs and workload.uses_autocast:
        peak = max(tensor_moments(step, workload.training.attention), key=lambda moment: moment.total)
        # Every rank has the batch of all groups.
        rest = peak.activations + 16 * (size.batch_size - workload.sequences_per_rank) * size.context
        moments.append(sharded.RankMemory("peak", peak.parameters, peak.gradients, peak.optimizer_state, rest))
    return moments


def memory_of(cell: Cell) -> dict[str, list[sharded.RankMemory]]:
    """Return what a cell's fullest rank held at each moment, ``measured`` and, of our models, ``predicted``."""
    workload = ParallelWorkload.from_configuration(cell.configuration)
    return {
        "measured": [sharded.RankMemory(**memory) for memory in cell.derived["memory"]],
        "predicted": predicted_rank_memory(workload) if workload.training.is_ours else [],
    }
