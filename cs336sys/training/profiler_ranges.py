"""Ranges by which a profiler shows the phases of a training step, the model's blocks and the parts of its attention.

They are put on from outside: :func:`phase` goes around a piece of a step, :func:`annotated_model` replaces ``__call__``
of the blocks' classes, ``scaled_dot_product_attention`` of ``cs336_basics.model`` and of ``torch.nn.functional``, and
``cs336_basics.model.softmax``, and puts everything back when its ``with`` ends. The model's own code stays as it is.

A phase is open for every thread, because the backward pass launches its kernels from autograd's thread, and ends when
all of it is launched. Block and attention ranges lie on the thread that launches their kernels.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import cs336_basics.model
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves

from cs336sys.capture.range_names import ATTENTION_RANGE, FINAL_MATMUL, SCORES, SOFTMAX
from cs336sys.machine.device import synchronize


class NvtxMarks:
    """NVTX ranges, for Nsight Systems: start/end ranges for all threads, push/pop ranges for one."""

    def start(self, name: str) -> Callable[[], None]:
        """Open a range for all threads, and return what ends it, from any thread."""
        return functools.partial(torch.cuda.nvtx.range_end, torch.cuda.nvtx.range_start(name))

    def range(self, name: str) -> AbstractContextManager:
        """Return a range of the calling thread, nested in those that it has open; it decorates functions, too."""
        return torch.cuda.nvtx.range(name)


class RecordFunctionMarks:
    """Ranges of torch.profiler, which has only those of one thread: attribute by time what other threads launch."""

    def start(self, name: str) -> Callable[[], None]:
        open_range = contextlib.ExitStack()
        open_range.enter_context(record_function(name))
        return open_range.close

    def range(self, name: str) -> AbstractContextManager:
        return record_function(name)


Marks = NvtxMarks | RecordFunctionMarks  # The ways in which ranges reach a profiler.


@contextlib.contextmanager
def phase(name: str, marks: Marks, wait_for: torch.device | None = None) -> Iterator[None]:
    """Open a range for all threads; :mod:`cs336sys.capture.range_names` names the phases of a step.

    Args:
        wait_for: a device; the range of a whole step ends when it has done everything. The phases within a step do not
            wait: kernels are attributed by their launch, and waiting in each phase took up to 5 % of a step.
    """
    end = marks.start(name)
    try:
        yield
        if wait_for is not None:
            synchronize(wait_for)
    finally:
        end()


@contextlib.contextmanager
def annotated_model(blocks: Sequence[nn.Module], marks: Marks, *, attention: bool = True) -> Iterator[None]:
    """Let calls of the model within this ``with`` show its blocks and the parts of its attention.

    Ranges: ``block 3`` around the fourth block, ``block 3 backward`` from the gradient of its output to
    that of its input, and on the forward pass those of :mod:`cs336sys.capture.range_names`: ``ATTENTION_RANGE`` and,
    where the attention in use calls ``cs336_basics.model.softmax``, ``ATTENTION_PARTS`` in it.

    Args:
        blocks: the model's, in order; none of a model compiled as a whole, which the ranges would cut into pieces.
            Blocks that are each compiled are fine, because their ranges lie outside the compiled code.
        attention: that of ``cs336_basics`` and torch's; not for compiled blocks or models, for the same reason.
    """
    with _annotated_blocks(blocks, marks), _annotated_attention(marks) if attention else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _annotated_blocks(blocks: Sequence[nn.Module], marks: Marks) -> Iterator[None]:
    """Replace ``__call__`` of the blocks' classes: module hooks would become part of a block that is compiled."""
    names = {block: f"block {number}" for number, block in enumerate(blocks)}
    # Holds what ends the range of a backward pass: it ends where the next one starts.
    open_backward = contextlib.ExitStack()

    def start_backward(name: str) -> None:
        open_backward.close()
        open_backward.callback(marks.start(name))

    def call(block: nn.Module, call_block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if block not in names:  # Another module of the same class.
            return call_block(block, *args, **kwargs)
        with marks.range(names[block]):
            output = call_block(block, *args, **kwargs)
        if block is blocks[0]:
            _on_gradient((args, kwargs), open_backward.close)  # Its range is the last of the backward pass.
        _on_gradient(output, functools.partial(start_backward, f"{names[block]} backward"))
        return output

    with contextlib.ExitStack() as replacements:
        for block_class in dict.fromkeys(type(block) for block in blocks):
            method = functools.partialmethod(call, block_class.__call__)
            replacements.enter_context(mock.patch.object(block_class, "__call__", method))
        yield


def _on_gradient(value: Any, action: Callable[[], None]) -> None:
    """Run ``action`` on autograd's thread once the gradient of a value's first tensor that has one is complete."""
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: action())
            return


@contextlib.contextmanager
def _annotated_attention(marks: Marks) -> Iterator[None]:
    """Replace attention of ``cs336_basics`` and torch, and the softmax that the first calls."""
    module = cs336_basics.model
    ranges = _AttentionRanges(marks, getattr(module, "softmax", None))
    shows_parts = hasattr(module, "softmax") and _calls_softmax(module.scaled_dot_product_attention)
    with contextlib.ExitStack() as replacements:
        if shows_parts:
            replacements.enter_context(mock.patch.object(module, "softmax", ranges.softmax))
        for owner, shows_its_parts in ((module, shows_parts), (F, False)):
            attend = functools.partial(ranges.attend, owner.scaled_dot_product_attention, shows_its_parts)
            replacements.enter_context(mock.patch.object(owner, "scaled_dot_product_attention", attend))
        yield


class _AttentionRanges:
    """Stands in for the model's attention and for the softmax that it calls: what lies before, in and after it.

    Nothing of the attention is written down a second time, so what is profiled is what ``bench`` times.
    """

    def __init__(self, marks: Marks, softmax: Callable[..., Tensor] | None):
        self._marks, self._softmax = marks, softmax
        self._is_open = False  # Whether the range of an attention is open, which may call another one.
        # The range of the part of attention that runs now, where parts are shown.
        self._part: contextlib.ExitStack | None = None

    def attend(self, attention: Callable[..., Tensor], shows_parts: bool, *args: Any, **kwargs: Any) -> Tensor:
        """Call the attention within its range, and what comes before its softmax within that of the scores."""
        if self._is_open:  # The range of the attention that calls this one shows both.
            return attention(*args, **kwargs)
        with self._marks.range(ATTENTION_RANGE), contextlib.ExitStack() as part:
            self._is_open = True
            if shows_parts:
                part.enter_context(self._marks.range(SCORES))
                self._part = part
            try:
                return attention(*args, **kwargs)
            finally:
                self._is_open, self._part = False, None

    def softmax(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call softmax within its range, which ends that of the scores and starts that of the last product."""
        assert self._softmax is not None
        if self._part is None:  # Something else than attention calls it.
            return self._softmax(*args, **kwargs)
        self._part.close()
        with self._marks.range(SOFTMAX):
            weights = self._softmax(*args, **kwargs)
        self._part.enter_context(self._marks.range(FINAL_MATMUL))
        return weights


def _calls_softmax(attention: Callable[..., Tensor]) -> bool:
    """Return whether attention looks ``softmax`` up in ``cs336_basics.model``: tried on 16 tokens, on the CPU."""
    module = cs336_basics.model
    x = torch.zeros(1, 1, 16, 16)
    with mock.patch.object(module, "softmax", wraps=module.softmax) as watched, torch.no_grad():
        attention(Q=x, K=x, V=x, mask=None)
    return watched.called
