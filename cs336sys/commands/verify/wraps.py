"""Calls a wrap, a user's or a ready one, and finds in what it returns the parts of a training step."""

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336sys.commands.verify import record as recording
from cs336sys.commands.verify.cases import loss_of
from cs336sys.errors import CapabilityError, UserCodeError, a_value, choose_from
from cs336sys.parallel import ddp
from cs336sys.parallel.gradient_slices import ShardedGradScaler
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.settings.user_code import is_user_code
from cs336sys.settings.verification import VerifiedWorkload
from cs336sys.training import user_models
from cs336sys.training.model import blocks_of, torch_linear

FINISH = "finish_gradient_synchronization"

# How parameters of functions are called that take a mesh; those that take a group are GROUP_NAMES.
_MESH_NAMES = ("mesh", "device_mesh", "mesh_or_group")


@dataclass(frozen=True)
class Wrapped:
    """The parts of a training step that a wrap has returned.

    Attributes:
        owner: what the wrap returned, or the first of it.
        module: to call with a rank's inputs.
        optimizer: of the wrap; None where it returned none.
        finish: called after the backward pass; None where nothing is.
        step: runs a whole step on (inputs, targets) and returns the loss; None: the program runs it.
        backward: takes the loss; None is its own ``backward()``.
        loss: of what the module returned and the targets, where that is not all logits.
        scaler_class: scales the loss.
    """

    owner: Any
    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    finish: Callable[[], Any] | None = None
    step: Callable[[Any], Any] | None = None
    backward: Callable[[Tensor], None] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler

    def without_synchronization(self, optimizer: Any) -> AbstractContextManager[Any]:
        """Within this, backward passes accumulate gradients on this rank.

        Raises:
            CapabilityError: it has no way to.
        """
        candidate: Any
        for candidate in (self.owner, self.module, optimizer):
            if hasattr(candidate, "no_sync"):
                takes_module = len(inspect.signature(candidate.no_sync).parameters) > 0
                return candidate.no_sync(self.module) if takes_module else candidate.no_sync()
        if hasattr(self.module, "set_requires_gradient_sync"):
            switch: Any = self.module.set_requires_gradient_sync
            switch(False)
            stack = contextlib.ExitStack()
            stack.callback(switch, True)
            return stack
        raise CapabilityError("it has no no_sync()")

    def clip(self, optimizer: Any, max_norm: float) -> float:
        """Clip gradients by what the wrap has for it, else by torch's function; their norm before."""
        clip: Any = functools.partial(torch.nn.utils.clip_grad_norm_, self.module.parameters())
        for candidate in (optimizer, self.module, self.owner):
            clip = getattr(candidate, "clip_grad_norm_", None) or clip
        norm = clip(max_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def wrap(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    """Wrap the model on this rank. All ranks call it together.

    Raises:
        UserCodeError: a user's function fails, or returns nothing that can be trained.
        CapabilityError: a ready wrap is not installed, or does not fit the model.
    """
    if not is_user_code(workload.wrap):
        returned = READY[workload.wrap](WrapCall(workload, model, mesh, learning_rate))
    else:
        function = user_models.load(workload.wrap)
        with user_models.telling_errors_of(workload.wrap):
            returned = _call_wrap(function, model, mesh)
    return _returned_parts(workload, returned, model)


def _call_wrap(function: Callable[..., Any], model: nn.Module, mesh: DeviceMesh) -> Any:
    parameters: list[inspect.Parameter] = []
    # Python does not know the parameters of some functions in C.
    with contextlib.suppress(ValueError):
        parameters = list(inspect.signature(function).parameters.values())[1:]
    group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    values: dict[str, Any] = dict.fromkeys(recording.GROUP_NAMES, group) | dict.fromkeys(_MESH_NAMES, mesh)
    for parameter in parameters:
        if parameter.name in values:
            return function(model, **{parameter.name: values[parameter.name]})
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_second = bool(parameters) and parameters[0].kind in kinds and parameters[0].default is inspect.Parameter.empty
    return function(model, mesh) if takes_second else function(model)


def _returned_parts(workload: VerifiedWorkload, returned: Any, model: nn.Module) -> Wrapped:
    if isinstance(returned, Wrapped):
        return returned
    name = workload.wrap
    optimizer = step = None
    # Without anything returned, it is wrapped in place.
    owner = module = model if returned is None else returned
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
    candidates = (getattr(candidate, workload.finish or FINISH, None) for candidate in (owner, module, optimizer))
    finish = next(filter(None, candidates), None)
    if workload.finish is not None and finish is None:
        methods = [
            method for method in dir(type(owner)) if not method.startswith("_") and not hasattr(nn.Module, method)
        ]
        raise UserCodeError(f"--finish {workload.finish}: {choose_from(workload.finish, methods or ['none'])}")
    loss = getattr(owner, "loss", None) if owner is not model else None
    scaler_class = getattr(owner, "scaler_class", torch.amp.GradScaler)
    return Wrapped(
        owner, module, optimizer, finish, step, loss=loss if callable(loss) else None, scaler_class=scaler_class
    )


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates this rank's parameters, or several of them, where others wrap it."""
    while not type(optimizer).__module__.startswith("cs336sys.parallel"):
        inner = {id(value): value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)}
        if len(inner) != 1 or id(optimizer) in inner:
            break
        (optimizer,) = inner.values()
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    lists = [values if isinstance(values, list | tuple) else [values] for values in vars(optimizer).values()]
    several = [value for values in lists for value in values if isinstance(value, torch.optim.Optimizer)]
    return recording.Together(map(innermost, several)) if len(several) > 1 else optimizer


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
    def optimizer_settings(self) -> dict[str, Any]:
        return {"lr": self.learning_rate, **recording.ADAMW_SETTINGS}


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

    module, settings = _ddp(call), call.optimizer_settings
    group = call.mesh.get_group()
    return module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, process_group=group, **settings)


