"""Data parallel training: every rank trains the whole model on its share of the batch, with the ranks' mean gradient.

Four wrappers, which differ in how many all-reduces they launch and when:

===============  ====================================  ====================================
wrapper          all-reduces                           launched
===============  ====================================  ====================================
`NaiveDDP`       one for each parameter                after the backward pass
`FlatDDP`        one of all gradients, as one tensor   after the backward pass
`OverlappedDDP`  one for each parameter                during it, when the gradient is ready
`BucketedDDP`    one for each bucket of parameters     during it, when the bucket is ready
===============  ====================================  ====================================

Sources: CS336 assignment 2 (2025), sections 2.2 and 2.3; Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training" (2020).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel.buckets import cap_in_bytes
from cs336sys.parallel.collectives import broadcast_from_first, require_process_group
from cs336sys.parallel.gradient_buckets import FlatBucket, GradientBucket, divide_into_buckets
from cs336sys.parallel.gradient_synchronizer import GradientSynchronizer
from cs336sys.parallel.same_on_ranks import require_same_module


class _Replicated(nn.Module):
    """A module that all ranks hold; what the four wrappers have in common.

    Construction compares the layout of the module between ranks and overwrites all parameters and buffers by rank 0's.
    A training step is then::

        loss_function(wrapped(inputs), targets).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()

    The result is the step of one process on the whole batch if the loss is a mean and every rank has an equal share.

    - Every rank must run the same number of steps. Which parameters a step used, and in which order, may differ: a
      parameter without a gradient on some ranks counts as zero there, one without on all ranks keeps ``grad`` None.
      (Learning that no other rank had a gradient that this one lacks makes the CPU wait for the GPU.)
    - Frozen parameters are broadcast at construction and left alone after. Buffers are not synchronized again.
    - Leave gradients alone between the backward pass and :meth:`finish_gradient_synchronization`: scale, clip and
      inspect them after.
    - After an error in a step that the caller survives, every rank must call :meth:`finish_gradient_synchronization`
      to go on: some of its gradients may be under way.
    - ``state_dict()`` is the wrapped module's, and ``load_state_dict()`` takes it with or without ``module.`` before
      every name. A deep copy is a wrapper of its own; it communicates as soon as it trains.
    - Under ``torch.compile``, gradients are ready when the compiled backward that computes them returns: compile the
      model's blocks, not the whole, and communication overlaps.

    Attributes:
        module: the wrapped module.
    """

    _overlap: bool
    _bucket_type: type[GradientBucket] = GradientBucket
    # Of a bucket; below every gradient, so that each has a bucket of its own.
    _cap_bytes: float | None = 0.0

    def __init__(self, module: nn.Module, *, gradient_dtype: torch.dtype | None = None):
        """Wrap ``module`` on every rank.

        Args:
            module: anything with parameters; on the device that it will train on.
            gradient_dtype: what real gradients of other dtypes are sent and summed in, for example ``torch.bfloat16``
                to halve the traffic of fp32 gradients; they keep their own dtype. None sends them as they are.

        Raises:
            UsageError: there is no process group, ``gradient_dtype`` is not a floating-point dtype, or the ranks'
                modules or settings differ: then on every rank, naming the first difference.
        """
        super().__init__()
        require_process_group(type(self).__name__)
        if gradient_dtype is not None and not gradient_dtype.is_floating_point:
            raise UsageError(f"gradient_dtype {gradient_dtype}: choose a floating-point dtype")
        self.module = module
        self._gradient_dtype = gradient_dtype
        require_same_module(module, self._settings())
        broadcast_from_first([*module.parameters(), *module.buffers()])
        self._watch_gradients()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's.

        Raises:
            UsageError: a parameter that was frozen is not any more; :meth:`refresh` was not called.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UsageError(f"{name} was unfrozen after it was wrapped: call refresh() on every rank")
        return self.module(*args, **kwargs)

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        """What an all-reduce averages together, in the order of launching."""
        return self._synchronizer.buckets

    def finish_gradient_synchronization(self) -> None:
        """Make every gradient the mean over ranks: call it on every rank between backward pass and optimizer step.

        On a GPU this queues the wait; the CPU does not block, unless this rank lacks gradients (see above).
        """
        self._synchronizer.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this context add to this rank's gradients only.

        For gradient accumulation: all passes of a step but the last. What they added is averaged with the last.
        """
        return self._synchronizer.no_sync()

    def refresh(self) -> None:
        """Call on every rank after ``requires_grad`` of parameters was changed, between two steps.

        Raises:
            UsageError: on every rank, if it was not changed alike.
        """
        require_same_module(self.module, self._settings())
        self._watch_gradients()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's state dict, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # nn.Module looks for the children's entries under their names, here "module".
        own = [key for key in state_dict if key.startswith(prefix)]
        wrapped = hasattr(self.module, "module") or not all(key.startswith(f"{prefix}module.") for key in own)
        if wrapped:
            for key in own:
                state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        # Hooks are not copied with a parameter.
        return {name: value for name, value in self.__dict__.items() if name != "_synchronizer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch_gradients()

    def _settings(self) -> str:
        return f"{type(self).__name__} with cap_bytes={self._cap_bytes}, gradient_dtype={self._gradient_dtype}"

    def _watch_gradients(self) -> None:
        named = list(self.module.named_parameters(remove_duplicate=False))
        self._frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        buckets = [
            self._bucket_type(parameters, self._gradient_dtype)
            for parameters in divide_into_buckets(trained, self._cap_bytes)
        ]
        self._synchronizer = GradientSynchronizer(buckets, self._overlap)


class NaiveDDP(_Replicated):
    """All-reduces each gradient by itself after the backward pass. Arguments and errors as in the base class."""

    _overlap = False


class FlatDDP(_Replicated):
    """All-reduces all gradients as one tensor (one for each dtype and device) after the backward pass."""

    _overlap = False
    _bucket_type = FlatBucket
    _cap_bytes = None


class OverlappedDDP(_Replicated):
    """All-reduces each gradient by itself while the backward pass computes the next ones."""

    _overlap = True


class BucketedDDP(_Replicated):
    """All-reduces gradients in buckets while the backward pass computes those of the next bucket."""

    _overlap = True

    def __init__(self, module: nn.Module, bucket_size_mb: float | None, *, gradient_dtype: torch.dtype | None = None):
        """Wrap ``module``; arguments and errors beyond these as in the base class.

        Args:
            bucket_size_mb: a bucket holds at most so many megabytes (1e6 bytes) of gradients, or a single larger one;
                None puts all gradients (of one dtype and device) into one bucket.

        Raises:
            UsageError: the bucket size is not positive.
        """
        self._cap_bytes = cap_in_bytes(bucket_size_mb)
        super().__init__(module, gradient_dtype=gradient_dtype)
