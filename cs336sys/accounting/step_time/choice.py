"""Choose among configurations: which fit, which are the fastest for their memory, and what more memory would buy."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.step_time.memory import step_memory
from cs336sys.accounting.step_time.prediction import StepConfiguration, StepTime, predict_step
from cs336sys.accounting.step_time.rates import Rates
from cs336sys.accounting.step_time.space import Space
from cs336sys.accounting.step_time.work import CountedModel
from cs336sys.settings.choices import STATE_DTYPES
from cs336sys.settings.strategies import Strategy


@dataclass(frozen=True)
class Change:
    """One change to a training script.

    Attributes:
        name: for tables.
        lines: PyTorch code, with ``model``, ``block``, ``optimizer``, ``loss`` and the like as the script's own names.
        cost: what it costs, or an empty text.
    """

    name: str
    lines: tuple[str, ...]
    cost: str = ""


_START_UP = "minutes of start-up"
# By the setting of a workload and its value.
_CHANGES = {
    ("precision", "bf16"): Change(
        "bf16 autocast",
        ('with torch.autocast("cuda", dtype=torch.bfloat16):', "    loss = loss_function(model(inputs), targets)"),
    ),
    ("attention", "sdpa"): Change(
        "torch's attention", ("output = F.scaled_dot_product_attention(q, k, v, is_causal=True)",)
    ),
    ("attention", "flash"): Change(
        "FlashAttention kernels",
        ("from cs336sys.kernels.attention import flash_attention", "output = flash_attention(q, k, v, is_causal=True)"),
    ),
    ("kernels", "fused"): Change("fused kernels", ("from cs336sys.kernels.fuse import fuse", "fuse(model)")),
    ("optimizer", "fused"): Change(
        "torch's fused AdamW", ("optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",)
    ),
    ("compile", "block"): Change(
        "compile each block", ("for block in model.layers:", "    block.compile()"), _START_UP
    ),
    ("compile", "model"): Change("compile the model", ("model = torch.compile(model)",), _START_UP),
    ("cuda_graph", "on"): Change(
        "CUDA graph",
        (
            "graph = torch.cuda.CUDAGraph()  # after a few steps of warm-up on a side stream",
            "with torch.cuda.graph(graph):",
            "    static_loss = loss_function(model(static_inputs), static_targets); static_loss.backward()",
            "static_inputs.copy_(inputs); static_targets.copy_(targets); graph.replay(); optimizer.step()",
        ),
        "fixed shapes; a pool of memory of its own",
    ),
}


def own_adamw(state_dtype: str) -> Change:
    """Return this project's AdamW, its moments in ``state_dtype``."""
    step = f'optimizer = AdamW(model.parameters(), lr=lr, state_dtype="{state_dtype}")'
    cost = "moments are rounded to bf16" if STATE_DTYPES[state_dtype].moment_bytes == 4 else ""
    return Change(f"AdamW, {state_dtype} state", ("from cs336sys.kernels.adamw import AdamW", step), cost)


def checkpoint_blocks(every: int = 1) -> Change:
    """Return activation checkpointing around each block, or around groups of so many."""
    name, part = "checkpoint each block", "block"
    lines = ["for block in model.layers:"]
    if every > 1:
        name, part = f"checkpoint groups of {every} blocks", "group"
        lines = [f"for first in range(0, len(model.layers), {every}):"]
        lines.append(f"    group = nn.Sequential(*model.layers[first : first + {every}])")
    call = f"    x = checkpoint({part}, x, use_reentrant=False)"
    code = ("from torch.utils.checkpoint import checkpoint", *lines, call)
    return Change(name, code, "one more forward pass of the blocks")


def micro_batches(sequences: int, count: int) -> Change:
    """Return gradient accumulation over ``count`` micro-batches of ``sequences``."""
    lines = (
        f"for part, target in zip(inputs.split({sequences}), targets.split({sequences})):",
        f"    (loss_function(model(part), target) / {count}).backward()",
        "optimizer.step(); optimizer.zero_grad()",
    )
    return Change(f"{count} micro-batches of {sequences}", lines, "smaller products; gradients are held throughout")


