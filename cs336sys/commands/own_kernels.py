"""Check and time a user's function, each call on new inputs: what ``kernels`` and ``flash`` share, mostly ``--kernel``.

Kernels that are written to be fast, by people or by machines, find ways to be fast without computing: they return an
earlier output again, compute when somebody looks, leave work on another stream, or stop the clock (KernelBench, Ouyang
et al. 2025, and the reports on its exploits). So :class:`KernelTimer` makes a part of the inputs new before each call,
fills memory that a call may allocate with NaN, copies results in the order of the caller's stream, and compares them
with float64 before the next call. This is proof against shortcuts, not against code that looks into this process's
memory.
"""

import abc
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cs336sys.errors import UserCodeError
from cs336sys.machine.device import held_memory_gib, peak_memory_gib, reset_peak_memory
from cs336sys.results.model import Samples
from cs336sys.run.cells import Outcome
from cs336sys.timing import relative_error
from cs336sys.timing.calls import L2_FLUSH_BYTES
from cs336sys.timing.relative_error import error_columns
from cs336sys.training.user_models import telling_errors_of

Results = Mapping[str, Tensor]
# A description, the call, and its right results.
OddCase = tuple[str, Callable[[], Results], Results]

PARTS = ("forward", "backward", "end_to_end")
OUTPUT_NAMES = ("out", "sum")


def calls_by_part(
    function: Callable[[], Any], outputs: Any, leaves: Sequence[Tensor], gradients: Any
) -> dict[str, Callable[[], Any]]:
    """Return a function's timed calls: ``forward``, ``backward`` of these outputs, and ``end_to_end``, both as one."""
    differentiate = functools.partial(torch.autograd.grad, inputs=leaves, grad_outputs=gradients)
    return {
        "forward": function,
        "backward": lambda: differentiate(outputs, retain_graph=True),
        "end_to_end": lambda: differentiate(function()),
    }


def memory_of_call_gib(call: Callable[[], object], device: torch.device) -> float | None:
    """Return the GiB that a call holds at once beyond what is there: results, what backward needs, scratch."""
    before_gib = held_memory_gib(device)
    reset_peak_memory(device)
    call()
    peak_gib = peak_memory_gib(device)
    return None if peak_gib is None else peak_gib - before_gib


class UsersProblem(abc.ABC):
    """A call of the user's function on inputs that change in part before each call, and what is right for them.

    A subclass sets the last three attributes before it calls :meth:`__init__`.

    Args:
        call: returns the function's outputs, of inputs by name.

    Attributes:
        odd_shapes: names the :meth:`odd_cases` in reports of progress.
        counts_launches: what launching takes beyond the flush of the L2 cache is timed, as by ``do_bench``.
        operands: inputs and gradients of the outputs, in the same memory at every call.
        input_names: of the inputs, which ``operands`` begins with.
        intended: the values that ``operands`` should have.
        right: what the function should make of them, in float64.
    """

    odd_shapes: str
    counts_launches: bool = False
    input_names: Sequence[str]
    intended: Sequence[Tensor]
    right: Results

    def __init__(self, call: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]):
        self._call = call
        self.operands = [tensor.detach().clone() for tensor in self.intended]

    @abc.abstractmethod
    def draw_intended(self) -> None:
        """Choose new values for a part of ``intended``, and what is ``right`` for them."""

    @abc.abstractmethod
    def odd_cases(self) -> Sequence[Callable[[], OddCase]]:
        """Return functions that prepare shapes which no tile divides."""

    @abc.abstractmethod
    def least_ms(self) -> Mapping[str, float]:
        """Return the parts to time, each with the ms that its work needs at least: less is refused."""

    @abc.abstractmethod
    def rates(self, samples: dict[str, Samples]) -> dict[str, Any]:
        """Return the columns derived from the times of the parts."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return the inputs as leaves of a new graph, in the memory of ``operands``."""
        tensors = [tensor.detach() for tensor in self.operands[: len(self.input_names)]]
        leaves = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]
        return dict(zip(self.input_names, leaves, strict=True))

    def prepare(self, part: str) -> Callable[[], Results]:
        """Do what is not timed, and return the call of one of :data:`PARTS`, which returns its results by name."""
        inputs, grad_outputs = self.inputs, self.operands[len(self.input_names) :]
        leaves = {f"d{name}": tensor for name, tensor in inputs.items() if tensor.requires_grad}
        forward_outputs = self._call(inputs) if part == "backward" else None

        def run() -> Results:
            outputs = self._call(inputs) if forward_outputs is None else forward_outputs
            # Not every function has the second output. A timed backward pass returns gradients alone.
            results = {} if part == "backward" else dict(zip(OUTPUT_NAMES, outputs, strict=False))
            if part != "forward":
                gradients = torch.autograd.grad(outputs, tuple(leaves.values()), grad_outputs)
                results |= dict(zip(leaves, gradients, strict=True))
            return results

        return run


