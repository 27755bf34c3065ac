"""The table of peaks: known GPUs by their exact names, no guesses, and MFU from them."""

import pytest

from cs336sys.accounting.hardware import impossible_utilization, model_flops_utilization, peak_tflops


@pytest.mark.parametrize(
    ("gpu_name", "fp32", "tf32", "bf16"),
    [
        ("NVIDIA H200", 66.9, 494.7, 989.4),
        ("NVIDIA GeForce RTX 5090", 104.8, 104.8, 209.5),
    ],
)
def test_peak_is_that_of_the_precision(gpu_name, fp32, tf32, bf16):
    assert peak_tflops(gpu_name, "fp32") == fp32
    assert peak_tflops(gpu_name, "fp32", tf32=True) == tf32
    assert peak_tflops(gpu_name, "bf16") == bf16
    assert peak_tflops(gpu_name, "bf16", tf32=True) == bf16
    # Tensor cores with fp32 accumulation run both half formats at one rate, on GeForce too.
    assert peak_tflops(gpu_name, "fp16") == bf16


@pytest.mark.parametrize(
    "gpu_name",
    [
        "NVIDIA GB200",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA A100X",
        "NVIDIA L4",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_gpu_with_a_similar_or_unknown_name_has_no_peak(gpu_name):
    assert peak_tflops(gpu_name, "bf16") is None


def test_mfu_is_the_share_of_the_peak():
    # 4.947e14 operations in half a second are 989.4 TFLOP/s: all of the peak; in two seconds a quarter of it.
    assert model_flops_utilization(494_700_000_000_000, 0.5, 989.4) == pytest.approx(1.0)
    assert model_flops_utilization(494_700_000_000_000, 2.0, 989.4) == pytest.approx(0.25)


def test_mfu_is_unknown_without_a_peak():
    assert model_flops_utilization(10**15, 1.0, None) is None


def test_impossible_mfu_is_not_rounded_to_a_possible_one():
    assert impossible_utilization(100.0) is None
    for mfu_percent in (100.04, 100.5, 250.0):
        assert impossible_utilization(mfu_percent).startswith(f"MFU {mfu_percent:g} %: more FLOPs")
