"""A batch script for Slurm that runs a command of ours."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from cs336sys.errors import UsageError

# What sbatch's --time accepts: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on below.
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED")
_OPTION = re.compile(r"[a-z][a-z-]*(=\S+)?")

# Options of the command that are directives of the same name.
_OPTIONS_OF_SLURM = ("nodes", "gpus-per-node", "time", "partition", "account")


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm.

    Attributes:
        time: the limit, as ``sbatch --time`` takes it.
        options: others of sbatch, ``constraint=h200``, without dashes.
        setup: lines of bash before the command.

    Raises:
        UsageError: sbatch would refuse it.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    time: str = "1:00:00"
    partition: str | None = None
    account: str | None = None
    options: Sequence[str] = ()
    setup: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not _TIME.fullmatch(self.time):
            rule = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or more of these"
            raise UsageError(f"--time '{self.time}': must be {rule}")
        for name, value in (("--partition", self.partition), ("--account", self.account)):
            if value is not None and not re.fullmatch(r"\S+", value):
                raise UsageError(f"{name} '{value}': must be one word")
        for option in self.options:
            if not _OPTION.fullmatch(option):
                raise UsageError(
                    f"--sbatch '{option}': must be an option of sbatch without its dashes: constraint=h200"
                )
            name = option.partition("=")[0]
            # sbatch would take the last of the two, and the command be started for the first.
            if name in _OPTIONS_OF_SLURM:
                raise UsageError(f"--sbatch '{option}': give --{name} to cs336sys slurm instead")


def batch_script(job: Job, arguments: Sequence[str], *, on_ranks: bool, resumes: bool = True) -> str:
    """The script: directives, the job's setup, and the command in a step of ``srun``.

    Args:
        arguments: the command and its own; ``--save`` and ``--resume`` are added where it saves nowhere.
        on_ranks: torchrun starts a rank for each GPU of all nodes; otherwise the command runs once.
        resumes: the command has ``--resume``.
    """
    name = arguments[0]
    asked = {
        "job-name": f"cs336sys-{name}",
        "partition": job.partition,
        "account": job.account,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node,
        "time": job.time,
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    directives = [f"#SBATCH --{option}={value}" for option, value in asked.items() if value is not None]
    directives += [f"#SBATCH --{option}" for option in job.options]
    command = shlex.join(arguments)
    if not any(argument == "--save" or argument.startswith("--save=") for argument in arguments):
        # A job that is started again has its old number, and goes on where it was.
        command += f' --save "{name}-${{SLURM_JOB_ID}}.jsonl.gz"' + (" --resume" if resumes else "")
    python = shlex.quote(sys.executable)
    lines = ["#!/bin/bash", *directives, "", "set -euo pipefail", *job.setup]
    if on_ranks:
        lines += [
            # Not head, which would break the pipe, and with it the script.
            'first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            "# Of jobs that share a node each has a port of its own.",
            "port=$((20000 + SLURM_JOB_ID % 10000))",
            f"srun --kill-on-bad-exit=1 {python} -m torch.distributed.run \\",
            f'    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={job.gpus_per_node} \\',
            '    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first_node:$port" \\',
            f"    -m cs336sys {command}",
        ]
    else:
        lines.append(f"srun --ntasks=1 {python} -m cs336sys {command}")
    return "\n".join(lines) + "\n"
