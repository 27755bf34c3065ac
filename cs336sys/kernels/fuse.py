"""Puts the fused kernels into a model of ``cs336_basics``' names, its own or anybody's, and takes them out again."""

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from cs336sys.errors import UsageError
from cs336sys.kernels.rms_norm import rms_norm
from cs336sys.kernels.rope import rope
from cs336sys.kernels.swiglu import swiglu

# By the name of a module's class: the attributes that its fused forward pass reads.
ATTRIBUTES = {
    "RMSNorm": ("weight", "eps"),
    "SwiGLU": ("w1", "w2", "w3"),
    "TransformerBlock": ("ln1", "attn", "ln2", "ffn"),
}


class Fused:
    """A model whose modules call fused kernels, until :meth:`undo`."""

    def __init__(self, forwards: dict[nn.Module, Callable]):
        self._modules = tuple(forwards)
        for module, forward in forwards.items():
            # Before the class's own forward pass, which stays as it is.
            module.__dict__["forward"] = types.MethodType(forward, module)

    def undo(self) -> None:
        """The model computes as before; a second call does nothing."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules = ()


def _norm_forward(norm: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    return rms_norm(x, norm.weight, norm.eps, residual)


def _feed_forward(ffn: Any, x: Tensor) -> Tensor:
    return ffn.w2(swiglu(ffn.w1(x), ffn.w3(x)))


def _block_forward(block: Any, x: Tensor) -> Tensor:
    attended = block.attn(block.ln1(x))
    normalized, x = block.ln2(attended, residual=x)
    return x + block.ffn(normalized)


def _rotation_forward(theta: float) -> Callable:
    def forward(rotation: Any, x: Tensor, pos_ids: Tensor | None = None) -> Tensor:
        return rope(x, pos_ids, theta=theta)

    return forward


FORWARDS: dict[str, Callable] = {"RMSNorm": _norm_forward, "SwiGLU": _feed_forward, "TransformerBlock": _block_forward}


def fuse(model: nn.Module) -> Fused:
    """Lets a Transformer's norms, rotations, gates and residual additions run as fused kernels.

    Modules are known by the names of their classes and attributes, those of ``cs336_basics.model``:

    - ``RMSNorm`` (``weight``, ``eps``) computes :func:`rms_norm`,
    - ``SwiGLU`` (``w1``, ``w2``, ``w3``) ``w2(swiglu(w1(x), w3(x)))``,
    - ``TransformerBlock`` (``ln1``, ``attn``, ``ln2``, ``ffn``) adds attention's output in the kernel of ``ln2``,
    - ``RotaryEmbedding``, where there is one, :func:`rope`, with its own ``theta`` or the model's
      ``config["rope_theta"]``.

    Parameters, their names and the state dict stay as they are. Nothing else is touched: which function computes
    attention is decided elsewhere. Fuse before ``torch.compile`` compiles.

    Returns:
        A handle with ``undo()``.

    Raises:
        UsageError: a class or an attribute is missing, or the model is fused already; the model is as it was.
    """
    names = {type(module).__name__ for module in model.modules()}
    for name in ATTRIBUTES:
        if name not in names:
            raise UsageError(
                f"fused kernels replace modules of the classes {', '.join(ATTRIBUTES)}: "
                f"{type(model).__name__} has no {name}"
            )
    forwards: dict[nn.Module, Callable] = {}
    for path, module in model.named_modules():
        name = type(module).__name__
        if name not in ATTRIBUTES and name != "RotaryEmbedding":
            continue
        if "forward" in module.__dict__:
            raise UsageError(f"{path} ({name}) has a forward pass of its own already: undo what put it there first")
        missing = [attribute for attribute in ATTRIBUTES.get(name, ()) if not hasattr(module, attribute)]
        if missing:
            raise UsageError(
                f"{path} ({name}) has no {' and no '.join(missing)}: fused kernels need {', '.join(ATTRIBUTES[name])}"
            )
        forwards[module] = FORWARDS[name] if name in FORWARDS else _rotation_forward(rotation_base(model, path, module))
    return Fused(forwards)


def rotation_base(model: nn.Module, path: str, rotation: nn.Module) -> float:
    """The base of a rotation's angles: its own ``theta``, or the model's ``config["rope_theta"]``.

    Raises:
        UsageError: there is none.
    """
    theta = getattr(rotation, "theta", None)
    if theta is None:
        theta = getattr(model, "config", {}).get("rope_theta")
    if not isinstance(theta, int | float):
        raise UsageError(
            f"{path} (RotaryEmbedding) has no theta, and {type(model).__name__} no config['rope_theta']: "
            "fused kernels need the base of the angles"
        )
    return theta
