"""The time and memory of steps on paper, against every saved cell of docs/results and against counted operations."""

import json
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fit_rates
import numpy as np
import pytest
import scipy

from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.hardware import Ceilings
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.step_time import rates, work
from cs336sys.accounting.step_time.memory import step_moments, step_peak_bytes
from cs336sys.accounting.step_time.prediction import StepConfiguration, predict_step
from cs336sys.accounting.step_time.public_steps import public_errors, public_note
from cs336sys.errors import UsageError
from cs336sys.results.model import read_results
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload

FOLDER = Path(__file__).parents[2] / "docs" / "results"

# Cells that are left out, and why: their peak is not their configuration's alone.
OTHER_PEAKS = {
    "interleaved with others in one process": lambda cell, file: "interleave" in cell.configuration,
    "measured before gradients of copies stayed in half precision": lambda cell, file: file == "bench-fused-h200",
    "after other cells in one process, which left workspaces": lambda cell, file: file.startswith(
        ("bench-graph-peer", "bench-step-again", "bench-turn")
    ),
}


# From then on a process gave cuBLAS's workspaces back after each cell (free_gpu_memory).
WORKSPACES_GIVEN_BACK = "2026-11-23T03:30"


def left_workspaces(cell, results):
    """GiB of cuBLAS's workspaces, 32 MiB each, that a process of ``ddp`` held from what it had run in CUDA graphs.

    Two for each step without communication that it has timed, four for each cell, two for each of a cell's two checks.
    """
    is_ddp = cell.command == "ddp" and cell.configuration["cuda_graph"] == "on"
    if not is_ddp or results.runs[cell.run_id].time > WORKSPACES_GIVEN_BACK:
        return 0.0
    run = [other for other in results.cells if other.run_id == cell.run_id]
    until = run[: run.index(cell) + 1]
    without = {(other.configuration["size"], other.configuration["gradient_dtype"]) for other in until}
    return (4 * len(until) + 2 * len(without)) * 32 / 1024


@pytest.fixture(scope="module")
def saved():
    files = sorted(FOLDER.glob("*.jsonl.gz"))
    return {path.name.removesuffix(".jsonl.gz"): read_results(path) for path in files}


@pytest.fixture(scope="module")
def calibrated():
    return fit_rates.calibrate(*fit_rates.read_together([FOLDER]))


def test_rates_of_the_package_are_those_that_saved_cells_tell(calibrated):
    assert json.loads(rates.H200.read_text()) == json.loads(calibrated.rates.to_json())


def test_steps_whose_pace_the_gpu_sets_are_predicted_within_6_percent(calibrated):
    errors = {error.group: error for error in calibrated.rates.errors}
    bound = [error for group, error in errors.items() if "launches" not in group]
    assert sum(error.cells for error in bound) > 150
    for error in bound:
        assert error.mean_percent < 6, error
        named = "naive" in error.worst
        assert abs(error.worst_percent) < (25 if named else 20), error


def test_predicted_best_is_as_good_as_the_measured_best_in_nine_groups_of_ten(calibrated):
    good, compared = calibrated.best_of
    assert compared > 70
    assert good >= 0.9 * compared


def test_most_uneven_host_is_named_with_two_steps_of_equal_launches(calibrated, saved):
    """The same 2,454 launches (740 forward, 1,326 backward, half of 777 updating) at two contexts, in one run."""
    seconds = {}
    for cell in saved["bench-flash-sdpa-small-xl-h200"].cells:
        settings = cell.configuration
        if (settings["size"], settings["compile"], settings["attention"]) == ("small", "off", "flash"):
            seconds[settings["context"]] = cell.samples["step"].median / 1e3
    short, long = (f"{1e6 * seconds[context] / 2454.5:.1f}" for context in (512, 2048))
    words = "compile off flash course kernels reference"
    assert (
        calibrated.uneven_host == f"{short} us each in small s512 bf16 {words} and {long} in small s2048 bf16 {words}"
    )


def test_rates_are_physical(calibrated):
    """Slower than the datasheet of an H200, and not by more than three times where a term is one kernel's."""
    rate = {term: 1 / second for term, second in calibrated.rates.seconds.items()}
    assert 500e12 < rate["half_products"] < 989e12
    assert 30e12 < rate["full_products"] < 66.9e12
    for term in ("eager_bytes", "fused_bytes", "score_bytes", "state_bytes"):
        assert 1.6e12 < rate[term] < 4.8e12, term
    for term in ("flash_forward", "flash_backward"):
        assert 330e12 < rate[term] < 989e12, term


