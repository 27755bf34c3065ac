"""The steps of a program on a rank, or in one process: the same but for the wrap and what only ranks do."""

import contextlib
import functools
import math
import operator
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from cs336sys.commands.verify.wraps import Wrapped, wrap
from cs336sys.errors import CapabilityError, UserCodeError, a_value
from cs336sys.parallel.fsdp.calls import cast_floating
from cs336sys.parity import optimizers
from cs336sys.parity import record as recording
from cs336sys.parity import subject as subjects
from cs336sys.parity.collectives import OBSERVED, CollectiveWatcher
from cs336sys.settings.user_code import is_user_code, source_file
from cs336sys.settings.verification import SAVED_AFTER, Program, Share, VerifiedWorkload
from cs336sys.training import user_models

_MOST_ELEMENTS = 2e7  # Of all steps together, to be compared after every step; of more, after the first and the last.

_OTHER_SEED = 1000  # How far apart the seeds are of ranks with different weights, and of models that are loaded into.


@dataclass(frozen=True)
class Training:
    """Training of a workload's programs, on ranks and in one process."""

    workload: VerifiedWorkload
    device: torch.device
    dtype: torch.dtype
    learning_rate: float = 0.0  # Of the default optimizer, where ``optimizer`` is None.
    max_norm: float = math.inf  # Of gradients, where a program clips.
    optimizer: optimizers.OptimizerSpec | None = None  # The wrap's, to be built in one process.

    def columns(self) -> dict[str, object]:
        """Return how one process trains, as derived columns of a cell."""
        return {"reference_dtype": str(self.dtype).removeprefix("torch."), "learning_rate": self.learning_rate}


