"""A training step in CUDA graphs: captured once, a graph for each of its phases, and replayed from then on.

A graph holds all launches of a phase, with the addresses and numbers of one step, and replays them in one call.
docs/cuda_graphs.md says what phases may not do. Sources: CUDA programming guide, "CUDA Graphs"; torch's notes "CUDA
semantics: CUDA Graphs".
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cs336sys.errors import CapabilityError, CaptureError, UsageError
from cs336sys.settings.choices import WARM_UP_STEPS

_SILENT = "it did something that no graph can hold, and did not say so"
# What torch and CUDA say when something cannot be captured, and what that means.
_REASONS = {
    "operation not permitted when stream is capturing": (
        "it waits for the GPU (.item(), .cpu(), print of a tensor, a mask as an index) or takes memory from the driver"
    ),
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture": (
        "it copies between CPU and GPU, which waits for the GPU"
    ),
    "capture was invalidated": _SILENT,
    "operation failed due to a previous error during capture": _SILENT,
    "unjoined work": "it leaves work on another stream that it does not wait for",
    "dependency created on uncaptured work": "it waits for work that was launched before the capture",
    "legacy stream": "it uses the default stream; build what keeps autograd's state, such as torch's DDP, on `stream`",
}


def require_graphs(device: torch.device) -> None:
    """Refuse a CPU, which has no CUDA graphs."""
    if device.type != "cuda":
        raise CapabilityError(f"CUDA graphs need a GPU, and device '{device.type}' is not one: launch the step")


class CudaRecorder:
    """Captures CUDA graphs that share one pool of memory, on one stream; they must be replayed in the same order.

    Args:
        device: a GPU.
        stream: the stream to warm up and capture on, None for a new one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None):
        require_graphs(device)
        self.stream = torch.cuda.Stream(device) if stream is None else stream
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def on_launch_stream(self) -> Iterator[None]:
        """Launch work within this context where it will be captured; the caller's stream waits for it."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """Capture what ``run`` launches, which computes nothing yet, and return the function that computes it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            # Other threads may go on: a data loader that pins memory, NCCL's watchdog that asks about earlier work.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                # This raises an error, too, which says only that there was one before.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                self._release_generator()
                raise
            graph.capture_end()
        return graph.replay

    def _release_generator(self) -> None:
        """Capture once more: after a capture that failed, torch 2.11's random numbers wait for one that succeeds."""
        with contextlib.suppress(RuntimeError):  # What failed is raised, not this.
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                torch.zeros(1, device=self.stream.device)
            finally:
                graph.capture_end()

    @property
    def pool_bytes(self) -> int:
        """Return the bytes that recorded graphs keep: no other tensor can use them."""
        pool = tuple(self._pool)
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", ())) == pool
        )


