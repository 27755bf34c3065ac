"""Choose among configurations: which fit, which are the fastest for their memory, and what more memory would buy."""

import functools
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cs336sys.accounting.step_time.memory import step_peak_bytes
from cs336sys.accounting.step_time.prediction import StepConfiguration, StepTime, predict_step
from cs336sys.accounting.step_time.rates import Rates
from cs336sys.accounting.step_time.space import Space
from cs336sys.accounting.step_time.work import CountedModel


@dataclass(frozen=True)
class Candidate:
    """A configuration with its predicted time, and memory of a rank in bytes."""

    configuration: StepConfiguration
    time: StepTime
    memory: float

    @property
    def tokens_per_s(self) -> float:
        return self.configuration.tokens / self.time.step_s

    @property
    def order(self) -> tuple[float, ...]:
        """Sort by: tokens/s, of equal ones by the GPU's work, the launches that a host may be slow at, and memory."""
        launches_s = sum(self.time.launches_s.values())
        return (-self.tokens_per_s, self.time.gpu_s / self.configuration.tokens, launches_s, self.memory)


def evaluate(
    configurations: Sequence[StepConfiguration],
    rates: Rates,
    launch_s: float | None,
    counted_model: CountedModel | None = None,
) -> list[Candidate]:
    """Predict time (as :func:`predict_step`) and memory of each, of our model or of the user's ``counted_model``."""
    candidates = []
    for configuration in configurations:
        if counted_model is None:
            memory = step_peak_bytes(configuration)
        else:
            training, checkpointing = configuration.training, configuration.checkpointing
            memory = counted_model.memory(training, checkpointing, configuration.accumulation)
        time = predict_step(configuration, rates, launch_s=launch_s, counted_model=counted_model)
        candidates.append(Candidate(configuration, time, memory))
    return candidates


@dataclass(frozen=True)
class Choice:
    """All candidates of a space.

    Attributes:
        predicted: those whose time is known, the fastest first.
        limit: of memory, bytes.
        refused: how many combinations cannot run, by reason.
        unknown: how many are unlike what was measured, by reason, and if there are several by the first.
    """

    predicted: Sequence[Candidate]
    limit: float
    refused: Counter[str]
    unknown: Counter[str]

    @functools.cached_property
    def fitting(self) -> list[Candidate]:
        """Return candidates that fit, the fastest first."""
        return [candidate for candidate in self.predicted if candidate.memory <= self.limit]

    @functools.cached_property
    def faster_but_too_large(self) -> list[Candidate]:
        """Return candidates that would be faster than all that fit."""
        best_rate = self.fitting[0].tokens_per_s if self.fitting else 0.0
        too_large = [candidate for candidate in self.predicted if candidate.memory > self.limit]
        return [candidate for candidate in too_large if candidate.tokens_per_s > best_rate]

    @functools.cached_property
    def front(self) -> list[Candidate]:
        """Return the Pareto front: those that no other beats in both tokens/s and memory, least memory first."""
        front: list[Candidate] = []
        for candidate in sorted(self.predicted, key=lambda candidate: (candidate.memory, -candidate.tokens_per_s)):
            if not front or candidate.tokens_per_s > front[-1].tokens_per_s:
                front.append(candidate)
        return front

    def best_within(self, limit: float) -> Candidate | None:
        """Return the fastest that fits into so many bytes; None if none does."""
        return next((candidate for candidate in self.predicted if candidate.memory <= limit), None)


def choose(
    space: Space, rates: Rates, limit: float, launch_s: float | None = None, counted_model: CountedModel | None = None
) -> Choice:
    """Predict all configurations of a space, of our model or the user's ``counted_model``; ``limit`` is in bytes."""
    configurations, refused = space.configurations()
    candidates = evaluate(configurations, rates, launch_s, counted_model)
    unknown = Counter(candidate.time.unknown[0] for candidate in candidates if candidate.time.unknown)
    predicted = [candidate for candidate in candidates if not candidate.time.unknown]
    return Choice(sorted(predicted, key=lambda candidate: candidate.order), limit, refused, unknown)


def measuring_command(configuration: StepConfiguration) -> str:
    """Return the command of this project that measures a configuration."""
    training, size, ranks = configuration.training, configuration.training.size, configuration.world_size
    # Only tune accumulates micro-batches, or has checkpoints on one rank.
    is_tuned = configuration.accumulation > 1 or (ranks == 1 and configuration.checkpointing != "none")
    record = configuration.strategy_record
    sharing = ["--world-size", ranks] if ranks > 1 else []
    # Buckets are the strategy of ``ddp`` if it gets no option; tune needs the option.
    sharing += ["--strategy", configuration.strategy] if ranks > 1 and (is_tuned or not record.has_buckets) else []
    arguments: list[Any] = ["bench" if ranks == 1 else record.command, *sharing]
    if is_tuned:
        arguments = ["tune"]
    for name in ("model", "loss", "batch", "blocks"):  # Of a user's model; all are None with ours.
        value = getattr(training.user, name)
        arguments += [f"--{name}", value] if value is not None else []
    has_name = "/" not in size.name  # A size with other widths, ``small/512x...``, has no name of its own.
    arguments += ["--size", size.name if has_name else "small"]
    for field in () if has_name else ("d_model", "d_ff", "num_layers", "num_heads"):
        arguments += [f"--{field.replace('_', '-')}", getattr(size, field)]
    batch = ["--micro-batch", size.batch_size] if is_tuned else ["--batch-size", size.batch_size * ranks]
    arguments += ["--context", size.context, *batch, *(sharing if is_tuned else ())]
    arguments += ["--tokens-per-step", configuration.tokens] if configuration.accumulation > 1 else []
    arguments += ["--vocab-size", size.vocab_size] if size.vocab_size != 10_000 else []  # The default.
    for name in ("precision", "compile", "attention", "kernels", "optimizer", "cuda_graph"):
        arguments += [f"--{name.replace('_', '-')}", getattr(training, name)]
    arguments += ["--state-dtype", training.state_dtype] if training.state_dtype != "fp32" else []
    arguments += ["--checkpoint", configuration.checkpointing] if configuration.checkpointing != "none" else []
    arguments += ["--gradient-dtype", "bf16"] if configuration.gradient_dtype == "bf16" else []
    arguments += ["--measure", 1] if is_tuned else []  # How many of its predicted best tune measures.
    return shlex.join(["cs336sys", *map(str, arguments)])


def pytorch_lines(configuration: StepConfiguration) -> list[str]:
    """Return the lines that make a plain training script run this configuration, in the order of a script."""
    strategy = None if configuration.strategy is None else configuration.strategy_record
    text = _template().render(vars(configuration) | {"strategy": strategy})
    return [line for line in text.splitlines() if line]


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("cs336sys.accounting.step_time", ".")
    return Environment(loader=loader, trim_blocks=True, lstrip_blocks=True).get_template("pytorch_lines.jinja")
