"""Time calls of one operation, on a GPU each with a cold L2 cache; of a user's kernel, so that no shortcut passes.

Kernels that are written to be fast, by people or by machines, find ways to be fast without computing: they return an
earlier output again, compute when somebody looks, leave work on another stream, or stop the clock (KernelBench, Ouyang
et al. 2025, and the reports on its exploits). So :class:`KernelTimer` makes a part of the inputs new before each call,
fills memory that a call may allocate with NaN, copies results in the order of the caller's stream, and compares them
with float64 before the next call. This is proof against shortcuts, not against code that looks into this process's
memory.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cs336sys.errors import UserCodeError
from cs336sys.results.model import Samples
from cs336sys.timing import relative_error

L2_FLUSH_BYTES = 256_000_000  # Bytes that are written to empty an L2 cache: several times an H200's 50 MB.
_CYCLES_PER_MS = 2_000_000  # A GPU's clock cycles in a millisecond, at most.


def time_calls(call: Callable[[], Any], device: torch.device, warmup_ms: float, repetition_ms: float) -> Samples:
    """Time calls (ms each) for as long as asked for, on a GPU each with a cold L2 cache."""
    if device.type == "cuda":
        import triton.testing

        times_ms = triton.testing.do_bench(call, warmup=warmup_ms, rep=repetition_ms, return_mode="all")
        return Samples("ms", "triton do_bench", tuple(times_ms))
    # Imported late: it brings setuptools, which takes every worker and rank a twentieth of torch's time.
    from torch.utils.benchmark import Timer

    warm_up_end = time.perf_counter() + warmup_ms / 1e3
    while time.perf_counter() < warm_up_end:
        call()
    timer = Timer("call()", globals={"call": call})
    measurement = timer.blocked_autorange(min_run_time=repetition_ms / 1e3)
    return Samples("ms", "torch.utils.benchmark", tuple(1e3 * seconds for seconds in measurement.times))


def time_queued_calls(call: Callable[[], Any], device: torch.device, warmup_ms: float, repetition_ms: float) -> Samples:
    """Time a call's work on a GPU (ms), with a cold L2 cache and without waiting for the CPU to launch it.

    Each call is queued behind a wait on the GPU that lasts twice as long as the CPU needs to launch it, for the given
    times or at least five times. On a CPU it is timed as by :func:`time_calls`.
    """
    if device.type != "cuda":
        return time_calls(call, device, warmup_ms, repetition_ms)
    cache = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def run_queued(wait_ms: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()  # It fills the L2 cache.
        torch.cuda._sleep(int(wait_ms * _CYCLES_PER_MS))  # Meanwhile the CPU launches the call.
        start.record()
        call()
        end.record()
        return start, end

    def run_and_wait() -> None:
        run_queued(wait_ms)
        torch.cuda.synchronize(device)

    def cpu_ms(function: Callable[[], Any]) -> float:
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        function()
        return (time.perf_counter() - started) * 1e3

    call()  # The first call may compile.
    wait_ms = 2 * max(cpu_ms(call) for _ in range(3))
    queued_ms = cpu_ms(run_and_wait)  # Of a call and its wait; the given times over this are numbers of calls.
    for _ in range(int(warmup_ms / queued_ms)):
        run_queued(wait_ms)
    events = [run_queued(wait_ms) for _ in range(max(5, int(repetition_ms / queued_ms)))]
    torch.cuda.synchronize(device)
    return Samples("ms", "cuda events, queued", tuple(start.elapsed_time(end) for start, end in events))


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


class ChangingInputs(Protocol):
    """Inputs that change in part, and the results that a kernel should compute of them."""

    @property
    def given(self) -> Sequence[Tensor]:
        """Return the inputs of the kernel, in the same memory at every call."""

    def draw_new_inputs(self) -> Callable[[], None]:
        """Choose new values for a part, and return a function that writes all inputs to ``given``."""

    def is_as_given(self) -> bool:
        """Return whether ``given`` is as :meth:`draw_new_inputs` left it."""

    def expected(self) -> Mapping[str, Tensor]:
        """Return every result for the inputs that were drawn last, in float64."""


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

    def __init__(self, problem: ChangingInputs, device: torch.device, tolerance: float):
        self.problem, self._device, self._tolerance = problem, device, tolerance
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self._on_gpu else None
        self._flushed = torch.empty(L2_FLUSH_BYTES if self._on_gpu else 0, dtype=torch.uint8, device=device)
        self._earlier: list[Tensor] = []  # Results of the last calls, in whose memory no later result may lie.
        self._calls = 0
        self.errors: dict[str, relative_error.RelativeError] = {}

    def time(
        self,
        prepare: Callable[[], Callable[[], Mapping[str, Tensor]]],
        warmup_ms: float,
        repetition_ms: float,
        least_ms: float = 0.0,
    ) -> Samples:
        """Time calls for as long as asked for, five at least.

        Args:
            prepare: does work that is not timed, and returns the call, which returns results by the names of
                ``expected``.
            least_ms: the least time that the work can take on this kind of GPU.

        Raises:
            WrongKernelError: a call was wrong, or too fast to be true.
        """
        for count in range(1, _MOST_CALLS + 1):
            # The warm-up so far, as if all calls had taken as long as the last: the first may compile for seconds.
            if self._call(prepare) * count > warmup_ms and count >= _WARM_UP_CALLS:
                break
        times_ms: list[float] = []
        while len(times_ms) < _FEWEST_CALLS or (sum(times_ms) < repetition_ms and len(times_ms) < _MOST_CALLS):
            times_ms.append(self._call(prepare))
        median_ms = sorted(times_ms)[len(times_ms) // 2]
        if median_ms < least_ms:
            raise WrongKernelError(
                f"it takes {median_ms:.4g} ms, and its FLOPs and bytes take {least_ms:.4g} ms at this GPU's peaks"
            )
        return Samples("ms", "cuda events, checked" if self._on_gpu else "cpu clock, checked", tuple(times_ms))

    def _call(self, prepare: Callable[[], Callable[[], Mapping[str, Tensor]]]) -> float:
        """Time and check one call with new inputs, and return its milliseconds."""
        self._calls += 1
        write_to_given = self.problem.draw_new_inputs()
        expected = self.problem.expected()  # Of the new inputs, which the kernel does not see before it is called.
        if self._on_gpu:
            _synchronize(self._device)
            torch.cuda._sleep(_WAIT_CYCLES)  # Work that was left on another stream would find the old inputs.
        write_to_given()
        call = prepare()
        # Memory that the allocator gives out next, so that unwritten results show: of float32 or the inputs' dtype.
        poison = [torch.full_like(tensor, math.nan, dtype=torch.float32) for tensor in expected.values()]
        poison += [torch.full_like(tensor, math.nan, dtype=self.problem.given[0].dtype) for tensor in expected.values()]
        del poison
        took_ms, results = self._timed(call)
        self._check(results, expected)
        return took_ms

    def _timed(self, call: Callable[[], Mapping[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
        """Time one call, and copy its results on the caller's stream without a wait for what may run on another one."""
        if not self._on_gpu:
            started = _clock()
            results = call()
            took_ms = 1e3 * (_clock() - started)
            return took_ms, self._copied(results)
        start, end = (_event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()  # It is larger than the L2 cache, in which nothing of the inputs remains.
        _record(start, self._stream)
        results = call()
        _record(end, self._stream)
        copies = self._copied(results)
        if torch.cuda.current_stream(self._device) != self._stream:
            raise WrongKernelError("it leaves another stream current than the one it was called on")
        _synchronize(self._device)
        return _elapsed_ms(start, end), copies

    def _copied(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy results that are plain tensors in memory of their own, or raise a WrongKernelError."""
        for name, result in results.items():
            if type(result) is not Tensor:  # A subclass may compute only when somebody looks.
                raise WrongKernelError(f"its {name} is a {type(result).__name__}, and should be a plain tensor")
            memory = result.untyped_storage().data_ptr()
            if any(memory == tensor.untyped_storage().data_ptr() for tensor in self.problem.given):
                raise WrongKernelError(f"its {name} lies in the memory of its inputs")
            if any(memory == tensor.untyped_storage().data_ptr() for tensor in self._earlier):
                raise WrongKernelError(f"its {name} lies in memory that an earlier call returned and that is in use")
        # The last few are kept, so that no allocator gives their memory out again.
        self._earlier = [*self._earlier[-8:], *results.values()]
        return {name: result.detach().clone() for name, result in results.items()}

    def _check(self, results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Raise a WrongKernelError for replaced functions, written inputs or wrong results; note the errors."""
        check_untouched()
        if not self.problem.is_as_given():
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
