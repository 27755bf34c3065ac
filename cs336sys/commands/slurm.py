"""``cs336sys slurm``: a batch script for a command, to be submitted with sbatch."""

import contextlib
import io
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cs336sys.command_line.faults import say
from cs336sys.command_line.invocation import LazyGroup
from cs336sys.command_line.options.reading import Effect, effect_of, runs_code, setting, writes_file
from cs336sys.errors import UsageError, choose_from
from cs336sys.settings.fields import OUTPUT

_MEASURING = (
    *("bench", "nsys", "memprof", "attn", "flash", "kernels", "allreduce", "ddp", "shard", "losses", "precision"),
    *("verify", "tune", "report"),
)
# Commands whose --dry-run starts no process.
_PLANNED = ("bench", "nsys", "allreduce", "ddp", "shard", "report")
# Options that a plan is made without, by the value that says so: they are about trackers and saved cells, which the
# job's machine has, and about tables of results.
_LEFT_OUT: dict[str, Any] = dict.fromkeys(("sort", "format")) | dict.fromkeys(("resume", "resume_any"), False)
_LEFT_OUT |= dict.fromkeys(("table", "columns", "track"), ())

# Options after the command's name are the command's.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}

# sbatch's --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on below.
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED")

# Options of the command that are directives of the same name.
_OPTIONS_OF_SLURM = {
    **{name: name for name in ("nodes", "gpus", "gpus-per-node", "time", "partition", "account", "mem")},
    "cpus-per-task": "cpus",
}


@dataclass(frozen=True)
class Job:
    """A request to Slurm: the options of the batch script; a UsageError if sbatch would refuse it."""

    nodes: Annotated[int, setting(help="Number of machines.", min=1)] = 1
    gpus: Annotated[int | None, setting(help="GPUs of all machines together.", min=1)] = None
    gpus_per_node: Annotated[
        int | None, setting(help="GPUs of each machine. Default: one for each rank; 1 without ranks.", min=1)
    ] = None
    cpus: Annotated[int | None, setting(help="CPU cores of each machine.", min=1)] = None
    mem: Annotated[str | None, setting(help="Memory of each machine: 64G.", metavar="<size>")] = None
    time: Annotated[str, setting(help="Time limit: minutes, h:mm:ss, days-hours:mm:ss.", metavar="<time>")] = "1:00:00"
    partition: Annotated[str | None, setting(help="Slurm partition.")] = None
    account: Annotated[str | None, setting(help="Slurm account.")] = None
    sbatch: Annotated[
        Sequence[str], runs_code(help="Another option of sbatch, without dashes: constraint=h200.", metavar="<a=b>")
    ] = ()
    setup: Annotated[
        Sequence[str], runs_code(help="A line before the command: module load cuda.", metavar="<line>")
    ] = ()

    def __post_init__(self) -> None:
        """Refuse values that sbatch would refuse, and options of sbatch that these options set."""
        if self.gpus is not None and (self.gpus_per_node is not None or self.gpus % self.nodes):
            rule = f"give a multiple of --nodes {self.nodes}, or --gpus-per-node instead"
            raise UsageError(f"--gpus {self.gpus}: {rule}")
        if not _TIME.fullmatch(self.time):
            rule = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or more of these"
            raise UsageError(f"--time '{self.time}': must be {rule}")
        if self.mem is not None and not re.fullmatch(r"\d+[KMGT]?", self.mem):
            raise UsageError(f"--mem '{self.mem}': must be megabytes, or a number with K, M, G or T: 64G")
        for name, value in (("--partition", self.partition), ("--account", self.account)):
            if value is not None and not re.fullmatch(r"\S+", value):
                raise UsageError(f"{name} '{value}': must be one word")
        for option in self.sbatch:
            if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", option):
                rule = "must be an option of sbatch without its dashes: constraint=h200"
                raise UsageError(f"--sbatch '{option}': {rule}")
            name = option.partition("=")[0]
            if name in _OPTIONS_OF_SLURM:  # sbatch would take the last of both, and we start the command for the first.
                raise UsageError(f"--sbatch '{option}': give --{_OPTIONS_OF_SLURM[name]} to cs336sys slurm instead")


