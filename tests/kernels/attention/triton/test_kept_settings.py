"""Settings that ``flash --keep-settings`` chose are read from the user's cache, or refused; a GPU is pretended."""

import json
import re

import pytest
import torch

from cs336sys.errors import CapabilityError
from cs336sys.kernels.attention import choice, native_probe
from cs336sys.kernels.attention.problem import AttentionOptions, AttentionProblem, Operand
from cs336sys.kernels.attention.triton import kept_settings
from cs336sys.kernels.attention.triton.plans import ForwardPlan
from cs336sys.kernels.attention.triton.settings import candidates

GPU = "NVIDIA A100-SXM4-80GB, compute capability 8.0, driver 570.86.10, triton 3.9.0, kernels 0123456789abcdef"
CPU = torch.device("cpu")


def problem(length=1024, **changes):
    values = {"head_dim": 64, "dtype": torch.bfloat16, "float32_precision": "tf32x3", "is_causal": True}
    values |= {"num_sequences": 16, "num_queries": length, "num_keys": length, "capability": (8, 0)}
    return AttentionProblem(**{**values, "num_multiprocessors": 108, "tma_allowed": False, **changes})


@pytest.fixture(autouse=True)
def gpu(tmp_path, monkeypatch):
    """Plans for CPU tensors look for the settings of a GPU."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_settings, "describe_gpu", lambda device: GPU)
    kept_settings.settings_on.cache_clear()
    yield tmp_path / "cs336sys/attention-NVIDIA-A100-SXM4-80GB.json"
    kept_settings.settings_on.cache_clear()


def keep(**texts):
    kept_settings.write_settings(GPU, {kept_settings.key_of(name, problem()): text for name, text in texts.items()})
    kept_settings.settings_on.cache_clear()


def tile_of_new_plan(length=1024):
    tensor = torch.empty(1, 16, length, 64, dtype=torch.bfloat16)
    plan = ForwardPlan(problem(length), [Operand(tensor)] * 4, CPU)
    config, options = plan.steps[0][0].arguments[-1], plan.steps[0][0]._options
    return config.query_rows, config.key_rows, options["num_warps"], options["num_stages"]


def test_plans_made_later_use_what_was_kept_for_the_class_of_their_problem(gpu, capfd):
    assert native_probe.settings_and_fix() == ("built-in settings", None)
    assert tile_of_new_plan() == (64, 64, 4, 3)
    keep(forward=TILE)
    assert tile_of_new_plan() == tile_of_new_plan(length=600) == (128, 64, 8, 3)
    assert tile_of_new_plan(length=1025) == tile_of_new_plan(length=512) == (64, 64, 4, 3)
    kept = f"1 kept in {gpu} (undo: rm {gpu})"
    assert capfd.readouterr().err == f"cs336sys: attention uses settings of flash --keep-settings: {kept}\n"
    assert native_probe.settings_and_fix() == (kept, None)
    assert oct(gpu.parent.stat().st_mode)[-3:] == "700"
    gpu.unlink()
    kept_settings.settings_on.cache_clear()
    assert tile_of_new_plan() == (64, 64, 4, 3)
    keep()
    assert not gpu.exists()


def test_every_property_of_a_problem_that_decides_settings_is_in_its_class():
    changes = {"head_dim": 80, "dtype": torch.float16, "is_causal": False, "num_sequences": 64, "num_keys": 4096}
    changes |= {"window": 100, "group_size": 4, "diagonal": 3, "tma_allowed": True, "float32_precision": "ieee"}
    keys = {kept_settings.key_of("forward", problem(**{name: value})) for name, value in changes.items()}
    assert len(keys | {kept_settings.key_of("forward", problem())}) == len(changes) + 1
    assert kept_settings.key_of("forward", problem(scale=3.0)) == kept_settings.key_of("forward", problem())
    decoding = [problem(num_queries=1, num_keys=keys, diagonal=keys - 1) for keys in (5000, 8192)]
    assert len({kept_settings.key_of("forward", step) for step in decoding}) == 1


def test_backward_uses_what_was_kept_unless_it_must_be_deterministic(monkeypatch):
    keep(backward="joint; 32x64, 8 warps, 2 stages")
    monkeypatch.setattr(choice, "make_problem", lambda *_: problem())
    tensors = [torch.empty(1, 16, 1024, 64, dtype=torch.bfloat16) for _ in range(8)]

    def warps(deterministic):
        plan = choice.backward_plan(tensors[:5], tensors[5:], AttentionOptions(True, deterministic=deterministic))
        return {launch._options["num_warps"] for launch, _ in plan.steps if "num_warps" in launch._options}

    assert (warps(False), warps(True)) == ({8}, {4})


KEY = kept_settings.key_of("forward", problem())
OTHERS = {
    "gpu": GPU.replace("A100", "H100"),
    "driver": GPU.replace("570.86.10", "575.51"),
    "triton": GPU.replace("3.9.0", "3.8.0"),
    "stale": GPU.replace("0123", "4567"),
}
TILE = "128x64, 8 warps, 3 stages"
BROKEN = {
    "truncated": '{"gpu": ',
    "list": "[]",
    "nested": "[" * 100_000,
    "no text": json.dumps({"gpu": GPU, "settings": {KEY: 3}}),
    "no settings": json.dumps({"gpu": GPU}),
    "settings in a list": json.dumps({"gpu": GPU, "settings": [TILE]}),
    "code": json.dumps({"gpu": GPU, "settings": {KEY: "__import__('os')"}}),
    "more": json.dumps({"gpu": GPU, "settings": {KEY: TILE}, "else": 1}),
}


def assert_refused(pattern, recwarn):
    """One warning, however many plans are made, and the same sentence from doctor."""
    assert tile_of_new_plan() == tile_of_new_plan() == (64, 64, 4, 3)
    (warning,) = [str(warning.message) for warning in recwarn if "attention" in str(warning.message)]
    assert re.fullmatch(f"attention uses its built-in settings: {pattern}", warning)
    state, fix = native_probe.settings_and_fix()
    assert re.fullmatch(f"built-in settings: {pattern}", state)
    assert fix == "`cs336sys flash --keep-settings` measures again."


@pytest.mark.parametrize("fault", [*BROKEN, *OTHERS])
def test_broken_foreign_and_stale_files_are_refused_in_one_sentence_and_ignored(fault, gpu, recwarn):
    keep(forward=TILE)
    gpu.write_text(BROKEN.get(fault) or json.dumps({"gpu": OTHERS[fault], "settings": {KEY: TILE}}))
    reason = "is broken" if fault in BROKEN else f"was measured on '{OTHERS[fault]}', this is '{GPU}'"
    assert_refused(f"{gpu} {reason}: measure again by cs336sys flash --keep-settings, or rm {gpu}", recwarn)


def test_file_in_a_folder_of_others_is_neither_read_nor_written(gpu, recwarn):
    keep(forward=TILE)
    gpu.parent.chmod(0o777)
    pattern = f"{gpu.parent}: cached files are not loaded .* set XDG_CACHE_HOME to a folder that only you can write to"
    assert_refused(pattern, recwarn)
    with pytest.raises(CapabilityError, match="other users can write"):
        keep(forward=TILE)


def test_settings_that_no_version_would_try_are_ignored(recwarn):
    keep(forward="96x96, 8 warps, 9 stages")
    assert tile_of_new_plan() == (64, 64, 4, 3)
    (warning,) = [str(warning.message) for warning in recwarn if "attention" in str(warning.message)]
    assert warning.endswith("'96x96, 8 warps, 9 stages' are none for this forward")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("changes", [{}, {"dtype": torch.float32}, {"head_dim": 256, "window": 300}, {"head_dim": 16}])
def test_few_candidates_are_tried_and_their_texts_are_accepted_from_a_file(capability, changes, gpu):
    described = problem(**{"capability": capability, "tma_allowed": capability == (9, 0), **changes})
    for pass_name, built_in in kept_settings.BUILT_IN.items():
        texts = candidates(built_in, described)
        assert 3 <= len(texts) <= 6
        assert next(iter(texts.values())) == built_in(described)
        for text in texts:
            kept_settings.write_settings(GPU, {kept_settings.key_of(pass_name, described): text})
            kept_settings.settings_on.cache_clear()
            assert kept_settings.kept_settings(pass_name, described, CPU) == texts[text]
