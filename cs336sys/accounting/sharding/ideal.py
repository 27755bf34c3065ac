"""Memory and communication of a rank for each way of sharing training state, as formulas of P and N.

Source: ZeRO (https://arxiv.org/abs/1910.02054), sections 5 and 7, for the ideal share ``P / N``; the exact one, of
whole parameters and padding, is in :mod:`~cs336sys.accounting.sharding.step`. Arguments are numbers or symbols.

- ``none``: data parallel; all state on every rank, gradients all-reduced.
- ``optimizer``: each rank has the optimizer state of some whole parameters (ZeRO stage 1 but for the communication:
  gradients are all-reduced as before, and updated parameters then sent to all).
- ``optimizer-flat``: each rank has a slice of every parameter; gradients are reduce-scattered and parameters
  all-gathered, so a rank keeps the gradients of its slice alone (ZeRO stage 2).
- ``fsdp``: parameters are in slices too, gathered for use in both passes (ZeRO stage 3).
"""

from typing import Any

from cs336sys.accounting.derivation import Derived, Number, number_of, symbol, why
from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.memory import TrainingState
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.strategies import STRATEGIES

OWN_SHARDING_STRATEGIES = ("none", "optimizer", "optimizer-flat", "fsdp")


def ideal_state(strategy: str, parameters: Any, ranks: Any, element_bytes: int = 4) -> TrainingState:
    """Return the bytes that a rank holds with ideal shares between backward pass and optimizer step.

    Args:
        strategy: one of :data:`OWN_SHARDING_STRATEGIES`.
        parameters: of the model, P.
        ranks: N.
        element_bytes: of parameters and gradients. Less than 4 needs fp32 master parameters next to them; with fsdp the
            master parameters are the slices themselves, and gradients are fp32 as they are.
    """
    record, whole = STRATEGIES[strategy], element_bytes * parameters
    share = parameters / ranks if record.shares_updates else parameters
    moments = 8 * share  # AdamW's two moments, fp32.
    if record.shards_weights:
        return TrainingState(4 * share, 4 * share, moments)
    gradients = 4 * share if record.reduces_slices else whole  # Slices are fp32, as the optimizer steps them.
    return TrainingState(whole, gradients, moments, 0 if element_bytes == 4 else 4 * share)


def sent_bytes(
    strategy: str, parameters: Number, ranks: Number, element_bytes: int = 4, compute_bytes: int = 4
) -> Number:
    """Return the bytes that a rank sends in a step: ``(N - 1) / N`` of what is gathered, scattered or broadcast.

    An all-reduce is a scatter and a gather; of fsdp nothing stays gathered between the passes. ``element_bytes`` are of
    parameters and gradients, ``compute_bytes`` of what fsdp gathers. ``optimizer`` all-reduces, and broadcasts.
    """
    share = (ranks - 1) / ranks * parameters
    if STRATEGIES[strategy].shards_weights:
        return (2 * compute_bytes + 4) * share  # Gathered in both passes; gradients scattered in fp32.
    return {"none": 2, "optimizer": 3, "optimizer-flat": 2}[strategy] * element_bytes * share


def state_answers(
    size: ModelSize, world_size: int, strategy: str, *, element_bytes: int = 4, compute_bytes: int = 4
) -> list[Derived]:
    """Answer ``optimizer_state_sharding_accounting`` (a), (c) and ``fsdp_accounting`` (a) for one strategy.

    Ideal shares of the state, what there is at the handout's three times, and the bytes that a rank sends in a step.
    """
    p, n = symbol("P", count_parameters(size)), symbol("N", world_size)
    state = ideal_state(strategy, p, n, element_bytes)
    problem = (
        "fsdp_accounting (a)" if STRATEGIES[strategy].shards_weights else "optimizer_state_sharding_accounting (a)"
    )

    def row(quantity: str, value: Number, reason: str = "", name: str = "", question: str = problem) -> Derived:
        named = f"{strategy}: {quantity}"
        return Derived(named, value, "bytes", name, reason=reason, source="ZeRO, arXiv:1910.02054", question=question)

    parts = [
        row("parameters", state.parameters, name="p"),
        row("gradients", state.gradients, name="g"),
        row("optimizer state", state.optimizer_state, why("moments"), "o"),
    ]
    if number_of(state.master_parameters):
        parts.append(row("fp32 master parameters", state.master_parameters, name="m"))
    symbols = {part.symbol: part.as_symbol() for part in parts}
    model = symbols["p"] + symbols.get("m", 0)
    before, after = model + symbols["g"], model + symbols["g"] + symbols["o"]
    rows = [
        *parts,
        row("after model initialization", model),
        row("directly before the first step", before, why("before_first_step")),
        row("directly after the first step", after, why("after_first_step")),
    ]
    # All are compared with data parallelism, and fsdp also with sharing the optimizer's state alone.
    for other in {"none": (), "fsdp": ("none", "optimizer")}.get(strategy, ("none",)):
        other_bytes = symbol(f"M_{other}", number_of(ideal_state(other, p, n, element_bytes).total))
        rows.append(row(f"less than {other}", other_bytes - after, why("less_than", other)))
    part_c = "optimizer_state_sharding_accounting (c)" if strategy.startswith("optimizer") else ""
    sends = sent_bytes(strategy, p, n, element_bytes, compute_bytes)
    return [*rows, row("sent in a step", sends, why("sent", strategy), question=part_c)]
