"""Finds the modules of anybody's model that fused kernels can compute, by what they compute, not by their names."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from cs336sys.kernels.rms_norm import reference_rms_norm
from cs336sys.kernels.swiglu import reference_swiglu

# Attributes that hold what a norm adds to the mean square.
_EPSILONS = ("eps", "variance_epsilon", "epsilon")

# Width and inner width of what a gate is tried with: different, so that no other order of layers fits.
_WIDTH, _INNER_WIDTH = 4, 6
# Of the sequence that a last layer is tried with.
_TOKENS = 2


class Gate(NamedTuple):
    """Names of the layers of a module that computes ``down(silu(gate(x)) * up(x))``."""

    gate: str
    up: str
    down: str


def norm_epsilon(module: nn.Module) -> float | None:
    """What an RMSNorm adds to the mean square; None where the module computes anything else.

    It is tried on random rows with random weights, in float32 on the CPU: an RMSNorm whose weight is an offset from 1,
    such as Gemma's, is none.
    """
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or any(module.children()):
        return None
    with _tried_apart():
        for name in _EPSILONS:
            eps = getattr(module, name, None)
            if isinstance(eps, float) and _computes(module, _norm_trial(len(parameters["weight"]), eps)):
                return eps
    return None


def gate_layers(module: nn.Module) -> Gate | None:
    """Which layers of a module are gate, up and down projection; None where it computes anything else.

    It is tried with small random weights in the place of its own, in float32 on the CPU.
    """
    layers = {name: child for name, child in module.named_children() if is_linear(child)}
    if len(layers) != 3 or len(list(module.parameters())) != 3:
        return None
    with _tried_apart():
        for gate in itertools.starmap(Gate, itertools.permutations(layers)):
            if _computes(module, _gate_trial(gate)):
                return gate
    return None


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes ``x @ weight.T`` and nothing else: ``torch.nn.Linear`` or anybody's, tried."""
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 2 or any(module.children()):
        return False
    if "forward" in module.__dict__:
        return False
    if type(module) is nn.Linear:
        return True
    with _tried_apart():
        return _computes(module, _linear_trial())


def find_head(model: nn.Module) -> nn.Module | None:
    """The last layer, if the model returns what it computes: as it is, or as ``.logits``.

    Tried by a forward pass of two tokens, without attention, whose values do not matter here. A model that does
    something with its logits, such as scaling them, has no head.
    """
    layers = [module for module in model.modules() if is_linear(module)]
    if not layers:
        return None
    head = layers[-1]
    weight = head.get_parameter("weight")
    marks: list[Tensor] = []

    def mark(hidden: Tensor) -> Tensor:
        if hidden.shape == (1, _TOKENS, weight.shape[1]):
            marks.append(hidden.new_zeros(()))
            return marks[-1]
        raise ValueError("logits of something else than each token")

    def no_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return query.new_zeros((*query.shape[:-1], value.shape[-1]))

    head.__dict__["forward"] = mark
    device = weight.device
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", no_attention),
        ):
            output = model(torch.zeros((1, _TOKENS), dtype=torch.int64, device=device))
    except Exception:
        return None
    finally:
        del head.__dict__["forward"]
    logits = getattr(output, "logits", output)
    return head if len(marks) == 1 and logits is marks[0] else None


class _Trial(NamedTuple):
    """Weights by their names in a module, an input, and what should come out."""

    weights: dict[str, Tensor]
    x: Tensor
    expected: Tensor


def _norm_trial(width: int, eps: float) -> _Trial:
    seeded = torch.Generator("cpu").manual_seed(0)
    weight = _random(width, seeded)
    # In the first row eps counts as much as the mean square.
    x = _rows(width, seeded, (eps**0.5, 1.0, 1e3))
    expected = reference_rms_norm(x, weight, eps)
    assert isinstance(expected, Tensor)
    return _Trial({"weight": weight}, x, expected)


def _gate_trial(layers: Gate) -> _Trial:
    seeded = torch.Generator("cpu").manual_seed(0)
    gate, up = (_random((_INNER_WIDTH, _WIDTH), seeded) for _ in range(2))
    down, x = _random((_WIDTH, _INNER_WIDTH), seeded), _rows(_WIDTH, seeded)
    weights = {f"{name}.weight": weight for name, weight in zip(layers, (gate, up, down), strict=True)}
    return _Trial(weights, x, reference_swiglu(x @ gate.T, x @ up.T) @ down.T)


def _linear_trial() -> _Trial:
    seeded = torch.Generator("cpu").manual_seed(0)
    weight, x = _random((_INNER_WIDTH, _WIDTH), seeded), _rows(_WIDTH, seeded)
    return _Trial({"weight": weight}, x, x @ weight.T)


def _rows(width: int, seeded: torch.Generator, sizes: tuple[float, ...] = (0.1, 1.0, 1e3)) -> Tensor:
    """A row of each size, (sizes, width): what cuts off large values is seen in the last."""
    return _random((len(sizes), width), seeded) * torch.tensor(sizes, device="cpu")[:, None]


def _random(shape: Any, seeded: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=seeded, device="cpu")


@contextlib.contextmanager
def _tried_apart() -> Iterator[None]:
    """Compute with values where a step is traced without, and leave random numbers as they are: dropout draws some."""
    with torch.no_grad(), _disable_current_modes(), torch.random.fork_rng(devices=[]):
        yield


def _computes(module: nn.Module, trial: _Trial) -> bool:
    """Return whether it does in training and out of it."""
    modes = {part: part.training for part in module.modules()}
    try:
        return all(_agrees(module.train(mode), trial) for mode in (True, False))
    finally:
        for part, mode in modes.items():
            part.training = mode


def _agrees(module: nn.Module, trial: _Trial) -> bool:
    try:
        found = torch.func.functional_call(module, trial.weights, (trial.x,))
    except Exception:
        # Shapes or arguments that do not fit: it is something else.
        return False
    if not isinstance(found, Tensor) or found.shape != trial.expected.shape:
        return False
    return all(
        torch.allclose(row, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
        for row, expected in zip(found.float(), trial.expected, strict=True)
    )
