"""What a way of sharing out an optimizer's work must tell and do."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from cs336sys.parallel.sharded_optimizer.exchange import ParameterExchange


class Partition(Protocol):
    """Which part of the parameters this rank updates, and how updated parameters reach all ranks.

    There are two: :class:`~cs336sys.parallel.sharded_optimizer.whole_parameters.ParameterPartition` and
    :class:`~cs336sys.parallel.sharded_optimizer.slices.SlicePartition`, which averages gradients, too.
    """

    @property
    def exchange(self) -> ParameterExchange:
        """Brings every parameter back to all ranks."""
        ...

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Share out parameters, which come in the order in which the forward pass needs them."""
        ...

    def local(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """What this rank's optimizer updates of a parameter; None if that is nothing."""
        ...

    def owned(self, parameter: nn.Parameter) -> range:
        """Which elements of a parameter, in memory order, this rank updates."""
        ...

    def prepare_gradients(self) -> None:
        """Have the gradients ready that this rank's optimizer steps with.

        Raises:
            UsageError: one is sparse.
        """
        ...

    def publish(self) -> None:
        """Start to send what this rank has updated to all others."""
        ...

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients; returns the norm of all together before, (), the same on every rank."""
        ...
