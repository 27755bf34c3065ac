"""The table of peaks: known GPUs by their exact names, no guesses, and MFU from them."""

import pytest

from cs336sys.accounting.hardware import impossible_utilization, model_flops_utilization, peak_tflops


def test_peak_is_that_of_the_precision():
    kinds = [("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True), ("fp16", False)]
    peaks = [peak_tflops("NVIDIA H200", precision, tf32=tf32) for precision, tf32 in kinds]
    assert peaks == [66.9, 494.7, 989.4, 989.4, 989.4]


def test_gpu_with_a_similar_or_unknown_name_has_no_peak():
    names = ("NVIDIA GB200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100X", "")
    assert [name for name in names if peak_tflops(name, "bf16") is not None] == []


def test_mfu_is_the_share_of_the_peak():
    # 4.947e14 operations in two seconds are a quarter of 989.4 TFLOP/s.
    assert model_flops_utilization(494_700_000_000_000, 2.0, 989.4) == pytest.approx(0.25)
    assert model_flops_utilization(10**15, 1.0, None) is None


def test_impossible_mfu_is_not_rounded_to_a_possible_one():
    assert impossible_utilization(100.04).startswith("MFU 100.04 %: more FLOPs")
