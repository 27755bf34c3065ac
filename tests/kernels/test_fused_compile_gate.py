"""The fused kernels as an H200 would run them, compiled for sm_90 on any machine: registers, spills, vector widths."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_fused_for_hopper.py")
CONFIGURATIONS = ("rms_norm 4096 residual", "rms_norm 1600", "rope 32x128", "swiglu 11008")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """{configuration: what came out of each launch}, from a process of its own: this one may be the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # A cache hit would not run ptxas, whose log is read.
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton_cache"))
    command = [sys.executable, SCRIPT, *CONFIGURATIONS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def launches(compiled):
    for configuration, kernels in compiled.items():
        assert kernels, configuration
        for number, kernel in enumerate(kernels):
            yield f"{configuration}, launch {number}: {kernel}", kernel


def test_nothing_is_spilled(compiled):
    for name, kernel in launches(compiled):
        assert kernel["spilled_bytes"] == 0, name


def test_tensors_are_read_and_written_128_bits_at_a_time(compiled):
    for name, kernel in launches(compiled):
        # One number a row may be narrower.
        narrow = [
            (bits, count)
            for kind in ("load_bits", "store_bits")
            for bits, count in kernel[kind].items()
            if bits != "128" and count > 2
        ]
        assert not narrow, name
        assert kernel["load_bits"]["128"] > 0, name
        assert kernel["store_bits"]["128"] > 0, name


def test_rotating_moves_nothing_between_threads(compiled):
    """Pairs are neighbours and a thread has whole ones, so that no shared memory is needed."""
    for kernel in compiled["rope 32x128"]:
        assert kernel["shared_bytes"] == 0, kernel


def test_enough_programs_share_a_multiprocessor(compiled):
    """Memory is busy only while many loads are under way: 512 threads and more of each kernel fit at once."""
    for name, kernel in launches(compiled):
        assert 65536 // kernel["registers"] >= 512, name
