"""Compiles the plain Triton attention kernels to the machine code of GPUs that are not here; prints JSON.

``compile_for_gpus.py sm_80 sm_120`` compiles every plan of the shapes below, as these GPUs would choose it; with
``--sample`` only the forward kernels of ``SAMPLE``. Run without TRITON_INTERPRET and with an empty TRITON_CACHE_DIR.
"""

import dataclasses
import functools
import gc
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from compile_for_hopper import (
    CompileOnlyDriver,
    Configuration,
    compile_and_describe,
    compile_plan_step,
    plans_with_tensors,
)
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from cs336sys.kernels.attention import choice
from cs336sys.kernels.attention.plan import Launch, Scratch
from cs336sys.kernels.attention.problem import AttentionProblem, make_problem
from cs336sys.kernels.attention.triton.backward import backward_kernel
from cs336sys.kernels.attention.triton.forward import forward_kernel


@dataclasses.dataclass(frozen=True)
class Gpu:
    """``shared_bytes``: of one program, by the CUDA programming guide's table of compute capabilities."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    shared_bytes: int


GPUS = {
    "sm_80": Gpu("A100", (8, 0), 108, 163 * 1024),
    "sm_86": Gpu("RTX 3090", (8, 6), 82, 99 * 1024),
    "sm_89": Gpu("RTX 4090", (8, 9), 128, 99 * 1024),
    "sm_90": Gpu("H100, H200", (9, 0), 132, 227 * 1024),
    "sm_100": Gpu("B200", (10, 0), 148, 227 * 1024),
    "sm_120": Gpu("RTX 5090", (12, 0), 170, 99 * 1024),
}


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LENGTHS = [2**power for power in range(7, 17)]
# flash_benchmarking, pytorch_attention, and the models of the handouts, whose last has head dimension 80.
COURSE = [(1, 1, length, head_dim) for length in LENGTHS for head_dim in (16, 32, 64, 128)]
COURSE += [(8, 1, length, head_dim) for length in LENGTHS[1:8] for head_dim in (16, 32, 64, 128)]
COURSE += [(4, heads, length, 64) for heads in (12, 16, 20, 25) for length in LENGTHS[:5]]
COURSE += [(4, 32, length, 80) for length in LENGTHS[:5]]
COURSE += [(1, 16, 16384, 64)]
OTHER_SHAPES = [(1, 16, length, head_dim) for length in (1024, 4096) for head_dim in (64, 96, 128, 192, 256)]
# Shapes, heads of keys and windows: Llama 3 8B, Gemma 7B, 2B and 2 9B, Mistral.
MODELS = [((1, 32, 8192, 128), 8, None), ((1, 16, 8192, 256), None, None), ((1, 8, 8192, 256), 1, None)]
MODELS += [((1, 16, 8192, 256), 8, 4096), ((1, 32, 8192, 128), 8, 4096), ((1, 32, 2048, 128), 8, None)]
MODELS += [((1, 16, 8192, 64), None, 1024), ((1, 16, 8192, 64), 4, None), ((1, 4, 512, 64), 1, 128)]
# Those that spilled most with the tiles of the H200.
SAMPLE = [Configuration((1, 1, 8192, 64), FP32)]
CONFIGURATIONS = [
    *(Configuration(shape, dtype, True, heads, window) for dtype in (BF16, FP32) for shape, heads, window in MODELS),
    *(Configuration(shape, dtype) for dtype in (BF16, FP32) for shape in (*OTHER_SHAPES, *COURSE)),
    *(Configuration(shape, FP32, float32_precision="ieee") for shape in OTHER_SHAPES[5:]),
    *(Configuration(shape, dtype, deterministic=True) for dtype in (BF16, FP32) for shape in OTHER_SHAPES[5:]),
    *(Configuration(shape, FP16) for shape in OTHER_SHAPES),
]


class OtherGpuDriver(CompileOnlyDriver):
    def __init__(self, gpu: Gpu):
        major, minor = gpu.capability
        self._number = 10 * major + minor

    class utils(CompileOnlyDriver.utils):
        @staticmethod
        def get_device_properties(device):
            # Nothing exceeds this: the test compares.
            return {"max_shared_mem": 2**30}

    def get_current_device(self):
        """A device for each capability: kernels remember for which target they compile on one."""
        return self._number

    def get_current_target(self):
        return GPUTarget("cuda", self._number, 32)


def make_problem_on(gpu: Gpu, query: torch.Tensor, *arguments) -> AttentionProblem:
    """What ``make_problem`` makes of tensors on this GPU."""
    major, minor = gpu.capability
    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=gpu.num_multiprocessors)
    on_gpu = SimpleNamespace(is_cuda=True, shape=query.shape, dtype=query.dtype, device=query.device)
    with mock.patch("torch.cuda.get_device_properties", return_value=properties):
        return make_problem(on_gpu, *arguments)


def launches(configuration: Configuration) -> Iterator[tuple[Launch, list[torch.Tensor]]]:
    """Those of a call's forward and backward kernels, with their tensors; not those of elementwise kernels."""
    for plan, tensors in plans_with_tensors(configuration):
        scratch = [
            addition.allocate("cpu") if isinstance(addition, Scratch) else addition for addition in plan.additions
        ]
        slots = [*tensors, *scratch]
        for launch, numbers in plan.steps:
            if launch._kernel in (forward_kernel, backward_kernel):
                yield launch, [slots[number] for number in numbers]


def name_and_tile(launch: Launch) -> dict[str, str]:
    config, options = launch.arguments[-1], launch._options
    passes = {"forward": launch._kernel is forward_kernel}
    if not passes["forward"]:
        passes |= {"dK, dV": config.key_pass, "dQ": config.query_pass or config.fused}
    tile = f"{config.query_rows}x{config.key_rows}, {options['num_warps']} warps, {options['num_stages']} stages"
    return {
        "kernel": ", ".join(name for name, is_computed in passes.items() if is_computed),
        "tile": tile + (", TMA" if config.tma else ""),
    }


def compile_for(gpu: Gpu, configurations: Iterable[Configuration], *, forward_only: bool) -> list[dict]:
    """Every kernel that these choose once, with the first of them that does."""
    driver.set_active(OtherGpuDriver(gpu))
    descriptions = {}
    with mock.patch.object(choice, "make_problem", functools.partial(make_problem_on, gpu)):
        for configuration in configurations:
            for launch, tensors in itertools.islice(launches(configuration), 1 if forward_only else None):
                facts = compile_and_describe(compile_plan_step, launch, *tensors)
                if launch.compiled.hash not in descriptions:
                    sizes = {name: facts[name] for name in ("registers", "spilled_bytes", "shared_bytes")}
                    description = {"configuration": str(configuration), **name_and_tile(launch), **sizes}
                    descriptions[launch.compiled.hash] = description
                    print(gpu.name, *description.values(), sep="; ", file=sys.stderr, flush=True)
    return list(descriptions.values())


def main() -> None:
    gc.disable()  # as compile_for_hopper does
    knobs.nvidia.dump_ptxas_log = True
    is_sample = "--sample" in sys.argv
    configurations = SAMPLE if is_sample else CONFIGURATIONS
    gpus = {name: gpu for name, gpu in GPUS.items() if name in sys.argv}
    report = {name: compile_for(gpu, configurations, forward_only=is_sample) for name, gpu in gpus.items()}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
