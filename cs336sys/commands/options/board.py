"""Choices of ``shard --board`` and ``shard --checkpoint auto`` before anything runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.selective_checkpointing import choose_kept_blocks, kept_peak
from cs336sys.commands.faults import say
from cs336sys.commands.options.training import ImplementationOptions, StepsOptions
from cs336sys.errors import UsageError
from cs336sys.measure.system import gpu_capacity
from cs336sys.workload import ParallelWorkload, Workload

# What is fastest for a step that fills its GPUs, by strategy and option: of this project's parts, and of torch's alone.
_IMPLEMENTATION = {
    "fsdp": {"attention": ["flash"], "kernels": ["fused"], "optimizer": ["adamw"], "state_dtype": ["bf16"]},
    "torch-fsdp": {"attention": ["sdpa"], "compile": ["block"], "optimizer": ["fused"]},
}
_CHECKPOINTING = {"fsdp": "auto", "torch-fsdp": "keep=0"}

# The handout's benchmark repeats steps for 10 s of warm-up and then for 30 s: at 4.2 s a step 2 and 7.
_WARMUP, _STEPS = [2], 7

_UNITS = {"gib": GIB, "gb": 10**9}

# How much of a GPU's memory tensors may be predicted to fill: an H200 of 140.4 GiB had 5.5 left when they took 129.9.
_FILLED = 0.925
# Where there is no GPU: of an H200.
_LIMIT_BYTES = 130 * GIB


def chosen_for_board(
    context: typer.Context,
    strategy: Sequence[str],
    checkpoint: Sequence[str],
    implementation: ImplementationOptions,
    steps: StepsOptions,
) -> tuple[Sequence[str], Sequence[str], ImplementationOptions, StepsOptions]:
    """The options of a board's cell: what was not asked for is what is fastest.

    Raises:
        UsageError: its strategy has no board.
    """
    strategy = strategy if is_given(context, "strategy") else ["fsdp"]
    if len(strategy) != 1 or strategy[0] not in _IMPLEMENTATION:
        raise UsageError(
            f"--board --strategy {','.join(strategy)}: a board has one strategy, {' or '.join(_IMPLEMENTATION)}"
        )
    fastest = _IMPLEMENTATION[strategy[0]]
    return (
        strategy,
        checkpoint if is_given(context, "checkpoint") else [_CHECKPOINTING[strategy[0]]],
        replace(implementation, **{name: value for name, value in fastest.items() if not is_given(context, name)}),
        StepsOptions(
            steps.warmup if is_given(context, "warmup") else _WARMUP,
            steps.steps if is_given(context, "steps") else _STEPS,
        ),
    )


def refuse_beside_board(model: str | None, mesh: str | None, plot: Path | None) -> None:
    """Refuse options of ``shard`` that mean nothing with ``--board``.

    Raises:
        UsageError: one is given.
    """
    reasons = {
        f"--model {model}": model is not None and "--board measures the leaderboard's model",
        f"--mesh {mesh}": mesh is not None and "--board's ranks have one dimension",
        f"--plot {plot}": plot is not None and "--board does not record a rank's memory at six moments",
    }
    for option, reason in reasons.items():
        if reason:
            raise UsageError(f"{option}: {reason}; leave one of them out")


def require_for_board(workload: Workload) -> None:
    """Refuse a step that ``--board`` cannot measure or check.

    Raises:
        UsageError: it is in CUDA graphs, or in fp16.
    """
    if workload.cuda_graph == "on":
        raise UsageError(
            "--cuda-graph on: --board launches its step, whose kernels take longer than launches; choose off"
        )
    if workload.precision == "fp16":
        raise UsageError(
            "--precision fp16: --board checks gradients of fp32 and bf16, which are not scaled; choose one"
        )


def is_given(context: typer.Context, option: str) -> bool:
    """Return whether the user has given this option, by its parameter's name, on the command line or by a variable."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


_SOURCES = ("DEFAULT", "DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")


def goes_before(context: typer.Context, option: str, other: str) -> bool:
    """Return whether an option is given where it precedes another, or next to it: the line, variables, the file."""
    option_source, other_source = (context.get_parameter_source(name) for name in (option, other))
    ranks = [0 if source is None else _SOURCES.index(source.name) for source in (option_source, other_source)]
    return ranks[0] > 0 and ranks[0] >= ranks[1]


def room_for_tensors(device: str) -> float:
    """Bytes of the GPU of ``--device`` that tensors may be predicted to fill."""
    gpu = gpu_capacity(device)
    return _LIMIT_BYTES if gpu is None else _FILLED * gpu.memory_gib * GIB


def read_memory_limit(text: str, option: str = "--memory-limit") -> float:
    """Bytes of ``130GiB`` or ``140GB``, a value of that option.

    Raises:
        UsageError: it is none.
    """
    for ending, unit in _UNITS.items():
        number = text.lower().removesuffix(ending)
        if number != text.lower():
            try:
                value = float(number)
            except ValueError:
                break
            if 0 < value < math.inf:
                return value * unit
    raise UsageError(f"{option} '{text}': give a size such as 130GiB or 140GB")


def chosen_by_memory(
    workload: ParallelWorkload, limit_bytes: float, *, keeps_gathered: bool, tells: bool
) -> ParallelWorkload:
    """The workload with gate and up kept in as many blocks as the predicted peak of a rank allows, and then weights.

    Args:
        workload: with ``keep=0``.
        keeps_gathered: choose how many blocks stay gathered, too.
        tells: say on standard error what was chosen.

    Raises:
        UsageError: it does not fit even so, or what it needs is not known.
    """
    if not workload.writes_out_blocks:
        raise UsageError(
            "--checkpoint auto only supports --strategy fsdp with --kernels fused and --compile off: choose these, "
            "or keep=N"
        )
    step = choose_kept_blocks(workload.kept_step, limit_bytes, keeps_gathered=keeps_gathered)
    if tells:
        peak = kept_peak(step)
        say(
            f"--checkpoint auto, {workload.world_size} ranks: gate and up are kept in {step.blocks} of "
            f"{step.size.num_layers} blocks, and weights of {step.keep_gathered} stay gathered; "
            f"predicted peak {peak.total_gib:.1f} GiB ({peak.moment}) of {limit_bytes / GIB:.4g} GiB"
        )
    return replace(workload, checkpointing=f"keep={step.blocks}", keep_gathered=step.keep_gathered)
