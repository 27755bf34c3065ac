"""Checkpoints inside of blocks: torch's selective checkpointing by what each product costs to compute again.

``keep=N`` of blocks whose backward pass is torch's own, compiled or not. Blocks of fused kernels that nothing compiles
have a backward pass of their own instead, :mod:`cs336sys.kernels.transformer_block`, which keeps the same.
"""

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cs336sys.sizes import ModelSize

# Attention's operators: their outputs and logsumexps are kept.
_ATTENTION = ("scaled_dot_product", "flash_attention_forward")

# torch's compiler asks, on every rank, for regions without operations in place. These have none.
_CHECKPOINT_LOG, _WARNING = logging.getLogger("torch._higher_order_ops.wrap"), "context_fn is passed"


def keep_by_parts(model: nn.Module, size: ModelSize, blocks_with_gate_and_up: int) -> None:
    """Let blocks keep their inputs, the products of d_model columns, and attention; the last so many gate and up, too.

    Everything else is computed again in the backward pass. Products are told apart by their shapes.

    Args:
        model: with ``layers``, which may be compiled each by itself: the compiler sees what is kept.
        size: with another ``d_ff`` than ``d_model``.
    """
    blocks: list[Any] = list(model.get_submodule("layers").children())
    # What both kinds of blocks compute is the same function each, so that they share compiled code.
    forwards = {keeps: _checkpointed(blocks[0].forward.__func__, size.d_ff, keeps) for keeps in (False, True)}
    for index, block in enumerate(blocks):
        block.forward = types.MethodType(forwards[index >= len(blocks) - blocks_with_gate_and_up], block)


def _checkpointed(run: Callable[..., Tensor], d_ff: int, keeps_gate_and_up: bool) -> Callable[..., Tensor]:
    _CHECKPOINT_LOG.addFilter(_is_news)
    policy = functools.partial(_policy, d_ff, keeps_gate_and_up)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def forward(block: nn.Module, x: Tensor) -> Tensor:
        # The model draws no random numbers whose state would have to be kept.
        return checkpoint(
            lambda given: run(block, given), x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    return forward


def _is_news(record: logging.LogRecord) -> bool:
    return _WARNING not in record.getMessage()


def _policy(d_ff: int, keeps_gate_and_up: bool, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    is_kept = any(name in str(operator) for name in _ATTENTION)
    if operator is torch.ops.aten.mm.default:
        inner, columns = args[0].shape[1], args[1].shape[1]
        # The last product of a block is the input of the next one.
        is_kept = inner != d_ff and (keeps_gate_and_up or columns != d_ff)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
