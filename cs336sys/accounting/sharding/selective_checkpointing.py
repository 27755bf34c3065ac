"""Choosing what the blocks of a fully sharded step keep, on paper: bytes of a rank, and FLOPs spent on computing again.

Of a block as ``board.transformer_block`` computes it always exists what is expensive for its size to compute again:
its input, query, key, value, attention's output and logsumexp, and the sum that the second norm takes. Gate and up,
``2 e T f`` of ``e (6 d + 2 f) T`` bytes in all, are kept in the last blocks, as many as memory allows, and computed
again in the others by two products, ``4 T d f`` FLOPs of ``24 T d f`` or more that a block has. That is the policy
``keep=N`` of ``--checkpoint``: N blocks keep gate and up.

Letters as in ``accounting.activations``; ``e`` is 2 in half precision.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from cs336sys.accounting.activations import LOGITS_CHUNK_BYTES
from cs336sys.accounting.checkpointing import recomputed_flops
from cs336sys.accounting.flops import attention_flops, model_flops
from cs336sys.accounting.memory import GIB, PeakMemory, TrainingState, always_held_bytes
from cs336sys.accounting.sharding.fsdp import STATE_BYTES, gathered_bytes
from cs336sys.accounting.sharding.step import RankMemory, ShardedStep, fullest_state, memory_of_state
from cs336sys.errors import UsageError
from cs336sys.settings.parallel import ParallelWorkload


def kept_block_bytes(step: ShardedStep, *, gate_and_up: bool) -> int:
    """Return the bytes that a block keeps: ``6 e T d``, the logsumexp, both norms' factors, and maybe ``2 e T f``."""
    e, tokens, size = step.computed_bytes, step.share.tokens, step.size
    always = 6 * e * tokens * size.d_model + 4 * tokens * size.num_heads + 2 * 4 * tokens
    return always + (2 * e * tokens * size.d_ff if gate_and_up else 0)


def kept_moments(step: ShardedStep) -> list[PeakMemory]:
    """Return the moments that can be the peak of a later step; buffers of communication count as activations.

    - Loss: everything kept; the input, output and output's gradient of the last norm; the LM head's weight, its
      gradient, and a chunk of logits; the weights of blocks that stay gathered.
    - Feed-forward of a block in the backward pass: what it and those before it keep; gradients of its output and of the
      normalized input, of the product, of gate and of up, and the product itself, ``e T (2 d + 4 f)``; gate and up
      again where they are not kept; its weights, those fetched ahead and those that stay; the gradients of the unit
      before it, whole and as this rank's slice, which are being averaged.
    - Optimizer: the whole state.
    """
    e, size, tokens, state = step.computed_bytes, step.size, step.share.tokens, fullest_state(step)
    layers, stream, inner = size.num_layers, e * tokens * size.d_model, e * tokens * size.d_ff
    always = always_held_bytes(size)
    parameters, optimizer_state = state.parameters + state.master_parameters, state.optimizer_state
    first_keeping = layers - step.kept_blocks
    # Bytes that all blocks before each keep, and of all units before each when they are gathered. Unit 0 is the
    # embedding, unit ``block + 1`` a block, the last one the LM head.
    kept = [0, *accumulate(kept_block_bytes(step, gate_and_up=block >= first_keeping) for block in range(layers))]
    units = list(gathered_bytes(size, e, step.world_size).values())
    units_before = [0, *accumulate(units)]
    # Bytes of a rank's slice of a gradient over those of the gathered unit.
    slice_share = STATE_BYTES[step.state_dtype][1] / e / step.world_size  # The second of these is a gradient's.
    chunk = min(LOGITS_CHUNK_BYTES, e * tokens * size.vocab_size)
    first_staying = 1 + layers - step.keep_gathered
    staying = units_before[1 + layers] - units_before[first_staying]
    at_loss = kept[-1] + 3 * stream + 2 * units[-1] + chunk + staying
    moments = [PeakMemory("loss", parameters, 0, optimizer_state, always + at_loss)]  # 0: no gradients yet.
    gradients = 0.0
    for block in reversed(range(layers)):
        averaged = units[block + 2]  # Of the unit after the block's: the backward pass comes from there.
        # In another dtype than the slices', gradients of all ranks arrive side by side before they are averaged.
        arriving = averaged if slice_share * step.world_size != 1 else 0
        recomputed_bytes = 2 * inner if block < first_keeping else 0
        # From the first unit fetched ahead, or the first that stays, to the block's own, which is unit block + 1.
        gathered = units_before[block + 2] - units_before[max(0, min(block + 1 - step.prefetch, first_staying))]
        live_bytes = kept[block + 1] + 2 * stream + 4 * inner + recomputed_bytes + gathered + averaged + arriving
        gradients += slice_share * averaged
        name = f"feed-forward backward, block {block + 1} of {layers}"
        moments.append(PeakMemory(name, parameters, round(gradients), optimizer_state, always + live_bytes))
    moments.append(PeakMemory("optimizer", parameters, state.gradients, optimizer_state, always))
    return moments


