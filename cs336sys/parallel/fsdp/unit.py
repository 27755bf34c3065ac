"""Parameters that are gathered and freed together: where they are in memory, and their collectives."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import gathered_layout, padded_bytes
from cs336sys.parallel.collectives import SliceGather
from cs336sys.parallel.fsdp.gradients import GradientScatter, on_side_stream
from cs336sys.parallel.fsdp.parameter import ShardedParameter
from cs336sys.parallel.fsdp.plan import PlannedUnit


class ShardedUnit:
    """What :class:`~cs336sys.parallel.fsdp.plan.PlannedUnit` plans, with the parameters of this rank.

    All gathered parameters share one block of memory, which is allocated for gathering and released by freeing. Rows
    are gathered straight to where they are used: this rank's are cast to their position in the block, then those of the
    other ranks are gathered around them, for all parameters in one launch.

    Attributes:
        name: the name of the unit.
        modules: the modules whose calls use it.
        contains_units: whether other units run their backward passes within its own.
        parameters: all of its parameters.
        trained: those of them that get gradients.
        gathered_bytes: size of the block of memory.
        has_kept: whether backward passes under no_sync have left gradients to average.
        depth: how many calls of its modules are running.
        calls_ahead: how many calls of this step the backward pass has not reached yet.
    """

    def __init__(
        self,
        planned: PlannedUnit,
        parameters: Sequence[ShardedParameter],
        gradient_dtype: torch.dtype | None,
        streams: tuple[torch.cuda.Stream | None, torch.cuda.Stream | None] = (None, None),
    ):
        """Make it from the plan.

        Args:
            gradient_dtype: dtype in which gradients are sent; None sends them as they were computed.
            streams: on a GPU, the one to cast weights on, and the one to average gradients on.
        """
        self.name = planned.name or type(planned.modules[0]).__name__
        self.modules = planned.modules
        self.contains_units = planned.contains_units
        self.parameters = parameters
        self.trained: list[ShardedParameter] = []
        self.has_kept = False
        self.depth = self.calls_ahead = 0
        self._gradient_dtype = gradient_dtype
        self._stream = streams[0]
        group = parameters[0].group
        world_size = group.size()
        shapes_and_sizes = [(parameter.shape, parameter.gathered_dtype.itemsize) for parameter in parameters]
        starts, self.gathered_bytes = gathered_layout(shapes_and_sizes, world_size)
        memory = torch.empty(self.gathered_bytes, dtype=torch.uint8, device=parameters[0].shard.device)
        regions = [
            memory[start : start + padded_bytes(*shape_and_size, world_size)]
            for start, shape_and_size in zip(starts, shapes_and_sizes, strict=True)
        ]
        self._own = [parameter.gather_into(region) for parameter, region in zip(parameters, regions, strict=True)]
        self._gather = SliceGather(regions, f"weights of {self.name}", group)
        self._storage = memory.untyped_storage()
        self._storage.resize_(0)
        self._under_way = self._ready = False
        # A module with its own __setattr__ is assigned to, the dictionaries of others are written to.
        self._written: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        self._assigned: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for parameter in parameters:
            for owner, attribute in parameter.owners:
                if type(owner).__setattr__ is nn.Module.__setattr__:
                    self._written.append((owner._parameters, attribute, parameter.shard, parameter.full))
                else:
                    self._assigned.append((owner, attribute, parameter.shard, parameter.full))
        self._show_shards()
        self._shards: list[Tensor] = [parameter.shard for parameter in parameters]
        self._scatter = GradientScatter(f"gradients of {self.name}", streams[1])

    @property
    def device(self) -> torch.device:
        return self._own[0].device

    @property
    def is_under_way(self) -> bool:
        """Whether it is being gathered and has not been waited for yet."""
        return self._under_way

    @property
    def is_gathered(self) -> bool:
        """Whether it has memory for its gathered parameters, be they in use, arriving, or ahead of use."""
        return self._under_way or self._ready

    def refresh(self) -> None:
        """Find out anew which parameters are trained: those whose shards require gradients."""
        for parameter in self.parameters:
            parameter.full.requires_grad_(parameter.shard.requires_grad)
        self.trained = [parameter for parameter in self.parameters if parameter.shard.requires_grad]
        self._scatter.choose(self.trained)

    def gather(self) -> None:
        """Start to gather the parameters, unless they are gathered."""
        if self.is_gathered:
            return
        self._under_way = True
        self._storage.resize_(self.gathered_bytes)
        with on_side_stream(self._stream), torch.no_grad():
            torch._foreach_copy_(self._own, self._shards)
            self._gather.start()

    def use(self) -> None:
        """Wait for the parameters to arrive (on a GPU, let the current stream wait), and put them into the modules."""
        if self._under_way:
            self._gather.wait()
            self._under_way, self._ready = False, True
            for parameters, attribute, _, full in self._written:
                parameters[attribute] = full
            for module, attribute, _, full in self._assigned:
                setattr(module, attribute, full)

    def record_arrival(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Record ``event`` on ``stream``, which has no other work, when the parameters have arrived."""
        self._gather.record_end(event, stream)

    def free(self) -> None:
        """Release the memory of the gathered parameters, and put the shards into the modules."""
        if not self.is_gathered:
            return
        self.use()
        self._ready = False
        self._storage.resize_(0)
        self._show_shards()

    def keep_gradients(self) -> None:
        """Keep the gradients of a backward pass for a later reduction."""
        self.has_kept = True
        for parameter in self.trained:
            parameter.keep_gradient()

    def start_reduction(self) -> list[bool]:
        """Start to average the gradients of a backward pass plus those kept; parameters without one count as zero.

        Returns:
            for each trained parameter, whether it had a gradient here.
        """
        present, gradients = [], []
        for parameter in self.trained:
            if self.has_kept:
                parameter.keep_gradient()
                gradient, parameter.kept = parameter.kept, None
            else:
                gradient = parameter.take_gradient()
            present.append(gradient is not None)
            if gradient is None:
                dtype = parameter.shard.dtype if self.has_kept else parameter.gathered_dtype
                gradient = torch.zeros(parameter.shape, dtype=dtype, device=self.device)
            if self._gradient_dtype is not None and gradient.is_floating_point():
                gradient = gradient.to(self._gradient_dtype)
            gradients.append(gradient.contiguous())
        self.has_kept = False
        self._scatter.start(gradients)
        return present

    def finish_reduction(self) -> None:
        """Add the averaged gradients to those of the shards; on a GPU, the current stream waits for them."""
        self._scatter.finish()

    def drop_gradients(self) -> None:
        """Discard the gradients of a backward pass that failed, including those that are being averaged."""
        self.has_kept = False
        for parameter in self.parameters:
            parameter.full.grad = parameter.kept = None
        self._scatter.drop()

    def _show_shards(self) -> None:
        for parameters, attribute, shard, _ in self._written:
            parameters[attribute] = shard
        for module, attribute, shard, _ in self._assigned:
            setattr(module, attribute, shard)
