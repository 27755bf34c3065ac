"""``cs336sys slurm``: a batch script for a command, to be submitted with sbatch."""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cs336sys.accounting.sharding.partition import mesh_ranks, read_mesh
from cs336sys.commands.faults import say
from cs336sys.commands.invocation import LazyGroup
from cs336sys.commands.options.effects import Effect, effect_of, runs_code, setting, writes_file
from cs336sys.errors import UsageError, choose_from
from cs336sys.settings import OUTPUT

_SAVING = ("bench", "nsys", "memprof", "attn", "flash", "kernels", "allreduce", "ddp", "shard", "losses", "precision")
# Commands whose --dry-run starts no process.
_PLANNED = ("bench", "nsys", "allreduce", "ddp", "shard")
# Options about trackers and saved cells of the machine that the job runs on, and options that choose among the results'
# tables, which a plan does not have.
_EMPTY: dict[str, Any] = {"table": (), "columns": (), "sort": None, "track": [], "resume": False, "resume_any": False}

# What stands behind the command's name is its own.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def slurm(
    ctx: typer.Context,
    arguments: Annotated[list[str], typer.Argument(metavar="COMMAND", help="A command that saves, and its options.")],
    nodes: Annotated[int, setting(help="Machines.", min=1)] = 1,
    gpus_per_node: Annotated[
        int | None, setting(help="GPUs of each. Default: as many as --world-size needs; 1 without ranks.", min=1)
    ] = None,
    time: Annotated[str, setting(help="Limit: minutes, h:mm:ss, days-hours:mm:ss.", metavar="<time>")] = "1:00:00",
    partition: Annotated[str | None, setting(help="Partition.")] = None,
    account: Annotated[str | None, setting(help="Account.")] = None,
    sbatch: Annotated[
        list[str], runs_code(help="Another option of sbatch, without dashes: constraint=h200.", metavar="<a=b>")
    ] = [],
    setup: Annotated[list[str], runs_code(help="A line before the command: module load cuda.", metavar="<line>")] = [],
    output: Annotated[
        Path | None,
        writes_file("--output", "-o", help="Write the script to this file, not to stdout.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Write a batch script for Slurm that runs a command and saves what it measures; nothing is submitted.

    cs336sys slurm --nodes 2 --gpus-per-node 8 --time 30 -o ddp.sbatch ddp --size xl --bf16 --batch-size 16

    cs336sys slurm --time 2:00:00 bench --size small,medium,large,xl --bf16 | sbatch
    """
    from cs336sys.report.outputs import check_writable, write_file, writing_stdout

    command, context = _read_command(ctx, arguments)
    command_options = dict(context.params)
    on_ranks, needed, started = False, 1, None
    if "world_size" in command_options:
        mesh = command_options.get("mesh")
        sizes = command_options["world_size"] or [mesh_ranks(read_mesh(mesh)) if mesh else 2]
        needed = -(-max(sizes) // nodes)
        chosen = gpus_per_node or needed
        if command_options["world_size"]:
            _refuse_world_size(command_options, nodes, chosen)
        # What starts its ranks itself can start other numbers of them, and end and replace them.
        on_ranks = nodes > 1 or not (command_options["world_size"] or command_options["cell_timeout"])
        started = nodes * chosen if on_ranks else None
    elif nodes > 1:
        raise UsageError(f"--nodes {nodes}: {arguments[0]} runs in one process, on one machine")
    _plan_job(command, context, arguments[0], started)
    job = Job(nodes, gpus_per_node or needed, time, partition, account, sbatch, setup)
    script = batch_script(job, arguments, on_ranks=on_ranks, resumes="resume" in command_options)
    if output is None:
        with writing_stdout():
            print(script, end="")
        return
    check_writable(output, "--output")
    write_file(output, script.encode(), "--output")
    say(f"wrote {output}: sbatch {output}")


def _refuse_world_size(command_options: dict[str, Any], nodes: int, gpus_per_node: int) -> None:
    """Raise a UsageError for numbers of ranks that torchrun would not start, or that need more GPUs."""
    sizes = command_options["world_size"]
    option, needed = f"--world-size {','.join(map(str, sizes))}", -(-max(sizes) // nodes)
    if nodes > 1 and set(sizes) != {nodes * gpus_per_node}:
        raise UsageError(f"{option}: torchrun starts {nodes} x {gpus_per_node} ranks; leave it out")
    on_cpu = command_options["backend"] in ("gloo", ["gloo"]) or command_options.get("device") == "cpu"
    if gpus_per_node < needed and not on_cpu:
        raise UsageError(f"--gpus-per-node {gpus_per_node}: {option} needs {needed}, one for each rank")


def _read_command(ctx: typer.Context, arguments: list[str]) -> tuple[Any, Any]:
    """The command that a job will run, and a context with its options as it will read them."""
    assert ctx.parent is not None
    assert isinstance(ctx.parent.command, LazyGroup)
    name, *options = arguments
    if name not in _SAVING:
        raise UsageError(f"'{name}' is not a command that measures and saves: {choose_from(name, _SAVING)}")
    command = ctx.parent.command.get_command(ctx.parent, name)
    return command, command.make_context(name, options, parent=ctx.parent)


def _plan_job(command: Any, context: Any, name: str, ranks: int | None) -> None:
    """Let the command read the values of its options: better refused here than in the queue.

    Args:
        ranks: how many torchrun will start; None where the command says so itself.
    """
    command_options = context.params
    # The script adds --save where it is not given.
    saved = {"save": command_options.get("save") or Path(f"{name}.jsonl.gz")} if "save" in command_options else {}
    command.callback.read_options(command_options | saved)
    if name in _PLANNED:
        if ranks is not None:
            command_options["world_size"] = [ranks]
        # It writes nothing here.
        declared = command.callback.declared
        written = [option for option in command_options if effect_of(declared.get(option)) is Effect.WRITES_FILE]
        context.params |= dict.fromkeys(written) | {"dry_run": True}
        context.params |= {option: value for option, value in _EMPTY.items() if option in command_options}
        if command_options.get("device") == "cuda":
            # The job's machine has one.
            context.params["device"] = "auto"
        with contextlib.redirect_stdout(io.StringIO()):
            command.invoke(context)


# What sbatch's --time accepts: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on below.
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED")
_OPTION = re.compile(r"[a-z][a-z-]*(=\S+)?")

# Options of the command that are directives of the same name.
_OPTIONS_OF_SLURM = ("nodes", "gpus-per-node", "time", "partition", "account")


@dataclass(frozen=True)
class Job:
    """A request to Slurm.

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
    sbatch_options = {
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
    directives = [f"#SBATCH --{option}={value}" for option, value in sbatch_options.items() if value is not None]
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
