"""Compiles the fused kernels for sm_90 on any machine, as an H200 would get them; prints what came out as JSON.

Run without TRITON_INTERPRET and with an empty TRITON_CACHE_DIR. Launchers choose settings and constants themselves;
only the driver below them is exchanged for one that compiles and does not launch.
"""

import gc
import json
import re
import sys

import torch
import triton
from attention.compile_for_hopper import CompileOnlyDriver, compile_and_describe, cubins, descriptions, disassemble

from cs336sys.kernels import linear_cross_entropy, operators, rms_norm, rope, swiglu
from cs336sys.kernels.adamw import AdamW, optimizer
from cs336sys.kernels.adamw import kernels as adamw_kernels

BF16 = torch.bfloat16
# Sizes decide nothing but what they are divisible by.
ROWS = 64
# Staged loads go to shared memory, ahead of their use.
MEMORY_INSTRUCTIONS = {"load_bits": "LDG", "staged_load_bits": "LDGSTS", "store_bits": "STG"}


class Recorder:
    """A kernel in its module's place, which describes what each launch compiles."""

    def __init__(self, kernel, report):
        self._kernel = kernel
        self._report = report

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            description = compile_and_describe(self._kernel[grid], *args, **kwargs)
            self._report.append((self._kernel.__name__, description))

        return launch


def bits_of(instruction: str, sass: str) -> dict[int, int]:
    """How often ``instruction`` is there by the bits that a thread moves with it."""
    counts: dict[int, int] = {}
    for suffixes in re.findall(rf"\b{instruction}\b((?:\.\w+)*)", sass):
        bits = next((int(size) for size in re.findall(r"\.[US]?(8|16|64|128)\b", suffixes)), 32)
        counts[bits] = counts.get(bits, 0) + 1
    return counts


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def norm(width: int) -> None:
    x, weight = empty(ROWS, width), empty(width, dtype=torch.float32)
    _, total, inverse_rms = rms_norm.launch_forward(x, weight, x, 1e-5, BF16)
    rms_norm.launch_backward(x, x, total, weight, inverse_rms, BF16, BF16)


def rotate(heads: int, head_dim: int) -> None:
    rope.compute_rotated(empty(1, ROWS, heads, head_dim).transpose(1, 2), None, 10_000.0, False, None, BF16)


def split_and_rotate(heads: int, head_dim: int) -> None:
    parts = rope.compute_qkv(empty(1, ROWS, 3 * heads * head_dim), None, heads, heads, 10_000.0, BF16)
    rope.compute_grad_qkv(*parts, None, 10_000.0, BF16)


def gated(width: int) -> None:
    gate, up, grad = (empty(ROWS, width) for _ in range(3))
    swiglu._forward(gate, up, BF16)
    swiglu._backward(gate, up, grad, True)


def predict(vocab_size: int) -> None:
    targets = torch.zeros(2, dtype=torch.int64)
    _, _, gradient, _, factor = linear_cross_entropy.launch_forward(
        empty(2, 16), empty(vocab_size, 16), targets, -100, 0.0, 0.0, BF16, True, False
    )
    linear_cross_entropy.launch_scale(gradient, factor, BF16, overwrite=True)


def update_with_copy() -> None:
    parameter = torch.nn.Parameter(empty(ROWS, dtype=torch.float32))
    parameter.grad = torch.empty_like(parameter)
    adamw = AdamW([parameter], max_grad_norm=1.0)
    adamw.attach_copy(parameter, empty(ROWS))
    adamw.step()


CONFIGURATIONS = {
    "rms_norm 4096 residual": lambda: norm(4096),
    "rope 32x128": lambda: rotate(32, 128),
    "rope_qkv 12x64": lambda: split_and_rotate(12, 64),
    "swiglu 11008": lambda: gated(11008),
    "linear_cross_entropy 50257": lambda: predict(50_257),
    "adamw copies": update_with_copy,
}


def main() -> None:
    triton.runtime.driver.set_active(CompileOnlyDriver())
    triton.knobs.nvidia.dump_ptxas_log = True
    gc.disable()  # as compile_for_hopper does
    launches: list[tuple[str, dict]] = []
    for module in (operators, linear_cross_entropy, optimizer):
        module.check_tensors = lambda *_, **__: None
    for module in (rms_norm, operators, rope, swiglu, linear_cross_entropy, adamw_kernels):
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                setattr(module, name, Recorder(value, launches))
    reports = {}
    for name in sys.argv[1:]:
        launches.clear()
        CONFIGURATIONS[name]()
        reports[name] = list(launches)
    for name, sass in zip(cubins, disassemble(cubins.values()), strict=True):
        # The bits that its instructions read and write memory by.
        descriptions[name].update(
            (bits, bits_of(instruction, sass)) for bits, instruction in MEMORY_INSTRUCTIONS.items()
        )
    reports = {name: [{"kernel": kernel, **of} for kernel, of in launches] for name, launches in reports.items()}
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()
