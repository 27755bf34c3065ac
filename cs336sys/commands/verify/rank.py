"""Run a case on a rank, and record its tensors at each moment."""

import contextlib
import functools
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from cs336sys.commands.verify import cases
from cs336sys.commands.verify.program import ProgramRun, Training
from cs336sys.commands.verify.record import OptimizerSpec, Record, Together, captured_outputs, default_optimizer
from cs336sys.commands.verify.wraps import innermost, wrap
from cs336sys.errors import CapabilityError, UsageError, UserCodeError, lines_of
from cs336sys.parity.assembly import model_name
from cs336sys.parity.collectives import CollectiveLaunch, CollectiveWatcher
from cs336sys.settings.user_code import is_user_code, source_file
from cs336sys.training import user_models

# Ranks that start with different weights, and models that are loaded into, are built from seeds so far apart.
_OTHER_SEED = 1000

# Settings of optimizers that change no number, or that the class itself does not take.
_OF_NO_CONSEQUENCE = ("initial_lr", "foreach", "fused", "capturable", "differentiable", "flat")


@dataclass
class RankReport:
    """Findings of a rank in a case.

    Attributes:
        record: what it held; as far as it came, where it failed.
        optimizer: how to build the wrap's optimizer in one process; None where the wrap has none.
        optimizer_shapes: of the parameters that the wrap's optimizer has, by their names in the model.
        empty_groups: the settings of its groups without parameters.
        hides_optimizer: whether it has an optimizer that cannot be built in one process.
        owned: parameters that the optimizer updates on this rank.
        unmatched: parameters of the wrapped module that have no name in the plain one.
        launches: its collectives, where they were watched.
        dtypes: less precise ones than asked for, in which its optimizer holds weights (``update weights``) or, where
            that was watched, it computed (``compute``) or sent (``send``).
        is_sliced: whether it holds slices of weights; ``runs_steps``: whether the wrap runs whole steps.
        masks: of the first dropout layer, whether each element was dropped; None without one.
        failure: what was raised, in one sentence; empty where nothing was.
        is_timeout: whether other ranks did not come.
        applies: False where the case does not apply, and ``failure`` says why.
        at: step and phase of a failure.
    """

    record: Record
    optimizer: OptimizerSpec | None = None
    optimizer_shapes: dict[str, torch.Size] = field(default_factory=dict)
    empty_groups: tuple[dict[str, Any], ...] = ()
    hides_optimizer: bool = False
    owned: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    launches: list[CollectiveLaunch] = field(default_factory=list)
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    is_sliced: bool = False
    runs_steps: bool = False
    masks: Tensor | None = None
    failure: str = ""
    is_timeout: bool = False
    applies: bool = True
    at: str = ""


@dataclass(frozen=True)
class RankSettings:
    """Settings of the ranks alone.

    Attributes:
        watch: record collectives and the outputs of modules.
        folder: where to save.
        saved_ranks: how many others have saved there what these ranks load; 0 where they train from the start.
    """

    watch: bool = False
    folder: str = ""
    saved_ranks: int = 0


