"""Enumerate the configurations of a step that this project can run, say why others are left out, and choose: which fit,
which are the fastest for their memory, and what more memory would buy.
"""

import functools
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from cs336sys.accounting.checkpointing import SUBLAYERS, kept_blocks, parse_checkpointing
from cs336sys.accounting.step_time.memory import step_peak_bytes
from cs336sys.accounting.step_time.prediction import StepConfiguration, StepTime, predict_step
from cs336sys.accounting.step_time.rates import Rates
from cs336sys.accounting.step_time.work import CountedModel
from cs336sys.errors import UsageError
from cs336sys.settings.training import ATTENTION, COMPILE_MODES, CUDA_GRAPH, Workload

# Values of each setting that are tried, unless the user fixes it.
SETTINGS: Mapping[str, Collection[Any]] = {
    "compile": COMPILE_MODES,
    "attention": ATTENTION,
    "kernels": ("reference", "fused"),
    "optimizer": (("course", "fp32"), ("fused", "fp32"), ("adamw", "fp32"), ("adamw", "bf16"), ("adamw", "split")),
    "cuda_graph": CUDA_GRAPH,
}
# The same with several ranks: the strategy, and what buckets are sent in.
STRATEGIES = (
    *(("bucketed", "fp32"), ("bucketed", "bf16")),
    *((name, "fp32") for name in ("optimizer", "optimizer-flat", "fsdp")),
)


def refusal(configuration: StepConfiguration) -> str | None:
    """Say why a configuration of our model cannot run; None if it can."""
    training, checkpointing, strategy = configuration.training, configuration.checkpointing, configuration.strategy
    record = configuration.strategy_record
    kept, has_ranks, layers = kept_blocks(checkpointing), configuration.world_size > 1, training.size.num_layers
    if kept is None:
        parse_checkpointing(checkpointing)  # Raises UsageError if there is no such strategy.
    in_graph, is_fused = training.uses_graphs, training.is_fused
    is_whole, accumulates = training.is_compiled_whole, configuration.accumulation > 1
    hides_layers = checkpointing in SUBLAYERS and (training.is_compiled or training.fused_kernels)
    checkpoints, keeps = checkpointing != "none", kept is not None  # keep=N: so many blocks keep gate and up.
    can_keep = record.keeps_gathered and is_fused and not training.keeps_scores
    spans_blocks = kept is None and checkpointing not in ("none", "block")
    splits_weights = is_fused and training.splits_weights and strategy is not None and not record.gathers_ahead
    shards_our_adamw = record.shares_updates and not record.shards_weights and training.optimizer_record.is_ours
    shards_state = has_ranks and not record.has_buckets
    # The first that is true says why.
    rules = (
        (in_graph and training.optimizer_record.is_plain, "a CUDA graph: the course's AdamW counts steps on the CPU"),
        (in_graph and is_whole, "a CUDA graph of a model compiled as a whole: never measured here"),
        (is_fused and is_whole, "fused kernels in a model compiled as a whole: never measured here"),
        (checkpoints and is_whole, "checkpoints in a model compiled as a whole: there are no blocks to see"),
        (hides_layers, f"checkpoint {checkpointing}: compiled or fused blocks show no layers"),
        (kept is not None and kept > layers, f"checkpoint {checkpointing}: the model has {layers} blocks"),
        (keeps and not can_keep, "checkpoint keep=N: it needs fsdp, fused kernels, and attention without scores"),
        (keeps and training.is_compiled, "checkpoint keep=N: compiled blocks show no products"),
        (has_ranks and spans_blocks, "checkpoints of several blocks with several ranks: shard has none and block"),
        (accumulates and in_graph, "micro-batches in a CUDA graph: a replayed backward pass overwrites gradients"),
        (accumulates and shards_state, "micro-batches with a sharded state: gradients are reduced in each"),
        (splits_weights, "weights split in bf16 and low bits, with several ranks: measured with fsdp alone"),
        (shards_our_adamw, "a sharded optimizer with our AdamW: never measured here"),
    )
    return next((reason for is_refused, reason in rules if is_refused), None)


