"""``distributed_communication_single_node``: all-reduces by size, ranks and backend."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cs336sys.report.allreduce import groups_of
from cs336sys.report.course.answer import Answer, where
from cs336sys.report.course.evidence import cells_of
from cs336sys.report.course.problem import Command, Target, measurement, sized

_MESSAGES = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
_COLUMNS = ("backend", "world_size", "size_bytes", "time_us", "algbw_gbps", "busbw_gbps", "wrong_elements", "status")
_FITTED = ("backend", "world_size", "latency_us", "bandwidth_gbps", "deviation_percent")


def all_reduce(answer: Answer) -> None:
    groups = answer.find("allreduce", {"message_bytes": _MESSAGES}, collective=("all_reduce",), dtype=("fp32",))
    if not groups:
        return
    answer.show(groups, "allreduce", *_COLUMNS, medians=True, join=True)
    answer.tables = [replace(table, rows=list(map(_with_rates_of_median, table.rows))) for table in answer.tables]
    answer.show(groups, "fit", *_FITTED, join=True, keep=lambda rows: where(rows, timing="back to back"))
    answer.draw(groups[:1])
    sweeps: list[dict[str, Any]] = []
    for key, cells in (sweep for group in groups for sweep in groups_of(group.cells).items()):
        smallest, largest = (cell.samples["back_to_back"] for cell in (cells[0], cells[-1]))
        sizes = {"smallest": smallest, "largest": largest, "bytes": cells[-1].derived["size_bytes"]}
        sweeps.append(key._asdict() | sizes)
    sweeps.sort(key=lambda sweep: sweep["world_size"])
    links = {cell.derived.get("link") or "" for cell in cells_of(groups)}
    answer.write("distributed_communication.all_reduce", sweeps=sweeps, links=sorted(links))
    has_gpu = any(run.machine.get("gpu") for group in groups for run in group.invocation.runs)
    backends = ["gloo"] * (answer.handout.year == 2025) + ["nccl"] * has_gpu
    answer.lack_unmeasured("{backend} with {world_size} ranks", sweeps, {"backend": backends, "world_size": (2, 4, 6)})


def _with_rates_of_median(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the rates of its median call; the command's are those of the mean."""
    algbw = row["size_bytes"] / row["time_us"] / 1e3 if row.get("time_us") else None
    busbw = row["busbw_gbps"] / row["algbw_gbps"] * algbw if algbw and row.get("busbw_gbps") else None
    return {**row, "algbw_gbps": algbw, "busbw_gbps": busbw}


def _grid(target: Target) -> list[Command]:
    planned: list[Command] = []
    both = ("gloo", "nccl") if target.handout.year == 2025 else ("nccl",)
    for backend in both if target.gpus else ("gloo",):
        # Ranks of Gloo share what there is, NCCL wants a GPU for each.
        ranks = [count for count in (2, 4, 6) if backend == "gloo" or count <= max(2, target.gpus)]
        gpus = 1 if backend == "gloo" else max(ranks)
        options = f"--backend {backend} --world-size {','.join(map(str, ranks))} --message 1MB,10MB,100MB,1GB"
        planned += measurement(f"allreduce {options}", 60.0 * len(ranks), gpus)(target)
    return planned


_SMALL_GRID = "--backend gloo --world-size 2 --message 10KB,100KB,1MB --steps 5"
all_reduce_commands = sized(_grid, measurement(f"allreduce {_SMALL_GRID}", 15))
