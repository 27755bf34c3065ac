"""Enumerate the configurations of a training step that this project can run, and say why others are left out."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from cs336sys.accounting.checkpointing import SUBLAYERS, kept_blocks, parse_checkpointing
from cs336sys.accounting.step_time.prediction import StepConfiguration
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
# Micro-batches that are tried: powers of two up to this.
LARGEST_MICRO_BATCH = 64


def refusal(configuration: StepConfiguration) -> str | None:
    """Say why a configuration of our model cannot run; None if it can."""
    training, checkpointing, strategy = configuration.training, configuration.checkpointing, configuration.strategy
    record = configuration.strategy_record
    kept, has_ranks, layers = kept_blocks(checkpointing), configuration.world_size > 1, training.size.num_layers
    if kept is None:
        parse_checkpointing(checkpointing)  # Raises UsageError if there is no such strategy.
    in_graph, is_fused = training.cuda_graph == "on", training.is_fused
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
        sizes = self.fixed.get("micro_batch") or [2**n for n in range(LARGEST_MICRO_BATCH.bit_length())]
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
