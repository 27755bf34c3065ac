"""The interface of the two ways to share out an optimizer's work: by whole parameters, and by slices."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from cs336sys.parallel.sharded_optimizer.exchange import ParameterExchange


class Partition(Protocol):
    """Knows which part of the parameters this rank updates, and sends updated parameters to all ranks.

    There are :class:`~cs336sys.parallel.sharded_optimizer.whole_parameters.ParameterPartition` and
    :class:`~cs336sys.parallel.sharded_optimizer.slices.SlicePartition`, which also averages gradients.
    """

    @property
    def exchange(self) -> ParameterExchange:
        """Brings updated parameters to all ranks."""

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Share out parameters, given in the order in which the forward pass needs them."""

    def local(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """What this rank's optimizer updates: the parameter itself, a slice of it, (n,), or nothing (None)."""

    def owned(self, parameter: nn.Parameter) -> range:
        """Which elements of a parameter, in memory order, this rank updates."""

    def require_ready(self) -> None:
        """Refuse gradients that cannot be used by a step.

        Raises:
            UsageError: one is sparse.
        """

    def publish(self) -> None:
        """Start to send what this rank has updated to all other ranks."""

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients, and return their norm before, (), which is the same on every rank."""
