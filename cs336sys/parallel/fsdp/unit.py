"""Parameters that are gathered and freed together: where they are in memory, and their collectives."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import gathered_layout, padded_bytes
from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import MeanScatter, SliceExchange, SliceGather, through_host
from cs336sys.parallel.fsdp.parameter import PlannedUnit, ShardedParameter
from cs336sys.parallel.gradient_memory import in_own_memory

# For each slice of a unit, how often it was changed, and its address.
SliceVersions = list[tuple[int, int]]


class GradientScatter:
    """Averages the gradients of some parameters in one launch: start, go on computing, finish.

    Parameters have the same dtypes, and either all or none of them equally many rows on every rank. If gradients have
    the dtype of the slices and ranks equally many rows, a reduce-scatter returns the mean. All others (half precision,
    uneven rows) are exchanged in an all-to-all and averaged here by one kernel: it sends as many bytes, the sum has the
    precision of the slices, and nothing is padded. Gradients to exchange are packed. One launch per parameter would
    save that copy, which takes a GPU 0.1 ms for a layer of ``2.7b`` in bf16, but would cost the CPU 0.06 ms for each.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], contents: str):
        self._parameters = parameters
        self._sizes = [parameter.shard.numel() for parameter in parameters]
        # How many elements each rank's slice has, of all parameters together.
        self._rank_sizes = [sum(sizes) for sizes in zip(*(cut.slice_sizes for cut in parameters), strict=True)]
        shard = parameters[0].shard
        # Asked once: getting the backend from the process group takes a CPU 2 us, and every layer needs it.
        self._can_scatter = parameters[0].divides_evenly and not through_host(shard)
        group = parameters[0].group
        self._scatter = MeanScatter(shard.dtype, shard.device, contents, group)
        self._exchange = SliceExchange(contents, group)
        # From start() to finish(): the means of all slices in one tensor, because they are made and dropped together;
        # and every rank's gradients, from which they are computed here, if these are exchanged.
        self._under_way: list[tuple[Tensor, Tensor | None]] = []

    def start(self, gradients: Mapping[ShardedParameter, Tensor]) -> None:
        """Launch. Gradients must be contiguous and have the same dtypes on every rank."""
        own_gradients = [gradients[parameter] for parameter in self._parameters]
        shard = self._parameters[0].shard
        mean = torch.empty(sum(self._sizes), dtype=shard.dtype, device=shard.device)
        if self._can_scatter and own_gradients[0].dtype == shard.dtype:
            # They are read, and by some backends divided, while the backward pass goes on.
            self._scatter.start(self._split_by_parameter(mean), list(map(in_own_memory, own_gradients)))
            self._under_way = [(mean, None)]
            return
        # Exchanged: a reduce-scatter would sum in the gradients' dtype, takes equal slices, and Gloo has none for CUDA.
        slices_of_parameters = [  # Of each parameter, one for each rank.
            gradient.view(-1).split_with_sizes(parameter.slice_sizes)
            for gradient, parameter in zip(own_gradients, self._parameters, strict=True)
        ]
        # In rank order, so that what goes to each rank is contiguous.
        packed = torch.cat(list(itertools.chain.from_iterable(zip(*slices_of_parameters, strict=True))))
        ranks = len(self._rank_sizes)
        received = packed.new_empty(ranks * len(mean))
        self._exchange.start(received, packed, self._rank_sizes, [len(mean)] * ranks)
        self._under_way = [(mean, received)]

    def finish(self, *, drops: bool) -> None:
        """Wait for the means, and add them to the gradients of the slices or drop them; on a GPU, the stream waits."""
        for mean, received in self._under_way:  # None if it was finished before another one's wait raised.
            if received is None:
                self._scatter.wait()
            else:
                self._exchange.wait()
                torch.mean(received.view(len(self._rank_sizes), len(mean)), dim=0, dtype=mean.dtype, out=mean)
            targets = () if drops else zip(self._parameters, self._split_by_parameter(mean), strict=True)
            for parameter, part in targets:
                shard = parameter.shard
                shard.grad = part if shard.grad is None else shard.grad.add_(part)
        self._under_way = []

    def _split_by_parameter(self, mean: Tensor) -> list[Tensor]:
        """Return the mean as one tensor for each parameter, in the shape of its slice."""
        pieces = zip(mean.split_with_sizes(self._sizes), self._parameters, strict=True)
        return [piece.view(parameter.shard.shape) for piece, parameter in pieces]