def share_state(strategy: Strategy, gradient_dtype: str = "fp32") -> Change:
    """Return a strategy of data parallel training."""
    if strategy.shards_weights:
        lines = ("from cs336sys.parallel.fsdp import FSDP", "model = FSDP(model, compute_dtype=torch.bfloat16)")
        return Change("fully sharded", lines, "weights are gathered twice a step")
    if strategy.shares_updates:
        flat = ", flat=True" if strategy.reduces_slices else ""
        lines = (
            "from cs336sys.parallel.sharded_optimizer import ShardedOptimizer",
            f"optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW{flat}, lr=lr, fused=True)",
        )
        return Change("sharded optimizer", lines, "updated parameters are sent to all ranks")
    half = ", gradient_dtype=torch.bfloat16" if gradient_dtype == "bf16" else ""
    bucketed = (
        "from cs336sys.parallel.ddp import BucketedDDP",
        f'model = BucketedDDP(model, "block"{half})',
        "loss.backward(); model.finish_gradient_synchronization(); optimizer.step()",
    )
    return Change("data parallel in buckets", bucketed, "every rank holds all state")


# What more memory is asked about.
MORE_MEMORY = 20 * GIB


@dataclass(frozen=True)
class Candidate:
    """A configuration with its predicted time and memory."""

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
    """Predict the time and memory of each configuration."""
    candidates = []
    for configuration in configurations:
        if counted_model is None:
            memory = step_memory(configuration).total
        else:
            training, checkpointing = configuration.training, configuration.checkpointing
            memory = counted_model.memory(training, checkpointing, configuration.accumulation)
        time = predict_step(configuration, rates, launch_s=launch_s, counted_model=counted_model)
        candidates.append(Candidate(configuration, time, memory))
    return candidates


@dataclass(frozen=True)
class Choice:
    """All candidates of a space, the fastest first.

    Attributes:
        known: those whose time is known.
        limit: of memory, bytes.
        refused: how many combinations cannot run, by reason.
        unknown: how many are unlike what was measured, by reason.
    """

    predicted: Sequence[Candidate]
    limit: float
    refused: Counter[str]
    unknown: Counter[str]

    @cached_property
    def fitting(self) -> list[Candidate]:
        """Return candidates that fit, the fastest first."""
        return [candidate for candidate in self.predicted if candidate.memory <= self.limit]

    @cached_property
    def too_large(self) -> list[Candidate]:
        """Return candidates that would be faster than all that fit."""
        best = self.fitting[0].tokens_per_s if self.fitting else 0.0
        faster = [candidate for candidate in self.predicted if candidate.tokens_per_s > best]
        return [candidate for candidate in faster if candidate.memory > self.limit]

    @cached_property
    def front(self) -> list[Candidate]:
        """Return the Pareto front: those that no other beats in both tokens/s and memory, least memory first."""
        front: list[Candidate] = []
        for candidate in sorted(self.predicted, key=lambda candidate: (candidate.memory, -candidate.tokens_per_s)):
            if not front or candidate.tokens_per_s > front[-1].tokens_per_s:
                front.append(candidate)
        return front

    def best_within(self, limit: float) -> Candidate | None:
        """Return the fastest that fits into so much."""
        return next((candidate for candidate in self.predicted if candidate.memory <= limit), None)


def choose(
    space: Space, rates: Rates, limit: float, launch_s: float | None = None, counted_model: CountedModel | None = None
) -> Choice:
    """Evaluate a whole space, of our model or of the user's."""
    configurations, refused = space.configurations()
    candidates = evaluate(configurations, rates, launch_s, counted_model)
    unknown = Counter(candidate.time.unknown[0] for candidate in candidates if candidate.time.unknown)
    predicted = [candidate for candidate in candidates if not candidate.time.unknown]
    return Choice(sorted(predicted, key=lambda candidate: candidate.order), limit, refused, unknown)


