"""Data parallel training: each rank trains the whole model on its share of the batch, with the mean gradient of all.

There are four wrappers, which differ in how many all-reduces they launch, and when:

===============  ====================================  ====================================
wrapper          all-reduces                           launched
===============  ====================================  ====================================
`NaiveDDP`       one for each parameter                after the backward pass
`FlatDDP`        one for all gradients, as one tensor  after the backward pass
`OverlappedDDP`  one for each parameter                during it, when the gradient is ready
`BucketedDDP`    one for each bucket of parameters     during it, when the bucket is ready
===============  ====================================  ====================================

Sources: CS336 assignment 2 (2025), sections 2.2 and 2.3; Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training" (2020).
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336sys.errors import UsageError
from cs336sys.parallel import rank_consistency
from cs336sys.parallel.buckets import BucketRule, FlatBucket, GradientBucket, bucket_rule, divide_into_buckets
from cs336sys.parallel.checkpoint_state import StateDictOfWrapped
from cs336sys.parallel.collectives import process_group, require_float, require_process_group
from cs336sys.parallel.copy_engines import CopiedMean, CopyEngines, places_in_box, require_copy_engines
from cs336sys.parallel.gradient_memory import gradient_dtype_of, require_own_gradient_dtype
from cs336sys.parallel.gradient_slices import require_whole
from cs336sys.parallel.gradient_synchronizer import GradientSynchronizer
from cs336sys.parallel.wrapped_modules import HeldParameters, require_module, require_unsynchronized, require_unwrapped

# The beginning of names of parameters in the wrapper, which the module's names lack.
_PREFIX = "module."


class _Replicated(StateDictOfWrapped):
    """A module that every rank holds whole: what the four wrappers have in common.

    Construction checks that the module is the same on all ranks and overwrites its parameters and buffers with rank
    0's. A training step is then::

        loss_function(wrapped(inputs), targets).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()

    If the loss is a mean and all ranks have equal shares of the batch, the result is that of one process.

    - Every rank must run the same number of steps. Ranks may use different parameters in a step, and in a different
      order: where only some ranks have a gradient, the others count as zero; where none has, ``grad`` stays None. (If
      this rank lacks a gradient, finding out whether another rank has it makes the CPU wait for the GPU.)
    - Collectives of your own may run between the backward pass and :meth:`finish_gradient_synchronization`, for example
      to average the loss. Where the backward pass of a rank may reach no trained parameter, call yours afterwards: that
      rank launches its all-reduces in :meth:`finish_gradient_synchronization`. If several wrapped modules are in one
      graph, that must not happen on some ranks alone, and training cannot go on after a failed backward pass.
    - Parameters may be frozen, and trained again. Whoever adds, removes, replaces, ties or unfreezes parameters calls
      :meth:`refresh` on every rank; until then forward passes, and what finishes a backward pass through the module
      itself, are refused.
    - Frozen parameters are broadcast at construction and not touched afterwards. Buffers are not synchronized again:
      those that a forward pass changes by its inputs are each rank's own (of batch norm: choose ``SyncBatchNorm``).
    - Run all backward passes of a step but the last under :meth:`no_sync`: a second pass without it is refused, because
      all-reduces that overlap change gradients in place while that pass would add to them.
    - Scale, clip and inspect gradients after :meth:`finish_gradient_synchronization`, and do not touch them before.
    - Gradients to differentiate again come from ``torch.autograd.grad``: a ``backward()`` with ``create_graph=True`` is
      refused, because averages over ranks are in no graph.
    - If a step fails and the caller wants to go on, every rank must call :meth:`finish_gradient_synchronization` first:
      some all-reduces may have been launched.
    - ``state_dict()`` is that of the wrapped module, and ``load_state_dict()`` accepts it with or without ``module.``
      before every name. A deep copy is a wrapper in its own right, in the same group.
    - Under ``torch.compile``, gradients are ready when the compiled backward that computes them returns: compile the
      blocks of the model, not the whole, so that communication overlaps.

    Attributes:
        module: the wrapped module.
        overlaps: whether all-reduces are launched during the backward pass.
    """

    overlaps: bool
    _bucket_type: type[GradientBucket] = GradientBucket
    _rule = BucketRule(cap_bytes=0.0)  # Each parameter in a bucket of its own.

    def __init__(
        self,
        module: nn.Module,
        *,
        gradient_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
    ):
        """Wrap ``module`` on every rank of a group.

        Args:
            module: anything with parameters, on the device that it will be trained on.
            gradient_dtype: dtype in which real gradients are sent and summed, for example ``torch.bfloat16`` to halve
                the traffic of fp32 gradients; ``grad`` keeps its own. None sends gradients in the dtype they have.
                Parameters whose ``grad_dtype`` it is get and keep their gradients in it, and nothing is converted.
            group: the ranks that share the batch: a process group, or one dimension of a mesh; None takes all ranks.

        Raises:
            UsageError: there is no process group; it is no module; ``gradient_dtype`` is no floating-point dtype; or on
                every rank: the module is wrapped already or has a wrapped part, a parameter is a slice that the ranks
                do not have in common, or has a ``grad_dtype`` that is neither its own dtype nor ``gradient_dtype``, an
                embedding has ``max_norm``, or modules or settings differ between ranks (naming the first difference).
        """
        super().__init__()
        require_process_group(type(self).__name__)
        require_module(module)
        require_float("gradient_dtype", gradient_dtype)
        self.module = module
        self._gradient_dtype = gradient_dtype
        self._group = None if group is None else process_group(group)  # A group could not be pickled; None can.
        self._take_up(dict(module.named_parameters()), dict(module.named_buffers()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module.

        Without gradients, other tensors may replace parameters, as ``torch.func.functional_call`` puts them there.

        Raises:
            UsageError: the module has other parameters than those that were wrapped, or one was unfrozen: call
                :meth:`refresh`.
        """
        if not torch.compiler.is_compiling():  # The compiler is to trace the module alone.
            self._held.require_unchanged(allows_exchanged=not torch.is_grad_enabled())
        return self.module(*args, **kwargs)

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        """Return the gradients that are averaged together, in the order of launching."""
        return self._synchronizer.buckets

    def finish_gradient_synchronization(self) -> None:
        """Make every gradient the mean over ranks. Every rank must call it between backward pass and optimizer step.

        On a GPU the wait is only queued; the CPU does not block, unless this rank lacks gradients (see above).

        Raises:
            UsageError: the module has other parameters than those that were wrapped, or one was unfrozen: call
                :meth:`refresh`, and then this again.
        """
        try:
            self._held.require_unchanged()
        finally:
            # Also after a refusal: ranks that do not see the change would wait for this one.
            self._synchronizer.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context, backward passes accumulate gradients on this rank only.

        This is for gradient accumulation: run all passes of a step but the last in it. The last averages all of them.
        """
        return self._synchronizer.no_sync()

    def refresh(self) -> None:
        """Take up the parameters and buffers that the module has now. Every rank must call it, between two steps.

        New ones get rank 0's values, and the others keep theirs. Optimizers are told by their ``add_param_group``.

        Raises:
            UsageError: on every rank, if they were not changed alike, or cannot be wrapped.
        """
        named_parameters = self.module.named_parameters()  # New ones by id, buffers by name: see _watch_gradients().
        parameters = {name: tensor for name, tensor in named_parameters if id(tensor) not in self._taken_up}
        buffers = {name: tensor for name, tensor in self.module.named_buffers() if name not in self._buffer_names}
        self._synchronizer.drop()  # Finish what it has launched; its hooks are removed when _take_up() replaces it.
        rank_consistency.require_same_lines([f"new: {', '.join((*parameters, *buffers)) or 'nothing'}"], self._group)
        self._take_up(parameters, buffers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self._group)] = self._group  # A process group cannot be copied: the copy communicates in the same one.
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._copied_state(), memo))
        return copied

    def __copy__(self) -> NoReturn:
        raise UsageError(
            f"a shallow copy of {type(self).__name__} would average the same gradients once more: use copy.deepcopy()"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise UsageError(
                f"{type(self).__name__} with a group cannot be pickled: save its state_dict(), and wrap a module anew"
            )
        return self._copied_state()

    def _copied_state(self) -> dict[str, Any]:
        # These refer to the parameters of this object and their hooks: __setstate__ makes new ones for the copy's.
        return {name: value for name, value in self.__dict__.items() if name not in ("_synchronizer", "_held")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch_gradients()

    def _take_up(self, new_parameters: dict[str, nn.Parameter], new_buffers: dict[str, Tensor]) -> None:
        """Give new tensors rank 0's values, and average the gradients of all parameters that the module has now."""
        with rank_consistency.same_on_every_rank(self._group) as lines:
            require_unwrapped(self.module)
            require_unsynchronized(new_parameters.items())
            require_whole(new_parameters.items(), self._group)
            require_own_gradient_dtype(self.module.named_parameters(), self._gradient_dtype)
            if dist.get_world_size(self._group) > 1:  # One rank alone cannot drift apart from others.
                _require_no_max_norm(self.module)
            for name, _ in self.named_parameters():
                if not name.startswith(_PREFIX):  # Nobody would average its gradients.
                    raise UsageError(f"{name} was added to the wrapper: add it to the module in it")
            lines += [self._settings(), *rank_consistency.describe_module(self.module)]
            for name, parameter in self.module.named_parameters():
                if (dtype := gradient_dtype_of(parameter)) != parameter.dtype:
                    lines.append(f"{name}: gradients in {dtype}")
        rank_consistency.broadcast_from_first([*new_parameters.values(), *new_buffers.values()], group=self._group)
        self._watch_gradients()

    def _settings(self) -> str:
        return f"{type(self).__name__} with {self._rule}, gradient_dtype={self._gradient_dtype}"

    def _watch_gradients(self) -> None:
        """Note what the module holds, and average the gradients of its trained parameters from now on."""
        parameters = list(self.module.named_parameters(remove_duplicate=False))
        self._held = HeldParameters(self, _PREFIX)
        # For refresh(): parameters by id, kept alive for that; buffers by name, as a pass may replace their tensors.
        self._taken_up = {id(parameter): parameter for _, parameter in parameters}
        self._buffer_names = {name for name, _ in self.module.named_buffers()}
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        buckets = [
            self._bucket_type(parameters_by_name, self._gradient_dtype, self._group)
            for parameters_by_name in divide_into_buckets(trained, self._rule)
        ]
        self._synchronizer = GradientSynchronizer(buckets, self.overlaps, self._group)


