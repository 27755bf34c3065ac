"""``distributed_communication_single_node``: all-reduces by size, ranks and backend."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cs336sys.report.allreduce import fit_of, groups_of, rates_of_median
from cs336sys.report.course.answer import Answer
from cs336sys.report.course.evidence import cells_of
from cs336sys.report.course.problem import Command, Target, measurement, sized
from cs336sys.results.model import Cell

_MESSAGES = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
_LABEL = "{backend} with {world_size} ranks"


def all_reduce(answer: Answer) -> None:
    selections = answer.find("allreduce", {"message_bytes": _MESSAGES}, collective=("all_reduce",), dtype=("fp32",))
    if not selections:
        return
    columns = ("backend", "world_size", "size_bytes", "time_us", "algbw_gbps", "busbw_gbps", "wrong_elements", "status")
    answer.show(selections, "allreduce", *columns, medians=True, join=True)
    groups = {key: cells for group in selections for key, cells in groups_of(group.cells).items()}
    (table,) = answer.tables
    rows = list(map(_with_rates_of_median, table.rows))
    notes = [note for note in table.notes if not note.startswith("average bus")]
    answer.tables = [replace(table, rows=rows, notes=notes)]
    answer.draw(selections[:1])
    sweeps = [
        {**key._asdict(), "cells": cells, "line": fit_of(cells, "back_to_back"), "rates": _rates(cells[-1])}
        for key, cells in sorted(groups.items(), key=lambda pair: (pair[0].backend != "nccl", pair[0].world_size))
    ]
    for sweep in sweeps:
        sweep["samples"] = [cell.samples["back_to_back"] for cell in sweep["cells"]]
        sweep["largest"] = sweep["samples"][-1]
    links = sorted({cell.derived.get("link") or "" for cell in cells_of(selections)})
    answer.write(
        "distributed_communication.all_reduce",
        sweeps=sweeps,
        nvlinks=[link for link in links if "NVLinks" in link],
    )
    answer.write_failures(cells_of(selections), _LABEL)
    has_gpu = any(run.machine.get("gpu") for group in selections for run in group.invocation.runs)
    backends = ["gloo"] * (answer.handout.year == 2025) + ["nccl"] * has_gpu
    answer.lack_unmeasured(_LABEL, sweeps, {"backend": backends, "world_size": (2, 4, 6)})


def _rates(cell: Cell) -> tuple[float, float] | None:
    return None if cell.derived["back_to_back_busbw_gbps"] is None else rates_of_median(cell)


def _with_rates_of_median(row: Mapping[str, Any]) -> dict[str, Any]:
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