def test_least_squares_is_that_of_scipy():
    generator = np.random.default_rng(0)
    for _ in range(20):
        matrix, right = generator.normal(size=(30, 6)), generator.normal(size=30)
        ours = fit_rates.non_negative_least_squares(matrix.T @ matrix, matrix.T @ right)
        assert np.allclose(ours, scipy.optimize.nnls(matrix, right)[0], atol=1e-6)


def test_kernels_are_as_many_as_profiles_count(saved):
    """Of eager steps and of fused ones; cuBLAS splits some products of few tokens into two kernels."""
    compared = 0
    for cell in saved["nsys-h200"].cells + saved["nsys-graph-h200"].cells:
        training = Workload.from_configuration(cell.configuration)
        profile = cell.derived["profile"]
        counted = Counter({phase["name"]: phase["kernels"] / profile["step"]["count"] for phase in profile["phases"]})
        counted["forward"] += counted.pop("loss", 0)
        for phase, amounts in work.step_work(training).phases.items():
            assert amounts["kernels"] == pytest.approx(counted[phase], rel=0.16), (cell.configuration, phase)
            compared += 1
    assert compared > 70


def test_steps_of_a_cpu_waste_no_multiprocessors():
    """So twice the batch is twice the work of products and of attention."""
    size = replace(SIZES["tiny"], context=128)
    one, two = (
        work.step_work(Workload(replace(size, batch_size=batch), attention="flash", device="cpu")).forward
        for batch in (1, 2)
    )
    for name in ("full_products", "flash_forward"):
        assert two[name] == pytest.approx(2 * one[name]), name
    # Two products of half the square; two layers of four heads.
    assert one["flash_forward"] == 2 * 2 * 4 * 128 * 128 * 32


def configuration(**settings):
    settings = {"precision": "bf16", "attention": "flash", "optimizer": "fused", "compile": "block"} | settings
    return StepConfiguration(Workload(SIZES["xl"], **settings))


def test_other_gpus_are_scaled_by_their_datasheets():
    h200, b200 = rates.h200_rates(), rates.rates_of("b200")
    assert b200.seconds["half_products"] == pytest.approx(h200.seconds["half_products"] * 989.4 / 2250)
    assert b200.seconds["fused_bytes"] == pytest.approx(h200.seconds["fused_bytes"] * 4.8 / 7.7)
    assert b200.exposures["bucketed"].bytes_per_s == pytest.approx(2 * h200.exposures["bucketed"].bytes_per_s)
    without_nvlink = rates.rates_of("rtx4090").exposures["fsdp"]
    assert without_nvlink.bytes_per_s == pytest.approx(h200.exposures["fsdp"].bytes_per_s * 64 / 900)
    assert "scaled by datasheets" in b200.error_note
    with pytest.raises(UsageError, match="no datasheet is known"):
        rates.rates_of("h20")


def test_other_gpus_get_the_error_on_steps_that_others_published():
    a100 = {error.group: error for error in public_errors(rates.rates_of("a100"))}
    assert [(group, error.cells) for group, error in a100.items()] == [
        ("A100-SXM4-80GB fp32", 4),
        ("A100-SXM4-80GB bf16", 3),
    ]
    bf16 = a100["A100-SXM4-80GB bf16"]
    assert bf16.mean_percent < 10
    assert abs(bf16.worst_percent) < 15
    (rtx5090,) = public_errors(rates.rates_of("rtx5090"))
    # Forward, backward and optimizer of the published step, in 178.1 ms.
    medium = StepConfiguration(Workload(replace(SIZES["medium"], context=512, batch_size=4), "train", "fp32"))
    error = 100 * (1e3 * predict_step(medium, rates.rates_of("rtx5090")).step_s / 178.1 - 1)
    assert abs(error) <= abs(rtx5090.worst_percent)
    assert public_note(rates.rates_of("rtx5090")).endswith(f"published: {rtx5090}.")
    assert public_note(rates.h200_rates()) is None
    for error in (*a100.values(), rtx5090):
        assert str(error) in public_note(rates.rates_of("b200"))


