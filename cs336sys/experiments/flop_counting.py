"""Count a step of a user's model, for which there is no formula: parameters, FLOPs, calls of attention."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.flop_counter import FlopCounterMode

from cs336sys.experiments.models import ATTENTION_FUNCTIONS, attention_kept, attention_replaced
from cs336sys.experiments.training import TrainStep
from cs336sys.experiments.user_models import (
    copied_code,
    hidden_parameters,
    hidden_warnings,
    watched_attention,
    why_not_ours,
)
from cs336sys.measure.allocations.history import WithoutValues
from cs336sys.measure.cells import Progress
from cs336sys.workload import Workload


class CountedStep(Protocol):
    """The counted parts of a training step."""

    model: nn.Module

    def forward(self) -> None: ...

    def backward(self) -> None: ...


@dataclass
class StepCount:
    """The work of one step, as far as the shapes of its tensors show it.

    Attributes:
        parameters: of the model, tied ones once; None where it cannot even be built without memory.
        flops: model FLOPs as ``accounting.flops`` counts them, those of torch's attention and Triton's kernels aside;
            None where they could not be counted.
        reads: lines that wait for the GPU because they read a number from a tensor, with how often.
        launches: kernels of Triton, with how often.
        failure: why there are no FLOPs.
        drops: whether it has layers of dropout.
        hidden: tensors that look like parameters and are none.
    """

    parameters: int | None = None
    flops: int | None = None
    reads: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    drops: bool = False
    hidden: list[str] = field(default_factory=list)


def count_on_meta_device(make_step: Callable[[], CountedStep], *, backward: bool) -> StepCount:
    """Build a step on the meta device and run it.

    Args:
        make_step: builds it there, launched, in fp32.
        backward: count the backward pass, too.
    """
    count = StepCount()
    numbers = WithoutValues()
    try:
        with copied_code(), numbers:
            step = make_step()
            numbers.guessed.clear()
            numbers.launches.clear()
            count.parameters = sum(parameter.numel() for parameter in step.model.parameters())
            count.hidden = hidden_parameters(step.model)
            count.drops = any(isinstance(part, _DropoutNd) and part.p > 0 for part in step.model.modules())
            with watched_attention(lambda *arguments: None, computes=False), FlopCounterMode(display=False) as counter:
                step.forward()
                if backward:
                    step.backward()
            count.flops = counter.get_total_flops()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        count.failure = f"{type(error).__name__}: {lines[0]}"
    count.reads, count.launches = _lines(numbers.guessed), numbers.launches
    return count


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


def count_step(workload: Workload) -> StepCount:
    """Count a step of a user's model, for which there is no formula."""
    mode = "forward" if workload.mode == "forward" else "forward-backward"
    launched = replace(workload, mode=mode, precision="fp32", compile="off", cuda_graph="off", device="cpu")
    launched = replace(launched, kernels="reference")
    # Calls of torch's attention are not counted: whoever calls it decides by what a tensor holds, sometimes.
    return _counted(replace(launched, attention="sdpa", warmup=0, steps=1))


@functools.lru_cache(maxsize=4)
def _counted(workload: Workload) -> StepCount:
    without_scaling = torch.amp.GradScaler("cpu", enabled=False)
    make_step = functools.partial(TrainStep, workload, torch.device("meta"), scaler=without_scaling)
    with attention_kept():
        return count_on_meta_device(make_step, backward=workload.mode != "forward")


def counted_columns(step: "TrainStep", progress: Progress) -> dict[str, Any]:
    """``parameters``, and of a user's model ``flops`` and ``notes`` on what was found in it; before it is captured."""
    workload = step.workload
    if workload.is_ours:
        return {"parameters": workload.parameters}
    progress("counting")
    count = count_step(workload)
    attention = AttentionCalls()
    # Compiled code shows no calls. To ask for eager execution imports the compiler.
    eager = contextlib.nullcontext() if workload.compile == "off" else torch.compiler.set_stance("force_eager")
    # Of a model that calls cs336_basics' attention, as one that calls torch's.
    course = attention_replaced(ATTENTION_FUNCTIONS["sdpa"])
    with torch.no_grad(), eager, course:
        step.compute_logits(attention.watching())
    parameters = count.parameters or sum(parameter.numel() for parameter in step.model.parameters())
    # The backward pass of a product is two of its size; what is computed again does not count.
    times = 1 if workload.mode == "forward" else 3
    flops = None if count.flops is None else count.flops + times * attention.flops
    return {
        "parameters": parameters,
        "flops": flops,
        "notes": [
            *hidden_warnings(str(workload.user.model), hidden_parameters(step.model)),
            *_notes(workload, count, attention),
            *fused_notes(step),
        ],
    }


def fused_notes(step: "TrainStep") -> list[str]:
    """Return a note that counts the modules of a user's model that fused kernels replace, or no note."""
    if not step.workload.fused_kernels:
        return []
    from cs336sys.kernels.fuse import fused_kernels

    handle = fused_kernels(step.model)
    if handle is None or not handle.recognized:
        return []
    found = dict(handle.recognized)
    if not step.computes_loss_without_logits:
        found.pop("linear-cross-entropy", None)
    words = ", ".join(f"{times} x {name}" for name, times in found.items())
    copies = f"; {len(list(handle.copies))} weights have copies" if handle.copies is not None else ""
    return [f"{step.workload.user.model}: fused kernels replace {words or 'no module'}{copies}"]


def _notes(workload: Workload, count: StepCount, attention: AttentionCalls) -> list[str]:
    name = str(workload.user.model)
    notes = []
    if workload.attention == "flash":
        ours = attention.calls[""]
        if ours:
            notes.append(f"{name}: {ours} calls of torch's scaled_dot_product_attention are computed by flash")
        elif not attention.calls.total():
            notes.append(f"{name}: never calls torch's scaled_dot_product_attention, so flash takes the place of none")
        notes += [
            f"{name}: {times} of its {attention.calls.total()} calls of attention go to torch's, {reason}"
            for reason, times in attention.calls.items()
            if reason
        ]
    if count.failure:
        notes.append(f"{name}: no FLOPs, its step does not run on the meta device ({count.failure})")
    if count.launches:
        notes.append(f"{name}: no FLOPs are counted in kernels of Triton: {_with_times(count.launches)}")
    if count.reads:
        lines = _with_times(count.reads)
        notes.append(f"{name}: a step reads numbers from tensors, and waits for the GPU each time: {lines}")
    return notes


def _with_times(counted: Counter[str]) -> str:
    return ", ".join(f"{name} ({times} times)" for name, times in counted.items())
