"""A parameter cut along its first dimension into one slice per rank."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336sys.accounting.sharding.partition import own_rows, rows_per_rank
from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import SliceGather
from cs336sys.parallel.fsdp.plan import PlannedParameter
from cs336sys.parallel.gradient_memory import in_own_memory, require_averageable
from cs336sys.parallel.gradient_slices import is_slice, mark_slice

# Operations that need no values; untyped_storage() is used to count memory. All others get the whole weight.
_PROPERTIES = (
    "shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad grad_fn is_cuda is_cpu is_meta "
    "is_sparse is_quantized"
)
_METHODS = (
    "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex is_signed "
    "get_device __len__ untyped_storage storage_offset"
)
_WITHOUT_VALUES = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES.split()]
    + [getattr(Tensor, name) for name in _METHODS.split()]
    + [torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed]
)
_FREEZING = frozenset((Tensor.requires_grad_, Tensor.requires_grad.__set__))  # type: ignore[attr-defined]


class StandIn(nn.Parameter):
    """A parameter without memory that is replaced by the whole one in every operation.

    Attributes:
        stands_for: name of the parameter.
        whole: returns the whole parameter, with its values.
    """

    stands_for: str
    whole: Callable[[], nn.Parameter]

    @staticmethod
    def of(full: nn.Parameter, name: str, gather: Callable[[], nn.Parameter]) -> "StandIn":
        """Make the stand-in of a parameter: with its attributes and its storage, which is empty unless gathered."""
        has_gradients = full.is_floating_point() or full.is_complex()  # Integers have no gradients.
        stand_in: StandIn = Tensor._make_subclass(StandIn, full.data, has_gradients)
        vars(stand_in).update(vars(full))
        stand_in.stands_for, stand_in.whole = name, gather
        if not has_gradients:
            return stand_in

        def hand_on(accumulated: Tensor) -> None:
            # An autograd.Function that was given the stand-in leaves its gradient there. Torch holds this hook where
            # Python's collector does not look: it must not refer to the stand-in. __torch_function__() would gather.
            with torch._C.DisableTorchFunctionSubclass():
                gradient, accumulated.grad = accumulated.grad, None
            if gradient is not None:
                full.grad = gradient if full.grad is None else full.grad + gradient

        with torch._C.DisableTorchFunctionSubclass():
            stand_in.register_post_accumulate_grad_hook(hand_on)
            stand_in.requires_grad_(full.requires_grad)  # Only now: a frozen tensor takes no hook.
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``function`` with whole parameters in place of stand-ins."""
        if function in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function in _FREEZING:
            raise UsageError(f"{args[0].stands_for} is frozen or unfrozen in the forward pass: do it between two steps")
        args, kwargs = tree_map_only(StandIn, lambda stand_in: stand_in.whole(), (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.stands_for}, {tuple(self.shape)} in {self.dtype}, not gathered"


class ShardedParameter:
    """A parameter of which this rank holds some rows.

    Attributes:
        group: the ranks that hold it.
        names, owners: those of the :class:`~cs336sys.parallel.fsdp.plan.PlannedParameter`.
        shape: the shape of the whole parameter.
        is_part_of_more: whether the whole parameter is itself this rank's part of one that another wrapper has cut.
        rows: which rows this rank holds.
        divides_evenly: whether all ranks hold equally many rows.
        slice_sizes: for each rank, the number of elements in its rows.
        shard: this rank's rows, (len(rows), ...): what the module holds between steps and the optimizer updates.
        full: all rows in the dtype to compute in: what the module holds, and autograd sees, while they are gathered.
            It is always the same tensor, so that what autograd saved of it stays valid; its memory comes and goes.
        stand_in: what the module holds in a forward or backward pass while they are not gathered.
        kept: the sum of the gradients of backward passes under no_sync, in the dtype of the shard.
    """

    def __init__(
        self,
        planned: PlannedParameter,
        whole: nn.Parameter,
        compute_dtype: torch.dtype | None,
        group: dist.ProcessGroup,
    ):
        """Copy this rank's rows of the whole parameter."""
        self.group = group
        self.names = planned.names
        self.owners = planned.owners
        self.shape = whole.shape
        self.is_part_of_more = is_slice(whole)
        world_size = group.size()
        self.rows = own_rows(len(whole), group.rank(), world_size)
        self.divides_evenly = len(whole) % world_size == 0
        self.slice_sizes = [
            len(own_rows(len(whole), rank, world_size)) * math.prod(whole.shape[1:]) for rank in range(world_size)
        ]
        rows_of_rank = whole.detach()[self.rows.start : self.rows.stop].clone(memory_format=torch.contiguous_format)
        self.shard = nn.Parameter(rows_of_rank, requires_grad=whole.requires_grad)
        vars(self.shard).update(vars(whole))  # What a user or another wrapper has noted on the parameter stays with it.
        self._attributes = dict(vars(whole))
        mark_slice(self.shard, whole=None if self.is_part_of_more else (tuple(self.shape), 0))  # Cut along dimension 0.
        self._compute_dtype = compute_dtype
        self.kept: Tensor | None = None
        # When a gradient was last kept: the shard's ``grad`` and its version. And whether that is a view of ``kept``.
        self._seen_gradient: tuple[Tensor, int] | None = None
        self._shows_kept = False
        self._is_guarded = False  # Whether refuse_outside_gradients() has put its hook on the shard.

    def gather_into(self, memory: Tensor, gather: Callable[[], object]) -> Tensor:
        """Let ``full`` be a view of ``memory`` (uint8), in which rows will be gathered; return where this rank's go.

        Args:
            gather: called when an operation needs the rows, and nobody has gathered them.
        """
        row_count = rows_per_rank(self.shape[0], self.group.size())
        # With room for equally many rows of every rank, although the last may have fewer.
        padded = memory.view(self.gathered_dtype).view(-1, *self.shape[1:])
        # .data has a version counter of its own, so autograd does not see that its saved tensors are filled again.
        self._all_rows = padded.data[: self.shape[0]]
        self.full = full = nn.Parameter(self._all_rows, requires_grad=self.shard.requires_grad)
        vars(full).update(self._attributes)
        self._version = full._version

        def gathered_parameter() -> nn.Parameter:
            gather()
            return full

        self.stand_in = StandIn.of(full, self.names[0], gathered_parameter)
        return padded[self.group.rank() * row_count :][: len(self.rows)]

    @property
    def gathered_dtype(self) -> torch.dtype:
        """Return the dtype in which :meth:`gather_into` makes ``full``; the shard's may have changed afterwards."""
        if self._compute_dtype is not None and self.shard.is_floating_point():
            return self._compute_dtype
        return self.shard.dtype

    def refuse_outside_gradients(self) -> None:
        """Refuse gradients that autograd would accumulate into the shard."""
        if self._is_guarded or not self.shard.requires_grad:
            return
        name = self.names[0]

        def refuse(_: Tensor) -> None:
            raise UsageError(
                f"{name} got a gradient outside of the forward pass, where this rank holds a slice of it: compute "
                "penalties on weights in the module's forward()"
            )

        self.shard.register_hook(refuse)
        self._is_guarded = True

    def require_no_hooks(self) -> None:
        """Refuse hooks of others on the shard."""
        shard = self.shard
        # One backward hook is ours, if it is guarded.
        if shard._post_accumulate_grad_hooks or len(shard._backward_hooks or ()) != self._is_guarded:
            raise hook_refusal(self.names[0])

    def follow_freezing(self) -> None:
        """Let the whole parameter be trained if the shard is."""
        is_trained = self.shard.requires_grad
        if self.full.requires_grad != is_trained:
            self.full.requires_grad_(is_trained)
            with torch._C.DisableTorchFunctionSubclass():  # Otherwise the stand-in refuses to be frozen.
                self.stand_in.requires_grad_(is_trained)

    def require_unchanged(self) -> None:
        """Refuse a whole parameter that was changed while it was gathered: no slice would have the change."""
        full = self.full
        if full._version != self._version or full.data_ptr() != self._all_rows.data_ptr():
            full.data = self._all_rows  # Which gathers fill; and later passes are not to refuse this change again.
            self._version = full._version
            raise UsageError(
                f"{self.names[0]} was changed in the forward pass, which is lost when its rows are freed: change the "
                "slices between two steps, or hold what forward() changes in a buffer"
            )

    def gather_whole(self, rows_of_rank: Tensor | None = None) -> Tensor:
        """Return all rows in new memory: of the shard, or of a tensor cut like it. Every rank must call it."""
        rows_of_rank = self.shard.detach() if rows_of_rank is None else rows_of_rank
        row_count, rank = rows_per_rank(self.shape[0], self.group.size()), self.group.rank()
        padded = rows_of_rank.new_zeros((self.group.size() * row_count, *self.shape[1:]))
        padded[rank * row_count :][: len(self.rows)] = rows_of_rank
        gather = SliceGather([padded.view(-1)], self.names[0], self.group)
        gather.start()
        gather.wait()
        return padded[: self.shape[0]]

    def take_gradient(self) -> Tensor | None:
        """Remove and return the whole gradient that autograd has left in ``full``; None if there is none."""
        gradient, self.full.grad = self.full.grad, None
        if gradient is not None:
            require_averageable(self.names[0], gradient, self.gathered_dtype)
        return gradient

    def keep_gradient(self) -> None:
        """Add the gradient of this backward pass to those kept."""
        gradient = self.take_gradient()
        self._drop_zeroed()  # The program may have dropped or zeroed those kept.
        if gradient is None:
            return
        if self.kept is None:
            self.kept = in_own_memory(gradient.to(self.shard.dtype))  # Later ones are added to it in place.
        else:
            self.kept.add_(gradient)
        if self.shard.grad is None:
            # The shard shows its rows, so that whoever drops gradients drops those kept.
            self.shard.grad = self.kept[self.rows.start : self.rows.stop]
            self._shows_kept = True
        self._seen_gradient = self.shard.grad, self.shard.grad._version  # For _drop_zeroed() to compare.

    def take_kept(self) -> Tensor | None:
        """Remove and return the sum of the gradients kept, unless they were dropped or set to zero since."""
        self._drop_zeroed()
        if self._shows_kept:  # The gradient is a view of ``kept``.
            self.shard.grad = None
        kept, self.kept, self._seen_gradient, self._shows_kept = self.kept, None, None, False
        return kept

    @property
    def has_kept(self) -> bool:
        """Return whether there are gradients kept that were not dropped or set to zero since."""
        self._drop_zeroed()
        return self.kept is not None

    def _drop_zeroed(self) -> None:
        """Forget the gradients kept if the gradient of the shard was dropped or set to zero since."""
        if self._seen_gradient is None:
            return
        gradient, version = self._seen_gradient  # Those of the shard when a gradient was last kept.
        if self.shard.grad is gradient and gradient._version == version:
            return
        # It was changed. Zeros and None drop what was kept; other values cannot be carried over to it.
        if self.shard.grad is not None and (self.shard.grad is not gradient or gradient.any()):
            raise UsageError(
                f"the gradient of {self.names[0]} was changed between backward passes under no_sync() and their "
                "average: scale and clip gradients after finish_gradient_synchronization()"
            )
        if self._shows_kept and self.shard.grad is not None:
            # A view of ``kept``: zeros of its own replace it, so that that memory is freed.
            self.shard.grad = torch.zeros_like(self.shard)
        self.kept, self._seen_gradient, self._shows_kept = None, None, False


def hook_refusal(name: str) -> UsageError:
    """Return the error for a sharded parameter with a hook."""
    return UsageError(
        f"{name} has a hook, which would not be called: backward passes go through whole weights, and it would be on a "
        "slice; remove it, and register hooks on modules or on what they return"
    )
