"""Launches the all-reduces of a backward pass, in the same order on all ranks, and waits for them."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import AnyRank
from cs336sys.parallel.gradient_buckets import GradientBucket
from cs336sys.parallel.gradient_memory import graph_refusal

# Of hooks, whether their bucket hands gradients on.
_HANDS_ON = "hands_on"


class SynchronizationSwitch:
    """What averages gradients over ranks, unless it is switched off for gradient accumulation.

    Attributes:
        synchronizes: if False, backward passes accumulate gradients on this rank only.
    """

    synchronizes = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, backward passes accumulate gradients on this rank only."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before


class GradientSynchronizer(SynchronizationSwitch):
    """Averages the gradients of buckets over all ranks.

    Collectives are matched by the order of calls alone: the n-th all-reduce of one rank is summed with the n-th of
    every other. Gradients may become ready in a different order on each rank. So bucket ``i`` is launched only after
    bucket ``i - 1``, even if it was ready first, as in torch's DDP (Li et al. 2020, section 3.2.3).

    If a parameter has no gradient on this rank, zeros take part in its place. Ranks tell each other which gradients
    they had, in one small all-reduce per step, so that a gradient that no rank had stays None.

    Args:
        buckets: in the order of launching.
        overlap: launch each bucket during the backward pass, as soon as its turn has come and its gradients are ready;
            otherwise all are launched in :meth:`finish`.

        group: the ranks; None is all of them.

    Attributes:
        buckets: those given, then those added.
    """

    def __init__(self, buckets: Sequence[GradientBucket], overlap: bool, group: dist.ProcessGroup | None = None):
        self._group = group
        self.buckets: list[GradientBucket] = []
        self._overlap = overlap
        self._launched = 0
        # Hooks run on autograd's threads, of which there is one per device.
        self._lock = threading.Lock()
        # Hooks belong to the parameters, which may outlive this object and be given to another one.
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        self.extend(buckets)

    def extend(self, buckets: Sequence[GradientBucket]) -> None:
        """Add buckets, which are launched after the others. Call it between two steps."""
        self.buckets.extend(buckets)
        self._handles.extend(
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), bucket, name))
            for bucket in buckets
            for name, parameter in bucket.parameters.items()
        )

    def gradient_ready(self, bucket: GradientBucket, name: str, parameter: nn.Parameter) -> None:
        """Called by autograd when ``parameter.grad`` is complete for this backward pass.

        Raises:
            UsageError: the gradient has been ready before in this step, so its all-reduce may have been launched; or
                it was computed with ``create_graph=True``.
        """
        # Autograd runs hooks with gradients enabled where it makes a graph of the backward pass.
        if torch.is_grad_enabled():
            raise graph_refusal(name)
        with self._lock:
            if id(parameter) not in bucket.waiting:
                raise UsageError(
                    f"{name} got a gradient from a second backward pass before finish_gradient_synchronization(): "
                    "run all passes of a step but the last under no_sync() (a module used twice under reentrant "
                    "checkpointing does this in one pass: choose use_reentrant=False)"
                )
            # Without synchronization autograd will add to the gradient in place: that must not change another's memory.
            # If a backward function returns None for a gradient, the hook is called nevertheless.
            if (bucket.collects_at_once or not self.synchronizes) and parameter.grad is not None:
                bucket.collect(name, parameter, parameter.grad)
            if not self.synchronizes:
                return
            bucket.waiting.remove(id(parameter))
            if bucket.waiting or not self._overlap:
                return
            while self._launched < len(self.buckets) and not self._next.waiting:
                self._launch_next()

    def finish(self, averaged: Callable[[GradientBucket], None] | None = None) -> None:
        """Launch the buckets that are left, wait for all of them, and begin a new step. Every rank must call it.

        Args:
            averaged: called with each bucket, in order, when its gradients may be used, and those of later buckets may
                still be under way: on a GPU, by work queued on the current stream.
        """
        if not self.buckets:
            return
        with self._lock:
            while self._launched < len(self.buckets):
                self._launch_next()
            present = [here for bucket in self.buckets for here in bucket.present]
            device = next(iter(self.buckets[0].parameters.values())).device
            present_anywhere = AnyRank(present, device, self._group)
            all_here, anywhere = all(present), iter(present)
            if not all_here:
                # Then this rank must know before it goes on; all others wait for the answer after the last bucket.
                for bucket in self.buckets:
                    bucket.wait()
                anywhere = iter(present_anywhere.wait())
            for bucket in self.buckets:
                if all_here:
                    bucket.wait()
                bucket.finish([next(anywhere) for _ in bucket.parameters])
                if averaged is not None:
                    averaged(bucket)
            present_anywhere.wait()
            self._launched = 0

    @property
    def _next(self) -> GradientBucket:
        return self.buckets[self._launched]

    def _launch_next(self) -> None:
        self._next.launch()
        self._launched += 1


def require_unwrapped(module: nn.Module) -> None:
    """Refuse a module that is wrapped, or has a part that is, by a class of ours or torch's that averages gradients.

    Raises:
        UsageError: naming the first such part.
    """
    # The module of units imports this one.
    from cs336sys.parallel.fsdp.calls import is_unit

    wrappers = {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel"}
    for name, part in module.named_modules():
        is_wrapper = hasattr(part, "finish_gradient_synchronization") or is_unit(part)
        if is_wrapper or any(base.__name__ in wrappers for base in type(part).__mro__):
            raise UsageError(
                f"{name or 'the module'} ({type(part).__name__}) is wrapped already: wrap the plain module"
            )


def require_unsynchronized(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters whose gradients another synchronizer averages: averaged twice, they would be wrong.

    Raises:
        UsageError: naming the first.
    """
    for name, parameter in named:
        if _is_synchronized(parameter):
            # What nothing refers to any more may still exist as part of a cycle.
            gc.collect()
        if _is_synchronized(parameter):
            raise UsageError(
                f"{name} has its gradient averaged already, by a data parallel wrapper or a sharded optimizer: "
                "unwrap the module or delete that optimizer"
            )


def hands_gradient_on(parameter: Tensor) -> bool:
    """Whether backward passes leave no gradient with this parameter, because a synchronizer hands it on in slices."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(getattr(hook, _HANDS_ON, False) for hook in hooks.values())


def _is_synchronized(parameter: nn.Parameter) -> bool:
    """Whether a synchronizer that still exists averages the gradient of this parameter."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return any(hook.__module__ == __name__ for hook in hooks.values())


def _hook(
    synchronizer: "weakref.ref[GradientSynchronizer]", bucket: GradientBucket, name: str
) -> Callable[[nn.Parameter], None]:
    def gradient_ready(parameter: nn.Parameter) -> None:
        alive = synchronizer()
        if alive is not None:
            alive.gradient_ready(bucket, name, parameter)

    setattr(gradient_ready, _HANDS_ON, bucket.hands_on)
    return gradient_ready


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
