"""A training workload that several ranks share."""

from dataclasses import dataclass, replace

from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.accounting.sharding.partition import (
    SequenceSplit,
    check_batch,
    check_bucket_size,
    heads_refusal,
    mesh_ranks,
    mesh_text,
    read_mesh,
    require_heads,
)
from cs336sys.errors import UsageError
from cs336sys.sizes import PRECISIONS, ModelSize
from cs336sys.strategies import STRATEGIES, HasStrategy, strategies_of
from cs336sys.workload.training import Configured, Workload, check_choices

BUCKETED = "bucketed"
DATA_PARALLEL_STRATEGIES, SHARD_STRATEGIES = strategies_of("ddp"), strategies_of("shard")
# Of those of shard: whose ranks split each sequence, share layers, or have sequences of their own.
CONTEXT_STRATEGIES = tuple(name for name in SHARD_STRATEGIES if STRATEGIES[name].splits_sequences)
TENSOR_STRATEGIES = tuple(name for name in SHARD_STRATEGIES if STRATEGIES[name].shares_layers)
SHARDING_STRATEGIES = tuple(name for name in SHARD_STRATEGIES if not STRATEGIES[name].shares)
BACKENDS = ("auto", "gloo", "nccl")
BLOCK_CHECKPOINTING = ("none", "block")

# What sends the gradients of buckets: collectives of the backend, or the copy engines of two GPUs.
TRANSPORTS = ("collectives", "copy-engines")


def bucket_name(bucket_mb: float | str) -> str:
    """Name a bucket size: ``25 MB``, ``blocks``."""
    return f"{bucket_mb}s" if isinstance(bucket_mb, str) else f"{bucket_mb:g} MB"


