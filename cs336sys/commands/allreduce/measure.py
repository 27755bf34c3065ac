"""The cells of ``allreduce``: a collective is checked on every rank, then timed back to back and call by call."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336sys.accounting.communication import buffer_bytes, bus_factor
from cs336sys.machine.device import DTYPES, synchronize
from cs336sys.machine.diagnosis.gpu import describe_links
from cs336sys.machine.system import container_memory_limit_bytes
from cs336sys.parallel.collectives import all_gather_single, gather_objects, group_device, reduce_scatter_single
from cs336sys.parallel.ranks import launch
from cs336sys.results.model import Samples
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.operations import CollectiveWorkload

# Up to these a dtype holds every integer (2^mantissa bits), so that sums are the same in any order.
_LARGEST_EXACT = {"fp32": 2**24, "bf16": 2**8, "fp16": 2**11, "fp64": 2**53, "int32": 2**31 - 1}

# Period of the data: a prime, so that swapped pieces whose size is a power of two are noticed.
_PERIOD = 997

# Outputs hold this before the check; no rank contributes it.
_UNWRITTEN = -1

# Elements compared at a time, so that checking a large message needs little extra memory.
_COMPARED_AT_ONCE = 2**24


@dataclass(frozen=True)
class RankHardware:
    """The machine that a rank runs on, and the memory that its tensors are in.

    Attributes:
        machine: its host name.
        gpu_uuid: None on a CPU.
        memory_bytes: the most that the rank's tensors can take: on a GPU what is free; on a CPU the limit of the
            container, for all ranks of the machine together. None where there is no limit: memory that looks used may
            be cache, and on some virtual machines the total grows as it is used.
    """

    machine: str
    gpu_uuid: str | None
    memory_bytes: int | None


@dataclass(frozen=True)
class RankTimes:
    """The number of wrong elements in a rank's output and, if no rank has any, the times of all its calls in us."""

    wrong_elements: int
    back_to_back_us: tuple[float, ...] = ()
    synchronized_us: tuple[float, ...] = ()


