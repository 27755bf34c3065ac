"""``tune`` as a user runs it: predicted choices, what is refused, and measuring the best few on a CPU."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import run_commands
from run_commands import imported_by, invoke

from cs336sys.accounting.hardware import Ceilings
from cs336sys.accounting.step_time.choice import Space, choose
from cs336sys.accounting.step_time.rates import h200_rates
from cs336sys.accounting.step_time.work import CountedModel
from cs336sys.commands.tune import options as tune_command
from cs336sys.machine.environment import new_run
from cs336sys.machine.system import GpuState
from cs336sys.results.model import Samples, read_results
from cs336sys.run.cells import Outcome
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import UserCode, Workload
from cs336sys.training.operation_counting import count_model


@pytest.fixture(scope="module", autouse=True)
def rates_measured_once():
    """Those of this CPU, which take ten seconds, and those of a second time would choose others."""
    measure, measured = tune_command._cpu_rates, []

    def rates(plain):
        if not measured:
            measured.append(measure(plain))
        return measured[0]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tune_command, "_cpu_rates", rates)
        yield


def tables(*words):
    found = run_commands.tables(invoke("tune", words, "--format json"))
    return {name: table["rows"] for name, table in found.items()}


@pytest.fixture(scope="module")
def chosen():
    return tables("--size xl --bf16 --memory 80GiB --gpu h200")


def test_best_fit_and_are_sorted_and_none_of_the_front_is_beaten(chosen):
    speeds = [row["tokens_per_s"] for row in chosen["best"]]
    assert len(speeds) == 10
    assert speeds == sorted(speeds, reverse=True)
    assert all(row["peak_gib"] <= 80 for row in chosen["best"])
    for less, more in pairwise(chosen["front"]):
        assert less["peak_gib"] < more["peak_gib"]
        assert less["tokens_per_s"] < more["tokens_per_s"]
    assert all(row["tokens_per_s"] > speeds[0] for row in chosen["rejected"])
    assert all(row["over_gib"] == pytest.approx(row["peak_gib"] - 80) for row in chosen["rejected"])
    now, more, rank = (row["tokens_per_s"] for row in chosen["more"])
    assert now <= more
    assert now < rank


def test_each_of_the_best_has_a_command_that_means_it(chosen):
    """The command's cells, planned, are the configuration that it stands for."""
    for row in chosen["commands"][:3]:
        words = row["command"].split()
        assert words[:2] == ["cs336sys", "bench"]
        result = invoke(words[1:], "--dry-run --device cpu --format json")
        # A plan is for this machine; what cannot run here is refused with its reason, not misread.
        assert result.exit_code in (0, 3), result.output
    lines = [row["line"] for row in chosen["lines"]]
    assert "from cs336sys.kernels.adamw import AdamW" in lines


def test_the_gpu_of_a_file_of_ceilings_limits_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("cs336sys.machine.system.read_gpus", list)
    path, rates = tmp_path / "ceilings.json", {"fp32": 51.12, "bf16": 769.3}
    Ceilings("NVIDIA GeForce RTX 4090", rates, copy_gbps=4244.0, launch_us=9.161).write(path)
    found = tables("--size xl --bf16 --kernels fused --rates", path)
    assert 0 < max(row["peak_gib"] for row in found["best"]) <= 0.95 * 24
    assert all(row["over_gib"] == pytest.approx(row["peak_gib"] - 0.95 * 24) for row in found["rejected"])
    Ceilings("NVIDIA L40S", rates, copy_gbps=4244.0, launch_us=9.161).write(path)
    assert "the memory of NVIDIA L40S is not known: give --memory" in invoke("tune --rates", path).stderr


def test_a_gpu_of_which_something_is_not_known_is_told_no_other_gpus_figures(tmp_path, monkeypatch):
    """GB10 does not tell its memory; of a slice nvidia-smi names the whole GPU."""
    row = (0, "GPU-1", "NVIDIA GB10", None, None, None, *[None] * 5, ())
    monkeypatch.setattr("cs336sys.machine.system.read_gpus", lambda: [GpuState(*row)])
    assert "the memory of NVIDIA GB10 is not known: give --memory" in invoke("tune").stderr
    assert "NVIDIA GB10: its rates are not known; run doctor" in invoke("tune --memory 80GiB").stderr
    whole = GpuState(0, "GPU-1", "NVIDIA A100-SXM4-80GB", None, 80.0, *row[5:])
    monkeypatch.setattr("cs336sys.machine.system.read_gpus", lambda: [whole])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert "NVIDIA A100-SXM4-80GB MIG: its rates are not known" in invoke("tune --memory 9GiB").stderr
    path = tmp_path / "ceilings.json"
    Ceilings(f"{whole.name} MIG 1g.10gb", {"fp32": 2.0, "bf16": 40.0}, copy_gbps=200.0, launch_us=9.0).write(path)
    assert tables("--size small --bf16 --memory 9GiB --rates", path)["best"]


def test_given_options_stay():
    found = tables("--size small --bf16 --gpu h200 --attention sdpa --micro-batch 4 --checkpoint none,block")
    words = [row["configuration"] for row in found["best"]]
    assert all(text.startswith("batch 4, ") and "sdpa" in text for text in words)
    assert not any("every=" in text for text in words)


def test_micro_batches_add_up_to_the_tokens_of_a_step():
    found = tables("--size small --bf16 --gpu h200 --tokens-per-step 32768")
    for row in found["best"]:
        batch, _, times = row["configuration"].removeprefix("batch ").split(",")[0].partition(" x ")
        assert int(batch) * int(times or 1) * 512 == 32768


