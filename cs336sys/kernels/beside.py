"""Work beside the backward pass: on a stream of its own, for results that nothing reads before the pass has ended."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Beside:
    """A stream beside that of the backward pass.

    The tensor cores need little of the memory's bandwidth, and an optimizer nothing else. The stream that called
    ``backward()`` waits for this one at the end of the pass. The host never waits, and in a CUDA graph the streams
    become branches.

    Args:
        device: a GPU.
        depth: of so many pieces of work at most, the tensors are held; the backward pass waits for the oldest of more.
    """

    def __init__(self, device: torch.device, depth: int):
        self._depth = depth
        self._held: deque[tuple[torch.cuda.Event, Sequence[Tensor]]] = deque()
        self._pass = -1
        self._stream = torch.cuda.Stream(device)

    def launch(self, run: Callable[[], object], tensors: Sequence[Tensor]) -> None:
        """Launch ``run`` beside what the current stream is given from now on. Only within a backward pass.

        Args:
            tensors: what it reads and writes, made on the current stream.
        """
        if self._pass != torch._C._current_graph_task_id():
            self._pass = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self.join)
        current = torch.cuda.current_stream(self._stream.device)
        while len(self._held) >= self._depth:
            current.wait_event(self._held.popleft()[0])
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        # Freed earlier, their memory would be given to what the current stream computes next.
        self._held.append((self._stream.record_event(), tensors))

    def join(self) -> None:
        """Let the current stream wait for all that was launched; called at the end of every backward pass."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._held.clear()
        self._pass = -1
