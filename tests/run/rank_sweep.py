"""A command on several ranks, for the tests of sweeps under torchrun: its cells do what their configuration says.

Started as a script by torchrun, and imported by name for its cell function.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import typer

from cs336sys.command_line.options.output import SweepOptions
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.parallel.ranks import launch
from cs336sys.results.model import Samples
from cs336sys.run.cells import Outcome
from cs336sys.run.sweep import run_sweep


def measure(configuration, progress):
    if configuration["action"] == "refuse":
        return Outcome("oom", reason="too large for both", refused=True)
    ranks = launch.kept(configuration["world_size"], backend="gloo", timeout_s=600)
    print("a line of a cell")
    sums, processes = zip(*ranks.run(act, configuration["action"]), strict=True)
    return Outcome("ok", {"sum": Samples("ms", "cpu clock", sums)}, {"processes": processes})


def act(action):
    if action == "fail on rank 1" and dist.get_rank() == 1:
        raise ValueError("the numbers are wrong")
    if action == "unsupported":
        raise CapabilityError("none of us can")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total.item(), os.getpid()


def main():
    """Measure the actions that each argument but the first lists, sweep after sweep; the first is a results file."""
    file, *sweeps = sys.argv[1:]
    try:
        for actions in sweeps:
            # "by rank" is another action on each.
            actions = actions.replace("by rank", f"by rank {os.environ['RANK']}")
            configurations = [{"action": action, "world_size": 2} for action in actions.split(",")]
            options = SweepOptions(Path(file), resume=True)
            sweep = run_sweep("bench", "rank_sweep:measure", configurations, options, across_ranks=True)
            if sweep.is_reported_here:
                means = [cell.samples["sum"].mean for cell in sweep.cells if cell.samples]
                print([cell.status for cell in sweep.cells], means)
        sweep.exit()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except (CapabilityError, UsageError) as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