@dataclass(frozen=True)
class ParallelWorkload(Configured, HasStrategy):
    """A training workload that several ranks share, and how they do it.

    Attributes:
        training: its batch is that of all ranks together, each takes an equal part, or a slice of every sequence; its
            mode is ``train``.
        strategy: one of :data:`~cs336sys.strategies.STRATEGIES`.
        backend: ``auto`` is NCCL on GPUs, one for each rank, and Gloo on CPUs.
        bucket_mb: the most gradients in one all-reduce, in megabytes (1e6 bytes), or ``block``: those of whole blocks;
            for :data:`BUCKETED`, else None.
        gradient_dtype: what gradients are sent and summed in; they are kept in fp32, but see
            :attr:`has_half_gradients`.
        high_priority: let NCCL's kernels go before others that wait for the GPU.
        transport: one of :data:`TRANSPORTS`; ``copy-engines`` for ``bucketed`` alone.
        trace: a directory for the Chrome trace of one more step on rank 0.
        timeout_s: how long a rank waits for the others.
        prefetch: how many units to gather ahead of use; for ``fsdp``, else None.
        checkpointing: ``block`` keeps the input of each Transformer block alone and computes the rest again;
            ``keep=N`` all that is expensive to compute again but gate and up, and these in the last N blocks.
        mesh: for strategies that share layers or sequences, sizes of dimensions, ``fsdp=2,tp=2``; None is one
            dimension, or with two of them ``tp=2`` or ``cp=2``.
        keep_gathered: for ``fsdp``, how many of the last blocks stay gathered between forward and backward pass.
        check_layers: how many blocks at most the model has that is checked against one process; None: all that fit.
    """

    training: Workload
    strategy: str
    world_size: int = 2
    backend: str = "auto"
    bucket_mb: float | str | None = None
    gradient_dtype: str = "fp32"
    high_priority: bool = False
    trace: str | None = None
    timeout_s: float = 120.0
    prefetch: int | None = None
    checkpointing: str = "none"
    mesh: str | None = None
    keep_gathered: int = 0
    check_layers: int | None = None
    transport: str = "collectives"

    def __post_init__(self) -> None:
        choices = {
            "strategy": STRATEGIES,
            "backend": BACKENDS,
            "gradient_dtype": PRECISIONS,
            "transport": TRANSPORTS,
            "checkpointing": BLOCK_CHECKPOINTING,
        }
        if kept_blocks(self.checkpointing) is not None:
            del choices["checkpointing"]
            self._check_kept()
        check_choices(self, choices)
        self.training.require_known_memory()
        if self.training.device != "auto":
            self.backend_on(self.training.device)
        if not self.training.updates_parameters:
            raise UsageError(f"mode '{self.training.mode}': ranks that share a batch can only train")
        if self.world_size < 1:
            raise UsageError(f"--world-size {self.world_size}: must be at least 1")
        self._check_buckets()
        if self.checkpointing != "none" and self.training.is_compiled_whole:
            raise UsageError("--checkpoint puts checkpoints around blocks: with --compile model there are none to see")
        self._check_gathers()
        if self.check_layers is not None and self.check_layers < 1:
            raise UsageError(f"--check-layers {self.check_layers}: must be at least 1")
        if self.strategy_record.shares:
            self._check_mesh(self.strategy_record.shares)
        elif self.mesh is not None:
            raise UsageError(
                f"--mesh {self.mesh}: the ranks of strategy '{self.strategy}' have one dimension; leave it out, or "
                "choose a strategy that shares layers or sequences"
            )
        if self.strategy_record.splits_sequences:
            self._check_context()
        if self.strategy_record.shares_layers:
            self._check_tensor()
        sharing = "groups of ranks" if self.strategy_record.shares else "ranks"
        check_batch(self.training.size.batch_size, self.data_ranks, sharing)

    def _check_buckets(self) -> None:
        if (self.bucket_mb is not None) != self.strategy_record.has_buckets:
            raise UsageError(f"bucket size {self.bucket_mb}: mode {BUCKETED} needs one, and others have none")
        if self.uses_copy_engines and not self.strategy_record.has_buckets:
            raise UsageError(
                f"--transport copy-engines sends buckets, and mode '{self.strategy}' has none: choose bucketed"
            )
        check_bucket_size(self.bucket_mb)

    def _check_gathers(self) -> None:
        if (self.prefetch is not None) != self.strategy_record.gathers_ahead:
            raise UsageError(f"prefetch {self.prefetch}: strategy 'fsdp' needs one, and others have none")
        if self.keep_gathered and not self.strategy_record.keeps_gathered:
            raise UsageError(f"--keep-gathered {self.keep_gathered}: strategy '{self.strategy}' gathers no blocks")
        if self.keep_gathered < 0:
            raise UsageError(f"--keep-gathered {self.keep_gathered}: must be at least 0")
        if self.training.is_ours and self.keep_gathered > self.training.size.num_layers:
            raise UsageError(
                f"--keep-gathered {self.keep_gathered}: the model has {self.training.size.num_layers} blocks"
            )

    def _check_mesh(self, inner: str) -> None:
        if self.mesh is None:
            if self.world_size % self.group_ranks:
                raise UsageError(
                    f"--world-size {self.world_size}: strategy '{self.strategy}' has groups of two ranks; choose an "
                    "even number, or say by --mesh how many"
                )
            return
        sizes = read_mesh(self.mesh)
        wanted = [name for name in (self.strategy_record.outer, inner) if name is not None]
        if mesh_ranks(sizes) != self.world_size:
            raise UsageError(f"--mesh {self.mesh}: that is {mesh_ranks(sizes)} ranks, and there are {self.world_size}")
        if sizes.keys() != set(wanted) and (self.strategy_record.communicates or inner not in sizes):
            raise UsageError(
                f"--mesh {self.mesh}: strategy '{self.strategy}' has the dimensions {' and '.join(wanted)}"
            )
        if mesh_text(sizes) != self.mesh:
            raise UsageError(f"--mesh {self.mesh}: groups are of neighbours, so {inner} comes last: {mesh_text(sizes)}")

    def _check_tensor(self) -> None:
        training, tensor_ranks = self.training, self.group_ranks
        if not training.is_ours:
            raise UsageError(f"--strategy {self.strategy} shares layers of cs336_basics alone: leave out --model")
        if training.fused_kernels:
            raise UsageError(
                f"--strategy {self.strategy} computes with the layers of cs336_basics: leave out --kernels "
                f"{training.kernels}"
            )
        if kept_blocks(self.checkpointing) is not None:
            raise UsageError(
                f"--checkpoint {self.checkpointing} tells products apart by the widths of whole layers, and --strategy "
                f"{self.strategy} shares them: choose none or block"
            )
        if training.is_compiled_whole:
            raise UsageError(f"--strategy {self.strategy} is compiled by blocks: choose --compile block or off")
        refusal = heads_refusal(training.size.num_heads, tensor_ranks)
        if refusal is not None:
            raise UsageError(f"--strategy {self.strategy}: {refusal}")
        if self.strategy_record.is_sequence_parallel and training.size.context % tensor_ranks:
            raise UsageError(
                f"--context {training.size.context}: {tensor_ranks} ranks cannot share it equally; choose a multiple "
                f"of {tensor_ranks}, or a strategy without sequence"
            )

    def _check_context(self) -> None:
        training = self.training
        if not training.is_ours:
            raise UsageError(
                f"--strategy {self.strategy} gives positions to attention of cs336_basics alone: leave out --model"
            )
        if kept_blocks(self.checkpointing) is not None:
            raise UsageError(
                f"--checkpoint {self.checkpointing} does not support the attention of --strategy {self.strategy}: "
                f"choose none or block"
            )
        if self.strategy_record.trades_heads:
            require_heads(training.size.num_heads, self.group_ranks)
        # Refuses sequences of fewer tokens than chunks.
        SequenceSplit(training.size.context, self.group_ranks, is_zigzag=not self.strategy_record.trades_heads)

    def _check_kept(self) -> None:
        training, blocks = self.training, kept_blocks(self.checkpointing)
        if not training.is_ours:
            raise UsageError(f"--checkpoint {self.checkpointing} supports only this project's model: choose block")
        if training.keeps_scores:
            raise UsageError(
                f"--checkpoint {self.checkpointing} keeps attention's output and logsumexp: --attention reference has "
                "no logsumexp; choose flash or sdpa"
            )
        if blocks is not None and blocks > training.size.num_layers:
            raise UsageError(f"--checkpoint {self.checkpointing}: the model has {training.size.num_layers} blocks")
        if training.size.d_ff == training.size.d_model and not self.writes_out_blocks:
            raise UsageError(
                f"--checkpoint {self.checkpointing} tells products apart by their widths: d_ff and d_model are both "
                f"{training.size.d_ff}"
            )

    @property
    def writes_out_blocks(self) -> bool:
        """Return whether kept blocks have a backward pass of their own: fused kernels without autocast."""
        training, is_kept = self.training, kept_blocks(self.checkpointing) is not None
        return is_kept and self.strategy_record.keeps_gathered and training.is_fused and not training.is_compiled

    @property
    def uses_copy_engines(self) -> bool:
        """Return whether copies between GPUs send gradients, in place of collectives."""
        return self.transport == "copy-engines"

    @property
    def group_ranks(self) -> int:
        """Return how many ranks share each layer or sequence."""
        if not self.strategy_record.shares:
            return 1
        if self.mesh is not None:
            return read_mesh(self.mesh).get(self.strategy_record.shares, 1)
        return self.world_size if self.strategy_record.outer is None else 2

    @property
    def data_ranks(self) -> int:
        """Return how many ranks, or groups of ranks that share layers or sequences, share the batch."""
        return self.world_size // self.group_ranks

    def backend_on(self, device: str) -> str:
        """Return by what the ranks communicate on ``cpu`` or ``cuda``: ``gloo`` or ``nccl``.

        Raises:
            UsageError: the backend, or the priority that is asked for, needs GPUs.
        """
        if self.backend == "nccl" and device == "cpu":
            raise UsageError("backend 'nccl' communicates between GPUs: choose gloo, or device cuda")
        backend = {"cpu": "gloo", "cuda": "nccl"}[device] if self.backend == "auto" else self.backend
        if self.high_priority and backend != "nccl":
            raise UsageError(
                f"--high-priority affects only NCCL's kernels, and ranks communicate by {backend}: leave it out"
            )
        return backend

    @property
    def share(self) -> int:
        """Sequences a rank has, or has a slice of."""
        return self.training.size.batch_size // self.data_ranks

    @property
    def share_size(self) -> ModelSize:
        """The size with this rank's share of the batch, or the longest slice of its sequences."""
        share = replace(self.training.size, batch_size=self.share)
        if self.strategy_record.splits_sequences:
            split = SequenceSplit(share.context, self.group_ranks, is_zigzag=not self.strategy_record.trades_heads)
            return replace(share, context=max(split.lengths))
        return share

    @property
    def uses_autocast(self) -> bool:
        """Return whether half precision is autocast's; fully sharded models compute in the gathered dtype."""
        return not self.strategy_record.shards_weights

    @property
    def has_half_weights(self) -> bool:
        """Return whether slices of weights and their gradients are in half precision from step to step."""
        is_in_bf16 = self.training.precision == "bf16" and self.training.state_dtype != "fp32"
        return is_in_bf16 and self.strategy_record.keeps_gathered

    @property
    def has_half_gradients(self) -> bool:
        """Return whether gradients of fused blocks stay in bf16: averaged where they are, and sent in bf16."""
        is_sent_in_bf16 = self.gradient_dtype == "bf16"
        return is_sent_in_bf16 and self.training.leaves_half_gradients and self.strategy_record.averages_in_place

    @property
    def predicted_gib(self) -> float | None:
        """GiB that ranks on one CPU hold together at their peak: each trains the whole batch alone, to compare with.

        None where formulas do not know, or fewer blocks are compared.
        """
        alone = self.training.predicted_gib
        if alone is None or self.has_half_weights or self.check_layers is not None:
            return None
        return self.world_size * alone

    @property
    def has_unsynchronized(self) -> bool:
        """Return whether the same step can be computed without communication; one rank that splits nothing has none."""
        if self.strategy_record.splits_sequences and self.world_size == 1:
            return False
        return not self.writes_out_blocks and not (
            self.strategy_record.splits_sequences and self.strategy_record.is_torchs
        )

    @property
    def unsynchronized(self) -> "ParallelWorkload":
        """The same steps without communication; blocks with a backward pass of their own are computed as plain ones."""
        mesh = None
        if self.strategy_record.shares and self.data_ranks > 1:
            mesh = mesh_text({"ddp": self.data_ranks, self.strategy_record.shares: self.group_ranks})
        return replace(
            self,
            strategy=self.strategy_record.unsynchronized,
            bucket_mb=None,
            gradient_dtype="bf16" if self.has_half_gradients else "fp32",
            transport="collectives",
            trace=None,
            prefetch=None,
            keep_gathered=0,
            checkpointing="none" if self.writes_out_blocks else self.checkpointing,
            mesh=mesh,
            check_layers=None,
        )