class GraphedStep:
    """A step captured in CUDA graphs, one a phase; docs/cuda_graphs.md has an example.

    The constructor runs the step ``warmup`` times on ``inputs``, on a stream of its own, and captures it. The
    warm-up is training: weights have changed by ``warmup`` steps afterwards, on ``inputs`` or on what ``around_warmup``
    copies there. docs/cuda_graphs.md lists what the phases may not do. ``torch.autocast`` is fine inside a phase, not
    around several.

    Args:
        phases: what one step does, by name, in order; called without arguments.
        inputs: the tensors that hold the step's data, on the GPU. The phases must read them and nothing else.
        optimizers: those in use, which must keep their state on the GPU.
        warmup: steps before the capture, at least 1.
        around: entered around the capture of each phase, with its name.
        around_warmup: entered around each step of the warm-up, with its number from 0.
        recorder: what records, None for a new one on the inputs' device.

    Attributes:
        phases: by name, in order: what replays each phase. Calling them all is one step on the present ``inputs``.
        inputs: the tensors that a replay reads.
        result: what the last phase to return a tensor returned: it is overwritten by each replay.
        capture_s: how long capturing took, without the warm-up.

    Raises:
        UsageError: there are no phases or inputs, or no warm-up.
        CapabilityError: the inputs are not on a GPU, or an optimizer counts on the CPU. Nothing was captured.
        CaptureError: a phase cannot be captured. The process should compute nothing more: parts of torch may still take
            it to be capturing.
        torch.OutOfMemoryError: while warming up or capturing.
    """

    def __init__(
        self,
        phases: Mapping[str, Callable[[], Any]],
        inputs: Sequence[Tensor],
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        warmup: int = WARM_UP_STEPS,
        around: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext,
        around_warmup: Callable[[int], AbstractContextManager[Any]] = contextlib.nullcontext,
        recorder: CudaRecorder | None = None,
    ):
        if not phases or not inputs:
            raise UsageError("a graphed step needs at least one phase and one input tensor")
        if warmup < 1:
            raise UsageError(f"warmup {warmup}: one-time work must not be captured; choose at least 1")
        self.inputs = tuple(inputs)
        self.recorder = CudaRecorder(self.inputs[0].device) if recorder is None else recorder
        self.result: Tensor | None = None
        self._warm_up(phases, optimizers, warmup, around_warmup)
        started = time.perf_counter()
        self.phases = self._capture(phases, around)
        self.capture_s = time.perf_counter() - started

    def __call__(self, *inputs: Tensor) -> Tensor | None:
        """Replay one step on new data as :meth:`load` takes them, or on the last again, and return :attr:`result`.

        The GPU may not have computed it yet.
        """
        if inputs:
            self.load(*inputs)
        for replay in self.phases.values():
            replay()
        return self.result

    def load(self, *inputs: Tensor) -> None:
        """Copy new data to where replays read it, without waiting.

        Raises:
            UsageError: their number, a shape or a dtype is not that of what was captured.
        """
        if len(inputs) != len(self.inputs):
            raise UsageError(f"{len(inputs)} inputs: the step was captured with {len(self.inputs)}")
        for number, (new, captured) in enumerate(zip(inputs, self.inputs, strict=True)):
            if new.shape != captured.shape or new.dtype != captured.dtype:
                raise UsageError(
                    f"input {number} is {tuple(new.shape)} of {new.dtype}, and the step was captured with "
                    f"{tuple(captured.shape)} of {captured.dtype}: pad it, or capture a step for each shape"
                )
        changed = [(captured, new) for captured, new in zip(self.inputs, inputs, strict=True) if new is not captured]
        if changed:
            targets, sources = zip(*changed, strict=True)
            torch._foreach_copy_(targets, sources, non_blocking=True)  # One launch for all that are on the GPU already.

    @property
    def pool_bytes(self) -> int:
        """Return the bytes that the graphs keep: no other tensor can use them while the graphs exist."""
        return self.recorder.pool_bytes

    def _warm_up(
        self,
        phases: Mapping[str, Callable[[], Any]],
        optimizers: Sequence[torch.optim.Optimizer],
        warmup: int,
        around: Callable[[int], AbstractContextManager[Any]],
    ) -> None:
        """Run the step ``warmup`` times, the last as if captured, and refuse optimizers that no graph can repeat."""
        settings_before: list[Any] = []
        device = self.inputs[0].device
        with self.recorder.on_launch_stream():
            for number in range(warmup):
                settings_before = [_captured_settings(optimizer) for optimizer in optimizers]
                captured: AbstractContextManager[Any] = contextlib.nullcontext()
                is_last = number == warmup - 1
                if is_last and number > 0:
                    # The first step has made the state. It is checked before torch is told of a capture, because torch
                    # refuses state on the CPU then, too, but does not name it.
                    _require_state_on_device(optimizers, device)
                    captured = pretend_capturing()
                with around(number), captured:
                    for run in phases.values():
                        run()
        _require_state_on_device(optimizers, device)  # A single step of warm-up has made the state only now.
        for optimizer, before in zip(optimizers, settings_before, strict=True):
            _require_constant(optimizer, before)

    def _capture(
        self, phases: Mapping[str, Callable[[], Any]], around: Callable[[str], AbstractContextManager[Any]]
    ) -> dict[str, Callable[[], None]]:
        """Record each phase, and return what replays it."""
        if self.inputs[0].is_cuda:  # Tests have a recorder for a CPU.
            gc.collect()
            torch.cuda.synchronize(self.inputs[0].device)
            # What the warm-up has cached is of no use to the graphs, which take memory of their own.
            torch.cuda.empty_cache()
        # During a capture the garbage collector might end an earlier graph, or free memory of it.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            replays = {}
            for name, run in phases.items():
                with around(name):
                    replays[name] = self._record(name, run)
            return replays
        finally:
            if was_enabled:
                gc.enable()

    def _record(self, name: str, run: Callable[[], Any]) -> Callable[[], None]:
        """Record a phase, and return what replays it, or raise a CaptureError with the reason why it cannot be."""

        def run_and_keep_result() -> None:
            result = run()
            if isinstance(result, Tensor):
                self.result = result.detach()

        try:
            return self.recorder.record(run_and_keep_result)
        except RuntimeError as error:
            is_out_of_memory = any(isinstance(cause, torch.OutOfMemoryError) for cause in _causes(error))
            if isinstance(error, CapabilityError) or is_out_of_memory:
                raise
            raise CaptureError(f"phase '{name}' cannot be captured in a CUDA graph: {_reason(error)}") from error


def pretend_capturing() -> AbstractContextManager[Any]:
    """Tell Python code that asks that a graph is being captured, so that what it does then is compiled before.

    In a capture, transformers gives its blocks a mask instead of none, for which compiled blocks are compiled anew, and
    that waits for the GPU. Code of ours asks :func:`torch.cuda.graphs.is_current_stream_capturing`, which tells the
    truth.
    """
    # A function, which torch.compile can trace, and no mock.
    return mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)  # noqa: PT008


def _reason(error: BaseException) -> str:
    """Explain a failed capture in words, or by the first line of its error."""
    for exception in _causes(error):
        for text, reason in _REASONS.items():
            if text in str(exception):
                return reason
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from: compilers wrap what the compiled code raised."""
    while error is not None:
        yield error
        error = error.__cause__


def _captured_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the plain numbers of each group, such as the learning rate: a graph repeats them as captured."""
    return [
        {name: value for name, value in group.items() if isinstance(value, int | float)}
        for group in optimizer.param_groups
    ]


def _require_constant(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> None:
    """Refuse an optimizer whose :func:`_captured_settings` are not what they were before a step."""
    for old, new in zip(before, _captured_settings(optimizer), strict=True):
        for name, value in new.items():
            if old.get(name) != value:
                raise CapabilityError(
                    f"{type(optimizer).__name__} changed its '{name}' on the CPU in a step, which a graph would not do "
                    "again: make it a tensor on the GPU, or change it between steps"
                )


def _require_state_on_device(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """Refuse optimizers whose state, a number or a tensor, is on the CPU."""
    for optimizer in optimizers:
        for name, value in (item for state in optimizer.state.values() for item in state.items()):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number or (isinstance(value, Tensor) and value.device.type != device.type):
                raise CapabilityError(
                    f"{type(optimizer).__name__} keeps its state '{name}' on the CPU, so a graph would repeat one "
                    "step's number for ever (of AdamW, its bias correction): choose an optimizer that keeps it on the "
                    "GPU, such as torch's or cs336_basics' AdamW with capturable=True"
                )