def _require_no_max_norm(module: nn.Module) -> None:
    """Refuse embeddings that shorten rows of their weight in the forward pass: each rank would shorten other rows."""
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise UsageError(
                f"{name or 'the module'} ({type(part).__name__}) has max_norm={part.max_norm}, by which each rank "
                "would shorten other rows in its forward pass: choose max_norm=None, and shorten rows after each step"
            )


class NaiveDDP(_Replicated):
    """All-reduces each gradient by itself after the backward pass. For arguments and errors see the base class."""

    overlaps = False


class FlatDDP(_Replicated):
    """All-reduces all gradients as one tensor (one for each dtype and device) after the backward pass."""

    overlaps = False
    _bucket_type = FlatBucket
    _rule = BucketRule(cap_bytes=None)


class OverlappedDDP(_Replicated):
    """All-reduces each gradient by itself while the backward pass computes the next ones."""

    overlaps = True


class BucketedDDP(_Replicated):
    """All-reduces gradients in buckets while the backward pass computes those of the next bucket.

    Attributes:
        copy_engines: the memory and streams by which copy engines send buckets; None if NCCL or Gloo sends them.
    """

    overlaps = True

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | str | None,
        *,
        gradient_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        copy_engines: bool = False,
    ):
        """Wrap ``module``; for the other arguments and errors see the base class.

        Args:
            bucket_size_mb: most megabytes (1e6 bytes) of gradients in a bucket, unless it holds a single larger one;
                None puts all gradients (of one dtype and device) into one bucket; ``"block"`` makes buckets of whole
                blocks (numbered parts, or else children of the module), each of at least 25 MB. Compiled blocks have
                all their gradients at once, and fewer launches take less of the CPU's time.
            copy_engines: let copy engines send buckets between two GPUs of a host, instead of NCCL's kernels: see
                :mod:`cs336sys.parallel.copy_engines`.

        Raises:
            UsageError: the bucket size is not positive, or another word.
            CapabilityError: with ``copy_engines``: the ranks are not two, communicate by another backend than NCCL, or
                have no memory that both GPUs can write.
        """
        self._rule = bucket_rule(bucket_size_mb)  # Before the base class's constructor, which makes the buckets.
        self._by_copy_engines = copy_engines
        self.copy_engines: CopyEngines | None = None
        super().__init__(module, gradient_dtype=gradient_dtype, group=group)

    def _settings(self) -> str:
        return super()._settings() + (", by copy engines" if self._by_copy_engines else "")

    def _watch_gradients(self) -> None:
        super()._watch_gradients()
        if not self._by_copy_engines or not self.buckets:
            return
        device = next(iter(self.buckets[0].parameters.values())).device
        require_copy_engines(self._group, device, [bucket.sent_dtype for bucket in self.buckets])
        box_bytes = max(size for _, size in (places_in_box(bucket.sent_sizes) for bucket in self.buckets))
        self.copy_engines = CopyEngines(self._group, box_bytes, device)
        for number, bucket in enumerate(self.buckets):
            mean_arguments = bucket.sent_dtype, device, bucket.reduction.contents, self._group  # MeanReduction's.
            bucket.reduction = CopiedMean(self.copy_engines, number, *mean_arguments)

    def _copied_state(self) -> dict[str, Any]:
        return super()._copied_state() | {"copy_engines": None}  # _watch_gradients() makes the copy's.
