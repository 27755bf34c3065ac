"""``distributed_communication_single_node``: all-reduces by size, ranks and backend."""

from dataclasses import replace
from typing import Any

from cs336sys.report.allreduce import fit_of, groups_of, rates_of_median
from cs336sys.report.course.answer import Answer
from cs336sys.report.course.evidence import cells_of
from cs336sys.report.course.problem import Command, Target, measurement, sized
from cs336sys.report.table import Table
from cs336sys.results.model import Cell

_MESSAGES = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)


def _us(cell: Cell) -> float:
    return cell.samples["back_to_back"].median


def _size(cell: Cell) -> int:
    return cell.configuration["message_bytes"]


def all_reduce(answer: Answer) -> None:
    selections = answer.find("allreduce", {"message_bytes": _MESSAGES}, collective=("all_reduce",), dtype=("fp32",))
    groups = {key: cells for group in selections for key, cells in groups_of(group.cells).items()}
    _say_messages(answer, groups)
    _say_ranks(answer, groups)
    _say_backends(answer, groups)
    for key, cells in groups.items():
        line = fit_of(cells, "back_to_back")
        if line is not None and line.latency_s > 0 and len(cells) > 2:
            facts = {"latency": 1e6 * line.latency_s, "rate": line.bytes_per_s / 1e9, "half": line.half_bandwidth_bytes}
            answer.say("line", key._asdict(), **facts)
    answer.say_failures(cells_of(selections), "backend and ranks")
    columns = ("backend", "world_size", "size_bytes", "time_us", "algbw_gbps", "busbw_gbps", "wrong_elements", "status")
    answer.show(selections, "allreduce", *columns, medians=True)
    answer.tables = [_with_rates_of_medians(table) for table in answer.tables]
    answer.draw(selections[:1])
    runs = [group.invocation.run for group in selections]
    has_gpu = any(run is not None and run.machine.get("gpu") for run in runs)
    backends = ["gloo"] * (answer.handout.year == 2025) + ["nccl"] * has_gpu
    measured = [key._asdict() for key in groups]
    answer.lack_unmeasured("backend and ranks", measured, backend=backends, world_size=(2, 4, 6))


def _say_messages(answer: Answer, groups: dict) -> None:
    """Times of the smallest and the largest message, and the bandwidth between them."""
    for key, cells in groups.items():
        first, last = cells[0], cells[-1]
        bandwidth = None
        if last.derived["back_to_back_busbw_gbps"] is not None and len(cells) > 1:
            algbw, busbw = rates_of_median(last)
            grown = algbw / rates_of_median(first)[0]
            bandwidth = {"algbw": algbw, "busbw": busbw, "bus": busbw / algbw, "grown": grown}
        ends = [{"us": _us(cell), "bytes": _size(cell)} for cell in (first, last)[: len(cells)]]
        answer.say("messages", key._asdict(), ends=ends, bandwidth=bandwidth)


def _with_rates_of_medians(table: Table) -> Table:
    rows: list[dict[str, Any]] = [dict(row) for row in table.rows]
    for row in rows:
        algbw = row["size_bytes"] / row["time_us"] / 1e3 if row.get("time_us") else None
        busbw = row["busbw_gbps"] / row["algbw_gbps"] * algbw if algbw and row.get("busbw_gbps") else None
        row |= {"algbw_gbps": algbw, "busbw_gbps": busbw}
    return replace(table, rows=rows, notes=[note for note in table.notes if not note.startswith("average bus")])


def _say_ranks(answer: Answer, groups: dict) -> None:
    """Say how time depends on the number of ranks, at the largest message of each backend."""
    for backend in dict.fromkeys(key.backend for key in groups):
        series = {key.world_size: cells[-1] for key, cells in sorted(groups.items()) if key.backend == backend}
        sizes = set(map(_size, series.values()))
        if len(series) > 1 and len(sizes) == 1:
            times = list(map(_us, series.values()))
            answer.say("ranks", backend=backend, ranks=list(series), size=sizes.pop(), times=times)


def _say_backends(answer: Answer, groups: dict) -> None:
    pairs = []
    for key, cells in groups.items():
        if key.backend == "nccl":
            others = {_size(cell): _us(cell) for cell in groups.get(key._replace(backend="gloo"), ())}
            sizes = [(_size(cell), _us(cell)) for cell in cells]
            pairs += [(key.world_size, size, us, others[size]) for size, us in sizes if size in others]
    if pairs:
        answer.say("backends", ratios=[gloo / nccl for *_, nccl, gloo in pairs])
        # Of as many ranks of each: a call over more of them takes longer.
        ranks, size, nccl, gloo = min(pairs)
        if nccl < gloo:
            answer.say("small messages", ranks=ranks, size=size, nccl=nccl, gloo=gloo)


def _grid(target: Target) -> list[Command]:
    planned: list[Command] = []
    for backend in ("gloo", "nccl") if target.handout.year == 2025 else ("nccl",):
        # Ranks of Gloo share what there is, NCCL wants a GPU for each.
        ranks = [count for count in (2, 4, 6) if backend == "gloo" or count <= max(2, target.gpus)]
        gpus = 1 if backend == "gloo" else max(ranks)
        options = f"--backend {backend} --world-size {','.join(map(str, ranks))} --message 1MB,10MB,100MB,1GB"
        planned += measurement(f"allreduce {options}", 60.0 * len(ranks), gpus)(target)
    return planned


_SMALL_GRID = "--backend gloo --world-size 2 --message 10KB,100KB,1MB --steps 5"
all_reduce_commands = sized(_grid, measurement(f"allreduce {_SMALL_GRID}", 15))
