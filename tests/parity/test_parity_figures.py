"""What tolerances, distances, names and disagreements are for small tensors, written down in ``figures.txt``.

Tests of ``verify``, ``ddp`` and ``shard`` show that faults are found and rounding is not; here each norm, bound and
order has a row (tests/written_figures.py).
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

import math
import random

import numpy as np
import torch
from written_figures import figures_test

from cs336sys.parity import rounding, training, weights
from cs336sys.parity.collectives import FUNCTIONAL, LATE_S, OBSERVED, CollectiveLaunch, first_disagreement
from cs336sys.parity.orders import Order
from cs336sys.parity.record import assemble, model_name
from cs336sys.parity.rounding import Rounding, rounding_in, stay_near, tolerance
from cs336sys.parity.step import Checked
from cs336sys.parity.weights import Distance, TensorComparison, WeightDifference, rounding_note
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.training.step import draw_alike, random_state

TINY = choose_size("tiny")
WRAPPERS = (
    *("module", "model", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"),
    *("wrapped", "layer"),
)


def workload(**settings):
    return Workload(TINY, device="cpu", **settings)


def count(*shape):
    """Return 0, 1, 2, ... in this shape."""
    return torch.arange(float(math.prod(shape))).view(shape)


def joined(shape, *rank_parts, groups=None):
    """Return what each rank has of a tensor, as a list, from the parts that ranks hold; None is no part."""
    tensors = [{} if part is None else {"w": part} for part in rank_parts]
    groups = [list(range(len(rank_parts)))] if groups is None else groups
    whole, unknown = assemble(tensors, {"w": torch.Size(shape)}, groups)
    assert unknown <= {"w"}
    return [rank["w"].tolist() if "w" in rank else None for rank in whole], sorted(unknown)


def launch(text, step=0, phase="backward", line="", ranks=()):
    """Return a launch of ``NAME:ELEMENTS:DTYPE``, float32 by default."""
    name, elements, dtype = (*text.split(":"), "float32")[:3]
    return CollectiveLaunch(name, int(elements), dtype, step, phase, line, ranks=ranks)


def disagreement(*rank_programs):
    """Return the sentence on ranks' programs, and the line of the launch, ``RANK.POSITION``.

    A program is written ``NAME:ELEMENTS:DTYPE ...``, with ``@0+1`` behind a launch in a group of ranks 0 and 1.
    """
    rank_launches = []
    for rank, program in enumerate(rank_programs):
        launches = []
        for position, text in enumerate(program.split()):
            of_launch, _, members = text.partition("@")
            ranks = tuple(map(int, members.split("+"))) if members else ()
            launches.append(launch(of_launch, step=position, line=f"{rank}.{position}", ranks=ranks))
        rank_launches.append(launches)
    difference = first_disagreement(rank_launches)
    return None if difference is None else (difference[0], difference[1].line)


def tensors(named):
    return {name: value if isinstance(value, torch.Tensor) else torch.tensor(value) for name, value in named.items()}


def compared(start, expected, trained, allowed=0.25):
    return TensorComparison(tensors(start), tensors(expected), tensors(trained), allowed)


def distances(*arguments, **settings):
    """Return each distance with its ratio, and what is far off."""
    comparison = compared(*arguments, **settings)
    far = {name: [tensor.tolist() for tensor in pair] for name, pair in comparison.far.items()}
    named = {name: (of_name, of_name.relative) for name, of_name in comparison.distances.items()}
    return named | {"far": list(far.items())}


def explained(trained, *others, expected=1.0):
    """Return whether a weight that should go from 0 to ``expected`` is explained by these of the reference."""
    comparison = compared({"w": 0.0}, {"w": expected}, {"w": trained})
    return comparison.explained(lambda name: [torch.tensor(other) for other in others]) == ["w"]


def drawn(step, rank):
    """Return torch's seed, and the first number of Python's and of numpy's generator."""
    draw_alike(step, rank)
    return torch.initial_seed(), random.random(), np.random.random()


def notices(draw):
    """Return whether the state of generators tells that a number was drawn."""
    before = random_state(torch.device("cpu"))
    draw()
    return random_state(torch.device("cpu")) != before


def test_tensors_far_off_stay_as_they_were_compared():
    """Training may go on in the same memory."""
    trained, expected = torch.ones(2), torch.zeros(2)
    comparison = TensorComparison({}, {"w": expected}, {"w": trained}, 0.1)
    trained.fill_(7)
    expected.fill_(8)
    assert [tensor.tolist() for tensor in comparison.far["w"]] == [[1, 1], [0, 0]]


test_figures_are_those_written_down = figures_test(globals())