def slurm(
    ctx: typer.Context,
    arguments: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="A command that measures, and its options.")
    ],
    job: Job = Job(),
    output: Annotated[
        Path | None,
        writes_file("--output", "-o", help="Write the script to this file, not to stdout.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Write a batch script for Slurm that runs a command and saves what it measures; nothing is submitted.

    cs336sys slurm --nodes 2 --gpus-per-node 8 --time 30 -o ddp.sbatch ddp --size xl --bf16 --batch-size 16

    cs336sys slurm --time 2:00:00 bench --size small,medium,large,xl --bf16 | sbatch
    """
    from cs336sys.tables.outputs import check_writable, write_file, writing_stdout
    from cs336sys.tables.table import package_templates

    command, context = _read_command(ctx, arguments)
    name, command_options = arguments[0], dict(context.params)
    gpus_per_node = job.gpus // job.nodes if job.gpus else job.gpus_per_node
    on_ranks, gpus_per_node = _ranks_and_gpus(name, command_options, job.nodes, gpus_per_node)
    _plan_job(command, context, name, job.nodes * gpus_per_node if on_ranks else None)
    job = replace(job, gpus=None, gpus_per_node=gpus_per_node)  # the script asks for GPUs in this way alone
    line = shlex.join(arguments)
    # tune without --measure has nothing to save, and report saves in a folder of its own.
    if "save" in command_options and command_options.get("measure", True) and not command_options["save"]:
        # A job that is started again has its old number, and resumes if the command can.
        line += f' --save "{name}-${{SLURM_JOB_ID}}.jsonl.gz"' + " --resume" * ("resume" in command_options)
    facts = {"job": job, "name": name, "command": line, "on_ranks": on_ranks, "python": shlex.quote(sys.executable)}
    script = package_templates().get_template("commands/slurm.jinja").render(facts)
    if output is None:
        with writing_stdout():
            print(script, end="")
        return
    check_writable(output, "--output")
    write_file(output, script.encode(), "--output")
    say(f"wrote {output}: sbatch {output}")


def _ranks_and_gpus(name: str, command_options: dict[str, Any], nodes: int, gpus: int | None) -> tuple[bool, int]:
    """Return whether torchrun starts the command's ranks, and the GPUs of each machine: ``gpus``, or those needed."""
    world_size = command_options.get("world_size")
    if isinstance(world_size, list | tuple):  # Commands that start ranks take several numbers, tune one.
        mesh_sizes = re.findall(r"=\s*(\d+)", command_options.get("mesh") or "")  # fsdp=2,tp=4 takes 8; 2 by default.
        needed_ranks = max(world_size or [math.prod(map(int, mesh_sizes)) if mesh_sizes else 2])
        gpus_per_node = gpus or math.ceil(needed_ranks / nodes)
        if world_size:
            _refuse_world_size(command_options, nodes, gpus_per_node)
        # Torchrun's ranks have one number, and none is replaced after a timeout: the command starts such ranks itself.
        by_torchrun = nodes > 1 or not (world_size or command_options["cell_timeout"])
        return by_torchrun, gpus_per_node
    if nodes > 1:
        raise UsageError(f"--nodes {nodes}: {name} runs on one machine; leave --nodes out")
    if not command_options.get("run", True):
        raise UsageError(f"{name} without --run measures nothing: add --run")
    # tune --measure starts ranks; other commands use one GPU.
    return False, gpus or (world_size if command_options.get("measure") else None) or 1


def _refuse_world_size(command_options: dict[str, Any], nodes: int, gpus_per_node: int) -> None:
    """Refuse numbers of ranks that torchrun would not start, or that need more GPUs."""
    sizes = command_options["world_size"]
    option, needed = f"--world-size {','.join(map(str, sizes))}", math.ceil(max(sizes) / nodes)
    if nodes > 1 and set(sizes) != {nodes * gpus_per_node}:
        raise UsageError(f"{option}: torchrun starts {nodes} x {gpus_per_node} ranks; leave it out")
    is_gloo = command_options["backend"] in ("gloo", ["gloo"])  # allreduce takes a list of backends, others one.
    on_cpu = is_gloo or command_options.get("device") == "cpu"
    if gpus_per_node < needed and not on_cpu:
        raise UsageError(f"--gpus-per-node {gpus_per_node}: {option} needs {needed}, one for each rank")


def _read_command(ctx: typer.Context, arguments: list[str]) -> tuple[Any, Any]:
    assert ctx.parent is not None
    assert isinstance(ctx.parent.command, LazyGroup)
    name, *options = arguments
    if name not in _MEASURING:
        raise UsageError(f"'{name}' is not a command that measures: {choose_from(name, _MEASURING)}")
    command = ctx.parent.command.get_command(ctx.parent, name)
    return command, command.make_context(name, options, parent=ctx.parent)


def _plan_job(command: Any, context: Any, name: str, ranks: int | None) -> None:
    """Let the command read the values of its options, and plan its cells: better refused here than in the queue.

    ``ranks`` is how many ranks torchrun will start; None without torchrun.
    """
    command_options = context.params
    # The script adds --save where it is not given, and --resume is refused without it.
    saved = {"save": command_options.get("save") or Path(f"{name}.jsonl.gz")} if "save" in command_options else {}
    if ranks is not None:
        command_options["world_size"] = [ranks]
    groups = command.callback.read_options(command_options | saved)  # By the name of the command's parameter.
    if "verification" in groups:  # Of verify, which has no --dry-run: making its cells refuses what cannot go together.
        groups["verification"].workloads(groups["model"])
    if name in _PLANNED:  # Its --dry-run starts no process.
        declared = command.callback.declared  # This plan touches no file, saved cell or tracker: they are the job's.
        written = [option for option in command_options if effect_of(declared.get(option)) is Effect.WRITES_FILE]
        context.params |= dict.fromkeys(written) | {"dry_run": True}
        context.params |= {option: value for option, value in _LEFT_OUT.items() if option in command_options}
        if command_options.get("device") == "cuda":
            context.params["device"] = "auto"  # The job's machine has a GPU, and this one need not.
        with contextlib.redirect_stdout(io.StringIO()):
            command.invoke(context)
