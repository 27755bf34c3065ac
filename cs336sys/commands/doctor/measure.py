"""Measure what a GPU reaches at most: matrix products, copies, launches and links."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from cs336sys.accounting.hardware import Ceilings
from cs336sys.timing.calls import time_calls, time_queued_calls

_PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_SIDES = (4096, 8192)  # Sides of square matrices. The faster product counts: on an H200 in half precision, 8192.
_COPY_BYTES = 2**31  # Many times the size of an L2 cache.
_WARMUP_MS, _REPETITION_MS = 100.0, 400.0
_LAUNCHES = 200


def measure_ceilings(device: torch.device, progress: Callable[[str], None] = lambda text: None) -> Ceilings:
    """Measure what the current GPU reaches at most, in about ten seconds; each rate is the median of repetitions.

    Products are of random numbers: zeros draw less power, and so run at a higher clock.

    ``progress`` is told what is measured next.
    """
    tflops = {}
    for precision in _PRECISIONS:
        progress(f"matrix products in {precision}")
        tflops[precision] = max(_product_tflops(device, precision, side) for side in _SIDES)
    progress("copies, launches and links")
    peers = [index for index in range(torch.cuda.device_count()) if index != torch.cuda.current_device()]
    # Links are slower than memory: a quarter of the bytes takes long enough.
    links_gbps = [_copied_gbps(device, torch.device("cuda", index), _COPY_BYTES // 4) for index in peers]
    copy_gbps, launch_us = 2 * _copied_gbps(device, device, _COPY_BYTES), _launch_us(device)  # Reads and writes count.
    return Ceilings(torch.cuda.get_device_name(device), tflops, copy_gbps, launch_us, min(links_gbps, default=None))


def _product_tflops(device: torch.device, precision: str, side: int) -> float:
    left, right = (torch.randn(side, side, device=device).to(_PRECISIONS[precision]) for _ in range(2))
    setting_before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        median_ms = _median_ms(lambda: left @ right, device)
    finally:
        torch.set_float32_matmul_precision(setting_before)
    return 2 * side**3 / median_ms / 1e9  # From FLOPs a ms.


def _copied_gbps(source: torch.device, target: torch.device, size_bytes: int) -> float:
    values = torch.zeros(size_bytes, dtype=torch.uint8, device=source)
    copies = torch.empty_like(values, device=target)
    return size_bytes / _median_ms(lambda: copies.copy_(values), source) / 1e6  # From bytes a ms.


def _median_ms(call: Callable[[], Any], device: torch.device) -> float:
    return time_queued_calls(call, device, _WARMUP_MS, _REPETITION_MS).median


def _launch_us(device: torch.device) -> float:
    """Return the CPU's us to launch an addition to one number; timed as on a CPU, for the GPU adds faster than that."""
    value = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in itertools.repeat(None, _LAUNCHES):  # The cheapest loop, as timeit has it.
            value.add_(1.0)

    return 1e3 * time_calls(launch, torch.device("cpu"), _WARMUP_MS, _REPETITION_MS).median / _LAUNCHES
