"""The AdamW optimizer whose step is a few launches."""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from cs336sys.kernels.adamw import kernels
from cs336sys.kernels.adamw.tables import (
    TRITON_DTYPES,
    GroupedParameter,
    ParameterSet,
    Update,
    Variant,
    is_capturing,
)
from cs336sys.kernels.operators import check_tensors

STATE_DTYPES = ("fp32", "bf16", "split")

# Flags of torch.optim.AdamW that change its updates, and that this one lacks.
_MISSING_FLAGS = ("amsgrad", "maximize")


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101, algorithm 2), as ``torch.optim.AdamW``.

    A step is a few launches, whatever the number of parameters. Arithmetic is in float32, bias corrections in float64,
    and results are equal from run to run. The host never waits, and once a step has been taken, steps can be captured
    in a CUDA graph.

    What a step reads and writes, besides the gradient, which may be in float32, float16 or bfloat16:

    ============  =========  =============================================================  ================
    state_dtype   parameter  weight                                                         moments
    ============  =========  =============================================================  ================
    any           float32    the parameter, and its copy if one is attached                 as below
    any           float16    float32 in the state, "master"; the parameter is its copy      as below
    fp32          bfloat16   float32 in the state, "master"; the parameter is its copy      float32
    bf16          bfloat16   the parameter, rounded stochastically                          bfloat16, likewise
    split         bfloat16   float32: the parameter and 16 bits in the state, "low_bits"    float32
    ============  =========  =============================================================  ================

    Stochastic rounding takes its bits from Philox by step, parameter and element. A split weight is exactly the float32
    one, and its parameter that weight rounded to the nearest (ties away from zero).

    The first step makes masters and low bits out of the parameters. Steps also write copies of float32 parameters in
    half precision: :meth:`attach_copy`. ``torch.optim.AdamW`` reads the state dict, and this class reads its; "master"
    and "low_bits" are then made anew.

    Args:
        params: float32, float16 or bfloat16 parameters on one device, dense in memory, or dicts with ``params`` and
            their own ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        lr: learning rate, a number or a tensor of one element, at least 0.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment, at least 0.
        weight_decay: decoupled, at least 0.
        max_grad_norm: scales the gradients of a step so that their joint L2 norm is at most this, as
            ``torch.nn.utils.clip_grad_norm_`` does, without writing them. The norm is of this process's gradients.
        state_dtype: "fp32", "bf16" or "split".

    Raises:
        ValueError: a setting is out of range, parameters are not dense or on several devices, or ``max_grad_norm`` is
            given where a parameter is a slice of this rank (FSDP, tensor parallelism).
        TypeError: a parameter's dtype is not supported.
        CapabilityError: the parameters are not on a CUDA GPU, and the kernels were not loaded in Triton's interpreter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        max_grad_norm: float | None = None,
        state_dtype: str = "fp32",
    ):
        if state_dtype not in STATE_DTYPES:
            raise ValueError(
                f"AdamW: state_dtype {state_dtype!r} does not exist: choose one of {', '.join(STATE_DTYPES)}"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"AdamW: max_grad_norm is {max_grad_norm}, but must be above 0")
        self.max_grad_norm = max_grad_norm  # super().__init__() checks parameters by it.
        self.state_dtype = state_dtype
        self._reset_tables()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _reset_tables(self) -> None:
        """Begin without what is not pickled: tables of addresses, attached copies, and the last norm."""
        self._updated_by_step = ParameterSet([])
        self._updated_in_backward: list[ParameterSet] = []
        self._norm_and_clip_factor: Tensor | None = None
        self._copies: dict[Tensor, Tensor] = {}

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm, "state_dtype": self.state_dtype}

    def __setstate__(self, state: dict) -> None:
        # Unpickling gives all attributes; load_state_dict() comes through here, too, with the state alone.
        if "state_dtype" in state:
            self._reset_tables()
        super().__setstate__(state)

    def add_param_group(self, param_group: dict) -> None:
        """Check a group, and add it; a group that is refused is not added."""
        settings = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            value = settings[name]
            if isinstance(value, Tensor) and (name != "lr" or value.numel() != 1):
                raise ValueError(f"AdamW: {name} is a tensor of shape {tuple(value.shape)}, but must be a number")
            if not value >= 0:  # Of a tensor on a GPU the host waits for it.
                raise ValueError(f"AdamW: {name} is {value}, but must be at least 0")
        _check_betas(settings["betas"])
        for name in _MISSING_FLAGS:
            if settings.get(name):
                raise ValueError(f"AdamW: {name}={settings[name]} in a group: this optimizer does not have it")
        for name in ("max_grad_norm", "state_dtype"):
            if name in settings:
                raise ValueError(f"AdamW: {name} in a group: it is one for all groups, an argument of AdamW")
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        try:
            # torch only warns and updates it twice; one launch of all parameters would race.
            if len(set(parameters)) < len(parameters):
                raise ValueError("AdamW: a parameter is twice in a group: give it once")
            for parameter in parameters:
                self._check_parameter(parameter)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_parameter(self, parameter: Tensor) -> None:
        """Refuse a dtype, device or memory that the kernels do not take, and clipping by the norm of a slice."""
        if parameter.dtype not in TRITON_DTYPES:
            raise TypeError(
                f"AdamW: dtype {parameter.dtype} is not supported: it takes {', '.join(map(str, TRITON_DTYPES))}"
            )
        # parallel.gradient_slices, which kernels do not import, marks slices so.
        if self.max_grad_norm is not None and hasattr(parameter, "is_slice_of_this_rank"):
            raise ValueError(
                f"AdamW: max_grad_norm {self.max_grad_norm} would clip by the norm of this rank's share of the "
                "gradients: leave it out, and call clip_grad_norm_() of the module that shares them before step()"
            )
        if parameter.device != self._device:
            raise ValueError(f"AdamW: parameters must be on one device, got {self._device} and {parameter.device}")
        if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
            raise ValueError(
                "AdamW: parameters must be dense in memory, got one of shape "
                f"{tuple(parameter.shape)} with strides {parameter.stride()}"
            )

    @property
    def grad_norm(self) -> Tensor:
        """Return the L2 norm of all gradients of the last step before clipping, a float32 scalar on the device.

        Raises:
            RuntimeError: there is no ``max_grad_norm``, or no step was taken.
        """
        if self.max_grad_norm is None or self._norm_and_clip_factor is None:
            raise RuntimeError("AdamW: the norm of the gradients is known after a step with max_grad_norm")
        return self._norm_and_clip_factor[0]

    def attach_copy(self, parameter: Tensor, copy: Tensor) -> None:
        """Keep ``copy`` equal to the float32 ``parameter``, rounded to float16 or bfloat16: now, and after every step.

        Raises:
            ValueError: the parameter is not one of this optimizer's, or the copy has another shape, device or strides.
            TypeError: the parameter is not float32, or the copy not float16 or bfloat16.
        """
        if not any(parameter is member for group in self.param_groups for member in group["params"]):
            raise ValueError(f"AdamW: a parameter of shape {tuple(parameter.shape)} is not one of this optimizer's")
        if parameter.dtype != torch.float32 or copy.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(
                "AdamW: copies need torch.float32 parameters and are torch.float16 or torch.bfloat16, got "
                f"{parameter.dtype} and {copy.dtype}"
            )
        if (copy.shape, copy.stride(), copy.device) != (parameter.shape, parameter.stride(), parameter.device):
            raise ValueError(
                "AdamW: a copy needs the parameter's shape, strides and device, got "
                f"{tuple(copy.shape)}, {copy.stride()}, {copy.device} "
                f"for {tuple(parameter.shape)}, {parameter.stride()}, {parameter.device}"
            )
        self._copies[parameter] = copy
        for parameter_set in (self._updated_by_step, *self._updated_in_backward):
            # Its tables hold the addresses of copies: let the next step describe them anew.
            parameter_set.described_signature = None
        copy.detach().copy_(parameter.detach())

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Write all attached copies anew, for parameters that something else than :meth:`step` has changed."""
        for parameter, copy in self._copies.items():
            copy.copy_(parameter)

    @torch.no_grad()
    def float32_weight(self, parameter: Tensor) -> Tensor:
        """Return the weight as steps update it: of a 16-bit parameter the one that the state completes, else itself."""
        state = self.state.get(parameter, {})
        if "low_bits" in state:
            high = parameter.detach().view(torch.int16).int() << 16
            return (high + state["low_bits"].int()).view(torch.float32)
        return state.get("master", parameter.detach())

    @torch.no_grad()
    def make_state(self, members: Sequence[GroupedParameter]) -> None:
        """Make missing states of parameters with gradients as a first step would: to predict memory without kernels."""
        for parameter, *_ in members:
            if parameter.grad is not None and not self.state[parameter]:
                self.state[parameter].update(self._initial_state(parameter))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients anew; its result is returned, a tensor or a number.

        Raises:
            RuntimeError: a gradient is sparse, or a CUDA graph is captured before a step was taken outside of one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        in_backward = {id(member.parameter) for part in self._updated_in_backward for member in part.members}
        self._updated_by_step.members = [
            member for member in self._members() if id(member.parameter) not in in_backward
        ]
        for part in (self._updated_by_step, *self._updated_in_backward):
            self._update(part)
        return loss

    def update_in_backward(self, groups: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        """Let the backward pass update parameters: each group as soon as all in it have gradients.

        The gradients are dropped then. :meth:`step` updates all other parameters. Gradients of several backward passes
        cannot be summed for one step.

        Args:
            groups: parameters that are updated together, such as a block's.

        Returns:
            A function that ends this.

        Raises:
            ValueError: there is a ``max_grad_norm``, which needs all gradients first, or a parameter is none of this
                optimizer's or in two groups.
        """
        if self.max_grad_norm is not None:
            raise ValueError("AdamW: max_grad_norm needs all gradients before the first update: leave it out")
        members = {id(member.parameter): member for member in self._members()}
        parts = []
        for group in groups:
            if any(id(parameter) not in members for parameter in group):
                raise ValueError("AdamW: update_in_backward takes each of this optimizer's parameters once at most")
            parts.append(ParameterSet([members.pop(id(parameter)) for parameter in group]))
        self._updated_in_backward += parts
        # Python's collector does not see what a parameter's hooks refer to: they must not keep the optimizer alive.
        optimizer_ref = weakref.ref(self)
        hooks = [
            member.parameter.register_post_accumulate_grad_hook(
                functools.partial(_update_complete_part, optimizer_ref, weakref.ref(part))
            )
            for part in parts
            for member in part.members
        ]

        def end() -> None:
            for hook in hooks:
                hook.remove()
            self._updated_in_backward = [part for part in self._updated_in_backward if part not in parts]

        return end

    def _members(self) -> list[GroupedParameter]:
        parameters = [
            (parameter, group) for group, settings in enumerate(self.param_groups) for parameter in settings["params"]
        ]
        return [GroupedParameter(parameter, number, group) for number, (parameter, group) in enumerate(parameters)]

    def _update(self, part: ParameterSet) -> None:
        """Update the members of a part that have a gradient, by tables that are new only if tensors have moved."""
        signature = self._signature(part.members)
        if signature == []:
            return
        if signature is None or signature != part.described_signature:
            # This list lives until the launch below: nothing else refers to copies of gradients.
            updates = [self._describe(*member) for member in part.members if member.parameter.grad is not None]
            # One parameter is checked for all: they are on one device.
            check_tensors("AdamW", kernels.adamw_update_kernel, parameters=updates[0].weight)
            part.describe(updates)
            # Tables that a captured graph uploads are on the device only once it runs: the next step uploads its own.
            part.described_signature = None if is_capturing(self._device) else signature
        self._norm_and_clip_factor = part.step(list(map(_group_settings, self.param_groups)), self.max_grad_norm)

    @property
    def _device(self) -> torch.device:
        return self.param_groups[0]["params"][0].device

    def _signature(self, members: Sequence[GroupedParameter]) -> list | None:
        """Return where all tensors are, equal from step to step while the tables hold.

        None: the tables must be made anew. Empty: no member has a gradient.
        """
        signature: list[tuple | None] = []
        for parameter, *_ in members:
            gradient = parameter.grad
            if gradient is None:
                signature.append(None)
                continue
            state = self.state.get(parameter)
            if not state or gradient.layout != torch.strided or gradient.stride() != parameter.stride():
                return None  # _describe() makes a state, refuses a layout, or copies a gradient.
            signature.append(
                (
                    parameter.data_ptr(), gradient.data_ptr(), gradient.dtype, parameter.numel(),
                    *[tensor.data_ptr() for tensor in state.values() if isinstance(tensor, Tensor)],
                )
            )  # fmt: skip
        return signature if any(signature) else []

    def _describe(self, parameter: Tensor, number: int, group: int) -> Update:
        """Check a gradient, make missing state, and return the row of the optimizer's parameter of this ``number``."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise RuntimeError("AdamW takes no sparse gradients: make them dense or use torch.optim.SparseAdam")
        if gradient.dtype not in TRITON_DTYPES:
            raise TypeError(
                f"AdamW: gradients of {gradient.dtype} are not supported: it takes {', '.join(map(str, TRITON_DTYPES))}"
            )
        if gradient.stride() != parameter.stride():  # The kernels read all tensors of a row in one order of memory.
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        state = self.state[parameter]
        if not state:
            if is_capturing(parameter.device):
                raise RuntimeError("AdamW: take a step before one is captured in a CUDA graph: it makes the state")
            state.update(self._initial_state(parameter))
        # ``other``: the weight's low bits, or the 16-bit copy that the kernel writes: of a master it is the parameter.
        weight, weight_format, other = parameter, kernels.FLOAT32, self._copies.get(parameter)
        extra_state = self._extra_state_name(parameter)
        if extra_state == "master":
            weight, other = state["master"], parameter
        elif extra_state == "low_bits":
            weight_format, other = kernels.SPLIT, state["low_bits"]
        elif parameter.dtype != torch.float32:
            weight_format = kernels.BFLOAT16
        copy_dtype = TRITON_DTYPES[other.dtype] if other is not None and weight_format == kernels.FLOAT32 else None
        has_bfloat16_moments = self._moment_dtype == torch.bfloat16
        variant = Variant(TRITON_DTYPES[gradient.dtype], has_bfloat16_moments, weight_format.value, copy_dtype)
        return Update(
            variant, weight, gradient, state["exp_avg"], state["exp_avg_sq"], other, state["step"], number, group
        )

    @property
    def _moment_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.state_dtype == "bf16" else torch.float32

    def _extra_state_name(self, parameter: Tensor) -> str | None:
        """Return the name of the state that holds what a parameter of 16 bits lacks of its weight; None for none."""
        if parameter.dtype == torch.float32:
            return None
        if parameter.dtype == torch.float16 or self.state_dtype == "fp32":
            return "master"
        return "low_bits" if self.state_dtype == "split" else None

    def _initial_state(self, parameter: Tensor, saved: dict | None = None) -> dict:
        """Return the state of a first step, or the ``saved`` one, whose dtypes and devices may differ."""
        saved = saved or {}
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=self._moment_dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=self._moment_dtype),
        }
        extra_state = self._extra_state_name(parameter)
        if extra_state == "master":
            state["master"] = parameter.detach().float()
        elif extra_state == "low_bits":
            state["low_bits"] = torch.zeros_like(parameter, dtype=torch.int16)
        for name, tensor in state.items():
            if name in saved:
                tensor.copy_(torch.as_tensor(saved[name]))  # Old states of torch's have the step as a number.
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state of this class or of ``torch.optim.AdamW``.

        Raises:
            ValueError: it was made with ``amsgrad`` or ``maximize``, its betas are no two numbers, or its groups differ
                from this optimizer's.
        """
        for group in state_dict["param_groups"]:
            for name in _MISSING_FLAGS:
                if group.get(name):
                    raise ValueError(f"AdamW: the state was made with {name}=True, which this optimizer does not have")
            _check_betas(group.get("betas", ()))  # Other optimizers have none.
        super().load_state_dict(state_dict)
        # torch has cast the moments, and whatever else a state has, to the parameter's dtype; states are made anew.
        ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, parameter in zip(ids, parameters, strict=True):
            if saved_id in state_dict["state"]:
                self.state[parameter] = self._initial_state(parameter, state_dict["state"][saved_id])


@torch.no_grad()
def _update_complete_part(optimizer_ref: weakref.ref[AdamW], part_ref: weakref.ref[ParameterSet], _: Tensor) -> None:
    """Update a part and drop its gradients, if all of its members have one."""
    optimizer, part = optimizer_ref(), part_ref()
    if optimizer is None or part is None or any(member.parameter.grad is None for member in part.members):
        return
    optimizer._update(part)
    for member in part.members:
        member.parameter.grad = None


def _check_betas(betas: tuple[float, ...]) -> None:
    if any(isinstance(beta, Tensor) for beta in betas):
        raise ValueError(f"AdamW: betas are {betas}, but must be two numbers: choose beta.item() of a tensor")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"AdamW: betas are {betas}, but must be two numbers, each at least 0 and below 1")


def _group_settings(group: dict) -> list[float | Tensor]:
    """Return the values of ``kernels.SETTINGS``; a learning rate on the device stays there."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and not lr.is_cuda:
        lr = lr.item()
    return [lr, *group["betas"], group["eps"], group["weight_decay"]]
