"""Fully sharded data parallel training: each rank holds a slice of the weights, gradients and optimizer state.

Sources: CS336 assignment 2 (2026), section 7; Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (2020), stage 3; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"
(2023).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrize

from cs336sys.errors import UsageError
from cs336sys.machine.late_imports import importing_no_compiler
from cs336sys.parallel import rank_consistency
from cs336sys.parallel.buckets import GradientBucket, divide_into_buckets
from cs336sys.parallel.checkpoint_state import StateDictOfSlices, by_first_name, mark_share
from cs336sys.parallel.collectives import group_device, process_group, require_float, require_process_group
from cs336sys.parallel.fsdp.calls import UnitCall, compute_in_own_dtype
from cs336sys.parallel.fsdp.gather_order import GatherWatch
from cs336sys.parallel.fsdp.parameter import (
    PlannedParameter,
    ShardedParameter,
    ShardingPlan,
    hook_refusal,
    plan_sharding,
)
from cs336sys.parallel.fsdp.runner import UnitRunner
from cs336sys.parallel.fsdp.unit import ShardedUnit
from cs336sys.parallel.gradient_memory import require_own_gradient_dtype
from cs336sys.parallel.gradient_slices import clip_over_ranks, mark_unfinished
from cs336sys.parallel.wrapped_modules import HeldParameters, require_module, require_unsynchronized, require_unwrapped


class FSDP(StateDictOfSlices):
    """Shards the layers of a module and trains it on all ranks.

    ``Linear``, ``Embedding`` and every other layer that owns a parameter of two or more dimensions are cut along the
    first dimension into one slice per rank; norms and the like are replicated. A training step is::

        loss_function(sharded(inputs), targets).backward()
        sharded.finish_gradient_synchronization()
        optimizer.step()

    If the loss is a mean and all ranks have equal shares of the batch, the result is that of one process.

    - Build the optimizer after wrapping, over ``sharded.parameters()``. These are slices in the dtype that the module
      had (rank r of W holds rows ``r * n`` to ``(r + 1) * n``, ``n = ceil(rows / W)``, so possibly none) and the
      replicated parameters. Any optimizer works that updates each element by itself, as AdamW and SGD do; in its
      first step, the first eight steps of its class on a small matrix are tried for that.
    - Every rank must run the same units in the same order. A unit may use different parameters on each rank: where
      only some ranks have a gradient, the others count as zero; where none has, ``grad`` stays None. (If this rank
      lacks a gradient, finding out whether another rank has it makes the CPU wait for the GPU.)
    - In the forward pass a weight can be used anywhere in the module. Outside of its layer's call, as in
      ``x @ self.embedding.weight.T``, it is gathered, and its unit keeps its memory until the backward pass ends.
      Outside of forward and backward passes the module holds slices, and a gradient of one is refused. So are changes
      of weights in the forward pass (``.data.copy_()`` is not seen).
    - A loss may use what a unit returns, keeps as an attribute or buffer of a module in it, or puts into an argument (a
      tensor, also in place, or tensors in lists, tuples, dictionaries and dataclasses), and nothing else.
    - Parameters may be frozen and unfrozen again between steps, as GANs do. Parameters that were added, removed,
      replaced or tied, or were frozen when the module was wrapped and are trained now, are refused until
      :meth:`refresh`. Attributes of parameters are those of the slices; hooks on sharded parameters are refused.
    - A method of the module other than ``forward()`` may call its layers, but a weight that it uses itself is a slice:
      let ``forward()`` call the method, or compute with :meth:`gather_full_params`.
    - Optimizer steps belong after the backward pass: slices that have changed since the forward pass are refused (a
      change through ``.data`` is not seen). Between two steps any change counts.
    - Backward passes with ``create_graph=True`` (gradient penalties) are refused.
    - Activation checkpointing must have ``use_reentrant=False``. Compile blocks (``block.compile()``), before or after
      wrapping: gathering stays outside the compiled code.
    - Several backward passes may run before :meth:`finish_gradient_synchronization`: their gradients add up; under
      :meth:`no_sync` without communication, but then every rank holds whole gradients.
    - Scale the loss for fp16 by a :class:`~cs336sys.parallel.gradient_slices.ShardedGradScaler`; others are refused.
    - If a step raises on all ranks alike, the next forward pass discards it; drop the gradients that it has added.

    Attributes:
        module: the wrapped module. But for forward and backward passes it holds slices; calling it is calling this.
        units: the groups of parameters that are gathered and freed together.
        group: the ranks that share the batch and hold the slices.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        prefetch: int = 1,
        keep_gathered: int = 0,
        gradient_dtype: torch.dtype | None = None,
        unit_modules: Iterable[nn.Module] | None = None,
        initialize: Callable[[nn.Module], None] | None = None,
        device: torch.device | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
    ):
        """Wrap ``module`` on every rank of a group. All start with rank 0's values; buffers are not synchronized again.

        Args:
            module: anything with parameters. If it does not fit on one device, make it under
                ``with torch.device("meta")``.
            compute_dtype: floating-point weights of sharded layers are gathered and used in this dtype, and
                floating-point inputs of units are cast to it; None leaves both in their own. Slices, their gradients
                and replicated parameters always keep their own dtype.
            prefetch: how many units to gather ahead of use.
            keep_gathered: how many units besides the last stay gathered from the forward pass until the backward pass
                has come through them, the last in the order of ``module.modules()``: each saves an all-gather and
                costs its memory. As many as there are is ``reshard_after_forward=False`` of torch's ``fully_shard``.
            gradient_dtype: dtype in which gradients are sent; None sends them in the dtype they were computed in.
                Gradients in half precision are summed in the dtype of the slices either way.
            unit_modules: modules to gather as a whole, instead of those in an ``nn.ModuleList``.
            initialize: fills the parameters and buffers of one module on the meta device, without its children; it is
                called for each such module in the order of ``module.modules()``, and draws the same random numbers as
                a module that initializes itself in this order. None calls ``reset_parameters()``.
            device: where to train; None: where parameters are, and those on the meta device where the group sends from.
            group: the ranks that share the batch: a process group, or one dimension of a mesh; None takes all ranks.

        Raises:
            UsageError: there is no process group; it is no module, or wrapped already; an argument is out of range; a
                parameter has a ``grad_dtype`` of its own, or modules or settings differ between ranks (raised on every
                rank, naming the first difference); a module on the meta device cannot be initialized.
        """
        super().__init__()
        require_process_group(type(self).__name__)
        require_module(module)
        require_float("compute_dtype", compute_dtype)
        require_float("gradient_dtype", gradient_dtype)
        for name, count in {"prefetch": prefetch, "keep_gathered": keep_gathered}.items():
            if not (hasattr(count, "__index__") and count >= 0):  # numpy's are whole numbers, too.
                raise UsageError(f"{name} {count}: must be a whole number, at least 0")
        if not isinstance(unit_modules, Iterable | None):
            raise UsageError(f"unit_modules {unit_modules!r}: must be modules in a list, or None")
        self._unit_modules = None if unit_modules is None else list(unit_modules)  # A generator gives them once.
        for part in self._unit_modules or ():
            if part not in set(module.modules()):
                raise UsageError(f"unit_modules: {part!r} is not in the wrapped module; choose from its modules()")
        self.module = module
        # Of the default process group, to notice in later passes that it is another one.
        self._rank_and_world_size = (dist.get_rank(), dist.get_world_size())
        self.group = process_group(group)
        self._gradient_dtype = gradient_dtype
        self._compute_dtype = compute_dtype
        self._settings = f"FSDP with {compute_dtype=}, {prefetch=}, {keep_gathered=}, {gradient_dtype=}"
        self._initialize, self._device = initialize, None if device is None else torch.device(device)
        self._runner = UnitRunner(prefetch, keep_gathered, self.group)
        self.units: tuple[ShardedUnit, ...] = ()
        self._plan = ShardingPlan(units=[], replicated=[])
        self._calls: list[UnitCall] = []
        self._known_modules: frozenset[nn.Module] = frozenset()
        self._shard()

    @importing_no_compiler
    @torch._disable_dynamo  # Gathering stays outside of compiled code.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module.

        Raises:
            UsageError: the process group is not that of the construction any more; the module holds other parameters
                than those that were wrapped, or one has a hook, and :meth:`refresh` was not called; the module was
                compiled as a whole; a weight was changed, or is returned.
        """
        # Modules around units. The whole module is one of them: its "compiled call" is our UnitCall, which gathers.
        for part in self._around_units:
            if part._compiled_call_impl not in (None, self._root_call):
                raise UsageError(
                    f"{type(part).__name__} is compiled as a whole, which leaves no place to gather its parts: "
                    "compile its blocks"
                )
        if torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise UsageError(
                "FSDP cannot see the backward pass of a function that torch.func transforms (vmap, jvp, grad): call it "
                "under torch.no_grad(), or transform a module of DDP or a ShardedOptimizer"
            )
        for call in self._calls:
            call.install()  # Again, as some modules may have been compiled since.
        return self.module(*args, **kwargs)

    @property
    def sharded_parameters(self) -> dict[str, ShardedParameter]:
        """Return the parameters that are cut, by their first names in the wrapped module."""
        return {parameter.names[0]: parameter for unit in self.units for parameter in unit.parameters}

    @property
    def replicated_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that every rank holds whole, by their first names in the wrapped module."""
        return {entry.names[0]: entry.held for entry in self._plan.replicated}

    def finish_gradient_synchronization(self) -> None:
        """Make every gradient the mean over ranks. Every rank must call it between backward pass and optimizer step.

        Optimizers refuse to step slices before. On a GPU the wait is only queued; the CPU does not block, unless this
        rank lacks gradients (see above).

        Raises:
            UsageError: the module holds other parameters than those that were wrapped, and :meth:`refresh` was not
                called; a slice has a hook; a gradient came after its unit was left.
        """
        self._require_as_wrapped()
        self._runner.finish()

    def wait_for_gathers(self) -> None:
        """Let the current stream wait for weights gathered ahead, which a CUDA graph must not leave to a later one."""
        for unit in self.units:
            unit.wait()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context, backward passes keep whole gradients on this rank, in the dtype of the slices.

        This is for gradient accumulation with less communication: run all passes of a step but the last in it. What
        they have kept is averaged together with the last pass. Until then ``grad`` of a slice shows this rank's rows of
        it, and who sets that to None or zero discards it on this rank.
        """
        return self._runner.no_sync()

    @contextlib.contextmanager
    def watched_gathers(self) -> Iterator[GatherWatch]:
        """Within this context, record for every gather whether the weights arrived before they were needed."""
        self._runner.watch = GatherWatch()
        try:
            yield self._runner.watch
        finally:
            self._runner.watch = None

    def refresh(self) -> None:
        """Take note of parameters that were added, removed, replaced, tied, untied, frozen or unfrozen.

        New ones get rank 0's values, and are cut if a wrapped module's would be: add them to the optimizer afterwards,
        from :meth:`parameters`. Slices that stay are the same objects. Every rank must call this, between two steps;
        frozen parameters, which are averaged as zeros until then, cost nothing any more.

        Raises:
            UsageError: on every rank: they were not changed alike; gradients kept under :meth:`no_sync` are waiting; a
                parameter that was replicated would be cut now, or the other way round; a new one has a slice's shape.
        """
        self._shard()

    def held_parameters(self) -> dict[str, tuple[nn.Parameter, ShardedParameter | None]]:
        """Return what the wrapped module holds now, by each of its names: this rank's slice, and what it is a slice of.

        Replicated parameters are slices of nothing.

        Raises:
            UsageError: the module computes, or a parameter was added or replaced after it was wrapped.
        """
        slices = {parameter.shard: parameter for parameter in self.sharded_parameters.values()}
        uses = (use for entry in self._plan.replicated for use in entry.owners)
        replicated = {owner._parameters.get(attribute) for owner, attribute in uses}
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            if parameter not in slices and parameter not in replicated:
                raise UsageError(
                    f"{name} is not what was wrapped: save and load between two steps, and call refresh() on every "
                    "rank after adding or replacing parameters"
                )
        return {name: (parameter, slices.get(parameter)) for name, parameter in parameters.items()}

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Return whole copies of all parameters by their first names in the wrapped module: a tied one once.

        They have the dtype of the slices. Every rank must call it, between two steps, and needs memory for all of them.
        Errors are those of :meth:`held_parameters`.
        """
        return {
            name: parameter.detach().clone() if sharded is None else sharded.gather_whole()
            for name, (parameter, sharded) in by_first_name(self.held_parameters()).items()
        }

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that the norm of the whole gradient is at most ``max_norm``.

        Every rank must call it, after :meth:`finish_gradient_synchronization`.

        Returns:
            the norm before, the same scalar on every rank; NaN or infinite if any gradient on any rank is.

        Raises:
            UsageError: tensor parallel ranks have parts of the gradients that this module has not, or ``norm_type`` is
                not positive.
            RuntimeError: with ``error_if_nonfinite``, if the norm is not finite: on every rank, before any gradient was
                scaled.
        """
        if any(parameter.is_part_of_more for parameter in self.sharded_parameters.values()):
            raise UsageError(
                "other ranks have other parts of these layers, whose gradients count, too: "
                "call clip_grad_norm_(max_norm, sharded=...) of the TensorParallel module"
            )
        sharded = [parameter.shard for parameter in self.sharded_parameters.values()]
        replicated = list(self.replicated_parameters.values())
        return clip_over_ranks(
            sharded, replicated, max_norm, norm_type, [self.group], error_if_nonfinite=error_if_nonfinite
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the wrapped module, without a prefix: this rank's slices, as DTensors.

        ``torch.distributed.checkpoint`` saves and loads it, for any number of ranks. For a checkpoint with the
        optimizer's state, see :mod:`cs336sys.parallel.fsdp.checkpoint`.

        Raises:
            UsageError: as :meth:`held_parameters`, and for slices of tensor parallel parts.
        """
        self.held_parameters()
        return super().state_dict(*args, **kwargs)

    def _require_slices(self) -> None:
        self.held_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDP":
        # A script may move a module around this one to where it is already.
        if all(fn(tensor) is tensor for tensor in (*self.module.parameters(), *self.module.buffers())):
            return self
        raise UsageError("an FSDP module cannot be moved or converted: do it before it is wrapped")

    def __getstate__(self) -> None:
        raise UsageError("an FSDP module cannot be copied or pickled: gather its parameters, or save a checkpoint")

    def _begin_forward(self) -> None:
        """Refuse a forward pass in another process group, of a changed module, or with weights of an earlier pass."""
        if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != self._rank_and_world_size:
            raise UsageError("this FSDP module was built in another process group: its slices are useless in this one")
        self._require_as_wrapped()
        # The keys of torch's cache are ids of modules and names of weights.
        cached_ids = {module_id for module_id, _ in parametrize._cache}
        if cached_ids and not cached_ids.isdisjoint(map(id, self._known_modules)):
            raise UsageError(
                "parametrize.cached() has kept a weight of another forward pass, whose source is freed: enter cached() "
                "anew for each forward pass"
            )

    def _shard(self) -> None:
        """Plan what is in which unit, cut the parameters that are not cut yet, and begin to run these units."""
        for call in self._calls:  # With them the module would be refused as wrapped already.
            call.remove()
        try:
            plan, distributed = self._plan_alike()
        except Exception:
            for call in self._calls:
                call.install()
            raise
        module = self.module
        mark_share(module, type(self).__name__, self.group)  # For state dicts, which then say whose slices they hold.
        sharded = self._distribute(plan, distributed)
        for parameter in sharded.values():
            mark_unfinished(parameter.shard, self._runner.lacks_finish)
        self._plan = plan
        self.units = tuple(
            ShardedUnit(unit, [sharded[entry] for entry in unit.sharded], self._gradient_dtype, self._runner.access)
            for unit in plan.units
        )
        self._runner.run(self.units)  # From now on.
        trained = [(entry.names[0], entry.held) for entry in plan.replicated if entry.held.requires_grad]
        self._runner.replicated = [
            GradientBucket(parameters, self._gradient_dtype, self.group)
            # In the order of the module: a bucket reverses the order in which parameters are given.
            for parameters in divide_into_buckets(trained[::-1], cap_bytes=None)  # One for each dtype and device.
        ]
        self._replace_calls()
        if self._compute_dtype is not None:
            for owner in {owner: None for entry in plan.replicated for owner, _ in entry.owners}:
                if owner not in self._known_modules:  # The others have its hooks already.
                    compute_in_own_dtype(owner, self._compute_dtype)
        self._known_modules = frozenset(module.modules())  # What refresh() finds besides these is new.
        self._held = HeldParameters(module)  # With which later passes compare.

    def _replace_calls(self) -> None:
        """Let the module, and the modules of units, be called through a :class:`.calls.UnitCall` each."""
        module = self.module
        unit_of: dict[nn.Module, ShardedUnit] = {part: unit for unit in self.units for part in unit.modules}
        # The whole module first, with its unit if it is of one.
        self._calls = [
            UnitCall(self._runner, unit, part, self._compute_dtype, self._begin_forward if part is module else None)
            for part, unit in {module: None, **unit_of}.items()
        ]
        self._root_call = self._calls[0]
        self._around_units = [  # forward() refuses to run them compiled.
            part for part in module.modules() if part not in unit_of and not unit_of.keys().isdisjoint(part.modules())
        ]

    def _plan_alike(self) -> tuple[ShardingPlan, dict[PlannedParameter, ShardedParameter | nn.Parameter]]:
        """Plan what the module holds now; return the plan, and the parameters that are cut or replicated already."""
        module, slices = self.module, {id(parameter.shard): parameter for parameter in self.sharded_parameters.values()}
        replicated_before = {id(parameter) for parameter in self.replicated_parameters.values()}
        distributed: dict[PlannedParameter, ShardedParameter | nn.Parameter] = {}
        with rank_consistency.same_on_every_rank(self.group) as lines:
            require_unwrapped(module)
            if any(parameter.has_kept for unit in self.units for parameter in unit.parameters):
                raise UsageError(
                    "backward passes under no_sync() have left gradients to average: call "
                    "finish_gradient_synchronization() before refresh()"
                )
            parameters = list(module.named_parameters())
            rank_consistency.require_sendable(parameters, moves=True)  # _initialize_part() may move them.
            require_unsynchronized((name, parameter) for name, parameter in parameters if id(parameter) not in slices)
            require_own_gradient_dtype(parameters)
            with _shown_whole(module, slices):
                plan = plan_sharding(module, self._unit_modules)
                lines.append(f"{self._settings}, units={[unit.name for unit in plan.units]}")
                lines += rank_consistency.describe_module(module, moves=True)
            cut_by_plan = set(plan.all_sharded)
            for entry in (*plan.all_sharded, *plan.replicated):
                held_id = id(entry.held)
                if held_id in (replicated_before if entry in cut_by_plan else slices):
                    before, after = ("replicated", "cut") if entry in cut_by_plan else ("cut", "replicated")
                    raise UsageError(
                        f"{entry.names[0]} was {before} when it was wrapped, and would be {after} after what was "
                        "changed since, so that optimizers would have the wrong tensor: wrap the plain module anew"
                    )
                if held_id in slices or held_id in replicated_before:
                    distributed[entry] = slices.get(held_id, entry.held)
                elif entry in cut_by_plan:
                    self._require_whole(entry)
        return plan, distributed

    def _distribute(
        self, plan: ShardingPlan, distributed: dict[PlannedParameter, ShardedParameter | nn.Parameter]
    ) -> dict[PlannedParameter, ShardedParameter]:
        """Overwrite new parameters and buffers with rank 0's, and cut the parameters that the plan shards.

        Layers on the meta device get memory and values one at a time: the module never has to fit into memory whole.

        Args:
            distributed: parameters that were distributed before: cut or replicated; the new ones are added.

        Returns:
            all parameters that are cut.
        """
        to_shard = set(plan.all_sharded)
        # By the module that holds it and its attribute there.
        entries = {use: entry for entry in (*plan.all_sharded, *plan.replicated) for use in entry.owners}
        for entry, parameter in distributed.items():
            if isinstance(parameter, ShardedParameter):
                parameter.names, parameter.owners = entry.names, entry.owners
        for name, part in self.module.named_modules():
            if part not in self._known_modules:
                self._initialize_part(part, name)
                rank_consistency.broadcast_from_first(list(part.buffers(recurse=False)), group=self.group)
            for attribute, whole in part._parameters.items():
                if whole is None:
                    continue
                entry = entries[part, attribute]
                if entry not in distributed:
                    rank_consistency.broadcast_from_first([whole], group=self.group)
                    distributed[entry] = whole
                    if entry in to_shard:
                        distributed[entry] = ShardedParameter(entry, whole, self._compute_dtype, self.group)
                # A tied weight stays one parameter, and nothing refers to the whole of a sharded one any longer.
                new = distributed[entry]
                part._parameters[attribute] = new.shard if isinstance(new, ShardedParameter) else new
        return {entry: cut for entry, cut in distributed.items() if isinstance(cut, ShardedParameter)}

    def _initialize_part(self, part: nn.Module, name: str) -> None:
        """Give the part's own meta tensors memory and values, or move its tensors to the device of the constructor."""
        tensors = (*part._parameters.values(), *part._buffers.values())
        if not any(tensor is not None and tensor.is_meta for tensor in tensors):
            if self._device is not None:
                part._apply(lambda tensor: tensor.to(self._device), recurse=False)
            return
        part.to_empty(device=self._device or group_device(), recurse=False)
        if self._initialize is not None:
            self._initialize(part)
        elif callable(reset := getattr(part, "reset_parameters", None)):
            reset()
        elif any(parameter is not None for parameter in part._parameters.values()):
            raise UsageError(
                f"{name or type(part).__name__} is on the meta device and its class {type(part).__name__} has no "
                "reset_parameters(): give FSDP a function to initialize it"
            )

    def _require_as_wrapped(self) -> None:
        self._held.require_unchanged()
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.require_no_hooks()

    def _require_whole(self, entry: PlannedParameter) -> None:
        """Refuse a parameter to cut that may be cut already, or that would lose its hooks."""
        parameter, name = entry.held, entry.names[0]
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise hook_refusal(name)
        # The cut parameters whose place in a module it has taken: it may be a slice of one if it has a slice's shape.
        replaced = [cut for cut in self.sharded_parameters.values() if not set(cut.owners).isdisjoint(entry.owners)]
        if any(parameter.shape == cut.shard.shape != cut.shape for cut in replaced):
            raise UsageError(
                f"{name} was replaced by a tensor of the shape of a slice: copy slices into those that are there, as "
                "load_state_dict() without assign=True does, or assign a whole parameter"
            )
        # Modules that are new are initialized next, and those that were there before are not.
        if parameter.is_meta and any(owner in self._known_modules for owner, _ in entry.owners):
            raise UsageError(f"{name} was replaced by one on the meta device: give it memory and values first")


@contextlib.contextmanager
def _shown_whole(module: nn.Module, cut: Mapping[int, ShardedParameter]) -> Iterator[None]:
    """Within this context, the module holds parameters of whole shapes, without memory, in place of slices."""
    places = [
        (part._parameters, attribute, cut[id(parameter)])
        for part in module.modules()
        for attribute, parameter in part._parameters.items()
        if id(parameter) in cut
    ]
    for parameters_of_part, attribute, parameter in places:
        parameter.follow_freezing()  # Descriptions of the module say whether it is trained.
        parameters_of_part[attribute] = parameter.full
    try:
        yield
    finally:
        for parameters_of_part, attribute, parameter in places:
            parameters_of_part[attribute] = parameter.shard
