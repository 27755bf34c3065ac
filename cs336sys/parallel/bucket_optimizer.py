"""An optimizer step that runs while gradients are still being averaged, bucket by bucket.

The all-reduces of large models may last longer than the backward pass beside which they run. What is left of them can
run beside the optimizer if that begins with the parameters whose gradients are there already. It gains nothing where
both want the same memory bandwidth: xl on two H200 with NVLink, in CUDA graphs, takes 63.7 ms, and 63.1 without it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from cs336sys.errors import UsageError
from cs336sys.parallel.ddp import BucketedDDP, OverlappedDDP
from cs336sys.parallel.sharded_optimizer.groups import Group, copy_options, options_of


class BucketOptimizer(torch.optim.Optimizer):
    """Waits for the gradients of a wrapped module and updates its parameters, one bucket after another::

        wrapped = BucketedDDP(module, "block")
        optimizer = BucketOptimizer(wrapped, wrapped.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
        ...
        loss_function(wrapped(inputs), targets).backward()
        optimizer.step()                 # in place of finish_gradient_synchronization() and a step after it
        optimizer.zero_grad()

    - The result is that of ``optimizer_cls`` after ``finish_gradient_synchronization()``, for every class that updates
      each parameter by itself. Each bucket has an instance of the class; they share ``state``.
    - Every rank must call :meth:`step`, with or without gradients. A parameter that no rank has a gradient of is not
      updated.
    - What needs all gradients at once does not go together with it: clipping by a global norm, and the loss scale of
      fp16, which is refused.
    - ``state_dict()`` is that of one ``optimizer_cls`` over the same parameters, and loads into one.
    """

    # So that a GradScaler hands its scale to step(), which refuses it, and does not unscale what is not averaged yet.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        wrapped: BucketedDDP | OverlappedDDP,
        params: ParamsT,
        optimizer_cls: type[torch.optim.Optimizer],
        **options: Any,
    ):
        """An optimizer of ``params``, which must be parameters of ``wrapped``.

        Args:
            wrapped: averages gradients in buckets while the backward pass runs.
            params: parameters, pairs of name and parameter, or groups, as for any optimizer.
            optimizer_cls: the class that updates the parameters.
            options: options of ``optimizer_cls``.

        Raises:
            UsageError: the class takes inner products over all gradients, or clips by their norm; or a parameter is not
                one of ``wrapped``.
        """
        if issubclass(optimizer_cls, torch.optim.LBFGS) or options.get("max_grad_norm") is not None:
            raise UsageError(
                f"{optimizer_cls.__name__} needs all gradients before it updates a parameter: call "
                "finish_gradient_synchronization() and step an optimizer of its own"
            )
        self._wrapped, self._optimizer_cls, self._options = wrapped, optimizer_cls, options
        self._whole: torch.optim.Optimizer | None = None
        super().__init__(params, {})
        self._whole = optimizer_cls(self.param_groups, **options)
        self.defaults = self._whole.defaults
        self._share_groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # takes no closure
        """Average what is left of the gradients, and update each bucket's parameters as soon as these have theirs.

        Raises:
            UsageError: there is a closure, or a scale for fp16.
        """
        if closure is not None:
            raise UsageError("a closure computes gradients anew, and they are averaged once a step: step without one")
        if getattr(self, "grad_scale", None) is not None:
            raise UsageError(
                "the loss scale of fp16 needs all gradients before a parameter is updated: call "
                "finish_gradient_synchronization() and step an optimizer of its own, or choose bf16"
            )
        if self._divided is not self._wrapped.buckets:
            self._divide()
        # Every part begins with the options that all of them have at first: a class may count its steps in them.
        for part in self._parts:
            part.take_options()
        parts = iter(self._parts)
        self._wrapped.finish_gradient_synchronization(lambda _: next(parts).step())

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as to any optimizer. Call it between two steps.

        Raises:
            UsageError: a parameter is trained, and not one of the wrapped module.
        """
        if self._whole is None:
            # The constructor's own groups.
            super().add_param_group(param_group)
            return
        self._whole.add_param_group(param_group)
        self._share_groups()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class or of ``optimizer_cls``, over the same parameters in the same order."""
        assert self._whole is not None
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._whole.load_state_dict(state_dict)
        self._share_groups()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> NoReturn:
        raise UsageError("an optimizer of buckets cannot be copied or pickled: choose state_dict()")

    def _share_groups(self) -> None:
        """Let groups and state be those of the whole."""
        assert self._whole is not None
        self.param_groups, self.state = self._whole.param_groups, self._whole.state
        self._divide()

    def _divide(self) -> None:
        """Make an optimizer for each bucket anew."""
        self._divided = self._wrapped.buckets
        bucket_of = {
            id(parameter): number
            for number, bucket in enumerate(self._divided)
            for parameter in bucket.parameters.values()
        }
        members: list[list[tuple[Group, list[nn.Parameter]]]] = [[] for _ in self._divided]
        for group in self.param_groups:
            of_buckets: dict[int, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if id(parameter) in bucket_of:
                    of_buckets.setdefault(bucket_of[id(parameter)], []).append(parameter)
                elif parameter.requires_grad:
                    raise UsageError(
                        f"a parameter of shape {tuple(parameter.shape)} is not one of the wrapped module, or was "
                        "unfrozen without refresh(): nothing averages its gradient"
                    )
            for number, parameters in of_buckets.items():
                members[number].append((group, parameters))
        self._parts = [_Part(self, self._optimizer_cls, self._options, of_bucket) for of_bucket in members]


class _Part:
    """Updates the parameters of one bucket."""

    def __init__(
        self,
        whole: BucketOptimizer,
        optimizer_cls: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        members: Sequence[tuple[Group, list[nn.Parameter]]],
    ):
        self._groups = [group for group, _ in members]
        self._optimizer: torch.optim.Optimizer | None = None
        if members:
            own = [{**options_of(group), "params": parameters} for group, parameters in members]
            self._optimizer = optimizer_cls(own, **options)
            self._optimizer.state = whole.state

    def take_options(self) -> None:
        """Use what the groups have now: a scheduler may have changed a learning rate."""
        if self._optimizer is not None:
            copy_options(self._groups, self._optimizer.param_groups)

    def step(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
            copy_options(self._optimizer.param_groups, self._groups)
