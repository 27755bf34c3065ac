"""``memory_profiling``: where memory goes in inference and in a training step."""

from cs336sys.report.course.problem import Part, Problem
from cs336sys.report.course.problems.memory_profiling.allocations import block, largest_allocations, residual_stream
from cs336sys.report.course.problems.memory_profiling.cells import SIZE
from cs336sys.report.course.problems.memory_profiling.peaks import mixed_precision, peaks
from cs336sys.report.course.problems.memory_profiling.timelines import timelines
from cs336sys.report.course.target import Command, Sweep, Target, arithmetic


def memory_commands(target: Target) -> list[Command]:
    options = {"mode": ("forward", "forward-backward", "train"), "precision": ("fp32", "bf16")}
    contexts = target.contexts(sorted(target.handout.memory_contexts))
    return [
        Sweep("memprof", target.sizes((SIZE,)), contexts, options, ("--no-predict", "--steps", "1"), steps=4).on(target)
    ]


_PARTS = (
    Part("a", timelines, memory_commands),
    Part("b", peaks, memory_commands),
    Part("c", mixed_precision, memory_commands),
    Part("d", residual_stream, lambda target: arithmetic("account", "activations", "--size", SIZE)),
    Part("e", largest_allocations, memory_commands),
)
MEMORY_PROFILING_2025 = Problem("memory_profiling", "Memory profiling", _PARTS)
MEMORY_PROFILING_2026 = Problem("memory_profiling", "Memory profiling", (*_PARTS, Part("f", block, memory_commands)))
