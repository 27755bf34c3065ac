"""Gradients of which every rank has a part: each part is added to their sum once, however often that is asked for."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class PartialGradients:
    """Sums the gradients of some parameters over ranks.

    What backward passes have added since the last sum is known from hooks. A gradient that was summed and not dropped
    is the same on every rank: where a pass adds to it, each rank keeps its share of it alone, so that the next sum has
    it once. Nothing is known of passes that a CUDA graph replays: of what was captured, every call makes a sum.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._gradients: dict[nn.Parameter, _PartialGradient] = {}

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note what backward passes add to the gradients of those parameters that are trained.

        Args:
            parameters: on every rank the same, before anything else has hooks on them that read their gradients.
        """
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._gradients:
                gradient = self._gradients[parameter] = _PartialGradient(self._group.size())
                parameter.register_hook(_before_pass(parameter, gradient))
                parameter.register_post_accumulate_grad_hook(gradient.after_pass)

    def sum(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum what there is and was not summed. Every rank calls it with the same parameters, after the same passes."""
        partial = [one for one in parameters if one.grad is not None and not self._is_summed(one)]
        if not partial:
            return
        gradients = [parameter.grad for parameter in partial if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._group)
        sums = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_([gradient.view(-1) for gradient in gradients], sums)
        self.watch(partial)
        for parameter in partial:
            if parameter in self._gradients:
                self._gradients[parameter].is_summed = True

    def _is_summed(self, parameter: nn.Parameter) -> bool:
        # A layer that was frozen and is trained now is known after its first sum.
        gradient = self._gradients.get(parameter)
        return gradient is not None and gradient.is_summed and not gradient.is_captured


class _PartialGradient:
    """What is known of one parameter's gradient.

    Attributes:
        is_summed: whether no pass has added to it since it was summed.
        is_captured: whether passes may have added to it that nobody saw.
    """

    def __init__(self, ranks: int):
        self._others = (ranks - 1) / ranks
        self._before: Tensor | None = None
        self.is_summed = self.is_captured = False

    def before_pass(self, gradient: Tensor | None) -> None:
        # Of passes that leave it alone, as those of torch.autograd.grad, nobody is told afterwards.
        self._before = gradient.clone() if self.is_summed and gradient is not None else None

    def after_pass(self, parameter: Tensor) -> None:
        before, self._before, self.is_summed = self._before, None, False
        if before is not None and parameter.grad is not None:
            parameter.grad.sub_(before, alpha=self._others)
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            self.is_captured = True


def _before_pass(parameter: nn.Parameter, gradient: _PartialGradient) -> Callable[[Tensor], None]:
    def before_pass(added: Tensor) -> None:
        gradient.before_pass(parameter.grad)

    return before_pass
