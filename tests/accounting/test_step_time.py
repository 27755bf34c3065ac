"""The time and memory of steps on paper, against every saved cell of docs/results and against counted operations."""

import json
import statistics
from collections import Counter
from pathlib import Path

import fit_rates
import pytest

from cs336sys.accounting.hardware import Ceilings
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.step_time import rates, work
from cs336sys.accounting.step_time.memory import step_peak_bytes
from cs336sys.accounting.step_time.prediction import StepConfiguration, predict_step
from cs336sys.errors import UsageError
from cs336sys.results.model import read_results
from cs336sys.settings.profiling import MemoryWorkload
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


def test_unseen_sweeps_are_predicted_and_their_fastest_steps_found():
    """No rate was derived from this file. ``-n0 -s -k unseen_sweeps`` prints the table of docs/results/tune-h200.md."""
    sweep = FOLDER / "validation" / "tune-exhaustive-h200.jsonl.gz"
    steps: dict[str, list[tuple[float, float, str]]] = {}
    errors: dict[str, list[float]] = {}
    for step in fit_rates.measured_steps(read_results(sweep)):
        predicted_s = predict_step(step.configuration, rates.h200_rates()).step_s
        training = step.configuration.training
        steps.setdefault(training.size.name, []).append((step.seconds, predicted_s, step.label))
        errors.setdefault(training.cuda_graph, []).append(100 * (predicted_s / step.seconds - 1))
    for size, found in steps.items():
        assert len(found) == 24
        best, chosen = min(found), min(found, key=lambda one: one[1])
        words = f"measured {1e3 * best[0]:.2f} ms, predicted {1e3 * chosen[1]:.2f} ms"
        print(f"\n{size}: fastest of 24: {best[2]}; predicted to be: {chosen[2]}; {words}", end="")
        assert chosen[0] <= 1.03 * best[0]
    for graph, percents in errors.items():
        mean, worst = statistics.fmean(map(abs, percents)), max(percents, key=abs)
        print(f"\nCUDA graph {graph}: {len(percents)} steps, mean {mean:.1f} %, worst {worst:+.1f} %", end="")
    assert statistics.fmean(map(abs, errors["on"])) <= 6
    assert max(map(abs, errors["on"])) <= 20
