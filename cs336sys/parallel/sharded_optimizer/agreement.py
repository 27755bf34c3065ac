"""Compares between ranks, in every step, what each may do only if all do."""

import contextlib
import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import all_gather_single, group_device, is_capturing
from cs336sys.parallel.same_on_ranks import same_on_every_rank

# 64-bit integers of a digest.
_DIGEST_SIZE = 2


class StepAgreement:
    """Lets a step raise on every rank if it raises on one, or if ranks differ in what they say.

    On GPUs the CPU does not wait for the answer, which is read in the next step: then ranks stop one step late. In a
    CUDA graph nothing is compared.
    """

    def __init__(self) -> None:
        # Of the last step on GPUs: what every rank said, on its way to the CPU, and when it is there.
        self._answer: tuple[Tensor, torch.cuda.Event] | None = None

    @contextlib.contextmanager
    def compared(self) -> Iterator[list[str]]:
        """Within this context, lines of text are collected that must be the same on every rank.

        Raises:
            Exception: the body's.
            UsageError: ranks differ, or another rank raised.
        """
        if is_capturing():
            yield []
            return
        if group_device().type != "cuda":
            try:
                with same_on_every_rank() as lines:
                    yield lines
            except RuntimeError as error:
                error.add_note("in the comparison of steps before parameters are updated")
                raise
            return
        lines = []
        self._read_answer()
        try:
            yield lines
        except Exception as error:
            self._ask([f"{type(error).__name__}: {error}"])
            raise
        self._ask(lines)

    def _ask(self, lines: list[str]) -> None:
        digest = hashlib.sha256("\n".join(lines).encode()).digest()[: 8 * _DIGEST_SIZE]
        said = torch.frombuffer(bytearray(digest), dtype=torch.int64).pin_memory()
        gathered = torch.empty(dist.get_world_size() * _DIGEST_SIZE, dtype=torch.int64, device=group_device())
        all_gather_single(gathered, said.to(group_device(), non_blocking=True))
        on_host = torch.empty(gathered.shape, dtype=torch.int64, pin_memory=True)
        on_host.copy_(gathered, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._answer = on_host, event

    def _read_answer(self) -> None:
        if self._answer is None:
            return
        on_host, event = self._answer
        self._answer = None
        event.synchronize()
        first, *others = on_host.view(-1, _DIGEST_SIZE).unbind()
        for rank, other in enumerate(others, start=1):
            if not torch.equal(first, other):
                raise UsageError(
                    f"ranks differ in what they train: in the last step, rank {rank} had other options of groups than "
                    "rank 0, or one of the two refused to step; make the same changes on every rank"
                )
