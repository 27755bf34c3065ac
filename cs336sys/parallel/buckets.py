"""The gradients that one all-reduce averages: where they are in memory, and how they are sent and received."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import ALIGNMENT, WHOLE_BLOCKS, check_bucket_size
from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import MeanReduction, is_dense, memory_view
from cs336sys.parallel.gradient_memory import gradient_dtype_of, own_memory_together, owns_memory, require_averageable


class TensorSpec(NamedTuple):
    """Properties that decide which bucket a parameter goes into.

    Attributes:
        identity: equal for tied weights, which are one tensor under several names.
        size_bytes: the size of its gradient.
        kind: dtype and device; tensors of different kinds cannot share a bucket.
        block: the part of the model that it belongs to, see :func:`block_of`.
    """

    identity: Hashable
    size_bytes: int
    kind: Hashable = None
    block: str = ""


# A bucket of whole blocks holds at least so many bytes, as in torch's DDP; blocks of smaller models share one.
_LEAST_BLOCK_BYTES = 25e6


def block_of(name: str) -> str:
    """Return the block of a parameter: the numbered part that has it, as ``layers.3``, or else the model's child."""
    parts = name.split(".")  # The last one is the parameter's own name, which may be a number, too.
    last = next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), 0)
    return ".".join(parts[: last + 1])


@dataclass(frozen=True)
class BucketRule:
    """The rule that says when a bucket is full, so that the next tensor opens another one.

    Attributes:
        cap_bytes: the most bytes in a bucket, unless it holds a single larger tensor; None sets no cap.
        whole_blocks: instead fill each bucket to at least ``cap_bytes``, and on to the end of the block.
    """

    cap_bytes: float | None
    whole_blocks: bool = False

    def __str__(self) -> str:
        return f"cap_bytes={self.cap_bytes}" + (" of whole blocks" if self.whole_blocks else "")

    def closes(self, filled_bytes: int, last: TensorSpec, following: TensorSpec) -> bool:
        """Return whether a bucket with so many bytes, whose last tensor is ``last``, must not take another."""
        if self.cap_bytes is None:
            return False
        if self.whole_blocks:
            return filled_bytes >= self.cap_bytes and last.block != following.block
        return filled_bytes + following.size_bytes > self.cap_bytes


def bucket_rule(bucket_size: float | str | None) -> BucketRule:
    """Return the rule for a size: megabytes (1e6 bytes) at most, ``block`` for whole blocks, None for no cap."""
    if bucket_size == WHOLE_BLOCKS:
        return BucketRule(_LEAST_BLOCK_BYTES, whole_blocks=True)
    return BucketRule(cap_in_bytes(bucket_size))


def cap_in_bytes(bucket_size_mb: float | str | None) -> float | None:
    """Convert a bucket size in megabytes (1e6 bytes) to a cap in bytes; None stays None: no cap."""
    check_bucket_size(bucket_size_mb)
    if isinstance(bucket_size_mb, str):
        raise UsageError(f"bucket size '{bucket_size_mb}': choose megabytes, or None for one bucket")
    return None if bucket_size_mb is None else float(bucket_size_mb) * 1e6


def assign_buckets(tensors: Sequence[TensorSpec], cap_bytes: float | BucketRule | None) -> list[list[int]]:
    """Put every tensor into a bucket; buckets and their contents are in the order in which gradients become ready.

    Gradients become ready in roughly the reverse order of the parameters, so the last parameter opens the first bucket.
    A bucket holds at most ``cap_bytes`` (the handout's "at most"; torch's DDP closes a bucket once it has crossed the
    cap); a tensor larger than the cap has a bucket to itself. Each kind has one open bucket at a time, and buckets are
    ordered by the last tensor they hold, so that with gradients in reverse order they complete one after the other.

    Args:
        tensors: in parameter order, a tied weight once for every name. It counts where it appears first, because its
            gradient is ready only when the backward pass has reached its first use.
        cap_bytes: ``0`` gives every tensor a bucket of its own; None sets no cap: one bucket for each kind. A
            :class:`BucketRule` may fill buckets with whole blocks instead.

    Returns:
        Indices into ``tensors``, bucket by bucket.
    """
    rule = cap_bytes if isinstance(cap_bytes, BucketRule) else BucketRule(cap_bytes)
    if rule.cap_bytes is not None and not rule.cap_bytes >= 0:  # Not "< 0", which would accept NaN.
        raise UsageError(f"bucket cap {rule.cap_bytes} bytes: must be at least 0")
    first_index: dict[Hashable, int] = {}
    for index, tensor in enumerate(tensors):
        first_index.setdefault(tensor.identity, index)

    buckets: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    for index in reversed(first_index.values()):
        tensor = tensors[index]
        open_bucket = filling.get(tensor.kind)
        if open_bucket is None or rule.closes(filled_bytes[tensor.kind], tensors[open_bucket[-1]], tensor):
            open_bucket = filling[tensor.kind] = []
            filled_bytes[tensor.kind] = 0
            buckets.append(open_bucket)
        open_bucket.append(index)
        filled_bytes[tensor.kind] += tensor.size_bytes
    return sorted(buckets, key=lambda bucket: bucket[-1], reverse=True)  # By the gradients that complete them.


