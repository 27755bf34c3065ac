"""Count a step of a user's model on the meta device, without memory; its attention in a real pass."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.flop_counter import FlopCounterMode

from cs336sys.experiments.user_models.attention import watched_attention, why_not_ours
from cs336sys.experiments.user_models.blocks import hidden_parameters
from cs336sys.experiments.user_models.loading import copied_code
from cs336sys.measure.allocations.history import ScalarsReadAsZero


class CountedStep(Protocol):
    """The counted parts of a training step."""

    model: nn.Module

    def forward(self) -> None: ...

    def backward(self) -> None: ...


@dataclass(frozen=True)
class StepCount:
    """The work of one step, as far as the shapes of its tensors show it.

    Attributes:
        parameters: of the model, tied ones once; None where it cannot even be built without memory.
        flops: model FLOPs as ``accounting.flops`` counts them, those of torch's attention aside; None where they could
            not be counted.
        reads: lines that wait for the GPU because they read a number from a tensor, with how often.
        failure: why there are no FLOPs.
        drops: whether it has layers of dropout.
        hidden: tensors that look like parameters and are none.
    """

    parameters: int | None
    flops: int | None = None
    reads: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    drops: bool = False
    hidden: list[str] = field(default_factory=list)


def count_on_meta_device(make_step: Callable[[], CountedStep], *, backward: bool) -> StepCount:
    """Build a step on the meta device and run it.

    Args:
        make_step: builds it there, launched, in fp32.
        backward: count the backward pass, too.
    """
    parameters = None
    numbers = ScalarsReadAsZero()
    try:
        with copied_code(), numbers:
            step = make_step()
            numbers.guessed.clear()
            parameters = sum(parameter.numel() for parameter in step.model.parameters())
            hidden = hidden_parameters(step.model)
            drops = any(isinstance(part, _DropoutNd) and part.p > 0 for part in step.model.modules())
            with watched_attention(lambda *arguments: None, computes=False), FlopCounterMode(display=False) as counter:
                step.forward()
                if backward:
                    step.backward()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return StepCount(parameters, failure=f"{type(error).__name__}: {lines[0]}")
    return StepCount(parameters, counter.get_total_flops(), _lines(numbers.guessed), drops=drops, hidden=hidden)


@dataclass
class AttentionCalls:
    """The calls of ``torch.nn.functional.scaled_dot_product_attention`` in a forward pass.

    Attributes:
        calls: how many, by why our kernels cannot stand in for torch's, or ``""`` where they can.
        flops: of their products, half where they are causal.
    """

    calls: Counter[str] = field(default_factory=Counter)
    flops: int = 0

    def watching(self) -> AbstractContextManager[None]:
        """Within this, calls are added up."""
        return watched_attention(self._add)

    def _add(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, is_causal: bool, enable_gqa: bool
    ) -> None:
        self.calls[why_not_ours(query, key, value, mask, dropout, enable_gqa) or ""] += 1
        scores = query.shape[:-1].numel() * key.shape[-2]
        # Q K^T and P V; of the causal half, by the papers' convention.
        self.flops += 2 * scores * (query.shape[-1] + value.shape[-1]) // (2 if is_causal else 1)


def _lines(read: Counter[str]) -> Counter[str]:
    return Counter({line or "somewhere": times for line, times in read.items()})
