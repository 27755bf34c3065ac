"""Derive the rates of ``account step`` and ``tune`` from saved measurements, with the errors of their predictions.

``python tools/fit_rates.py docs/results --write cs336sys/accounting/step_time/h200.json``

Observed are kernel times of profiles (``nsys``), phases replayed from CUDA graphs, and launched steps in which the GPU
is the slower side. Each is a sum of counted work times seconds a unit; the seconds are those of the least relative
squares, none negative. Where launches are the slower side, the step's time is the host's: it tells the cost of a
launch, which differs by a factor of two between the hosts that were measured.
"""

import argparse
import functools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cs336sys.accounting.step_time.prediction import (
    PREDICTED_STRATEGIES,
    StepConfiguration,
    StepTime,
    kind_of,
    predict_step,
    ranged_quantities,
)
from cs336sys.accounting.step_time.rates import Exposure, GroupError, Rates
from cs336sys.accounting.step_time.work import TERMS, Amounts, attention_square, optimizer_work, step_work
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Results, configuration_key, read_results
from cs336sys.settings.parallel import ParallelWorkload, bucket_name
from cs336sys.settings.profiling import ProfileWorkload
from cs336sys.settings.training import Workload

# A launched step tells the GPU's rates if its work takes so many times as long as launches on a slow host.
_SURELY_GPU = 1.3
# It tells the cost of a launch if the GPU needs less than this part of it.
_SURELY_HOST = 0.6
# It waits for launches, and shows how uneven its host is, if the GPU needs less than this part.
_WAITS = 0.7

# Attention alone is observed where it has as many rows (heads times tokens), and head dimensions, as a model's.
_FEW_ROWS, _HEAD_DIMS = 65536, (64, 80, 128)

# Settings by which cells of one configuration differ that change no time.
_PASSED_OVER = ("device", "seed", "warmup", "steps", "round", "interleave", "interleaved", "synchronize")


@dataclass(frozen=True)
class Observation:
    """Work whose time was measured.

    Attributes:
        key: of its configuration: equal for repeated measurements.
        seconds: measured.
        weight: of its squared relative error.
    """

    key: str
    work: Mapping[str, float]
    seconds: float
    weight: float = 1.0


@dataclass(frozen=True)
class MeasuredStep:
    """A saved cell with its step.

    Attributes:
        seconds: the median step.
        without_s: the median step without communication, where it was measured.
        communication_s: communication alone, where it was measured.
    """

    cell: Cell
    configuration: StepConfiguration
    seconds: float
    without_s: float | None = None
    communication_s: float | None = None

    @functools.cached_property
    def key(self) -> str:
        return configuration_key(self.cell.configuration, ignore=_PASSED_OVER)

    @property
    def label(self) -> str:
        """Name it for people: the settings that matter."""
        training = self.configuration.training
        words = [training.size.name, f"s{training.size.context}", training.precision, f"compile {training.compile}"]
        words += [training.attention, training.optimizer, f"kernels {training.kernels}"]
        words += ["graph"] if training.cuda_graph == "on" else []
        words += [self.configuration.strategy] if self.configuration.strategy else []
        ahead = self.cell.configuration.get("prefetch")
        words += [] if ahead is None else [f"prefetch {ahead}"]
        bucket = self.cell.configuration.get("bucket_mb")
        return " ".join(words if bucket is None else [*words, bucket_name(bucket)])


def measured_steps(results: Results) -> list[MeasuredStep]:
    """Return saved cells of steps of our model that trained: of ``bench``, ``ddp`` and ``shard``, on a GPU."""
    steps = []
    for cell in results.cells:
        run = results.runs.get(cell.run_id)
        settings = cell.configuration
        if cell.status != "ok" or settings.get("model") or run is None or not run.machine.get("gpu"):
            continue
        if settings.get("kernels", "reference") not in ("reference", "fused"):
            continue
        if settings.get("prefetch") == 0:
            # FSDP that gathers nothing ahead hides nothing, and is not predicted.
            continue
        if cell.command == "bench" and settings.get("mode") == "train":
            configuration = StepConfiguration(Workload.from_configuration(settings))
        elif cell.command in ("ddp", "shard") and settings["strategy"] in PREDICTED_STRATEGIES:
            configuration = StepConfiguration.of_parallel(ParallelWorkload.from_configuration(settings))
        else:
            continue
        medians = {name: samples.median / 1e3 for name, samples in cell.samples.items() if samples.unit == "ms"}
        without, alone = medians.get("unsynchronized"), medians.get("communication")
        steps.append(MeasuredStep(cell, configuration, medians["step"], without, alone))
    return steps


