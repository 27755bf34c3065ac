"""The settings of the plain Triton kernels on GPUs other than the H200: tiles that fit into their shared memory.

Run as a script, without TRITON_INTERPRET, this file compiles the kernels of ``LARGEST`` on any machine, as far as to
where their shared memory is laid out, and prints how much they take as JSON.
"""

import contextlib
import dataclasses
import gc
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from compile_for_hopper import CompileOnlyDriver
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.runtime import driver

from cs336sys.kernels.attention import choice
from cs336sys.kernels.attention.plan import Plan
from cs336sys.kernels.attention.problem import AttentionOptions, AttentionProblem, Operand, make_problem
from cs336sys.kernels.attention.triton import plans
from cs336sys.kernels.attention.triton.settings import (
    ForwardSettings,
    TileSettings,
    backward_settings,
    forward_settings,
    fused,
    joint,
    separate,
)

# Of one program, by the CUDA programming guide's table of compute capabilities.
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 9): 99 * 1024, (10, 0): 227 * 1024, (12, 0): 99 * 1024}

# Shapes and dtypes whose kernels take most, or took too much; the other GPUs get the settings of 8.9 or of 9.0.
LARGEST = {
    (8, 0): [((1, 1, 1024, 128), torch.float32)],
    (8, 9): [
        ((1, 1, 1024, 128), torch.float32),
        ((1, 1, 1024, 256), torch.float32),
        ((1, 1, 2048, 128), torch.bfloat16),
        ((1, 1, 2048, 256), torch.bfloat16),
    ],
    (10, 0): [((1, 1, 2048, 256), torch.bfloat16)],
    (12, 0): [((1, 16, 8192, 64), torch.float32)],
}


def make_problem_on(capability: tuple[int, int], query: torch.Tensor, *arguments) -> AttentionProblem:
    """What ``make_problem`` makes of tensors on a GPU of this capability with 132 multiprocessors."""
    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
    on_gpu = SimpleNamespace(is_cuda=True, shape=query.shape, dtype=query.dtype, device=query.device)
    with mock.patch("torch.cuda.get_device_properties", return_value=properties):
        return make_problem(on_gpu, *arguments)


class AnyGpuDriver(CompileOnlyDriver):
    def __init__(self, capability: tuple[int, int]):
        self._capability = capability

    class utils(CompileOnlyDriver.utils):
        @staticmethod
        def get_device_properties(device):
            # Nothing exceeds this: the test compares.
            return {"max_shared_mem": 2**30}

    def get_current_device(self):
        """A device for each capability: kernels remember for which target they compile on one."""
        major, minor = self._capability
        return 10 * major + minor

    def get_current_target(self):
        return GPUTarget("cuda", self.get_current_device(), 32)


class LaidOutError(Exception):
    """Triton would now translate what it has laid out."""


@contextlib.contextmanager
def compiling_to_the_layout_of_shared_memory():
    """Triton lays it out before it makes LLVM's language of a kernel, and all that follows takes most of the time."""
    make_llir = compiler.CUDABackend.make_llir

    def stop(passes, *_):
        raise LaidOutError(passes)

    def lay_out(backend, module, metadata, *how):
        with pytest.raises(LaidOutError) as laid_out:
            make_llir(backend, module, metadata, *how)
        (passes,) = laid_out.value.args
        passes.run(module, "make_llir")
        metadata["shared"] = module.get_int_attr("ttg.shared")
        metadata["tmem_size"] = module.get_int_attr("ttg.tensor_memory_size")
        for scratch in ("global_scratch", "profile_scratch"):
            metadata[f"{scratch}_size"], metadata[f"{scratch}_align"] = 0, 1
        return ""

    def without_code(backend, source, metadata, *_):
        metadata["name"] = "kernel"
        return ""

    with (
        mock.patch.object(compiler.nvidia.passes.ttgpuir, "add_to_llvmir", stop),
        mock.patch.object(compiler.CUDABackend, "make_llir", lay_out),
        mock.patch.object(compiler.CUDABackend, "make_ptx", without_code),
        mock.patch.object(compiler.CUDABackend, "make_cubin", return_value=b""),
    ):
        yield


def shared_bytes(plan: Plan, *tensors: torch.Tensor) -> list[int]:
    """Of the plan's launches, without those of elementwise kernels."""
    kernels = plans.forward_kernel, plans.backward_kernel
    plan.steps = [(launch, slots) for launch, slots in plan.steps if launch._kernel in kernels]
    plan(*tensors)
    return [launch.compiled.metadata.shared for launch, _ in plan.steps]


def bytes_on(capability: tuple[int, int]) -> list[tuple[str, list[int], list[int]]]:
    """Each configuration with what its forward and backward kernels take."""
    driver.set_active(AnyGpuDriver(capability))
    choice.make_problem = lambda *arguments: make_problem_on(capability, *arguments)
    # With a causal mask there is one more loop to compile, of as much shared memory.
    report = []
    for shape, dtype in LARGEST[capability]:
        query, key, value, out, grad_out, *grads = (torch.empty(shape, dtype=dtype) for _ in range(8))
        tensors = query, key, value, out, torch.empty(shape[:-1])
        forward = choice.forward_plan((query, key, value, out), AttentionOptions())
        backward = choice.backward_plan((query, key, value, out, grad_out), grads, AttentionOptions())
        taken = shared_bytes(forward, *tensors), shared_bytes(backward, *tensors, grad_out, *grads)
        report.append((f"{shape} {dtype}", *taken))
    return report