@functools.lru_cache(maxsize=1)
def _mesh_of_ranks(world: Any, device_type: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """The mesh of all ranks, the group ``world``; its groups are made once."""
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def is_sound(expected: int) -> bool:
    """Return whether this rank's collectives still meet those of the others."""
    numbers = torch.full((3,), float(dist.get_rank()))
    if dist.get_backend() == "nccl":
        numbers = numbers.cuda()
    dist.all_reduce(numbers)
    return bool((numbers == expected * (expected - 1) / 2).all())


def train_on_rank(training: Training, program: cases.Program, settings: RankSettings) -> RankReport:
    """Run the program on this rank, on its device. Whatever is raised comes back as a failure."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    run = _RankRun(replace(training, device=device), program, settings)
    report, workload = run.report, run.workload
    nothing = contextlib.nullcontext()
    try:
        with (
            nothing if workload.case == "dropout" else user_models.nothing_dropped(),
            run.watcher if settings.watch or program.late is not None else nothing,
        ):
            run.all_steps()
    except CapabilityError as error:
        report.failure, report.applies = str(error), False
    except Exception as error:
        report.is_timeout = _is_timeout(error)
        report.failure = str(error)
        if not isinstance(error, UsageError | UserCodeError):
            files = [source_file(workload.wrap)] if is_user_code(workload.wrap) else []
            line = user_models.innermost_line(lines_of(error), files)
            first_line = next(iter(report.failure.strip().splitlines()), "")
            where = f"{line}: " if line else ""
            report.failure = f"{where}{type(error).__name__}: {first_line}"
    report.at = f"step {run.watcher.step + 1}, {run.watcher.phase}"
    report.launches = run.watcher.launches
    precise = torch.finfo(run.dtype).eps
    seen = run.watcher.dtypes | run.updated_dtypes
    report.dtypes = tuple(sorted({(use, dtype) for use, dtype in seen if torch.finfo(dtype).eps > precise}, key=str))
    return report


def _is_timeout(error: BaseException | None) -> bool:
    lost = ("timed out", "timeout", "connection reset", "connection closed", "broken pipe", "socket")
    return error is not None and (any(text in str(error).lower() for text in lost) or _is_timeout(error.__cause__))


class _RankRun(ProgramRun):
    """A program on this rank, its present model and optimizer."""

    def __init__(self, training: Training, program: cases.Program, settings: RankSettings):
        super().__init__(training, program)
        self.settings, self.report = settings, RankReport(self.record)
        workload, ranks = self.workload, self.workload.dimensions
        self.mesh = _mesh_of_ranks(dist.group.WORLD, self.device.type, tuple(ranks), tuple(ranks.values()))
        self.rank = dist.get_rank()
        place = dict(zip(ranks, self.mesh.get_coordinate() or (), strict=True))
        self.data, self.context = place.get("data", 0), place.get("context", 0)
        self.step_shares = self.shares(program.micro)
        # Of a mean over the ranks, a rank's loss counts as much as its sequences.
        self.loss_factor = 1 / ranks.get("context", 1) if workload.gradients == "sum" else ranks.get("data", 1)
        files = [source_file(workload.wrap)] if is_user_code(workload.wrap) else []
        self.watcher = CollectiveWatcher(files, is_late=program.late == self.rank)
        # Dtypes of what the optimizer updates, which may be a copy of the weights.
        self.updated_dtypes: set[tuple[str, torch.dtype]] = set()

    def prepare(self, seed_shift: int = 0) -> None:
        workload, learning_rate = self.workload, self.training.learning_rate
        self.watcher.phase = "wrap"
        self.subject = cases.build_subject(workload, self.program, self.device, self.dtype, seed_shift)
        model = self.subject.model
        # They live until the wrapped ones are named: an identity is unique among living objects.
        plain_parameters = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in plain_parameters.items()}
        buffers = [name for name, _ in model.named_buffers()]
        # Other masks on ranks that have other sequences.
        torch.manual_seed(workload.training.seed + _OTHER_SEED * (self.data or 0))
        random.seed(workload.training.seed)
        self.outputs = captured_outputs(model, self.record.outputs) if self.settings.watch else None
        self.wrapped = wrap(workload, model, self.mesh, learning_rate)
        self.report.runs_steps = self.wrapped.step is not None
        module = self.wrapped.module
        with user_models.telling_errors_of(workload.wrap) if is_user_code(workload.wrap) else contextlib.nullcontext():
            parameters = list(module.parameters())
            self.optimizer = self.wrapped.optimizer or default_optimizer(parameters, learning_rate)
        plain_names = {id(parameter): name for name, parameter in plain_parameters.items()}
        named = {
            name: (plain_names.get(id(parameter)) or model_name(name, list(self.shapes)), parameter)
            for name, parameter in module.named_parameters()
        }
        self.named = {plain: parameter for plain, parameter in named.values() if plain is not None}
        of_plain = {model_name(name, buffers): buffer for name, buffer in module.named_buffers()}
        self.buffers = {name: buffer for name, buffer in of_plain.items() if name is not None}
        self.names = {id(parameter): name for name, parameter in self.named.items()}
        groups = getattr(self.inner, "param_groups", [{"params": self.named.values()}])
        updated = [parameter for group in groups for parameter in group["params"]]
        self.updated_dtypes |= {
            ("update weights", parameter.dtype) for parameter in updated if parameter.is_floating_point()
        }
        report, wrapped = self.report, self.wrapped
        report.unmatched = tuple(name for name, (plain, _) in named.items() if plain is None)
        report.is_sliced = self._has_dtensors or any(
            parameter.shape != self.shapes[name] for name, parameter in self.named.items()
        )
        report.owned = tuple(self.names[id(parameter)] for parameter in updated if id(parameter) in self.names)
        report.optimizer = None if wrapped.optimizer is None else self._spec()
        has_optimizer = wrapped.step is not None or wrapped.optimizer is not None
        report.hides_optimizer = has_optimizer and report.optimizer is None

    @property
    def inner(self) -> Any:
        return innermost(self.optimizer)

    def _spec(self) -> OptimizerSpec | None:
        """Read class and settings of the optimizer, by parameter; None if it is not all torch's."""
        inner = self.inner
        optimizers = inner.optimizers if isinstance(inner, Together) else [inner]
        if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
            return None
        kinds = [
            torch.optim.AdamW if type(optimizer).__module__.startswith("cs336sys.parallel") else type(optimizer)
            for optimizer in optimizers
        ]
        settings: dict[str, Any] = {}
        pairs = [(kind, group) for kind, part in zip(kinds, optimizers, strict=True) for group in part.param_groups]
        is_alone = sum(bool(group["params"]) for _, group in pairs) == 1
        for kind, group in pairs:
            group_settings = {
                key: value
                for key, value in group.items()
                if isinstance(value, int | float | bool | tuple | None) and key not in _OF_NO_CONSEQUENCE
            }
            if not group["params"]:
                self.report.empty_groups += (group_settings,)
            for parameter in group["params"]:
                for name in self._names_of(parameter):
                    settings[name] = kind, group_settings
                    self.report.optimizer_shapes[name] = parameter.shape
            if group["params"] and not settings and is_alone:
                # It updates copies of the weights.
                settings = dict.fromkeys(self.named, (kind, group_settings))
        return OptimizerSpec(kinds[0], settings)

    def _names_of(self, updated: Tensor) -> list[str]:
        """The parameters that an optimizer's is, or shares memory with, as a slice of one or of several in a row."""
        if id(updated) in self.names or hasattr(updated, "to_local") or not updated.numel():
            return [self.names[id(updated)]] if id(updated) in self.names else []
        start = updated.data_ptr()
        end = start + updated.numel() * updated.element_size()
        return [
            name
            for name, parameter in self.named.items()
            if not hasattr(parameter, "to_local")
            and parameter.data_ptr() < end
            and start < parameter.data_ptr() + parameter.numel() * parameter.element_size()
        ]

    def all_steps(self) -> None:
        program, record, saved_ranks = self.program, self.record, self.settings.saved_ranks
        if saved_ranks:
            # What was trained before is another program's.
            self.prepare(_OTHER_SEED)
            folder = self.settings.folder
            if Path(folder, "dcp").exists():
                self._checkpoint(f"{folder}/dcp", loads=True)
            else:
                self._load_state_dicts(torch.load(f"{folder}/rank{self.rank % saved_ranks}.pt", weights_only=False))
        else:
            self.prepare(_OTHER_SEED * self.rank if program.start else 0)
            record.moments["start", 0] = self.weights()
            if program.start:
                self.record_buffers()
        if self.workload.case == "dropout":
            self._look_at_masks()
            return
        self.scaler = self.wrapped.scaler_class(
            self.device.type, init_scale=cases.LOSS_SCALE, growth_interval=10**6, enabled=program.scale
        )
        self.train(cases.SAVED_AFTER if saved_ranks else 0)

    def ends_after(self, step: int) -> bool:
        resume = self.program.resume
        if resume is None or self.settings.saved_ranks or step + 1 != cases.SAVED_AFTER:
            return False
        self.watcher.phase = "save"
        # The first rank's, on every rank: those that torchrun started each have made one.
        folders = [self.settings.folder]
        if resume == "dcp":
            dist.broadcast_object_list(folders)
        # Other ranks load DTensors from a checkpoint, and all else from each rank's own state.
        saves_checkpoint = resume == "dcp" or (resume == "ranks" and self._has_dtensors)
        state = None if saves_checkpoint else self._state_dicts()
        if saves_checkpoint:
            self._checkpoint(f"{folders[0]}/dcp")
        elif resume == "ranks":
            torch.save(state, f"{folders[0]}/rank{self.rank}.pt")
        if resume == "ranks":
            return True
        self.prepare(_OTHER_SEED)
        if saves_checkpoint:
            self._checkpoint(f"{folders[0]}/dcp", loads=True)
        else:
            self._load_state_dicts(state)
        return False

    def part_of(self, share: cases.Share, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """This rank's part of a share: of its sequences, or of each of them."""
        part = share.of(batch)
        ranks = self.workload.dimensions.get("context", 1)
        if ranks == 1:
            return part
        return tree_map_only(
            Tensor, lambda tensor: tensor.chunk(ranks, 1)[self.context] if tensor.dim() > 1 else tensor, part
        )

    def one_step(self, step: int) -> None:
        if self.wrapped.step is None:
            super().one_step(step)
        else:
            self._own_step(step)

    def around_share(self, number: int) -> contextlib.AbstractContextManager[Any]:
        if self.program.no_sync and number < len(self.step_shares) - 1:
            return self.wrapped.without_synchronization(self.optimizer)
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, step: int) -> None:
        handles = self.watcher.expect(dict(self.named)) if self.settings.watch else []
        if self.program.scale and step + 1 == cases.OVERFLOWN_STEP and self.rank == 0:
            loss = loss * float("inf")
        loss = self.scaler.scale(loss)
        self.wrapped.backward(loss) if self.wrapped.backward is not None else loss.backward()
        for handle in handles:
            handle.remove()

    def finish(self) -> None:
        if self.wrapped.finish is not None:
            self.wrapped.finish()
        # Optimizers that hold gradients themselves are unscaled by the step.
        if self.program.scale and any(parameter.grad is not None for parameter in self.named.values()):
            self.scaler.unscale_(self.optimizer)

    def clip(self) -> float:
        assert self.training.max_norm is not None
        return self.wrapped.clip(self.optimizer, self.training.max_norm)

    def update(self, step: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _own_step(self, step: int) -> None:
        program = self.program
        if program.micro > 1 or program.clip or program.scale:
            raise CapabilityError("its step(batch) runs whole steps, so accumulation, clipping and scaling are its own")
        (share,) = self.step_shares
        assert self.wrapped.step is not None
        self.choose_layers(share)
        loss = self.wrapped.step(self.part_of(share, cases.batch_of(self.workload, self.device, self.dtype, step)))
        self.record_step(step, float(loss) * share.weight)

    def weights(self) -> dict[str, Tensor]:
        getattr(self.optimizer, "wait_for_parameters", lambda: None)()
        return super().weights()

    def states(self) -> dict[str, Tensor]:
        # States of ours are of slices that it alone knows.
        return {} if type(self.inner).__module__.startswith("cs336sys.parallel") else super().states()

    def _look_at_masks(self) -> None:
        model, outputs = self.subject.model, dict[str, Tensor]()
        batch = cases.batch_of(self.workload, self.device, self.dtype, 0)
        with captured_outputs(model, outputs):
            self.loss(*self.part_of(self.shares(1)[0], batch))
        layers = {name for name, layer in model.named_modules() if isinstance(layer, nn.Dropout) and layer.p > 0}
        masks = [output == 0 for name, output in outputs.items() if name in layers]
        if not masks:
            raise CapabilityError("the model has no torch.nn.Dropout that drops anything")
        self.report.masks = masks[0]

    def _state_dicts(self) -> Any:
        """A copy of the state dicts of module and optimizer, or of the object that has them."""
        saves_all = self._owner_saves_all("state_dict")
        state = self.wrapped.owner.state_dict() if saves_all else self._state_of_parts()
        return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)

    def _load_state_dicts(self, state: Any) -> None:
        if self._owner_saves_all("load_state_dict"):
            self.wrapped.owner.load_state_dict(state)
        else:
            self.wrapped.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    def _owner_saves_all(self, name: str) -> bool:
        """Return whether the owner has state dicts of module and optimizer, not the module's by ``__getattr__``."""
        owner = self.wrapped.owner
        method = getattr(owner, name, None)
        return not isinstance(owner, nn.Module) and method is not None and getattr(method, "__self__", owner) is owner

    def _state_of_parts(self) -> dict[str, Any]:
        state = {"model": self.wrapped.module.state_dict()}
        consolidate = getattr(self.optimizer, "consolidate_state_dict", lambda to: None)
        for rank in range(dist.get_world_size()):
            # Another rank's is forgotten by the next.
            consolidate(to=rank)
            if rank == self.rank:
                state["optimizer"] = self.optimizer.state_dict()
        return state

    def _checkpoint(self, folder: str, *, loads: bool = False) -> None:
        """Save by torch.distributed.checkpoint, or load what as many ranks or others have saved. All ranks call it.

        Raises:
            CapabilityError: it holds slices that are no DTensors.
        """
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        if not isinstance(self.inner, torch.optim.Optimizer) or (self.report.is_sliced and not self._has_dtensors):
            raise CapabilityError("torch.distributed.checkpoint cannot know its slices, which are no DTensors")
        objects = self.wrapped.module, self.inner
        state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(*objects), strict=True))
        if loads:
            checkpoint.load(state, checkpoint_id=folder)
            set_state_dict(*objects, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        else:
            checkpoint.save(state, checkpoint_id=folder)

    @property
    def _has_dtensors(self) -> bool:
        return any(hasattr(parameter, "to_local") for parameter in self.named.values())
