"""Refuse or correct what takes this rank's slices for whole gradients, and optimizers that are not elementwise."""

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import gather_numbers, group_device, is_stream_captured, require_process_group
from cs336sys.parallel.wrapped_modules import HANDS_GRADIENT_ON, has_marked_hook

# Attributes of parameters, see mark_slice(). kernels.adamw.AdamW looks for the first, too, and may not import this.
_MARK = "is_slice_of_this_rank"
_WHOLE = "whole_shape_and_dimension"
_LACKS_RANKS = "gradient_lacks_ranks"
WAS_CUT = "was_cut_into_slices"  # True of a whole parameter that was trained when a slice or part took its place.

# Not attributes of parameters, which are pickled.
_lacks_ranks = WeakTensorKeyDictionary()

# Two functions of torch.nn.utils without their decorators: the one that clip_grad_norm_ calls once it knows the norm,
# and users as clip_grads_with_norm_; and clip_grad_value_.
_CLIP_BY_NORM = inspect.getclosurevars(clip_grad._clip_grads_with_norm_).nonlocals["func"]
_CLIP_VALUES = inspect.getclosurevars(clip_grad.clip_grad_value_).nonlocals["func"]


def mark_slice(
    parameter: nn.Parameter, ranks: Collection[int] | None = None, whole: tuple[tuple[int, ...], int] | None = None
) -> None:
    """Mark a parameter as this rank's slice of a whole one, and let functions that would treat it as whole refuse it.

    The first slice of a process wraps what takes gradients, scales losses or updates parameters in torch.

    Args:
        ranks: the ranks of the default group that hold the slices; None if each may hold another.
        whole: the shape of the whole parameter, and the dimension along which it is cut as ``torch.chunk`` does; None
            if it is cut otherwise.
    """
    setattr(parameter, _MARK, None if ranks is None else frozenset(ranks))
    setattr(parameter, _WHOLE, whole)
    refuse_clipping_alone()
    refuse_selected_gradients()
    refuse_other_scalers()
    _refuse_torch_ddp()
    _check_optimizers()


def mark_unfinished(parameter: nn.Parameter, lacks_ranks: Callable[[], bool]) -> None:
    """Let autograd.grad refuse the parameter, and optimizers while this bound method says its gradient lacks ranks."""
    setattr(parameter, _LACKS_RANKS, True)
    _lacks_ranks[parameter] = weakref.WeakMethod(lacks_ranks)
    refuse_selected_gradients()


@functools.cache
def _check_optimizers() -> None:
    """Let optimizers of slices refuse to step unfinished gradients, or not each element by itself, from now on."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # A step that is compiled or captured now has run before, as warm-up, and was tried then.
    if torch.compiler.is_compiling() or is_stream_captured():
        return
    for group in optimizer.param_groups:
        first = next((leaf for leaf in group["params"] if is_slice(leaf) or getattr(leaf, WAS_CUT, False)), None)
        if getattr(first, WAS_CUT, False):
            raise UsageError(
                "the optimizer was built before its parameters were cut, and would update none that is trained: build "
                "it over parameters() of the FSDP or TensorParallel module"
            )
        # One of them stands for all: their gradients are finished together. (To look into vars() is fastest.)
        watched = (tensor for tensor in group["params"] if _LACKS_RANKS in vars(tensor) and tensor.grad is not None)
        lacks_ranks = next((_lacks_ranks.get(tensor, lambda: None)() for tensor in watched), None)
        if lacks_ranks is not None and lacks_ranks():
            raise UsageError(
                "gradients lack those of other ranks: call finish_gradient_synchronization() of the FSDP or "
                "TensorParallel module, on every rank, between the backward pass and step()"
            )
        if first is not None:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            require_elementwise_step(optimizer, options, first.device)


def is_slice(parameter: Tensor) -> bool:
    """Return whether :func:`mark_slice` has marked it."""
    return hasattr(parameter, _MARK)


def whole_of(parameter: Tensor) -> tuple[tuple[int, ...], int] | None:
    """Return the shape of the whole parameter of a slice and the dimension that is cut, see :func:`mark_slice`."""
    return getattr(parameter, _WHOLE)


def require_whole(named_parameters: Iterable[tuple[str, nn.Parameter]], group: dist.ProcessGroup | None = None) -> None:
    """Refuse parameters of which the ranks of ``group`` hold different slices: they cannot be made the same."""
    members = set(dist.get_process_group_ranks(group))
    for name, parameter in named_parameters:
        if is_slice(parameter):
            holders = getattr(parameter, _MARK)
            if holders is None or len(members & holders) > 1:
                raise UsageError(
                    f"{name} is a slice, and other ranks hold other slices of it: wrap a module whose parameters are "
                    "whole, or give a group of ranks that hold the same slice"
                )


@torch.no_grad()
def clip_over_ranks(
    slices: Sequence[Tensor],
    whole: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    groups: Sequence[dist.ProcessGroup | None],
    *,
    dtypes: Collection[torch.dtype] = (),
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``. Every rank must call it.

    Args:
        slices: tensors of which each rank has other elements, possibly none.
        whole: tensors that all ranks have.
        norm_type: positive, or infinite for the largest element.
        groups: the ranks that have other elements: of each dimension of a mesh, one group.
        dtypes: those of tensors that only other ranks have.

    Returns:
        the norm before, (), the same on every rank: in float64 if a parameter is, else in float32.

    Raises:
        UsageError: ``norm_type`` is not positive.
        RuntimeError: with ``error_if_nonfinite``, if the norm is not finite: on every rank, before anything was scaled.
    """
    norm_type = float(norm_type)  # As torch, which takes "inf".
    if not norm_type > 0:
        raise UsageError(f"norm_type {norm_type}: must be positive, or inf")
    norm = _norm(slices, norm_type)  # The norm of all gradients is the norm of the norms of their parts.
    for group in groups:
        norm = torch.linalg.vector_norm(gather_numbers(norm, group), norm_type)
    norm = torch.linalg.vector_norm(torch.stack((norm, _norm(whole, norm_type).to(norm.device))), norm_type)
    dtypes = {*dtypes, *(tensor.dtype for tensor in (*slices, *whole))}
    norm = norm.to(torch.float64 if not {torch.float64, torch.complex128}.isdisjoint(dtypes) else torch.float32)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {norm.item()}: some are NaN or infinite, on some rank")
    _CLIP_BY_NORM([*slices, *whole], max_norm, norm)  # Torch's clip_grads_with_norm_(), which would refuse slices.
    return norm