_WAIT_CYCLES = 2_000_000  # Clock cycles that a GPU waits, so that work on another stream finds the old inputs.
_FEWEST_CALLS, _MOST_CALLS, _WARM_UP_CALLS = 5, 200, 3

# The functions that timing and checking call, by their owners: no file of the user's may replace them.
_WATCHED: Sequence[tuple[Any, str]] = (
    (time, "perf_counter perf_counter_ns time monotonic sleep"),
    (torch, "empty empty_like full_like randn zeros equal allclose isclose where sub"),
    (torch.cuda, "Event Stream synchronize current_stream _sleep"),
    (torch.cuda.Event, "record elapsed_time synchronize wait query"),
    (torch.linalg, "vector_norm"),
    (torch.autograd, "grad"),
    (torch.Tensor, "clone copy_ detach double item max mean square sqrt sub mul abs __sub__ __mul__ __getitem__"),
    (torch.Tensor, "__setitem__ untyped_storage data_ptr backward"),
    (relative_error, "relative_error relative_errors why_wrong judged"),
)

_clock, _synchronize = time.perf_counter, torch.cuda.synchronize  # Bound before the user's file is imported.
_event, _record, _elapsed_ms = torch.cuda.Event, torch.cuda.Event.record, torch.cuda.Event.elapsed_time
_why_wrong, _relative_errors = relative_error.why_wrong, relative_error.relative_errors
_BEFORE = {(owner, name): getattr(owner, name, None) for owner, names in _WATCHED for name in names.split()}


class WrongKernelError(UserCodeError):
    """The kernel computes something else, or its time is not that of computing; the message is one sentence."""


def check_untouched() -> None:
    """Raise a WrongKernelError that names a function of timing or checking which has been replaced."""
    for (owner, name), value in _BEFORE.items():
        if getattr(owner, name, None) is not value:
            where = getattr(owner, "__name__", str(owner))
            raise WrongKernelError(f"it replaces {where}.{name}, by which it is timed or checked")


