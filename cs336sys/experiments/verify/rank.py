"""Run a case on a rank, and record its tensors at each moment."""

import contextlib
import random
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from cs336sys.errors import CapabilityError, UsageError, UserCodeError
from cs336sys.experiments import user_models
from cs336sys.experiments.verify.assembly import model_name
from cs336sys.experiments.verify.cases import (
    LOSS_SCALE,
    SAVED_AFTER,
    Program,
    Share,
    Subject,
    batch_of,
    build_subject,
    evaluation_batch,
    loss_of,
    shares_of,
    turned_off,
)
from cs336sys.experiments.verify.collectives import OBSERVED, CollectiveLaunch, CollectiveWatcher
from cs336sys.experiments.verify.reference import (
    OptimizerSpec,
    Record,
    captured_outputs,
    clone,
    default_optimizer,
    moments,
    states_of,
)
from cs336sys.experiments.verify.saving import (
    TrainingObjects,
    folder_of_first,
    load_distributed_checkpoint,
    load_from_folder,
    load_own_state,
    own_state,
    save_distributed_checkpoint,
    save_to_folder,
)
from cs336sys.experiments.verify.wraps import Wrapped, innermost, wrap
from cs336sys.user_code import is_user_code, source_file
from cs336sys.workload.verification import VerifiedWorkload

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
        owned: parameters that the optimizer updates on this rank.
        unmatched: parameters of the wrapped module that have no name in the plain one.
        launches: its collectives, where they were watched.
        dtypes: less precise ones than asked for, in which its optimizer holds weights or, where that was watched, it
            computed or sent.
        is_sliced: whether it holds slices of weights; ``runs_steps``: whether the wrap runs whole steps.
        masks: of the first dropout layer, whether each element was dropped; None without one.
        failure: what was raised, in one sentence; empty where nothing was.
        is_timeout: whether other ranks did not come.
        applies: False where the case does not apply, and ``failure`` says why.
        at: step and phase of a failure.
    """

    record: Record = field(default_factory=Record)
    optimizer: OptimizerSpec | None = None
    owned: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    launches: list[CollectiveLaunch] = field(default_factory=list)
    dtypes: tuple[torch.dtype, ...] = ()
    is_sliced: bool = False
    runs_steps: bool = False
    masks: Tensor | None = None
    failure: str = ""
    is_timeout: bool = False
    applies: bool = True
    at: str = ""


@dataclass(frozen=True)
class RankSettings:
    """Settings of the ranks besides the workload.

    Attributes:
        max_norm: of gradients, where the program clips.
        watch: record collectives and the outputs of modules.
        folder: where to save, or where ``saved_ranks`` others have saved what this ``loads``.
    """

    dtype: torch.dtype
    learning_rate: float
    max_norm: float | None = None
    watch: bool = False
    folder: str = ""
    loads: bool = False
    saved_ranks: int = 0


_meshes: dict[Any, DeviceMesh] = {}


def mesh_of(workload: VerifiedWorkload, device: torch.device) -> DeviceMesh:
    """The mesh of all ranks; groups are made once."""
    sizes = workload.dimensions
    key = (dist.group.WORLD, device.type, tuple(sizes.items()))
    if key not in _meshes:
        _meshes.clear()
        _meshes[key] = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return _meshes[key]


def is_sound(expected: int) -> bool:
    """Return whether this rank's collectives still meet those of the others."""
    numbers = torch.full((3,), float(dist.get_rank()))
    if dist.get_backend() == "nccl":
        numbers = numbers.cuda()
    dist.all_reduce(numbers)
    return bool((numbers == expected * (expected - 1) / 2).all())


def train_on_rank(workload: VerifiedWorkload, program: Program, settings: RankSettings) -> RankReport:
    """Run the program on this rank. Whatever is raised comes back as a failure."""
    report = RankReport()
    run = _Run(workload, program, settings, report)
    try:
        with user_models.nothing_dropped() if workload.case != "dropout" else contextlib.nullcontext(), run.watched():
            run.all_steps()
    except CapabilityError as error:
        report.failure, report.applies = str(error), False
    except Exception as error:
        report.is_timeout = _is_timeout(error)
        report.failure = str(error) if isinstance(error, UsageError | UserCodeError) else _sentence(workload, error)
    report.at = f"step {run.watcher.step + 1}, {run.watcher.phase}"
    report.launches = run.watcher.launches
    precise = torch.finfo(settings.dtype).eps
    seen = run.watcher.dtypes | run.updated_dtypes
    report.dtypes = tuple(sorted({dtype for dtype in seen if torch.finfo(dtype).eps > precise}, key=str))
    return report


