"""The collectives of this project, the same on torch 2.11 to 2.13 and on NCCL and Gloo.

Only this module knows which names and reduce operations a version or a backend has. All use the default process group.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from cs336sys.errors import UsageError

# torch 2.13 warns of the names on the right, which are the only ones of torch 2.11.
# (output of W * n elements, input of n elements, async_op=False): every rank gets all ranks' inputs, in rank order.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# (output of n elements, input of W * n elements, op=SUM, async_op=False): rank r gets the sum of all r-th parts.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def require_process_group(what: str) -> None:
    """Refuse to build ``what`` in a process that belongs to no process group.

    Raises:
        UsageError: there is none.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"{what} needs a process group: call it in a function run by cs336sys.parallel.launch.run, "
            "or call torch.distributed.init_process_group first"
        )


def group_device() -> torch.device:
    """Where tensors must be that the process group is to communicate: this rank's GPU for NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class MeanReduction:
    """Replaces tensors by their mean over all ranks, in place and in one launch: start, go on computing, wait.

    NCCL gets several tensors as one group of operations; Gloo packs them itself. The mean is taken inside the
    collective where the backend can. Where it cannot (Gloo on CUDA tensors), and in fp16, where the sum of two
    gradients of 40,000 overflows on Gloo, each rank divides before the sum, as torch's DDP does.

    Args:
        dtype, device: of the tensors.
        what: what they are, for the note of an error.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, what: str = "tensors"):
        self.what = what
        self._dtype = dtype
        self._device_type = device.type
        # NCCL reads tensors on a stream of its own: freed before that is done, their memory would be given to others.
        self._tensors: Sequence[Tensor] = ()
        self._works: Sequence[Any] = ()

    @functools.cached_property
    def _averages_inside(self) -> bool:
        backend = dist.get_backend()
        if self._device_type == "cuda":
            return "nccl" in backend
        return "gloo" in backend and self._dtype != torch.float16

    @functools.cached_property
    def _coalesces(self) -> bool:
        # Gloo does on the CPU only.
        return self._device_type != "cuda" or "nccl" in dist.get_backend()

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Launch; the tensors must be contiguous, at least one, and of the same shapes in this order on every rank."""
        if not self._averages_inside:
            torch._foreach_div_(tensors, dist.get_world_size())
        op = dist.ReduceOp.AVG if self._averages_inside else dist.ReduceOp.SUM
        self._tensors = tensors
        if len(tensors) == 1 or not self._coalesces:
            self._works = [dist.all_reduce(tensor, op, async_op=True) for tensor in tensors]
        else:
            with _coalescing_manager(async_ops=True) as coalesced:
                for tensor in tensors:
                    dist.all_reduce(tensor, op)
            self._works = [coalesced]

    def wait(self) -> None:
        """Return when the means may be used: on a GPU, when the current stream waits for them.

        Raises:
            RuntimeError: another rank died or timed out; a note says what was being averaged.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            error.add_note(f"in the all-reduce of {self.what}")
            raise
        self._tensors = self._works = ()


class AnyRank:
    """Which of some facts, one per element, hold on any rank: an all-reduce under way."""

    def __init__(self, facts: Sequence[bool], device: torch.device):
        self._facts = list(facts)
        # With nothing to say but yes, no copy from the host is needed, and wait() reads nothing back.
        if all(self._facts):
            self._anywhere = torch.ones(len(self._facts), dtype=torch.uint8, device=device)
        else:
            self._anywhere = torch.tensor(self._facts, dtype=torch.uint8, device=device)
        self._work = dist.all_reduce(self._anywhere, dist.ReduceOp.MAX, async_op=True)

    def wait(self) -> list[bool]:
        """The answer; blocks until a GPU has it if a fact did not hold on this rank."""
        self._work.wait()
        return self._facts if all(self._facts) else [bool(fact) for fact in self._anywhere.tolist()]


def broadcast_from_first(tensors: Sequence[Tensor]) -> None:
    """Overwrite each tensor by rank 0's. They must be laid out alike on every rank."""
    sent = []
    for tensor in tensors:
        # Of an expanded tensor only what is in memory.
        sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        tensor = tensor.detach().as_strided(sizes, tensor.stride())
        sent.append((tensor, memory_view(tensor if is_dense(tensor) else tensor.contiguous())))
    works = [dist.broadcast(memory, src=0, async_op=True) for _, memory in sent]
    for work, (tensor, memory) in zip(works, sent, strict=True):
        work.wait()
        if not is_dense(tensor):
            tensor.copy_(memory)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory, each once, in any order: not so slices and expanded tensors."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)


def memory_view(tensor: Tensor) -> Tensor:
    """A contiguous tensor over the memory of a dense one: itself, or (numel,) in memory order if it is permuted.

    Backends communicate memory as it lies, and NCCL refuses tensors that are not contiguous.
    """
    tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank. Values must be picklable."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
