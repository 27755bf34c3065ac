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
from dataclasses import dataclass, replace
from itertools import accumulate

from cs336sys.accounting.activations import LOGITS_CHUNK_BYTES
from cs336sys.accounting.checkpointing import kept_blocks, recomputed_flops
from cs336sys.accounting.flops import attention_flops, linear_flops, model_flops
from cs336sys.accounting.memory import GIB, PeakMemory, TrainingState, always_held_bytes
from cs336sys.accounting.sharding.fsdp import STATE_BYTES, fully_sharded_state, gathered_bytes
from cs336sys.accounting.sharding.partition import check_batch
from cs336sys.accounting.sharding.step import MOMENTS, RankMemory, memory_of_state
from cs336sys.errors import UsageError
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize


@dataclass(frozen=True)
class KeptStep:
    """A step of fully sharded training with fused kernels, whose loss is computed without logits.

    Attributes:
        size: its batch is that of all ranks together, of which each has an equal part.
        precision: of weights in use, activations and their gradients.
        state_dtype: a name of :data:`~cs336sys.accounting.sharding.fsdp.STATE_BYTES`.
        blocks: how many of the last blocks keep gate and up.
        prefetch: units gathered ahead of use.
        keep_gathered: how many of the last blocks stay gathered between forward and backward pass.

    Raises:
        UsageError: the ranks do not divide the batch, or the model has not so many blocks.
    """

    size: ModelSize
    world_size: int
    precision: str = "bf16"
    state_dtype: str = "fp32"
    blocks: int = 0
    prefetch: int = 1
    keep_gathered: int = 0

    def __post_init__(self) -> None:
        check_batch(self.size.batch_size, self.world_size)
        if not 0 <= self.blocks <= self.size.num_layers:
            raise UsageError(f"keep={self.blocks}: the model has {self.size.num_layers} blocks")
        if not 0 <= self.keep_gathered <= self.size.num_layers:
            raise UsageError(f"--keep-gathered {self.keep_gathered}: the model has {self.size.num_layers} blocks")

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def share(self) -> ModelSize:
        """The size with this rank's part of the batch."""
        return replace(self.size, batch_size=self.size.batch_size // self.world_size)

    @property
    def state(self) -> TrainingState:
        """Training state of the first rank, which holds most rows, between backward pass and optimizer."""
        return fully_sharded_state(self.size, 0, self.world_size, self.state_dtype)

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return self.share.batch_size * self.size.context


def kept_block_bytes(step: KeptStep, *, gate_and_up: bool) -> int:
    """Return what a block keeps: ``6 e T d``, the logsumexp, both norms' factors, and maybe ``2 e T f``."""
    e, tokens, size = step.element_bytes, step.tokens, step.size
    always = 6 * e * tokens * size.d_model + 4 * tokens * size.num_heads + 2 * 4 * tokens
    return always + (2 * e * tokens * size.d_ff if gate_and_up else 0)


def kept_moments(step: KeptStep) -> list[PeakMemory]:
    """The moments that can be the peak of a second or later step; buffers of communication count as activations.

    - Loss: everything kept; the input, output and output's gradient of the last norm; the LM head's weight, its
      gradient, and a chunk of logits; the weights of blocks that stay gathered.
    - Feed-forward of a block in the backward pass: what it and those before it keep; gradients of its output and of the
      normalized input, of the product, of gate and of up, and the product itself, ``e T (2 d + 4 f)``; gate and up
      again where they are not kept; its weights, those fetched ahead and those that stay; the gradients of the unit
      before it, whole and as this rank's slice, which are being averaged.
    - Optimizer: the whole state.
    """
    e, size, tokens = step.element_bytes, step.size, step.tokens
    state = step.state
    layers, stream, inner = size.num_layers, e * tokens * size.d_model, e * tokens * size.d_ff
    always = always_held_bytes(step.size)
    parameters, optimizer_state = state.parameters + state.master_parameters, state.optimizer_state
    of_block = [kept_block_bytes(step, gate_and_up=is_kept) for is_kept in (False, True)]
    # Of the blocks, and of the units, before each.
    kept = [0, *accumulate(of_block[block >= layers - step.blocks] for block in range(layers))]
    units = list(gathered_bytes(size, e, step.world_size).values())
    of_units = [0, *accumulate(units)]
    head = units[-1]
    # An element of a gathered unit, in the gradient of a rank's slice.
    to_slice = STATE_BYTES[step.state_dtype][1] / e / step.world_size

    chunk = min(LOGITS_CHUNK_BYTES, e * tokens * size.vocab_size)
    first_staying = 1 + layers - step.keep_gathered
    at_loss = kept[-1] + 3 * stream + 2 * head + chunk + of_units[1 + layers] - of_units[first_staying]
    moments = [PeakMemory("loss", parameters, 0, optimizer_state, always + at_loss)]
    done = 0.0
    for block in reversed(range(layers)):
        averaged = units[block + 2]
        # In another dtype than the slices', gradients of all ranks arrive side by side before they are averaged.
        arriving = averaged if to_slice * step.world_size != 1 else 0
        recomputed_bytes = 2 * inner if block < layers - step.blocks else 0
        gathered = of_units[block + 2] - of_units[max(0, min(block + 1 - step.prefetch, first_staying))]
        live_bytes = kept[block + 1] + 2 * stream + 4 * inner + recomputed_bytes + gathered + averaged + arriving
        done += to_slice * averaged
        name = f"feed-forward backward, block {block + 1} of {layers}"
        moments.append(PeakMemory(name, parameters, round(done), optimizer_state, always + live_bytes))
    moments.append(PeakMemory("optimizer", parameters, state.gradients, optimizer_state, always))
    return moments


def kept_peak(step: KeptStep) -> PeakMemory:
    """The widest of :func:`kept_moments`."""
    return max(kept_moments(step), key=lambda moment: moment.total)


def kept_memory(step: KeptStep) -> list[RankMemory]:
    """Return what the first rank holds at each of :data:`~cs336sys.accounting.sharding.step.MOMENTS`."""
    state, peak = step.state, kept_peak(step)
    # Master weights, or their lower bits, are state of the optimizer.
    optimizer_state = state.optimizer_state + state.master_parameters
    saved_state = TrainingState(state.parameters, state.gradients, optimizer_state)
    at_peak = RankMemory(MOMENTS[-1], state.parameters, peak.gradients, optimizer_state, peak.activations)
    return [*memory_of_state(saved_state, always_held_bytes(step.size)), at_peak]


def _most_within(peak: Callable[[int], int], highest: int, limit_bytes: float) -> int | None:
    """The highest number of blocks, from 0, whose peak is within the limit; peaks rise with it. None if none is."""
    return bisect_right(range(highest + 1), limit_bytes, key=peak) - 1 if peak(0) <= limit_bytes else None


def flops_again(step: KeptStep) -> int:
    """FLOPs of all ranks together that a step spends on gate and up a second time."""
    size = step.size
    product = linear_flops(size.tokens, size.d_model, size.d_ff, backward=False)
    return 2 * (size.num_layers - step.blocks) * product


def choose_kept_blocks(step: KeptStep, limit_bytes: float, *, keeps_gathered: bool) -> KeptStep:
    """The step in which most blocks keep gate and up, and whose predicted peak is within the limit.

    Args:
        keeps_gathered: if all do and there is room for more, let the weights of as many blocks as fit stay gathered: an
            all-gather less saves less time for its memory than two products. Else as many stay as the step says.

    Raises:
        UsageError: there is none; the message says what is needed.
    """
    layers = step.size.num_layers
    blocks = _most_within(lambda count: kept_peak(replace(step, blocks=count)).total, layers, limit_bytes)
    if keeps_gathered and blocks == layers:
        every = replace(step, blocks=blocks)
        staying = _most_within(lambda count: kept_peak(replace(every, keep_gathered=count)).total, layers, limit_bytes)
        assert staying is not None, "none need stay"
        return replace(every, keep_gathered=staying)
    if blocks is None:
        need = kept_peak(replace(step, blocks=0)).total_gib
        raise UsageError(
            f"--memory-limit {limit_bytes / GIB:.4g}GiB: a rank needs {need:.1f} GiB even if no block keeps gate "
            f"and up (state in {step.state_dtype}, {step.world_size} ranks); choose more ranks or a smaller state"
        )
    return replace(step, blocks=blocks)


def kept_step(workload: ParallelWorkload) -> KeptStep:
    """Describe a step whose blocks choose what to keep; any other as if none kept gate and up."""
    training = workload.training
    state_dtype = training.state_dtype if workload.has_half_weights else "fp32"
    blocks, ahead = kept_blocks(workload.checkpointing) or 0, 1 if workload.prefetch is None else workload.prefetch
    return KeptStep(
        training.size, workload.world_size, training.precision, state_dtype, blocks, ahead, workload.keep_gathered
    )


def computed_flops(workload: ParallelWorkload) -> int:
    """FLOPs a step of all ranks, with those of checkpoints and of attention that computes scores again."""
    size, score_flops = workload.training.size, 0
    if not workload.training.keeps_scores:
        shape = size.batch_size, size.num_heads, size.context, size.context, size.head_dim
        score_flops = size.num_layers * attention_flops(*shape, causal=True, backward=False) // 2
    if kept_blocks(workload.checkpointing) is not None:
        return model_flops(size) + score_flops + flops_again(kept_step(workload))
    return model_flops(size) + score_flops + recomputed_flops(size, workload.checkpointing)