def _is_timeout(error: BaseException | None) -> bool:
    lost = ("timed out", "timeout", "connection reset", "connection closed", "broken pipe", "socket")
    while error is not None:
        if any(word in str(error).lower() for word in lost):
            return True
        error = error.__cause__
    return False


def _sentence(workload: VerifiedWorkload, error: Exception) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    where = ""
    if is_user_code(workload.wrap):
        folder = str(source_file(workload.wrap).resolve().parent)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
        where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {first_line}"


class _Run:
    """A program on this rank, its present model and optimizer."""

    def __init__(self, workload: VerifiedWorkload, program: Program, settings: RankSettings, report: RankReport):
        self.workload, self.program, self.settings, self.report = workload, program, settings, report
        on_gpu = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.mesh = mesh_of(workload, self.device)
        self.rank = dist.get_rank()
        names: Any = self.mesh.mesh_dim_names
        place = dict(zip(names, self.mesh.get_coordinate() or (), strict=True))
        self.data, self.context = place.get("data", 0), place.get("context", 0)
        folder = source_file(workload.wrap).resolve().parent if is_user_code(workload.wrap) else None
        self.watcher = CollectiveWatcher(folder, is_late=program.late == self.rank)
        # Dtypes of what the optimizer updates, which may be a copy of the weights.
        self.updated_dtypes: set[torch.dtype] = set()

    def watched(self) -> contextlib.AbstractContextManager[Any]:
        if self.settings.watch or self.program.late is not None:
            return self.watcher
        return contextlib.nullcontext()

    def prepare(self, seed_shift: int) -> None:
        workload, settings = self.workload, self.settings
        self.watcher.phase = "wrap"
        self.subject: Subject = build_subject(workload, self.program, self.device, settings.dtype, seed_shift)
        model = self.subject.model
        parameters = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        buffers = [name for name, _ in model.named_buffers()]
        identities = {id(parameter): name for name, parameter in parameters.items()}
        # Other masks on ranks that have other sequences.
        torch.manual_seed(workload.training.seed + _OTHER_SEED * self.data)
        random.seed(workload.training.seed)
        self.outputs = captured_outputs(model, self.report.record.outputs) if settings.watch else None
        self.wrapped: Wrapped = wrap(workload, model, self.mesh, settings.learning_rate)
        self.report.runs_steps = self.wrapped.step is not None
        module = self.wrapped.module
        with user_models.telling_errors_of(workload.wrap) if is_user_code(workload.wrap) else contextlib.nullcontext():
            self.optimizer: Any = self.wrapped.optimizer or default_optimizer(
                list(module.parameters()), settings.learning_rate
            )
        self.named: dict[str, nn.Parameter] = {}
        unmatched = []
        for name, parameter in module.named_parameters():
            plain_name = identities.get(id(parameter)) or model_name(name, list(parameters))
            if plain_name is None:
                unmatched.append(name)
            else:
                self.named[plain_name] = parameter
        self.buffers = {
            plain_name: buffer
            for name, buffer in module.named_buffers()
            if (plain_name := model_name(name, buffers)) is not None
        }
        self.names = {id(parameter): name for name, parameter in self.named.items()}
        self.report.unmatched = tuple(unmatched)
        self.report.is_sliced = any(
            hasattr(parameter, "to_local") or parameter.shape != self.shapes[name]
            for name, parameter in self.named.items()
        )
        self.inner: Any = innermost(self.optimizer)
        groups = getattr(self.inner, "param_groups", [{"params": self.named.values()}])
        updated = [parameter for group in groups for parameter in group["params"]]
        self.updated_dtypes |= {parameter.dtype for parameter in updated if parameter.is_floating_point()}
        self.report.owned = tuple(self.names[id(parameter)] for parameter in updated if id(parameter) in self.names)
        if self.wrapped.optimizer is not None:
            self.report.optimizer = self._spec()

    def _spec(self) -> OptimizerSpec | None:
        kind = type(self.inner)
        if kind.__module__.startswith("cs336sys.parallel"):
            kind = torch.optim.AdamW
        elif not issubclass(kind, torch.optim.Optimizer):
            return None
        settings: dict[str, Any] = {}
        for group in self.inner.param_groups:
            group_settings = {
                key: value
                for key, value in group.items()
                if isinstance(value, int | float | bool | tuple | None) and key not in _OF_NO_CONSEQUENCE
            }
            names = [self.names[id(parameter)] for parameter in group["params"] if id(parameter) in self.names]
            if group["params"] and not names and len(self.inner.param_groups) == 1:
                # It updates copies of the weights.
                names = list(self.named)
            settings |= dict.fromkeys(names, group_settings)
        return OptimizerSpec(kind, settings)

    def all_steps(self) -> None:
        program, record = self.program, self.report.record
        if self.settings.loads:
            # What was trained before is another program's.
            self.prepare(_OTHER_SEED)
            load_from_folder(self.trained, self.settings.folder, self.settings.saved_ranks)
            first = SAVED_AFTER
        else:
            self.prepare(_OTHER_SEED * self.rank if program.start else 0)
            record.weights[0] = self.weights()
            record.buffers = {name: clone(buffer) for name, buffer in self.buffers.items()}
            first = 0
        if self.workload.case == "dropout":
            self._look_at_masks()
            return
        self.scaler = self.wrapped.scaler_class(
            self.device.type, init_scale=LOSS_SCALE, growth_interval=10**6, enabled=program.scale
        )
        for step in range(first, program.steps):
            self.watcher.step = step
            self.one_step(step)
            if program.evaluate and step < program.steps - 1:
                self.watcher.phase = "evaluation"
                record.evaluations.append(self.evaluate())
            if step + 1 in moments(program):
                record.weights[step + 1] = self.weights()
                record.states[step + 1] = self.states()
            if program.resume is not None and not self.settings.loads and step + 1 == SAVED_AFTER:
                self.watcher.phase = "save"
                if program.resume == "ranks":
                    save_to_folder(self.trained, self.settings.folder)
                    return
                self._save_and_load()
        if not program.start:
            record.buffers = {name: clone(buffer) for name, buffer in self.buffers.items()}

    def shares(self, micro: int) -> list[Share]:
        return [share for share in shares_of(self.workload, self.program, micro) if share.data == self.data]

    def own_share(self, share: Share, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """This rank's part of a share: of its sequences, or of each of them."""
        part = share.of(batch)
        ranks = self.workload.dimensions.get("context", 1)
        if ranks == 1:
            return part
        return tree_map_only(
            Tensor, lambda tensor: tensor.chunk(ranks, 1)[self.context] if tensor.dim() > 1 else tensor, part
        )

    def loss(self, inputs: Any, targets: Any) -> Tensor:
        output = user_models.call_model(self.wrapped.module, inputs)
        if self.wrapped.loss is not None:
            return self.wrapped.loss(output, targets)
        return loss_of(self.workload, output, targets)

    def one_step(self, step: int) -> None:
        program, watcher, record, wrapped = self.program, self.watcher, self.report.record, self.wrapped
        batch = batch_of(self.workload, self.device, self.settings.dtype, step)
        shares = self.shares(program.micro)
        if wrapped.step is not None:
            self._own_step(batch, shares)
            return
        self.optimizer.zero_grad()
        total = 0.0
        sums = self.workload.gradients == "sum"
        ranks = self.workload.dimensions
        # Of a mean over the ranks, a rank's loss counts as much as its sequences.
        counts = 1 / ranks.get("context", 1) if sums else ranks.get("data", 1)
        for number, share in enumerate(shares):
            unsynchronized = program.no_sync and number < len(shares) - 1
            with wrapped.without_synchronization(self.optimizer) if unsynchronized else contextlib.nullcontext():
                watcher.phase = "forward"
                inputs, targets = self.own_share(share, batch)
                outputs = self.outputs if step == 0 and number == 0 and self.outputs is not None else None
                off = program.unused and self.data == self.workload.data_ranks - 1
                with turned_off(self.subject.switch, off):
                    with outputs or contextlib.nullcontext():
                        loss = self.loss(inputs, targets)
                    total += loss.item() * share.weight
                    watcher.phase = "backward"
                    handles = watcher.expect(self.named) if self.settings.watch else []
                    loss = loss * (share.weight * counts)
                    if program.scale and step == 1 and self.rank == 0:
                        loss = loss * float("inf")
                    loss = self.scaler.scale(loss)
                    wrapped.backward(loss) if wrapped.backward is not None else loss.backward()
                    for handle in handles:
                        handle.remove()
        watcher.phase = "finish"
        if wrapped.finish is not None:
            wrapped.finish()
        record.losses.append(total)
        # Optimizers that hold gradients themselves are unscaled by the step.
        if program.scale and any(parameter.grad is not None for parameter in self.named.values()):
            self.scaler.unscale_(self.optimizer)
        record.gradients.append(self.gradients())
        watcher.phase = "clip"
        if program.clip:
            assert self.settings.max_norm is not None
            record.norms.append(wrapped.clip(self.optimizer, self.settings.max_norm))
        watcher.phase = "optimizer"
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _own_step(self, batch: tuple[Any, Any], shares: list[Share]) -> None:
        program = self.program
        if program.micro > 1 or program.clip or program.scale:
            raise CapabilityError("its step(batch) runs whole steps, so accumulation, clipping and scaling are its own")
        (share,) = shares
        off = program.unused and self.data == self.workload.data_ranks - 1
        assert self.wrapped.step is not None
        with turned_off(self.subject.switch, off):
            loss = self.wrapped.step(self.own_share(share, batch))
        self.report.record.losses.append(float(loss) * share.weight)
        self.report.record.gradients.append(self.gradients())

    def evaluate(self) -> float:
        module = self.wrapped.module
        module.eval()
        batch = evaluation_batch(self.workload, self.device, self.settings.dtype)
        (share,) = self.shares(1)
        with torch.no_grad():
            loss = self.loss(*self.own_share(share, batch)).item() * share.weight
        module.train()
        return loss

    def weights(self) -> dict[str, Tensor]:
        getattr(self.optimizer, "wait_for_parameters", lambda: None)()
        return self._held(self.named)

    def gradients(self) -> dict[str, Tensor]:
        gradients = {name: parameter.grad for name, parameter in self.named.items()}
        return self._held({name: gradient for name, gradient in gradients.items() if gradient is not None})

    def _held(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        phase, self.watcher.phase = self.watcher.phase, OBSERVED
        whole = {
            name: tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in tensors.items()
        }
        self.watcher.phase = phase
        return {name: clone(tensor.to_dense() if tensor.is_sparse else tensor) for name, tensor in whole.items()}

    def states(self) -> dict[str, dict[str, Tensor]]:
        if type(self.inner).__module__.startswith("cs336sys.parallel"):
            # Its states are of slices that it alone knows.
            return {}
        return {name: self._held(state) for name, state in states_of(self.inner, self.names).items()}

    def _look_at_masks(self) -> None:
        masks: list[Tensor] = []

        def look(module: Any, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and module.p > 0:
                masks.append(output.detach() == 0)

        layers = [module for module in self.subject.model.modules() if isinstance(module, nn.Dropout)]
        handles = [layer.register_forward_hook(look) for layer in layers]
        batch = batch_of(self.workload, self.device, self.settings.dtype, 0)
        self.loss(*self.own_share(self.shares(1)[0], batch))
        for handle in handles:
            handle.remove()
        if not masks:
            raise CapabilityError("the model has no torch.nn.Dropout that drops anything")
        self.report.masks = clone(masks[0])

    @property
    def trained(self) -> TrainingObjects:
        is_distributed = any(hasattr(parameter, "to_local") for parameter in self.named.values())
        return TrainingObjects(self.wrapped, self.optimizer, self.inner, self.report.is_sliced, is_distributed)

    def _save_and_load(self) -> None:
        if self.program.resume == "dcp":
            folder = folder_of_first(self.settings.folder)
            save_distributed_checkpoint(self.trained, folder)
            self.prepare(_OTHER_SEED)
            load_distributed_checkpoint(self.trained, folder)
        else:
            state = own_state(self.trained)
            self.prepare(_OTHER_SEED)
            load_own_state(self.trained, state)
