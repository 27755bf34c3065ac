"""Print two tables of docs/: ``flash_attention`` from C++ or Python, and tiles of other GPUs forced on this one.

    python tools/time_attention.py calls         # docs/decisions/native-calls.md; with CXX=/bin/false from Python
    python tools/time_attention.py tiles 8.0     # docs/gpus.md; the compute capability whose tiles are forced

Needs a GPU. Run ``calls`` once before, to have the C++ compiled, and both ways in turn.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cs336sys.kernels.attention import flash_attention, operators
from cs336sys.kernels.attention.triton import plans

# Batch, heads, heads of keys, length, head dimension.
TILED_SHAPES = (
    (torch.bfloat16, 1, 16, 16, 4096, 64),
    (torch.bfloat16, 16, 12, 12, 1024, 64),
    (torch.bfloat16, 1, 16, 16, 4096, 128),
    (torch.bfloat16, 1, 32, 8, 4096, 128),
    (torch.bfloat16, 1, 16, 16, 16384, 128),
    (torch.bfloat16, 1, 16, 16, 4096, 256),
    (torch.float32, 1, 16, 16, 4096, 64),
    (torch.float32, 1, 16, 16, 4096, 128),
)


def call_us(call: Callable[[], object]) -> float:
    """Return the wall time of a call among 50, in us: the median of 15 times."""
    for _ in range(30):
        call()
    times_us = []
    for _ in range(15):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        times_us.append((time.perf_counter() - begin) / 50 * 1e6)
    return statistics.median(times_us)


def print_calls() -> None:
    for length in (128, 256, 512, 1024):
        for head_dim in (16, 64, 128):
            for dtype in (torch.bfloat16, torch.float32):
                shape = (1, 1, length, head_dim)
                inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
                grad_out = torch.randn_like(inputs[0])

                def forward(inputs: list[Tensor] = inputs) -> None:
                    with torch.no_grad():
                        flash_attention(*inputs, True)

                def both(inputs: list[Tensor] = inputs, grad_out: Tensor = grad_out) -> None:
                    flash_attention(*inputs, True).backward(grad_out)
                    for tensor in inputs:
                        tensor.grad = None

                times = f"forward {call_us(forward):.1f} us, forward and backward {call_us(both):.1f} us"
                print(f"{length} x {head_dim}, {dtype}: {times}", flush=True)
    print("from C++" if operators._native is not None else "from Python")


def event_ms(call: Callable[[], object]) -> float:
    """Return the time of a call among 5 between CUDA events, in ms: the median of 8."""
    for _ in range(3):
        call()
    begin, end, times_ms = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), []
    for _ in range(8):
        begin.record()
        for _ in range(5):
            call()
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end) / 5)
    return statistics.median(times_ms)


def force_tiles(capability: tuple[int, int]) -> None:
    forward_settings, backward_settings = plans.forward_settings, plans.backward_settings

    def there(problem):
        return replace(problem, capability=capability, tma_allowed=False)

    plans.forward_settings = lambda problem: forward_settings(there(problem))
    plans.backward_settings = lambda problem, deterministic: backward_settings(there(problem), deterministic)


def print_tiles(capability: tuple[int, int]) -> None:
    force_tiles(capability)
    for dtype, batch, heads, key_heads, length, head_dim in TILED_SHAPES:
        backend = SDPBackend.EFFICIENT_ATTENTION if dtype == torch.float32 else SDPBackend.FLASH_ATTENTION
        query, key, value = inputs = [
            torch.randn(batch, count, length, head_dim, device="cuda", dtype=dtype, requires_grad=True)
            for count in (heads, key_heads, key_heads)
        ]
        repeated = [
            tensor.detach().repeat_interleave(heads // key_heads, 1).requires_grad_() for tensor in (key, value)
        ]
        grad_out = torch.randn_like(query)

        def ours(inputs=inputs):
            return flash_attention(*inputs, True, implementation="triton")

        def theirs(inputs=(query, *repeated), backend=backend):
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*inputs, is_causal=True)

        passes: dict[str, list[Callable[[], object]]] = {"forward": [ours, theirs], "backward": []}
        for function, leaves in ((ours, inputs), (theirs, (query, *repeated))):
            out = function()

            def backward(out=out, leaves=leaves, grad_out=grad_out):
                return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

            passes["backward"].append(backward)
        texts = []
        for name, calls in passes.items():
            rounds = [[event_ms(call) for call in calls] for _ in range(3)]
            own_ms, sdpa_ms = map(statistics.median, zip(*rounds, strict=True))
            texts.append(f"{name} {own_ms:.3f}, {sdpa_ms:.3f}: {own_ms / sdpa_ms:.2f}")
        print(f"{dtype} {batch}x{heads}/{key_heads}x{length}x{head_dim}: {'; '.join(texts)}", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["calls"]:
            print_calls()
        case ["tiles", version]:
            major, minor = map(int, version.split("."))
            print_tiles((major, minor))
        case _:
            sys.exit(__doc__)
