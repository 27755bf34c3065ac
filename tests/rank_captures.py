"""Captures of several ranks as torch.profiler writes them, with noise."""

import json
import random
from pathlib import Path

LAYERS = 6
KERNEL_NS = 900_000
TRANSFER_NS = 200_000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"


def write_ranks(
    folder: Path,
    *,
    ranks: int = 8,
    steps: int = 10,
    seed: int = 0,
    straggler: int | None = None,
    excess: float = 0.01,
    noise: float = 0.003,
    skewed: bool = True,
    sequence: bool = False,
) -> list[Path]:
    """One file a rank of steps that each end in collectives, which all ranks leave together; their clocks differ.

    Args:
        straggler: the rank whose kernels take longer, by ``excess`` of a step.
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
                if rank == straggler:
                    length += excess * (KERNEL_NS + TRANSFER_NS)
                correlation += 1
                launched = now[rank] + 3000
                add(rank, "cuda_runtime", "cudaLaunchKernel", launched, launched + 5000, 1, correlation=correlation)
                start = launched + 6000
                where = {"correlation": correlation, "stream": 7, "device": 0}
                add(rank, "kernel", f"gemm_{layer}", start, start + length, 7, **where)
                arrived.append(start + length + 1000)
            number += 1
            ends = max(arrived) + TRANSFER_NS * (1 + random_.gauss(0, 0.01))
            for rank in range(ranks):
                correlation += 1
                launched = arrived[rank] - 20_000
                add(rank, "cuda_runtime", "cudaLaunchKernel", launched, launched + 4000, 1, correlation=correlation)
                end = ends + random_.uniform(0, 3000)
                about = {"correlation": correlation, "stream": 20, "device": 0} | _about_all_reduce(ranks)
                if sequence:
                    about["Seq"] = number
                add(rank, "kernel", ALL_REDUCE, arrived[rank], end, 20, **about)
                now[rank] = end
        for rank in range(ranks):
            add(rank, "user_annotation", f"ProfilerStep#{step}", begins[rank], now[rank], 1)
    for of_rank in events:
        random_.shuffle(of_rank)
    return _write(folder, events)


def _about_all_reduce(ranks: int) -> dict:
    return {
        "Collective name": "allreduce",
        "In msg nelems": 25_000_000,
        "Out msg nelems": 25_000_000,
        "Group size": ranks,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Ranks": str(list(range(ranks))),
    }


def _write(folder: Path, events: list[list[dict]]) -> list[Path]:
    paths = []
    for rank, of_rank in enumerate(events):
        path = folder / f"trace_{rank}.json"
        about = {"backend": "nccl", "rank": rank, "world_size": len(events)}
        path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": about, "traceEvents": of_rank}))
        paths.append(path)
    return paths


JOIN = "join"
TICK_US = 10


def backward_step(*, before: int = 0, scale: float = 1.0) -> list[tuple[str, float]]:
    """A step whose backward pass launches all-reduces, as of DDP, and whose optimizer joins them.

    Args:
        before: how many more products it has before the backward pass.
        scale: how much longer the kernels of both passes take.
    """
    block = [("gemm_backward", 500 * scale), ("elementwise_kernel_backward", 300 * scale)]
    bucket = [*block, *block, (ALL_REDUCE, 0)]
    ends = [(JOIN, 0), ("multi_tensor_adam", 300)]
    forward = [("gemm_forward", 400 * scale), ("elementwise_kernel_forward", 200 * scale)] * 8
    return [*forward, *[("gemm_forward", 500)] * before, *bucket * 5, *ends]


def write_overlapping_ranks(
    folder: Path, programs: list[list[tuple[str, float]]], sleep_us: tuple[int, ...]
) -> list[Path]:
    """One file a rank of 8 steps whose kernels take 1.4 times as long while a collective of the rank waits.

    Args:
        programs: of each rank, name and us of the work of a step.
        sleep_us: of each rank, how long its CPU sleeps before the first launch of a step.
    """
    random_ = random.Random(0)
    events: list[list[dict]] = [[] for _ in programs]
    now = [0] * len(programs)
    for step in range(8):
        begins = list(now)
        firsts = [begin + sleep + abs(random_.gauss(0, 50)) for begin, sleep in zip(begins, sleep_us, strict=True)]
        for rank, work in enumerate(_run(programs, firsts, random_)):
            now[rank] = max(stop for *_, stop in work)
            for place, (name, start, stop) in enumerate(work):
                about: dict = {"correlation": (step + 1) * 1000 + place}
                launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 100, "tid": 1}
                events[rank].append({"ph": "X", **launch, "ts": firsts[rank] + place, "dur": 1, "args": {**about}})
                about |= {"stream": 7, "device": 0}
                if name == ALL_REDUCE:
                    about |= {"stream": 20, **_about_all_reduce(len(programs))}
                kernel = {"cat": "kernel", "name": name, "pid": 0, "tid": about["stream"]}
                events[rank].append({"ph": "X", **kernel, "ts": start, "dur": stop - start, "args": about})
            of_step = {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 100, "tid": 1}
            events[rank].append({"ph": "X", **of_step, "ts": begins[rank], "dur": now[rank] - begins[rank]})
    return _write(folder, events)


def _run(
    programs: list[list[tuple[str, float]]], firsts: list[float], random_: random.Random
) -> list[list[tuple[str, int, int]]]:
    """Run a step on all ranks: name, start and stop of the work of each, in us, in the order of its launches."""
    ranks = range(len(programs))
    work: list[list[tuple[str, int, int]]] = [[] for _ in ranks]
    # Of each rank: its next work, what remains of it, when that began, and which of its work are collectives.
    place, left, begin = [0 for _ in ranks], [0.0 for _ in ranks], [0 for _ in ranks]
    collectives: list[list[int]] = [[] for _ in ranks]
    arrived: list[list[int]] = [[] for _ in ranks]
    ends: list[int] = []
    now = round(min(firsts))
    while any(place[rank] < len(programs[rank]) for rank in ranks):
        now += TICK_US
        for rank in ranks:
            begun = len(arrived[rank])
            if begun < len(collectives[rank]) and (not begun or (len(ends) >= begun and ends[begun - 1] <= now)):
                arrived[rank].append(now)
        if all(len(times) > len(ends) for times in arrived):
            ends.append(now + TRANSFER_NS // 1000)
        for rank in ranks:
            if now < firsts[rank] + 100 or place[rank] == len(programs[rank]):
                continue
            name, us = programs[rank][place[rank]]
            if name == ALL_REDUCE:
                collectives[rank].append(len(work[rank]))
                work[rank].append((name, 0, 0))
            elif name != JOIN:
                if left[rank] <= 0:
                    left[rank], begin[rank] = us * (1 + random_.gauss(0, 0.003)), now
                left[rank] -= TICK_US / (1.4 if len(arrived[rank]) > len(ends) else 1)
                if left[rank] > 0:
                    continue
                work[rank].append((name, begin[rank], now + TICK_US - 1))
            elif len(ends) < len(collectives[rank]) or ends[-1] > now:
                continue
            place[rank] += 1
    for rank in ranks:
        for number, collective in enumerate(collectives[rank]):
            work[rank][collective] = (ALL_REDUCE, arrived[rank][number], ends[number] - random_.randint(1, 3))
    return work
