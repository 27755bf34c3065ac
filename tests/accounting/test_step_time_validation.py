"""Predictions against steps that were measured after the rates: no rate was derived from these files.

``python -m pytest -n0 -s tests/accounting/test_step_time_validation.py`` prints the table of
docs/results/tune-h200.md.
"""

import statistics
from pathlib import Path

from fit_rates import measured_steps

from cs336sys.accounting.step_time.prediction import predict_step
from cs336sys.accounting.step_time.rates import h200_rates
from cs336sys.results.model import read_results

SWEEP = Path(__file__).resolve().parents[2] / "docs/results/validation/tune-exhaustive-h200.jsonl.gz"


def test_unseen_sweeps_are_predicted_and_their_fastest_steps_found():
    steps: dict[str, list[tuple[float, float, str]]] = {}
    errors: dict[str, list[float]] = {}
    for step in measured_steps(read_results(SWEEP)):
        predicted_s = predict_step(step.configuration, h200_rates()).step_s
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
