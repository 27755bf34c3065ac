"""A training workload that several ranks share."""

import contextlib
import math
from dataclasses import dataclass, replace

from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.accounting.sharding.partition import (
    WHOLE_BLOCKS,
    SequenceSplit,
    check_batch,
    heads_refusal,
    mesh_text,
    read_mesh,
    require_heads,
)
from cs336sys.errors import UsageError, choose_from
from cs336sys.settings.fields import LONGEST_S, Configured, Needs, setting
from cs336sys.settings.sizes import MOST_RANKS, PRECISIONS, ModelSize
from cs336sys.settings.strategies import STRATEGIES, HasStrategy, strategies_of
from cs336sys.settings.training import BLOCK_NEEDS, Workload

BUCKETED = "bucketed"
ONLY_BUCKETED = f"only mode {BUCKETED} has buckets of a size; add it to --mode"
DATA_PARALLEL_STRATEGIES, SHARD_STRATEGIES = strategies_of("ddp"), strategies_of("shard")
# Strategies of shard whose ranks split each sequence, and those whose ranks share neither sequences nor layers.
CONTEXT_STRATEGIES = tuple(name for name in SHARD_STRATEGIES if STRATEGIES[name].splits_sequences)
STATE_SHARDING_STRATEGIES = tuple(name for name in SHARD_STRATEGIES if not STRATEGIES[name].inner_dimension)
BACKENDS = ("auto", "gloo", "nccl")


def bucket_name(bucket_mb: float | str) -> str:
    """Name a bucket size: ``25 MB``, ``blocks``."""
    return f"{bucket_mb}s" if isinstance(bucket_mb, str) else f"{bucket_mb:g} MB"


def _names_with(ability: str) -> tuple[str, ...]:
    return tuple(name for name, strategy in STRATEGIES.items() if getattr(strategy, ability))


_LAYERS, _SEQUENCES = _names_with("shares_layers"), _names_with("splits_sequences")
_WITH_BUCKETS, _GATHERING_AHEAD = _names_with("has_buckets"), _names_with("gathers_ahead")
_STRATEGY_NEEDS = (
    Needs("model", (None,), "shares layers of cs336_basics alone; leave out --model", _LAYERS),
    Needs("model", (None,), "gives positions to attention of cs336_basics alone; leave out --model", _SEQUENCES),
    Needs("kernels", ("reference",), "computes with the layers of cs336_basics; leave out --kernels {}", _LAYERS),
    Needs("compile", ("off", "block"), "is compiled by blocks; choose --compile block or off", _LAYERS),
)
_NCCL_NEEDS = Needs("device", ("auto", "cuda"), "communicates between GPUs; choose gloo, or --device cuda", ("nccl",))
_MESH_NEEDS = Needs(
    "strategy",
    _names_with("inner_dimension"),
    "the ranks of strategy '{}' have one dimension; leave it out, or choose a strategy that shares layers or sequences",
)


def parse_bucket(size: float | str) -> float | str:
    """Read the size of buckets, whole blocks or megabytes, or raise a UsageError."""
    if size == WHOLE_BLOCKS:
        return size
    with contextlib.suppress(ValueError):
        if 1e-6 <= float(size) <= 1e6:
            return float(size)
    raise UsageError(f"must be {WHOLE_BLOCKS}, or a number between 1e-06 and 1e+06")


def parse_block_checkpointing(text: str, *others: str) -> str:
    """Read what ranks checkpoint, ``none``, ``block``, ``keep=N`` or one of the ``others``, or raise a UsageError."""
    if kept_blocks(text) is None and text not in ("none", "block", *others):
        raise UsageError(choose_from(text, ("none", "block", "keep=N", *others)))
    return text