def kept_peak(step: ShardedStep) -> PeakMemory:
    """Return the widest of :func:`kept_moments`."""
    return max(kept_moments(step), key=lambda moment: moment.total)


def kept_memory(step: ShardedStep) -> list[RankMemory]:
    """Return what the first rank holds at each of :data:`~cs336sys.accounting.sharding.step.MOMENTS`."""
    state, peak = fullest_state(step), kept_peak(step)
    # Master weights, or their lower bits, are state of the optimizer.
    optimizer_state = state.optimizer_state + state.master_parameters
    saved_state = TrainingState(state.parameters, state.gradients, optimizer_state)
    at_peak = RankMemory("peak", state.parameters, peak.gradients, optimizer_state, peak.activations)
    return [*memory_of_state(saved_state, always_held_bytes(step.size)), at_peak]


def _most_within(peak: Callable[[int], int], highest: int, limit_bytes: float) -> int | None:
    """Return the most blocks, 0 to ``highest``, whose peak is within the limit, None if 0 is over it; peaks rise."""
    return bisect_right(range(highest + 1), limit_bytes, key=peak) - 1 if peak(0) <= limit_bytes else None


def _keeping(step: ShardedStep, blocks: int) -> ShardedStep:
    """Return the step in which so many blocks keep gate and up."""
    return replace(step, checkpointing=f"keep={blocks}")


def choose_kept_blocks(step: ShardedStep, limit_bytes: float, *, keeps_gathered: bool) -> ShardedStep:
    """Return the step in which most blocks keep gate and up, and whose predicted peak is within the limit.

    Args:
        keeps_gathered: once all blocks keep gate and up, let the weights of as many as fit stay gathered (second: the
            same memory then saves an all-gather, less than two products). False: as many stay as the step says.
    """
    layers = step.size.num_layers
    blocks = _most_within(lambda count: kept_peak(_keeping(step, count)).total, layers, limit_bytes)
    if blocks is None:
        need = kept_peak(_keeping(step, 0)).total_gib
        raise UsageError(
            f"--memory-limit {limit_bytes / GIB:.4g}GiB: a rank needs {need:.1f} GiB even if no block keeps gate "
            f"and up (state in {step.state_dtype}, {step.world_size} ranks); choose more ranks or a smaller state"
        )
    chosen = _keeping(step, blocks)
    if not keeps_gathered or blocks < layers:
        return chosen
    staying = _most_within(lambda count: kept_peak(replace(chosen, keep_gathered=count)).total, layers, limit_bytes)
    assert staying is not None, "with none that stay it is the step that fits"
    return replace(chosen, keep_gathered=staying)


def computed_flops(workload: ParallelWorkload) -> int:
    """Count FLOPs a step of all ranks, with those of checkpoints and of attention that computes scores again."""
    size, score_flops = workload.training.size, 0
    if not workload.training.keeps_scores:
        shape = size.batch_size, size.num_heads, size.context, size.context, size.head_dim
        # One of the forward pass's two products.
        score_flops = size.num_layers * attention_flops(*shape, causal=True, backward=False) // 2
    return model_flops(size) + score_flops + recomputed_flops(size, workload.checkpointing)