class GradientBucket:
    """Gradients averaged where autograd left them: one launch for all of them, no copies, no extra memory.

    A gradient whose memory has other users is copied first: averaged in place, it would change theirs.

    Attributes:
        parameters: by name; all have the same device, and gradients of the same dtype.
        waiting: ids of the parameters whose gradients are not ready yet in this step.
        collects_at_once: whether :meth:`collect` wants gradients as soon as they are ready, not only at the launch.
        hands_on: whether the bucket takes the gradients away from the parameters at the launch.
        present: for each parameter, whether it had a gradient on this rank at :meth:`launch`.
        sent_dtype: the dtype in which gradients are sent and summed.
        reduction: computes the means; another may take its place between two steps.
    """

    collects_at_once = False
    hands_on = False

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        gradient_dtype: torch.dtype | None,
        group: dist.ProcessGroup | None = None,
    ):
        self.parameters = parameters
        self.begin_step()
        self.present: list[bool] = []
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        # As autograd lays gradients out: like a parameter that is dense in memory, else row-major.
        self._strides = {
            name: parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
            for name, parameter in parameters.items()
        }
        sample = next(iter(parameters.values()))
        self._dtype = gradient_dtype_of(sample) or sample.dtype  # None means any dtype, which wrappers refuse.
        # Complex gradients are sent as they are.
        self.sent_dtype = gradient_dtype if gradient_dtype and self._dtype.is_floating_point else self._dtype
        self.reduction = MeanReduction(self.sent_dtype, sample.device, f"gradients of {', '.join(parameters)}", group)
        # For parameters without a gradient here: zeros, which the mean of all ranks' gradients replaces.
        self._substitutes: dict[str, Tensor] = {}
        # Between launch() and wait(): the tensors to average, and if they are sent in another dtype, all in one tensor.
        self._averaged: list[Tensor] = []
        self._wire: Tensor | None = None

    @property
    def sent_sizes(self) -> list[int]:
        """Return the bytes of each tensor that :meth:`launch` hands over: copy engines make memory for them."""
        sizes = [parameter.numel() * self.sent_dtype.itemsize for parameter in self.parameters.values()]
        return sizes if self.sent_dtype == self._dtype else [sum(sizes)]

    def collect(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Accept a gradient that autograd has completed: copy it if its memory has other users, else leave it there."""
        require_averageable(name, gradient, self._dtype, self._shapes[name])
        if not owns_memory(gradient):
            parameter.grad = gradient.clone()

    def collect_present(self) -> None:
        """Accept all gradients that the parameters have now, whatever pass or program has put them there."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.collect(name, parameter, parameter.grad)

    def launch(self) -> None:
        """Start to average all gradients, with zeros for those that this rank lacks; :meth:`wait` ends it."""
        self._averaged = self._tensors_to_average()
        if self.sent_dtype == self._dtype:
            self.reduction.start(self._averaged)
            return
        sizes = [tensor.numel() for tensor in self._averaged]
        self._wire = torch.empty(sum(sizes), dtype=self.sent_dtype, device=self._averaged[0].device)
        torch._foreach_copy_(self._wire.split(sizes), [tensor.view(-1) for tensor in self._averaged])
        self.reduction.start([self._wire])

    def wait(self) -> None:
        """Return when the averaged gradients may be used: on a GPU, by work queued on the current stream after this."""
        self.reduction.wait()
        if self._wire is not None:
            sizes = [tensor.numel() for tensor in self._averaged]
            torch._foreach_copy_([tensor.view(-1) for tensor in self._averaged], self._wire.split(sizes))
        self._averaged, self._wire = [], None

    def finish(self, present_anywhere: list[bool]) -> None:
        """Give parameters without a gradient here the mean, where the list says that a rank had one; begin a step."""
        if not all(self.present):
            for (name, parameter), is_anywhere in zip(self.parameters.items(), present_anywhere, strict=True):
                if is_anywhere and name in self._substitutes:  # Only parameters without a gradient here have one.
                    parameter.grad = self._substitutes[name]
            self._substitutes = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Wait for the gradient of every parameter again."""
        # Ids, because Python code computes the hash of a tensor, in every step of every parameter.
        self.waiting = set(map(id, self.parameters.values()))

    def _tensors_to_average(self) -> list[Tensor]:
        """Return the contiguous tensors to average in place, of the same shapes on all ranks; set :attr:`present`."""
        self.present = [parameter.grad is not None for parameter in self.parameters.values()]
        sharing = []
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                require_averageable(name, parameter.grad, self._dtype, self._shapes[name])
                if not owns_memory(parameter.grad):
                    sharing.append(parameter.grad)
        # No copy where all users of a memory are here, each of a part. In most steps none is shared: CPU time counts.
        ids_to_copy = set(map(id, sharing)) - own_memory_together(sharing) if sharing else ()
        tensors = []
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None:
                gradient = self._substitutes[name] = self._empty(name).zero_()
            elif id(gradient) in ids_to_copy:
                gradient = parameter.grad = gradient.clone()
            # Memory is averaged as it lies there, so on every rank in the same order of elements.
            if not _same_order(gradient, self._strides[name]):
                gradient = parameter.grad = self._empty(name).copy_(gradient)
            # memory_view() of a contiguous one would only make another Python object.
            tensors.append(gradient if gradient.is_contiguous() else memory_view(gradient))
        return tensors

    def _empty(self, name: str) -> Tensor:
        device = self.parameters[name].device
        return torch.empty_strided(self._shapes[name], self._strides[name], dtype=self._dtype, device=device)


class FlatBucket(GradientBucket):
    """Gradients averaged as one tensor: each is copied into a flat buffer once, and is a view of it from then on.

    A gradient is copied as soon as autograd has completed it, so there are never two copies of all of them (unless they
    were zeroed instead of dropped), and none is copied back. The buffer exists from the first gradient of a step until
    its views are dropped: it is as large as the buckets of torch's DDP, but not there in a pass after ``zero_grad``.
    """

    collects_at_once = True

    def __init__(self, parameters: dict[str, nn.Parameter], *settings: Any):  # The base class's other arguments.
        super().__init__(parameters, *settings)
        self._offsets: dict[str, int] = {}
        self._gaps: list[slice] = []  # Elements that belong to no gradient; they are sent, too.
        self._size = 0
        for name, parameter in parameters.items():
            # In elements. Each view begins at an aligned address, for kernels that read several elements at a time.
            self._offsets[name] = self._size
            end = self._size + parameter.numel()
            self._size = math.ceil(end / ALIGNMENT) * ALIGNMENT
            self._gaps += [slice(end, self._size)] if end < self._size else []
        # From the first gradient of a step until finish(); the views of it keep its memory.
        self._buffer: Tensor | None = None

    def collect(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        require_averageable(name, gradient, self._dtype, self._shapes[name])
        if self._buffer is None:
            self._buffer = self._new_buffer(gradient)
        view = self._view(self._buffer, name)
        # After an earlier pass of the same step, the gradient is this view already.
        if gradient.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(gradient)

    def finish(self, present_anywhere: list[bool]) -> None:
        super().finish(present_anywhere)
        self._buffer = None

    def _tensors_to_average(self) -> list[Tensor]:
        self.collect_present()
        self.present = [parameter.grad is not None for parameter in self.parameters.values()]
        for (name, parameter), is_present in zip(self.parameters.items(), self.present, strict=True):
            if not is_present:
                self._buffer = self._new_buffer(parameter) if self._buffer is None else self._buffer
                self._substitutes[name] = self._view(self._buffer, name).zero_()
        assert self._buffer is not None, "every parameter has a gradient or a substitute"
        return [self._buffer]

    def _new_buffer(self, sample: Tensor) -> Tensor:
        buffer = torch.empty(self._size, dtype=self._dtype, device=sample.device)
        for gap in self._gaps:
            buffer[gap].zero_()  # Zeroed, so that NaN checks on the sent buffer pass.
        return buffer

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        return buffer.as_strided(self.parameters[name].shape, self._strides[name], self._offsets[name])


def divide_into_buckets(
    named_parameters: Sequence[tuple[str, nn.Parameter]], cap_bytes: float | BucketRule | None
) -> list[dict[str, nn.Parameter]]:
    """Return parameters by name, bucket by bucket, as :func:`assign_buckets` assigns them."""
    specs = []
    for name, parameter in named_parameters:
        dtype = gradient_dtype_of(parameter) or parameter.dtype  # None means any dtype, which wrappers refuse.
        size_bytes = parameter.numel() * dtype.itemsize
        specs.append(TensorSpec(id(parameter), size_bytes, kind=(dtype, parameter.device), block=block_of(name)))
    return [dict(named_parameters[index] for index in indices) for indices in assign_buckets(specs, cap_bytes)]


def _same_order(gradient: Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether elements are in the order of ``strides``; the stride of a dimension of size 1 does not matter."""
    return gradient.stride() == strides or all(
        size == 1 or gradient_stride == stride
        for size, gradient_stride, stride in zip(gradient.shape, gradient.stride(), strides, strict=True)
    )
