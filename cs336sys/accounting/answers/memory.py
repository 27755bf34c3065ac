"""Training state of one rank for each way of sharing it out, with numbers.

Problems ``optimizer_state_sharding_accounting`` (a) and (c), ``fsdp_accounting`` (a).
"""

from cs336sys.accounting.derivation import Derived, Number, number_of, symbol
from cs336sys.accounting.parameters import count_parameters
from cs336sys.accounting.sharding.ideal import ideal_state, sent_bytes
from cs336sys.sizes import ModelSize

_ZERO = "ZeRO, arXiv:1910.02054"


def state_answers(
    size: ModelSize, world_size: int, strategy: str, *, element_bytes: int = 4, compute_bytes: int = 4
) -> list[Derived]:
    """Ideal shares of state, what there is at the handout's three times, and bytes that a rank sends in a step."""
    p, n = symbol("P", count_parameters(size)), symbol("N", world_size)
    state = ideal_state(strategy, p, n, element_bytes)
    problem = "fsdp_accounting (a)" if strategy == "fsdp" else "optimizer_state_sharding_accounting (a)"

    def row(quantity: str, value: Number, reason: str = "", name: str = "", question: str = problem) -> Derived:
        named = f"{strategy}: {quantity}"
        return Derived(named, value, "bytes", name, reason=reason, source=_ZERO, question=question)

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
            theirs = symbol(f"M_{other}", number_of(ideal_state(other, p, n, element_bytes).total))
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