def test_each_combination_is_evaluated_or_left_out_for_a_reason():
    found = choose(Space(Workload(SIZES["small"], precision="bf16")), h200_rates(), 80 * 2**30)
    every = 3 * 3 * 2 * 5 * 2 * 7 * len(Space(Workload(SIZES["small"])).checkpointings)
    assert len(found.predicted) + sum(found.unknown.values()) + sum(found.refused.values()) == every


def test_predicting_imports_no_torch():
    assert imported_by("tune --size xl --bf16 --gpu h200 --world-size 2 --compile block --checkpoint none") == []


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("tune") / "tuned.jsonl"
    words = "tune --size tiny --context 32 --device cpu --micro-batch 1,2 --compile off --attention reference,sdpa"
    words += " --checkpoint none,block --measure 2 --steps 2 --warmup 1 --budget 1 --format json --save "
    return [words, path], invoke(words, path), path


def test_measuring_checks_saves_and_compares_the_best_and_the_plain_one(measured):
    _, result, path = measured
    assert result.exit_code == 0, result.output
    found = {table["name"]: table for table in json.loads(result.stdout)["tables"]}
    rows = found["measured"]["rows"]
    assert {row["status"] for row in rows} == {"ok"}
    assert sum(row.get("verdict") == "best" for row in rows) == 1
    assert all(row["predicted_ms"] > 0 and row["predicted_gib"] > 0 for row in rows)
    assert any("reference, course" in row["configuration"] for row in rows)
    assert "Winner: " in found["measured"]["notes"][0]
    saved = read_results(path).cells
    assert {cell.command for cell in saved} == {"tune"}
    assert len(saved) == sum(row["rounds"] for row in rows)


# Of one core, as measured: what is compiled moves fewer bytes and launches fewer kernels.
SECONDS = dict.fromkeys(("half_products", "full_products", "full_scores"), 3e-11)
SECONDS |= {"flash_forward": 9e-10, "flash_backward": 3e-10, "sdpa_forward": 8e-11, "sdpa_backward": 1e-10}
SECONDS |= dict.fromkeys(("eager_bytes", "fused_bytes", "score_bytes"), 7e-11)
SECONDS |= {"course_parameters": 4e-9, "state_bytes": 4e-11, "kernels": 4e-6, "gaps": 0.0}


class NoCompiler:
    """A worker on whose machine nothing can be compiled; every other step takes 1 ms."""

    def __init__(self, measure, arguments, *, silence_s):
        self.run = new_run(arguments)

    def start(self, *, timeout_s=None):
        return None

    def measure(self, configuration, **how):
        if configuration["compile"] != "off":
            return Outcome("error", reason="needs a C++ compiler")
        return Outcome("ok", {"step": Samples("ms", "cpu clock", (1.0,))})

    def close(self):
        pass


def test_next_best_stand_in_for_candidates_that_do_not_run(measured, monkeypatch):
    """Compiled blocks are predicted to be the fastest, and fail."""
    rates = tune_command._cpu_rates
    monkeypatch.setattr(tune_command, "_cpu_rates", lambda plain: replace(rates(plain), seconds=SECONDS))
    monkeypatch.setattr("cs336sys.run.cells.Worker", NoCompiler)
    words = "tune --size tiny --context 32 --device cpu --micro-batch 1 --compile off,block --attention reference"
    words += " --checkpoint none --optimizer course,fused,adamw --measure 2 --steps 1 --warmup 1 --budget 1"
    result = invoke(words, "--format json")
    # As of every sweep in which a cell ends in an error.
    assert result.exit_code == 1, result.output
    (rows,) = [table["rows"] for table in json.loads(result.stdout)["tables"] if table["name"] == "measured"]
    failed = [row for row in rows if row["status"] != "ok"]
    assert len(failed) >= 2
    assert all("compile block" in row["configuration"] for row in failed)
    # Two in place of those that fail, and the plain configuration.
    assert len(rows) - len(failed) == 3, rows
    assert sum(row.get("verdict") == "best" for row in rows) == 1


def test_interrupted_measuring_is_resumed_and_shown_again(measured):
    words, _, path = measured
    before = [cell.configuration["round"] for cell in read_results(path).cells]
    again = invoke(words, "--resume")
    assert again.exit_code == 0, again.output
    rounds = [cell.configuration["round"] for cell in read_results(path).cells]
    assert rounds[: len(before)] == before
    assert rounds.count(1) == before.count(1), "cells of the first round are not measured again"
    shown = invoke("show", path)
    assert shown.exit_code == 0, shown.output
    assert "slower than the best" in shown.output


def test_counted_model_does_its_products_and_calls_attention_once_a_block():
    user = UserCode(model=f"{Path(__file__).parents[1] / 'user_models.py'}:Encoder")
    size = replace(SIZES["tiny"], context=64)
    outcome = count_model(Workload(size, precision="bf16", user=user).configuration(), lambda stage: None)
    model = CountedModel.from_columns(outcome.derived)
    tokens, width, inner = size.context, size.d_model, size.d_ff
    flops = 2 * tokens * (size.num_layers * (4 * width**2 + 2 * width * inner) + width * size.vocab_size)
    one = sum(2 * rows * columns * depth for rows, columns, depth in model.forward.products[0])
    two = sum(2 * rows * columns * depth for rows, columns, depth in model.backward.products[1])
    assert one == flops
    assert two == 2 * 2 * flops
    assert model.attention == [(size.num_heads, size.context, size.head_dim)] * size.num_layers
    # With biases, and two norms.
    blocks = size.num_layers * (4 * width**2 + 2 * width * inner + 9 * width + inner)
    assert model.parameters == blocks + 2 * size.vocab_size * width + size.vocab_size
