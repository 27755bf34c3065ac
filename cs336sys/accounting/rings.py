"""How long collectives on a ring of devices take, bandwidth alone.

Source: CS336 assignment 2 (2026), section 8.1. ``N`` devices each send ``W`` bytes/s to their neighbour and receive as
much at the same time; ``S`` bytes is the whole tensor, one device's share ``S / N``. Latency is left out.

Arguments may be numbers or symbols (:mod:`cs336sys.accounting.derivation`).
"""

from cs336sys.accounting.derivation import Number


def ring_all_gather_s(size_bytes: Number, devices: Number, bytes_per_s: Number) -> Number:
    """Every device starts with a share and ends with all: ``N - 1`` steps, each passing on ``S / N`` bytes."""
    return (devices - 1) / devices * size_bytes / bytes_per_s


def ring_reduce_scatter_s(size_bytes: Number, devices: Number, bytes_per_s: Number) -> Number:
    """Every device starts with a tensor and ends with a share of the sum: an all-gather backwards, at its cost."""
    return ring_all_gather_s(size_bytes, devices, bytes_per_s)


def ring_all_reduce_s(size_bytes: Number, devices: Number, bytes_per_s: Number) -> Number:
    """Every device starts with a tensor and ends with the sum: a reduce-scatter, then an all-gather."""
    return 2 * (devices - 1) / devices * size_bytes / bytes_per_s


def alternate_ring_all_reduce_s(size_bytes: Number, devices: Number, bytes_per_s: Number) -> Number:
    """Whole tensors passed round, each device adding up what comes by: ``N - 1`` steps of ``S`` bytes each.

    Source: problem ``alternate_ring_all_reduce``. It takes ``N / 2`` times as long as :func:`ring_all_reduce_s`.
    """
    return (devices - 1) * size_bytes / bytes_per_s
