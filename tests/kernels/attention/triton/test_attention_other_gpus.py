"""The settings of the plain Triton kernels on GPUs other than the H200, and what is compiled for them."""

import dataclasses
import itertools
from types import SimpleNamespace

import compile_for_gpus
import pytest
import torch
from compile_for_gpus import GPUS, Gpu, make_problem_on

from cs336sys.kernels.attention import choice, native_call
from cs336sys.kernels.attention.hopper import settings as hopper_settings
from cs336sys.kernels.attention.problem import AMD, AttentionOptions, Operand
from cs336sys.kernels.attention.triton.settings import backward_settings, forward_settings


@pytest.fixture(scope="module")
def compiled(tier, compile_by):
    """{GPU: kernels that its configurations choose}."""
    return compile_by(compile_for_gpus.__file__, *tier.choose(["--sample", "sm_80", "sm_120"], GPUS))


def most_spilled_bytes(gpu, kernel):
    """Bytes of a thread's registers that may go to memory; None on 9.0, for settings measured with what they spill.

    Those have limits in test_attention_compile_gate.py.
    """
    if gpu == "sm_90":
        return None
    head_dim = int(kernel["configuration"].split()[0].split("x")[-1])
    if "float32" not in kernel["configuration"]:
        return 64
    # Two tiles of 16 x 256 that a product reads take all registers; on 10.0 larger tiles and fewer warps spill more.
    return 1300 if head_dim > 128 and kernel["kernel"] != "forward" else 88


def test_kernels_fit_into_registers_and_shared_memory(compiled):
    for gpu, kernels in compiled.items():
        assert kernels, gpu
        for kernel in kernels:
            most = most_spilled_bytes(gpu, kernel)
            assert most is None or kernel["spilled_bytes"] <= most, f"{gpu}: {kernel}"
            assert 0 < kernel["shared_bytes"] <= GPUS[gpu].shared_bytes, f"{gpu}: {kernel}"


def problems(capability):
    """Problems of all kinds on a GPU of this capability, their tensors such that TMA could address them."""
    gpu = Gpu("a GPU", capability, num_multiprocessors=132, shared_bytes=0)
    precisions = [(dtype, "tf32x3") for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    precisions += [(torch.float32, "ieee")]
    sizes = (16, 32, 64, 80, 128, 256), (1, 4, 16, 400), (64, 512, 1024, 2048, 8192, 65536)
    for (dtype, float32_precision), head_dim, num_heads, length in itertools.product(precisions, *sizes):
        query = torch.empty(1, num_heads, length, head_dim, dtype=dtype, device="meta")
        yield make_problem_on(gpu, query, query, [Operand(query)] * 4, AttentionOptions(True, float32_precision))


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
    """But for fp32, whose products read registers there."""
    for problem, on_hopper, smallest in zip(problems(capability), problems((9, 0)), problems((8, 9)), strict=True):
        assert problem == dataclasses.replace(on_hopper, capability=capability)
        if problem.dtype == torch.float32:
            assert all_settings(problem) == all_settings(smallest), problem
            continue
        assert forward_settings(problem) == forward_settings(on_hopper)
        # At 32 the H200 limits registers, by its own measurement.
        if problem.head_dim <= 128 and problem.head_dim != 32:
            assert all_settings(problem) == all_settings(on_hopper), problem


@pytest.fixture
def amd_gpu(monkeypatch):
    """An MI200, which torch numbers as it does Hopper."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI250X")


def test_amd_gpus_get_tiles_by_pointers_and_products_of_fp32(amd_gpu):
    for problem, smallest in zip(problems((9, 0)), problems((8, 9)), strict=True):
        assert problem == dataclasses.replace(smallest, capability=AMD, float32_precision="ieee")
        assert not problem.tma_allowed
        assert all(tile.num_warps == 4 and not tile.use_tma for tile in tiles(problem))


def test_amd_gpus_are_refused_by_the_hopper_kernels_alone(amd_gpu):
    query = torch.empty(1, 4, 64, 64, dtype=torch.bfloat16, device="meta")
    on_gpu = SimpleNamespace(is_cuda=True, shape=query.shape, dtype=query.dtype, device=query.device)
    assert hopper_settings.why_unavailable(on_gpu) == (
        "implementation 'hopper' needs a GPU of compute capability 9.0 (H100, H200), AMD Instinct MI250X is AMD's"
    )
    assert choice._why_unavailable(on_gpu) is None
    assert native_call.why_off() == "the C++ launches kernels by CUDA's driver, and this torch is built for ROCm"
