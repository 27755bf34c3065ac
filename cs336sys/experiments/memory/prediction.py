"""What a step would hold, found without a GPU and without memory: it runs on fake tensors, which have shapes alone."""

import contextlib
import importlib.util
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

from cs336sys.experiments import user_models
from cs336sys.experiments.memory.step import MemoryStep
from cs336sys.experiments.memory.summary import summary, timeline_peaks
from cs336sys.experiments.models import ATTENTION_FUNCTIONS
from cs336sys.experiments.user_models import telling_user_errors
from cs336sys.kernels.attention import flash_attention
from cs336sys.measure.allocations.history import FakeHistory, ScalarsReadAsZero
from cs336sys.measure.allocations.recorder import StepRecorder
from cs336sys.measure.allocations.timeline import AllocationTimeline
from cs336sys.measure.cells import Outcome, Progress
from cs336sys.workload import MemoryWorkload, Workload


@dataclass(frozen=True)
class TracedStep:
    """A step on fake tensors.

    Attributes:
        parameters: of its model.
        block_names: of its model's blocks.
    """

    timeline: AllocationTimeline
    parameters: int
    block_names: list[str]


def traced_timeline(workload: MemoryWorkload, *, follow_operations: bool = False) -> TracedStep:
    """The timeline of a step after the first, as far as the results of its operations show it.

    Compiled workloads are traced eagerly, those in CUDA graphs launched, which holds the same, and fp16 as bf16, which
    has as many bytes and runs everywhere. What kernels use inside, cuBLAS workspaces and the allocator's rounding are
    not seen.

    Args:
        follow_operations: find the origin of every allocation, which takes longer.
    """
    training = replace(workload.training, compile="off", cuda_graph="off", device="cpu")
    if training.precision == "fp16":
        training = replace(training, precision="bf16")
    workload = replace(workload, training=training, snapshot=None)
    with (
        mock.patch.dict(ATTENTION_FUNCTIONS, flash=_traced_flash),
        mock.patch.object(user_models.attention, "flash_attention", _flash_of_a_gpu),
        user_models.copied_code(),
        _adamw_without_kernels(training),
        FakeTensorMode(),
        ScalarsReadAsZero(),
    ):
        step = MemoryStep(workload, torch.device("cpu"))
        _create_optimizer_state(step)
        held = step.held()
        history = FakeHistory([tensor for tensors in held.values() for tensor in tensors])
        recorder = StepRecorder(history, step.names, follow_operations=follow_operations)
        step.run_recorded(recorder)
        timeline = recorder.timeline(held=held, held_size=None, optimizer_state=step.optimizer_state())
        parameters = sum(parameter.numel() for parameter in step.model.parameters())
        return TracedStep(timeline, parameters, step.block_names)


def predict_memory(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """One cell of ``memprof --dry-run``: runs in the worker process, needs no GPU and little memory."""
    workload = MemoryWorkload.from_configuration(configuration)
    progress("tracing fake tensors")
    with telling_user_errors(workload.training):
        traced = traced_timeline(workload, follow_operations=True)
    derived = summary(workload, traced.timeline, timeline_peaks(traced.timeline), traced.block_names)
    return Outcome("ok", derived={"parameters": traced.parameters} | derived)


def _traced_flash(Q, K, V, mask=None):
    return _flash_of_a_gpu(Q, K, V, is_causal=mask is not None)


def _flash_of_a_gpu(query, key, value, is_causal):
    """Our kernels as one operation, as on a GPU; only where Triton is missing, as the tiles that a CPU computes."""
    implementation = "triton" if importlib.util.find_spec("triton") else "tiled"
    return flash_attention(query, key, value, is_causal=is_causal, implementation=implementation)


def _adamw_without_kernels(workload: Workload) -> AbstractContextManager[Any]:
    """Where the workload takes our AdamW, it makes its state and nothing else: its kernels need addresses."""
    if workload.optimizer != "adamw":
        return contextlib.nullcontext()
    from cs336sys.kernels.adamw import AdamW

    return mock.patch.object(AdamW, "_update", lambda optimizer, part: optimizer.make_state(part.members))


def _create_optimizer_state(step: MemoryStep) -> None:
    if step.optimizer is None:
        return
    for parameter in step.model.parameters():
        parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
    step.optimizer.step()
    step.optimizer.zero_grad()
