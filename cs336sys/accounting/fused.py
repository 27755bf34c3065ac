"""Memory of a step with fused kernels (``cs336sys.kernels.fuse``) on paper, eager, in half precision under autocast.

Letters as in ``accounting.activations``. Under autocast the blocks' matrices may have copies in half precision that
live from step to step, in place of casts in every pass, and so may the LM head: AdamW of ``cs336sys.kernels.adamw``
writes them. With its state ``split`` the blocks' matrices are themselves in bf16, and the head is cast. Gradients of
copies are in bf16, as autocast's products round them. ``stream`` counts ``T d`` numbers, ``inner`` ``T f``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cs336sys.accounting.activations import LOGITS_CHUNK_BYTES
from cs336sys.accounting.checkpointing import SavedBlocks, saved_schedule
from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.memory import PeakMemory, always_held_bytes, largest_parameter
from cs336sys.settings.choices import PRECISION_RECORDS, StepChoices
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize


@dataclass(frozen=True)
class FusedStep(StepChoices):
    """Settings that decide the memory of a step with fused kernels.

    Attributes:
        mode: ``forward`` (without gradients), ``forward-backward``, or ``train``.
        attention: one of ``choices.ATTENTION``.
        optimizer, state_dtype, update: as of a workload; ``adamw`` writes copies of the weights.
    """

    size: ModelSize
    mode: str
    precision: str
    attention: str
    optimizer: str
    state_dtype: str
    update: str = "step"

    @property
    def e(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def reads_copies(self) -> bool:
        """Return whether blocks compute with copies of their matrices in half precision."""
        return self.is_half and (self.optimizer_record.is_ours or not self.updates_parameters)

    @property
    def scores(self) -> int:
        return self.size.scores if self.keeps_scores else 0

    @property
    def block_matrices(self) -> int:
        """Count the parameters of a block's matrices."""
        return 4 * self.size.d_model**2 + 3 * self.size.d_model * self.size.d_ff

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of a number in the gradients of a block's matrices."""
        return 2 if PRECISION_RECORDS[self.precision].leaves_half_gradients and self.reads_copies else 4

    @property
    def head(self) -> int:
        """Count the parameters of the LM head."""
        return self.size.vocab_size * self.size.d_model

    @property
    def copies_head(self) -> bool:
        return self.reads_copies and not self.splits_weights

    @property
    def head_gradient(self) -> int:
        """Return the bytes of the LM head's gradient."""
        return (self.gradient_bytes if self.copies_head else 4) * self.head

    @property
    def parameters(self) -> int:
        """Return the bytes of all parameters and of the copies."""
        matrices = self.size.num_layers * self.block_matrices
        copies = 2 * (matrices + self.head) if self.copies_head else 0
        matrix_bytes = 2 if self.splits_weights else 4
        return matrix_bytes * matrices + 4 * (count_parameters(self.size) - matrices) + copies

    @property
    def optimizer_state(self) -> int:
        """Return the bytes of the moments, and of the weights' lower bits."""
        low_bits = 2 * self.size.num_layers * self.block_matrices if self.splits_weights else 0
        return self.moment_bytes * count_parameters(self.size) + low_bits

    def gradients(self, blocks: int) -> int:
        """Return the bytes of the gradients that the last ``blocks`` blocks, the last norm and the LM head leave."""
        left_by_blocks = 0 if self.update == "backward" else blocks * self.block_gradients  # 0: updated at once.
        return left_by_blocks + 4 * self.size.d_model + self.head_gradient

    @property
    def block_gradients(self) -> int:
        """Return the bytes of the gradients of a block: of its matrices, and of two norms in fp32."""
        return self.gradient_bytes * self.block_matrices + 4 * 2 * self.size.d_model

    @property
    def kept_inner(self) -> int:
        """Count the tensors of ``T f`` that a block saves: gate and up; and their product, unless computed again."""
        return 2 if self.reads_copies else 3

    @property
    def block(self) -> int:
        """Return the bytes that a block saves for its backward pass.

        The inputs of its two norms, fp32, with a number a row each (``8 T d + 8 T``); their outputs, which three and
        two projections share (``2 e T d``); rotated q and k, and v (``3 e T d``); attention's output as the projection
        after it reads it (``e T d``) and a number a query; gate and up; without copies of the weights, also the product
        of gate and up, and casts of the weights. Reference attention adds mask, exponentials and probabilities.
        """
        e = self.e
        attention = self.size.context**2 + (4 + e) * self.scores if self.scores else 0
        casts = 2 * self.block_matrices if e == 2 and not self.reads_copies else 0
        rows = 8 * self.size.tokens + 4 * self.size.queries
        return (8 + 6 * e) * self.size.stream + rows + attention + self.kept_inner * e * self.size.inner + casts

    @property
    def around_loss(self) -> int:
        """Return the bytes at the loss: its input and the last norm's, gradients of its input and the head, logits."""
        e = self.e
        chunk = min(e * self.size.tokens * self.size.vocab_size, LOGITS_CHUNK_BYTES)
        cast = 2 * self.head if e == 2 and not self.copies_head else 0
        # Of T d: the norm's input in fp32, the loss's and its gradient. Of T: two fp32 numbers in all.
        return (4 + 2 * e) * self.size.stream + 8 * self.size.tokens + self.head_gradient + chunk + cast


