"""``cs336sys slurm``: a batch script for a command, to be submitted with sbatch."""

import contextlib
import io
from pathlib import Path
from typing import Annotated, Any

import typer

from cs336sys.accounting.sharding.mesh import mesh_ranks, read_mesh
from cs336sys.commands.invocation.faults import say
from cs336sys.commands.invocation.lazy import LazyGroup
from cs336sys.commands.options.reading import OUTPUT, at_least, split_list
from cs336sys.errors import UsageError, choose_from
from cs336sys.sizes import MOST_RANKS

# Commands whose --dry-run starts no process.
_PLANNED = ("bench", "nsys", "allreduce", "ddp", "shard")
# Options about files and trackers of the machine that the job runs on, and options that choose among the results'
# tables, which a plan does not have.
_OF_THE_JOB = frozenset(("output", "save", "plot", "plot_buckets", "plot_scaling", "trace", "keep", "sort"))
_EMPTY = {"table": (), "columns": (), "track": [], "resume": False, "resume_any": False}

# What stands behind the command's name is its own.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def slurm(
    ctx: typer.Context,
    arguments: Annotated[list[str], typer.Argument(metavar="COMMAND", help="A command that saves, and its options.")],
    nodes: Annotated[int, typer.Option(help="Machines.", min=1)] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs of each. Default: as many as --world-size needs; 1 without ranks.", min=1)
    ] = None,
    time: Annotated[str, typer.Option(help="Limit: minutes, h:mm:ss, days-hours:mm:ss.", metavar="<time>")] = "1:00:00",
    partition: Annotated[str | None, typer.Option(help="Partition.", show_default=False)] = None,
    account: Annotated[str | None, typer.Option(help="Account.", show_default=False)] = None,
    sbatch: Annotated[
        list[str],
        typer.Option(help="Another option of sbatch, without dashes: constraint=h200.", metavar="<a=b>"),
    ] = [],
    setup: Annotated[
        list[str], typer.Option(help="A line before the command: module load cuda.", metavar="<line>")
    ] = [],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the script to this file, not to stdout.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Write a batch script for Slurm that runs a command and saves what it measures; nothing is submitted.

    cs336sys slurm --nodes 2 --gpus-per-node 8 --time 30 -o ddp.sbatch ddp --size xl --bf16 --batch-size 16

    cs336sys slurm --time 2:00:00 bench --size small,medium,large,xl --bf16 | sbatch
    """
    from cs336sys.report.outputs import check_writable, write_file, writing_stdout
    from cs336sys.report.sbatch import Job, batch_script

    command, context = _read(ctx, arguments)
    asked = dict(context.params)
    on_ranks, needed, started = "world_size" in asked, 1, None
    if on_ranks:
        sizes = _world_sizes(asked)
        needed = -(-max(sizes) // nodes)
        chosen = gpus_per_node or needed
        if asked["world_size"] and nodes > 1 and set(sizes) != {nodes * chosen}:
            raise UsageError(
                f"--world-size {','.join(map(str, sizes))}: torchrun starts {nodes} x {chosen} ranks; leave it out"
            )
        if (
            asked["world_size"]
            and chosen < needed
            and asked["backend"] not in ("gloo", ["gloo"])
            and asked.get("device") != "cpu"
        ):
            raise UsageError(
                f"--gpus-per-node {chosen}: --world-size {','.join(map(str, sizes))} needs {needed}, one for each rank"
            )
        # What starts its ranks itself can start other numbers of them, and end and replace them.
        on_ranks = nodes > 1 or not (asked["world_size"] or asked["cell_timeout"])
        started = nodes * chosen if on_ranks else None
    elif nodes > 1:
        raise UsageError(f"--nodes {nodes}: {arguments[0]} runs in one process, on one machine")
    _plan(command, context, arguments[0], started)
    job = Job(nodes, gpus_per_node or needed, time, partition, account, sbatch, setup)
    script = batch_script(job, arguments, on_ranks=on_ranks, resumes="resume" in asked)
    if output is None:
        with writing_stdout():
            print(script, end="")
        return
    check_writable(output, "--output")
    write_file(output, script.encode(), "--output")
    say(f"wrote {output}: sbatch {output}")


def _world_sizes(asked: dict[str, Any]) -> list[int]:
    """Numbers of ranks that a command will have where nothing else starts them."""
    if asked["world_size"]:
        return split_list(asked["world_size"], "--world-size", at_least(1, MOST_RANKS))
    return [mesh_ranks(read_mesh(asked["mesh"])) if asked.get("mesh") else 2]


def _read(ctx: typer.Context, arguments: list[str]) -> tuple[Any, Any]:
    """The command that a job will run, and a context with its options as it will read them."""
    assert ctx.parent is not None
    assert isinstance(ctx.parent.command, LazyGroup)
    saving = (
        "bench",
        "nsys",
        "memprof",
        "attn",
        "flash",
        "kernels",
        "allreduce",
        "ddp",
        "shard",
        "losses",
        "precision",
    )
    name, *options = arguments
    if name not in saving:
        raise UsageError(f"'{name}' is no command that measures and saves: {choose_from(name, saving)}")
    command = ctx.parent.command.get_command(ctx.parent, name)
    return command, command.make_context(name, options, parent=ctx.parent)


def _plan(command: Any, context: Any, name: str, ranks: int | None) -> None:
    """Let the command read the values of its options: better refused here than in the queue.

    Args:
        ranks: how many torchrun will start; None where the command says so itself.
    """
    asked = context.params
    # The script adds --save where it is not given.
    saved = {"save": asked.get("save") or Path(f"{name}.jsonl.gz")} if "save" in asked else {}
    command.callback.read_options(asked | saved)
    if name in _PLANNED:
        if ranks is not None:
            asked["world_size"] = [str(ranks)]
        # It writes nothing here.
        context.params |= dict.fromkeys(_OF_THE_JOB.intersection(asked)) | {"dry_run": True}
        context.params |= {option: value for option, value in _EMPTY.items() if option in asked}
        if asked.get("device") == "cuda":
            # The job's machine has one.
            context.params["device"] = "auto"
        with contextlib.redirect_stdout(io.StringIO()):
            command.invoke(context)
