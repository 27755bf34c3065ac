"""Memory of training on one rank for each way of sharing out its state, with numbers.

Problems ``memory_profiling`` (b) and (c), ``optimizer_state_sharding_accounting`` (a) and (c), ``fsdp_accounting`` (a).
"""

import math
from dataclasses import dataclass, replace

from cs336sys.accounting.derivation import Derived, Number, expression_of, number_of, symbol
from cs336sys.accounting.memory import PeakMemory, widest_moments
from cs336sys.accounting.parameters import count_parameters, parameter_shapes
from cs336sys.accounting.sharding.fsdp import rows_per_rank
from cs336sys.accounting.sharding.ideal import MOMENT_BYTES, RankState, rank_state, sent_bytes
from cs336sys.accounting.sharding.optimizer import flat_optimizer_state, sharded_optimizer_state
from cs336sys.errors import UsageError
from cs336sys.sizes import ModelSize

_ZERO = "ZeRO, arXiv:1910.02054"


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest rank, whole parameters and padding as they are.

    Attributes:
        state: between backward pass and optimizer step, from the second step on.
        peak: the widest moment of a forward pass, or of a step from the second one on. With ``fsdp`` buffers for
            gathered weights are left out, with ``optimizer-flat`` and ``fsdp`` gradients on their way.
        first_peak: the most until the first optimizer step, when there is no optimizer state yet.
    """

    state: RankState
    peak: PeakMemory
    first_peak: int

    @property
    def after_initialization(self) -> int:
        """The model alone; optimizers make their state in the first step, but master parameters at once."""
        return self.state.parameters + self.state.master_parameters

    @property
    def before_first_step(self) -> int:
        """Model and gradients, directly before the first optimizer step."""
        return self.after_initialization + self.state.gradients


def rank_memory(
    size: ModelSize,
    world_size: int,
    strategy: str,
    *,
    precision: str = "fp32",
    element_bytes: int = 4,
    mode: str = "train",
    attention: str = "reference",
) -> RankMemory:
    """Memory on the fullest rank; its part of the batch is an equal one.

    Args:
        precision: of computing, fp32 or autocast.
        element_bytes: of parameters and gradients, as in :func:`~cs336sys.accounting.sharding.ideal.rank_state`.
        mode: ``forward``, ``forward-backward`` or ``train``.

    Raises:
        UsageError: the ranks do not divide the batch, or a name is unknown.
    """
    if world_size < 1:
        raise UsageError(f"--world-size {world_size}: must be at least 1")
    if size.batch_size % world_size:
        raise UsageError(f"{world_size} ranks do not divide the batch of {size.batch_size}: choose a multiple of them")
    local = replace(size, batch_size=size.batch_size // world_size)
    state = _fullest_rank(size, world_size, strategy, element_bytes)
    # What there is of the gradients at a moment is cut like all of them; the moments count them in fp32.
    gradient_share = state.gradients / (4 * count_parameters(size))

    def widest(mode: str) -> PeakMemory:
        moments = [
            replace(
                moment,
                parameters=state.parameters + state.master_parameters,
                gradients=round(moment.gradients * gradient_share),
                optimizer_state=state.optimizer_state if mode == "train" else 0,
            )
            for moment in widest_moments(local, precision, mode, attention)
        ]
        return max(moments, key=lambda moment: moment.total)

    return RankMemory(state, widest(mode), widest("forward" if mode == "forward" else "forward-backward").total)


def _fullest_rank(size: ModelSize, world_size: int, strategy: str, element_bytes: int) -> RankState:
    shapes = parameter_shapes(size)
    sizes = [math.prod(shape) for shape in shapes.values()]
    master_bytes = 0 if element_bytes == 4 else 4
    if strategy == "optimizer":
        # With one byte an element and one moment, bytes are elements.
        held = max(
            rank.optimizer_state for rank in sharded_optimizer_state(sizes, world_size, element_bytes=1, moments=1)
        )
        whole = element_bytes * sum(sizes)
        return RankState(whole, whole, MOMENT_BYTES * held, master_bytes * held)
    if strategy == "optimizer-flat":
        ranks = flat_optimizer_state([sizes], world_size, element_bytes=element_bytes, master_bytes=master_bytes)
        fullest = max(ranks, key=lambda rank: rank.total)
        return RankState(fullest.parameters, fullest.gradients, fullest.optimizer_state, fullest.master_parameters)
    if strategy == "fsdp":
        # Matrices are cut by rows and padded; norms are on every rank.
        held = sum(
            rows_per_rank(shape[0], world_size) * shape[1] if len(shape) == 2 else shape[0] for shape in shapes.values()
        )
        return RankState(4 * held, 4 * held, MOMENT_BYTES * held)
    return rank_state(strategy, sum(sizes), world_size, element_bytes)


def state_answers(
    size: ModelSize, world_size: int, strategy: str, *, element_bytes: int = 4, compute_bytes: int = 4
) -> list[Derived]:
    """Ideal shares of state, what there is at the handout's three times, and bytes that a rank sends in a step."""
    p, n = symbol("P", count_parameters(size)), symbol("N", world_size)
    state = rank_state(strategy, p, n, element_bytes)
    problem = "fsdp_accounting (a)" if strategy == "fsdp" else "optimizer_state_sharding_accounting (a)"

    def row(quantity: str, value: Number, reason: str = "", name: str = "", question: str = problem) -> Derived:
        named = f"{strategy}: {quantity}"
        return Derived(named, expression_of(value), "bytes", name, reason=reason, source=_ZERO, question=question)

    parts = [
        row("parameters", state.parameters, name="p"),
        row("gradients", state.gradients, name="g"),
        row("optimizer state", state.optimizer_state, "AdamW: two fp32 moments.", "o"),
    ]
    if number_of(state.master_parameters):
        parts.append(row("fp32 master parameters", state.master_parameters, name="m"))
    held = {part.symbol: part.as_symbol() for part in parts}
    model = held["p"] + held.get("m", 0)
    rows = [
        *parts,
        row("after model initialization", model),
        row("directly before the first step", model + held["g"], "AdamW makes its moments in its first step."),
        row("directly after the first step", model + held["g"] + held["o"], "The gradients are dropped after it."),
    ]
    if strategy != "none":
        for other in ("none", "optimizer") if strategy == "fsdp" else ("none",):
            theirs = symbol(f"M_{other}", number_of(rank_state(other, p, n, element_bytes).total))
            saved = theirs - (model + held["g"] + held["o"])
            rows.append(
                row(f"less than {other}", saved, f"M_{other} is the state of {other}, where all gradients exist.")
            )
    asked = "optimizer_state_sharding_accounting (c)" if strategy.startswith("optimizer") else ""
    sends = sent_bytes(strategy, p, n, element_bytes, compute_bytes)
    return [*rows, row("sent in a step", sends, _SENT[strategy], question=asked)]


_SENT = {
    "none": "All-reduce of gradients: 2 (N - 1) / N of their bytes.",
    "optimizer": "That all-reduce, and every parameter once from its owner to all: half more than ZeRO stage 1.",
    "optimizer-flat": "Reduce-scatter of gradients, all-gather of parameters: as much as an all-reduce, ZeRO stage 1.",
    "fsdp": "All-gather of weights in both passes, reduce-scatter of fp32 gradients.",
}
