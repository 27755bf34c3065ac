"""Checks one implementation of an op against float64 and times it: a cell of ``kernels``."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config

from cs336sys.measure.cells import Outcome, Progress
from cs336sys.measure.device import choose_device
from cs336sys.measure.memory import held_memory_gib, peak_memory_gib, reset_peak_memory
from cs336sys.measure.relative_error import RelativeError, judged, relative_errors
from cs336sys.measure.timing import time_queued_calls
from cs336sys.results.model import Samples
from cs336sys.workload import KernelWorkload

if TYPE_CHECKING:
    from cs336sys.experiments.kernels.operation import Function, Operation

# Largest relative error of an output or a gradient, as a whole, that counts as right. bf16 rounds to 8 bits, fp16 to
# 11: eager PyTorch rounds a few times. fp32 leaves room for the order of sums, and for torch's fused AdamW, whose
# second moment is off by 1.3e-5 because it rounds 1 - beta2.
TOLERANCES = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 1.6e-2}

# Measures the copy rate: large compared with a GPU's cache; on a CPU as large as the interpreter can chew.
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**24}


def kernel_errors(
    function: "Function", operation: "Operation", workload: KernelWorkload, device: torch.device
) -> dict[str, RelativeError]:
    """The errors of each output and each gradient, by name."""
    return relative_errors(operation.results(function, workload, device), operation.expected(workload, device))


@functools.cache
def copy_gbps(device: torch.device) -> float:
    """Bytes that a copy within the device's memory reads and writes, in 1e9 a second."""
    source = torch.empty(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = time_queued_calls(lambda: target.copy_(source), device, warmup_ms=25, repetition_ms=100)
    return 2 * source.nbytes / samples.median / 1e6


def operation_on(device: torch.device, op: str) -> "Operation":
    """Return an op, whose kernels are loaded for this device."""
    if device.type == "cpu":
        # Kernels look for it when they are loaded, and a process measures on one device.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from cs336sys.experiments.kernels.operations import OPERATIONS

    return OPERATIONS[op]


def measure_kernel(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Check, then time one implementation of one op: a cell of ``kernels``, run in the worker process.

    Samples (ms): ``forward`` with gradients recorded, ``backward`` alone, ``end_to_end`` as one call. Derived: the
    relative error of each output and gradient; GB/s of each part, by the least that it must move, and what share that
    is of the rate of a copy on this device; GiB beyond the inputs. An implementation whose output or gradient is off by
    more than :data:`TOLERANCES`, as a whole or in a row (:func:`judged`), is ``wrong`` and is not timed.
    """
    workload = KernelWorkload.from_configuration(configuration)
    device = choose_device(workload.device)
    operation = operation_on(device, workload.op)
    # A compiled backward pass is repeated on one graph: it must not write its results into saved tensors.
    with torch._functorch.config.patch(donated_buffer=False):
        function = operation.implementations[workload.implementation](workload)
        progress("checking")
        errors = kernel_errors(function, operation, workload, device)
        derived, wrong = judged(errors, TOLERANCES[workload.dtype])
        if wrong is not None:
            return wrong
        progress("timing")
        calls = operation.calls(function, workload, device)
        derived["over_inputs_gib"] = _memory_of(calls["end_to_end"], device)
        samples = {
            part: time_queued_calls(call, device, workload.warmup_ms, workload.repetition_ms)
            for part, call in calls.items()
        }
    return Outcome("ok", samples, derived | part_rates(operation, workload, samples, device))


def part_rates(
    operation: "Operation", workload: KernelWorkload, samples: Mapping[str, Samples], device: torch.device
) -> dict[str, Any]:
    """Return TFLOP/s and GB/s of each part, and what share of a copy's rate these are."""
    derived: dict[str, Any] = {}
    for part, flops in operation.flops(workload).items():
        derived[f"{part}_tflops"] = flops / samples[part].median / 1e9
    moved_bytes = operation.moved_bytes(workload)
    derived["copy_gbps"] = copy_gbps(device) if moved_bytes else None
    for part, count in moved_bytes.items():
        gbps = count / samples[part].median / 1e6
        derived |= {f"{part}_gbps": gbps, f"{part}_copy_percent": 100 * gbps / copy_gbps(device)}
    return derived


def _memory_of(call: Callable[[], object], device: torch.device) -> float | None:
    """GiB held at once beyond what is there already: results, what is kept for the backward pass, scratch."""
    before_gib = held_memory_gib(device)
    reset_peak_memory(device)
    call()
    peak_gib = peak_memory_gib(device)
    return None if peak_gib is None else peak_gib - before_gib
