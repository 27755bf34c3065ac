"""The problems in the handouts' order, by their names: who answers a part, and which commands measure it, how long."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cs336sys.accounting.hardware import datasheet, peak_tflops
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.step_time.rates import GPUS
from cs336sys.commands.report.problem import Command, Handout, Part, Problem, Target, arithmetic
from cs336sys.commands.report.problems import code, profiles, ranks, speed
from cs336sys.errors import UsageError, choose_from
from cs336sys.machine.system import cpu_cores, memory_gib, read_gpus, visible_gpus
from cs336sys.tables.numbers import format_duration
from cs336sys.tables.table import Table, named_columns

_YEARS = (2025, 2026)


def _problem(name: str, *answers, commands=lambda target: (), letters: str = "", years=_YEARS):
    """Return the years that ask a problem, and the problem.

    ``answers`` are functions, one for each of its ``letters``, or pairs of a function and its own commands.
    """
    pairs = [answer if isinstance(answer, tuple) else (answer, commands) for answer in answers]
    parts = [Part(letter, *pair) for letter, pair in zip(letters or [""], pairs, strict=True)]
    return years, Problem(name, parts)


def _calculations(name: str, strategy: str, letters: str, *first, mesh: str = ""):
    """As :func:`_problem`, of 2026, on a parallel strategy: its formulas answer the letters that ``first`` leaves."""
    answers = (*first, *ranks.parallel(name, strategy, letters[len(first) :]))
    commands = arithmetic(f"account parallel --strategy {strategy}{mesh}")
    return _problem(name, *answers, commands=commands, letters=letters, years=(2026,))


_STREAM = (profiles.residual_stream, arithmetic(f"account activations --size {profiles.SIZE}"))
_MEMORY = (profiles.timelines, profiles.peaks, profiles.mixed_precision, _STREAM, profiles.largest_allocations)
# Where a plain step does not fit, the run with checkpoints has a block's saved tensors.
_BLOCK = (profiles.block, lambda target: [*profiles.memory_commands(target), *profiles.checkpointing_commands(target)])
_NSYS = (profiles.forward_time, profiles.top_kernel, profiles.other_kernels, profiles.whole_step, profiles.softmax)
_MIXED = (speed.dtypes, speed.layer_norm, (speed.by_size, speed.timing_commands))
_COMPILE = (speed.compiled_attention, (speed.compiled_model, speed.compiled_model_commands))
_OVERLAP = "ddp_overlap_individual_parameters"
_BUCKETS = (ranks.buckets, (ranks.bucket_equation, arithmetic("account buckets --size xl")))
_SHARDING = (ranks.memory, ranks.speeds, (ranks.against_zero, arithmetic("account memory --size {xl}")))
_FSDP_MEMORY = (ranks.fsdp_memory, arithmetic("account memory --size {xl} --strategy none,optimizer,fsdp"))

# The worked example and 2025's leaderboard are no problems of the handouts, and are asked for all the same.
# fmt: off
_ALL = [
    _problem("benchmarking_script", (speed.script, arithmetic("bench --help")),
             (speed.timings, speed.timing_commands), (speed.warmup, speed.warmup_commands), letters="abc"),
    _problem("nsys_profile", *_NSYS, commands=profiles.profile_commands, letters="abcde"),
    _problem("mixed_precision_accumulation", speed.accumulation, commands=speed.precision_commands),
    _problem("benchmarking_mixed_precision", *_MIXED, commands=speed.precision_commands, letters="abc"),
    _problem("memory_profiling", *_MEMORY, commands=profiles.memory_commands, letters="abcde", years=(2025,)),
    _problem("memory_profiling", *_MEMORY, _BLOCK, commands=profiles.memory_commands, letters="abcdef", years=(2026,)),
    _problem("gradient_checkpointing", profiles.nested, profiles.one_recomputation,
             commands=profiles.checkpointing_commands, letters="ab", years=(2026,)),
    _problem("pytorch_attention", speed.pytorch_attention, commands=speed.attention_commands, letters="a"),
    _problem("torch_compile", *_COMPILE, commands=speed.attention_commands, letters="ab"),
    _problem("weighted_sum", speed.weighted_sum, commands=speed.weighted_sum_commands),
    _problem("flash_forward", code.TILED, code.TRITON, code.causal_forward, commands=code.few_shapes, letters="abc"),
    _problem("flash_backward", code.flash_backward, commands=code.few_shapes),
    _problem("flash_benchmarking", speed.flash_benchmarking, commands=speed.flash_commands, letters="a"),
    _problem("leaderboard", speed.board, commands=speed.board_commands, years=(2025,)),
    _problem("distributed_communication_single_node",
             ranks.all_reduce, commands=ranks.all_reduce_commands),
    _problem("naive_ddp", code.NAIVE),
    _problem("naive_ddp_benchmarking", ranks.naive, commands=ranks.ddp_commands),
    _problem("minimal_ddp_flat_benchmarking", ranks.flat, commands=ranks.ddp_commands),
    _problem(_OVERLAP, code.OVERLAPPED),
    _problem(f"{_OVERLAP}_benchmarking", ranks.overlapped, ranks.traces, commands=ranks.ddp_commands, letters="ab"),
    _problem("ddp_overlap_bucketed", code.BUCKETED, years=(2025,)),
    _problem("ddp_bucketed_benchmarking", *_BUCKETS, commands=ranks.ddp_commands, letters="ab", years=(2025,)),
    _problem("communication_accounting", *map(ranks.xxl, "abcd"),
             commands=arithmetic("account xxl"), letters="abcd", years=(2025,)),
    _problem("optimizer_state_sharding", code.SHARDED_OPTIMIZER),
    _problem("optimizer_state_sharding_accounting", *_SHARDING, commands=ranks.shard_commands, letters="abc"),
    _problem("fsdp", code.FSDP, years=(2026,)),
    _problem("fsdp_accounting", _FSDP_MEMORY, (ranks.fsdp_gathers, ranks.fsdp_commands), letters="ab", years=(2026,)),
    _problem("alternate_ring_all_reduce", ranks.ring, years=(2026,)),
    _calculations("data_parallel_calcs", "dp", "abc"),
    _calculations("fsdp_calcs", "fsdp", "abc"),
    _calculations("tp_calcs", "tp", "abcd", ranks.tp_backward),
    _calculations("fsdp_tp_calcs", "fsdp-tp", "abcd", mesh=" --mesh 4x2"),
    _problem("leaderboard", code.training_step, commands=code.training_step_commands, years=(2026,)),
]
# fmt: on

PROBLEMS = {year: tuple(problem for years, problem in _ALL if year in years) for year in _YEARS}

# fp32 without tensor cores of a GPU that is in no table, and of a CPU core, in TFLOP/s.
_GPU_TFLOPS = 20.0
_CORE_TFLOPS = 0.03


def target_of(
    handout: Handout, size: str | None, device: str, gpu: str | None = None, memory_bytes: float | None = None
) -> Target:
    """Describe this machine, as far as it can be known without torch, or one with one GPU of that name.

    ``memory_bytes`` replaces the memory of that GPU, or of this machine. A UsageError says that a GPU has no datasheet.
    """
    gpus = [] if device == "cpu" or gpu is not None else read_gpus()  # Taken to be alike; a slice, to be a whole.
    local_gpus = gpus[:1] if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-") else visible_gpus(gpus)
    if gpu is not None:
        sheet = datasheet(GPUS.get(gpu.lower(), gpu))
        if sheet is None:
            raise UsageError(f"--gpu {gpu}: no datasheet is known; {choose_from(gpu, GPUS)}")
        fp32_tflops, *_ = sheet.tflops
        target = Target(handout, size, device, gpus=1, tflops=fp32_tflops, memory_gib=sheet.memory_bytes / GIB)
    elif local_gpus:
        first, peak = local_gpus[0], peak_tflops(local_gpus[0].name, "fp32")
        machine = len(local_gpus), peak or _GPU_TFLOPS, first.memory_total_gib, None if peak else first.name
        target = Target(handout, size, device, *machine)
    else:
        (_, available_gib), tflops = memory_gib(), _CORE_TFLOPS * (cpu_cores() or 1)
        target = Target(handout, size, device, gpus=0, tflops=tflops, memory_gib=available_gib)
    return target if memory_bytes is None else replace(target, memory_gib=memory_bytes / GIB)


def planned(problems: Sequence[Problem], target: Target) -> list[tuple[Command, list[str]]]:
    """Return the commands that measure, each once, with the names of the problems that need it."""
    needed: dict[tuple[str, ...], tuple[Command, list[str]]] = {}
    for problem in problems:
        for command in (command for part in problem.parts for command in _commands_here(part, target)):
            _, names = needed.setdefault(command.arguments, (command, []))
            names += [] if problem.name in names else [problem.name]
    return list(needed.values())


def _commands_here(part: Part, target: Target) -> list[Command]:
    """Return a part's commands that measure, with ranks on the CPU where there are too few GPUs for them."""
    commands: list[Command] = []
    for command in part.commands(target):
        reason = why_not(command, target) if command.gpus > 1 else None
        # Where the CPU is too small as well, the command stays, so that the plan says why it cannot be run.
        commands += [command] if reason is None else _on_cpu_ranks(part, target, reason) or [command]
    return [command for command in commands if command.is_saved]


