"""``nsys_profile``: which kernels take the time, and how the passes, the step and attention differ in them."""

from cs336sys.report.course.problem import Part, Problem
from cs336sys.report.course.problems.nsys_profile.forward_time import forward_time
from cs336sys.report.course.problems.nsys_profile.kernels import other_kernels, top_kernel
from cs336sys.report.course.problems.nsys_profile.whole_step import softmax, whole_step
from cs336sys.report.course.target import Command, Sweep, Target


def profile_commands(target: Target) -> list[Command]:
    handout = target.handout
    contexts = target.contexts(handout.profile_contexts)[-2 if target.is_small else 0 :]
    sizes = target.sizes(handout.profile_sizes)
    # The profile itself and the steps without a profiler; nsys writes and exports its report.
    return [Sweep("nsys", sizes, contexts, steps=25).on(target)]


NSYS_PROFILE = Problem(
    "nsys_profile",
    "Nsight Systems profiling",
    tuple(
        Part(letter, answer, profile_commands)
        for letter, answer in zip("abcde", (forward_time, top_kernel, other_kernels, whole_step, softmax), strict=True)
    ),
)
