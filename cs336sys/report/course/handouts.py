"""The problems in the handouts' order, by their names: who answers a part, and which commands measure it, how long."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cs336sys.accounting.hardware import datasheet, peak_tflops
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.step_time.rates import rates_of
from cs336sys.measure.system import cpu_cores, memory_gib, read_gpus
from cs336sys.report.course.problem import Command, Handout, Part, Problem, Target, arithmetic
from cs336sys.report.course.problems import benchmarking_script as script
from cs336sys.report.course.problems import calculations, code, ddp, sharding
from cs336sys.report.course.problems import distributed_communication as communication
from cs336sys.report.course.problems import flash_benchmarking as flash
from cs336sys.report.course.problems import gradient_checkpointing as checkpointing
from cs336sys.report.course.problems import memory_profiling as memory
from cs336sys.report.course.problems import mixed_precision as mixed
from cs336sys.report.course.problems import nsys_profile as nsys
from cs336sys.report.course.problems import pytorch_attention as attention
from cs336sys.report.numbers import format_duration
from cs336sys.report.table import Table, named_columns

_YEARS = (2025, 2026)


def _problem(name: str, title: str, *answers, commands=lambda target: (), letters: str = "", years=_YEARS):
    """A function for each letter (one without any), or a pair of it and its own commands; and the years that ask."""
    pairs = [answer if isinstance(answer, tuple) else (answer, commands) for answer in answers]
    parts = [Part(letter, *pair) for letter, pair in zip(letters or [""], pairs, strict=True)]
    return years, Problem(name, title, parts)


def _calculations(name: str, title: str, strategy: str, letters: str, *first, mesh: str = ""):
    answers = (*first, *calculations.parallel(name, strategy, letters[len(first) :]))
    commands = arithmetic(f"account parallel --strategy {strategy}{mesh}")
    return _problem(name, title, *answers, commands=commands, letters=letters, years=(2026,))


_STREAM = (memory.residual_stream, arithmetic(f"account activations --size {memory.SIZE}"))
_MEMORY = (memory.timelines, memory.peaks, memory.mixed_precision, _STREAM, memory.largest_allocations)
# Where a plain step does not fit, the run with checkpoints has a block's saved tensors.
_BLOCK = (memory.block, lambda target: [*memory.memory_commands(target), *checkpointing.checkpointing_commands(target)])
_SCRIPT = (
    (script.script, arithmetic("bench --help")),
    (script.timings, script.timing_commands),
    (script.warmup, script.warmup_commands),
)
_NSYS = (nsys.forward_time, nsys.top_kernel, nsys.other_kernels, nsys.whole_step, nsys.softmax)
_MIXED = (mixed.dtypes, mixed.layer_norm, (mixed.by_size, script.timing_commands))
_COMPILE = (attention.compiled_attention, (attention.compiled_model, attention.compiled_model_commands))
_OVERLAP = ("ddp_overlap_individual_parameters", "DDP that overlaps individual parameters")
_BUCKETS = (ddp.buckets, (ddp.bucket_equation, arithmetic("account buckets --size xl")))
_SHARDING = (sharding.memory, sharding.speeds, (sharding.against_zero, arithmetic("account memory --size {xl}")))
_FSDP = (
    (sharding.fsdp_memory, arithmetic("account memory --size {xl} --strategy none,optimizer,fsdp")),
    (sharding.fsdp_gathers, sharding.fsdp_commands),
)

# The worked example and 2025's leaderboard are no problems of the handouts, and are asked for all the same.
# fmt: off
_ALL = [
    _problem("benchmarking_script", "Benchmarking script", *_SCRIPT, letters="abc"),
    _problem("nsys_profile", "Nsight Systems profiling", *_NSYS, commands=nsys.profile_commands, letters="abcde"),
    _problem("mixed_precision_accumulation", "Mixed-precision accumulation",
             mixed.accumulation, commands=mixed.precision_commands),
    _problem("benchmarking_mixed_precision", "Benchmarking mixed precision",
             *_MIXED, commands=mixed.precision_commands, letters="abc"),
    _problem("memory_profiling", "Memory profiling",
             *_MEMORY, commands=memory.memory_commands, letters="abcde", years=(2025,)),
    _problem("memory_profiling", "Memory profiling",
             *_MEMORY, _BLOCK, commands=memory.memory_commands, letters="abcdef", years=(2026,)),
    _problem("gradient_checkpointing", "Memory-optimal gradient checkpointing",
             checkpointing.nested, checkpointing.one_recomputation,
             commands=checkpointing.checkpointing_commands, letters="ab", years=(2026,)),
    _problem("pytorch_attention", "Benchmarking PyTorch attention",
             attention.pytorch_attention, commands=attention.attention_commands, letters="a"),
    _problem("torch_compile", "torch.compile", *_COMPILE, commands=attention.attention_commands, letters="ab"),
    _problem("weighted_sum", "The worked example: weighted sum",
             flash.weighted_sum, commands=flash.weighted_sum_commands),
    _problem("flash_forward", "FlashAttention-2 forward pass",
             code.TILED, code.TRITON, code.causal_forward, commands=code.few_shapes, letters="abc"),
    _problem("flash_backward", "FlashAttention-2 backward pass", code.flash_backward, commands=code.few_shapes),
    _problem("flash_benchmarking", "Benchmarking FlashAttention-2",
             flash.flash_benchmarking, commands=flash.flash_commands, letters="a"),
    _problem("leaderboard", "Leaderboard: FlashAttention-2",
             flash.board, commands=flash.board_commands, years=(2025,)),
    _problem("distributed_communication_single_node", "Distributed communication on a single node",
             communication.all_reduce, commands=communication.all_reduce_commands),
    _problem("naive_ddp", "Naive DDP", code.NAIVE),
    _problem("naive_ddp_benchmarking", "Benchmarking naive DDP", ddp.naive, commands=ddp.ddp_commands),
    _problem("minimal_ddp_flat_benchmarking", "Minimal DDP with flat gradients", ddp.flat, commands=ddp.ddp_commands),
    _problem(*_OVERLAP, code.OVERLAPPED),
    _problem(f"{_OVERLAP[0]}_benchmarking", f"Benchmarking {_OVERLAP[1]}",
             ddp.overlapped, ddp.traces, commands=ddp.ddp_commands, letters="ab"),
    _problem("ddp_overlap_bucketed", "DDP that overlaps buckets", code.BUCKETED, years=(2025,)),
    _problem("ddp_bucketed_benchmarking", "Benchmarking bucketed DDP",
             *_BUCKETS, commands=ddp.ddp_commands, letters="ab", years=(2025,)),
    _problem("communication_accounting", "Communication accounting", *map(calculations.xxl, "abcd"),
             commands=arithmetic("account xxl"), letters="abcd", years=(2025,)),
    _problem("optimizer_state_sharding", "Optimizer state sharding", code.SHARDED_OPTIMIZER),
    _problem("optimizer_state_sharding_accounting", "Optimizer state sharding: accounting",
             *_SHARDING, commands=sharding.shard_commands, letters="abc"),
    _problem("fsdp", "Fully sharded data parallel", code.FSDP, years=(2026,)),
    _problem("fsdp_accounting", "FSDP accounting", *_FSDP, letters="ab", years=(2026,)),
    _problem("alternate_ring_all_reduce", "An alternate ring all-reduce",
             calculations.ring, commands=communication.all_reduce_commands, years=(2026,)),
    _calculations("data_parallel_calcs", "Data parallel calculations", "dp", "abc"),
    _calculations("fsdp_calcs", "Fully sharded data parallel calculations", "fsdp", "abc"),
    _calculations("tp_calcs", "Tensor parallel calculations", "tp", "abcd", calculations.tp_backward),
    _calculations("fsdp_tp_calcs", "2D parallelism calculations", "fsdp-tp", "abcd", mesh=" --mesh 4x2"),
    _problem("leaderboard", "Leaderboard: fastest training step",
             code.training_step, commands=code.training_step_commands, years=(2026,)),
]
# fmt: on

PROBLEMS: dict[int, tuple[Problem, ...]] = {
    year: tuple(problem for years, problem in _ALL if year in years) for year in _YEARS
}

# fp32 without tensor cores of a GPU that is in no table, and of a CPU core, in TFLOP/s.
_GPU_TFLOPS = 20.0
_CORE_TFLOPS = 0.03


# Sizes whose ranks share a CPU, the largest first.
_CPU_SIZES = ("small", "tiny")


def target_of(
    handout: Handout, size: str | None, device: str, gpu: str | None = None, memory_bytes: float | None = None
) -> Target:
    """This machine, as far as it can be known without torch, or one with one GPU of that name, and so much memory.

    Raises:
        UsageError: the GPU has no datasheet.
    """
    if gpu is not None:
        sheet = datasheet(rates_of(gpu).gpu)
        assert sheet is not None
        return Target(handout, size, device, 1, sheet.tflops[0], (memory_bytes or sheet.memory_bytes) / GIB)
    local = _local_target(handout, size, device)
    return local if memory_bytes is None else replace(local, memory_gib=memory_bytes / GIB)


def _local_target(handout: Handout, size: str | None, device: str) -> Target:
    gpus = [] if device == "cpu" else read_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(gpus) if visible is None else min(len(gpus), len([index for index in visible.split(",") if index]))
    if count:
        tflops = peak_tflops(gpus[0].name, "fp32") or _GPU_TFLOPS
        return Target(handout, size, device, count, tflops, gpus[0].memory_total_gib)
    return Target(handout, size, device, 0, _CORE_TFLOPS * (cpu_cores() or 1), memory_gib()[1])


def planned(problems: Sequence[Problem], target: Target) -> list[tuple[Command, list[str]]]:
    """The commands that measure, each once, with the problems that need it."""
    needed: dict[tuple[str, ...], tuple[Command, list[str]]] = {}
    for problem in problems:
        for command in (command for part in problem.parts for command in _possible(part, target) if command.is_saved):
            names = needed.setdefault(command.arguments, (command, []))[1]
            names += [problem.name] * (problem.name not in names)
    return list(needed.values())


def _possible(part: Part, target: Target) -> list[Command]:
    """A part's commands, those whose ranks have no room here on ranks of the CPU, of a size that fits."""
    commands: list[Command] = []
    for command in part.commands(target):
        reason = why_not(command, target) if command.gpus > 1 else None
        commands += [command] if reason is None else _on_cpu_ranks(part, target, reason) or [command]
    return commands