@dataclass(frozen=True)
class ParallelWorkload(Configured, HasStrategy):
    """A training workload that several ranks share, and how they do it.

    Attributes:
        training: its batch is that of all ranks together, each takes an equal part, or a slice of every sequence; its
            mode is ``train``.
        backend: ``auto`` is NCCL on GPUs, one for each rank, and Gloo on CPUs.
        gradient_dtype: gradients are sent and summed in it; they are kept in fp32, but see :attr:`has_half_gradients`.
        trace: a directory for the Chrome trace of one more step on rank 0.
        checkpointing: ``block`` keeps the input of each Transformer block alone and computes the rest again; ``keep=N``
            keeps what is expensive to compute again, but of the feed-forward layers' gate and up only the last N.
        mesh: None: all ranks in one dimension, or for a strategy with two, groups of two ranks (``tp=2``, ``cp=2``).
    """

    training: Workload
    strategy: str = setting(
        help="--mode of ddp, --strategy of shard.", choices=STRATEGIES, several=True, header=None, needs=_STRATEGY_NEEDS
    )
    world_size: int = setting(
        2,
        "Numbers of ranks. Default: 2, or torchrun's.",
        minimum=1,
        maximum=MOST_RANKS,
        several=True,
        header="ranks",
        in_titles=True,
    )
    backend: str = setting(
        "auto", f"{', '.join(BACKENDS)}; auto: by device.", choices=BACKENDS, header=None, needs=(_NCCL_NEEDS,)
    )
    bucket_mb: float | str | None = setting(
        None,
        f"For {BUCKETED}: the most gradients in one all-reduce, in 1e6 bytes; {WHOLE_BLOCKS}: whole blocks.",
        parse=parse_bucket,
        several=True,
        option_default=WHOLE_BLOCKS,
        header=None,
        needs=(Needs("strategy", _WITH_BUCKETS, ONLY_BUCKETED),),
        is_required=True,
    )
    gradient_dtype: str = setting(
        "fp32",
        f"Gradients are sent in {', '.join(PRECISIONS)}.",
        choices=PRECISIONS,
        several=True,
        header="gradients sent in",
        in_titles=True,
    )
    trace: str | None = setting(None, header=None)
    timeout_s: float = setting(
        120.0, "Seconds to wait for other ranks.", minimum=1, maximum=LONGEST_S, option="timeout", header=None
    )
    prefetch: int | None = setting(
        None,
        "For fsdp: blocks gathered ahead of use.",
        minimum=0,
        several=True,
        option_default=1,
        header=None,
        needs=(Needs("strategy", _GATHERING_AHEAD, "only strategies with fsdp gather ahead; add one to --strategy"),),
        is_required=True,
    )
    checkpointing: str = setting(
        "none", parse=parse_block_checkpointing, several=True, option="checkpoint", in_titles=True, needs=BLOCK_NEEDS
    )
    mesh: str | None = setting(None, "Ranks in two dimensions: fsdp=2,tp=2; cp: sequences.", needs=(_MESH_NEEDS,))
    keep_gathered: int = setting(
        0,
        "For fsdp: last blocks that stay gathered. --checkpoint auto: as many as fit.",
        minimum=0,
        several=True,
        header="blocks that stay gathered",
        needs=(Needs("strategy", _names_with("keeps_gathered"), "only fsdp keeps weights; add it to --strategy"),),
    )
    check_layers: int | None = setting(None, "Check at most this many blocks. Default: all.", minimum=1, header=None)
    transport: str = setting(
        "collectives",
        "What sends buckets: collectives, or the copy-engines of two GPUs.",
        choices=("collectives", "copy-engines"),
        several=True,
        header="sent by",
        needs=(Needs("strategy", _WITH_BUCKETS, f"only mode {BUCKETED} has the choice; add it to --mode"),),
    )

    def __post_init__(self) -> None:
        """Refuse settings that do not go together, and numbers that the ranks cannot share."""
        self.check_settings()
        self.training.require_known_memory()
        self._check_kept_blocks()
        if not self.training.updates_parameters:
            raise UsageError(f"mode '{self.training.mode}': ranks that share a batch can only train")
        if self.training.is_ours and self.keep_gathered > self.training.size.num_layers:
            raise UsageError(
                f"--keep-gathered {self.keep_gathered}: the model has {self.training.size.num_layers} blocks"
            )
        if self.strategy_record.inner_dimension:
            self._check_mesh(self.strategy_record.inner_dimension)
        if self.strategy_record.splits_sequences:
            if self.strategy_record.trades_heads:
                require_heads(self.training.size.num_heads, self.group_ranks)
            self._sequence_split(self.training.size.context)  # Refuses sequences of fewer tokens than chunks.
        if self.strategy_record.shares_layers:
            self._check_tensor()
        sharing = "groups of ranks" if self.strategy_record.inner_dimension else "ranks"
        check_batch(self.training.size.batch_size, self.data_ranks, sharing)

    def _sequence_split(self, context: int) -> SequenceSplit:
        """Split sequences among a group: in two chunks a rank for a ring, so that causal masks give all equal work."""
        return SequenceSplit(context, self.group_ranks, is_zigzag=not self.strategy_record.trades_heads)

    def _check_mesh(self, inner: str) -> None:
        """Refuse a mesh that does not make the ranks, or has other dimensions than the strategy; ``inner`` is last."""
        if self.mesh is None:
            if self.world_size % self.group_ranks:
                raise UsageError(
                    f"--world-size {self.world_size}: strategy '{self.strategy}' has groups of two ranks; choose an "
                    "even number, or say by --mesh how many"
                )
            return
        sizes = read_mesh(self.mesh)
        dimensions = [name for name in (self.strategy_record.outer, inner) if name is not None]
        if (num_ranks := math.prod(sizes.values())) != self.world_size:
            raise UsageError(f"--mesh {self.mesh}: that is {num_ranks} ranks, and there are {self.world_size}")
        # A strategy without communication names no outer dimension, but may have any: see :attr:`unsynchronized`.
        if sizes.keys() != set(dimensions) and (self.strategy_record.communicates or inner not in sizes):
            raise UsageError(
                f"--mesh {self.mesh}: strategy '{self.strategy}' has the dimensions {' and '.join(dimensions)}"
            )
        if mesh_text(sizes) != self.mesh:
            raise UsageError(f"--mesh {self.mesh}: groups are of neighbours, so {inner} comes last: {mesh_text(sizes)}")

    def _check_tensor(self) -> None:
        """Refuse heads, and of a sequence-parallel strategy sequences, that a group cannot share equally."""
        training, tensor_ranks = self.training, self.group_ranks
        refusal = heads_refusal(training.size.num_heads, tensor_ranks)
        if refusal is not None:
            raise UsageError(f"--strategy {self.strategy}: {refusal}")
        if self.strategy_record.is_sequence_parallel and training.size.context % tensor_ranks:
            raise UsageError(
                f"--context {training.size.context}: {tensor_ranks} ranks cannot share it equally; choose a multiple "
                f"of {tensor_ranks}, or a strategy without sequence"
            )

    def _check_kept_blocks(self) -> None:
        """Refuse ``keep=N`` where what it keeps cannot be recognized: by model, strategy, attention, depth, width."""
        training, blocks = self.training, kept_blocks(self.checkpointing)
        if blocks is None:
            return
        if not training.is_ours:
            raise UsageError(f"--checkpoint {self.checkpointing} supports only this project's model: choose block")
        if self.strategy_record.inner_dimension:
            raise UsageError(
                f"--checkpoint {self.checkpointing} tells products of whole layers and sequences apart, and --strategy "
                f"{self.strategy} shares them: choose none or block"
            )
        if training.keeps_scores:
            raise UsageError(
                f"--checkpoint {self.checkpointing} keeps attention's output and logsumexp: --attention reference has "
                "no logsumexp; choose flash or sdpa"
            )
        if blocks > training.size.num_layers:
            raise UsageError(f"--checkpoint {self.checkpointing}: the model has {training.size.num_layers} blocks")
        # Blocks with a backward pass of their own name what they keep; autograd's products are known by their widths.
        if training.size.d_ff == training.size.d_model and not self.has_own_block_backward:
            raise UsageError(
                f"--checkpoint {self.checkpointing} tells products apart by their widths: d_ff and d_model are both "
                f"{training.size.d_ff}"
            )

    @property
    def has_own_block_backward(self) -> bool:
        """Return whether kept blocks have a backward pass of their own: fused, eager, in FSDP without autocast."""
        training, is_kept = self.training, kept_blocks(self.checkpointing) is not None
        return is_kept and self.strategy_record.keeps_gathered and training.is_fused and not training.is_compiled

    @property
    def uses_copy_engines(self) -> bool:
        """Return whether copies between GPUs send gradients, in place of collectives."""
        return self.transport == "copy-engines"

    @property
    def group_ranks(self) -> int:
        """Return how many ranks share each layer or sequence."""
        if not self.strategy_record.inner_dimension:
            return 1
        if self.mesh is not None:
            return read_mesh(self.mesh).get(self.strategy_record.inner_dimension, 1)
        return self.world_size if self.strategy_record.outer is None else 2  # The default, as of mesh.

    @property
    def data_ranks(self) -> int:
        """Return how many ranks, or groups of ranks that share layers or sequences, share the batch."""
        return self.world_size // self.group_ranks

    def backend_on(self, device: str) -> str:
        """Return ``gloo`` or ``nccl`` for ranks on ``cpu`` or ``cuda``; a UsageError where a setting needs GPUs."""
        if self.backend == "nccl" and device == "cpu":
            raise UsageError("--backend nccl: communicates between GPUs; choose gloo, or --device cuda")
        return {"cpu": "gloo", "cuda": "nccl"}[device] if self.backend == "auto" else self.backend

    @property
    def sequences_per_rank(self) -> int:
        """Return how many sequences a rank has, or has a slice of."""
        return self.training.size.batch_size // self.data_ranks

    @property
    def share_size(self) -> ModelSize:
        """Return the size with a rank's share of the batch, and of split sequences the longest slice."""
        share = replace(self.training.size, batch_size=self.sequences_per_rank)
        if self.strategy_record.splits_sequences:
            return replace(share, context=max(self._sequence_split(share.context).lengths))
        return share

    @property
    def uses_autocast(self) -> bool:
        """Return whether half precision is autocast's; fully sharded models compute in the gathered dtype."""
        return not self.strategy_record.shards_weights

    @property
    def has_half_weights(self) -> bool:
        """Return whether slices of weights and of gradients are in half precision between steps, in fsdp alone."""
        is_in_bf16 = self.training.precision == "bf16" and not self.training.keeps_fp32_state
        return is_in_bf16 and self.strategy_record.keeps_gathered

    @property
    def has_half_gradients(self) -> bool:
        """Return whether gradients of fused blocks stay in bf16: averaged where they are, and sent in bf16."""
        is_sent_in_bf16 = self.gradient_dtype == "bf16"
        return is_sent_in_bf16 and self.training.leaves_half_gradients and self.strategy_record.averages_in_place

    @property
    def name(self) -> str:
        """Name the model and the number of ranks, for sentences."""
        return f"{self.training.name} on {self.world_size} ranks"

    @property
    def predicted_gib(self) -> float | None:
        """Return the GiB that ranks on one CPU hold together at their peak; None where formulas do not know them.

        The peak is that of the comparison, where each rank trains the whole batch alone.
        """
        one_rank_gib = self.training.predicted_gib
        if one_rank_gib is None or self.has_half_weights or self.check_layers is not None:
            return None
        return self.world_size * one_rank_gib

    @property
    def has_unsynchronized(self) -> bool:
        """Return whether the same step can be computed without communication.

        Of strategies that split sequences a single rank splits none, so sends nothing anyway, and torch's always sends.
        Blocks have a backward pass of their own in FSDP alone, so that without it the step would be another.
        """
        splits_sequences = self.strategy_record.splits_sequences
        if splits_sequences and (self.world_size == 1 or self.strategy_record.is_torchs):
            return False
        return not self.has_own_block_backward

    @property
    def unsynchronized(self) -> "ParallelWorkload":
        """Return the same steps without communication, and without a backward pass of the blocks' own."""
        mesh = None
        if self.strategy_record.inner_dimension and self.data_ranks > 1:
            # That strategy has no outer dimension, so any name will do. Without a mesh, all ranks would be one group.
            mesh = mesh_text({"ddp": self.data_ranks, self.strategy_record.inner_dimension: self.group_ranks})
        return replace(  # What only communication reads has its default: workloads that differ in it share one timing.
            self,
            strategy=self.strategy_record.unsynchronized,
            bucket_mb=None,
            gradient_dtype="bf16" if self.has_half_gradients else "fp32",  # Gradients that stay in bf16 need it.
            transport="collectives",
            trace=None,
            prefetch=None,
            keep_gathered=0,
            checkpointing="none" if self.has_own_block_backward else self.checkpointing,
            mesh=mesh,
            check_layers=None,
        )
