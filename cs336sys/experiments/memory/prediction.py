"""What a step would hold, found without a GPU and without memory: it runs on fake tensors, which have shapes alone."""

import importlib.util
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

from cs336sys.experiments.memory.step import MemoryStep
from cs336sys.experiments.memory.summary import summary, timeline_peaks
from cs336sys.experiments.training import ATTENTION_FUNCTIONS
from cs336sys.kernels.attention import flash_attention
from cs336sys.measure.allocations.history import FakeHistory, ScalarsReadAsZero
from cs336sys.measure.allocations.recorder import StepRecorder
from cs336sys.measure.allocations.timeline import AllocationTimeline
from cs336sys.measure.cells import Outcome, Progress
from cs336sys.workload import MemoryWorkload


def traced_timeline(workload: MemoryWorkload, *, follow_operations: bool = False) -> AllocationTimeline:
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
    with mock.patch.dict(ATTENTION_FUNCTIONS, flash=_traced_flash), FakeTensorMode(), ScalarsReadAsZero():
        step = MemoryStep(workload, torch.device("cpu"))
        _create_optimizer_state(step)
        held = step.held()
        history = FakeHistory([tensor for tensors in held.values() for tensor in tensors])
        recorder = StepRecorder(history, step.names, follow_operations=follow_operations)
        step.run_recorded(recorder)
        return recorder.timeline(held=held, held_size=None, optimizer_state=step.optimizer_state())


def predict_memory(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """One cell of ``memprof --dry-run``: runs in the worker process, needs no GPU and little memory."""
    workload = MemoryWorkload.from_configuration(configuration)
    progress("tracing fake tensors")
    timeline = traced_timeline(workload, follow_operations=True)
    return Outcome("ok", derived=summary(workload, timeline, timeline_peaks(timeline)))


def _traced_flash(Q, K, V, mask=None):
    """Our kernels as one operation, as on a GPU; only where Triton is missing, as the tiles that a CPU computes."""
    implementation = "triton" if importlib.util.find_spec("triton") else "tiled"
    return flash_attention(Q, K, V, is_causal=mask is not None, implementation=implementation)


def _create_optimizer_state(step: MemoryStep) -> None:
    if step.optimizer is None:
        return
    for parameter in step.model.parameters():
        parameter.grad = torch.empty_like(parameter)
    step.optimizer.step()
    step.optimizer.zero_grad()
