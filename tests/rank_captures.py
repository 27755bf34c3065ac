"""Captures of several ranks as torch.profiler writes them, with clocks that differ and noise."""

import json
import random
from pathlib import Path

LAYERS = 6
KERNEL_NS = 900_000
TRANSFER_NS = 200_000


def write_ranks(
    folder: Path,
    *,
    ranks: int = 8,
    steps: int = 10,
    seed: int = 0,
    straggler: int | tuple[int, ...] | None = None,
    excess: float = 0.01,
    noise: float = 0.003,
    skewed: bool = True,
    sequence: bool = False,
) -> list[Path]:
    """One file a rank of steps that each end in collectives, which all ranks leave together.

    Args:
        straggler: the rank, or the ranks, whose kernels take longer, by ``excess`` of a step.
        noise: standard deviation of a kernel's time, as a share.
    """
    random_ = random.Random(seed)
    events: list[list[dict]] = [[] for _ in range(ranks)]
    clocks = [
        (random_.uniform(-5e9, 5e9), random_.uniform(-2e-5, 2e-5)) if skewed and rank else (0.0, 0.0)
        for rank in range(ranks)
    ]

    def add(rank: int, category: str, name: str, start: float, stop: float, tid, **arguments) -> None:
        offset, drift = clocks[rank]
        begin, end = (1e12 + time + offset + drift * time for time in (start, stop))
        times = {"ts": round(begin / 1e3, 3), "dur": round((end - begin) / 1e3, 3)}
        pid = 0 if category == "kernel" else 100 + rank
        events[rank].append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": arguments}
        )

    correlation = 0
    number = 0
    now = [float(random_.randint(0, 50_000)) for _ in range(ranks)]
    for step in range(steps):
        begins = list(now)
        number = step * LAYERS
        for layer in range(LAYERS):
            arrived = []
            for rank in range(ranks):
                length = KERNEL_NS * (1 + random_.gauss(0, noise))
                if rank == straggler or (isinstance(straggler, tuple) and rank in straggler):
                    length += excess * (KERNEL_NS + TRANSFER_NS)
                correlation += 1
                launched = now[rank] + 3000
                add(rank, "cuda_runtime", "cudaLaunchKernel", launched, launched + 5000, 1, correlation=correlation)
                start = launched + 6000
                add(
                    rank,
                    "kernel",
                    f"gemm_{layer}",
                    start,
                    start + length,
                    7,
                    correlation=correlation,
                    stream=7,
                    device=0,
                )
                arrived.append(start + length + 1000)
            number += 1
            ends = max(arrived) + TRANSFER_NS * (1 + random_.gauss(0, 0.01))
            for rank in range(ranks):
                correlation += 1
                launched = arrived[rank] - 20_000
                add(rank, "cuda_runtime", "cudaLaunchKernel", launched, launched + 4000, 1, correlation=correlation)
                end = ends + random_.uniform(0, 3000)
                about = {
                    "Collective name": "allreduce",
                    "In msg nelems": 25_000_000,
                    "Out msg nelems": 25_000_000,
                    "Group size": ranks,
                    "dtype": "Float",
                    "Process Group Name": "0",
                    "Process Group Ranks": str(list(range(ranks))),
                }
                if sequence:
                    about["Seq"] = number
                where = {"correlation": correlation, "stream": 20, "device": 0}
                add(
                    rank,
                    "kernel",
                    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                    arrived[rank],
                    end,
                    20,
                    **where,
                    **about,
                )
                now[rank] = end
        for rank in range(ranks):
            add(rank, "user_annotation", f"ProfilerStep#{step}", begins[rank], now[rank], 1)
    paths = []
    for rank in range(ranks):
        path = folder / f"trace_{rank}.json"
        about = {"backend": "nccl", "rank": rank, "world_size": ranks}
        random_.shuffle(events[rank])
        path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": about, "traceEvents": events[rank]}))
        paths.append(path)
    return paths
