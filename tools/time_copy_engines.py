"""Print what copy engines reach and cost: the tables of docs/cuda_graphs.md and docs/results/allreduce-h200.md.

    torchrun --nproc-per-node 2 tools/time_copy_engines.py --rounds 20

Needs two GPUs that reach each other's memory. First one tensor is averaged, by NCCL and by copy engines in parts, from
a CUDA graph. Then steps of a size run in CUDA graphs, each in turn with a step without communication: by NCCL, by copy
engines, and by copy engines that only copy, only average, or do neither but wait for each other.
"""

import argparse
import functools
import gc
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cs336sys.parallel import copy_engines, mean_kernel
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload
from cs336sys.training.ranks.step import ParallelStep

MESSAGES_GB = (1, 4)
PARTS_MB = (32, 128, 512)
WARMUP = 2


class _Nowhere:
    """Takes the place of the other GPU's box, so that nothing is copied into it."""

    def __getitem__(self, place: slice) -> "_Nowhere":
        return self

    def view(self, dtype: torch.dtype) -> "_Nowhere":
        return self

    def copy_(self, tensor: torch.Tensor) -> None:
        pass


@contextmanager
def _variant(copies: bool, averages: bool) -> Iterator[None]:
    """Within this context, copy engines that are made leave something out, and so do those that are captured."""
    make_boxes = copy_engines.CopyEngines._make_boxes

    def without_other_boxes(engines: copy_engines.CopyEngines, *arguments: Any) -> None:
        make_boxes(engines, *arguments)
        engines._boxes = [(box, _Nowhere(), handle) for box, _, handle in engines._boxes]  # type: ignore[misc]

    mean = mean_kernel.average_ if averages else lambda *_: None
    boxes = make_boxes if copies else without_other_boxes
    with (
        mock.patch.object(mean_kernel, "average_", mean),
        mock.patch.object(copy_engines.CopyEngines, "_make_boxes", boxes),
    ):
        yield


def time_in_turn(calls: Sequence[Callable[[], None]], rounds: int, device: torch.device) -> list[list[float]]:
    """Call each in turn, ``rounds`` times after some that warm up, and return the ms of its slowest rank by call."""
    times_ms: list[list[float]] = [[] for _ in calls]
    for _ in range(WARMUP + rounds):
        for call, own_times_ms in zip(calls, times_ms, strict=True):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            slowest = torch.tensor(start.elapsed_time(end), device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            own_times_ms.append(slowest.item())
    return [own_times_ms[WARMUP:] for own_times_ms in times_ms]


def time_messages(rounds: int, device: torch.device) -> list[str]:
    """Average one bf16 tensor by NCCL and by copy engines in parts; return rows of a table."""
    rows = []
    for message_gb in MESSAGES_GB:
        tensor = torch.zeros(message_gb * 10**9 // 2, dtype=torch.bfloat16, device=device)
        calls: dict[str, Callable[[], None]] = {"NCCL": functools.partial(dist.all_reduce, tensor)}
        kept = []  # Graphs do not hold the boxes that their copies fill.
        for part_mb in PARTS_MB:
            parts = tensor.split(part_mb * 10**6 // 2)
            engines = copy_engines.CopyEngines(None, copy_engines.places_in_box([parts[0].nbytes])[1], device)
            kept.append(engines)

            def average(engines: copy_engines.CopyEngines = engines, parts: Sequence[torch.Tensor] = parts) -> None:
                for number, part in enumerate(parts):
                    last = engines.average([part], number)
                last.wait()

            average()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL watches from a thread of its own.
                average()
            calls[f"copy engines, parts of {part_mb} MB"] = graph.replay
        for label, times_ms in zip(calls, time_in_turn(list(calls.values()), rounds, device), strict=True):
            median_ms = statistics.median(times_ms)
            # Of two ranks, the bytes of a message over its time are the bus bandwidth, too.
            rows.append(f"| {message_gb} GB | {label} | {median_ms:.2f} | {message_gb * 1e3 / median_ms:.1f} |")
        del tensor, parts, calls, kept
    return rows


def time_steps(size: str, rounds: int, device: torch.device) -> Iterator[str]:
    """Time steps of a size with bf16 gradients, each in turn with one without communication; yield rows of a table."""
    training = Workload(
        size=replace(SIZES[size], batch_size=4, context=512),
        precision="bf16",
        attention="flash",
        kernels="fused",
        optimizer="adamw",
        cuda_graph="on",
    )
    by_nccl = ParallelWorkload(training=training, strategy="bucketed", bucket_mb="block", gradient_dtype="bf16")
    by_copies = replace(by_nccl, transport="copy-engines")

    def captured(workload: ParallelWorkload) -> ParallelStep:
        step = ParallelStep(workload, device)
        with step.on_launch_stream():
            step()
        step.capture()
        return step

    alone = captured(by_nccl.unsynchronized)
    variants = {
        "NCCL": (by_nccl, True, True),
        "copy engines": (by_copies, True, True),
        "copies alone": (by_copies, True, False),
        "means alone": (by_copies, False, True),
        "barriers alone": (by_copies, False, False),
    }
    for label, (workload, copies, averages) in variants.items():
        with _variant(copies, averages):
            step = captured(workload)
        alone_ms, step_ms = time_in_turn([alone, step], rounds, device)
        ratios = [with_ms / without_ms for without_ms, with_ms in zip(alone_ms, step_ms, strict=True)]
        medians = [statistics.median(values) for values in (alone_ms, step_ms, ratios)]
        yield "| {} | {:.2f} | {:.2f} | {:.3f} |".format(label, *medians)
        del step
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="xl")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    is_printing = dist.get_rank() == 0
    for row in ("| message | averaged by | ms | bus bandwidth, GB/s |", "|---|---|---|---|"):
        print(row * is_printing)
    for row in time_messages(arguments.rounds, device):
        print(row * is_printing)
    print("\n| gradients of each step | without, ms | with, ms | over none |\n|---|---|---|---|" * is_printing)
    for row in time_steps(arguments.size, arguments.rounds, device):
        print(row * is_printing, flush=True)
    os._exit(0)  # Graphs that hold NCCL's kernels outlive its group otherwise.


if __name__ == "__main__":
    main()