# Feed-forward layers by their names in cs336_basics, Llama, GPT-2 and torch's own Transformer.
_PAIRS = (
    ("w1", "w3", "w2"),
    ("gate_proj", "up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("linear1", "linear2"),
    ("up", "down"),
)


def _torch_tensor_parallel(call: WrapCall) -> nn.Module:
    """torch's ``parallelize_module``: every pair of matrices in a block that fits is cut by columns, then by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for name, module in call.model.named_modules():
        children = dict(module.named_children())
        for *columns, rows in _PAIRS:
            layers = {layer_name: children[layer_name] for layer_name in (*columns, rows) if layer_name in children}
            width = layers[rows].weight.shape[-1] if len(layers) == len(columns) + 1 else None
            if not isinstance(width, int) or width % call.mesh.size():
                continue
            for layer_name, layer in layers.items():
                # torch's styles know its own linear layers alone.
                if not isinstance(layer, nn.Linear) and isinstance(layer.weight, nn.Parameter):
                    setattr(module, layer_name, torch_linear(layer.weight))
                style = RowwiseParallel if layer_name == rows else ColwiseParallel
                plan[f"{name}.{layer_name}".lstrip(".")] = style()
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
    from cs336sys.parallel.fsdp import FSDP

    blocks = None if call.workload.training.is_ours else call.blocks or None
    return SimpleNamespace(module=FSDP(call.model, unit_modules=blocks), scaler_class=ShardedGradScaler)


def _tensor(call: WrapCall) -> Any:
    from cs336sys.parallel.tensor_parallel import TensorParallel

    module = TensorParallel(call.model, call.mesh)
    return SimpleNamespace(module=module, loss=module.loss, scaler_class=ShardedGradScaler)


def _as_torchrun() -> AbstractContextManager[None]:
    """Set what torchrun sets, which some libraries look at though the ranks have met already."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    met = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": "0", "MASTER_ADDR": "localhost"}
    return recording.added_to_environment(met)


def _optional(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise CapabilityError(f"--wrap {package} needs {package}: pip install {package}") from error


def _accelerate(call: WrapCall) -> Wrapped:
    """Hugging Face's ``Accelerator.prepare``, as its examples use it."""
    model, package = call.model, _optional("accelerate")
    with _as_torchrun():
        accelerator = package.Accelerator(cpu=next(model.parameters()).device.type == "cpu")
    module, optimizer = accelerator.prepare(model, recording.default_optimizer(model.parameters(), call.learning_rate))
    return Wrapped(module, module, optimizer, backward=accelerator.backward)


def _deepspeed(call: WrapCall) -> Wrapped:
    """DeepSpeed's engine with ZeRO of stage 1, whose ``step()`` also sets gradients to zero."""
    deepspeed = _optional("deepspeed")
    settings = {
        # Of a batch, it takes what it is given.
        "train_micro_batch_size_per_gpu": 1,
        # Without this it clips to a norm of 1.
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = recording.default_optimizer(call.model.parameters(), call.learning_rate)
    with _as_torchrun():
        engine, optimizer, _, _ = deepspeed.initialize(
            model=call.model, optimizer=optimizer, dist_init_required=False, config=settings
        )

    def step(batch: tuple[Any, Any]) -> Tensor:
        inputs, targets = batch
        loss = loss_of(call.workload, user_models.call_model(engine, inputs), targets)
        sequences = torch.tensor(float(len(targets)), device=loss.device)
        whole = sequences.clone()
        dist.all_reduce(whole, group=call.mesh.get_group())
        # It takes the mean over ranks, of which some have fewer sequences.
        engine.backward(loss * sequences * call.mesh.size() / whole)
        engine.step()
        return loss.detach()

    return Wrapped(engine, engine, optimizer, step=step)


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
    """``mine.py, line 12``, where a user's wrap begins; empty for a ready wrap, or where Python does not know."""
    if not is_user_code(workload.wrap):
        return ""
    try:
        function = inspect.unwrap(user_models.load(workload.wrap))
        _, line = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function) or ""
    except (OSError, TypeError, UserCodeError):
        return ""
    return f"{os.path.basename(file)}, line {line}"