def _norm(tensors: Iterable[Tensor], norm_type: float) -> Tensor:
    """Return the norm of the gradients, (), in float64; 0 if there are none.

    The norm of each tensor is computed as torch does, in at least fp32, and that of these norms in float64.
    """
    gradients_of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.grad is not None and tensor.grad.numel():
            gradients_of_dtype.setdefault(tensor.grad.dtype, []).append(tensor.grad)
    norms = [torch.zeros(1, dtype=torch.float64, device=group_device())]
    for dtype, gradients in gradients_of_dtype.items():
        sum_dtype = torch.float32 if dtype.itemsize < 4 else None
        tensor_norms = torch._foreach_norm(gradients, norm_type, sum_dtype)
        norms.append(torch.stack([norm.to(norms[0].device, torch.float64) for norm in tensor_norms]))
    return torch.linalg.vector_norm(torch.cat(norms), norm_type)


@functools.cache
def refuse_clipping_alone() -> None:
    """Let ``clip_grad_norm_`` and ``clip_grads_with_norm_`` of torch refuse slices, from now on and in this process.

    Each rank would scale what it holds by another factor. ``clip_grad_value_`` clips each element by itself: it accepts
    slices, of which a rank may have none. What their decorator calls is replaced, and not they themselves, because
    scripts have imported them by name before the first slice is made.
    """

    @functools.wraps(_CLIP_BY_NORM)
    def clip_by_norm(parameters: Tensor | Iterable[Tensor], *args: Any, **settings: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(is_slice(parameter) or has_marked_hook(parameter, HANDS_GRADIENT_ON) for parameter in parameters):
            raise UsageError(
                "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's share of the gradients: call "
                "clip_grad_norm_() of the FSDP or TensorParallel module, or of the sharded optimizer, on every rank"
            )
        return _CLIP_BY_NORM(parameters, *args, **settings)

    @functools.wraps(_CLIP_VALUES)
    def clip_values(parameters: Tensor | Iterable[Tensor], *args: Any, **settings: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(has_marked_hook(parameter, HANDS_GRADIENT_ON) for parameter in parameters):
            raise UsageError(
                "torch.nn.utils.clip_grad_value_ would clip nothing, because backward passes leave no gradients with "
                "these parameters: give it own_tensors of the sharded optimizer, or call its clip_grad_norm_()"
            )
        # Without any gradient torch's raises an assertion.
        if any(parameter.grad is not None for parameter in parameters):
            _CLIP_VALUES(parameters, *args, **settings)

    replacements = {clip_grad._clip_grads_with_norm_: clip_by_norm, clip_grad.clip_grad_value_: clip_values}
    for decorated, function in replacements.items():
        # The decorator's variable "func", by which it calls the function.
        cells = dict(zip(decorated.__code__.co_freevars, decorated.__closure__ or (), strict=True))
        cells["func"].cell_contents = function


@functools.cache
def refuse_selected_gradients() -> None:
    """Let ``backward(inputs=...)`` and ``torch.autograd.grad`` refuse slices, from now on and in this process.

    Such a pass runs no hooks that reduce gradients, and does not reach slices that stand outside of the graph: it
    returned parts of gradients, or nothing. Both functions of torch call this one.
    """
    run_backward: Callable[..., Any] = torch.autograd._engine_run_backward

    @functools.wraps(run_backward)
    def run_backward_checked(outputs: Any, *args: Any, **settings: Any) -> Any:
        # torch calls it with (outputs, their gradients, whether to keep the graph, whether to create one, inputs).
        inputs = args[3]
        if any(isinstance(leaf, Tensor) and (is_slice(leaf) or hasattr(leaf, _LACKS_RANKS)) for leaf in inputs):
            raise UsageError(
                "torch.autograd.grad() and backward(inputs=...) would leave out the other ranks' parts of a gradient: "
                "call backward() without inputs and finish_gradient_synchronization(), and read grad"
            )
        return run_backward(outputs, *args, **settings)

    torch.autograd._engine_run_backward = run_backward_checked  # type: ignore[assignment]


@functools.cache
def _refuse_torch_ddp() -> None:
    """Let torch's DistributedDataParallel refuse slices of which its ranks have others, from now on in this process.

    It would overwrite them with rank 0's, or where these have another shape wait for ever.
    """
    construct = nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(construct)
    def construct_checked(*args: Any, **settings: Any) -> None:
        arguments = inspect.signature(construct).bind(*args, **settings).arguments
        module, mesh = arguments["module"], arguments.get("device_mesh")
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())  # Names of what torch leaves alone.
        averaged = [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
        require_whole(averaged, arguments.get("process_group") if mesh is None else mesh.get_group())
        construct(*args, **settings)

    nn.parallel.DistributedDataParallel.__init__ = construct_checked  # type: ignore[method-assign]


class ShardedGradScaler(torch.amp.GradScaler):
    """Scales the loss, and skips a step on all ranks where a gradient overflowed on any (Micikevicius et al. 2018).

    It is used like ``torch.amp.GradScaler``, with the same calls on every rank, after gradients are averaged::

        scaler.scale(loss_function(sharded(inputs), targets)).backward()
        sharded.finish_gradient_synchronization()
        scaler.step(optimizer)
        scaler.update()

    A rank sees overflow in what it holds: with :class:`~cs336sys.parallel.fsdp.FSDP`, and with
    :class:`~cs336sys.parallel.sharded_optimizer.ShardedOptimizer` and ``flat=True``, in its slices alone. A plain
    scaler would step on one rank and not on the other, and scale their losses differently from then on; these two
    refuse it. Where every rank holds whole averaged gradients, both scalers do the same. Unscaling takes one all-reduce
    of one byte for each optimizer. ``torch.distributed.fsdp`` has a scaler of this name that does not know of slices
    within an optimizer, nor agree on overflow when the optimizer is a fused one.
    """

    def __init__(self, *args: Any, **settings: Any):
        """Arguments are those of ``torch.amp.GradScaler``.

        Raises:
            UsageError: there is no process group, and the scaler is enabled.
        """
        super().__init__(*args, **settings)
        if self.is_enabled():
            require_process_group(type(self).__name__)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale gradients and return, by device, whether any overflowed on any rank.

        ``unscale_()`` calls it and, for fused optimizers, which unscale themselves, ``step()``.
        """
        if getattr(optimizer, "updates_slices", False):
            # A ShardedOptimizer's groups have parameters without gradients. torch reads nothing but groups here.
            sliced: Any = optimizer
            sliced.finish_gradient_synchronization()  # It gives own_tensors their gradients.
            optimizer = cast(torch.optim.Optimizer, SimpleNamespace(param_groups=[{"params": sliced.own_tensors}]))
        overflows = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # This rank may hold nothing of these parameters, and takes part nevertheless.
        overflows = overflows or {found_inf.device: found_inf}
        overflows_here = torch.stack([overflow.to(group_device()) for overflow in overflows.values()])
        overflows_anywhere = overflows_here.amax().to(torch.uint8)
        dist.all_reduce(overflows_anywhere, dist.ReduceOp.MAX)
        for overflow in overflows.values():
            overflow.copy_(overflows_anywhere)
        return overflows


@functools.cache
def refuse_other_scalers() -> None:
    """Let scalers that decide on each rank alone refuse optimizers of slices, from now on and in this process.

    Their methods are wrapped, because a scaler asks nothing of gradients or of the optimizer, and does not call the
    optimizer on the rank that skips.
    """

    def unscale_checked(scaler: torch.amp.GradScaler, method: Callable[..., Any], optimizer: Any) -> Any:
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        updates_slices = getattr(optimizer, "updates_slices", False) or any(map(is_slice, updated))
        if scaler.is_enabled() and not isinstance(scaler, ShardedGradScaler) and updates_slices:
            raise UsageError(
                f"{type(scaler).__name__} would skip a step on the rank that finds an overflow and not on the others, "
                "because each has slices of the gradients: choose "
                "cs336sys.parallel.gradient_slices.ShardedGradScaler, or bf16"
            )
        return method(scaler, optimizer)

    # For a fused optimizer, step() calls the second, without unscale_().
    for name in ("unscale_", "_check_inf_per_device"):
        method = getattr(torch.amp.GradScaler, name)
        checked: Any = functools.partialmethod(unscale_checked, method)
        setattr(torch.amp.GradScaler, name, functools.update_wrapper(checked, method))


Options = Mapping[str, Any]
OptimizerClass = type[torch.optim.Optimizer]

# Of a trial: RAdam's update is another one from its sixth step on.
_STEPS = 8

# How a matrix is cut into two slices: its rows as FSDP does, or columns as TensorParallel does, or its elements in
# memory order as ShardedOptimizer does. For each: the shape to cut, its dimension, and the size of the first slice.
_MATRIX = (16, 8)
_CUTS = {"rows": (_MATRIX, 0, 5), "columns": (_MATRIX, 1, 3), "elements": ((128,), 0, 40)}


def require_elementwise(
    optimizer_cls: OptimizerClass,
    options: Options,
    device: torch.device,
    group_options: Options,
    cut: str = "elements",
    refusal: str = "flat=True cannot shard",
    remedy: str = "choose flat=False",
) -> frozenset[str]:
    """Step a small matrix as a whole and in two slices, and compare the results and the optimizers' states.

    Optimizers that use the norm of a parameter (LAMB), row and column means (Adafactor) or matrix products (Muon)
    differ or fail; so does one that draws random numbers (those of the program are not used up). Eight steps are
    compared: one that updates otherwise only after these is not noticed.

    Args:
        options: what the class is constructed with, parameters aside.
        device: where the parameters are; some options work on some devices only.
        group_options: options of a group of parameters, by which the class may update otherwise.
        cut: rows, columns or elements.
        refusal: how the error begins.
        remedy: how it ends.

    Returns:
        the keys of the state that have one value for the whole matrix, as "step" has.
    """
    refusal = f"{refusal} {optimizer_cls.__name__}"
    # The matrix, and its gradient in each step.
    tensors = torch.randn(1 + _STEPS, *_MATRIX, generator=torch.Generator().manual_seed(0)).to(device)
    shape, dim, first_size = _CUTS[cut]
    # Dimension 0 counts the tensors.
    slices = [part.contiguous() for part in tensors.view(-1, *shape).tensor_split([first_size], 1 + dim)]
    # Outside of the "try" below: what the class raises about its options is passed on unchanged.
    optimizer_cls([{**group_options, "params": [nn.Parameter(tensors[0])]}], **options)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            whole, *parts = (_run_steps(optimizer_cls, options, group_options, values) for values in (tensors, *slices))
        except Exception as error:
            raise UsageError(f"{refusal}, which cannot step a slice ({error}): {remedy}") from error
    for key, value in whole.items():
        if not _is_same_in_slices(value, [part.get(key) for part in parts], dim):
            raise UsageError(f"{refusal}, whose {key} is not computed element by element: {remedy}")
    return frozenset(key for key, value in whole.items() if isinstance(value, Tensor) and value.numel() == 1)


# For each class of optimizers, the devices and kinds of options with which it was accepted.
_accepted: "weakref.WeakKeyDictionary[type, set[Hashable]]" = weakref.WeakKeyDictionary()


def require_elementwise_step(optimizer: torch.optim.Optimizer, group_options: Options, device: torch.device) -> None:
    """Refuse to step slices by an optimizer of the user's that does not update each element by itself.

    Its class is tried once for each kind of options, unless it has the attribute ``updates_elementwise = True``: some
    classes need more than their options to be constructed.

    Args:
        group_options: all options of one of its groups.
        device: where the parameters are.
    """
    optimizer_cls = type(optimizer)
    kind = device, options_kind(group_options)
    if getattr(optimizer_cls, "updates_elementwise", False) or kind in _accepted.setdefault(optimizer_cls, set()):
        return
    # Groups have entries that the constructor does not take, for example a scheduler's initial_lr.
    arguments = inspect.signature(optimizer_cls).parameters
    options = {key: value for key, value in {**optimizer.defaults, **group_options}.items() if key in arguments}
    refusal = "slices of FSDP or TensorParallel cannot be updated by"
    remedy = "choose a class that updates each element by itself, as AdamW and SGD do"
    for cut in ("rows", "columns"):  # FSDP cuts into rows, TensorParallel into rows or columns.
        try:
            require_elementwise(optimizer_cls, options, device, group_options, cut, refusal, remedy)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{refusal} {optimizer_cls.__name__}, which cannot be tried on a small matrix "
                f"({type(error).__name__}: {error}): set updates_elementwise = True in the class if it updates each "
                "element by itself"
            ) from error
    _accepted[optimizer_cls].add(kind)


def options_kind(value: Any) -> Hashable:
    """Return a key that is equal for options with which a class computes alike.

    All numbers but zero are alike, so that a schedule of learning rates does not need a new trial in each step.
    """
    if isinstance(value, Mapping):
        return tuple((key, options_kind(option)) for key, option in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(options_kind, value))
    if isinstance(value, (str, bool)):
        return value
    # A tensor is not asked whether it is zero: the CPU would wait for a GPU's answer.
    return type(value), isinstance(value, Tensor) or bool(value)


def require_parameters_apart(
    optimizer_cls: OptimizerClass, options: Options, device: torch.device, group_options: Options
) -> frozenset[str]:
    """Step a small matrix alone and beside another, and refuse a class that then updates it otherwise.

    Those that clip by the norm of all gradients do. A class that draws random numbers, or that cannot step such
    matrices, is not refused. The arguments are those of :func:`require_elementwise`; no keys are returned.
    """
    tensors = torch.randn(2, 1 + _STEPS, *_MATRIX, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            alone, repeated, together = (
                _run_steps(optimizer_cls, options, group_options, *tensors[:count])["update"] for count in (1, 1, 2)
            )
        except Exception:
            return frozenset()
    if torch.equal(alone, repeated) and not torch.allclose(alone, together, rtol=1e-3, atol=1e-7, equal_nan=True):
        raise UsageError(
            f"{optimizer_cls.__name__} cannot be sharded, because what it does to a parameter depends on the others, "
            "as by a norm of all gradients: choose a class that updates each parameter by itself, and clip gradients "
            "before step()"
        )
    return frozenset()


def _run_steps(
    optimizer_cls: OptimizerClass, options: Options, group_options: Options, values: Tensor, *others: Tensor
) -> dict[str, Any]:
    """Return the update and the state of a parameter that starts as ``values[0]`` and gets the rest as gradients.

    ``others`` are values of parameters that are updated beside it.
    """
    parameter, *_ = parameters = [nn.Parameter(tensors[0].clone()) for tensors in (values, *others)]
    optimizer = optimizer_cls([{**group_options, "params": parameters}], **options)
    for gradients in zip(values[1:], *(tensors[1:] for tensors in others), strict=True):
        for updated, gradient in zip(parameters, gradients, strict=True):
            updated.grad = gradient.clone()
        optimizer.step()
    return {"update": parameter.detach() - values[0], **optimizer.state[parameter]}


def _is_same_in_slices(whole: Any, parts: list[Any], dim: int) -> bool:
    """Return whether a value of the whole matrix, such as its update, is that of its slices joined along ``dim``."""
    # A single value, as "step", is not cut. If it depends on other elements, so does the update, which is compared.
    if not isinstance(whole, Tensor) or whole.numel() == 1:
        return True
    if not all(isinstance(part, Tensor) for part in parts) or sum(part.numel() for part in parts) != whole.numel():
        return False
    # Elements in a vector register and those left over may be rounded differently; real differences are far larger.
    return torch.allclose(torch.cat(parts, dim).view(whole.shape), whole, rtol=1e-3, atol=1e-7, equal_nan=True)
