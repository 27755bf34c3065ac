"""Runs work on a side stream during the backward pass, for results that nothing reads before the pass has ended."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class SideStream:
    """A stream on which work runs while the backward pass computes.

    The tensor cores need little of the memory's bandwidth, and an optimizer nothing else. The stream that called
    ``backward()`` waits for this one at the end of the pass. The host never waits, and in a CUDA graph the streams
    become branches.

    Args:
        device: a GPU; on a CPU, work is done at once, and tensors are held as on a GPU.
        depth: of so many pieces of work at most, the tensors are held; the backward pass waits for the oldest of more.
    """

    def __init__(self, device: torch.device, depth: int):
        self._depth = depth
        self._held: deque[tuple[torch.cuda.Event | None, Sequence[Tensor]]] = deque()
        self._pass = -1
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def launch(self, run: Callable[[], object], tensors: Sequence[Tensor]) -> None:
        """Launch ``run`` on the side stream, alongside later work of the current stream. Only within a backward pass.

        Args:
            tensors: what it reads and writes, made on the current stream.
        """
        if self._pass != torch._C._current_graph_task_id():
            self._pass = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self.join)
        while len(self._held) >= self._depth:
            done, _ = self._held.popleft()
            if done is not None:
                torch.cuda.current_stream(done.device).wait_event(done)
        # Freed earlier, the tensors' memory would be given to what the current stream computes next.
        self._held.append((self._launch(run), tensors))

    def _launch(self, run: Callable[[], object]) -> torch.cuda.Event | None:
        if self._stream is None:
            run()
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            run()
        return self._stream.record_event()

    def join(self) -> None:
        """Let the current stream wait for all that was launched; called at the end of every backward pass."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._held.clear()
        self._pass = -1
