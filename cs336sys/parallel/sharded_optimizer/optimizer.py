"""Optimizer-state sharding (ZeRO stage 1): each rank does a share of the optimizer's work and keeps its state.

Sources: CS336 assignment 2, section "Optimizer State Sharding"; Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models" (https://arxiv.org/abs/1910.02054).
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from cs336sys.accounting.sharding.partition import OPTIMIZER_BUCKET_MB
from cs336sys.errors import UsageError
from cs336sys.parallel.buckets import cap_in_bytes
from cs336sys.parallel.collectives import group_device, require_float, require_process_group
from cs336sys.parallel.gradient_slices import options_kind, require_elementwise, require_parameters_apart
from cs336sys.parallel.rank_consistency import broadcast_from_first, describe_module, same_on_every_rank
from cs336sys.parallel.sharded_optimizer import groups as parameter_groups
from cs336sys.parallel.sharded_optimizer.checkpoint import MASTER, check_same_model, gather_states
from cs336sys.parallel.sharded_optimizer.groups import Group
from cs336sys.parallel.sharded_optimizer.local import LocalOptimizer, ParameterPartition, Partition, require_optimizer
from cs336sys.parallel.sharded_optimizer.slices import SlicePartition
from cs336sys.parallel.wrapped_modules import AVERAGES_GRADIENT, HeldParameters, has_marked_hook, require_module


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of any class whose state is sharded over ranks; it is used like the class itself.

    ======================  =============================================  =========================================
    mode                    a rank updates                                 gradients
    ======================  =============================================  =========================================
    default                 whole parameters, of roughly the same total    must be averaged before, for example by
                            size on every rank                             :class:`~cs336sys.parallel.ddp.BucketedDDP`
    ``flat=True``           a slice of every parameter, of equal size      are averaged here: do not wrap the model
    ======================  =============================================  =========================================

    - The result is that of ``optimizer_cls`` in one process. By default this holds for every class that updates each
      parameter by itself; with ``flat=True`` for classes that update each element by itself, which is tested then.
    - Construction, and adding a group, overwrite the parameters with rank 0's, and move them in memory: by default
      those that are sent together; with ``flat=True`` those that do not divide into aligned slices.
    - Every rank must make the same calls: :meth:`step`, :meth:`zero_grad`, :meth:`add_param_group`,
      :meth:`clip_grad_norm_`, :meth:`load_state_dict`, :meth:`consolidated_state_dict`, :meth:`refresh`. Options of
      groups (learning rates) must be the same on every rank: :meth:`step` compares those that were changed.
    - A parameter without a gradient is not updated, as in the class itself. With ``flat=True`` this means one without a
      gradient on all ranks; where only some ranks have one, the others count as zero.
    - Updated parameters are on every rank when :meth:`step` returns or, if ``module`` is given, when the part of the
      module that uses them begins its forward pass.
    - ``state`` holds this rank's share by parameter. Entries that are removed or replaced are taken as they are.

    In addition, with ``flat=True``:

    - Backward passes consume the gradients: ``grad`` of a parameter is None afterwards. Clip with
      :meth:`clip_grad_norm_`. Scale the loss by a :class:`~cs336sys.parallel.gradient_slices.ShardedGradScaler`;
      others are refused.
    - All backward passes of a step but the last must run under :meth:`no_sync`.
    - Between two steps, gradients must be dropped by :meth:`zero_grad`, or by that of the model.

    Attributes:
        updates_slices: ``flat``: it updates slices of parameters, and ranks have different gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        flat: bool = False,
        module: nn.Module | None = None,
        bucket_size_mb: float | None = OPTIMIZER_BUCKET_MB,
        master_dtype: torch.dtype | None = None,
        **options: Any,
    ):
        """Shard an optimizer of ``params``, which must be on the device that they will be trained on.

        Args:
            params: parameters, pairs of name and parameter, or groups, as for any optimizer, in the order of the model.
            optimizer_cls: the class that updates the parameters.
            flat: give each rank slices of parameters, and reduce-scatter the gradients.
            module: the model that is trained: its parts then wait for their parameters themselves, so that these arrive
                while earlier parts compute; see :meth:`overlap_with`. It also gives the order of parameters, and a step
                is refused when its parameters are no longer those that it had, until :meth:`refresh`.
            bucket_size_mb: parameters (and with ``flat=True`` gradients) are communicated in buckets of at most so many
                megabytes (1e6 bytes), unless a bucket holds a single larger one; None puts all into one bucket.
            master_dtype: with ``flat=True``, update copies of the slices in this dtype and round the results to the
                parameters, for example ``torch.float32`` for bf16 parameters. The copies follow weights that are loaded
                or changed in place between steps, but not through ``.data``.
            options: options of ``optimizer_cls``.

        Raises:
            UsageError: on every rank: there is no process group, an argument is invalid, or ranks differ in parameters,
                groups or options (the message names the first difference).
            CapabilityError: ``flat=True`` with parameters on GPUs needs NCCL.
        """
        require_process_group(type(self).__name__)
        self._module = module
        with same_on_every_rank() as lines:
            require_optimizer(optimizer_cls)
            if module is not None:
                require_module(module)
            require_float("master_dtype", master_dtype)
            if master_dtype is not None and not flat:
                raise UsageError(f"master_dtype {master_dtype}: needs flat=True")
            cap_bytes = cap_in_bytes(bucket_size_mb)
            super().__init__(params, {})  # Defaults are those of the class: LocalOptimizer has them, below.
            parameter_groups.check_parameters(self.param_groups, flat=flat)
            self._optimizer_cls, self._options, self.updates_slices = optimizer_cls, options, flat
            # By the kind of options that were checked before, the names of state with one value for a parameter.
            self._scalars_of_kind: dict[Hashable, frozenset[str]] = {}
            self._check_options(self.param_groups)
            settings = f"{flat=}, {bucket_size_mb=}, {master_dtype=}, {parameter_groups.describe_options(options)}"
            lines.append(f"{optimizer_cls.__name__} with {settings}")
            if module is not None:
                for name, parameter in module.named_parameters():
                    parameter_groups.refuse_slice(name, parameter)
            lines += self._describe()
        # With flat=True the partition consists of slices, and cares for gradients and master copies, too.
        self._slices = SlicePartition(cap_bytes, master_dtype) if flat else None
        self._partition: Partition = self._slices or ParameterPartition(cap_bytes)
        self._agreement = parameter_groups.StepAgreement()
        self._addresses: dict[nn.Parameter, int] = {}  # The memory address of each parameter that is sharded.
        self._frozen: list[nn.Parameter] = []  # In the groups, and not sharded.
        # Of the module: a snapshot of its parameters; by id, tensors that have rank 0's values; those in no group.
        self._module_guard: HeldParameters | None = None
        self._equal_tensors: dict[int, Tensor] = {}
        self._outside_groups: list[tuple[str, nn.Parameter]] = []
        self._adopt_module()
        self._shard(self.param_groups)
        with same_on_every_rank():  # The class may refuse what one rank alone updates, as Muon does vectors.
            self._local = LocalOptimizer(optimizer_cls, options, self.param_groups, self._partition)
        self.defaults = self._local.optimizer.defaults
        self._noted_members: list[list[int]] = []  # The parameters of each group at the last step, by id.
        self._link_state()
        self._remember_groups()  # With which the next step compares.
        if module is not None:
            self.overlap_with(module)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as to any optimizer, and shard it. Every rank must call it, between two steps.

        Parameters that were added to ``module`` are taken up, too, as by :meth:`refresh`.

        Raises:
            UsageError: on every rank, if groups differ between ranks or gradients are being averaged.
        """
        if not hasattr(self, "_local"):
            # Called by the base constructor: ours checks and shards all groups together.
            super().add_param_group(param_group)
            return
        count = len(self.param_groups)
        try:
            with same_on_every_rank() as lines:
                if self._slices is not None:
                    self._slices.require_between_steps()
                super().add_param_group(param_group)
                parameter_groups.check_parameters(self.param_groups, flat=self.updates_slices)
                self._local.check_options(self.param_groups[-1])  # Whether the class accepts them,
                self._check_options(self.param_groups[-1:])  # and whether it can be sharded with them.
                lines += self._describe()
                self._adopt_changed_state()
        except Exception:
            del self.param_groups[count:]
            raise
        self._adopt_module()
        self._shard(self.param_groups[count:])
        self._local.add_group(self.param_groups[-1])
        self._remember_groups()

    def refresh(self) -> None:
        """Take up parameters that were unfrozen, put into a group, or added to ``module`` or removed from it.

        Those that are new are overwritten with rank 0's. Every rank must call it, between two steps.

        Raises:
            UsageError: on every rank, if they were not changed alike, gradients are being averaged, a parameter was
                taken out of its group, or one of the module was replaced by one that is in no group.
        """
        with same_on_every_rank() as lines:
            if self._slices is not None:
                self._slices.require_between_steps()
            parameter_groups.check_parameters(self.param_groups, flat=self.updates_slices)
            self._refuse_moved()
            self._refuse_removed()
            lines += self._describe()
            self._adopt_changed_state()
        self._adopt_module()
        self._shard(self.param_groups)
        self._local.take_members(self.param_groups, self._check_options(self.param_groups))
        # take_members() has replaced the states of unfrozen parameters by slices of them: as many as before, and
        # _remember_groups() compares nothing but their number.
        self._link_state()
        self._remember_groups()

    def overlap_with(self, module: nn.Module) -> None:
        """Let :meth:`step` return before updated parameters have arrived; parts of ``module`` wait when they run.

        The parts are the children of the module, or for a container (``ModuleList``, ``ModuleDict``, ``Sequential``)
        its children. Whatever else uses the parameters of a part before its forward pass has begun must call
        :meth:`wait_for_parameters` first, except for ``state_dict()``, which waits for all of them. Parameters that
        belong to no part are waited for in :meth:`step`.
        """
        self._partition.exchange.overlap_with(module)

    def defer_exchange(self) -> None:
        """Let :meth:`step` leave it to :meth:`start_exchange` to send the updated parameters.

        For steps that are timed one by one, and for a step in CUDA graphs, one a phase: each graph must wait for the
        collectives that it launched. Called at the beginning of the forward pass, :meth:`start_exchange` brings
        parameters while earlier parts compute. A replay sends what the one before it has updated.
        """
        self._partition.exchange.is_deferred = True

    def start_exchange(self) -> None:
        """Start to send the parameters that :meth:`step` has updated, after :meth:`defer_exchange`."""
        self._partition.exchange.start_deferred()

    def wait_for_parameters(self) -> None:
        """Return when all parameters may be used: on a GPU, by work queued on the current stream after this."""
        self._partition.exchange.wait()

    def no_sync(self) -> AbstractContextManager[None]:
        """With ``flat=True``, backward passes within this context accumulate gradients on this rank only.

        This is for gradient accumulation: run all passes of a step but the last in it. The last averages all of them.
        """
        return self._require_slices("no_sync").synchronizer.no_sync()

    def finish_gradient_synchronization(self) -> None:
        """With ``flat=True``, complete the averages of the gradients now; otherwise :meth:`step` does so."""
        slices = self._require_slices("finish_gradient_synchronization")
        # Gradients can be late only after others were complete; that is the same on every rank, so all compare or none.
        if slices.synchronizer.is_complete:
            with self._agreement.compared(is_step=False):
                slices.require_no_late_gradients()
        slices.prepare_gradients()

    @property
    def own_tensors(self) -> Sequence[Tensor]:
        """Return what this rank updates: parameters or, with ``flat=True``, slices or their master copies, (n,) each.

        Their ``grad`` holds this rank's averaged gradients once these are complete.
        """
        frozen = set(self._frozen)
        return [tensor for tensor in self._local.tensors if tensor not in frozen]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients so that the norm of all of them together is at most ``max_norm``.

        Returns:
            the norm before, (), the same on every rank; not finite if any gradient is not, so that all can skip a step.

        Raises:
            UsageError: on every rank, as :meth:`step`, where parameters were moved, unfrozen, added or replaced: the
                norm would lack their gradients.
        """
        if self._slices is not None:  # Before the context, as in step().
            self._slices.prepare_gradients()
        with self._agreement.compared(is_step=False):
            if self._slices is not None:
                self._slices.require_no_late_gradients()
            self._check_parameters()
        return self._partition.clip_grad_norm(max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. With ``flat=True``, every rank must call it; one that had no backward pass, too.

        Raises:
            UsageError: with ``flat=True``, gradients are being averaged that came after ``zero_grad()`` of a module.
        """
        if self._slices is not None:
            self._slices.drop_gradients(set_to_none)
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's share, and start to send it to the other ranks.

        Args:
            closure: computes the loss and the gradients anew. It is called once, before the update, on every rank.
            kwargs: arguments of the class's ``step``.

        Returns:
            what the closure returned.

        Raises:
            UsageError: on every rank (if they are on GPUs, on others one step late): a gradient is sparse; parameters
                were moved or, without :meth:`refresh`, unfrozen, added or replaced; options of groups were changed
                differently on another rank, or so that the class cannot be sharded; or, with ``flat=True``,
                gradients of the last step were not dropped.
            RuntimeError: another rank died or timed out; a note names the parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._slices is not None:  # Before the context: where a rank refuses, it would compare while others average.
            self._slices.prepare_gradients()
        # At the end of this context, ranks compare the lines; an error within it is raised on every rank.
        with self._agreement.compared() as lines_of_rank, torch.no_grad():
            if self._slices is not None:
                self._slices.require_no_late_gradients()
            self._partition.prepare_update()
            self._check_parameters()
            lines_of_rank += self._changed_options()
            self._adopt_changed_state()
        self._partition.exchange.wait()  # Parameters that the last step sent may still be under way.
        try:
            self._local.step(self.param_groups, kwargs)
        finally:
            # Also if the class raises, perhaps only on ranks that update something: the others wait in collectives.
            with torch.no_grad():
                self._partition.publish()
        self._remember_groups()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's share of the state, to be loaded on the same rank of equally many ranks.

        Nothing is communicated. The state has the form of any optimizer's; with ``flat=True`` tensors are slices, (n,).
        ``share`` says whose it is.
        """
        self._adopt_changed_state()
        states_of_rank = self._local.own_states(self._parameters).items()
        states = {index: state for index, (_, state) in states_of_rank if state}
        return {**super().state_dict(), "state": states, "share": self._share()}

    def consolidated_state_dict(self) -> dict[str, Any] | None:
        """Return the whole state on rank 0, in CPU memory; None on other ranks. Every rank must call it.

        It is the state that ``optimizer_cls`` has in one process. It can be loaded by that class, and by sharded
        optimizers on any number of ranks and in either mode. ``parameters`` lists names and shapes; a master copy is in
        the state of its parameter as ``master_parameter``.
        """
        with same_on_every_rank():
            self._adopt_changed_state()
        parameters = self._parameters
        # Every rank has the whole state of frozen parameters, if there is any: rank 0's is taken.
        states_of_rank = {
            index: (elements, state)
            for index, (elements, state) in self._local.own_states(parameters).items()
            if parameters[index] in self._addresses or (state and dist.get_rank() == 0)
        }
        states = gather_states(states_of_rank, parameters, sliced=self.updates_slices)
        if states is None:
            return None
        named = zip(parameter_groups.given_names(self.param_groups), parameters, strict=True)
        return {
            "state": states,
            "param_groups": super().state_dict()["param_groups"],
            "parameters": [{"name": name, "shape": tuple(parameter.shape)} for name, parameter in named],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's :meth:`state_dict`, or a whole state: consolidated, or that of an optimizer in one process.

        Every rank must call it. Load the model's parameters first: master copies that the state lacks are made of them.

        Raises:
            UsageError: on every rank, before anything is loaded: the state is that of another model, it is another
                rank's share, or options differ between ranks.
        """
        with same_on_every_rank() as lines:
            # The hooks of torch's optimizers, whose load_state_dict() is not called.
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = hook(self, state_dict) or state_dict
            check_same_model(state_dict, self.param_groups)
            scalar_keys = self._check_options(state_dict["param_groups"])
            states = self._local.own_states_in(state_dict, self._share(), self.param_groups, scalar_keys)
            options = map(parameter_groups.options_of, state_dict["param_groups"])
            lines += map(parameter_groups.describe_options, options)
        with torch.no_grad():
            self._local.load(states, state_dict["param_groups"], self.param_groups)
            if self._slices is not None:
                parameters = self._parameters
                masters = {parameters[index]: state[MASTER] for index, state in states.items() if MASTER in state}
                self._slices.load_masters(masters)
        self._link_state()
        self._remember_groups()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> NoReturn:
        raise UsageError("a sharded optimizer cannot be copied or pickled: choose consolidated_state_dict()")

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return parameter_groups.parameters_of(self.param_groups)

    def _shard(self, groups: list[Group]) -> None:
        """Shard the parameters of these groups that are trained and have not been sharded before."""
        added = set(parameter_groups.parameters_of(groups)) - self._addresses.keys()  # Sharded parameters have one.
        in_order = parameter_groups.in_model_order(self.param_groups, self._module).items()
        new = {name: parameter for name, parameter in in_order if parameter in added}
        broadcast_from_first(list(new.values()))
        trained = {name: parameter for name, parameter in new.items() if parameter.requires_grad}
        self._partition.adopt(trained)
        self._addresses |= {parameter: parameter.data_ptr() for parameter in trained.values()}
        self._frozen = [parameter for parameter in self._parameters if parameter not in self._addresses]

    def _adopt_module(self) -> None:
        """Overwrite what the module has and did not have before with rank 0's, and take note of its parameters."""
        if self._module is None:
            return
        tensors = [*self._module.parameters(), *self._module.buffers()]
        in_groups = set(self._parameters)
        # Those in groups are sent by _shard().
        new = [tensor for tensor in tensors if id(tensor) not in self._equal_tensors and tensor not in in_groups]
        broadcast_from_first(new)
        self._equal_tensors = {id(tensor): tensor for tensor in tensors}  # Kept alive, so that no other gets their ids.
        # Parts that were added get hooks; the constructor calls it for the first ones when everything else is done.
        if self._module_guard is not None:
            self._partition.exchange.overlap_with(self._module)
        self._module_guard = HeldParameters(self._module)
        self._noted_module_parameters = dict(self._module.named_parameters(remove_duplicate=False))
        named_parameters = self._module.named_parameters()
        self._outside_groups = [(name, parameter) for name, parameter in named_parameters if parameter not in in_groups]

    def _describe(self) -> list[str]:
        """Return lines that are equal on two ranks if their groups and modules are."""
        lines = parameter_groups.describe_groups(self.param_groups)
        return lines if self._module is None else lines + describe_module(self._module)

    def _check_parameters(self) -> None:
        """Refuse parameters that were moved, unfrozen, added, removed or replaced, or that nothing averages."""
        if self._member_ids() != self._noted_members:
            self._refuse_removed()
            raise UsageError("parameters were put into a group after it was sharded: call refresh() on every rank")
        self._refuse_moved()
        if self._module_guard is not None:
            self._module_guard.require_unchanged()
        # Without slices, a data parallel wrapper averages all gradients of the module.
        if self._slices is not None:
            for name, parameter in self._outside_groups:
                is_trained = parameter.grad is not None and parameter._version != self._versions.get(name)
                if is_trained and not has_marked_hook(parameter, AVERAGES_GRADIENT):
                    raise UsageError(
                        f"{name} of the module is in no group and was changed, by a gradient that nothing averages "
                        "over ranks: add it to a group, or shard its optimizer, too"
                    )
        for parameter in self._frozen:
            name = self._noted_names[parameter]
            if parameter.requires_grad:
                raise UsageError(f"{name} was unfrozen after it was sharded: call refresh() on every rank")
            if parameter.grad is not None:
                raise UsageError(
                    f"{name} is frozen and has a gradient, which an optimizer of one process would use and nothing "
                    "averages over ranks: set it to None"
                )

    def _refuse_moved(self) -> None:
        """Refuse parameters whose memory is no longer that from which buckets and slices are sent."""
        for parameter, address in self._addresses.items():
            if parameter.data_ptr() != address:
                name = self._noted_names[parameter]
                raise UsageError(
                    f"{name} was moved or converted after it was sharded: build the optimizer after changing the model"
                )

    def _refuse_removed(self) -> None:
        """Refuse parameters taken out of their group, or replaced in the module, since :meth:`_remember_groups`."""
        in_groups = set(self._parameters)
        for parameter, name in self._noted_names.items():
            if parameter not in in_groups:
                raise UsageError(
                    f"{name} was taken out of its group after it was sharded: freeze it by requires_grad_(False), or "
                    "build the optimizer anew"
                )
        if len(self.param_groups) != len(self._noted_members):
            raise UsageError("groups were changed after they were sharded: call add_param_group()")
        if self._module is None:
            return
        now = dict(self._module.named_parameters(remove_duplicate=False))
        for name, parameter in self._noted_module_parameters.items():
            replacement = now.get(name, parameter)
            if replacement is not parameter and parameter in in_groups and replacement not in in_groups:
                raise UsageError(
                    f"{name} was replaced in the module by a parameter that is in no group: build the optimizer anew"
                )

    def _changed_options(self) -> list[str]:
        """Check options of groups that were changed since the last step; return a line for each such group."""
        lines = []
        for number, (group, noted) in enumerate(zip(self.param_groups, self._noted_options, strict=True)):
            now = parameter_groups.options_now(group)
            changed = {key: now.get(key, "gone") for key in {*now, *noted} if now.get(key) != noted.get(key)}
            if changed:
                self._check_options([group])  # They may make the class update otherwise than element by element.
                lines.append(f"group {number} with {parameter_groups.describe_options(changed)}")
        return lines

    def _check_options(self, groups: list[Group]) -> frozenset[str]:
        """Refuse options with which the class cannot be sharded, once for each kind.

        Returns:
            with ``flat``, the keys of state that has one value for a whole parameter.
        """
        scalars: frozenset[str] = frozenset()
        require = require_elementwise if self.updates_slices else require_parameters_apart
        for options in map(parameter_groups.options_of, groups):
            max_norm = {**self._options, **options}.get("max_grad_norm")
            if max_norm is not None:
                raise UsageError(
                    f"max_grad_norm {max_norm} would clip by the norm of this rank's share: leave it out, and call "
                    "clip_grad_norm_() of the sharded optimizer before step()"
                )
            kind = options_kind(options)
            if kind not in self._scalars_of_kind:
                self._scalars_of_kind[kind] = require(self._optimizer_cls, self._options, group_device(), options)
            scalars |= self._scalars_of_kind[kind]
        return scalars

    def _require_slices(self, method: str) -> SlicePartition:
        if self._slices is None:
            raise UsageError(f"{method}() needs flat=True; otherwise call {method}() of the data parallel wrapper")
        return self._slices

    def _member_ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.param_groups]

    def _remember_groups(self) -> None:
        """Note what users may change: options, members and tensors outside of groups; link state that was added."""
        if len(self._local.optimizer.state) != len(self.state):
            self._link_state()
        self._noted_options = list(map(parameter_groups.options_now, self.param_groups))
        self._versions = {name: parameter._version for name, parameter in self._outside_groups}
        if self._member_ids() != self._noted_members:
            self._noted_members = self._member_ids()
            self._noted_names = dict(zip(self._parameters, parameter_groups.names_of(self.param_groups), strict=True))

    def _adopt_changed_state(self) -> None:
        """Let the local optimizer keep what users have made of ``state``."""
        if _identities(self.state) != self._linked_state:
            self._local.take_state(self.state, self._noted_names)
            self._link_state()

    def _link_state(self) -> None:
        """Let ``state`` show the state that the local optimizer keeps, by parameter, and note which entries it has."""
        self.state = defaultdict(dict, self._local.state_of(self._parameters))
        self._linked_state = _identities(self.state)

    def _share(self) -> dict[str, Any]:
        """Describe what this rank updates: a state dict of the same share can be loaded without communication."""
        # Every rank has the whole state of frozen parameters, which makes no difference to the share.
        owned = self._partition.owned
        ranges = [owned(parameter) if parameter in self._addresses else range(0) for parameter in self._parameters]
        return {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "flat": self.updates_slices,
            "owned": [(elements.start, elements.stop) for elements in ranges],
        }


def _identities(state: Mapping[Any, Any]) -> list[int]:
    """Identify entries: the result changes when some are added, removed or replaced, not when their content changes."""
    return [*map(id, state), *map(id, state.values())]
