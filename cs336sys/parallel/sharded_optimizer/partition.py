"""Ways to share an optimizer's work, and the first of the two: each parameter is updated by one rank."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import ALIGNMENT, greedy_partition
from cs336sys.errors import UsageError
from cs336sys.parallel.buckets import TensorSpec, assign_buckets
from cs336sys.parallel.collectives import Broadcasts, is_dense
from cs336sys.parallel.sharded_optimizer.exchange import ExchangeBucket, ParameterExchange, move_into


class ParameterPartition:
    """Parameters that this rank updates and then sends to all ranks.

    Gradients are not touched: a data parallel wrapper averages them. The other way to share out an optimizer's work is
    :class:`~cs336sys.parallel.sharded_optimizer.slices.SlicePartition`, which has these methods, too.

    Args:
        cap_bytes: most bytes of parameters in one operation.

    Attributes:
        exchange: sends every parameter from the rank that updates it.
    """

    def __init__(self, cap_bytes: float | None):
        self.exchange = ParameterExchange()
        self._cap_bytes = cap_bytes
        self._held_bytes = [0] * dist.get_world_size()
        self._owners: dict[nn.Parameter, int] = {}
        self._names: dict[nn.Parameter, str] = {}

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give each parameter to a rank. They are in the order in which the forward pass needs them."""
        adopted = list(parameters.values())
        specs = [
            TensorSpec(parameter, parameter.numel() * parameter.element_size(), parameter.device)
            for parameter in adopted
        ]
        owners = greedy_partition([spec.size_bytes for spec in specs], self._held_bytes)
        for spec, owner in zip(specs, owners, strict=True):
            self._held_bytes[owner] += spec.size_bytes
        self._owners |= zip(adopted, owners, strict=True)
        self._names |= {parameter: name for name, parameter in parameters.items()}

        for indices in reversed(assign_buckets(specs, self._cap_bytes)):
            bucket = [adopted[index] for index in reversed(indices)]
            names = ", ".join(self._names[parameter] for parameter in bucket)
            tensors, sources = zip(*self._lay_together(bucket), strict=True)
            broadcasts = Broadcasts(tensors, sources, names)
            self.exchange.append(
                ExchangeBucket({self._names[parameter]: parameter for parameter in bucket}, broadcasts)
            )

    def local(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return what this rank's optimizer updates: the parameter itself, a slice of it, (n,), or nothing (None)."""
        return parameter if self._owners.get(parameter) == dist.get_rank() else None

    def owned(self, parameter: nn.Parameter) -> range:
        """Return the elements of a parameter, in memory order, that this rank updates."""
        return range(parameter.numel() if self.local(parameter) is not None else 0)

    def require_ready(self) -> None:
        """Check the gradients, which are complete."""
        for parameter, name in self._names.items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise UsageError(f"{name} has a sparse gradient, which cannot be sharded: choose sparse=False")

    def publish(self) -> None:
        """Start to send what this rank has updated."""
        self.exchange.start([parameter for parameter in self._owners if parameter.grad is not None])

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients, which every rank has whole; return their norm before, (), the same on every rank."""
        return nn.utils.clip_grad_norm_(self._owners, max_norm)

    def _lay_together(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[Tensor, int]]:
        """Tensors that hold these parameters, each with the rank that sends it: one per rank and dtype if possible.

        Each broadcast costs the CPU time whatever its size, even within a group.
        They do not count changes as the parameters do: what arrives is counted when it is launched.
        A parameter stays where it is if it has gaps in memory, or if one placed after it would not be aligned.
        """
        together: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for parameter in parameters:
            if is_dense(parameter) and parameter.numel() % ALIGNMENT == 0:
                together.setdefault((self._owners[parameter], parameter.dtype), []).append(parameter)
            else:
                yield parameter.data, self._owners[parameter]
        for (owner, _), members in together.items():
            if len(members) == 1:
                yield members[0].data, owner
                continue
            memory = members[0].detach().new_empty(sum(parameter.numel() for parameter in members))
            start = 0
            for parameter in members:
                move_into(memory, start, parameter)
                start += parameter.numel()
            yield memory, owner