@dataclass(frozen=True)
class Space:
    """All configurations of a model on so many ranks, but for what the user has fixed.

    Attributes:
        training: the model, precision, device: what all configurations share.
        world_size: ranks.
        fixed: values by the names of :data:`SETTINGS`, ``checkpointing``, ``micro_batch`` and ``strategy``.
        tokens_per_step: of all ranks together; micro-batches add up to it. None: each step is one micro-batch.
    """

    training: Workload
    world_size: int = 1
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tokens_per_step: int | None = None

    @property
    def checkpointings(self) -> Sequence[str]:
        """Return the strategies of checkpointing that are tried: no group is larger than the model."""
        if "checkpointing" in self.fixed:
            return self.fixed["checkpointing"]
        layers = self.training.size.num_layers
        groups = [f"every={k}" for k in (2, 4, 8) if k < layers]
        # keep=N, which fsdp alone can do, in steps of a quarter of the blocks.
        kept = sorted({layers * part // 4 for part in range(5)}) if self.world_size > 1 else []
        return ["none", "block", *groups, "sublayer", "nested", *(f"keep={blocks}" for blocks in kept)]

    @property
    def micro_batches(self) -> list[tuple[int, int]]:
        """Return the sequences of a rank at once, and how often in a step; refuse tokens that none adds up to."""
        context = self.training.size.context
        sizes = self.fixed.get("micro_batch") or (1, 2, 4, 8, 16, 32, 64)  # Tried unless the user fixes one.
        if self.tokens_per_step is None:
            return [(size, 1) for size in sizes]
        sequences, rest = divmod(self.tokens_per_step, context * self.world_size)
        if rest or not sequences:
            whole = max(1, round(self.tokens_per_step / (context * self.world_size))) * context * self.world_size
            raise UsageError(
                f"--tokens-per-step {self.tokens_per_step:,}: is no multiple of {context:,} tokens of a sequence times "
                f"{self.world_size} ranks; choose {whole:,}"
            )
        divisors = [(size, sequences // size) for size in sizes if sequences % size == 0]
        if not divisors:  # The user chose the sizes: 1, which is else among them, divides all.
            raise UsageError(f"--micro-batch {sizes[0]}: does not divide the {sequences} sequences of a rank's step")
        return divisors

    def configurations(self) -> tuple[list[StepConfiguration], Counter[str]]:
        """Return all configurations that can run, and how many were left out for each reason."""
        runnable: list[StepConfiguration] = []
        refused = Counter[str]()
        trainings = list(self._trainings(refused))
        # Pairs of a strategy and the dtype of its gradients.
        strategies = self.fixed.get("strategy") or (STRATEGIES if self.world_size > 1 else [(None, "fp32")])
        # A workload that cannot run at all stands for each of its variants.
        variants = len(self.micro_batches) * len(strategies) * len(self.checkpointings)
        for reason in refused:
            refused[reason] *= variants
        for training, (batch, times) in product(trainings, self.micro_batches):
            sized = replace(training, size=replace(training.size, batch_size=batch))
            for checkpointing, (strategy, gradient_dtype) in product(self.checkpointings, strategies):
                step = StepConfiguration(sized, checkpointing, times, strategy, self.world_size, gradient_dtype)
                why = refusal(step)
                if why is None:
                    runnable.append(step)
                else:
                    refused[why] += 1
        return runnable, refused

    def _trainings(self, refused: Counter[str]) -> Iterator[Workload]:
        """Yield the workloads that can run, and count the others in ``refused`` by reason."""
        for combination in product(*(self.fixed.get(name) or values for name, values in SETTINGS.items())):
            settings = dict(zip(SETTINGS, combination, strict=True))
            # SETTINGS has pairs: which optimizer keeps its state in which dtype.
            settings["optimizer"], settings["state_dtype"] = settings["optimizer"]
            try:
                yield replace(self.training, **settings)
            except UsageError as error:
                # The reason, without what could be chosen instead.
                refused[str(error).split(": choose")[0].split("; choose")[0]] += 1


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
    for dimension in () if has_name else ("d_model", "d_ff", "num_layers", "num_heads"):
        arguments += [f"--{dimension.replace('_', '-')}", getattr(size, dimension)]
    batch = ["--micro-batch", size.batch_size] if is_tuned else ["--batch-size", size.batch_size * ranks]
    arguments += ["--context", size.context, *batch, *(sharing if is_tuned else ())]
    arguments += ["--tokens-per-step", configuration.tokens] if configuration.accumulation > 1 else []
    arguments += ["--vocab-size", size.vocab_size] if size.vocab_size != 10_000 else []  # The default.
    for name in ("precision", "compile", "attention", "kernels", "optimizer", "cuda_graph"):
        arguments += [f"--{name.replace('_', '-')}", getattr(training, name)]
    arguments += [] if training.keeps_fp32_state else ["--state-dtype", training.state_dtype]
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
