"""Copies of weights in half precision, and whether they are up to date."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class WeightCopies:
    """Copies of weights, kept up to date with what PyTorch writes into the weights.

    Iterating over it gives each weight with its copy.

    Args:
        apart: whether they have memory of their own; else the weights lie in them.

    Attributes:
        tensors: those that have memory of their own.
    """

    def __init__(self, *, apart: bool) -> None:
        self._apart = apart
        self.tensors: list[Tensor] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._versions: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._pairs)

    def add(self, weights: Sequence[Tensor], copy: Tensor) -> None:
        """``copy`` (rows of all weights, d) holds the weights (rows, d) one after another."""
        if self._apart:
            self.tensors.append(copy)
        self._pairs += zip(weights, copy.split([len(weight) for weight in weights]), strict=True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Write all copies anew."""
        if self._apart and self._pairs:
            weights, copies = zip(*self._pairs, strict=True)
            torch._foreach_copy_(copies, weights)
        self._versions = self._versions_now()

    def refresh_changed(self) -> None:
        """:meth:`refresh` if PyTorch has written into a weight since; the GPU is not waited for."""
        if self._versions != self._versions_now():
            self.refresh()

    @torch.no_grad()
    def differences(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight, and how far its copy is from the weight in the copy's dtype: zeros if it is up to date."""
        for weight, copy in self._pairs:
            rounded = weight.to(copy.dtype)
            off = (copy - rounded).float()
            if not weight.is_cuda:
                # Triton's interpreter cuts off instead of rounding.
                off[off.abs() <= torch.finfo(copy.dtype).eps * rounded.float().abs()] = 0
            yield weight, off

    def _versions_now(self) -> list[tuple[int, int]]:
        return [(id(weight), weight._version) for weight, _ in self._pairs]
