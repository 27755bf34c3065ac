"""Check an op that is ours, a competitor's or the user's against float64, and time it: a cell of ``kernels``."""

import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config

from cs336sys.accounting.hardware import least_ms
from cs336sys.commands import own_kernels
from cs336sys.commands.kernels.operation import DifferentiatedFunction, Function, as_tuple
from cs336sys.machine.device import choose_device
from cs336sys.results.model import Samples
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.choices import import_named
from cs336sys.settings.operations import KernelWorkload
from cs336sys.settings.user_code import is_user_code
from cs336sys.timing.calls import time_queued_calls
from cs336sys.timing.relative_error import Errors, judged, relative_errors
from cs336sys.training.user_models import load

if TYPE_CHECKING:
    from cs336sys.commands.kernels.operations import Operation

# Largest relative error of an output or a gradient, as a whole, that counts as right. bf16 rounds to 8 bits, fp16 to
# 11: eager PyTorch rounds a few times. fp32 leaves room for the order of sums, and for torch's fused AdamW, whose
# second moment is off by 1.3e-5 because it rounds 1 - beta2.
TOLERANCES = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 1.6e-2}

# Imported by a cell: without Triton it is unsupported, and its worker goes on.
_OPERATIONS = "cs336sys.commands.kernels.operations.OPERATIONS"

# Size of the copy whose rate is measured: large compared with a GPU's cache; on a CPU small, as all inputs there.
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**24}


def kernel_errors(function: Function, operation: "Operation", workload: KernelWorkload, device: torch.device) -> Errors:
    """Return the errors of each output and each gradient, by name."""
    return relative_errors(operation.results(function, workload, device), operation.expected(workload, device))


@functools.cache
def copy_gbps(device: torch.device) -> float:
    """Measure the bytes that a copy within the device's memory reads and writes, in 1e9 a second."""
    source = torch.empty(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = time_queued_calls(lambda: target.copy_(source), device, warmup_ms=25, repetition_ms=100)
    return 2 * source.nbytes / samples.median / 1e6  # From bytes a ms.


def measure_kernel(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Check, then time one implementation of one op: a cell of ``kernels``, run in the worker process.

    Samples (ms): ``forward`` with gradients recorded, ``backward`` alone, ``end_to_end`` as one call. Derived: the
    relative error of each output and gradient; GB/s of each part, by the least that it must move, and what share that
    is of the rate of a copy on this device; GiB beyond the inputs. An implementation whose output or gradient is off by
    more than :data:`TOLERANCES`, as a whole or in a row (:func:`judged`), is ``wrong`` and is not timed. Each call of
    the user's function that is timed has new inputs, and is checked (:mod:`cs336sys.commands.own_kernels`).
    """
    workload = KernelWorkload.from_configuration(configuration)
    device = choose_device(workload.device)
    operation = import_named(_OPERATIONS)[workload.op]
    if is_user_code(workload.implementation):
        assert isinstance(operation, DifferentiatedFunction), "the command refuses others"
        make_problem = functools.partial(UsersOperation, load(workload.implementation), operation, workload, device)
        return own_kernels.measure_users_function(make_problem, workload, device, TOLERANCES[workload.dtype], progress)
    # A compiled backward pass is repeated on one graph: it must not write its results into saved tensors.
    with torch._functorch.config.patch(donated_buffer=False):
        function = operation.implementations[workload.implementation](workload)
        progress("checking")
        errors = kernel_errors(function, operation, workload, device)
        derived, failure = judged(errors, TOLERANCES[workload.dtype])
        if failure is not None:
            return failure
        progress("timing")
        calls = operation.calls(function, workload, device)
        derived["over_inputs_gib"] = own_kernels.memory_of_call_gib(calls["end_to_end"], device)
        samples = {
            part: time_queued_calls(call, device, workload.warmup_ms, workload.repetition_ms)
            for part, call in calls.items()
        }
    return Outcome("ok", samples, derived | part_rates(operation, workload, samples, device))


def part_rates(
    operation: "Operation", workload: KernelWorkload, samples: Mapping[str, Samples], device: torch.device
) -> dict[str, Any]:
    """Return TFLOP/s and GB/s of each part, whose samples are in ms, and which percentage of a copy's rate GB/s are."""
    derived: dict[str, Any] = {}
    for part, flops in operation.flops(workload).items():
        derived[f"{part}_tflops"] = flops / samples[part].median / 1e9  # From FLOPs a ms.
    moved_bytes = operation.moved_bytes(workload)
    derived["copy_gbps"] = copy_gbps(device) if moved_bytes else None
    for part, num_bytes in moved_bytes.items():
        gbps = num_bytes / samples[part].median / 1e6  # From bytes a ms.
        derived |= {f"{part}_gbps": gbps, f"{part}_copy_percent": 100 * gbps / copy_gbps(device)}
    return derived


class UsersOperation(own_kernels.UsersProblem):
    """The user's function of an op; all inputs, and the gradients of its outputs, are new before each call."""

    odd_shapes = "odd numbers of rows"

    def __init__(
        self, function: Function, operation: DifferentiatedFunction, workload: KernelWorkload, device: torch.device
    ):
        self._function, self._operation, self._workload, self._device = function, operation, workload, device
        self.draw_intended()  # UsersProblem's constructor copies what this chooses.
        super().__init__(lambda inputs: as_tuple(function(**inputs)))

    def draw_intended(self) -> None:
        """Draw all inputs and gradients anew; a function could be prepared for the workload's seed, which is known."""
        workload = replace(self._workload, seed=secrets.randbits(60))
        self.right = self._operation.expected(workload, self._device)
        inputs = self._operation.random_inputs(workload, self._device)
        self.input_names = list(inputs)
        outputs = [self.right[name] for name in own_kernels.OUTPUT_NAMES if name in self.right]
        dtype = next(tensor.dtype for tensor in inputs.values() if tensor.is_floating_point())
        # A gradient has its output's dtype: that of the inputs, or float32 of a loss; what is right is in float64.
        outputs_as_computed = tuple(output.to(torch.float32 if output.dim() == 0 else dtype) for output in outputs)
        gradients = self._operation.gradients(outputs_as_computed, workload)
        self.intended = [tensor.detach() for tensor in (*inputs.values(), *gradients)]

    def odd_cases(self) -> list[Callable[[], own_kernels.OddCase]]:
        return [functools.partial(self._odd_case, tokens) for tokens in (131, 1)]  # Rows that no tile divides.

    def _odd_case(self, tokens: int) -> own_kernels.OddCase:
        """Prepare a number of rows that no tile divides, on inputs that nobody knows before."""
        odd_workload = replace(self._workload, tokens=tokens, seed=secrets.randbits(60))
        run = functools.partial(self._operation.results, self._function, odd_workload, self._device)
        return f"{tokens} rows", run, self._operation.expected(odd_workload, self._device)

    def least_ms(self) -> dict[str, float]:
        """Return the least ms of each part's FLOPs and bytes at the datasheet's peaks; 0 where these are not known."""
        gpu = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else ""
        flops, moved_bytes = self._operation.flops(self._workload), self._operation.moved_bytes(self._workload)
        return {
            part: least_ms(gpu, self._workload.dtype, flops.get(part, 0), moved_bytes.get(part, 0))
            for part in own_kernels.PARTS
        }

    def rates(self, samples: dict[str, Samples]) -> dict[str, Any]:
        return part_rates(self._operation, self._workload, samples, self._device)
