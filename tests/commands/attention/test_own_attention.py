"""Attention of the user's beside ours: honest kernels are timed, and no shortcut passes."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
from run_commands import invoke, shown, tables

from cs336sys.commands.attention import measure as measurement
from cs336sys.results.model import read_results
from cs336sys.settings.operations import AttentionWorkload
from cs336sys.timing import relative_error

KERNELS = Path(__file__).with_name("cheating_kernels.py")


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What kernels replace is put back."""
    owners = {"perf_counter": time, "synchronize": torch.cuda, "why_wrong": relative_error, "equal": torch}
    for name, owner in owners.items():
        monkeypatch.setattr(owner, name, getattr(owner, name))


stages: list[str] = []


def measure(name, device="cpu", context=64, **more):
    shape = {"batch_size": 2, "heads": 2, "head_dim": 16, "dtype": "fp32", "warmup_ms": 0.5, "repetition_ms": 1.0}
    workload = AttentionWorkload(f"{KERNELS}:{name}", context=context, device=device, **shape | more)
    return measurement.measure_flash(workload.configuration(), stages.append)


@pytest.mark.parametrize("more", [{}, {"queries": 3}, {"queries": 64}, {"heads": 4, "kv_heads": 2}, {"dtype": "bf16"}])
def test_an_honest_kernel_is_timed_in_every_part(more):
    outcome = measure("honest", **more)
    assert outcome.status == "ok", outcome.reason
    assert set(outcome.samples) == {"forward", "backward", "end_to_end"}
    assert all(len(samples.measured) >= 5 for samples in outcome.samples.values())
    assert {"out_error", "dq_error", "dk_error", "dv_error"} <= set(outcome.derived)
    assert "notes" not in outcome.derived


def test_a_kernel_without_a_gradient_has_a_forward_pass_alone():
    outcome = measure("honest_without_gradient")
    assert (outcome.status, set(outcome.samples)) == ("ok", {"forward"})


def test_lengths_that_a_kernel_refuses_are_told_and_no_fault():
    stages.clear()
    outcome = measure("refuses_odd_lengths")
    checking = [f"checking odd lengths and strides, {number} of 4" for number in range(1, 5)]
    assert [stage for stage in stages if stage.startswith("checking")] == checking
    assert outcome.status == "ok"
    assert outcome.derived["notes"][0].endswith(
        "does not take a context of 131, a context of 131 with strided inputs, a context of 1, a context of 1 with "
        "strided inputs"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("replays_by_address", "relative error"),
        ("replays_by_a_sample", "relative error"),
        ("stops_after_warm_up", "relative error"),
        ("writes_nothing", "relative error"),
        ("knows_the_seed", "relative error"),
        ("computes_when_looked_at", "is a Lazy, and should be a plain tensor"),
        ("finishes_later", "relative error"),
        ("writes_its_inputs", "it writes to its inputs"),
        ("returns_its_inputs_memory", "lies in the memory of its inputs"),
        ("returns_one_memory", "lies in memory that an earlier call returned"),
        ("computes_half", "relative error"),
        ("computes_a_window", "relative error"),
        ("computes_in_half_precision", "relative error"),
        ("skips_the_backward_pass", "relative error"),
        ("returns_a_broadcast", "relative error|has shape"),
        ("stops_the_clock", "it replaces time.perf_counter"),
        ("synchronizes_nothing", "it replaces torch.cuda.synchronize"),
        ("calls_everything_right", "it replaces cs336sys.timing.relative_error.why_wrong"),
        ("calls_everything_equal", "it replaces torch.equal"),
    ],
)
def test_no_shortcut_passes(name, reason):
    outcome = measure(name)
    assert outcome.status == "wrong"
    assert not outcome.samples
    assert re.search(reason, outcome.reason), outcome.reason


def test_time_below_the_gpu_s_peaks_is_wrong(monkeypatch):
    monkeypatch.setattr(measurement, "_least_attention_ms", lambda workload, device, part: 1e6)
    assert "its FLOPs and bytes take 1e+06 ms at this GPU's peaks" in measure("honest").reason


def test_the_least_time_is_that_of_flops_or_bytes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    long = AttentionWorkload("x", 1, 16, 16384, 128, "bf16", causal=False)
    least = measurement._least_attention_ms(long, torch.device("cuda"), "forward")
    assert least == pytest.approx(4 * 16 * 16384**2 * 128 / 989.4e12 * 1e3)
    workload_ = AttentionWorkload("x", 1, 16, 65536, 128, "bf16", queries=1, window=1)  # Of one key.
    assert measurement._least_attention_ms(workload_, torch.device("cuda"), "forward") == pytest.approx(
        4 * 16 * 128 * 2 / 4.8e12 * 1e3
    )


FLASH = "flash --implementation eager --context 48 --num-heads 2 --head-dim 8 --dtype fp32 --device cpu --rounds 2"
FLASH += " --warmup-ms 1 --repetition-ms 2 --format json --kernel"


def test_command_shows_it_beside_ours(tmp_path):
    saved = tmp_path / "r.jsonl"
    kernels = ",".join(f"{KERNELS}:{name}" for name in ("honest_without_gradient", "computes_half"))
    result = invoke(FLASH, kernels, "--save", saved)
    assert result.exit_code == 1, result.output
    rows = {row["implementation"].split(":")[-1]: row for row in json.loads(result.stdout)["tables"][0]["rows"]}
    statuses = [rows[name]["status"] for name in ("eager", "honest_without_gradient", "computes_half")]
    assert statuses == ["ok", "ok", "wrong"]
    assert rows["honest_without_gradient"]["forward_speedup"] is not None
    assert rows["honest_without_gradient"].get("backward_ms") is None
    codes = {cell.configuration.get("code") for cell in read_results(saved).cells}
    assert len(codes) == 2
    assert shown(saved) == result.stdout


def test_rounds_keep_what_a_kernel_refuses():
    notes = tables(invoke(FLASH, f"{KERNELS}:refuses_odd_lengths"))["flash"]["notes"]
    assert sum("does not take a context of 131" in note for note in notes) == 1


@pytest.mark.gpu
def test_honest_and_early_kernels_on_a_gpu():
    for dtype in ("fp32", "bf16"):
        outcome = measure("honest", device="cuda", context=2048, heads=16, head_dim=64, dtype=dtype, repetition_ms=20.0)
        assert outcome.status == "ok", outcome.reason
    early = measure("leaves_work_on_another_stream", device="cuda", context=2048, heads=16, head_dim=64, dtype="bf16")
    assert early.status == "wrong"
