"""Print the table of docs/bench.md: phases of a launched step of ``small`` with SDPA by three clocks, in turn.

    python tools/time_phases.py --core 3 --core 7 --rounds 5

Needs a GPU. A round on each core runs steps that wait for nothing within themselves, with a CUDA event after each phase
and the CPU's clock around its launches; steps in which the CPU waits for the GPU after each phase; and the same phases
replayed from CUDA graphs, in which nothing waits for launches.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload
from cs336sys.timing.phases import elapsed_ms, mark
from cs336sys.training.step import TrainStep

STEPS = 20


def launched_ms(phases: Mapping[str, Callable[[], None]]) -> dict[str, dict[str, float]]:
    """Run a step that waits at its end, and return each phase's ms by events and its launches' by the CPU's clock."""
    torch.cuda.synchronize()
    marks, clocks = [mark(on_gpu=True)], [time.perf_counter()]
    for phase in phases.values():
        phase()
        marks.append(mark(on_gpu=True))
        clocks.append(time.perf_counter())
    torch.cuda.synchronize()
    return {
        "events": {name: elapsed_ms(*marks[index : index + 2]) for index, name in enumerate(phases)},
        "launches": {name: elapsed_ms(*clocks[index : index + 2]) for index, name in enumerate(phases)},
    }


def waited_ms(phases: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Run a step that waits for the GPU after each phase, and return each phase's ms by the CPU's clock."""
    torch.cuda.synchronize()
    clocks = [time.perf_counter()]
    for phase in phases.values():
        phase()
        torch.cuda.synchronize()
        clocks.append(time.perf_counter())
    return {name: elapsed_ms(*clocks[index : index + 2]) for index, name in enumerate(phases)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--core", type=int, action="append", required=True, help="run on this core, in turn")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    workload = Workload(size=SIZES["small"], precision="bf16", attention="sdpa", optimizer="fused")
    launched, graphed = TrainStep(workload, device), TrainStep(replace(workload, cuda_graph="on"), device)
    graphed.capture()
    for _ in range(5):
        launched_ms(launched.phases)
    print(f"| core, round | clock | {' | '.join(launched.phases)} |\n|---|---|{'---|' * len(launched.phases)}")
    for number in range(arguments.rounds):
        for core in arguments.core:
            os.sched_setaffinity(0, {core})
            steps: dict[str, list[dict[str, float]]] = {"events": [], "launches": [], "waited": [], "graphs": []}
            for _ in range(STEPS):
                for clock, times_ms in launched_ms(launched.phases).items():
                    steps[clock].append(times_ms)
                steps["waited"].append(waited_ms(launched.phases))
                steps["graphs"].append(launched_ms(graphed.phases)["events"])
            for clock, measured in steps.items():
                medians_ms = [statistics.median(times_ms[name] for times_ms in measured) for name in launched.phases]
                print(f"| {core}, {number} | {clock} | {' | '.join(f'{ms:.2f}' for ms in medians_ms)} |", flush=True)


if __name__ == "__main__":
    main()
