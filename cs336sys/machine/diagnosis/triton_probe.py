"""A run of one small Triton kernel, which prints "ok", or what went wrong in one line.

A module and a process of its own: Triton reads a kernel's source from its file, decides on its interpreter when it is
imported, and a kernel that fails can leave a process without a usable GPU. Usage:
``python -m cs336sys.machine.diagnosis.triton_probe cuda``, or ``cpu`` with TRITON_INTERPRET=1.
"""

import sys

import torch
import triton
import triton.language as tl

from cs336sys.machine.late_imports import repair_interpreter
from cs336sys.processes.caches import use_private_caches


@triton.jit
def _sum_kernel(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    # A loop bound known only at run time is what numpy 2.4 broke in the interpreter of Triton before 3.7.
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(sum_ptr, tl.sum(total, 0))


def probe(device: str) -> None:
    """Run the kernel and print "ok", or what went wrong."""
    x = torch.arange(100, dtype=torch.float32, device=device)
    result = torch.zeros(1, device=device)
    repair_interpreter()  # As all that runs kernels here does.
    try:
        use_private_caches()  # Or refuse those that other users can write to.
        _sum_kernel[(1,)](x, result, x.numel(), BLOCK=16)
        total = result.item()
    except Exception as error:
        # Any error is the answer. Triton's own show the source first and the cause last.
        lines = str(error).strip().splitlines() or [""]
        print(f"{type(error).__name__}: {lines[-1]}")
        return
    print("ok" if total == 4950 else f"wrong result: sum of 0 to 99 is 4950, not {total:g}")


if __name__ == "__main__":
    probe(sys.argv[1])
