"""What communication costs a step, and how much of it that hides."""

from collections.abc import Mapping


def exposed_communication(medians_ms: Mapping[str, float], running_ms: float | None = None) -> dict[str, float | None]:
    """How much longer the step is than the same one without communication, and what of the communication that hides.

    Args:
        medians_ms: of ``step``, and where they were measured of ``unsynchronized``, the step without communication,
            and of ``communication``, alone.
        running_ms: how long communication ran in a profiled step. Alone, launches may hold it up: 436 all-reduces of xl
            took 61 ms launched one after another, and 35 in a CUDA graph. The shorter of both is what there is to hide.

    Returns:
        ``exposed_ms`` = step - unsynchronized; ``exposed_percent`` of the step; ``hidden_percent``, the part of the
        communication that is not exposed, 0 to 100; each None where it is not known.
    """
    exposed_ms = hidden_percent = None
    step_ms, alone_ms = medians_ms["step"], medians_ms.get("communication")
    if "unsynchronized" in medians_ms:
        exposed_ms = step_ms - medians_ms["unsynchronized"]
        if alone_ms is not None:
            to_hide_ms = min(alone_ms, running_ms or alone_ms)
            hidden_percent = 100 * (1 - min(max(exposed_ms, 0), to_hide_ms) / to_hide_ms)
    return {
        "exposed_ms": exposed_ms,
        "exposed_percent": None if exposed_ms is None else 100 * exposed_ms / step_ms,
        "hidden_percent": hidden_percent,
    }
