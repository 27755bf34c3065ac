"""The fused kernels as an H200 would run them, compiled for sm_90 on any machine: registers, spills, vector widths."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_fused_for_hopper.py")
CONFIGURATIONS = ["rms_norm 4096 residual", "rope 32x128"]
NIGHTLY_CONFIGURATIONS = ["rope_qkv 12x64", "swiglu 11008", "linear_cross_entropy 50257"]
# Each tensor's 128-bit accesses in a tile of AdamW's: four fp32 tensors and a bfloat16 one.
ADAMW = {"adamw copies": {"load_bits": 16, "store_bits": 14}}


@pytest.fixture(scope="module")
def compiled(tier, compile_by):
    """{configuration: what came out of each launch}."""
    return compile_by(SCRIPT, *CONFIGURATIONS, *ADAMW, *tier.choose([], NIGHTLY_CONFIGURATIONS))


def launches(compiled, without=()):
    for configuration in compiled.keys() - without:
        assert compiled[configuration], configuration
        for number, kernel in enumerate(compiled[configuration]):
            yield f"{configuration}, launch {number}: {kernel}", kernel


def test_nothing_is_spilled(compiled):
    for name, kernel in launches(compiled):
        assert kernel["spilled_bytes"] == 0, name


def test_tensors_are_read_and_written_128_bits_at_a_time(compiled):
    for name, kernel in launches(compiled, without=ADAMW):
        # One number a row may be narrower; what is loaded ahead is there once for each of four stages.
        narrow = [
            (bits, count)
            for kind, most in (("load_bits", 2), ("staged_load_bits", 4), ("store_bits", 2))
            for bits, count in kernel[kind].items()
            if bits != "128" and count > most
        ]
        assert not narrow, name
        assert kernel["load_bits"]["128"] > 0, name
        # What adds up partial sums writes one number a column.
        assert kernel["kernel"] == "_partial_sums_kernel" or kernel["store_bits"]["128"] > 0, name


def test_backward_of_rms_norm_loads_ahead(compiled):
    """Three tiles of each of the three tensors; the loop's own loads are the fourth."""
    _, backward, _ = compiled["rms_norm 4096 residual"]
    # A thread has 16 elements of a tile, in two loads.
    assert backward["staged_load_bits"]["128"] == 4 * 3 * 2, backward


def test_rotating_moves_nothing_between_threads(compiled):
    """Pairs are neighbours and a thread has whole ones, so that no shared memory is needed."""
    for kernel in compiled["rope 32x128"]:
        assert kernel["shared_bytes"] == 0, kernel


def test_enough_programs_share_a_multiprocessor(compiled):
    """Memory is busy only while many loads are under way: 512 threads and more of each kernel fit at once."""
    for name, kernel in launches(compiled):
        assert 65536 // kernel["registers"] >= 512, name


def test_adamw_moves_128_bits_at_a_time(compiled):
    """Of whole, aligned chunks; the same kernel has masked accesses for the others."""
    for configuration, expected in ADAMW.items():
        (update,) = [kernel for kernel in compiled[configuration] if kernel["kernel"] == "adamw_update_kernel"]
        assert {kind: update[kind]["128"] for kind in expected} == expected, update
