"""What communication costs a step, and how much of it that hides."""

from collections.abc import Mapping


def exposed_communication(medians_ms: Mapping[str, float]) -> dict[str, float | None]:
    """How much longer the step is than the same one without communication, and what of the communication that hides.

    Args:
        medians_ms: of ``step``, and where they were measured of ``unsynchronized``, the step without communication,
            and of ``communication``, alone.

    Returns:
        ``exposed_ms`` = step - unsynchronized; ``exposed_percent`` of the step; ``hidden_percent``, the part of the
        communication alone that is not exposed, 0 to 100; each None where it is not known.
    """
    exposed_ms = hidden_percent = None
    step_ms, alone_ms = medians_ms["step"], medians_ms.get("communication")
    if "unsynchronized" in medians_ms:
        exposed_ms = step_ms - medians_ms["unsynchronized"]
        if alone_ms is not None:
            hidden_percent = 100 * (1 - min(max(exposed_ms, 0), alone_ms) / alone_ms)
    return {
        "exposed_ms": exposed_ms,
        "exposed_percent": None if exposed_ms is None else 100 * exposed_ms / step_ms,
        "hidden_percent": hidden_percent,
    }
