"""Predict the time of a training step: work over rates, launches as a lower bound, and exposed communication.

Predictions for GPUs that this project has not measured are compared with times that others published:
``public_steps.json`` has ms by GPU, precision and timed phases, and size and context, of launched steps of batch 4 with
the course's model and AdamW. Sources, as of November 2026:

- A100: an A800-SXM4-80GB, of which only NVLink differs, in ``reports/`` of EnzoDing-rgb/cs336-assignment2-systems.
- RTX 5090: ``result/benchmark_results_rtx5090.md`` of luke396/assignment2-systems, after 5 warm-up steps.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.sharding.step import OWN_SHARDING_STRATEGIES, ShardedStep, predicted_sent_bytes
from cs336sys.accounting.step_time.rates import UNMEASURED, GroupError, Rates, rates_of, short_gpu_name
from cs336sys.accounting.step_time.work import Amounts, CountedModel, StepWork, step_work
from cs336sys.settings.fields import WHAT_RUNS, same_setting, setting
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import ELEMENT_BYTES, SIZES
from cs336sys.settings.strategies import STRATEGIES, Strategy
from cs336sys.settings.training import Configured, Workload

# Our strategies whose ranks compute with whole layers and sequences; of others no time is predicted.
PREDICTED_STRATEGIES = ("naive", "flat", "overlap", "bucketed", *OWN_SHARDING_STRATEGIES)
# What hooks and gathers of a block cost the CPU, in launches, forward and backward: from launched steps of fsdp, whose
# blocks took 2.8 ms each on both models (docs/results/shard-2.7b, shard-xl).
_HOOK_LAUNCHES_PER_BLOCK = {"fsdp": {"forward": 30.0, "backward": 25.0}}


@dataclass(frozen=True)
class StepConfiguration(Configured):
    """Settings of one rank's step.

    Attributes:
        training: its batch is the micro-batch of one rank.
        checkpointing: a strategy of :mod:`cs336sys.accounting.checkpointing`, or ``keep=N``.
        accumulation: micro-batches of a step, whose gradients add up.
        strategy: of parallel training, None with one rank.
        gradient_dtype, transport: as of :class:`~cs336sys.settings.parallel.ParallelWorkload`.
    """

    training: Workload
    checkpointing: str = same_setting(ParallelWorkload, "checkpointing")
    accumulation: int = setting(1, "Micro-batches of a step.", minimum=1, header="micro-batches")
    strategy: str | None = setting(None, choices=PREDICTED_STRATEGIES, several=True, panel=WHAT_RUNS)
    world_size: int = same_setting(ParallelWorkload, "world_size", 1)
    gradient_dtype: str = same_setting(ParallelWorkload, "gradient_dtype")
    transport: str = same_setting(ParallelWorkload, "transport")

    @classmethod
    def of_parallel(cls, workload: ParallelWorkload) -> Self:
        """Describe the step of one rank of ``ddp`` or ``shard``."""
        return cls(
            replace(workload.training, size=workload.share_size),
            workload.checkpointing,
            strategy=workload.strategy,
            world_size=workload.world_size,
            gradient_dtype=workload.gradient_dtype,
            transport=workload.transport,
        )

    @property
    def tokens(self) -> int:
        """Count the tokens of a step, all ranks together."""
        return self.training.tokens * self.accumulation * self.world_size

    @property
    def strategy_record(self) -> Strategy:
        """Return what the strategy holds and sends; one rank holds all."""
        return STRATEGIES[self.strategy or "none"]

    @property
    def exposure_name(self) -> str:
        """Name the strategy as :attr:`.Rates.exposures` do."""
        # What ``shard`` calls none is ``ddp``'s buckets of blocks.
        strategy = self.strategy or ""
        name = {"none": "bucketed"}.get(strategy, strategy)
        return name if self.transport == "collectives" else f"{name}, {self.transport}"

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that a rank sends in a step."""
        if self.strategy is None or self.world_size == 1:
            return 0.0
        training, ranks = self.training, self.world_size
        if self.strategy_record.shares_updates:
            # They do not depend on the batch, which only has to divide: all batches share an entry of the cache.
            whole = replace(training.size, batch_size=ranks)
            return _shared_bytes(ShardedStep(self.strategy, whole, ranks, training.precision, training.attention))
        return 2 * (ranks - 1) / ranks * ELEMENT_BYTES[self.gradient_dtype] * count_parameters(training.size)


_shared_bytes = functools.lru_cache(maxsize=64)(predicted_sent_bytes)


def kind_of(configuration: StepConfiguration) -> str:
    """Name what decides which rates a step needs: precision, and how its blocks and attention run."""
    training = configuration.training
    if training.fused_kernels and not training.is_fused:  # Some of the kernels, not all.
        blocks = "some fused"
    elif training.is_compiled:
        blocks = "compiled, fused" if training.is_fused else "compiled"
    else:
        blocks = "fused" if training.is_fused else "eager"
    attention = "scores" if training.keeps_scores else "flash"
    half = "half" if training.is_half else "fp32"
    return f"{half}, {blocks}, {attention}"


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step.

    Attributes:
        work: what is done, by phase; with several micro-batches, of all of them.
        terms_s: GPU seconds, by the names of :data:`.work.TERMS`.
        phases_s: GPU seconds, by phase.
        launches_s: CPU seconds for launches, by phase; 0 in a CUDA graph.
        communication_s: of communication alone.
        exposed_s: by which communication makes the step longer.
        step_s: the whole step.
        unknown: why there is no number for it: it is unlike everything that was measured.
    """

    work: StepWork
    terms_s: dict[str, float]
    phases_s: dict[str, float]
    launches_s: dict[str, float]
    communication_s: float
    exposed_s: float
    step_s: float
    unknown: tuple[str, ...] = ()

    @property
    def only_ranks_unknown(self) -> bool:
        """Return whether communication alone is unlike what was measured, so that the GPU's time is known."""
        return all(reason.startswith(("ranks", "communication")) for reason in self.unknown)

    @property
    def gpu_s(self) -> float:
        return sum(self.phases_s.values())

    @property
    def waits_for_launches(self) -> bool:
        """Return whether launches on the CPU take longer than the GPU's work, so that the time is the host's."""
        # Predictions themselves are off by 2 % and more on average.
        return self.step_s > 1.02 * (self.gpu_s + self.exposed_s)