class KernelTimer:
    """Times calls of a kernel, each with new inputs, and checks each with :func:`.relative_error.why_wrong`.

    ``errors`` has the largest error of every result in all calls.
    """

    def __init__(self, problem: UsersProblem, device: torch.device, tolerance: float):
        self.problem, self._device, self._tolerance = problem, device, tolerance
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self._on_gpu else None
        self._flushed = torch.empty(L2_FLUSH_BYTES if self._on_gpu else 0, dtype=torch.uint8, device=device)
        self._earlier: list[Tensor] = []  # Results of the last calls, in whose memory no later result may lie.
        self._calls = 0
        self.errors: dict[str, relative_error.RelativeError] = {}

    def time(self, part: str, warmup_ms: float, repetition_ms: float, least_ms: float) -> Samples:
        """Time calls of one of :data:`PARTS` for as long as asked for, five at least.

        Raise a WrongKernelError where a call was wrong, or took less than ``least_ms``, which is too fast to be true.
        """
        for count in range(1, _MOST_CALLS + 1):
            # The warm-up so far, as if all calls had taken as long as the last: the first may compile for seconds.
            if self._call(part) * count > warmup_ms and count >= _WARM_UP_CALLS:
                break
        times_ms: list[float] = []
        while len(times_ms) < _FEWEST_CALLS or (sum(times_ms) < repetition_ms and len(times_ms) < _MOST_CALLS):
            times_ms.append(self._call(part))
        median_ms = sorted(times_ms)[len(times_ms) // 2]
        if median_ms < least_ms:
            raise WrongKernelError(
                f"it takes {median_ms:.4g} ms, and its FLOPs and bytes take {least_ms:.4g} ms at this GPU's peaks"
            )
        return Samples("ms", "cuda events, checked" if self._on_gpu else "cpu clock, checked", tuple(times_ms))

    def _call(self, part: str) -> float:
        """Time and check one call with new inputs, and return its milliseconds."""
        self._calls += 1
        self.problem.draw_intended()
        expected = self.problem.right  # Of the new inputs, which the kernel does not see before it is called.
        if self._on_gpu:
            _synchronize(self._device)
            torch.cuda._sleep(_WAIT_CYCLES)  # Work that was left on another stream would find the old inputs.
        with torch.no_grad():
            for tensor, values in zip(self.problem.operands, self.problem.intended, strict=True):
                tensor.copy_(values)
        call = self.problem.prepare(part)
        # Memory that the allocator gives out next, so that unwritten results show: of float32 or the inputs' dtype.
        dtypes = torch.float32, self.problem.operands[0].dtype
        poison = [torch.full_like(tensor, math.nan, dtype=dtype) for dtype in dtypes for tensor in expected.values()]
        del poison
        took_ms, results = self._timed(call)
        self._check(results, expected)
        return took_ms

    def _timed(self, call: Callable[[], Results]) -> tuple[float, dict[str, Tensor]]:
        """Time one call, and copy its results on the caller's stream without a wait for what may run on another one."""
        if not self._on_gpu:
            started = _clock()
            results = call()
            took_ms = 1e3 * (_clock() - started)
            return took_ms, self._copied(results)
        start, end = (_event(enable_timing=True) for _ in range(2))
        if self.problem.counts_launches:
            _synchronize(self._device)
        self._flushed.zero_()  # It is larger than the L2 cache, in which nothing of the inputs remains.
        _record(start, self._stream)
        results = call()
        _record(end, self._stream)
        copies = self._copied(results)
        if torch.cuda.current_stream(self._device) != self._stream:
            raise WrongKernelError("it leaves another stream current than the one it was called on")
        _synchronize(self._device)
        return _elapsed_ms(start, end), copies

    def _copied(self, results: Results) -> dict[str, Tensor]:
        """Copy results that are plain tensors in memory of their own, or raise a WrongKernelError."""
        for name, result in results.items():
            if type(result) is not Tensor:  # A subclass may compute only when somebody looks.
                raise WrongKernelError(f"its {name} is a {type(result).__name__}, and should be a plain tensor")
            memory = result.untyped_storage().data_ptr()
            if any(memory == tensor.untyped_storage().data_ptr() for tensor in self.problem.operands):
                raise WrongKernelError(f"its {name} lies in the memory of its inputs")
            if any(memory == tensor.untyped_storage().data_ptr() for tensor in self._earlier):
                raise WrongKernelError(f"its {name} lies in memory that an earlier call returned and that is in use")
        # The last few are kept, so that no allocator gives their memory out again.
        self._earlier = [*self._earlier[-8:], *results.values()]
        return {name: result.detach().clone() for name, result in results.items()}

    def _check(self, results: Results, expected: Results) -> None:
        """Raise a WrongKernelError for replaced functions, written inputs or wrong results; note the errors."""
        check_untouched()
        if not all(map(torch.equal, self.problem.operands, self.problem.intended)):
            raise WrongKernelError(f"it writes to its inputs, in call {self._calls}")
        for name, result in results.items():
            if result.shape != expected[name].shape or result.device.type != self._device.type:
                target, shape = tuple(expected[name].shape), tuple(result.shape)
                raise WrongKernelError(f"its {name} has shape {shape} on {result.device}, and should have {target}")
        errors = _relative_errors(results, {name: expected[name] for name in results})
        reason = _why_wrong(errors, self._tolerance)
        if reason is not None:
            raise WrongKernelError(f"{reason}, in call {self._calls}, whose inputs are new in part")
        for name, error in errors.items():
            before = self.errors.get(name, error)
            self.errors[name] = relative_error.RelativeError(max(before.whole, error.whole), max(before.row, error.row))


def _refused_cases(problem: UsersProblem, tolerance: float, progress: Callable[[str], None]) -> list[str]:
    """Check odd cases, and return those that the function refuses by an error; a WrongKernelError if one is wrong."""
    refused = []
    cases = problem.odd_cases()
    for number, prepare in enumerate(cases, 1):
        progress(f"checking {problem.odd_shapes}, {number} of {len(cases)}")
        description, run, expected = prepare()
        try:
            results = run()
        except UserCodeError:
            raise  # the function cannot be used at all
        except Exception:
            refused.append(description)
            continue
        check_untouched()  # The call may have replaced functions that check it.
        reason = _why_wrong(_relative_errors(results, expected), tolerance)
        if reason is not None:
            raise WrongKernelError(f"of {description}: {reason}")
    return refused


def measure_users_function(
    make_problem: Callable[[], UsersProblem],
    workload: Any,
    device: torch.device,
    tolerance: float,
    progress: Callable[[str], None],
) -> Outcome:
    """Check, then time a function that was loaded; ``wrong`` where a call is."""
    user_code = workload.implementation  # FILE.py:NAME
    samples = {}
    try:
        check_untouched()  # Loading the function may have replaced those that time and check it.
        with telling_errors_of(user_code):
            problem = make_problem()
            refused = _refused_cases(problem, tolerance, progress)
            timer = KernelTimer(problem, device, tolerance)
            for part, least_ms in problem.least_ms().items():
                progress(f"timing {part}")
                samples[part] = timer.time(part, workload.warmup_ms, workload.repetition_ms, least_ms)
    except WrongKernelError as error:
        return Outcome("wrong", reason=str(error))
    derived = error_columns(timer.errors) | problem.rates(samples)
    if refused:
        derived["notes"] = [f"{user_code} does not take {', '.join(refused)}"]
    return Outcome("ok", samples, derived)
