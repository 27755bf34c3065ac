"""Plan the commands that a write-up needs on this machine, with the time they are expected to take."""

import os
from collections.abc import Sequence

from cs336sys.accounting.hardware import peak_tflops
from cs336sys.measure.system import cpu_cores, memory_gib, read_gpus
from cs336sys.report.course.problem import Command, Handout, Problem, Target
from cs336sys.report.numbers import format_duration
from cs336sys.report.table import Column, Table

# fp32 without tensor cores of a GPU that is in no table, and of a CPU core, in TFLOP/s.
_GPU_TFLOPS = 20.0
_CORE_TFLOPS = 0.03


def target_of(handout: Handout, size: str | None, device: str) -> Target:
    """This machine, as far as it can be known without torch."""
    gpus = [] if device == "cpu" else read_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(gpus) if visible is None else min(len(gpus), len([one for one in visible.split(",") if one]))
    if count:
        tflops = peak_tflops(gpus[0].name, "fp32") or _GPU_TFLOPS
        return Target(handout, size, device, count, tflops, gpus[0].memory_total_gib)
    return Target(handout, size, device, 0, _CORE_TFLOPS * (cpu_cores() or 1), memory_gib()[1])


def planned(problems: Sequence[Problem], target: Target) -> list[tuple[Command, list[str]]]:
    """The commands that measure, each once, with the problems that need it."""
    needed: dict[tuple[str, ...], tuple[Command, list[str]]] = {}
    for problem in problems:
        for part in problem.parts:
            for command in part.commands(target):
                if command.is_saved:
                    names = needed.setdefault(command.arguments, (command, []))[1]
                    names += [problem.name] * (problem.name not in names)
    return list(needed.values())


def why_not(command: Command, target: Target) -> str | None:
    """Explain why it cannot be run here; None if it can. What is too large for a GPU is run: that it is, is a
    result.
    """
    if target.gpus and command.gpus > target.gpus:
        return f"needs {command.gpus} GPUs, here {'are' if target.gpus > 1 else 'is'} {target.gpus}"
    if not target.gpus and target.memory_gib is not None and (command.memory_gib or 0) > target.memory_gib:
        return f"needs {command.memory_gib:.0f} GiB of memory, {target.memory_gib:.0f} are free"
    return None


def plan_table(plan: Sequence[tuple[Command, Sequence[str]]], target: Target) -> Table:
    """The commands with their time and memory."""
    columns = (
        Column("command", "command"),
        Column("seconds", "about"),
        Column("memory_gib", "memory", "gib"),
        Column("gpus", "GPUs"),
        Column("note", "note"),
        Column("problems", "for"),
    )
    rows = []
    for command, names in plan:
        large = target.gpus and target.memory_gib and (command.memory_gib or 0) > target.memory_gib
        note = why_not(command, target) or ("what does not fit becomes a result" if large else None)
        rows.append(
            {
                "command": command.line,
                "seconds": format_duration(command.seconds),
                "memory_gib": command.memory_gib,
                "gpus": command.gpus if target.gpus else None,
                "note": note,
                "problems": ", ".join(names),
            }
        )
    total = format_duration(sum(command.seconds for command, _ in plan if why_not(command, target) is None))
    title = f"report {target.handout.year}: {len(plan)} commands, about {total} altogether"
    return Table("plan", title, columns, rows)