def measuring_command(configuration: StepConfiguration) -> str:
    """Return the command of this project that measures a configuration."""
    training, size = configuration.training, configuration.training.size
    ranks = configuration.world_size
    arguments = ["cs336sys", "bench"]
    if configuration.accumulation > 1 or (ranks == 1 and configuration.checkpointing != "none"):
        arguments = ["cs336sys", "tune"]
    elif ranks > 1:
        record = configuration.strategy_record
        arguments = ["cs336sys", record.command, "--world-size", str(ranks)]
        arguments += [] if record.has_buckets else ["--strategy", str(configuration.strategy)]
    user = training.user
    user_options = {"--model": user.model, "--loss": user.loss, "--batch": user.batch, "--blocks": user.blocks}
    arguments += [word for option, value in user_options.items() if value is not None for word in (option, value)]
    arguments += ["--size", size.name] if "/" not in size.name else ["--size", "small"]
    if "/" in size.name:
        for field in ("d_model", "d_ff", "num_layers", "num_heads"):
            arguments += [f"--{field.replace('_', '-')}", str(getattr(size, field))]
    is_tuned = arguments[1] == "tune"
    batch = ("--micro-batch", size.batch_size) if is_tuned else ("--batch-size", size.batch_size * ranks)
    arguments += ["--context", str(size.context), *map(str, batch)]
    if is_tuned and ranks > 1:
        arguments += ["--world-size", str(ranks), "--strategy", str(configuration.strategy)]
    if configuration.accumulation > 1:
        arguments += ["--tokens-per-step", str(configuration.tokens)]
    arguments += ["--vocab-size", str(size.vocab_size)] if size.vocab_size != 10_000 else []
    arguments += ["--precision", training.precision, "--compile", training.compile, "--attention", training.attention]
    arguments += ["--kernels", training.kernels, "--optimizer", training.optimizer, "--cuda-graph", training.cuda_graph]
    arguments += ["--state-dtype", training.state_dtype] if training.state_dtype != "fp32" else []
    arguments += ["--checkpoint", configuration.checkpointing] if configuration.checkpointing != "none" else []
    arguments += ["--gradient-dtype", "bf16"] if configuration.gradient_dtype == "bf16" else []
    arguments += ["--measure", "1"] if is_tuned else []
    return shlex.join(arguments)


def changes_of(configuration: StepConfiguration) -> list[Change]:
    """Return the changes that make a plain training script run this configuration."""
    training = configuration.training

    def chosen(*settings: str) -> list[Change]:
        values = ((setting, getattr(training, setting)) for setting in settings)
        return [_CHANGES[value] for value in values if value in _CHANGES]

    changes = chosen("precision", "attention", "kernels", "optimizer")
    changes += [own_adamw(training.state_dtype)] if training.optimizer_record.is_ours else []
    name, _, count = configuration.checkpointing.partition("=")
    if name in ("block", "every"):
        changes.append(checkpoint_blocks(int(count or 1)))
    elif name != "none":
        kept = kept_blocks(configuration.checkpointing)
        extent = "all but gate and up" if kept is not None else f"as {configuration.checkpointing}"
        changes.append(Change(f"checkpoints, {extent}", ()))
    if configuration.strategy is not None:
        changes.append(share_state(configuration.strategy_record, configuration.gradient_dtype))
    changes += chosen("compile")
    if configuration.accumulation > 1:
        changes.append(micro_batches(training.size.batch_size, configuration.accumulation))
    return changes + chosen("cuda_graph")


def pytorch_lines(configuration: StepConfiguration) -> list[str]:
    """Return a configuration as lines of PyTorch, in the order of a script."""
    return [line for change in changes_of(configuration) for line in (f"# {change.name}", *change.lines)]
