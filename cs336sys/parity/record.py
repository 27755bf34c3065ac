"""Tensors of one process or rank at each moment of a program, and what a rank says of its wrap."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336sys.parity.collectives import CollectiveLaunch
from cs336sys.parity.optimizers import OptimizerSpec


@dataclass
class Record:
    """State of one process, or one rank, at each moment of a program; tensors on the CPU, by names of the model."""

    # By kind (start, gradient, loss, weight, state, norm, evaluation, buffer) and step from 1, in the order of time. Of
    # the optimizer's state names are ``layers.0.weight exp_avg``, and of numbers empty.
    moments: dict[tuple[str, int], dict[str, Tensor]] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)  # Of modules, in the first forward pass, where watched.
    rates: dict[int, tuple[float, ...]] = field(default_factory=dict)  # Learning rates of groups after each step.

    def add_number(self, kind: str, step: int, value: float) -> None:
        self.moments[kind, step] = {"": torch.tensor(value, dtype=torch.float64)}

    def at(self, kind: str, step: int) -> dict[str, Tensor]:
        """Return the tensors of a moment, none where it was not recorded."""
        return self.moments.get((kind, step), {})

    def numbers(self, kind: str) -> list[float]:
        """Return the numbers of all steps: losses, norms or evaluations."""
        return [tensors[""].item() for (recorded_kind, _), tensors in self.moments.items() if recorded_kind == kind]

    def weights_after(self, step: int) -> dict[str, Tensor]:
        """Return the weights after a step, or before the first."""
        return self.at("weight", step) if step else self.at("start", step=0)


@dataclass
class RankReport:
    """A rank's record of a case, and what it says of the wrap."""

    record: Record  # As far as it came, where the rank failed.
    optimizer: OptimizerSpec | None = None  # The wrap's, to be built in one process.
    optimizer_shapes: dict[str, torch.Size] = field(default_factory=dict)  # Of its parameters, by their names.
    empty_groups: tuple[dict[str, Any], ...] = ()  # Settings of its groups without parameters.
    hides_optimizer: bool = False  # Whether it has an optimizer that cannot be built in one process.
    owned: tuple[str, ...] = ()  # Parameters that the optimizer updates on this rank.
    unmatched: tuple[str, ...] = ()  # Parameters of the wrapped module that have no name in the plain one.
    launches: list[CollectiveLaunch] = field(default_factory=list)  # Its collectives, where they were watched.
    # Less precise ones than asked for, in which its optimizer holds weights (``update weights``) or, where that was
    # watched, it computed (``compute``) or sent (``send``).
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    is_sliced: bool = False  # Whether it holds slices of weights.
    runs_steps: bool = False  # Whether the wrap runs whole steps.
    masks: Tensor | None = None  # Of the first dropout layer, whether each element was dropped.
    failure: str = ""  # The error, in one sentence.
    is_timeout: bool = False  # Whether other ranks did not come.
    applies: bool = True  # False where the case does not apply, and ``failure`` says why.
    at: str = ""  # Step and phase of a failure.


def clone(tensor: Any) -> Tensor:
    """Copy to the CPU: all of a DTensor, and a sparse tensor as a dense one."""
    whole = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return (whole.to_dense() if whole.is_sparse else whole).to(torch.device("cpu"), copy=True)


@contextlib.contextmanager
def captured_outputs(model: torch.nn.Module, outputs: dict[str, Tensor]) -> Iterator[None]:
    """Keep what each module within the model returns in its first call meanwhile, where that is one tensor."""

    def keep_output(name: str, module: Any, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and name not in outputs:
            outputs[name] = clone(output)

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(keep_output, name)))
        yield