class ShardedUnit:
    """A :class:`~cs336sys.parallel.fsdp.parameter.PlannedUnit` with the parameters of this rank.

    All gathered parameters share one block of memory, which is allocated for gathering and released by freeing. Rows
    are gathered straight to where they are used: this rank's are cast to their position in the block, then those of the
    other ranks are gathered around them, for all parameters in one launch.

    Attributes:
        name, modules, contains_units, parameters: those of the plan.
        trained: the parameters that get gradients.
        gathered_bytes: size of the block of memory.
        has_kept: whether backward passes under no_sync have left gradients to average.
        is_under_way: whether it is being gathered and has not been waited for yet.
        depth: how many calls of its modules are running.
        calls_ahead: how many calls of this step the backward pass has not reached yet.
    """

    def __init__(
        self,
        planned: PlannedUnit,
        parameters: Sequence[ShardedParameter],
        gradient_dtype: torch.dtype | None,
        access: Callable[["ShardedUnit"], None],
    ):
        """Make the unit from the plan.

        Args:
            gradient_dtype: dtype in which gradients are sent; None sends them as they were computed.
            access: called with the unit when an operation needs its parameters, and none of its modules is called.
        """
        self.name = planned.name or type(planned.modules[0]).__name__
        self.modules = planned.modules
        self.contains_units = planned.contains_units
        self.parameters = parameters
        self.has_kept = False
        self.depth = self.calls_ahead = 0
        self._gradient_dtype = gradient_dtype
        group = parameters[0].group
        world_size = group.size()
        shapes_and_itemsizes = [(parameter.shape, parameter.gathered_dtype.itemsize) for parameter in parameters]
        starts, self.gathered_bytes = gathered_layout(shapes_and_itemsizes, world_size)
        memory = torch.empty(self.gathered_bytes, dtype=torch.uint8, device=parameters[0].shard.device)
        regions: list[Tensor] = []
        self._rows_in_block: list[Tensor] = []
        for parameter, start, (shape, itemsize) in zip(parameters, starts, shapes_and_itemsizes, strict=True):
            regions.append(memory[start : start + padded_bytes(shape, itemsize, world_size)])
            self._rows_in_block.append(parameter.gather_into(regions[-1], lambda: access(self)))
        self._gather = SliceGather(regions, f"weights of {self.name}", group)
        self._storage = memory.untyped_storage()
        self._storage.resize_(0)  # It has no memory until gather().
        self.is_under_way = self._ready = False
        self.device = memory.device
        # Where modules hold the parameters: dictionary, attribute, and the module if its __setattr__ is one of its own.
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Module | None]] = []
        uses = [(parameter, *use) for parameter in parameters for use in parameter.owners]
        for parameter, owner, attribute in uses:
            is_plain = type(owner).__setattr__ is nn.Module.__setattr__
            self._places.append((owner._parameters, attribute, None if is_plain else owner))
            if not is_plain:  # It may keep the parameter elsewhere, too, as nn.LSTM's does in a list.
                setattr(owner, attribute, parameter.shard)
        self._slices: list[nn.Parameter] = [parameter.shard for parameter, _, _ in uses]
        self._stand_ins: list[nn.Parameter] = [parameter.stand_in for parameter, _, _ in uses]
        self._whole: list[nn.Parameter] = [parameter.full for parameter, _, _ in uses]
        # What these places hold now, and what they hold while the unit is not in use.
        self._shown = self._resting = self._slices
        self._shards: list[Tensor] = [parameter.shard for parameter in parameters]
        for parameter in parameters:  # Which refresh() may have found trained from now on.
            parameter.refuse_outside_gradients()
        self.trained = [parameter for parameter in parameters if parameter.shard.requires_grad]
        alike: dict[Any, list[ShardedParameter]] = {}
        for parameter in self.trained:
            kind = parameter.shard.dtype, parameter.gathered_dtype, parameter.divides_evenly
            alike.setdefault(kind, []).append(parameter)
        self._scatters = [GradientScatter(cut, f"gradients of {self.name}") for cut in alike.values()]

    @property
    def is_gathered(self) -> bool:
        """Return whether it has memory for its gathered parameters, be they in use, arriving, or ahead of use."""
        return self.is_under_way or self._ready

    def gather(self) -> None:
        """Start to gather the parameters, unless they are gathered."""
        if self.is_gathered:
            return
        self.is_under_way = True
        self._storage.resize_(self.gathered_bytes)
        with torch.no_grad():
            torch._foreach_copy_(self._rows_in_block, self._shards)
            self._gather.start()

    def wait(self) -> None:
        """Wait for the parameters to arrive; on a GPU, let the current stream wait."""
        if self.is_under_way:
            self._gather.wait()
            self.is_under_way, self._ready = False, True

    def use(self) -> None:
        """Wait for the parameters, and put them into the modules."""
        self.wait()
        self._show(self._whole)

    def hide(self) -> None:
        """Put slices or stand-ins into the modules; the parameters keep their memory."""
        self._show(self._resting)

    def begin_pass(self) -> None:
        """From now on, show stand-ins where the parameters are not in use: a forward or backward pass begins."""
        for parameter in self.parameters:
            parameter.follow_freezing()
        if self._shown is self._slices:
            self._show(self._stand_ins)
        self._resting = self._stand_ins

    def end_pass(self) -> None:
        """Show slices from now on, whatever the modules hold."""
        self._resting = self._slices
        # A parameter that a user has replaced is refused by the next pass or finish().
        with contextlib.suppress(UsageError):
            self._show(self._slices)

    def require_unchanged(self) -> None:
        """Refuse gathered parameters that were changed since they were gathered: the change would be lost."""
        for parameter in self.parameters:
            parameter.require_unchanged()

    def versions(self) -> SliceVersions:
        """Count each slice's changes, with its address: ``.data =`` moves it and does not count."""
        # A slice without rows has no address, but its rank must see the change, too.
        return [(shard._version, shard.data_ptr() or shard.untyped_storage()._cdata) for shard in self._shards]

    def require_versions(self, versions: SliceVersions) -> None:
        """Refuse slices that were changed since :meth:`versions` returned this."""
        now = self.versions()
        if now != versions:
            pairs = zip(self.parameters, versions, now, strict=True)
            changed = next(parameter for parameter, before, after in pairs if before != after)
            raise UsageError(
                f"{changed.names[0]} was changed between the forward and the backward pass, whose gradients would be "
                "those of other weights: run the backward pass before the optimizer's step"
            )

    def stores(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the memory of the gathered parameters, as a view of one is."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            return False  # It has no memory of this kind, as a sparse tensor.
        start = self._storage.data_ptr()
        return start <= address < start + self._storage.nbytes()

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of the gathered parameters itself."""
        return any(tensor is parameter.full for parameter in self.parameters)

    def record_arrival(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Record ``event`` on ``stream``, which has no other work, when the parameters have arrived."""
        self._gather.record_end(event, stream)

    def free(self) -> None:
        """Release the memory of the gathered parameters, after :meth:`hide`."""
        if not self.is_gathered:
            return
        self.wait()  # Memory that is being filled must not be released.
        self._ready = False
        self._storage.resize_(0)

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
        present, gradients = [], {}
        for parameter in self.trained:
            if self.has_kept:
                parameter.keep_gradient()
                gradient = parameter.take_kept()
            else:
                gradient = parameter.take_gradient()
            present.append(gradient is not None)
            if gradient is None:
                # The dtype that other ranks' gradients have: those kept under no_sync() have that of the slices.
                dtype = parameter.shard.dtype if self.has_kept else parameter.gathered_dtype
                gradient = torch.zeros(parameter.shape, dtype=dtype, device=self.device)
            if self._gradient_dtype is not None and gradient.is_floating_point():
                gradient = gradient.to(self._gradient_dtype)
            gradients[parameter] = gradient.contiguous()
        self.has_kept = False
        for scatter in self._scatters:
            scatter.start(gradients)
        return present

    def finish_reduction(self, *, drops: bool = False) -> None:
        """Add the means to the gradients of the slices, or drop them."""
        for scatter in self._scatters:
            scatter.finish(drops=drops)

    def require_no_gradient(self) -> None:
        """Refuse whole gradients that came after they were reduced, and discard them."""
        late = [parameter for parameter in self.parameters if parameter.full.grad is not None]
        if late:
            self.drop_gradients()
            raise UsageError(
                f"{late[0].names[0]} got a gradient after the backward pass had left {self.name}: what is computed "
                "from a weight must be computed anew in each forward pass, in the call of its layer"
            )

    def drop_gradients(self) -> None:
        """Drop the whole gradients that backward passes have left."""
        for parameter in self.parameters:
            parameter.full.grad = None

    def _show(self, shown: list[nn.Parameter]) -> None:
        """Put these parameters into the modules in place of those shown now; refuse where a user replaced one."""
        if shown is self._shown:
            return
        replaced = None
        for (module_parameters, attribute, module), before, after in zip(self._places, self._shown, shown, strict=True):
            if module_parameters.get(attribute) is not before:
                replaced = before  # Refused below, when all others are in place.
            elif module is None:
                module_parameters[attribute] = after
            else:
                setattr(module, attribute, after)
        self._shown = shown
        for parameter in self.parameters if replaced is not None else ():
            if any(tensor is replaced for tensor in (parameter.shard, parameter.full, parameter.stand_in)):
                raise UsageError(
                    f"{parameter.names[0]} is no longer the parameter that was wrapped (assigned, or given to "
                    "functional_call): change its values in place, or call refresh() on every rank"
                )
