"""Gradients that one all-reduce averages: where they are in memory, and their way there and back."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cs336sys.accounting.sharding.optimizer import ALIGNMENT
from cs336sys.errors import UsageError
from cs336sys.parallel.buckets import TensorSpec, assign_buckets
from cs336sys.parallel.collectives import MeanReduction, is_dense, memory_view


class GradientBucket:
    """Gradients averaged where autograd left them: one launch for all, no copies, no memory of its own.

    Attributes:
        parameters: by name; all of one dtype and device.
        waiting: parameters whose gradient is not ready in this step.
        present: after :meth:`launch`, whether each parameter had a gradient on this rank.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], gradient_dtype: torch.dtype | None):
        self.parameters = parameters
        self.waiting = set(parameters.values())
        self.present: list[bool] = []
        self._strides = {parameter: _gradient_strides(parameter) for parameter in parameters.values()}
        sample = next(iter(parameters.values()))
        is_cast = gradient_dtype is not None and sample.dtype.is_floating_point and sample.dtype != gradient_dtype
        self._wire_dtype = gradient_dtype if is_cast else None
        self._reduction = MeanReduction(
            self._wire_dtype or sample.dtype, sample.device, f"gradients of {', '.join(parameters)}"
        )
        # Take part for parameters that have no gradient here: zeros, and then the mean of other ranks' gradients.
        self._substitutes: dict[nn.Parameter, Tensor] = {}
        self._averaged: list[Tensor] = []
        self._wire: Tensor | None = None

    def collect(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Take in a gradient that autograd has just finished; here it stays where it is.

        Raises:
            UsageError: it is sparse.
        """
        refuse_sparse(name, gradient)

    def launch(self) -> None:
        """Start to average all gradients, zeros for those that this rank lacks."""
        self.present = [parameter.grad is not None for parameter in self.parameters.values()]
        self._averaged = self._memory()
        if self._wire_dtype is None:
            self._reduction.start(self._averaged)
            return
        sizes = [tensor.numel() for tensor in self._averaged]
        self._wire = torch.empty(sum(sizes), dtype=self._wire_dtype, device=self._averaged[0].device)
        torch._foreach_copy_(self._wire.split(sizes), [tensor.view(-1) for tensor in self._averaged])
        self._reduction.start([self._wire])

    def wait(self) -> None:
        """Return when the averaged gradients may be used: on a GPU, by what is queued after this on its stream."""
        self._reduction.wait()
        if self._wire is not None:
            sizes = [tensor.numel() for tensor in self._averaged]
            torch._foreach_copy_([tensor.view(-1) for tensor in self._averaged], self._wire.split(sizes))
        self._averaged, self._wire = [], None

    def finish(self, present_anywhere: list[bool]) -> None:
        """Hand substitutes to parameters that lack a gradient here but not on every rank, and begin a new step.

        Args:
            present_anywhere: for each parameter in order.
        """
        for parameter, here, anywhere in zip(self.parameters.values(), self.present, present_anywhere, strict=True):
            if anywhere and not here:
                parameter.grad = self._substitutes[parameter]
        self._substitutes = {}
        self.waiting = set(self.parameters.values())

    def _memory(self) -> list[Tensor]:
        """The contiguous tensors to average in place, the same on every rank."""
        tensors = []
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None:
                gradient = self._substitutes[parameter] = self._empty_gradient(parameter).zero_()
            else:
                self.collect(name, parameter, gradient)
                if not _same_order(gradient, self._strides[parameter]):
                    gradient = parameter.grad = self._empty_gradient(parameter).copy_(gradient)
            tensors.append(memory_view(gradient))
        return tensors

    def _empty_gradient(self, parameter: nn.Parameter) -> Tensor:
        return torch.empty_strided(
            parameter.shape, self._strides[parameter], dtype=parameter.dtype, device=parameter.device
        )


class FlatBucket(GradientBucket):
    """Gradients averaged as one tensor: each is copied into a flat buffer once and is a view of it from then on.

    The copy is made as soon as autograd has finished a gradient, so never all exist twice, and none is copied back. The
    buffer lives from the first gradient of a step until the views are dropped: it costs what torch's DDP spends on its
    buckets, but not in a forward pass after ``zero_grad``.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], gradient_dtype: torch.dtype | None):
        super().__init__(parameters, gradient_dtype)
        self._offsets: dict[nn.Parameter, int] = {}
        self._gaps: list[slice] = []
        self._size = 0
        for parameter in parameters.values():
            self._offsets[parameter] = self._size
            end = self._size + parameter.numel()
            self._size = math.ceil(end / ALIGNMENT) * ALIGNMENT
            self._gaps += [slice(end, self._size)] if end < self._size else []
        # Of this step, between its first gradient and finish().
        self._buffer: Tensor | None = None

    def collect(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        super().collect(name, parameter, gradient)
        if self._buffer is None:
            # Gradients that were set to zero instead of dropped lie in the last step's.
            self._buffer = self._buffer_under(parameter, gradient)
        if self._buffer is None:
            self._buffer = self._new_buffer(gradient)
        view = self._view(self._buffer, parameter)
        if gradient.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(gradient)

    def finish(self, present_anywhere: list[bool]) -> None:
        super().finish(present_anywhere)
        self._buffer = None

    def _memory(self) -> list[Tensor]:
        missing = []
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                missing.append(parameter)
            else:
                self.collect(name, parameter, parameter.grad)
        if self._buffer is None:
            self._buffer = self._new_buffer(missing[0])
        for parameter in missing:
            self._substitutes[parameter] = self._view(self._buffer, parameter).zero_()
        return [self._buffer]

    def _new_buffer(self, sample: Tensor) -> Tensor:
        buffer = torch.empty(self._size, dtype=sample.dtype, device=sample.device)
        for gap in self._gaps:
            # Who looks for NaN in what is sent finds none.
            buffer[gap].zero_()
        return buffer

    def _buffer_under(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """The buffer that a gradient is a view of, if it is one."""
        is_view = (
            gradient.untyped_storage().nbytes() == self._size * gradient.element_size()
            and gradient.storage_offset() == self._offsets[parameter]
            and gradient.stride() == self._strides[parameter]
        )
        return gradient.detach().as_strided((self._size,), (1,), 0) if is_view else None

    def _view(self, buffer: Tensor, parameter: nn.Parameter) -> Tensor:
        return buffer.as_strided(parameter.shape, self._strides[parameter], self._offsets[parameter])


def refuse_sparse(name: str, gradient: Tensor) -> None:
    """Raises UsageError for a gradient that is not an ordinary tensor."""
    if gradient.layout != torch.strided:
        raise UsageError(f"{name} has a sparse gradient, which cannot be averaged: choose sparse=False")


def divide_into_buckets(
    named: Sequence[tuple[str, nn.Parameter]], cap_bytes: float | None
) -> list[dict[str, nn.Parameter]]:
    """Parameters by name, bucket by bucket, as :func:`~cs336sys.parallel.buckets.assign_buckets` assigns them.

    A bucket has parameters of one dtype and device alone.
    """
    specs = [
        TensorSpec(id(parameter), parameter.numel() * parameter.element_size(), (parameter.dtype, parameter.device))
        for _, parameter in named
    ]
    return [dict(named[index] for index in indices) for indices in assign_buckets(specs, cap_bytes)]


def _gradient_strides(parameter: nn.Parameter) -> tuple[int, ...]:
    """The strides that autograd gives a gradient: the parameter's if that is dense in memory, else row-major."""
    if is_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _same_order(gradient: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether elements lie in memory as under ``strides``; the stride of a dimension of size 1 says nothing."""
    return gradient.stride() == strides or all(
        size == 1 or own == other for size, own, other in zip(gradient.shape, gradient.stride(), strides, strict=True)
    )