def profile_observations(cells: Iterable[Cell]) -> list[Observation]:
    """Return kernel times by phase of saved profiles of ``nsys``."""
    found = []
    for cell in cells:
        profile = cell.derived.get("profile")
        if cell.command != "nsys" or cell.status != "ok" or not profile or cell.configuration.get("model"):
            continue
        training = ProfileWorkload.from_configuration(cell.configuration).training
        count = profile["step"]["count"]
        busy_s = {phase["name"]: phase["busy_ns"] / count / 1e9 for phase in profile["phases"]}
        busy_s["forward"] += busy_s.pop("loss", 0.0)
        key = configuration_key(cell.configuration, ignore=_PASSED_OVER)
        for phase, work in step_work(training).phases.items():
            kernels = {term: amount for term, amount in work.items() if term != "gaps"}
            found.append(Observation(key, kernels, busy_s[phase]))
    return found


def attention_observations(cells: Iterable[Cell]) -> list[Observation]:
    """Return forward and backward times of causal attention alone, of ``flash``, in bf16 with the heads of a model."""
    found = []
    for cell in cells:
        settings = cell.configuration
        name = {"auto": "flash", "sdpa-flash": "sdpa"}.get(settings.get("implementation", ""))
        if cell.command != "flash" or cell.status != "ok" or name is None or settings["dtype"] != "bf16":
            continue
        heads, context, head_dim = settings["batch_size"] * settings["heads"], settings["context"], settings["head_dim"]
        if not settings["causal"] or settings.get("window") or settings.get("kv_heads"):
            continue
        if heads * context < _FEW_ROWS or head_dim not in _HEAD_DIMS:
            continue
        key = configuration_key(settings, ignore=_PASSED_OVER)
        flops = attention_square(heads, context, head_dim)
        for phase, count, kernels in (("forward", 2, 1), ("backward", 5, 3)):
            work = {f"{name}_{phase}": count * flops, "kernels": kernels, "gaps": kernels}
            found.append(Observation(key, work, cell.samples[phase].median / 1e3, 0.3))
    return found


def fit(observations: Sequence[Observation]) -> dict[str, float]:
    """Return seconds a unit of each term: least squares of relative errors, none negative."""
    work = np.array([[observation.work.get(term, 0.0) for term in TERMS] for observation in observations])
    scale = work.max(axis=0)
    scale[scale == 0] = 1.0
    weights = np.sqrt([observation.weight for observation in observations])
    seconds = np.array([observation.seconds for observation in observations])
    rows = work / scale * (weights / seconds)[:, None]
    solution = non_negative_least_squares(rows.T @ rows, rows.T @ weights) / scale
    return dict(zip(TERMS, solution.tolist(), strict=True))