def test_ceilings_scale_the_rates_of_the_h200(tmp_path):
    h200, results = rates.h200_rates(), Path(__file__).parents[2] / "docs/results"
    own = rates.read_rates(results / "ceilings-h200.json")
    assert own.seconds == pytest.approx(h200.seconds, rel=1e-3)
    assert own.usual_launch_s == pytest.approx(h200.usual_launch_s, rel=1e-3)

    path = tmp_path / "ceilings.json"
    Ceilings("NVIDIA L40S", {"fp32": 51.12 / 2, "bf16": 769.3 / 3}, 4244 / 5, 9.161 / 2, link_gbps=20.0).write(path)
    found = rates.read_rates(path)
    times = {"full_products": 2, "full_scores": 2, "half_products": 3, "flash_forward": 3, "fused_bytes": 5, "gaps": 1}
    for term, factor in times.items():
        assert found.seconds[term] == pytest.approx(factor * h200.seconds[term]), term
    assert found.launch_s == pytest.approx(h200.launch_s / 2)
    exposed = {name: one.bytes_per_s for name, one in h200.exposures.items()}
    assert {name: one.bytes_per_s for name, one in found.exposures.items()} == pytest.approx(
        {name: rate * 20 / 393 for name, rate in exposed.items()}
    )
    assert not own.exposures, "one GPU has no link"
    two = rates.read_rates(results / "ceilings-x2-h200.json")
    assert {name: one.bytes_per_s for name, one in two.exposures.items()} == pytest.approx(exposed, rel=1e-3)
    assert found.error_note.endswith("Rates of NVIDIA L40S are scaled by what doctor --ceilings measured.")
    with pytest.raises(UsageError, match="those of NVIDIA L40S, not of NVIDIA H200"):
        rates.rates_of("h200", found)


def test_files_that_hold_no_rates_are_refused(tmp_path):
    path = tmp_path / "rates.json"
    for text in ("", "[]", "{}", '{"seconds": 3}', '{"tflops": 3}', '{"gpu": "A", "tflops": {"fp32": 1, "bf16": 0}}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="holds no rates"):
            rates.read_rates(path)


def test_memory_is_that_of_saved_cells(saved):
    """Within 1 % on average, and never under by more than 2 %, where a cell's peak is its configuration's alone."""
    errors = {}
    for file, results in saved.items():
        steps = [(step.configuration, step.cell) for step in fit_rates.measured_steps(results)]
        for cell in results.cells:
            settings = cell.configuration
            if cell.command == "memprof" and cell.status == "ok" and settings["mode"] == "train":
                workload = MemoryWorkload.from_configuration(settings)
                steps.append((StepConfiguration(workload.training, workload.checkpointing), cell))
        for one, cell in steps:
            peak = cell.derived.get("peak_gib")
            if peak is None or any(applies(cell, file) for applies in OTHER_PEAKS.values()):
                continue
            peak -= left_workspaces(cell, results)
            error = 100 * (step_peak_bytes(one) / GIB / peak - 1)
            errors.setdefault((cell.command, one, round(peak, 2)), (error, file))
    assert len(errors) > 130
    assert statistics.fmean(abs(error) for error, _ in errors.values()) < 1
    under = {key: error for key, error in errors.items() if error[0] < -2}
    assert not under


@pytest.mark.parametrize("strategy", ["bucketed", "overlap", "naive"])
def test_gradients_sent_in_half_precision_need_a_copy_until_all_are_waited_for(strategy):
    """Of fp32 gradients; those that fused kernels and AdamW leave in bf16 are sent as they are."""
    training = replace(configuration(optimizer="fused").training, kernels="reference")
    copied = StepConfiguration(training, "block", strategy=strategy, world_size=2, gradient_dtype="bf16")
    in_place = replace(copied, gradient_dtype="fp32")
    gradients = 4 * count_parameters(training.size)
    assert max(step_moments(copied), key=lambda moment: moment.total).moment == "gradients sent"
    assert step_peak_bytes(copied) - step_peak_bytes(in_place) == pytest.approx(gradients / 2, rel=0.03)
    fused = replace(copied, training=replace(training, kernels="fused", optimizer="adamw"))
    assert step_peak_bytes(fused) < step_peak_bytes(replace(fused, gradient_dtype="fp32"))
