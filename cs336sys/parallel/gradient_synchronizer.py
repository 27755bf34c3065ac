"""Launches the all-reduces of a backward pass, in the same order on all ranks, and waits for them."""

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel.buckets import GradientBucket
from cs336sys.parallel.collectives import AnyRank
from cs336sys.parallel.gradient_memory import graph_refusal, require_eager_backward
from cs336sys.parallel.wrapped_modules import AVERAGES_GRADIENT, HANDS_GRADIENT_ON, SynchronizationSwitch

# What autograd calls to run the backward function of a torch.autograd.Function; torch 2.13 has the second.
_BACKWARD_FUNCTIONS = frozenset(
    getattr(torch.autograd.function.BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")
    if hasattr(torch.autograd.function.BackwardCFunction, name)
)

# Synchronizers that have begun to launch and have buckets left, in the order of their first gradients.
_launching: "list[weakref.ref[GradientSynchronizer]]" = []

_lock = threading.RLock()  # Hooks run on autograd's threads, of which there is one per device.


class GradientSynchronizer(SynchronizationSwitch):
    """Averages the gradients of buckets over all ranks.

    Collectives are matched by the order of calls alone: the n-th all-reduce of one rank is summed with the n-th of
    every other. Gradients may become ready in a different order on each rank, so bucket ``i`` is launched only after
    bucket ``i - 1``, as in torch's DDP (Li et al. 2020, section 3.2.3).

    A bucket that lacks a gradient on this rank alone holds up those after it. What is left is launched when the
    backward pass ends, before the program goes on: its own collectives then come after the same all-reduces on every
    rank. Of several synchronizers whose gradients one backward pass computes, each launches when those have launched
    everything whose first gradients were ready before its own. Two cases remain in which ranks differ and nobody can
    tell: a rank whose backward pass fails, or reaches no parameter of a synchronizer, launches in :meth:`finish`, and
    parts that do not depend on each other may have their first gradients in another order.

    If a parameter has no gradient on this rank, zeros take part in its place. Ranks tell each other which gradients
    they had, in one small all-reduce per step, so that a gradient that no rank had stays None.

    Args:
        buckets: in the order of launching.
        overlap: launch each bucket in the backward pass, once it is ready and its turn has come; else in finish().
        group: the ranks; None is all of them.
    """

    def __init__(self, buckets: Sequence[GradientBucket], overlap: bool, group: dist.ProcessGroup | None = None):
        self._group = group
        self.buckets: list[GradientBucket] = []
        self._overlap = overlap
        self._launched = 0  # How many buckets have been launched in this step: the first so many of the list.
        self._ends_with_pass = False  # Whether the end of this step's backward pass will launch what is left.
        # Hooks belong to the parameters, which may outlive this object and be given to another one.
        self._hooks = contextlib.ExitStack()
        weakref.finalize(self, self._hooks.close).atexit = False  # Not at exit, when the parameters end as well.
        self.extend(buckets)

    def extend(self, buckets: Sequence[GradientBucket]) -> None:
        """Add buckets, which are launched after the others. Call it between two steps."""
        self.buckets.extend(buckets)
        for bucket in buckets:
            hook = _hook_of(weakref.ref(self), bucket)
            for parameter in bucket.parameters.values():
                self._hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))

    def gradient_ready(self, bucket: GradientBucket, name: str, parameter: nn.Parameter) -> None:
        """Launch what is ready now that ``parameter.grad`` is complete for this backward pass, as autograd tells."""
        # Autograd runs hooks with gradients enabled where it makes a graph of the backward pass. A refusal names no
        # parameter: the first may be another on a rank that leaves out a layer.
        if torch.is_grad_enabled():
            raise graph_refusal("a parameter")
        with _lock:  # Autograd runs hooks on a thread for each device.
            # The end of a pass launches all buckets, those that lack a gradient, too: later ones are of a second pass.
            if id(parameter) not in bucket.waiting or self._launched == len(self.buckets):
                raise UsageError(
                    "a parameter got a gradient from a second backward pass before finish_gradient_synchronization(): "
                    "run all passes of a step but the last under no_sync() (a module used twice under reentrant "
                    "checkpointing does this in one pass: choose use_reentrant=False)"
                )
            # Under no_sync(), later passes will add to the gradient in place: collect() copies it if its memory has
            # other users. (The hook is also called where a backward function returns None: then there is none.)
            if (bucket.collects_at_once or not self.synchronizes) and parameter.grad is not None:
                bucket.collect(name, parameter, parameter.grad)
            if not self.synchronizes:
                return
            bucket.waiting.remove(id(parameter))
            if not self._overlap:
                return
            if not self._ends_with_pass:
                self._begin_launching()
            if not bucket.waiting:
                _launch_ready_in_order()

    def finish(self) -> None:
        """Launch the buckets that are left, wait for all of them, and begin a new step. Every rank must call it."""
        if not self.buckets:
            return
        with _lock:
            self._launch_remaining()
            present = [is_present for bucket in self.buckets for is_present in bucket.present]
            device = next(iter(self.buckets[0].parameters.values())).device
            any_rank = AnyRank(present, device, self._group)
            if not all(present):
                # This rank must know the answer now. The buckets first: their errors say what waits for a missing rank.
                for bucket in self.buckets:
                    bucket.wait()
                present = any_rank.wait()
            present_anywhere = iter(present)
            for bucket in self.buckets:
                bucket.wait()
                bucket.finish([next(present_anywhere) for _ in bucket.parameters])
            # Where all are present here, the answer matters to other ranks only, and does not hold up the buckets.
            any_rank.wait()
            self._launched = 0
            self._ends_with_pass = False

    def drop(self) -> None:
        """Wait for what was launched, before this object is given up in the middle of a step."""
        with _lock:
            for bucket in self.buckets[: self._launched]:
                bucket.wait()
            # Otherwise other synchronizers would wait until this one has launched.
            _launching[:] = [reference for reference in _launching if reference() is not self]

    def _begin_launching(self) -> None:
        """Take a place among those that launch, and have the rest launched when this backward pass ends."""
        require_eager_backward()
        if not self._is_launching:
            _launching.append(weakref.ref(self))
        if not _is_in_nested_pass():  # Else the first hook outside of the nested pass comes here again.
            self._ends_with_pass = True
            torch.autograd.Variable._execution_engine.queue_callback(self._launch_remaining)

    @property
    def _is_launching(self) -> bool:
        return any(reference() is self for reference in _launching)

    def _launch_remaining(self) -> None:
        """Launch all that is left, after what is left of synchronizers that have begun before."""
        with _lock:
            while self._is_launching:
                earlier = _launching.pop(0)()
                if earlier is not None:
                    earlier._launch(len(earlier.buckets))
            # Without overlap, and if no pass reached any of its parameters, this synchronizer is not in the list.
            self._launch(len(self.buckets))

    def _launch(self, end: int) -> None:
        while self._launched < end:
            self.buckets[self._launched].launch()
            self._launched += 1


