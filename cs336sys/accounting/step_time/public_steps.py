"""Compare predictions for GPUs that this project has not measured with the times that others published.

``public_steps.json`` has ms by GPU, precision and timed phases, and size and context: of launched steps of batch 4 with
the course's model and AdamW. Sources, as of November 2026:

- A100: an A800-SXM4-80GB, of which only NVLink differs, in ``reports/`` of EnzoDing-rgb/cs336-assignment2-systems.
- RTX 5090: ``result/benchmark_results_rtx5090.md`` of luke396/assignment2-systems, after 5 warm-up steps.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path

from cs336sys.accounting.step_time.prediction import StepConfiguration, predict_step, step_seconds
from cs336sys.accounting.step_time.rates import GroupError, Rates, rates_of, short_gpu_name
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload

_TIMED_PHASES = {"step": ("forward", "backward", "optimizer"), "gradients": ("forward", "backward")}


@functools.cache
def _public_steps() -> dict[str, dict[str, dict[str, float]]]:
    return json.loads(Path(__file__).with_name("public_steps.json").read_text())


def public_errors(rates: Rates) -> list[GroupError]:
    """Return the errors of predictions by these rates, of published steps on their GPU, by precision."""
    groups = []
    for group, steps in _public_steps().get(rates.gpu, {}).items():
        precision, timed = group.split()
        errors = {}
        for name, measured_ms in steps.items():
            size_name, context = name.split()
            size = replace(SIZES[size_name], context=int(context), batch_size=4)  # As all were published.
            time = predict_step(StepConfiguration(Workload(size, "train", precision)), rates)
            phases_s = {phase: time.phases_s[phase] for phase in _TIMED_PHASES[timed]}
            errors[name] = 100 * (1e3 * step_seconds(phases_s, time.launches_s) / measured_ms - 1)
        worst = max(errors, key=lambda step: abs(errors[step]))
        mean = sum(map(abs, errors.values())) / len(errors)
        groups.append(GroupError(f"{short_gpu_name(rates.gpu)} {precision}", len(errors), mean, errors[worst], worst))
    return groups


def public_note(rates: Rates) -> str | None:
    """Say how far predictions are from published steps: of this GPU, or of all where it has none.

    None for rates of a GPU that this project measured.
    """
    if rates.scaled_from is None:
        return None
    errors = public_errors(rates)
    label = "Error on steps that others published"
    if not errors:
        errors = [error for gpu in _public_steps() for error in public_errors(rates_of(gpu))]
        label += f", none of them of {short_gpu_name(rates.gpu)}"
    return f"{label}: {'; '.join(map(str, errors))}."
