"""Finds the modules that fused kernels can replace in any model, by comparing their outputs instead of their names."""

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

# Attributes in which norms keep their epsilon.
_EPSILONS = ("eps", "variance_epsilon", "epsilon")

# Widths of the trial weights of a SwiGLU. They differ, so that no other order of layers fits.
_WIDTH, _INNER_WIDTH = 4, 6
# Length of the sequence in the trial of a last layer.
_TOKENS = 2


class Gate(NamedTuple):
    """Names of the layers of a module that computes ``down(silu(gate(x)) * up(x))``."""

    gate: str
    up: str
    down: str


def norm_epsilon(module: nn.Module) -> float | None:
    """Return the epsilon of an RMSNorm, or None for any other module.

    The module runs on random rows with random weights, in float32 on the CPU. So Gemma's norm, whose weight is an
    offset from 1, is not taken for an RMSNorm.
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
    """Return the gate, up and down projections of a SwiGLU, or None for any other module.

    The module runs with small random weights instead of its own, in float32 on the CPU.
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
    """Return whether a module computes exactly ``x @ weight.T``, as ``torch.nn.Linear`` without a bias does."""
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
    """Return the last linear layer if the model returns its output unchanged, directly or as ``.logits``.

    The model runs on two tokens, without attention, whose values do not matter here. A model that changes its logits,
    for example by scaling them, has no head.
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
        raise ValueError("this layer does not compute the logits of every token")

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
    """Weights by their names in a module, an input, and the expected output."""

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
    """Return one random row of each size, (sizes, width). The last one reveals modules that clamp large values."""
    return _random((len(sizes), width), seeded) * torch.tensor(sizes, device="cpu")[:, None]


def _random(shape: Any, seeded: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=seeded, device="cpu")


@contextlib.contextmanager
def _tried_apart() -> Iterator[None]:
    """Compute with real tensors inside fake tensor modes, and restore the random state, which dropout advances."""
    with torch.no_grad(), _disable_current_modes(), torch.random.fork_rng(devices=[]):
        yield


def _computes(module: nn.Module, trial: _Trial) -> bool:
    """Return whether the outputs are as expected, in training mode and in evaluation mode."""
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
        # Other shapes or arguments: the module computes something else.
        return False
    if not isinstance(found, Tensor) or found.shape != trial.expected.shape:
        return False
    return all(
        torch.allclose(row, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
        for row, expected in zip(found.float(), trial.expected, strict=True)
    )