def main() -> None:
    gc.disable()  # as compile_for_hopper does
    with compiling_to_the_layout_of_shared_memory():
        json.dump([(capability, bytes_on(capability)) for capability in LARGEST], sys.stdout)


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """{capability: what :func:`bytes_on` found}, from one process: this one may be the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton_cache"))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # the folder of compile_for_hopper is in it
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return {tuple(capability): found for capability, found in json.loads(result.stdout)}


@pytest.mark.nightly
def test_largest_tiles_fit_in_shared_memory(taken):
    assert list(taken) == list(LARGEST)
    for capability, found in taken.items():
        assert len(found) == len(LARGEST[capability])
        for configuration, forward, backward in found:
            assert 0 < max(forward + backward) <= SHARED_BYTES[capability], f"{configuration}: {forward}, {backward}"


def problems(capability):
    """Problems of all kinds on a GPU of this capability, their tensors such that TMA could address them."""
    for dtype, float32_precision in (
        (torch.bfloat16, "tf32x3"),
        (torch.float16, "tf32x3"),
        (torch.float32, "tf32x3"),
        (torch.float32, "ieee"),
    ):
        for head_dim in (16, 32, 64, 80, 128, 256):
            for num_heads in (1, 4, 16, 400):
                for length in (64, 512, 1024, 2048, 8192, 65536):
                    query = torch.empty(1, num_heads, length, head_dim, dtype=dtype, device="meta")
                    operands = [Operand(query)] * 4
                    yield make_problem_on(capability, query, query, operands, AttentionOptions(True, float32_precision))


def all_settings(problem):
    return forward_settings(problem), backward_settings(problem, False), backward_settings(problem, True)


def tiles(problem):
    forward, *backwards = all_settings(problem)
    return [forward.tile, *(one.tile for backward in backwards for one in backward.passes)]


# 13.0 for what is not known.
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (12, 0), (12, 1), (13, 0)])
def test_gpus_with_less_shared_memory_get_the_settings_of_8_9(capability):
    for problem, smallest in zip(problems(capability), problems((8, 9)), strict=True):
        assert not problem.tma_allowed
        assert not any(tile.use_tma for tile in tiles(problem))
        assert all_settings(problem) == all_settings(smallest), problem


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (11, 0)])
def test_gpus_with_as_much_shared_memory_get_the_settings_of_9_0(capability):
    for problem, on_hopper in zip(problems(capability), problems((9, 0)), strict=True):
        assert problem == dataclasses.replace(on_hopper, capability=capability)
        assert forward_settings(problem) == forward_settings(on_hopper)
        if problem.head_dim <= 128:
            assert all_settings(problem) == all_settings(on_hopper), problem


@pytest.mark.parametrize(
    ("shape", "dtype", "forward", "backward"),
    [
        (
            (1, 16, 16384, 64),
            torch.bfloat16,
            TileSettings(64, 128, num_warps=4, num_stages=2, use_tma=True),
            separate(
                TileSettings(64, 64, num_warps=4, num_stages=2, use_tma=True),
                TileSettings(128, 64, num_warps=8, num_stages=3, use_tma=True),
            ),
        ),
        (
            (1, 16, 16384, 128),
            torch.bfloat16,
            TileSettings(128, 64, num_warps=8, num_stages=2, use_tma=True, max_registers=128),
            separate(
                TileSettings(64, 128, num_warps=8, num_stages=3, use_tma=True),
                TileSettings(128, 32, num_warps=8, num_stages=3, use_tma=True),
            ),
        ),
        (
            (1, 16, 16384, 64),
            torch.float32,
            TileSettings(64, 64, num_warps=4, num_stages=2),
            fused(TileSettings(32, 64, num_warps=4, num_stages=1)),
        ),
    ],
    ids=["head dim 64", "head dim 128", "float32"],
)
def test_h200_gets_the_tiles_measured_on_it(shape, dtype, forward, backward):
    query = torch.empty(shape, dtype=dtype, device="meta")
    problem = make_problem_on((9, 0), query, query, [Operand(query)] * 4, AttentionOptions(True))
    assert forward_settings(problem) == ForwardSettings(forward)
    assert backward_settings(problem, False) == backward


def test_h200_gets_tma_at_head_dimension_256():
    query = torch.empty(1, 16, 16384, 256, dtype=torch.bfloat16, device="meta")
    problem = make_problem_on((9, 0), query, query, [Operand(query)] * 4, AttentionOptions(True))
    assert all(tile.use_tma for tile in tiles(problem))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a100_gets_tiles_by_pointers(deterministic):
    query = torch.empty(1, 16, 16384, 64, dtype=torch.bfloat16, device="meta")
    problem = make_problem_on((8, 0), query, query, [Operand(query)] * 4, AttentionOptions(True))
    assert forward_settings(problem) == ForwardSettings(TileSettings(64, 64, num_warps=4, num_stages=3))
    expected = joint(TileSettings(64, 64, num_warps=4, num_stages=2))
    assert backward_settings(problem, deterministic) == expected


if __name__ == "__main__":
    main()
