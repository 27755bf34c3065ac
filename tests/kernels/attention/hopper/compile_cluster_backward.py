"""Compiles the kernel of tools/cluster_backward.py for sm_90 on any machine; prints what came out as JSON.

Run like compile_for_hopper.py, whose driver and descriptions it uses, with names of ``CONFIGURATIONS`` as arguments.
"""

import contextlib
import dataclasses
import gc
import json
import sys

import cluster_backward
import torch
import triton
from compile_for_hopper import (
    CAPABILITY,
    NUM_MULTIPROCESSORS,
    CompileOnlyDriver,
    compile_and_describe,
    compile_plan_step,
    cubins,
    describe_code,
    disassemble,
)

SHAPE = (1, 16, 16384, 256)
CONFIGURATIONS = {"causal": (torch.bfloat16, True), "full": (torch.float16, False)}


def compile_configuration(dtype: torch.dtype, is_causal: bool) -> dict:
    query = torch.empty(SHAPE, dtype=dtype)
    logsumexp = torch.empty(SHAPE[:-1])
    plan = cluster_backward.cluster_backward_plan([query] * 5, [query] * 3, is_causal)
    launch, slots = plan.steps[1]
    report = {}

    def described(*tensors):
        # The launch compares the addresses of barriers.
        report.update(compile_and_describe(compile_plan_step, launch, *tensors))

    plan.steps = [(described, slots)]
    plan(*[query] * 4, logsumexp, *[query] * 4)
    return report | {"barriers": cluster_backward.barrier_addresses(launch.compiled.asm["ptx"])}


def main() -> None:
    gc.disable()
    triton.runtime.driver.set_active(CompileOnlyDriver())
    triton.knobs.nvidia.dump_ptxas_log = True
    make_problem = cluster_backward.make_problem

    def problem_on_hopper(query, key, operands, options):
        problem = make_problem(query, key, operands, options)
        return dataclasses.replace(
            problem, capability=CAPABILITY, num_multiprocessors=NUM_MULTIPROCESSORS, tma_allowed=True
        )

    cluster_backward.make_problem = problem_on_hopper
    with contextlib.redirect_stdout(sys.stderr):
        reports = {name: compile_configuration(*CONFIGURATIONS[name]) for name in sys.argv[1:]}
    for report, sass in zip(reports.values(), disassemble(list(cubins.values())), strict=True):
        report.update(describe_code(sass))
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()
