"""``flash --keep-settings`` chooses settings by time, and keeps those that are right: with a clock of the test."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.commands.attention import keeping
from cs336sys.commands.attention.keeping import LEAST_SPEEDUP, choose_settings, measure_and_keep
from cs336sys.kernels.attention import operators
from cs336sys.kernels.attention.triton import kept_settings, settings
from cs336sys.results.model import Samples
from cs336sys.settings.operations import AttentionWorkload

# Where kernels run: on a CPU in the interpreter, where there is no GPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TIMES_MS = {None: 1.0, "fast": 0.9, "faster and wrong": 0.5, "too large": 0.4, "as fast": 0.98}


def fake_check(settings):
    if settings == "too large":
        raise RuntimeError("out of resource: shared memory\nmore")
    return "out by 0.5" if "wrong" in settings else None


def fake_timer(**changes):
    """Every round is slower or faster as a whole, and every time by up to 0.4 % as well."""
    calls = []

    def time(settings):
        calls.append(settings)
        return (TIMES_MS | changes)[settings] * (1 + len(calls) // 3 % 3) * (1 + 1e-3 * (7 * len(calls) % 5))

    return time, calls


def test_fastest_settings_that_are_right_win_and_all_are_measured_in_turn():
    time, calls = fake_timer()
    chosen, tried = choose_settings(list(TIMES_MS)[1:], fake_check, time)
    assert chosen == "fast"
    assert calls == [None, "fast", "as fast"] * 8
    assert "faster and wrong does not run (out by 0.5)" in tried
    assert "too large does not run (out of resource: shared memory)" in tried
    assert re.search(r"built-in [\d.]+ ms, fast [\d.]+ ms, as fast [\d.]+ ms", tried)


def test_settings_within_the_noise_do_not_replace_the_built_in_ones():
    assert 1 / TIMES_MS["as fast"] < LEAST_SPEEDUP
    assert choose_settings(["as fast"], fake_check, fake_timer()[0])[0] is None
    times = iter([1.0, 0.5, 1.0, 1.6] * 4)
    assert choose_settings(["fast"], fake_check, lambda settings: next(times))[0] is None


@pytest.fixture
def kept_file(tmp_path, monkeypatch):
    """Where the settings of the pretended GPU are kept."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_settings, "describe_gpu", lambda device: "A100, driver 1")
    kept_settings.settings_on.cache_clear()
    yield tmp_path / "cs336sys/attention-A100.json"
    kept_settings.settings_on.cache_clear()
    operators.forget_plans()


def test_winners_of_both_passes_are_kept_in_a_file_that_later_processes_read(kept_file, monkeypatch, capfd):
    """The kernels compute with each of the settings; all but the built-in ones are pretended to be fast."""
    device = torch.empty(0, device=DEVICE).device
    in_force = kept_settings.settings_on(device)
    monkeypatch.setattr(settings, "MAX_CANDIDATES", 3)

    def time_calls(call, device, warmup_ms, repetition_ms):
        return Samples("ms", "clock of the test", (1.0 - 0.2 * len(in_force),))

    monkeypatch.setattr(keeping, "time_calls", time_calls)
    workload = AttentionWorkload("triton", 1, 2, 32, 16, "fp32", True, DEVICE.type, 0, 0, 1, kv_heads=1, queries=1)
    forward, backward = measure_and_keep(workload.configuration() | {"keep_settings": True}, print).derived["notes"]
    kept = json.loads(kept_file.read_text())["settings"]
    assert [key.partition(" ")[0] for key in kept] == ["forward", "backward"]
    assert all("is_causal=False num_sequences=1 num_queries=2 " in key for key in kept)  # As rows of one tile.
    for sentence, (key, text), median in zip((forward, backward), kept.items(), ("0.8", "0.6"), strict=True):
        assert sentence.startswith(f"{key}: {text} kept in place of the built-in ")
        assert f"{text} {median} ms" in sentence
    # As in a new process.
    kept_settings.settings_on.cache_clear()
    operators.forget_plans()
    capfd.readouterr()
    assert "notes" not in measure_and_keep(workload.configuration(), print).derived
    assert "settings of flash --keep-settings: 2 kept in" in capfd.readouterr().err


@pytest.mark.gpu
def test_settings_of_this_gpu_are_measured_kept_and_read_again(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    shape = ["flash", "--context", "256", "--num-heads", "4", "--implementation", "triton", "--format", "json"]
    result = CliRunner().invoke(app, [*shape, "--keep-settings"])
    assert result.exit_code == 0, result.output
    (table,) = json.loads(result.stdout)["tables"]
    assert table["rows"][0]["status"] == "ok"
    notes = [note for note in table["notes"] if " kept in place of the built-in " in note]
    assert [note.partition(" ")[0] for note in notes] == ["forward", "backward"]
    is_kept = any(": nothing kept" not in note for note in notes)
    assert bool(list(tmp_path.glob("cs336sys/attention-*.json"))) == is_kept
