"""What results files of earlier versions hold otherwise than today's, and what it is today. Plain data, no torch."""

from typing import Any

# Ranks that share the optimizer's work, and send each other what they have updated.
_SENDING_STRATEGIES = ("optimizer", "optimizer-flat")

_RATES = ("tokens_per_s", "examples_per_s")


def with_whole_step(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a cell, whose step lasts until all that it launched is done.

    Launched steps of ranks that share the optimizer's work sent updated parameters after their last phase, where no
    event saw it: 27 of 257 ms, of 2.7b in bf16 on two H200. The CPU clock around each step did, as the GPU was waited
    for: it is the step, unless the record says in which phase parameters were sent.
    """
    names, samples, derived = record["configuration"], record["samples"], record["derived"]
    is_whole = (
        record["command"] != "shard"
        or names.get("strategy") not in _SENDING_STRATEGIES
        or names.get("cuda_graph", "off") == "on"
        or names.get("synchronize") != "step"
        or "parameters_sent_in" in derived
        or not {"step", "wall"} <= samples.keys()
    )
    if is_whole:
        return record
    whole = samples["wall"]
    now = {name: derived[name] * samples["step"].mean / whole.mean for name in _RATES if derived.get(name)}
    if "unsynchronized" in samples:
        now["exposed_ms"] = whole.median - samples["unsynchronized"].median
        now["exposed_percent"] = 100 * now["exposed_ms"] / whole.median
    return record | {"samples": samples | {"step": whole}, "derived": derived | now}
