"""Means of two GPUs' tensors, sent by copy engines: nothing that is computed meanwhile loses a multiprocessor.

NCCL's kernels occupy 24 of an H200's 132 multiprocessors, whose products are then cut into waves for fewer. A backward
pass of xl alongside all-reduces in bf16 takes 24.96 ms, alongside copy engines 21.92, alongside neither 17.17.

Each GPU has a few boxes in memory that the other can write (torch's symmetric memory). A bucket's tensors are copied
into the other GPU's box; a barrier tells that both have arrived; a kernel replaces each tensor by its mean with the one
in this GPU's box, while the next bucket is on its way. Both ranks add the same two numbers and get the same bits.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336sys.errors import CapabilityError
from cs336sys.parallel.collectives import MeanReduction, gather_objects, process_group

# Bucket n goes into box n modulo this, while the means of the three before it may still be computed from the others.
_BOXES = 4

# Where tensors begin in a box, in bytes: what a program of the kernel reads at once is a multiple of 16.
_ALIGNMENT = 128

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def places_in_box(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a box, and the size of a box that holds them, in bytes."""
    aligned_sizes = (math.ceil(size / _ALIGNMENT) * _ALIGNMENT for size in sizes_bytes)
    *offsets, end = itertools.accumulate(aligned_sizes, initial=0)
    return offsets, end


def require_copy_engines(group: dist.ProcessGroup | None, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse what copy engines cannot average, before memory is made for it."""
    ranks, backend = process_group(group).size(), dist.get_backend(group)
    if device.type != "cuda" or "nccl" not in backend:
        raise CapabilityError(
            f"copy engines send between GPUs, and backend '{backend}' on device '{device.type}' does not: choose "
            "transport collectives"
        )
    if ranks != 2:
        raise CapabilityError(f"copy engines average what two ranks have, and there are {ranks}: choose collectives")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise CapabilityError(f"copy engines average {', '.join(map(str, DTYPES))}, and not {dtype}")


class CopyEngines:
    """The boxes of two GPUs, and the streams that fill and empty them. Both ranks construct it together.

    Args:
        group: two ranks of one host, each with a GPU that reaches the other's memory; None is all ranks.
        box_bytes: the most that :func:`places_in_box` needs for what is averaged at once. ``4 * box_bytes`` are taken
            from the driver, outside of torch's allocator.

    Attributes:
        switched_on: whether :class:`CopiedMean` uses them.

    Raises:
        CapabilityError: on both ranks: torch cannot make symmetric memory on one of them.
    """

    def __init__(self, group: dist.ProcessGroup | None, box_bytes: int, device: torch.device):
        self._group = process_group(group)
        # Of each box: the one here, the other GPU's, and the handle whose barriers both pass.
        self._boxes: list[tuple[Tensor, Tensor, Any]] = []
        failure = None
        try:
            self._make_boxes(box_bytes, device)  # How it fails depends on what torch or the GPUs lack.
        except (ImportError, AttributeError, RuntimeError, ValueError) as error:
            failure = str(error).strip().partition("\n")[0] or type(error).__name__
        failures = [text for text in gather_objects(failure, self._group) if text is not None]
        if failures:
            raise CapabilityError(
                f"copy engines need memory that both GPUs can write, which torch cannot make here ({failures[0]}): "
                "choose transport collectives"
            )
        self._copy_stream, self._average_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # For each call of this step, the event at which its means are computed, so that its box is empty.
        self._averaged_events: list[torch.cuda.Event] = []
        self.switched_on = True

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Within this context, collectives average, which a profiler can record; all ranks enter it together."""
        self.switched_on = False
        try:
            yield
        finally:
            self.switched_on = True

    def _make_boxes(self, box_bytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        for _ in range(_BOXES):
            box = symmetric_memory.empty(box_bytes, dtype=torch.uint8, device=device)
            handle = symmetric_memory.rendezvous(box, self._group)  # Below, 1 - rank is the other GPU's.
            self._boxes.append((box, handle.get_buffer(1 - self._group.rank(), (box_bytes,), torch.uint8), handle))

    def average(self, tensors: Sequence[Tensor], number: int) -> torch.cuda.Event:
        """Begin to replace contiguous tensors by their means over both ranks; return the event that ends this.

        Args:
            number: how many calls came before in this step: the first of a step waits until both ranks are in it.
        """
        from cs336sys.parallel.mean_kernel import average_

        flat = [tensor.view(-1) for tensor in tensors]
        offsets, _ = places_in_box([tensor.nbytes for tensor in flat])
        box_here, other_box, handle = self._boxes[number % _BOXES]
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            if number == 0:
                self._averaged_events = []
                # Both ranks' streams have waited for the last step's means: after the barrier, all boxes are empty.
                handle.barrier(channel=1)  # Its signals are not those of the barrier below.
            for tensor, offset in zip(flat, offsets, strict=True):
                _in_box(other_box, offset, tensor).copy_(tensor)
            # The other rank's next call fills this rank's box of _BOXES - 1 calls ago. The barrier below, which tells
            # it that the tensors copied now have arrived, also tells it that that box is empty.
            if number >= _BOXES - 1:
                self._copy_stream.wait_event(self._averaged_events[number - (_BOXES - 1)])
            handle.barrier(channel=0)
        self._average_stream.wait_stream(self._copy_stream)
        with torch.cuda.stream(self._average_stream):
            for tensor, offset in zip(flat, offsets, strict=True):
                average_(tensor, _in_box(box_here, offset, tensor))
            averaged = torch.cuda.Event()
            averaged.record()
        self._averaged_events.append(averaged)
        return averaged


class CopiedMean(MeanReduction):
    """A :class:`~cs336sys.parallel.collectives.MeanReduction` by copy engines.

    Args:
        number: how many other reductions start before this one in a step.
        mean_arguments: those of the base class.
    """

    _collective = "exchange"

    def __init__(self, engines: CopyEngines, number: int, *mean_arguments: Any):
        super().__init__(*mean_arguments)
        self._engines, self._number = engines, number

    def start(self, tensors: list[Tensor]) -> None:
        if not self._engines.switched_on:
            super().start(tensors)
            return
        self._tensors = tensors
        # wait() calls wait() of an event as of a collective's work: the current stream waits.
        self._works = [self._engines.average(tensors, self._number)]


def _in_box(box: Tensor, offset: int, like: Tensor) -> Tensor:
    return box[offset : offset + like.nbytes].view(like.dtype)