def _launch_ready_in_order() -> None:
    """Launch buckets whose turn has come and whose gradients are ready, in the order in which synchronizers began."""
    while _launching:
        first = _launching[0]()
        if first is not None:
            while first._launched < len(first.buckets):
                if first.buckets[first._launched].waiting:
                    return
                first._launch(first._launched + 1)
        del _launching[0]


def _is_in_nested_pass() -> bool:
    """Return whether this backward pass runs within a function of another one, as with reentrant checkpointing.

    Its end is not the end of the other, and autograd itself does not tell.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _BACKWARD_FUNCTIONS:  # Autograd calls one to run the backward function of a Function.
            return True
        frame = frame.f_back
    return False


def _hook_of(reference: "weakref.ref[GradientSynchronizer]", bucket: GradientBucket) -> Callable[[nn.Parameter], None]:
    """Make the hook for the parameters of a bucket, which outlive the synchronizer and must not keep it alive."""
    names = {id(parameter): name for name, parameter in bucket.parameters.items()}

    def gradient_ready(parameter: nn.Parameter) -> None:
        synchronizer = reference()
        if synchronizer is not None:
            synchronizer.gradient_ready(bucket, names[id(parameter)], parameter)

    setattr(gradient_ready, AVERAGES_GRADIENT, True)  # Others tell by these marks what becomes of the gradient.
    setattr(gradient_ready, HANDS_GRADIENT_ON, bucket.hands_on)
    return gradient_ready