def fused_moments(step: FusedStep, checkpointing: str = "none") -> list[PeakMemory]:
    """Return the moments of a step with fused kernels that can be its peak, with or without checkpoints."""
    if not step.has_backward:
        moments = _fused_forward_moments(step)
    else:
        at_loss, at_blocks = saved_schedule(checkpointing, step.size.num_layers)
        moments = _fused_backward_moments(step, at_loss, at_blocks)
        gradients = step.gradients(step.size.num_layers) + 4 * step.head  # The embedding's is as large, in fp32.
        moments.append(("end of backward", gradients, 4 * step.size.stream))  # The embedded tokens' gradient.
        if step.updates_parameters:
            # Only the course's AdamW makes a temporary of each parameter.
            temporary_bytes = 4 * largest_parameter(step.size) if step.optimizer_record.is_plain else 0
            moments.append(("optimizer", gradients, temporary_bytes))
    state = step.optimizer_state if step.updates_parameters else 0
    always = always_held_bytes(step.size)
    return [
        PeakMemory(moment, step.parameters, gradients, state, activations + always)
        for moment, gradients, activations in moments
    ]


def _fused_forward_moments(step: FusedStep) -> list[tuple[str, int, int]]:
    """Return what a forward pass without gradients holds where it is widest.

    - Softmax of reference attention: the block's input, the norm's output, q, k, v (with copies as projected, too), the
      mask and the int64 positions that it compares, and 12 bytes a score as in ``accounting.memory``.
    - Feed-forward: the block's input and the sum, attention's and the norm's outputs, gate, up and product; with copies
      the result exists before gate and up are gone.
    - Loss: its input, a chunk of logits, and the cast of the weight.
    """
    e, has_copies = step.e, step.reads_copies
    feed_forward = (8 + (3 if has_copies else 2) * e) * step.size.stream + 3 * e * step.size.inner
    loss = step.around_loss - e * step.size.stream - step.head_gradient  # No gradients, of the input and the head.
    moments = [("feed-forward", 0, feed_forward), ("loss", 0, loss)]  # 0: no gradients.
    if step.scores:
        mask = step.size.context**2 + 8 * step.size.context
        softmax = (4 + (7 if has_copies else 4) * e) * step.size.stream + mask + 12 * step.scores
        moments.append(("softmax", 0, softmax + (0 if has_copies else 4 * step.size.queries)))  # 1 / sums.
    return moments


def _fused_backward_moments(
    step: FusedStep, at_loss: SavedBlocks, at_blocks: Sequence[SavedBlocks]
) -> list[tuple[str, int, int]]:
    """Return what a backward pass holds where it is widest, by moment: gradients of parameters, and activations.

    - Loss: all saved activations, and what the loss holds, gradients among it.
    - Gates of a block: besides what is saved, the gradient of the stream; with copies also its cast, the gradients of
      product, gate and up, and the product again; else w2's gradient in place of the product and of w2's cast.
    - w2 of a block, with copies: the product's gradient is gone, w2's own exists.
    - Projections of a block, with copies: gate and up are gone, their gradients, those of all three weights and of
      the norm's output exist.
    - Update of a block: its gradients; its activations are gone.
    - Softmax of a block, reference attention: as without fused kernels (``accounting.memory``).
    """
    e, d_model, d_ff = step.e, step.size.d_model, step.size.d_ff
    w2, projection = d_model * d_ff, d_model**2
    cast = 2 if e == 2 and not step.reads_copies else 0  # Bytes of an element of autocast's casts of the weights.

    def saved_bytes(blocks: SavedBlocks) -> int:
        return blocks.saved * step.block + blocks.inputs * 4 * step.size.stream

    moments = [("loss", 0, saved_bytes(at_loss) + step.around_loss)]  # 0: the head's gradient is in around_loss.
    for blocks in at_blocks:
        saved = saved_bytes(blocks) + 4 * step.size.stream
        done = step.gradients(step.size.num_layers - blocks.block)
        feed_forward = done + 3 * step.gradient_bytes * w2
        if step.reads_copies:
            gates = saved + e * step.size.stream + 4 * e * step.size.inner
            moments.append((f"gates backward, {blocks.name}", done, gates))
            gates_and_w2 = gates - e * step.size.inner
            moments.append((f"w2 backward, {blocks.name}", done + step.gradient_bytes * w2, gates_and_w2))
            moments.append((f"projections backward, {blocks.name}", feed_forward, saved + e * step.size.stream))
            if step.update == "backward":
                moments.append((f"update, {blocks.name}", done + step.block_gradients, saved - step.block))
        else:
            gates = saved + 2 * e * step.size.inner - cast * w2
            moments.append((f"gates backward, {blocks.name}", done + 4 * w2, gates))  # Without copies, fp32.
        if step.scores:
            # Gone: what the feed-forward layer and its norm saved, attention's output, casts of the weights behind it.
            freed = (4 + 2 * e) * step.size.stream + 4 * step.size.tokens + step.kept_inner * e * step.size.inner
            freed += cast * (3 * w2 + projection)
            softmax = saved - freed + (12 - e) * step.scores + 4 * step.size.queries  # Four in fp32 replace two.
            gradients = feed_forward + step.gradient_bytes * projection + 4 * d_model  # The norm's is in fp32.
            moments.append((f"softmax backward, {blocks.name}", gradients, softmax))
    return moments
