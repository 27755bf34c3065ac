"""Calls a wrap, a user's or a ready one, and finds in what it returns the parts of a training step."""

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336sys.errors import CapabilityError, UserCodeError, a_value, choose_from
from cs336sys.parallel import ddp
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.gradient_slices import ShardedGradScaler
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.parallel.tensor_parallel import TensorParallel
from cs336sys.parity import optimizers
from cs336sys.parity.subject import loss_of
from cs336sys.settings.user_code import is_user_code
from cs336sys.settings.verification import VerifiedWorkload
from cs336sys.training import user_models
from cs336sys.training.model import blocks_of
from cs336sys.training.ranks.tensor_strategies import torch_linear


@dataclass(frozen=True)
class Wrapped:
    """The parts of a training step that a wrap has returned."""

    owner: Any  # What the wrap returned, or the first of it.
    module: nn.Module  # To call with a rank's inputs.
    optimizer: torch.optim.Optimizer | None = None
    finish: Callable[[], Any] | None = None  # Called after the backward pass.
    step: Callable[[Any], Any] | None = None  # Runs a whole step on (inputs, targets), and returns the loss.
    backward: Callable[[Tensor], None] | None = None  # Takes the loss; None is the loss's own.
    loss: Callable[[Any, Any], Tensor] | None = None  # Of output and targets, where the output is not all logits.
    scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler

    @contextlib.contextmanager
    def without_synchronization(self, optimizer: Any) -> Iterator[None]:
        """Let backward passes within this accumulate gradients on this rank; a CapabilityError says that it cannot."""
        candidates = (self.owner, self.module, optimizer)  # The owner may be an Accelerator, with no_sync(model).
        no_sync: Any = next((part.no_sync for part in candidates if hasattr(part, "no_sync")), None)
        set_sync: Any = getattr(self.module, "set_requires_gradient_sync", None)
        if no_sync is not None:
            with no_sync(self.module) if inspect.signature(no_sync).parameters else no_sync():
                yield
        elif set_sync is not None:
            set_sync(False)
            yield
            set_sync(True)  # Not after an error, which ends the training.
        else:
            raise CapabilityError("it has no no_sync()")

    def clip(self, optimizer: Any, max_norm: float) -> float:
        """Clip gradients as the owner does, else the module, the optimizer or torch; return their norm before."""
        clip: Any = functools.partial(nn.utils.clip_grad_norm_, self.module.parameters())
        for candidate in (optimizer, self.module, self.owner):  # The last that can is called.
            clip = getattr(candidate, "clip_grad_norm_", None) or clip
        norm = clip(max_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def saves_all(self, method_name: str) -> bool:
        """Return whether the owner's ``state_dict`` or ``load_state_dict`` has states of module and optimizer."""
        method = getattr(self.owner, method_name, None)
        # By __getattr__ an owner may pass on the module's method, which knows no optimizer.
        is_of_owner = method is not None and getattr(method, "__self__", self.owner) is self.owner
        return is_of_owner and not isinstance(self.owner, nn.Module)


def wrap(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    """Wrap the model on this rank. All ranks call it together.

    A UserCodeError says that a user's function fails, or returns nothing that can be trained; a CapabilityError, that a
    ready wrap is not installed, or does not fit the model.
    """
    if not is_user_code(workload.wrap):
        returned = READY[workload.wrap](WrapCall(workload, model, mesh, learning_rate))
    else:
        function = user_models.load(workload.wrap)
        with user_models.telling_errors_of(workload.wrap):
            returned = _call_with_ranks(function, model, mesh)
    return returned if isinstance(returned, Wrapped) else _find_parts(workload, returned, model)


def _call_with_ranks(function: Callable[..., Any], model: nn.Module, mesh: DeviceMesh) -> Any:
    """Call a user's wrap with the model, and the mesh or group that a parameter names; a required one is the mesh."""
    parameters: list[inspect.Parameter] = []  # All but the model.
    with contextlib.suppress(ValueError):  # Python does not know the parameters of some functions in C.
        parameters = list(inspect.signature(function).parameters.values())[1:]
    group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD  # A larger mesh has a group a dimension.
    values: dict[str, Any] = dict.fromkeys(("mesh", "device_mesh", "mesh_or_group"), mesh)
    values |= dict.fromkeys(optimizers.GROUP_NAMES, group)
    for parameter in parameters:
        if parameter.name in values:
            return function(model, **{parameter.name: values[parameter.name]})
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    requires_second = any(
        parameter.kind in positional and parameter.default is inspect.Parameter.empty for parameter in parameters[:1]
    )
    return function(model, mesh) if requires_second else function(model)


def _find_parts(workload: VerifiedWorkload, returned: Any, model: nn.Module) -> Wrapped:
    """Find module, optimizer, step and other parts in what a wrap returned."""
    name = workload.wrap
    optimizer = step = None
    owner = module = model if returned is None else returned  # Without anything returned, it is wrapped in place.
    if isinstance(returned, tuple) and len(returned) == 2:
        owner, optimizer = returned
        module = owner
    elif not isinstance(owner, nn.Module):
        module, optimizer, step = (getattr(owner, part, None) for part in ("module", "optimizer", "step"))
    if not isinstance(module, nn.Module):
        raise UserCodeError(
            f"{name} returned {a_value(returned)}: it should return the module to call, (module, optimizer), or an "
            "object with module, optimizer and step(batch)"
        )
    if optimizer is not None and not hasattr(optimizer, "zero_grad"):
        raise UserCodeError(f"{name} returned {a_value(optimizer)} for an optimizer: it has no zero_grad()")
    finish_name = workload.finish or "finish_gradient_synchronization"
    # A ShardedOptimizer without slices has no gradients to finish, and raises an error if it is asked to.
    candidates = (owner, module, optimizer if getattr(optimizer, "updates_slices", True) else None)
    finish = next(filter(None, (getattr(candidate, finish_name, None) for candidate in candidates)), None)
    if workload.finish is not None and finish is None:
        methods = [name for name in sorted({*dir(type(owner))} - {*dir(nn.Module)}) if not name.startswith("_")]
        raise UserCodeError(f"--finish {workload.finish}: {choose_from(workload.finish, methods or ['none'])}")
    loss = getattr(owner, "loss", None) if owner is not model else None  # A model's own may be anything.
    scaler_class = getattr(owner, "scaler_class", torch.amp.GradScaler)
    return Wrapped(
        owner, module, optimizer, finish, step, loss=loss if callable(loss) else None, scaler_class=scaler_class
    )


@dataclass(frozen=True)
class WrapCall:
    """Arguments of a ready wrap, which returns what a user's may return, or the parts themselves."""

    workload: VerifiedWorkload
    model: nn.Module
    mesh: DeviceMesh
    learning_rate: float

    @property
    def blocks(self) -> list[nn.Module]:
        return list(blocks_of(self.workload.training, self.model).values())

    @property
    def adamw(self) -> torch.optim.Optimizer:
        return optimizers.default_optimizer(self.model.parameters(), self.learning_rate)

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        return {"lr": self.learning_rate, **optimizers.ADAMW_SETTINGS}


def _ddp(call: WrapCall) -> nn.Module:
    group = call.mesh.get_group()
    return nn.parallel.DistributedDataParallel(call.model, process_group=group, find_unused_parameters=True)


def _fsdp2(call: WrapCall) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for module in (*call.blocks, call.model):
        fully_shard(module, mesh=call.mesh)
    return call.model


def _zero(call: WrapCall) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module, group, adamw = _ddp(call), call.mesh.get_group(), torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(module.parameters(), adamw, process_group=group, **call.optimizer_settings)
    return module, optimizer


# Feed-forward layers by their names in cs336_basics, Llama, GPT-2 and torch's own Transformer: those that are cut by
# columns, then the one that is cut by rows.
_PAIRS = [
    names.split() for names in ("w1 w3 w2", "gate_proj up_proj down_proj", "fc1 fc2", "linear1 linear2", "up down")
]


def _torch_tensor_parallel(call: WrapCall) -> nn.Module:
    """Cut every pair of matrices in a block that fits by columns, then by rows, by torch's ``parallelize_module``."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}  # Styles by paths of layers; the model's own path is empty.
    for path, module in call.model.named_modules():
        for names in _PAIRS:
            cut_by_rows = names[-1]
            layers = {name: child for name, child in module.named_children() if name in names}
            # The width between the pair, by which both are cut: the inputs of the last. None where a layer lacks.
            width = layers[cut_by_rows].weight.shape[-1] if len(layers) == len(names) else None
            if not isinstance(width, int) or width % call.mesh.size():
                continue
            for name, layer in layers.items():
                # torch's styles know its own linear layers alone, which can take over a weight that is a parameter.
                if not isinstance(layer, nn.Linear) and isinstance(layer.weight, nn.Parameter):
                    setattr(module, name, torch_linear(layer))
                plan[f"{path}.{name}".lstrip(".")] = RowwiseParallel() if name == cut_by_rows else ColwiseParallel()
    if not plan:
        listed = "; ".join(", ".join(pair) for pair in _PAIRS)
        raise CapabilityError(
            f"tensor-parallel: the model has no feed-forward layers of the names {listed} whose width "
            f"{call.mesh.size()} ranks divide; give a wrap of yours"
        )
    return parallelize_module(call.model, call.mesh, plan)


def _optimizer(call: WrapCall) -> Any:
    module = ddp.BucketedDDP(call.model, "block")
    return module, ShardedOptimizer(call.model.parameters(), torch.optim.AdamW, **call.optimizer_settings)


def _flat_optimizer(call: WrapCall) -> Any:
    model, settings = call.model, call.optimizer_settings
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, flat=True, module=model, **settings)
    return SimpleNamespace(module=model, optimizer=optimizer, scaler_class=ShardedGradScaler)


def _fsdp(call: WrapCall) -> Any:
    blocks = None if call.workload.training.is_ours else call.blocks or None  # None: FSDP finds blocks itself.
    return SimpleNamespace(module=FSDP(call.model, unit_modules=blocks), scaler_class=ShardedGradScaler)


def _tensor(call: WrapCall) -> Any:
    module = TensorParallel(call.model, call.mesh)
    return SimpleNamespace(module=module, loss=module.loss, scaler_class=ShardedGradScaler)


@contextlib.contextmanager
def _optional_package(name: str) -> Iterator[Any]:
    """Import a package or raise a CapabilityError; set torchrun's variables, if it has not: some require them."""
    try:
        package = importlib.import_module(name)
    except ImportError as error:
        raise CapabilityError(f"--wrap {name} needs {name}: pip install {name}") from error
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": "0", "MASTER_ADDR": "localhost"}
    with mock.patch.dict(os.environ, variables | os.environ):
        yield package


def _accelerate(call: WrapCall) -> Wrapped:
    """Hugging Face's ``Accelerator.prepare``, as its examples use it."""
    with _optional_package("accelerate") as package:
        accelerator = package.Accelerator(cpu=next(call.model.parameters()).device.type == "cpu")
    module, optimizer = accelerator.prepare(call.model, call.adamw)
    return Wrapped(owner=module, module=module, optimizer=optimizer, backward=accelerator.backward)


def _deepspeed(call: WrapCall) -> Wrapped:
    """DeepSpeed's engine with ZeRO of stage 1, whose ``step()`` also sets gradients to zero."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # It takes any batch, whatever this says.
        "gradient_clipping": 0.0,  # By default it clips to a norm of 1.
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    with _optional_package("deepspeed") as deepspeed:
        engine, optimizer, _, _ = deepspeed.initialize(
            model=call.model, optimizer=call.adamw, dist_init_required=False, config=settings
        )

    def step(batch: tuple[Any, Any]) -> Tensor:
        inputs, targets = batch
        loss = loss_of(call.workload, user_models.call_model(engine, inputs), targets)
        sequences = torch.tensor(float(len(targets)), device=loss.device)
        all_sequences = sequences.clone()
        dist.all_reduce(all_sequences, group=call.mesh.get_group())
        # It takes the mean over ranks, of which some have fewer sequences.
        engine.backward(loss * sequences * call.mesh.size() / all_sequences)
        engine.step()
        return loss.detach()

    return Wrapped(owner=engine, module=engine, optimizer=optimizer, step=step)


READY: dict[str, Callable[[WrapCall], Any]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "zero": _zero,
    "tensor-parallel": _torch_tensor_parallel,
    "naive": lambda call: ddp.NaiveDDP(call.model),
    "flat": lambda call: ddp.FlatDDP(call.model),
    "overlap": lambda call: ddp.OverlappedDDP(call.model),
    "bucketed": lambda call: ddp.BucketedDDP(call.model, "block"),
    "optimizer": _optimizer,
    "optimizer-flat": _flat_optimizer,
    "fsdp": _fsdp,
    "tensor": _tensor,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}


def line_of_wrap(workload: VerifiedWorkload) -> str:
    """Return ``mine.py, line 12``, where a user's wrap begins; empty for a ready wrap, or where Python knows none."""
    if not is_user_code(workload.wrap):
        return ""
    try:
        function = inspect.unwrap(user_models.load(workload.wrap))
        _, line = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function) or ""
    except (OSError, TypeError, UserCodeError):
        return ""
    return f"{os.path.basename(file)}, line {line}"