def _on_cpu_ranks(part: Part, target: Target, reason: str) -> list[Command]:
    """Return a part's commands with Gloo ranks of the largest size that fits here; none where no size does."""
    note = f"on Gloo ranks of the CPU: what the handout asks {reason}"
    for local in (target_of(target.handout, size, "cpu") for size in ("small", "tiny")):
        commands = [command for command in part.commands(local) if command.is_saved]
        # Every rank holds in this machine's memory what it would hold in a GPU's; gpus=1: no GPU is missed.
        if all((command.memory_gib or 0) * command.gpus <= (local.memory_gib or 0) for command in commands):
            return [replace(command, gpus=1, note=note) for command in commands]
    return []


def why_not(command: Command, target: Target) -> str | None:
    """Explain why a command cannot be run here; None if it can. Running out of a GPU's memory is a result."""
    if target.gpus and command.gpus > target.gpus:
        return f"needs {command.gpus} GPUs, here {'are' if target.gpus > 1 else 'is'} {target.gpus}"
    if not target.gpus and target.memory_gib is not None and (command.memory_gib or 0) > target.memory_gib:
        return f"needs {command.memory_gib:.0f} GiB of memory, {target.memory_gib:.0f} are free"
    return None


def plan_table(plan: Sequence[tuple[Command, Sequence[str]]], target: Target) -> Table:
    """Build the table of ``--dry-run``: the commands with their time and memory."""
    rows: list[dict[str, Any]] = []
    for command, names in plan:
        large = target.gpus and target.memory_gib and (command.memory_gib or 0) > target.memory_gib
        note = command.note or why_not(command, target) or ("what does not fit becomes a result" if large else None)
        row = {"command": command.line, "seconds": format_duration(command.seconds), "memory_gib": command.memory_gib}
        row |= {"gpus": command.gpus if target.gpus else None, "note": note, "problems": ", ".join(names)}
        rows.append(row)
    total = format_duration(sum(command.seconds for command, _ in plan if why_not(command, target) is None))
    title = f"report {target.handout.year}: {len(plan)} commands, about {total} altogether"
    columns = named_columns("command", seconds="about", memory_gib="memory", gpus="GPUs", note="note", problems="for")
    assumed = f"Times are those of {target.tflops:g} TFLOP/s in fp32: the peak of {target.unknown_gpu} is not known."
    return Table("plan", title, columns, rows, (assumed,) if target.unknown_gpu else ())
