"""Ranks in two dimensions: how many share each batch, and how many each sequence or each layer."""

import math

from cs336sys.errors import UsageError, choose_from

# From the outermost to the innermost: ranks of the last are neighbours, on one node where they fit there.
DIMENSIONS = ("ddp", "fsdp", "cp", "tp")


def read_mesh(text: str) -> dict[str, int]:
    """The sizes of dimensions of ``fsdp=2,tp=4``, outermost first, in whatever order they are given.

    Raises:
        UsageError: it is written otherwise, or names a dimension twice or one that does not exist.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"--mesh {text}: write dimensions and their numbers of ranks, as in fsdp=2,tp=2")
        if name not in DIMENSIONS:
            raise UsageError(f"--mesh {text}: unknown dimension '{name}': {choose_from(name, DIMENSIONS)}")
        if name in sizes:
            raise UsageError(f"--mesh {text}: {name} is given twice")
        sizes[name] = int(size)
    return {name: sizes[name] for name in DIMENSIONS if name in sizes}


def mesh_text(sizes: dict[str, int]) -> str:
    """The inverse of :func:`read_mesh`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def mesh_ranks(sizes: dict[str, int]) -> int:
    return math.prod(sizes.values())


def outer_dimension(strategy: str) -> str | None:
    """By what groups of ranks that share layers or sequences share the batch: ``ddp`` or ``fsdp``; None if there is one
    group.
    """
    outer, plus, _ = strategy.partition("+")
    return outer if plus else None


def strategy_of_mesh(mesh: str) -> str:
    """The strategy that has the dimensions of a mesh; of those that share sequences, the ring.

    Raises:
        UsageError: none has.
    """
    names = "+".join(read_mesh(mesh))
    strategies = {
        "tp": "tensor",
        "ddp+tp": "ddp+tensor",
        "fsdp+tp": "fsdp+tensor",
        "cp": "context-ring",
        "fsdp+cp": "fsdp+context-ring",
    }
    if names not in strategies:
        raise UsageError(f"--mesh {mesh}: choose tp=N, ddp=M,tp=N, fsdp=M,tp=N, cp=N or fsdp=M,cp=N")
    return strategies[names]
