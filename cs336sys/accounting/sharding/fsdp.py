"""Fully sharded training on paper: who holds which rows, what is gathered, and how many bytes are sent. No torch.

``parallel.fsdp`` lays out memory by the same functions of ``partition``: it allocates the bytes counted here. Source:
ZeRO stage 3 (https://arxiv.org/abs/1910.02054, sections 5.3 and 7.2.2).

Units of a ``BasicsTransformerLM`` are its token embedding, each block, and its LM head; norms are replicated. ``N`` is
the number of parameters, ``W`` that of ranks, ``e`` the bytes of a gathered element: 4 in fp32, 2 in half precision.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cs336sys.accounting.flops import parameter_shapes
from cs336sys.accounting.memory import TrainingState
from cs336sys.accounting.sharding.partition import gathered_layout, own_rows, padded_bytes
from cs336sys.settings.sizes import ModelSize

# Of parameters, before fsdp cuts them, by name.
Shapes = Mapping[str, tuple[int, ...]]

# Bytes of a parameter, of its gradient, of both moments, and of the weight's lower bits kept next to the parameter,
# by the name of workload.STATE_DTYPES. In bf16 and split slices are in bf16 themselves.
STATE_BYTES = {"fp32": (4, 4, 8, 0), "bf16": (2, 2, 4, 0), "split": (2, 2, 8, 2)}


def sharded_units(shapes: Shapes) -> dict[str, list[tuple[int, ...]]]:
    """Group the shapes with several dimensions, those of sharded parameters, by unit in the order of use."""
    units: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            parts = name.split(".")
            units.setdefault(".".join(parts[:2]) if parts[0] == "layers" else parts[0], []).append(shape)
    return units


def replicated_elements(shapes: Shapes) -> int:
    """Count the elements of the norms, which every rank holds whole."""
    return sum(shape[0] for shape in shapes.values() if len(shape) == 1)


# A search for what fits asks for the same few models again and again, at each moment of each step.
@functools.lru_cache(maxsize=1024)
def fully_sharded_state(size: ModelSize, rank: int, world_size: int, state_dtype: str = "fp32") -> TrainingState:
    """Return the bytes that a rank holds between backward pass and step: its rows, their gradients, AdamW's moments.

    In fp32 these are ``16 N / W`` where the ranks divide all rows and norms are few. Weights in half precision are cast
    as they are gathered, so no copy of them is kept. ``state_dtype`` is a name of :data:`STATE_BYTES`.
    """
    shapes = parameter_shapes(size)
    matrices = [shape for shape in shapes.values() if len(shape) > 1]
    elements = replicated_elements(shapes)
    elements += sum(len(own_rows(shape[0], rank, world_size)) * math.prod(shape[1:]) for shape in matrices)
    # Lower bits of weights take the place of master parameters.
    return TrainingState(*(elements * element_bytes for element_bytes in STATE_BYTES[state_dtype]))  # In field order.


@functools.lru_cache(maxsize=1024)
def gathered_bytes(size: ModelSize, element_bytes: int, world_size: int) -> Mapping[str, int]:
    """Return the bytes of each unit while it is gathered, by the unit's name."""
    return {
        name: gathered_layout([(shape, element_bytes) for shape in shapes], world_size)[1]  # All bytes of the unit.
        for name, shapes in sharded_units(parameter_shapes(size)).items()
    }


class FullShardingPeak(NamedTuple):
    """An upper bound of what a rank holds in a step besides its state and activations, in bytes."""

    gathered: int  # Weights in use, fetched ahead, and staying.
    whole_gradients: int  # Of the unit whose backward pass runs, and of the one before it, which are being averaged.
    received: int  # Where those arrive.


@functools.lru_cache(maxsize=1024)
def fully_sharded_peak(
    size: ModelSize, element_bytes: int, world_size: int, *, prefetch: int = 1, keep_gathered: int = 0
) -> FullShardingPeak:
    """Bound the bytes of gathered weights, of whole gradients and of those received in a step.

    Gradients in half precision, or of rows that do not divide among the ranks, are received from each rank apart: as
    many bytes as the whole gradient. The mean of other fp32 gradients arrives right in the rank's slice.
    """
    units = sharded_units(parameter_shapes(size)).values()
    gradient_bytes = [element_bytes * sum(map(math.prod, shapes)) for shapes in units]
    buffered = [[shape for shape in shapes if element_bytes < 4 or shape[0] % world_size] for shapes in units]
    buffer_bytes = [sum(padded_bytes(shape, element_bytes, world_size) for shape in shapes) for shapes in buffered]
    unit_bytes = list(gathered_bytes(size, element_bytes, world_size).values())
    # A unit in use and those fetched ahead in either direction, or at the last unit those that stay until the backward
    # pass has come through them: what it fetches ahead is among them.
    at_last = 1 + max(prefetch, keep_gathered)
    gathered = max(_widest(unit_bytes, 1 + prefetch), sum(unit_bytes[-at_last:]))
    # While a unit's backward pass runs, the gradients of the one before it are still being averaged.
    whole_gradients = _widest(gradient_bytes, count=2)
    return FullShardingPeak(gathered, whole_gradients, received=max(buffer_bytes))


def all_gathered_bytes(shapes: Shapes, element_bytes: int, world_size: int, keep_gathered: int = 0) -> int:
    """Count the bytes of whole weights that all-gathers of a step return, with or without activation checkpointing.

    Every unit is gathered forward and backward but the last, which is kept between, and those before it that are, too:
    ``2 e N`` less one LM head and ``keep_gathered`` blocks.
    """
    units = sharded_units(shapes).values()
    gathers = [sum(padded_bytes(shape, element_bytes, world_size) for shape in unit) for unit in units]
    return 2 * sum(gathers) - sum(gathers[-1 - keep_gathered :])


def most_sent_bytes(shapes: Shapes, element_bytes: int, world_size: int, keep_gathered: int = 0) -> float:
    """Return the bytes that the last rank sends in a step: it keeps the fewest rows of gradients, and sends the most.

    Of all-gathers ``(W - 1) / W``, of the all-reduce of the norms' fp32 gradients twice that, and of reduce-scatters
    (in half precision an exchange of as many bytes) the rows that belong to others.
    """
    gathered = all_gathered_bytes(shapes, element_bytes, world_size, keep_gathered)
    matrices, last = [shape for shape in shapes.values() if len(shape) > 1], world_size - 1
    elements = sum((shape[0] - len(own_rows(shape[0], last, world_size))) * math.prod(shape[1:]) for shape in matrices)
    reduced = 2 * 4 * replicated_elements(shapes)
    return (world_size - 1) / world_size * (gathered + reduced) + element_bytes * elements


def _widest(values: Sequence[int], count: int) -> int:
    """Return the largest sum of so many neighbours, or of all where there are fewer."""
    return max(sum(values[start : start + count]) for start in range(max(1, len(values) - count + 1)))