def non_negative_least_squares(gram: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve ``gram x = right`` with ``x >= 0`` (Lawson and Hanson 1974, chapter 23)."""
    # A ridge keeps equal columns apart.
    ridged = gram + 1e-9 * np.diag(np.diag(gram))
    solution = np.zeros(len(right))
    used: list[int] = []
    while True:
        slopes = right - gram @ solution
        unused = [i for i in range(len(right)) if i not in used and gram[i, i] > 0]
        best = max(unused, key=slopes.__getitem__, default=None)
        if best is None or slopes[best] <= 1e-9 * right[best]:
            return solution
        used.append(best)
        while used:
            target = np.linalg.solve(ridged[np.ix_(used, used)], right[used])
            current = solution[used]
            negative = target <= 0
            step = min(current[negative] / (current[negative] - target[negative]), default=1.0)
            solution[used] = current + step * (target - current)
            if not negative.any():
                break
            used = [i for i in used if solution[i] > 1e-15]


def _sum(phases: Iterable[Mapping[str, float]]) -> Amounts:
    total = Amounts()
    for phase in phases:
        total.add(phase)
    return total


def phase_observations(steps: Iterable[MeasuredStep]) -> list[Observation]:
    """Return phases of steps of one GPU; the whole step where updates run alongside the backward pass."""
    found = []
    for step in steps:
        training = step.configuration.training
        work = step_work(training).phases
        if training.update == "backward":
            found.append(Observation(step.key, _sum(work.values()), step.seconds))
        else:
            medians = {phase: step.cell.samples[phase].median / 1e3 for phase in work}
            found += [Observation(step.key, work[phase], medians[phase]) for phase in work]
    return found


def _launches(configuration: StepConfiguration) -> float:
    return sum(step_work(configuration.training, configuration.checkpointing).launches.values())


@dataclass(frozen=True)
class Prediction:
    """A saved step, its time as predicted without its configuration, and the group of its error."""

    step: MeasuredStep
    predicted: StepTime
    group: str

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted.step_s / self.step.seconds - 1)


@dataclass(frozen=True)
class Calibration:
    """Rates, and every prediction that was made to find their error.

    Attributes:
        predictions: of all saved steps.
        best_of: how many groups of steps of one run, which differ in configuration alone, there are, and in how many
            the step that was predicted to be the fastest takes at most 3 % more than the fastest one.
        missed: sentences on the others.
        uneven_host: the most unequal times that one host took for equal launches, in words.
    """

    rates: Rates
    predictions: list[Prediction]
    best_of: tuple[int, int]
    missed: list[str]
    uneven_host: str | None = None


def calibrate(results: Results, files: Sequence[str] = ()) -> Calibration:
    """Derive rates from saved cells of one GPU, and their error.

    Raises:
        UsageError: the cells are of several GPUs, or too few.
    """
    steps = measured_steps(results)
    gpus = {str(results.runs[step.cell.run_id].machine["gpu"]) for step in steps}
    if len(gpus) != 1:
        raise UsageError(f"rates describe one GPU model, and these cells come from {', '.join(sorted(gpus)) or 'none'}")
    alone = [step for step in steps if step.configuration.strategy is None]
    profiles = profile_observations(results.cells)
    graphs = [step for step in alone if step.configuration.training.cuda_graph == "on"]
    certain = profiles + attention_observations(results.cells) + phase_observations(graphs)
    if not certain:
        raise UsageError("found no nsys profiles and no bench steps in CUDA graphs, from which rates are derived")
    first = Rates(gpus.pop(), fit(certain), 0.0, 0.0, ranges=defaultdict(lambda: (0, 0)))
    hosts = _launch_costs(alone, first)
    costs = sorted(statistics.median(cost for _, cost in host) for host in hosts.values())
    launch_s, usual_s = (costs[0], statistics.median(costs)) if costs else (0.0, 0.0)
    bound = [step for step in alone if _is_gpu_bound(step, first, usual_s)]
    observations = certain + phase_observations(bound)
    rates = replace(first, seconds=fit(observations), launch_s=launch_s, usual_launch_s=usual_s)
    profiled = [ProfileWorkload.from_configuration(cell.configuration).training for cell in _profiled(results.cells)]
    seen = [step.configuration for step in steps] + [StepConfiguration(training) for training in profiled]
    bands = [ranged_quantities(configuration) for configuration in seen]
    kinds = {kind_of(configuration) for configuration in seen}
    kinds |= {"keep"} if any(one.checkpointing.startswith("keep") for one in seen) else set()
    rates = replace(
        rates,
        ranges={name: (min(band[name] for band in bands), max(band[name] for band in bands)) for name in bands[0]},
        kinds=sorted(kinds),
        files=list(files),
        exposures=_exposures(steps, rates),
    )
    predictions = _leave_one_out(steps, observations, rates)
    best_of, missed = compare_choices(predictions)
    errors = group_errors(predictions)
    uneven = _most_uneven(_launch_costs(alone, rates, _WAITS).values())
    return Calibration(replace(rates, errors=errors), predictions, best_of, missed, uneven)


def _profiled(cells: Iterable[Cell]) -> list[Cell]:
    return [
        cell
        for cell in cells
        if cell.command == "nsys"
        and cell.status == "ok"
        and cell.derived.get("profile")
        and "model" not in cell.configuration
    ]


def _launch_costs(
    steps: Iterable[MeasuredStep], rates: Rates, gpu_part: float = _SURELY_HOST
) -> dict[str, list[tuple[MeasuredStep, float]]]:
    """Return the steps of each host that wait for launches, a host being one run's, and the seconds of a launch."""
    hosts = defaultdict(list)
    for step in steps:
        if step.configuration.training.cuda_graph == "on" or step.configuration.strategy is not None:
            continue
        gpu_s = predict_step(step.configuration, rates, launch_s=0.0).gpu_s
        if gpu_s < gpu_part * step.seconds:
            hosts[step.cell.run_id].append((step, step.seconds / _launches(step.configuration)))
    return hosts


def _most_uneven(hosts: Iterable[Iterable[tuple[MeasuredStep, float]]]) -> str | None:
    """Name the two steps of one host with equal launches that took the most unequal times for them."""
    pairs = []
    for host in hosts:
        alike = defaultdict(list)
        for step, cost in host:
            kind = (_launches(step.configuration), step.configuration.training.attention)
            alike[kind].append((cost, step.label))
        pairs += [(min(found), max(found)) for found in alike.values()]
    if not pairs:
        return None
    (least, fast), (most, slow) = max(pairs, key=lambda pair: pair[1][0] / pair[0][0])
    return f"{1e6 * least:.1f} us each in {fast} and {1e6 * most:.1f} in {slow}"


def _is_gpu_bound(step: MeasuredStep, rates: Rates, launch_s: float) -> bool:
    training = step.configuration.training
    if training.cuda_graph == "on":
        return False
    gpu_s = predict_step(step.configuration, rates, launch_s=0.0).gpu_s
    return gpu_s > _SURELY_GPU * launch_s * _launches(step.configuration)


def _exposures(steps: Sequence[MeasuredStep], rates: Rates, without: str = "") -> dict[str, Exposure]:
    """Return medians over cells of each strategy whose steps do not wait for launches: in graphs, or computed in fp32.

    Of a strategy without such cells all count.
    """
    measured = defaultdict(list)
    for step in steps:
        if step.communication_s and step.without_s and step.key != without and step.configuration.world_size > 1:
            measured[step.configuration.exposure_name].append(step)
    found = {}
    for name, cells in measured.items():
        half = [cell for cell in cells if cell.configuration.training.precision != "fp32"]
        chosen = [cell for cell in half if cell.configuration.training.cuda_graph == "on"] or half
        full = [cell for cell in cells if cell not in half]
        alone = [(cell.configuration.sent_bytes, cell.communication_s or 1.0) for cell in cells]
        rate = statistics.median(sent / seconds for sent, seconds in alone)
        shares = [_exposed(cell, rates) for cell in chosen or full]
        in_full = statistics.median(_exposed(cell, rates) for cell in full) if full else None
        found[name] = Exposure(rate, max(0.0, statistics.median(shares)), in_full and max(0.0, in_full))
    return found


def _exposed(step: MeasuredStep, rates: Rates) -> float:
    """Return by how much of its communication a step is longer than one without."""
    assert step.communication_s is not None
    assert step.without_s is not None
    configuration = step.configuration
    saved_s = 0.0
    if configuration.strategy_record.shares_updates:
        whole = optimizer_work(configuration.training)
        saved_s = (1 - 1 / configuration.world_size) * sum(n * rates.seconds[term] for term, n in whole.items())
    return (step.seconds - (step.without_s - saved_s)) / step.communication_s


def _leave_one_out(
    steps: Sequence[MeasuredStep], observations: Sequence[Observation], rates: Rates
) -> list[Prediction]:
    predictions = []
    fitted: dict[str, Rates] = {}
    hosts = _launch_costs(steps, rates)
    for step in steps:
        if step.key not in fitted:
            others = [one for one in observations if one.key != step.key]
            seconds = rates.seconds if len(others) == len(observations) else fit(others)
            exposures = rates.exposures if step.configuration.strategy is None else _exposures(steps, rates, step.key)
            fitted[step.key] = replace(rates, seconds=seconds, exposures=exposures)
        # The host's cost of a launch, from what else was measured there.
        costs = [cost for other, cost in hosts.get(step.cell.run_id, ()) if other.key != step.key]
        launch_s = statistics.median(costs) if costs else rates.usual_launch_s
        predicted = predict_step(step.configuration, fitted[step.key], launch_s=launch_s)
        if any(reason.startswith("communication") for reason in predicted.unknown):
            continue
        predictions.append(Prediction(step, predicted, _group(step, predicted, launch_s, bool(costs))))
    return predictions


def _group(step: MeasuredStep, predicted: StepTime, launch_s: float, knows_host: bool) -> str:
    """Name the group of a step's error."""
    configuration = step.configuration
    in_graph = configuration.training.cuda_graph == "on"
    if not in_graph and launch_s * _launches(configuration) * _SURELY_GPU > predicted.gpu_s:
        return f"waits for launches of a host that is {'' if knows_host else 'un'}known"
    if configuration.strategy is not None:
        return "several ranks"
    return "one GPU, in a CUDA graph" if in_graph else f"one GPU, launched, {configuration.training.precision}"


def group_errors(predictions: Iterable[Prediction]) -> list[GroupError]:
    """Summarize predictions by group."""
    groups = defaultdict(list)
    for prediction in predictions:
        groups[prediction.group].append(prediction)
    errors = []
    for name, found in sorted(groups.items()):
        worst = max(found, key=lambda one: abs(one.error_percent))
        mean = statistics.fmean(abs(one.error_percent) for one in found)
        errors.append(GroupError(name, len(found), mean, worst.error_percent, worst.step.label))
    return errors


# A choice is as good as the best within so much.
_AS_GOOD = 1.03


def compare_choices(predictions: Iterable[Prediction]) -> tuple[tuple[int, int], list[str]]:
    """Compare the fastest steps as predicted and as measured: see :class:`Calibration`, ``best_of`` and ``missed``."""
    groups: dict[tuple[Any, ...], dict[str, Prediction]] = defaultdict(dict)
    for prediction in predictions:
        step = prediction.step
        training, size = step.configuration.training, step.configuration.training.size
        batch = step.cell.configuration["batch_size"]
        key = (step.cell.run_id, size.name, size.context, batch, training.precision, step.configuration.world_size)
        # Of repeated measurements the fastest.
        known = groups[key].get(step.key)
        if known is None or step.seconds < known.step.seconds:
            groups[key][step.key] = prediction
    good, missed = 0, []
    compared = [list(group.values()) for group in groups.values() if len(group) > 1]
    for group in compared:
        best = min(group, key=lambda one: one.step.seconds)
        # Of two that wait for the same launches, the one with less work is better.
        chosen = min(group, key=lambda one: (one.predicted.step_s, one.predicted.gpu_s))
        good += chosen.step.seconds <= _AS_GOOD * best.step.seconds
        if chosen.step.seconds > _AS_GOOD * best.step.seconds:
            more = 100 * (chosen.step.seconds / best.step.seconds - 1)
            missed.append(f"{chosen.step.label} takes {more:.1f} % more than {best.step.label}")
    return (good, len(compared)), missed


def read_together(paths: Sequence[Path]) -> tuple[Results, list[str]]:
    """Return the runs and cells of these files and folders, and the files' names."""
    names = ("*.jsonl", "*.jsonl.gz")
    files = [
        file for path in paths for file in (sorted(f for n in names for f in path.glob(n)) if path.is_dir() else [path])
    ]
    results = [read_results(file) for file in files]
    runs = {run_id: run for result in results for run_id, run in result.runs.items()}
    return Results(runs, tuple(cell for result in results for cell in result.cells)), [file.name for file in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="of one GPU, or folders: bench, nsys, flash, ddp, shard")
    parser.add_argument("--write", type=Path, help="write the rates to this file, for --rates")
    options = parser.parse_args()
    calibration = calibrate(*read_together(options.results))
    rates = calibration.rates
    for term, unit in TERMS.items():
        if rates.seconds[term]:
            print(f"{term}: {1 / rates.seconds[term]:.4g} {unit}")
    for name, exposure in rates.exposures.items():
        print(f"communication of {name}: {exposure.bytes_per_s:.4g} bytes/s, {exposure.exposed:.0%} exposed")
    print(rates.error_note)
    for error in rates.errors:
        print(f"worst, {error.group}: {error.worst}, {error.worst_percent:+.1f} %")
    good, compared = calibration.best_of
    print(
        f"The predicted fastest is within 3 % of the fastest in {good} of {compared} groups.",
        *calibration.missed,
        sep="\n",
    )
    if calibration.uneven_host is not None:
        print(f"Equal launches of one run took {calibration.uneven_host}.")
    if options.write is not None:
        options.write.write_text(rates.to_json())


if __name__ == "__main__":
    main()