def predict_step(
    configuration: StepConfiguration,
    rates: Rates,
    *,
    launch_s: float | None = None,
    counted_model: CountedModel | None = None,
) -> StepTime:
    """Predict a step of our model, or of the user's counted one; without ``launch_s``, with launches of usual hosts."""
    training, micro_batches = configuration.training, configuration.accumulation
    optimizer_share = 1 / configuration.world_size if configuration.strategy_record.shares_updates else 1.0
    if counted_model is None:
        parameters = count_parameters(training.size)
        work = step_work(training, configuration.checkpointing, optimizer_share=optimizer_share)
    else:
        parameters, work = counted_model.parameters, counted_model.work(training, configuration.checkpointing)
    times_a_step = {"forward": micro_batches, "backward": micro_batches, "optimizer": 1}
    terms_s = Amounts()
    phases_s = {}
    for phase, amounts in work.phases.items():
        seconds = {term: times_a_step[phase] * amount * rates.seconds[term] for term, amount in amounts.items()}
        phases_s[phase] = sum(seconds.values())
        terms_s.add(seconds)
    # Gradients of each further micro-batch are added to those before: two reads and a write of fp32.
    adding_s = (micro_batches - 1) * 12 * parameters * rates.seconds["fused_bytes"]
    phases_s["backward"] += adding_s
    terms_s["fused_bytes"] += adding_s
    launch_s = rates.usual_launch_s if launch_s is None else launch_s
    if training.uses_graphs:
        launch_s = 0.0
    hooks = _HOOK_LAUNCHES_PER_BLOCK.get(configuration.strategy or "", {})
    launches_s = {
        phase: times_a_step[phase] * launch_s * (count + training.size.num_layers * hooks.get(phase, 0.0))
        for phase, count in work.launches.items()
    }
    # The configuration counts those of our model; a user's may have another number of parameters.
    sent_bytes = configuration.sent_bytes * parameters / count_parameters(training.size)
    communication_s, exposed_s, unmeasured_communication = _communication_s(configuration, rates, sent_bytes)
    step_s = step_seconds(phases_s, launches_s) + exposed_s
    unmeasured = _unmeasured_reasons(configuration, rates, is_ours=counted_model is None)
    unknown = (*unmeasured_communication, *unmeasured)
    return StepTime(work, dict(terms_s), phases_s, launches_s, communication_s, exposed_s, step_s, unknown)


def step_seconds(phases_s: dict[str, float], launches_s: dict[str, float]) -> float:
    """Return when the GPU is done: each phase ends after its launches, and after the phase before it."""
    launched_s = done_s = 0.0
    for phase, gpu_s in phases_s.items():
        launched_s += launches_s.get(phase, 0.0)
        done_s = max(launched_s, done_s + gpu_s)
    return done_s


def _communication_s(
    configuration: StepConfiguration, rates: Rates, sent_bytes: float
) -> tuple[float, float, tuple[str, ...]]:
    """Return the seconds of communication alone, those by which it makes the step longer, and what was not measured."""
    if configuration.strategy is None or configuration.world_size == 1:
        return 0.0, 0.0, ()
    exposure = rates.exposures.get(configuration.exposure_name)
    if exposure is None:
        return 0.0, 0.0, (f"communication of {configuration.exposure_name}",)
    alone_s = sent_bytes / exposure.bytes_per_s
    exposed_share = exposure.exposed
    if not configuration.training.is_half and exposure.exposed_fp32 is not None:
        exposed_share = exposure.exposed_fp32
    return alone_s, exposed_share * alone_s, ()


def ranged_quantities(configuration: StepConfiguration) -> dict[str, float]:
    """Return the quantities of a step that must lie within :attr:`.Rates.ranges`, by the names of these."""
    size = configuration.training.size
    return {
        "d_model": size.d_model,
        "tokens": configuration.training.tokens,
        "context": size.context,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab_size,
        "ranks": configuration.world_size,
    }


def _unmeasured_reasons(configuration: StepConfiguration, rates: Rates, *, is_ours: bool) -> Sequence[str]:
    """Say in what a step is unlike all that was measured; of a user's model (not ``is_ours``) no width is known."""
    if rates.kinds == UNMEASURED:  # Such rates are not from steps, and so serve any.
        return ()
    kind = kind_of(configuration)
    reasons = [] if kind in rates.kinds else [f"steps in {kind}"]
    # tools/fit_rates.py adds this kind if any step that was measured had keep=N.
    if kept_blocks(configuration.checkpointing) is not None and "keep" not in rates.kinds:
        reasons.append("--checkpoint keep=N")
    for name, value in ranged_quantities(configuration).items():
        if not is_ours and name in ("d_model", "head_dim", "vocab_size"):
            continue
        least, most = rates.ranges[name]
        if not least <= value <= most:
            reasons.append(f"{name.replace('_', ' ')} {value:,} (measured: {least:,} to {most:,})")
    return reasons


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
