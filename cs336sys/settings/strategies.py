"""Ways in which ranks train one model together: a record for each strategy of ``ddp`` and ``shard``. No torch.

Functions are named, and imported where a rank or a table asks for them. A new strategy is a record and its function.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cs336sys.errors import require_known
from cs336sys.settings.choices import import_named


@dataclass(frozen=True)
class Strategy:
    """A way in which ranks train one model together.

    Attributes:
        wraps: dotted name of the function that wraps model and optimizer on a rank, a ``training.ranks.Prepare``.
        wrapper: dotted name of the class of :mod:`cs336sys.parallel.ddp` that averages gradients, for ``wraps`` to use.
        command: the command that measures it; empty for the steps without communication that others are compared with.
        inner_dimension: what a group of ranks shares: ``tp`` layers, ``cp`` sequences; empty without groups.
        outer: how groups share the batch, ``ddp`` or ``fsdp``; None: there is one group.
        holds, sends: dotted names of functions of a ``ShardedStep``: the training state of the fullest rank, and bytes
            that a rank sends in a step (empty where torch decides that).
        has_known_peak: formulas know the most that a rank holds.
        is_torchs: torch's own classes.
        uses_torch_ddp: torch's DDP is among them, whose buckets are there from the start.
        keeps_dtensors: parameters are distributed tensors of torch.
        is_captured_whole: a CUDA graph must hold both passes: the backward pass waits for events of the forward pass.
        has_buckets: gradients are averaged in buckets of a size that can be chosen.
        averages_in_place: gradients stay in the tensors that the backward pass made.
        averages_at_once: all gradients in one tensor.
        overlaps: gradients are averaged while the backward pass runs.
        reduces_slices: a rank gets its slices of gradients, bucket by bucket.
        gathers_ahead: this project's FSDP gathers weights before their use.
        keeps_gathered: some blocks may stay gathered between forward and backward pass.
        shards_weights: weights are in slices, gathered in half precision, in which the model computes: no autocast.
        shares_updates: each rank updates a part of the parameters.
        takes_split_weights: weights may be kept in bf16 and low bits.
        is_sequence_parallel: between shared layers a rank has a slice of the sequence.
        trades_heads: attention trades tokens for heads, all to all.
        unsynchronized: the strategy of the same step without communication.
    """

    wraps: str
    wrapper: str = ""
    command: str = "shard"
    inner_dimension: str = ""
    outer: str | None = None
    holds: str = "cs336sys.accounting.sharding.step.whole_state"
    sends: str = "cs336sys.accounting.sharding.step.all_reduced_bytes"
    has_known_peak: bool = True
    is_torchs: bool = False
    uses_torch_ddp: bool = False
    keeps_dtensors: bool = False
    is_captured_whole: bool = False
    has_buckets: bool = False
    averages_in_place: bool = False
    averages_at_once: bool = False
    overlaps: bool = False
    reduces_slices: bool = False
    gathers_ahead: bool = False
    keeps_gathered: bool = False
    shards_weights: bool = False
    shares_updates: bool = False
    takes_split_weights: bool = True
    is_sequence_parallel: bool = False
    trades_heads: bool = False
    unsynchronized: str = "unsynchronized"

    @property
    def splits_sequences(self) -> bool:
        """Return whether a rank has a slice of every sequence."""
        return self.inner_dimension == "cp"

    @property
    def shares_layers(self) -> bool:
        return self.inner_dimension == "tp"

    @property
    def communicates(self) -> bool:
        return bool(self.command)

    @property
    def leaves_mean_gradients(self) -> bool:
        """Return whether ranks hold mean gradients, of all or of their rows, until the optimizer steps."""
        return self.communicates and not self.inner_dimension and not self.reduces_slices

    def load(self, function: str) -> Callable[..., Any]:
        """Import the function that the field ``function`` names."""
        return import_named(getattr(self, function))


_replicated = functools.partial(
    Strategy, "cs336sys.training.ranks.strategies.replicated", command="ddp", averages_in_place=True
)
_optimizer = functools.partial(
    Strategy,
    holds="cs336sys.accounting.sharding.step.optimizer_state",
    sends="cs336sys.accounting.sharding.step.broadcast_bytes",
    shares_updates=True,
    takes_split_weights=False,
)
_RING, _ALL_TO_ALL = "context-ring-unsynchronized", "context-all-to-all-unsynchronized"
_context = functools.partial(
    Strategy,
    "cs336sys.training.ranks.tensor_strategies.context_parallel",
    inner_dimension="cp",
    sends="cs336sys.accounting.sharding.step.context_bytes",
    unsynchronized=_RING,
)
_tensor = functools.partial(Strategy, "cs336sys.training.ranks.tensor_strategies.tensor_parallel", inner_dimension="tp")
_torch_tensor = functools.partial(
    Strategy,
    "cs336sys.training.ranks.tensor_strategies.torch_tensor",
    inner_dimension="tp",
    sends="",
    is_torchs=True,
    keeps_dtensors=True,
)
_sequence: dict[str, Any] = {"is_sequence_parallel": True, "unsynchronized": "tensor-sequence-unsynchronized"}
_layers: dict[str, Any] = {"unsynchronized": "tensor-unsynchronized"}
_heads: dict[str, Any] = {"trades_heads": True, "unsynchronized": _ALL_TO_ALL}
_sharded: dict[str, Any] = {"gathers_ahead": True, "shards_weights": True, "shares_updates": True}

STRATEGIES: dict[str, Strategy] = {
    "naive": _replicated(wrapper="cs336sys.parallel.ddp.NaiveDDP"),
    "flat": _replicated(wrapper="cs336sys.parallel.ddp.FlatDDP", averages_at_once=True),
    "overlap": _replicated(wrapper="cs336sys.parallel.ddp.OverlappedDDP", overlaps=True),
    "bucketed": _replicated(wrapper="cs336sys.parallel.ddp.BucketedDDP", has_buckets=True, overlaps=True),
    "torch": Strategy(
        "cs336sys.training.ranks.strategies.torch_ddp", command="ddp", is_torchs=True, uses_torch_ddp=True
    ),
    "none": Strategy("cs336sys.training.ranks.strategies.averaged_in_buckets"),
    "optimizer": _optimizer("cs336sys.training.ranks.strategies.sharded_optimizer"),
    "optimizer-flat": _optimizer(
        "cs336sys.training.ranks.strategies.flat_sharded_optimizer",
        sends="cs336sys.accounting.sharding.step.all_reduced_bytes",
        reduces_slices=True,
    ),
    "fsdp": Strategy(
        "cs336sys.training.ranks.strategies.fully_sharded",
        holds="cs336sys.accounting.sharding.step.sliced_state",
        sends="cs336sys.accounting.sharding.step.fully_sharded_bytes",
        keeps_gathered=True,
        **_sharded,
    ),
    "torch-zero": _optimizer("cs336sys.training.ranks.strategies.torch_zero", is_torchs=True, uses_torch_ddp=True),
    "torch-fsdp": Strategy(
        "cs336sys.training.ranks.strategies.torch_fsdp",
        holds="cs336sys.accounting.sharding.step.torch_sliced_state",
        sends="cs336sys.accounting.sharding.step.torch_gathered_bytes",
        has_known_peak=False,
        is_torchs=True,
        keeps_dtensors=True,
        is_captured_whole=True,
        shards_weights=True,
        shares_updates=True,
        takes_split_weights=False,
    ),
    "context-ring": _context(),
    "context-all-to-all": _context(**_heads),
    "torch-context": Strategy(
        "cs336sys.training.ranks.tensor_strategies.torch_context",
        inner_dimension="cp",
        sends="",
        has_known_peak=False,
        is_torchs=True,
        unsynchronized=_RING,
    ),
    "fsdp+context-ring": _context(outer="fsdp", **_sharded),
    "fsdp+context-all-to-all": _context(outer="fsdp", **_sharded, **_heads),
    "tensor": _tensor(**_layers),
    "tensor-sequence": _tensor(**_sequence),
    "ddp+tensor": _tensor(outer="ddp", **_layers),
    "ddp+tensor-sequence": _tensor(outer="ddp", **_sequence),
    "fsdp+tensor": _tensor(outer="fsdp", **_sharded, **_layers),
    "fsdp+tensor-sequence": _tensor(outer="fsdp", **_sharded, **_sequence),
    "torch-tensor": _torch_tensor(**_layers),
    "torch-tensor-sequence": _torch_tensor(**_sequence),
    "unsynchronized": Strategy(
        "cs336sys.training.ranks.strategies.unsynchronized", command="", sends="", averages_in_place=True
    ),
    _RING: _context(command="", sends=""),
    _ALL_TO_ALL: _context(command="", sends="", **_heads),
    "tensor-unsynchronized": _tensor(command="", sends="", **_layers),
    "tensor-sequence-unsynchronized": _tensor(command="", sends="", **_sequence),
}


class HasStrategy:
    """Workloads and descriptions of steps that have a strategy as a field."""

    strategy: str

    @property
    def strategy_record(self) -> Strategy:
        """Return the record of the strategy, or raise a UsageError where there is none of its name."""
        require_known("strategy", self.strategy, STRATEGIES)
        return STRATEGIES[self.strategy]


def strategies_of(command: str) -> tuple[str, ...]:
    """Return the names of the strategies that a command measures."""
    return tuple(name for name, strategy in STRATEGIES.items() if strategy.command == command)
