"""Tensors of a process or rank at each moment of a program, what a rank says of its wrap, and its slices made whole."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336sys.parity.collectives import CollectiveLaunch
from cs336sys.parity.optimizers import OptimizerSpec
from cs336sys.training.checkpoints import first_tensor


@dataclass
class Record:
    """State of one process, or one rank, at each moment of a program; tensors on the CPU, by names of the model."""

    # By kind (start, gradient, loss, weight, state, norm, evaluation, buffer) and step from 1, in the order of time. Of
    # the optimizer's state names are ``layers.0.weight exp_avg``, and of numbers empty.
    moments: dict[tuple[str, int], dict[str, Tensor]] = field(default_factory=dict)
    # Of modules, in the first forward pass, where watched; under the empty name the first tensor that the model gets.
    outputs: dict[str, Tensor] = field(default_factory=dict)
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
    """Keep what the model gets in its first call meanwhile, and what modules within it return, if one tensor."""

    def keep(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        value = output if name else first_tensor((args, kwargs))
        if isinstance(value, Tensor) and name not in outputs:
            outputs[name] = clone(value)

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(keep, name), with_kwargs=True))
        yield


# Names of modules that wrappers put into the names of parameters.
_WRAPPERS = {"module", "model", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}


def model_name(name: str, plain_names: Sequence[str]) -> str | None:
    """Return the name in the plain model of a parameter of the wrapped one; None if that is not clear."""
    if name in plain_names:
        return name
    cleaned = _without_wrappers(name)
    # If no name is the same, a part of the model was wrapped, or the model is a part of the wrapped module.
    candidates = [plain for plain in plain_names if _without_wrappers(plain) == cleaned] or [
        plain for plain in plain_names if plain.endswith(f".{cleaned}") or cleaned.endswith(f".{plain}")
    ]
    return candidates[0] if len(candidates) == 1 else None


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def assemble(
    rank_tensors: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, torch.Size], groups: Sequence[Sequence[int]]
) -> tuple[list[dict[str, Tensor]], set[str]]:
    """Return, for each rank, whole tensors of which it has a part, and the names of those that do not fit together.

    Args:
        rank_tensors: slices or whole tensors of each rank, by name.
        shapes: of whole tensors.
        groups: ranks that may hold slices of one tensor, the smallest groups first.
    """
    whole: list[dict[str, Tensor]] = [{} for _ in rank_tensors]
    unknown = set()
    for name, shape in shapes.items():
        for rank, tensors in enumerate(rank_tensors):
            if name not in tensors:
                continue
            joined = tensors[name] if tensors[name].shape == shape else None
            for group in groups:
                if rank in group and joined is None:
                    joined = _join_slices([rank_tensors[other].get(name) for other in group], shape)
            if joined is None:
                unknown.add(name)
            else:
                whole[rank][name] = joined
    return whole, unknown


def _join_slices(parts: Sequence[Tensor | None], shape: torch.Size) -> Tensor | None:
    """Join flat pieces, or slices along one dimension, in the order of ranks; None if they do not make ``shape``."""
    present = [part for part in parts if part is not None]
    # A rank without any rows may have an empty tensor of one dimension, whatever dimensions the whole has.
    dimensions = {part.dim() for part in present if part.numel() or part.dim() > 1}
    if dimensions <= {1} and len(shape) != 1:
        flat = torch.cat([part.flatten() for part in present])
        # Flattened parameters are padded at the end until ranks have equal pieces: by fewer elements than ranks.
        return flat[: shape.numel()].view(shape) if shape.numel() <= len(flat) < shape.numel() + len(parts) else None
    if any(part.dim() != len(shape) for part in present):
        return None
    for dimension in range(len(shape)):
        total = sum(part.shape[dimension] for part in present)
        # Slices along this dimension have the whole's sizes in all others.
        if all((*part.shape[:dimension], total, *part.shape[dimension + 1 :]) == shape for part in present):
            return torch.cat(present, dimension)
    return None