def _on_cpu_ranks(part: Part, target: Target, reason: str) -> list[Command]:
    note = f"on Gloo ranks of the CPU: what the handout asks {reason}"
    for local in (_local_target(target.handout, size, "cpu") for size in _CPU_SIZES):
        commands = [command for command in part.commands(local) if command.is_saved]
        if all((command.memory_gib or 0) * command.gpus <= (local.memory_gib or 0) for command in commands):
            return [replace(command, gpus=1, note=note) for command in commands]
    return []


def why_not(command: Command, target: Target) -> str | None:
    """Explain why it cannot be run here, None if it can; running out of a GPU's memory is a result."""
    if target.gpus and command.gpus > target.gpus:
        return f"needs {command.gpus} GPUs, here {'are' if target.gpus > 1 else 'is'} {target.gpus}"
    if not target.gpus and target.memory_gib is not None and (command.memory_gib or 0) > target.memory_gib:
        return f"needs {command.memory_gib:.0f} GiB of memory, {target.memory_gib:.0f} are free"
    return None


_PLAN_COLUMNS = named_columns("command", seconds="about", memory_gib="memory", gpus="GPUs", note="note", problems="for")


def plan_table(plan: Sequence[tuple[Command, Sequence[str]]], target: Target) -> Table:
    """The commands with their time and memory."""
    rows: list[dict[str, Any]] = []
    for command, names in plan:
        large = target.gpus and target.memory_gib and (command.memory_gib or 0) > target.memory_gib
        note = command.note or why_not(command, target) or ("what does not fit becomes a result" if large else None)
        row = {"command": command.line, "seconds": format_duration(command.seconds), "memory_gib": command.memory_gib}
        row |= {"gpus": command.gpus if target.gpus else None, "note": note, "problems": ", ".join(names)}
        rows.append(row)
    total = format_duration(sum(command.seconds for command, _ in plan if why_not(command, target) is None))
    title = f"report {target.handout.year}: {len(plan)} commands, about {total} altogether"
    return Table("plan", title, _PLAN_COLUMNS, rows)
