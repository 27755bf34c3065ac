"""Calls a wrap, a user's or a ready one, and finds in what it returns the parts of a training step."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336sys.errors import CapabilityError, UserCodeError, a_value, choose_from
from cs336sys.experiments import user_models
from cs336sys.experiments.models import blocks_of, torch_linear
from cs336sys.experiments.verify.cases import loss_of
from cs336sys.experiments.verify.record import GROUP_NAMES, Together, added_to_environment, default_optimizer
from cs336sys.parallel.gradient_slices import ShardedGradScaler
from cs336sys.user_code import is_user_code
from cs336sys.workload.verification import VerifiedWorkload

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
            return _switched(self.module.set_requires_gradient_sync)
        raise CapabilityError("it has no no_sync()")

    def clip(self, optimizer: Any, max_norm: float) -> float:
        """Clip gradients by what the wrap has for it, else by torch's function; their norm before."""
        clip: Any = functools.partial(torch.nn.utils.clip_grad_norm_, self.module.parameters())
        for candidate in (optimizer, self.module, self.owner):
            clip = getattr(candidate, "clip_grad_norm_", None) or clip
        norm = clip(max_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@contextlib.contextmanager
def _switched(switch: Any) -> Iterator[None]:
    switch(False)
    try:
        yield
    finally:
        switch(True)


def wrap(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    """Wrap the model on this rank. All ranks call it together.

    Raises:
        UserCodeError: a user's function fails, or returns nothing that can be trained.
        CapabilityError: a ready wrap is not installed, or does not fit the model.
    """
    if not is_user_code(workload.wrap):
        return READY[workload.wrap](workload, model, mesh, learning_rate)
    function = user_models.load(workload.wrap)
    with user_models.telling_errors_of(workload.wrap):
        returned = _call_wrap(function, model, mesh)
    return _returned_parts(workload, returned, model)


def _call_wrap(function: Callable[..., Any], model: nn.Module, mesh: DeviceMesh) -> Any:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return function(model)
    group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    values: dict[str, Any] = dict.fromkeys(GROUP_NAMES, group) | dict.fromkeys(_MESH_NAMES, mesh)
    for parameter in parameters[1:]:
        if parameter.name in values:
            return function(model, **{parameter.name: values[parameter.name]})
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    if len(positional) > 1 and positional[1].default is inspect.Parameter.empty:
        return function(model, mesh)
    return function(model)


def _returned_parts(workload: VerifiedWorkload, returned: Any, model: nn.Module) -> Wrapped:
    name = workload.wrap
    optimizer = step = None
    if returned is None:
        # Wrapped in place.
        returned = model
    if isinstance(returned, tuple) and len(returned) == 2:
        owner, optimizer = returned
        module = owner
    elif isinstance(returned, nn.Module):
        owner = module = returned
    else:
        owner = returned
        module = getattr(returned, "module", None)
        optimizer, step = getattr(returned, "optimizer", None), getattr(returned, "step", None)
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
    return Together(map(innermost, several)) if len(several) > 1 else optimizer


Ready = Callable[[VerifiedWorkload, nn.Module, DeviceMesh, float], Wrapped]


def _ddp(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    module = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group(), find_unused_parameters=True)
    return Wrapped(module, module)


def _fsdp2(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(workload.training, model).values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Wrapped(model, model)


def _zero(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = _ddp(workload, model, mesh, learning_rate).module
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, process_group=mesh.get_group(), **_wrap_settings(learning_rate)
    )
    return Wrapped(module, module, optimizer)


def _wrap_settings(learning_rate: float) -> dict[str, Any]:
    names = ("lr", "eps", "weight_decay")
    defaults = default_optimizer([nn.Parameter(torch.zeros(1))], learning_rate).defaults
    return {name: defaults[name] for name in names}


def _torch_tensor_parallel(
    workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float
) -> Wrapped:
    """torch's ``parallelize_module``: every pair of matrices in a block that fits is cut by columns, then by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = _tensor_plan(workload, model, mesh.size())
    for name in plan:
        module = model.get_submodule(name)
        # torch's styles know its own linear layers alone.
        if not isinstance(module, nn.Linear) and isinstance(module.weight, nn.Parameter):
            model.set_submodule(name, torch_linear(module.weight))
    styles: Any = {name: ColwiseParallel() if kind == "columns" else RowwiseParallel() for name, kind in plan.items()}
    return Wrapped(model, parallelize_module(model, mesh, styles))


# Feed-forward layers by their names in cs336_basics, Llama, GPT-2 and torch's own Transformer.
_PAIRS = (
    ("w1", "w3", "w2"),
    ("gate_proj", "up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("linear1", "linear2"),
    ("up", "down"),
)


def _tensor_plan(workload: VerifiedWorkload, model: nn.Module, ranks: int) -> dict[str, str]:
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        for *columns, rows in _PAIRS:
            if all(layer_name in children for layer_name in (*columns, rows)):
                width = children[rows].weight.shape[-1]
                if isinstance(width, int) and width % ranks == 0:
                    plan |= {f"{name}.{layer_name}".lstrip("."): "columns" for layer_name in columns}
                    plan[f"{name}.{rows}".lstrip(".")] = "rows"
    if not plan:
        listed = "; ".join(", ".join(pair) for pair in _PAIRS)
        raise CapabilityError(
            f"tensor-parallel: the model has no feed-forward layers of the names {listed} whose width {ranks} ranks "
            "divide; give a wrap of yours"
        )
    return plan


def _ours(class_name: str, *arguments: Any) -> Ready:
    def prepare(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
        from cs336sys.parallel import ddp

        return _of_ours(getattr(ddp, class_name)(model, *arguments))

    return prepare


def _of_ours(module: Any, **settings: Any) -> Wrapped:
    return Wrapped(module, module, finish=module.finish_gradient_synchronization, **settings)


def _optimizer(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    from cs336sys.parallel.ddp import BucketedDDP
    from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

    module = BucketedDDP(model, "block")
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, **_wrap_settings(learning_rate))
    return _of_ours(module, optimizer=optimizer)


def _flat_optimizer(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, flat=True, module=model, **_wrap_settings(learning_rate)
    )
    return Wrapped(model, model, optimizer, optimizer.finish_gradient_synchronization, scaler_class=ShardedGradScaler)


def _fsdp(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    from cs336sys.parallel.fsdp import FSDP

    training = workload.training
    blocks = None if training.is_ours else list(blocks_of(training, model).values()) or None
    return _of_ours(FSDP(model, unit_modules=blocks), scaler_class=ShardedGradScaler)


def _tensor(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    from cs336sys.parallel.tensor_parallel import TensorParallel

    module = TensorParallel(model, mesh)
    return _of_ours(module, loss=module.loss, scaler_class=ShardedGradScaler)


def _as_torchrun() -> AbstractContextManager[None]:
    """Set what torchrun sets, which some libraries look at though the ranks have met already."""
    met = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": dist.get_rank()}
    variables = {name: str(value) for name, value in met.items()}
    return added_to_environment(variables | {"MASTER_PORT": "0", "MASTER_ADDR": "localhost"})


def _accelerate(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    """Hugging Face's ``Accelerator.prepare``, as its examples use it."""
    try:
        from accelerate import Accelerator  # type: ignore[import-not-found]  # optional
    except ImportError as error:
        raise CapabilityError("--wrap accelerate needs accelerate: pip install accelerate") from error
    with _as_torchrun():
        accelerator = Accelerator(cpu=next(model.parameters()).device.type == "cpu")
    module, optimizer = accelerator.prepare(model, default_optimizer(model.parameters(), learning_rate))
    return Wrapped(module, module, optimizer, backward=accelerator.backward)


def _deepspeed(workload: VerifiedWorkload, model: nn.Module, mesh: DeviceMesh, learning_rate: float) -> Wrapped:
    """DeepSpeed's engine with ZeRO of stage 1, whose ``step()`` also sets gradients to zero."""
    try:
        import deepspeed  # type: ignore[import-not-found]  # optional
    except ImportError as error:
        raise CapabilityError("--wrap deepspeed needs deepspeed: pip install deepspeed") from error
    settings = {
        # Of a batch, it takes what it is given.
        "train_micro_batch_size_per_gpu": 1,
        # Without this it clips to a norm of 1.
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    with _as_torchrun():
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=default_optimizer(model.parameters(), learning_rate),
            dist_init_required=False,
            config=settings,
        )

    def step(batch: tuple[Any, Any]) -> Tensor:
        inputs, targets = batch
        loss = loss_of(workload, user_models.call_model(engine, inputs), targets)
        sequences = torch.tensor(float(len(targets)), device=loss.device)
        whole = sequences.clone()
        dist.all_reduce(whole, group=mesh.get_group())
        # It takes the mean over ranks, of which some have fewer sequences.
        engine.backward(loss * sequences * mesh.size() / whole)
        engine.step()
        return loss.detach()

    return Wrapped(engine, engine, optimizer, step=step)


READY: dict[str, Ready] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "zero": _zero,
    "tensor-parallel": _torch_tensor_parallel,
    "naive": _ours("NaiveDDP"),
    "flat": _ours("FlatDDP"),
    "overlap": _ours("OverlappedDDP"),
    "bucketed": _ours("BucketedDDP", "block"),
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