def measure_collective(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Check and time one collective: a cell of ``allreduce``, run in the process that starts or joins the ranks.

    Samples (us), for each call the time of the slowest rank: ``back_to_back`` and ``synchronized``, see
    :func:`time_collective`. Derived columns: see ``docs/columns.md``. A collective with wrong elements is ``wrong`` and
    not timed, and messages that do not fit into memory are refused as ``oom`` before anything is allocated.
    """
    workload = CollectiveWorkload.from_configuration(configuration)
    derived: dict[str, Any] = {
        "size_bytes": workload.size_bytes,
        "elements": workload.elements,
        "in_place": workload.collective in ("all_reduce", "broadcast"),
    }
    progress("starting the ranks")
    ranks = launch.kept(workload.world_size, backend=workload.backend, timeout_s=workload.timeout_s)
    hardware = ranks.run(hardware_of_rank)
    derived["link"] = _link_name(hardware)
    refusal = _does_not_fit(workload, hardware)
    if refusal is not None:
        return Outcome("oom", derived=derived, reason=refusal, refused=True)

    progress("checking and timing")
    results = ranks.run(time_collective, workload)
    derived["wrong_elements"] = sum(result.wrong_elements for result in results)
    if derived["wrong_elements"]:
        wrong_ranks = ", ".join(str(rank) for rank, result in enumerate(results) if result.wrong_elements)
        reason = f"{derived['wrong_elements']} wrong elements on rank {wrong_ranks}"
        return Outcome("wrong", derived=derived, reason=reason)
    clock = "cuda events" if workload.backend == "nccl" else "cpu clock"
    samples = {
        "back_to_back": _slowest([result.back_to_back_us for result in results], workload.warmup, clock),
        "synchronized": _slowest([result.synchronized_us for result in results], workload.warmup, "cpu clock"),
    }
    factor = bus_factor(workload.collective, workload.world_size)  # 0 of a single rank, which sends nothing.
    for name, times in samples.items():
        derived[f"{name}_algbw_gbps"] = workload.size_bytes / times.mean / 1e3  # bytes / us are 1e6 bytes/s.
        derived[f"{name}_busbw_gbps"] = factor * derived[f"{name}_algbw_gbps"] if factor else None
    return Outcome("ok", samples, derived)


def _slowest(times_us: Sequence[Sequence[float]], warmup: int, clock: str) -> Samples:
    """Return each call's time on its slowest rank, of the times by rank and call."""
    slowest = list(map(max, zip(*times_us, strict=True)))
    return Samples("us", f"{clock}, maximum over ranks", tuple(slowest[warmup:]), tuple(slowest[:warmup]))


def hardware_of_rank() -> RankHardware:
    """Return the hardware of the rank that runs this."""
    device = group_device()
    if device.type == "cpu":
        return RankHardware(platform.node(), gpu_uuid=None, memory_bytes=container_memory_limit_bytes())
    torch.cuda.empty_cache()  # Memory that torch has cached is free for the tensors, too.
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return RankHardware(platform.node(), f"GPU-{torch.cuda.get_device_properties(device).uuid}", free_bytes)


def _link_name(hardware: Sequence[RankHardware]) -> str:
    """Name what links the ranks: within this machine, between machines, or both."""
    machines = len({rank.machine for rank in hardware})
    between = f"network between {machines} machines"
    if hardware[0].gpu_uuid is None:
        return "TCP within one machine" if machines == 1 else between
    local_gpus = tuple(rank.gpu_uuid for rank in hardware if rank.machine == platform.node())
    within = describe_links(local_gpus) if len(local_gpus) > 1 else "one GPU"
    return within if machines == 1 else f"{between}, {within} within one"


def _does_not_fit(workload: CollectiveWorkload, hardware: Sequence[RankHardware]) -> str | None:
    """Explain why the tensors cannot be allocated, None if they may be; the same answer on every rank."""
    needed_bytes = buffer_bytes(workload.collective, workload.size_bytes, workload.world_size)
    for number, rank in enumerate(hardware):
        # Ranks on CPUs share the memory of their machine.
        sharing_ranks = 1 if rank.gpu_uuid else sum(other.machine == rank.machine for other in hardware)
        if rank.memory_bytes is not None and sharing_ranks * needed_bytes > rank.memory_bytes:
            where = "free on its GPU" if rank.gpu_uuid else f"the limit of {sharing_ranks} ranks on its machine"
            needed_gb, limit_gb = needed_bytes / 1e9, rank.memory_bytes / 1e9
            return f"rank {number} needs {needed_gb:.3g} GB for its tensors, {limit_gb:.3g} GB are {where}"
    return None


def time_collective(workload: CollectiveWorkload) -> RankTimes:
    """Check one call, then time it in two ways, each after warm-up calls of its own; all ranks call this together.

    - Back to back: the next call is launched without waiting for the last. On a GPU a call lasts from the CUDA event
      after the previous call to its own; otherwise the CPU clock is read between calls. This is the bandwidth seen by a
      program that always has something to send.
    - Synchronized: all ranks wait for each other, then the CPU clock runs until the call is done on this rank's device.
      This is the latency of one call, with its launch.

    Returns times of warm-up and measured calls, in order; none if any rank has wrong elements.
    """
    device = group_device()
    call, count_wrong_elements = prepare(workload, device)
    call()
    wrong_elements = count_wrong_elements()
    if any(gather_objects(wrong_elements)):
        return RankTimes(wrong_elements)
    calls = workload.warmup + workload.iterations
    back_to_back_us = tuple(_back_to_back_us(call, calls, device))
    return RankTimes(wrong_elements, back_to_back_us, tuple(_synchronized_us(call, calls, device)))


def prepare(workload: CollectiveWorkload, device: torch.device) -> tuple[Callable[[], Any], Callable[[], int]]:
    """Return a call of the collective on allocated tensors, and a function that counts wrong elements after one call.

    Inputs are integers whose sum over the ranks is exact in the dtype. The call is torch's own function, and nothing
    else is timed. Later calls take the results of earlier ones; sums may grow to infinity, which takes no longer.
    """
    rank, ranks, elements = dist.get_rank(), workload.world_size, workload.elements
    data = exact_data(workload.dtype, ranks)
    sums = torch.stack(data).sum(0)
    whole = torch.full((elements,), _UNWRITTEN, dtype=DTYPES[workload.dtype], device=device)
    if workload.collective == "all_reduce":
        write(whole, data[rank])
        return partial(dist.all_reduce, whole), partial(count_differences, whole, sums)
    if workload.collective == "broadcast":
        if rank == 0:
            write(whole, data[0])
        return partial(dist.broadcast, whole, src=0), partial(count_differences, whole, data[0])
    share = elements // ranks
    part = torch.full_like(whole[:share], _UNWRITTEN)
    if workload.collective == "reduce_scatter":
        write(whole, data[rank])
        return partial(reduce_scatter_single, part, whole), partial(count_differences, part, sums, start=rank * share)
    write(part, data[rank], start=rank * share)
    starts = [other * share for other in range(ranks)]

    def count_wrong_parts() -> int:
        return sum(map(count_differences, whole.split(share), data, starts))

    return partial(all_gather_single, whole, part), count_wrong_parts


def exact_data(dtype: str, ranks: int) -> list[Tensor]:
    """Return one period of each rank's data, int64: it differs between ranks and neighbours, and sums are exact."""
    # Sums are exact up to this integer: of more ranks, the others send zeros.
    contributing_ranks = min(ranks, _LARGEST_EXACT[dtype])
    value_count = _LARGEST_EXACT[dtype] // contributing_ranks + 1  # From 0 on.
    positions = torch.arange(_PERIOD)  # In the data of each rank they are shifted by 7 more.
    return [(positions + 7 * rank) % _PERIOD % value_count * (rank < contributing_ranks) for rank in range(ranks)]


def write(tensor: Tensor, data: Tensor, start: int = 0) -> None:
    """Fill a tensor with periodic data, beginning with the element ``start`` of the data."""
    for piece, values in _with_data(tensor, data, start):
        piece.copy_(values)


def count_differences(tensor: Tensor, data: Tensor, start: int = 0) -> int:
    """Return how many elements differ from what :func:`write` would write; NaN differs from everything."""
    return int(sum((piece != values).sum() for piece, values in _with_data(tensor, data, start)))


def _with_data(tensor: Tensor, data: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of a tensor and their values: of whole periods as rows, (count, period), then of what remains."""
    data = data.roll(-(start % len(data))).to(tensor)
    rows = len(tensor) // len(data)
    remainder = tensor[rows * len(data) :]
    for some_rows in tensor[: rows * len(data)].view(rows, len(data)).split(max(1, _COMPARED_AT_ONCE // len(data))):
        yield some_rows, data
    yield remainder, data[: len(remainder)]


def _back_to_back_us(call: Callable[[], Any], calls: int, device: torch.device) -> list[float]:
    """Time calls that do not wait for each other, us, by CUDA events or by the CPU's clock."""
    if device.type == "cpu":
        dist.barrier()
        clock_s = [time.perf_counter()]
        for _ in range(calls):
            call()
            clock_s.append(time.perf_counter())
        return [1e6 * (end - start) for start, end in pairwise(clock_s)]
    stream = torch.cuda.current_stream(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    for mark in marks:  # The first record() creates the event, which takes longer than recording it.
        mark.record(stream)
    dist.barrier()
    marks[0].record(stream)
    for mark in marks[1:]:
        call()
        mark.record(stream)
    torch.cuda.synchronize(device)
    return [1e3 * start.elapsed_time(end) for start, end in pairwise(marks)]  # From ms.


def _synchronized_us(call: Callable[[], Any], calls: int, device: torch.device) -> list[float]:
    """Time calls for each of which all ranks are ready, until it is done, by the CPU's clock."""
    times_us = []
    for _ in range(calls):
        dist.barrier()
        synchronize(device)
        start_s = time.perf_counter()
        call()
        synchronize(device)
        times_us.append(1e6 * (time.perf_counter() - start_s))
    return times_us