@functools.lru_cache(maxsize=1)
def _mesh_of_ranks(world: Any, device_type: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh of all ranks. Its groups are made once for each ``world``, the default process group."""
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


@dataclass
class ProgramRun:
    """A program, run on this rank or in one process.

    Attributes:
        record, report: filled as the program goes on.
        parameters, buffers: by their names in the model; ``shapes`` of the model's parameters, uncut.
        parameter_names: by the identity of the parameter.
    """

    training: Training
    program: Program
    on_ranks: bool = False  # Wrap the model, and train on this rank's shares of each batch.
    watch: bool = False  # Record collectives and the outputs of modules.
    folder: str = ""  # Where to save.
    saved_ranks: int = 0  # How many others have saved there what these ranks load; 0: train from the start.
    step_shares: Sequence[Share] = ()  # That a step trains on, one after another; without any, this rank's.
    keeps_tensors: bool = True  # Record tensors, not losses alone.
    copies_dtype: torch.dtype | None = None  # Call the model with copies of weights and inputs in this dtype.

    def __post_init__(self) -> None:
        self.workload, self.device, self.dtype = self.training.workload, self.training.device, self.training.dtype
        self.record = recording.Record()
        self.report = recording.RankReport(self.record)
        self.rank = self.data_rank = self.context_rank = 0
        # Losses weighted by shares of the batch are to be summed over data ranks and averaged over context ranks, each
        # with its own tokens. A wrap that takes a mean over all divides by data ranks, too; one that sums, by neither.
        self._loss_factor = 1.0
        sizes = self.workload.dimensions
        if self.on_ranks:
            self.mesh = _mesh_of_ranks(dist.group.WORLD, self.device.type, tuple(sizes), tuple(sizes.values()))
            self.rank = dist.get_rank()
            place = dict(zip(sizes, self.mesh.get_coordinate() or (), strict=True))
            self.data_rank, self.context_rank = place.get("data", 0), place.get("context", 0)
            sums = self.workload.gradients == "sum"
            self._loss_factor = 1 / sizes.get("context", 1) if sums else sizes.get("data", 1)
        self.step_shares = self.step_shares or self.shares(self.program.micro_batches)
        self.user_files = [source_file(self.workload.wrap)] if is_user_code(self.workload.wrap) else []
        self.watcher = CollectiveWatcher(self.user_files, is_late=self.program.late_rank == self.rank)

    def shares(self, micro_batches: int) -> list[Share]:
        """Return the micro-batches of a batch that this rank trains on; in one process those of all ranks."""
        shares = self.workload.shares(self.program, micro_batches)
        return [share for share in shares if not self.on_ranks or share.data_rank == self.data_rank]

    def prepare(self, seed_shift: int = 0) -> None:
        """Build the model with the seed and ``seed_shift``, wrap it on a rank, and find what a step needs."""
        workload, learning_rate = self.workload, self.training.learning_rate
        self.watcher.phase = "wrap"
        self.subject = subjects.build_subject(workload, self.program, self.device, self.dtype, seed_shift)
        model = self.subject.model
        # They live until the wrapped ones are named: an identity is unique among living objects.
        plain_parameters = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in plain_parameters.items()}
        buffer_names = [name for name, _ in model.named_buffers()]
        self._outputs = recording.captured_outputs(model, self.record.outputs) if self.watch else nullcontext()
        self.wrapped = Wrapped(owner=None, module=model)  # In one process.
        if self.on_ranks:
            torch.manual_seed(workload.training.seed + _OTHER_SEED * self.data_rank)  # Other masks of other sequences.
            # Alike on all ranks: user code may decide by it which layers run.
            random.seed(workload.training.seed)
            self.wrapped = wrap(workload, model, self.mesh, learning_rate)
        module = self.wrapped.module
        with user_models.telling_errors_of(workload.wrap) if is_user_code(workload.wrap) else nullcontext():
            parameters = list(module.parameters())
            self.optimizer = self.wrapped.optimizer or optimizers.default_optimizer(parameters, learning_rate)
        self._name_tensors(module, plain_parameters, buffer_names)
        if self.training.optimizer is not None:
            self.optimizer = self.training.optimizer.build(self.parameters)  # One process has no wrap's.
        # A power of two rounds nothing: one process has the same gradients without. A scale grows after 10**6 steps.
        scales = self.on_ranks and self.program.scales
        self.scaler = self.wrapped.scaler_class(
            self.device.type, init_scale=1024.0, growth_interval=10**6, enabled=scales
        )
        self._report_wrap()

    def _name_tensors(self, module: nn.Module, plain_parameters: dict[str, Any], buffer_names: list[str]) -> None:
        """Find the wrapped module's parameters, by identity or else by name, and buffers in the plain model's."""
        plain_names = {id(parameter): name for name, parameter in plain_parameters.items()}
        plain_and_wrapped = [  # The name in the plain model, that in the wrapped one, and the parameter.
            (plain_names.get(id(parameter)) or recording.model_name(name, list(self.shapes)), name, parameter)
            for name, parameter in module.named_parameters()
        ]
        self.parameters = {plain: parameter for plain, _, parameter in plain_and_wrapped if plain is not None}
        self.parameter_names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.report.unmatched = tuple(name for plain, name, _ in plain_and_wrapped if plain is None)
        named_buffers = ((recording.model_name(name, buffer_names), buffer) for name, buffer in module.named_buffers())
        self.buffers = {name: buffer for name, buffer in named_buffers if name is not None}

    def _report_wrap(self) -> None:
        """Note what the wrap's optimizer updates, whether it can be built again, and whether weights are cut."""
        report, wrapped, shapes = self.report, self.wrapped, self.shapes
        groups = getattr(self.inner_optimizer, "param_groups", [{"params": self.parameters.values()}])
        updated = [parameter for group in groups for parameter in group["params"]]  # All, where nobody knows.
        # The optimizer may update copies of the weights, in another precision than the model has.
        self.watcher.dtypes |= {("update weights", values.dtype) for values in updated if values.is_floating_point()}
        names = self.parameter_names
        report.owned = tuple(names[id(parameter)] for parameter in updated if id(parameter) in names)
        is_cut = any(parameter.shape != shapes[name] for name, parameter in self.parameters.items())
        report.is_sliced = is_cut or self.has_dtensors
        report.runs_steps = wrapped.step is not None
        if wrapped.optimizer is not None:
            report.optimizer = optimizers.read_spec(self.inner_optimizer, self.parameters)
        report.hides_optimizer = report.optimizer is None and (report.runs_steps or wrapped.optimizer is not None)

    @property
    def inner_optimizer(self) -> Any:
        """Return the optimizer that updates parameters, where others wrap it."""
        return optimizers.innermost(self.optimizer)

    @property
    def has_dtensors(self) -> bool:
        return any(hasattr(parameter, "to_local") for parameter in self.parameters.values())

    def all_steps(self) -> None:
        """Train from the start or from what others have saved, and record."""
        if self.saved_ranks:
            self._load(state=None)  # From the folder.
        else:
            self.prepare(seed_shift=_OTHER_SEED * self.rank if self.program.other_starts else 0)
            self.record.moments["start", 0] = self.weights()
            if self.program.other_starts:
                self._record_buffers()  # Wrapping must have made them equal, too.
        if self.program.masks:
            self._record_masks()
        else:
            self._train(steps_done=SAVED_AFTER if self.saved_ranks else 0)

    def _train(self, steps_done: int) -> None:
        """Run the steps after those that are done, and record."""
        program, record = self.program, self.record
        elements = program.steps * sum(shape.numel() for shape in self.shapes.values())
        recorded_steps = range(1, program.steps + 1) if elements <= _MOST_ELEMENTS else (1, program.steps)
        for step in range(steps_done + 1, program.steps + 1):
            self.watcher.step = step - 1  # It counts from 0.
            self.one_step(step)
            groups = getattr(self.inner_optimizer, "param_groups", ())
            record.rates[step] = tuple(float(group["lr"]) for group in groups if group["params"] and "lr" in group)
            if program.evaluates and step < program.steps:
                self.watcher.phase = "evaluation"
                record.add_number("evaluation", step, self._evaluate())
            if self.keeps_tensors and step in recorded_steps:
                record.moments["weight", step] = self.weights()
                record.moments["state", step] = self._states()
            if program.resume is not None and not self.saved_ranks and step == SAVED_AFTER:
                state = self._save(program.resume)
                if program.resume == "ranks":
                    return  # Other ranks load it, and go on.
                self._load(state)
        if not program.other_starts:  # Else all_steps() has recorded them, before the first step.
            self._record_buffers()

    def _record_buffers(self) -> None:
        buffers = {name: recording.clone(buffer) for name, buffer in self.buffers.items()}
        self.record.moments["buffer", self.program.steps] = buffers

    def one_step(self, step: int) -> None:
        """Run a step, from 1, by the wrap where that runs whole ones, and record it."""
        watcher = self.watcher
        batch = subjects.batch_of(self.workload, self.device, self.dtype, step - 1)  # Batches count from 0.
        if self.wrapped.step is not None:
            with self._outputs if step == 1 else nullcontext():
                self._record_step(step, self._step_of_wrap(batch))
            return
        self.optimizer.zero_grad()
        total_loss = 0.0
        for number, share in enumerate(self.step_shares):
            unsynchronized = self.program.no_sync and number < len(self.step_shares) - 1
            with self.wrapped.without_synchronization(self.optimizer) if unsynchronized else nullcontext():
                watcher.phase = "forward"
                self._switch_layer(share)
                inputs, targets = self._part_of(share, batch)
                with self._outputs if step == 1 and number == 0 else nullcontext():
                    loss = self._loss(inputs, targets)
                total_loss += loss.item() * share.weight
                watcher.phase = "backward"
                self._backward(loss * (share.weight * self._loss_factor), step)
        watcher.phase = "finish"
        if self.wrapped.finish is not None:
            self.wrapped.finish()
        # Optimizers that hold gradients themselves, so that no parameter has one, are unscaled by the step.
        if self.scaler.is_enabled() and any(parameter.grad is not None for parameter in self.parameters.values()):
            self.scaler.unscale_(self.optimizer)
        self._record_step(step, total_loss)
        watcher.phase = "clip"
        if self.program.clips:
            max_norm = self.training.max_norm
            if self.on_ranks:
                norm = self.wrapped.clip(self.optimizer, max_norm)
            else:
                norm = nn.utils.clip_grad_norm_(self.parameters.values(), max_norm).item()
            self.record.add_number("norm", step, norm)
        watcher.phase = "optimizer"
        # One process, whose losses are all finite, skips what ranks must skip.
        if self.on_ranks or not self.program.overflows(step):
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _step_of_wrap(self, batch: tuple[Any, Any]) -> float:
        """Let the wrap run a whole step, and return what this rank adds to the loss of the batch."""
        if self.program.micro_batches > 1 or self.program.clips or self.program.scales:
            raise CapabilityError("its step(batch) runs whole steps, so accumulation, clipping and scaling are its own")
        (share,) = self.step_shares
        assert self.wrapped.step is not None
        self._switch_layer(share)
        loss, name = self.wrapped.step(self._part_of(share, batch)), self.workload.wrap
        if not isinstance(loss, Tensor | float | int):
            raise UserCodeError(f"{name}: step(batch) returned {a_value(loss)}: it should return the loss")
        return float(loss) * share.weight

    def _record_step(self, step: int, loss: float) -> None:
        self.record.add_number("loss", step, loss)
        parameters = self.parameters if self.keeps_tensors else {}
        with self._observed():
            self.record.moments["gradient", step] = {
                name: recording.clone(parameter.grad)
                for name, parameter in parameters.items()
                if parameter.grad is not None
            }

    def _switch_layer(self, share: Share) -> None:
        """Turn the layer that the last rank does not use off or on."""
        self.subject.is_off = self.program.unused and share.data_rank == self.workload.data_ranks - 1

    def _part_of(self, share: Share, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return this rank's part of a share: all of it, or a slice of each sequence."""
        ranks = self.workload.dimensions.get("context", 1) if self.on_ranks else 1

        def part_of(tensor: Tensor) -> Tensor:
            part = tensor[share.sequences]
            return part.chunk(ranks, dim=1)[self.context_rank] if ranks > 1 and part.dim() > 1 else part

        return tree_map_only(Tensor, part_of, batch)

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        """Call the model, with copies of weights and inputs in ``copies_dtype`` where that is set; return the loss."""
        model, dtype = self.wrapped.module, self.copies_dtype
        if dtype is None:
            output = user_models.call_model(model, inputs)
        else:
            # As fully sharded models in half precision. Tied weights have a copy by each of their names.
            copies = cast_floating(dict(model.named_parameters(remove_duplicate=False)), dtype)
            inputs = cast_floating(inputs, dtype)
            arguments, named = ((), inputs) if isinstance(inputs, dict) else (inputs, None)
            output = functional_call(model, copies, arguments, named, tie_weights=False)
        if self.wrapped.loss is not None:
            return self.wrapped.loss(output, targets)
        return subjects.loss_of(self.workload, output, targets)

    def _backward(self, loss: Tensor, step: int) -> None:
        """Run the wrap's or torch's backward pass of the scaled loss, which on one rank is infinite if it overflows."""
        handles = self.watcher.expect(dict(self.parameters)) if self.watch else []
        if self.on_ranks and self.rank == 0 and self.program.overflows(step):
            loss = loss * math.inf
        loss = self.scaler.scale(loss)
        self.wrapped.backward(loss) if self.wrapped.backward is not None else loss.backward()
        for handle in handles:
            handle.remove()

    def _evaluate(self) -> float:
        """Return the loss of the evaluation's batch, of the shares that are trained on here."""
        module = self.wrapped.module
        module.eval()
        batch = subjects.batch_of(self.workload, self.device, self.dtype, step=900)  # Which no step trains on.
        with torch.no_grad():
            losses = [self._loss(*self._part_of(share, batch)).item() * share.weight for share in self.shares(1)]
        module.train()
        return sum(losses)

    def _record_masks(self) -> None:
        """Note which elements the first dropout layer drops in a forward pass, of this rank's part of a batch."""
        model, outputs = self.subject.model, dict[str, Tensor]()
        batch = subjects.batch_of(self.workload, self.device, self.dtype, step=0)
        with recording.captured_outputs(model, outputs):
            self._loss(*self._part_of(self.shares(micro_batches=1)[0], batch))
        layers = {name for name, layer in model.named_modules() if isinstance(layer, nn.Dropout) and layer.p > 0}
        masks = [output == 0 for name, output in outputs.items() if name in layers]  # In the order of calls.
        if not masks:
            raise CapabilityError("the model has no torch.nn.Dropout that drops anything")
        self.report.masks = masks[0]

    @contextlib.contextmanager
    def _observed(self) -> Any:
        """Within this, collectives are those of looking at tensors, as gathering a DTensor, and none of the wrap's."""
        phase, self.watcher.phase = self.watcher.phase, OBSERVED
        yield
        self.watcher.phase = phase

    def weights(self) -> dict[str, Tensor]:
        getattr(self.optimizer, "wait_for_parameters", lambda: None)()  # Our ShardedOptimizer may still receive some.
        with self._observed():
            return {name: recording.clone(parameter) for name, parameter in self.parameters.items()}

    def _states(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors by parameter and their own name: all ``exp_avg``, then all ``exp_avg_sq``."""
        if optimizers.is_ours(self.inner_optimizer):
            return {}  # Its states are of slices that it alone knows.
        with self._observed():
            states = [
                (key, self.parameter_names[id(parameter)], recording.clone(torch.as_tensor(value)))
                for parameter, state in self.inner_optimizer.state.items()
                if id(parameter) in self.parameter_names
                for key, value in state.items()
                # Some optimizers count steps in a plain number.
                if isinstance(value, Tensor) or (isinstance(value, int | float) and key == "step")
            ]
        return {f"{name} {key}": value for key, name, value in sorted(states, key=operator.itemgetter(0))}

    def _save(self, resume: str) -> Any:
        """Save everything, and return the state dicts where they are not in a checkpoint."""
        self.watcher.phase = "save"
        if resume == "dcp":
            # Ranks that torchrun started have a folder each: all take the first's. For "ranks" they are refused anyway.
            folders = [self.folder]
            dist.broadcast_object_list(folders)
            (self.folder,) = folders
        # Other ranks load DTensors from a checkpoint, and all else from each rank's own state.
        if resume == "dcp" or (resume == "ranks" and self.has_dtensors):
            self._save_or_load_checkpoint()
            return None
        state = self._state_dicts()
        if resume == "ranks":
            torch.save(state, f"{self.folder}/rank{self.rank}.pt")
        return state

    def _load(self, state: Any) -> None:
        """Load into new objects: a checkpoint where there is one, else what other ranks saved, or ``state``."""
        self.prepare(seed_shift=_OTHER_SEED)  # With other weights, so that only what is loaded is right.
        if Path(self.folder, "dcp").exists():
            self._save_or_load_checkpoint(loads=True)
            return
        if self.saved_ranks:  # More than load: half as many do, see measure.py.
            state = torch.load(f"{self.folder}/rank{self.rank % self.saved_ranks}.pt", weights_only=False)
        if self.wrapped.saves_all("load_state_dict"):  # See _state_dicts().
            self.wrapped.owner.load_state_dict(state)
        else:
            self.wrapped.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    def _state_dicts(self) -> Any:
        """Return a copy of the state dicts of module and optimizer, or of the object that has both."""
        if self.wrapped.saves_all("state_dict"):
            state = self.wrapped.owner.state_dict()
        else:
            state = {"model": self.wrapped.module.state_dict()}
            consolidate = getattr(self.optimizer, "consolidate_state_dict", lambda to: None)
            for rank in range(dist.get_world_size()):
                consolidate(to=rank)  # Gathers the state on a rank, which forgets it when the next is chosen.
                if rank == self.rank:
                    state["optimizer"] = self.optimizer.state_dict()
        return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)

    def _save_or_load_checkpoint(self, *, loads: bool = False) -> None:
        """Save model and optimizer by torch.distributed.checkpoint, or load what any ranks saved. All ranks call it.

        A CapabilityError refuses optimizers that are none of torch's classes, and slices that are no DTensors.
        """
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        inner = self.inner_optimizer
        if not isinstance(inner, torch.optim.Optimizer) or (self.report.is_sliced and not self.has_dtensors):
            raise CapabilityError("torch.distributed.checkpoint cannot know its slices, which are no DTensors")
        objects = self.wrapped.module, inner
        state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(*objects), strict=True))
        if loads:
            checkpoint.load(state, checkpoint_id=f"{self.folder}/dcp")
            set_state_dict(*objects, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        else:
            checkpoint.save(state, checkpoint_id=f"{self.folder}/dcp")
